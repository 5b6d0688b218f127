"""Tables as answers write them: JSON, Python, Markdown, or letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treetune.tasks.graders.extraction import NoValue, read_value, values
from treetune_domains.graders.tagged import all_plain, plain

MOST_ROWS = 100
MOST_CELLS = 100

UNNAMED = ""
"""The name of a column whose cells stood as keys of rows."""


@dataclass(frozen=True)
class Table:
    """A header (empty where there is none) and rows, all ready for comparison."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def read_table(text: str) -> Table | None:
    """The table that the text is or, where it is none, the last one among it. Linear in the text.

    A table is ``{"header": […], "rows": [[…], …]}``, its rows alone, a list of objects with the same keys, an
    object of objects (whose own keys are an `UNNAMED` column), any of these as the only value of an object,
    or in Markdown.
    """
    try:
        found = _of_value(read_value(text))
    except NoValue:
        tables = (_of_value(value) for _, value in values(text))
        found = next((table for table in tables if table is not None), None)
    return found or _of_markdown(text)


def read_letters(text: str) -> Table | None:
    """Rows of single letters with ``/`` between them, ``am/bn``; None for any other text."""
    rows = text.split("/")
    if len(rows) > MOST_ROWS or not all(row.isalnum() and len(row) <= MOST_CELLS for row in rows):
        return None
    return _table((), [list(row) for row in rows])


def _of_value(value: Any) -> Table | None:
    if isinstance(value, Mapping):
        keys = {plain(str(key)): inner for key, inner in value.items()}
        if "rows" in keys:
            return _table(keys.get("header", keys.get("columns", ())), keys["rows"])
        inner = list(value.values())
        if len(inner) == 1 and isinstance(inner[0], Mapping | list | tuple):
            return _of_value(inner[0])
        if not all(isinstance(row, Mapping) for row in inner):
            return None
        value = [{UNNAMED: key, **row} for key, row in value.items()]
    if isinstance(value, list | tuple) and value and all(isinstance(row, Mapping) for row in value):
        header = list(value[0])
        return _table(header, [[row.get(name, "") for name in header] for row in value])
    return _table((), value)


def _of_markdown(text: str) -> Table | None:
    """The last lines that begin and end with ``|``, the second one of them a rule."""
    lines = [line.strip() for line in text.split("\n")]
    ruled = [place for place, line in enumerate(lines) if len(line) > 2 and not line.strip("|:- ")]
    if not ruled or ruled[-1] == 0:
        return None
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in _framed(lines, ruled[-1])]
    return _table(table[0], table[1:])


def _framed(lines: Sequence[str], rule: int) -> list[str]:
    end = rule + 1
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    return [lines[rule - 1], *lines[rule + 1 : end]]


def _table(header: Any, rows: Any) -> Table | None:
    if not isinstance(header, list | tuple) or not isinstance(rows, list | tuple):
        return None
    if not 1 <= len(rows) <= MOST_ROWS or not all(isinstance(row, list | tuple) for row in rows):
        return None
    if not all(1 <= len(row) <= MOST_CELLS for row in rows):
        return None
    return Table(tuple(all_plain(header)), tuple(tuple(all_plain(row)) for row in rows))
