"""The rows of a data set: in pages, searched, filtered, sorted, with histograms of their numbers."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response

from treetune_view.page import Page, View, digest
from treetune_view.pages.answers import SIZES, parsed
from treetune_view.pages.data import KINDS
from treetune_view.store.histograms import Bar, Histogram, check_numeric, histograms
from treetune_view.store.questions import Question
from treetune_view.store.tables import BEGINNING, CHARACTERS, ROW, Table

MOST_SHOWN = 10
"""Columns of the list; a row by itself has all."""

SHORT = 24
"""Characters of texts that aren't drawn as such: names, answers."""

DRAWN = 4
"""Histograms, where the address names none."""
TELLING = ("pass_rate", "reward", "score", "difficulty", "tokens", "answers")
"""What the names of numbers that are drawn unasked have in them; the first go first."""
ASKED = ("asked", "prompt", "raw_prompt", "problem", "question", "input", "text", "output", "answer")
"""Columns of text whose lengths are drawn unasked."""


def show(view: View) -> Response:
    """`?data=` (its name), `?search=` in texts, `?where=` (conditions), `?sort=`, `?order=down`, `?size=`,
    `?page=`, `?histogram=` (of this column alone)."""
    data = view.store.data.one(view.text("data"))
    table = view.store.data.table(data)
    question = _question(view, table)
    chosen = _drawn(view, table)
    query = view.here().partition("?")[2]
    shown = _shown(table, question)
    found = table.ask(question, shown)
    return view.render(
        "rows.html",
        data=data,
        table=table,
        kind=KINDS[data.kind],
        question=question,
        found=found,
        row_number=ROW,
        shown=shown,
        hidden=len(table.names()) - len([name for name in shown if name in table.names()]),
        pages=max(1, -(-found.total // question.size)),
        sizes=SIZES,
        beginning=BEGINNING,
        histograms=f"/histograms?{query}" if chosen else "",
        drawn_as=digest(data.mark, query),
        long={name for name in shown for row in found.rows if len(str(row[name] or "")) > SHORT},
        address_of=lambda row: view.address("/row", data=data.name, row=row[ROW]),
    )


def show_histograms(view: View) -> Response:
    """As `show`: the histograms above the list, which come after it, as they may take seconds."""
    data = view.store.data.one(view.text("data"))
    table = view.store.data.table(data)
    question = _question(view, table)
    drawn = histograms(table, _drawn(view, table), question.filters, question.search)
    # htmx says that it asks; a person who opens the address gets a whole page.
    template = "histograms.html" if "HX-Request" in view.request.headers else "histograms_page.html"
    return view.render(
        template,
        data=data,
        # What is the same in all rows is drawn for who asks for it.
        histograms=[one for one in drawn if view.text("histogram") or len(one.bars) > 1],
        with_bar=lambda own, bar: _with_bar(view, own, bar),
    )


def _question(view: View, table: Table) -> Question:
    return Question(
        filters=tuple(parsed(view.text("where"), table.kinds, "rows")),
        search=view.text("search"),
        sort=view.text("sort"),
        descending=view.choice("order", ("up", "down")) == "down",
        page=view.integer("page", 1, least=1),
        size=int(view.choice("size", SIZES)),
    )


def _drawn(view: View, table: Table) -> list[str]:
    """The columns whose histograms are drawn. Raises ValueError for one that isn't numeric."""
    chosen = view.text("histogram")
    check_numeric(table, [chosen] if chosen else [])
    return [chosen] if chosen else usual(table)


def usual(table: Table) -> list[str]:
    """Columns of numbers that are drawn where the address names none: rates first, then lengths."""
    numbers = table.numeric()
    plain = [name for name in numbers if not name.endswith(CHARACTERS)]
    telling = [name for word in TELLING for name in plain if word in name.casefold()]
    lengths = [name + CHARACTERS for name in ASKED if name + CHARACTERS in numbers]
    return list(dict.fromkeys([*telling[: DRAWN - 1], *lengths, *telling, *plain]))[:DRAWN]


def _shown(table: Table, question: Question) -> list[str]:
    """The columns of the list: the first of the file, and what is asked about."""
    asked = [one.column for one in question.filters] + [question.sort]
    names = dict.fromkeys([*table.names()[:MOST_SHOWN], *asked])
    return [name for name in names if name in table.kinds]


def _with_bar(view: View, own: Histogram, bar: Bar) -> str:
    """The address of the rows that a bar counts."""
    inside = f"{own.column} >= {bar.low!r}; {own.column} < {bar.high!r}"
    before: Sequence[str] = [part for part in [view.text("where").strip()] if part]
    return PAGE.path + view.here(where="; ".join([*before, inside]), page=None).removeprefix(view.page.path)


def mark(view: View) -> str:
    data = view.store.data.one(view.text("data"))
    return digest(data.name, data.mark, view.request.url.query)


PAGE = Page("/rows", "Rows", show, mark=mark)
HISTOGRAMS = Page("/histograms", "Histograms", show_histograms, mark=mark)
