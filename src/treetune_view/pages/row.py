"""One row of a data set, whole; with the answers to it, where its difficulty was estimated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from treetune_view.page import Page, View
from treetune_view.pages.rows import mark
from treetune_view.report.text import SHOWN, cut, visible
from treetune_view.store.estimates import answers_to
from treetune_view.store.whole_rows import whole_row

ASKED = ("prompt", "raw_prompt", "problem", "question", "input", "asked")
GOLD = ("reward_model", "gold", "answer", "ground_truth", "solution", "target")
"""Names of fields that stand first: what is asked, and what is right."""

WAYS = ("text", "rendered")


@dataclass(frozen=True)
class Field:
    """A field of a row. `text` is None for what isn't text, and then `value` is shown as JSON."""

    name: str
    value: Any
    messages: list[tuple[str, str]]
    text: str | None


def show(view: View) -> Response:
    """`?data=` (its name), `?row=` (from 0), `?as=rendered` (Markdown and mathematics), `?all=1`."""
    data = view.store.data.one(view.text("data"))
    table = view.store.data.table(data)
    number = view.integer("row", 0)
    row = whole_row(table, number)
    answers = answers_to(data.path, number) if data.kind == "estimate" else []
    everything = view.choice("all", ("", "1"))
    most = None if everything else SHOWN

    def shortened(text: object) -> str:
        kept, left_out = cut(visible(text), most if most is not None else len(visible(text)))
        return kept + (f"\n… {left_out:,} more characters" if left_out else "")

    return view.render(
        "row.html",
        data=data,
        number=number,
        total=table.total,
        groups=_groups(row),
        way=view.choice("as", WAYS),
        answers=answers,
        has_more=not everything and _longest([row, answers]) > SHOWN,
        shortened=shortened,
    )


def _groups(row: Mapping[str, Any]) -> dict[str, list[Field]]:
    """Fields by what they are, in the order in which people look for them."""
    titles = {"Asked": ASKED, "Right would be": GOLD}
    made = {
        title: [_field(name, row[name]) for name in names if name in row] for title, names in titles.items()
    }
    made["Everything else"] = [_field(name, value) for name, value in row.items() if name not in ASKED + GOLD]
    return {title: fields for title, fields in made.items() if fields}


def _field(name: str, value: Any) -> Field:
    messages = []
    if isinstance(value, list) and value and all(_is_message(one) for one in value):
        messages = [(str(one["role"]), one["content"]) for one in value]
    return Field(name, value, messages, value if isinstance(value, str) else None)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value and isinstance(value.get("content"), str)


def _longest(value: Any) -> int:
    """Characters of the longest text in it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return max(map(_longest, value.values()), default=0)
    return max(map(_longest, value), default=0) if isinstance(value, list) else 0


PAGE = Page("/row", "Row", show, mark=mark)
