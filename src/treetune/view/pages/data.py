"""Prepared data sets that are known; the rows of one, in pages, searched, filtered, sorted, with histograms
of their numbers; and one row, whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from treetune.view.page import Page, PageRequest, paged
from treetune.view.pages.answers import SIZES, question_of, rendered_histograms
from treetune.view.store.folders import digest
from treetune.view.store.queries import parsed
from treetune.view.store.readers import answers_to
from treetune.view.store.tables import BEGINNING, CHARACTERS, ROW, DataSetTable
from treetune.view.text import SHOWN, cut, visible

LISTED = 100
"""Data sets of one page."""

KINDS = {
    "parquet": "Parquet",
    "lines": "JSON lines",
    "saved": "saved data set",
    "table": "W&B table",
    "estimate": "difficulty",
}

MOST_SHOWN = 10
"""Columns of the list; a row by itself has all."""

SHORT = 24
"""Characters of texts that aren't drawn as such: names, answers."""

DRAWN = 4
"""Histograms, where the address names none."""
USUAL = ("pass_rate", "reward", "score", "difficulty", "tokens", "answers")
"""Parts of the names of numbers that are drawn unasked; the first go first."""
LENGTHS = ("asked", "prompt", "raw_prompt", "problem", "question", "input", "text", "output", "answer")
"""Columns of text whose lengths are drawn unasked."""

GROUPS = {
    "Asked": ("prompt", "raw_prompt", "problem", "question", "input", "asked"),
    "Right would be": ("reward_model", "gold", "answer", "ground_truth", "solution", "target"),
}
"""Names of fields of a row that stand first: the problem, and the gold answer."""


# Data sets


def show(view: PageRequest) -> Response:
    """`?search=` in names, `?page=`."""
    search = view.text("search").casefold()
    sets = [one for one in view.store.data.all() if search in f"{one.name} {KINDS[one.kind]}".casefold()]
    return view.render("data.html", sets=paged(view, sets, LISTED), kinds=KINDS)


# Rows


def show_rows(view: PageRequest) -> Response:
    """`?data=` (its name), `?search=` in texts, `?where=` (conditions), `?sort=`, `?order=down`, `?size=`,
    `?page=`, `?histogram=` (of this column alone)."""
    data = view.store.data.one(view.text("data"))
    table = view.store.data.table(data)
    question = question_of(view, parsed(view.text("where"), table.kinds, "rows"))
    drawn = _drawn(view, table)
    query = view.here().partition("?")[2]
    # The first columns of the file, and what is asked about.
    asked = [*(one.column for one in question.filters), question.sort]
    shown = [name for name in dict.fromkeys([*table.names()[:MOST_SHOWN], *asked]) if name in table.kinds]
    result = table.ask(question, shown)
    return view.render(
        "rows.html",
        data=data,
        table=table,
        kind=KINDS[data.kind],
        question=question,
        result=result,
        row_number=ROW,
        shown=shown,
        hidden=len(table.names()) - len([name for name in shown if name in table.names()]),
        pages=max(1, -(-result.total // question.size)),
        sizes=SIZES,
        beginning=BEGINNING,
        histograms=f"/histograms?{query}" if drawn else "",
        drawn_as=digest(data.mark, query),
        long={name for name in shown for row in result.rows if len(str(row[name] or "")) > SHORT},
        address_of=lambda row: view.address("/row", data=data.name, row=row[ROW]),
    )


def show_histograms(view: PageRequest) -> Response:
    """Takes the address of the rows: the histograms above the list come after it, as they may take
    seconds."""
    data = view.store.data.one(view.text("data"))
    table = view.store.data.table(data)
    question = question_of(view, parsed(view.text("where"), table.kinds, "rows"))
    drawn = table.histograms(_drawn(view, table), question.filters, question.search)
    # What is the same in all rows is drawn for who asks for it.
    chosen = [one for one in drawn if view.text("histogram") or len(one.bars) > 1]
    return rendered_histograms(view, chosen, "rows", data.name)


def _drawn(view: PageRequest, table: DataSetTable) -> Sequence[str]:
    """Returns the columns whose histograms are drawn; where the address names none, rates first, then
    lengths. Raises ValueError for one that isn't numeric."""
    if chosen := view.text("histogram"):
        table.check_numeric([chosen])
        return [chosen]
    numbers = table.numeric()
    plain = [name for name in numbers if not name.endswith(CHARACTERS)]
    usual = [name for word in USUAL for name in plain if word in name.casefold()]
    lengths = [name + CHARACTERS for name in LENGTHS if name + CHARACTERS in numbers]
    return list(dict.fromkeys([*usual[: DRAWN - 1], *lengths, *usual, *plain]))[:DRAWN]


# One row


def show_row(view: PageRequest) -> Response:
    """`?data=` (its name), `?row=` (from 0), `?as=rendered` (Markdown and mathematics), `?all=1`; with the
    answers to it, where its difficulty was estimated."""
    data = view.store.data.one(view.text("data"))
    table = view.store.data.table(data)
    number = view.integer("row", 0)
    row = table.row(number)
    answers = answers_to(data.path, number) if data.kind == "estimate" else []
    everything = view.choice("all", ("", "1"))

    def shortened(text: object) -> str:
        written = visible(text)
        kept, left_out = cut(written, len(written) if everything else SHOWN)
        return kept + (f"\n… {left_out:,} more characters" if left_out else "")

    def messages(value: Any) -> list[tuple[str, str]]:
        """Returns roles and contents where a field is a conversation."""
        if not isinstance(value, list) or not all(
            isinstance(one, Mapping) and "role" in one and isinstance(one.get("content"), str)
            for one in value
        ):
            return []
        return [(str(one["role"]), one["content"]) for one in value]

    named = [name for names in GROUPS.values() for name in names]
    groups = {title: [name for name in names if name in row] for title, names in GROUPS.items()}
    groups["Everything else"] = [name for name in row if name not in named]
    return view.render(
        "row.html",
        data=data,
        number=number,
        total=table.total,
        groups={
            title: [(name, row[name], messages(row[name])) for name in names]
            for title, names in groups.items()
            if names
        },
        form=view.choice("as", ("text", "rendered")),
        answers=answers,
        has_more=not everything and _longest([row, answers]) > SHOWN,
        shortened=shortened,
    )


def _longest(value: Any) -> int:
    """Returns the characters of the longest text in a value."""
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return max(map(_longest, inner), default=0)


def mark(view: PageRequest) -> str:
    sets = [(one.name, one.known_from, one.mark) for one in view.store.data.all()]
    return digest(sets, view.store.mark(view.store.runs()))


def mark_of_rows(view: PageRequest) -> str:
    data = view.store.data.one(view.text("data"))
    return digest(data.name, data.mark, view.request.url.query)


PAGES = (
    Page("/data", "Data", show, place="top", key="d", mark=mark),
    Page("/rows", "Rows", show_rows, mark=mark_of_rows),
    Page("/histograms", "Histograms", show_histograms, mark=mark_of_rows),
    Page("/row", "Row", show_row, mark=mark_of_rows),
)
