"""Tables in the formats that LiveBench converts between: JSON, JSON lines, HTML, Markdown, CSV, TSV."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from typing import Any

from treetune.tasks.graders.extraction import NoValue, read_value, values

Row = dict[str, str]

_NUMBERS_OF_ROWS = ("", "index", "Unnamed: 0")
"""Names of a column that only counts rows."""

_NOTHING = ("", "nan", "none", "null", "nat")
MOST_ROWS = 10_000


def same_table(answer: str, gold: str) -> float:
    """``tablereformat``: 1 where the answer holds the gold's rows, in their order, with the same columns.

    Cells are equal as texts, or as numbers to within 1e-6. A column that counts rows is left out.
    """
    meant = next(iter(_tables(gold, None)), None)
    if meant is None:
        raise ValueError(f"the gold {gold[:100]!r} is no table")
    return float(any(_same(said, meant) for said in _tables(answer, list(meant[0]))))


def _same(said: Sequence[Row], meant: Sequence[Row]) -> bool:
    return len(said) == len(meant) and all(
        one.keys() == other.keys() and all(_same_cell(one[name], other[name]) for name in other)
        for one, other in zip(said, meant, strict=True)
    )


def _same_cell(one: str, other: str) -> bool:
    if one == other or (one.lower() in _NOTHING and other.lower() in _NOTHING):
        return True
    if one.lower() in ("true", "false"):
        return one.lower() == other.lower()
    try:
        difference = float(one) - float(other)
    except ValueError:
        return False
    return math.isfinite(difference) and abs(difference) < 1e-6


def _tables(text: str, columns: Sequence[str] | None) -> Iterator[list[Row]]:
    """What the text is as a table, in each format in which it is one. In a text with other lines, rows begin
    below the line that names these columns."""
    for read in (_of_json, _of_json_lines, _of_html):
        if rows := _rows(read(text)):
            yield rows
    for delimiter in ("|", "\t", ","):
        if rows := _rows(_of_lines(text, delimiter, columns)):
            yield rows


def _rows(found: Sequence[Mapping[str, Any]]) -> list[Row]:
    rows = [
        {
            str(name).strip(): _text(cell)
            for name, cell in row.items()
            if str(name).strip() not in _NUMBERS_OF_ROWS
        }
        for row in found[:MOST_ROWS]
    ]
    return rows if rows and rows[0] else []


def _text(cell: Any) -> str:
    return cell.strip() if isinstance(cell, str) else json.dumps(cell)


def _of_json(text: str) -> Sequence[Mapping[str, Any]]:
    try:
        value = read_value(text)
    except NoValue:
        value = next((value for _, value in values(text)), None)
    if isinstance(value, Mapping):
        value = value.get("data", list(value.values()))  # by rows' numbers, or with a schema
    return value if isinstance(value, list) and all(isinstance(row, Mapping) for row in value) else []


def _of_json_lines(text: str) -> Sequence[Mapping[str, Any]]:
    rows = []
    for line in map(str.strip, text.split("\n")):
        if line.startswith("{") and line.endswith("}"):
            try:
                row = read_value(line)
            except NoValue:
                return []
            if not isinstance(row, Mapping):
                return []
            rows.append(row)
    return rows


class _Html(HTMLParser):
    """Collects the cells of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._in_cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        self._in_cell = tag in ("td", "th") and bool(self.rows)
        if self._in_cell:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data


def _of_html(text: str) -> Sequence[Mapping[str, Any]]:
    if "<tr" not in text.lower():
        return []
    parser = _Html()
    parser.feed(text)
    return _below_header([row for row in parser.rows if row])


def _of_lines(text: str, delimiter: str, columns: Sequence[str] | None) -> Sequence[Mapping[str, Any]]:
    lines = [line.strip() if delimiter == "|" else line for line in text.strip("\n").split("\n")]
    if delimiter == "|":
        lines = [line.strip("|") for line in lines if line.startswith("|") and line.strip("|:- ")]
    try:
        cells = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=delimiter)]
    except csv.Error:
        return []
    named = [] if columns is None else sorted(columns)
    starts = [
        place
        for place, row in enumerate(cells)
        if columns is None or sorted(cell for cell in row if cell not in _NUMBERS_OF_ROWS) == named
    ]
    if not starts:
        return []
    below = cells[starts[0] :]
    end = next((place for place, row in enumerate(below) if len(row) != len(below[0])), len(below))
    return _below_header(below[:end]) if len(below[0]) > 1 else []


def _below_header(rows: Sequence[Sequence[str]]) -> Sequence[Mapping[str, Any]]:
    if len(rows) < 2 or any(len(row) != len(rows[0]) for row in rows):
        return []
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
