"""The pages of prepared data sets: the list, the rows of a set with histograms, and a whole row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from treetune.view.page import Page, PageRequest, paged
from treetune.view.pages.answers import SIZES, make_question, render_histograms
from treetune.view.store.folders import digest
from treetune.view.store.queries import parse_conditions
from treetune.view.store.readers import answers_to
from treetune.view.store.tables import BEGINNING, CHARACTERS, ROW, DataSetTable
from treetune.view.text import SHOWN, cut, visible

LISTED = 100
"""The number of data sets of a page."""

KINDS = {
    "parquet": "Parquet",
    "lines": "JSON lines",
    "saved": "saved data set",
    "table": "W&B table",
    "estimate": "difficulty",
}

MOST_SHOWN = 10
"""The most columns of the list. The page of a row has all."""

SHORT = 24
"""The most characters of texts in narrow columns, such as names and short answers."""

DRAWN = 4
"""The number of histograms that are drawn by default."""
USUAL = ("pass_rate", "reward", "score", "difficulty", "tokens", "answers")
"""Parts of names: numeric columns with one of them are drawn by default, in this order."""
LENGTHS = ("asked", "prompt", "raw_prompt", "problem", "question", "input", "text", "output", "answer")
"""The columns of text whose lengths are drawn by default."""

GROUPS = {
    "Prompt": ("prompt", "raw_prompt", "problem", "question", "input", "asked"),
    "Expected": ("reward_model", "gold", "answer", "ground_truth", "solution", "target"),
}
"""The fields of a row that are shown first: the problem, and the reference answer."""


# Data sets


def show(view: PageRequest) -> Response:
    """`?search=` in names, `?page=`."""
    search = view.text("search").casefold()
    sets = [data for data in view.store.data.all() if search in f"{data.name} {KINDS[data.kind]}".casefold()]
    return view.render("data.html", sets=paged(view, sets, LISTED), kinds=KINDS)


# Rows


def show_rows(view: PageRequest) -> Response:
    """`?data=` (its name), `?search=` in texts, `?where=` (conditions), `?sort=`, `?order=down`, `?size=`,
    `?page=`, `?histogram=` (of this column alone)."""
    data = view.store.data.named(view.text("data"))
    table = view.store.data.table(data)
    question = make_question(view, parse_conditions(view.text("where"), table.kinds, "rows"))
    drawn = _drawn(view, table)
    query = view.here().partition("?")[2]
    # The first columns of the file, and those of filters and order.
    columns = [*table.names()[:MOST_SHOWN], *(item.column for item in question.filters), question.sort]
    shown = [name for name in dict.fromkeys(columns) if name in table.kinds]
    result = table.ask(question, shown)
    long_columns = set()  # those with a long text in one of the shown rows
    for row in result.rows:
        long_columns |= {name for name in shown if len(str(row[name] or "")) > SHORT}
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
        # Names the element with the histograms. They are loaded again when the file or the address changes.
        drawn_as=digest(data.mark, query),
        long=long_columns,
        address_of=lambda row: view.address("/row", data=data.name, row=row[ROW]),
    )


def show_histograms(view: PageRequest) -> Response:
    """Draws histograms for the page of rows.

    The page of rows (`show_rows`) loads the histograms after its rows, since histograms may take seconds. The
    address has the same parameters as that of the page of rows.
    """
    data = view.store.data.named(view.text("data"))
    table = view.store.data.table(data)
    question = make_question(view, parse_conditions(view.text("where"), table.kinds, "rows"))
    drawn = table.histograms(_drawn(view, table), question.filters, question.search)
    # A column that is the same in all rows is only drawn if it was chosen.
    chosen = [histogram for histogram in drawn if view.text("histogram") or len(histogram.bars) > 1]
    return render_histograms(view, chosen, "rows", data.name)


def _drawn(view: PageRequest, table: DataSetTable) -> Sequence[str]:
    """Returns the columns whose histograms are drawn.

    This is the column that the address names. If the address names none, it is the first `DRAWN` numeric
    columns: usual ones such as rates first, then the lengths of texts, then all others.

    Raises ValueError for a column that isn't numeric.
    """
    chosen = view.text("histogram")
    if chosen:
        table.check_numeric([chosen])
        return [chosen]
    numbers = table.numeric()
    # The numeric columns of the data set itself, without the lengths of its texts.
    plain = [name for name in numbers if not name.endswith(CHARACTERS)]
    usual: list[str] = []
    for part in USUAL:
        usual += [name for name in plain if part in name.casefold()]
    lengths = [name + CHARACTERS for name in LENGTHS if name + CHARACTERS in numbers]
    # Only `DRAWN - 1` usual columns come before the lengths. So a length is drawn, if there is one.
    by_priority = dict.fromkeys([*usual[: DRAWN - 1], *lengths, *usual, *plain])
    return list(by_priority)[:DRAWN]


# One row


def show_row(view: PageRequest) -> Response:
    """`?data=` (its name), `?row=` (from 0), `?as=rendered` (Markdown and mathematics), `?all=1`.

    Shows also the answers to the row, where its difficulty was estimated.
    """
    data = view.store.data.named(view.text("data"))
    table = view.store.data.table(data)
    number = view.integer("row", 0)
    row = table.row(number)
    answers = answers_to(data.path, number) if data.kind == "estimate" else []
    everything = view.choice("all", ("", "1"))

    def shortened(text: object) -> str:
        shown = visible(text)
        beginning, left_out = cut(shown, len(shown) if everything else SHOWN)
        return beginning + (f"\n… {left_out:,} more characters" if left_out else "")

    def messages(value: Any) -> list[tuple[str, str]]:
        """Returns roles and contents where a field is a conversation."""
        if not isinstance(value, list):
            return []
        turns = []
        for message in value:
            if not isinstance(message, Mapping) or "role" not in message:
                return []
            if not isinstance(message.get("content"), str):
                return []
            turns.append((str(message["role"]), message["content"]))
        return turns

    names_by_group: dict[str, list[str]] = {}
    other_names = list(row)
    for title, names in GROUPS.items():
        names_by_group[title] = [name for name in names if name in row]
        other_names = [name for name in other_names if name not in names]
    names_by_group["Other fields"] = other_names
    groups = {}
    for title, names_of_group in names_by_group.items():
        if names_of_group:
            groups[title] = [(name, row[name], messages(row[name])) for name in names_of_group]
    return view.render(
        "row.html",
        data=data,
        number=number,
        total=table.total,
        groups=groups,
        form=view.choice("as", ("text", "rendered")),
        answers=answers,
        has_more=not everything and _longest([row, answers]) > SHOWN,
        shortened=shortened,
    )


def _longest(value: Any) -> int:
    """Returns the number of characters of the longest text in a value."""
    if isinstance(value, str):
        return len(value)
    members: Iterable[object] = ()
    if isinstance(value, Mapping):
        members = value.values()
    elif isinstance(value, list):
        members = value
    return max(map(_longest, members), default=0)


def mark(view: PageRequest) -> str:
    sets = [(data.name, data.known_from, data.mark) for data in view.store.data.all()]
    return digest(sets, view.store.mark(view.store.runs()))


def mark_of_rows(view: PageRequest) -> str:
    data = view.store.data.named(view.text("data"))
    return digest(data.name, data.mark, view.request.url.query)


PAGES = (
    Page("/data", "Data", show, place="top", key="d", mark=mark),
    Page("/rows", "Rows", show_rows, mark=mark_of_rows),
    Page("/histograms", "Histograms", show_histograms, mark=mark_of_rows),
    Page("/row", "Row", show_row, mark=mark_of_rows),
)
