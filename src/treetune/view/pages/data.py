"""The pages of prepared data sets: their list, the rows of a data set with histograms, and a single row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from treetune.view.page import Page, PageRequest, choose_page
from treetune.view.pages.answers import PAGE_SIZES, make_question, render_histograms
from treetune.view.store.folders import short_hash
from treetune.view.store.queries import parse_conditions
from treetune.view.store.readers import answers_to
from treetune.view.store.tables import CHARACTERS_OF_BEGINNING, LENGTH_SUFFIX, ROW_NUMBER, DataSetTable
from treetune.view.text import CHARACTERS_SHOWN, cut_text, make_visible

SETS_PER_PAGE = 100
"""The most data sets on a page."""

# What the page calls each kind of data set (`DataSet.kind`).
KIND_NAMES = {
    "parquet": "Parquet",
    "lines": "JSON lines",
    "saved": "saved data set",
    "table": "W&B table",
    "estimate": "difficulty",
}

MOST_SHOWN_COLUMNS = 10
"""The most columns of a file in the list of rows. The page of a single row has all."""

LONGEST_NARROW_TEXT = 24
"""The most characters of texts in narrow columns, such as names and short answers."""

MOST_DRAWN_HISTOGRAMS = 4
"""The number of histograms that are drawn by default."""
USUAL_NAME_PARTS = ("pass_rate", "reward", "score", "difficulty", "tokens", "answers")
"""Parts of the names of numeric columns. The columns whose names contain one are drawn by default, in this
order."""
LENGTH_COLUMNS = ("asked", "prompt", "raw_prompt", "problem", "question", "input", "text", "output", "answer")
"""The columns of text whose lengths in characters are drawn by default, in this order."""

FIRST_FIELDS = {
    "Prompt": ("prompt", "raw_prompt", "problem", "question", "input", "asked"),
    "Expected": ("reward_model", "gold", "answer", "ground_truth", "solution", "target"),
}
"""The fields of a row that are shown first: the problem, and the reference answer."""


# Data sets


def show(view: PageRequest) -> Response:
    """Shows the list of data sets. The address has `?search=` (in names and kinds) and `?page=`."""
    search = view.text("search").casefold()
    sets = [
        data for data in view.store.data.all() if search in f"{data.name} {KIND_NAMES[data.kind]}".casefold()
    ]
    return view.render("data.html", sets=choose_page(view, sets, SETS_PER_PAGE), kinds=KIND_NAMES)


# Rows


def show_rows(view: PageRequest) -> Response:
    """Shows the rows of a data set.

    The address has `?data=` (the data set's name), `?search=` (in texts), `?where=` (conditions), `?sort=`,
    `?order=down`, `?size=`, `?page=` and `?histogram=` (the only column with a histogram).
    """
    data = view.store.data.find_data_set(view.text("data"))
    table = view.store.data.table(data)
    question = make_question(view, parse_conditions(view.text("where"), table.kinds, "rows"))
    columns_with_histogram = _choose_histogram_columns(view, table)
    query = view.here().partition("?")[2]
    # `names` has the columns of the file. `table.kinds` also has columns that are derived from them, such as
    # nested fields and lengths of texts, by which rows can be filtered and sorted, too.
    names = table.names()
    # The first columns of the file, and the columns that rows are filtered and sorted by.
    columns = [*names[:MOST_SHOWN_COLUMNS], *(item.column for item in question.filters), question.sort]
    shown = [name for name in dict.fromkeys(columns) if name in table.kinds]
    hidden = [name for name in names if name not in shown]
    result = table.ask(question, shown)
    long_columns = set()  # the columns with a long text in one of the shown rows
    for row in result.rows:
        long_columns |= {name for name in shown if len(str(row[name] or "")) > LONGEST_NARROW_TEXT}
    return view.render(
        "rows.html",
        data=data,
        table=table,
        kind=KIND_NAMES[data.kind],
        question=question,
        result=result,
        row_number=ROW_NUMBER,
        shown=shown,
        hidden=len(hidden),
        pages=max(1, math.ceil(result.total / question.size)),
        sizes=PAGE_SIZES,
        beginning=CHARACTERS_OF_BEGINNING,
        histograms=f"/histograms?{query}" if columns_with_histogram else "",
        # The id of the histograms' element. It changes with the file and the address, and the page loads the
        # histograms again when it changes.
        drawn_as=short_hash(data.fingerprint, query),
        long=long_columns,
        address_of=lambda row: view.address("/row", data=data.name, row=row[ROW_NUMBER]),
    )


def show_histograms(view: PageRequest) -> Response:
    """Draws histograms for the page of rows.

    The page of rows (`show_rows`) loads the histograms after its rows, because histograms may take seconds.
    Their address has the same fields as the address of the page of rows.
    """
    data = view.store.data.find_data_set(view.text("data"))
    table = view.store.data.table(data)
    question = make_question(view, parse_conditions(view.text("where"), table.kinds, "rows"))
    histograms = table.make_histograms(
        _choose_histogram_columns(view, table), question.filters, question.search
    )
    if not view.text("histogram"):  # the address names no column: those with a single value are left out
        histograms = [histogram for histogram in histograms if len(histogram.bars) > 1]
    return render_histograms(view, histograms, "rows", data.name)


def _choose_histogram_columns(view: PageRequest, table: DataSetTable) -> Sequence[str]:
    """Returns the columns whose histograms are drawn.

    If the address names a column, it is the only one. If not, they are the first `MOST_DRAWN_HISTOGRAMS` of
    the numeric columns, in this order: usual columns such as rates, lengths of texts, all others.

    Raises ValueError if the address names a column that isn't numeric.
    """
    chosen_column = view.text("histogram")
    if chosen_column:
        table.check_numeric([chosen_column])
        return [chosen_column]
    numeric_columns = table.numeric()
    # The numeric columns of the data set itself, without the lengths of its texts.
    stored_numbers = [name for name in numeric_columns if not name.endswith(LENGTH_SUFFIX)]
    usual_columns: list[str] = []  # a column may be in it twice, which `dict.fromkeys` below drops
    for name_part in USUAL_NAME_PARTS:
        usual_columns += [name for name in stored_numbers if name_part in name.casefold()]
    lengths = [name + LENGTH_SUFFIX for name in LENGTH_COLUMNS if name + LENGTH_SUFFIX in numeric_columns]
    # At most `MOST_DRAWN_HISTOGRAMS - 1` usual columns come before the lengths, so a length is drawn if there
    # is one.
    by_priority = dict.fromkeys(
        [*usual_columns[: MOST_DRAWN_HISTOGRAMS - 1], *lengths, *usual_columns, *stored_numbers]
    )
    return list(by_priority)[:MOST_DRAWN_HISTOGRAMS]


# One row


def show_row(view: PageRequest) -> Response:
    """Shows a row of a data set and, if its difficulty was estimated, the answers that were sampled for that.

    The address has `?data=` (the data set's name), `?row=` (its number, from 0), `?as=rendered` (for Markdown
    and mathematics) and `?all=1` (nothing is left out of long texts).
    """
    data = view.store.data.find_data_set(view.text("data"))
    table = view.store.data.table(data)
    number = view.integer("row", 0)
    row = table.row(number)
    answers = answers_to(data.path, number) if data.kind == "estimate" else []
    everything = view.choice("all", ("", "1"))

    def shortened(text: object) -> str:
        """Returns the beginning of a text and, if it is longer, how many characters were left out."""
        shown_text = make_visible(text)
        beginning, left_out = cut_text(shown_text, len(shown_text) if everything else CHARACTERS_SHOWN)
        return beginning + (f"\n… {left_out:,} more characters" if left_out else "")

    def messages(value: Any) -> list[tuple[str, str]]:
        """Returns (role, content) for each message of a field that is a conversation, and [] for any
        other."""
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
    for title, names in FIRST_FIELDS.items():
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
        has_more=not everything and _longest_text_length([row, answers]) > CHARACTERS_SHOWN,
        shortened=shortened,
    )


def _longest_text_length(value: Any) -> int:
    """Returns the number of characters of the longest text in a value, which may be nested; 0 without
    texts."""
    if isinstance(value, str):
        return len(value)
    members: Iterable[object] = ()
    if isinstance(value, Mapping):
        members = value.values()
    elif isinstance(value, list):
        members = value
    return max(map(_longest_text_length, members), default=0)


def fingerprint_of_data_sets(view: PageRequest) -> str:
    """Returns a text that changes whenever the list of data sets does."""
    sets = [(data.name, data.known_from, data.fingerprint) for data in view.store.data.all()]
    return short_hash(sets, view.store.fingerprint(view.store.runs()))


def fingerprint_of_rows(view: PageRequest) -> str:
    """Returns a text that changes whenever the data set of the address, or the address itself, changes."""
    data = view.store.data.find_data_set(view.text("data"))
    return short_hash(data.name, data.fingerprint, view.request.url.query)


PAGES = (
    Page("/data", "Data", show, navigation="top", key="d", fingerprint=fingerprint_of_data_sets),
    Page("/rows", "Rows", show_rows, fingerprint=fingerprint_of_rows),
    Page("/histograms", "Histograms", show_histograms, fingerprint=fingerprint_of_rows),
    Page("/row", "Row", show_row, fingerprint=fingerprint_of_rows),
)
