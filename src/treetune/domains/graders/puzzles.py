"""Graders of puzzles whose answers are tables (who has what), orders of names, or grids of small numbers."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

from typing_extensions import override

from treetune.domains.graders.tagged import Tagged, comparable_text, comparable_texts, grade_parts
from treetune.exceptions import UnreadableValue
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.extraction import find_values, last_box, read_value
from treetune.vocabulary import Grade, Problem

# Tables

MOST_ROWS = 100
"""The most rows of a table."""
MOST_CELLS = 100
"""The most cells of a row."""

UNNAMED_COLUMN = ""
"""The name of a column whose cells were the keys of the rows: of 1 in ``{"1": {"pet": "cat"}}``."""

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


@Grader.register("zebra")
@dataclass(frozen=True, kw_only=True)
class ZebraGrader(Tagged):
    """Gives the reward 1 for the gold's table. An answer is written as ``{"header": ["Position", "Pet"],
    "rows": [["1", "cat"], …]}`` in JSON or Python, as only the rows of this, as objects with the header's
    keys, or in Markdown. Upper and lower case are the same.

    If all asked cells of the gold are single letters, ``am/bn`` is also a table, with rows separated by
    ``/``.

    Columns are identified by the header, or by their order if the answer's header doesn't name them. An
    answer with more rows than the gold earns nothing. The share of right cells among the asked ones is a
    number of the grade.
    """

    votes_by_value: ClassVar[bool] = True

    given: tuple[str, ...] = ("Position", "House")
    """Columns that the question already gives, as numbers. They earn nothing, but identify the rows. If the
    answer or the gold doesn't have them, rows are identified by their order."""
    score: Literal["exact", "cells"] = "cells"
    """The reward of a partly right table: ``exact`` gives 0, and ``cells`` the share of right cells among the
    asked ones."""

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade:
        gold = gold_table(problem.gold)
        given_columns, asked_columns = self._split_columns(gold)
        table = _read_answer_table(extracted, gold, asked_columns)
        if table is None:
            return Grade(reward=0.0, outcome="ok", message="no table")
        if len(table.rows) > len(gold.rows):
            return Grade(reward=0.0, outcome="ok", message="more rows than there are positions")
        filled_rows = _fill_asked_cells(table, gold, given_columns, asked_columns)
        right = 0
        for filled_row, gold_row in zip(filled_rows, gold.rows, strict=True):
            gold_cells = [gold_row[column] for column in asked_columns]
            right += sum(map(operator.eq, filled_row, gold_cells))  # 0 for an empty row
        return grade_parts(right, len(asked_columns) * len(gold.rows), partial_reward=self.score == "cells")

    @override
    def same_answer(self, answer: str, other: str, problem: Problem) -> bool:
        # Both answers are read with the gold's columns and positions.
        gold = gold_table(problem.gold)
        given_columns, asked_columns = self._split_columns(gold)
        filled_rows = []
        for text in (answer, other):
            table = _read_answer_table(text, gold, asked_columns)
            if table is None or len(table.rows) > len(gold.rows):
                return False
            filled_rows.append(_fill_asked_cells(table, gold, given_columns, asked_columns))
        return filled_rows[0] == filled_rows[1]

    def _split_columns(self, gold: ParsedTable) -> tuple[list[int], list[int]]:
        """Returns the gold's columns that the question gives, and those that it asks for. Raises ValueError
        if it asks for none."""
        # The question gives the columns in `given` only if all their cells are positions ("2", "second",
        # "house 2"). A column "House" may also be an attribute that is asked for, such as the house's colour.
        names = comparable_texts(self.given)
        given_columns = []
        for column, name in enumerate(gold.header):
            if name in names and all(_number_of_position(row[column]).isdigit() for row in gold.rows):
                given_columns.append(column)
        asked_columns = [column for column in range(len(gold.rows[0])) if column not in given_columns]
        if not asked_columns:
            raise ValueError(
                f"the gold's columns {', '.join(gold.header)} are all among given: nothing is asked"
            )
        return given_columns, asked_columns


@dataclass(frozen=True)
class ParsedTable:
    """A table whose texts are in the form for comparison (`comparable_text`). The header is empty if there is
    none.

    Example: ``ParsedTable(header=("position", "pet"), rows=(("1", "cat"), ("2", "dog")))``.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@lru_cache(maxsize=1024)
def gold_table(gold: str) -> ParsedTable:
    """Reads a gold. Raises ValueError unless it is a table with rows of equal length."""
    table = read_table(gold)
    if table is None or len({len(row) for row in table.rows}) != 1:
        raise ValueError(
            f"the gold {gold[:100]!r} is not a table, such as"
            " {'header': ['Position', 'Pet'], 'rows': [['1', 'cat']]}"
        )
    if table.header and len(table.header) != len(table.rows[0]):
        raise ValueError(
            f"the gold's header has {len(table.header)} names, its rows {len(table.rows[0])} cells"
        )
    return table


def _number_of_position(cell: str) -> str:
    """Returns the number in a position: "2" for ``house 2``, ``second`` and ``2``; else the cell itself."""
    if cell in _ORDINALS:
        return str(_ORDINALS.index(cell) + 1)
    return "".join(sign for sign in cell if sign.isdigit()) or cell


def _read_answer_table(text: str, gold: ParsedTable, asked_columns: Sequence[int]) -> ParsedTable | None:
    """Reads an answer's table.

    `asked_columns` has the indices of the gold's columns that the question asks for. If all their cells are
    single letters, the answer may also be rows of letters: ``am/bn``.
    """
    asked_cells: list[str] = []
    for row in gold.rows:
        asked_cells += [row[column] for column in asked_columns]
    asks_letters = all(len(cell) == 1 for cell in asked_cells)
    letters = read_letters(text) if asks_letters else None
    return letters or read_table(text)


def _fill_asked_cells(
    table: ParsedTable, gold: ParsedTable, given_columns: Sequence[int], asked_columns: Sequence[int]
) -> list[list[str]]:
    """Returns the cells that the answer gives in the asked columns, for each row of the gold.

    Example: a question gives the houses 1 and 2, and asks for their pets. The gold has the rows ``1, cat``
    and ``2, dog``. For the answer ``[["house 2", "fox"], ["house 1", "cat"]]``, the result is ``[["cat"],
    ["fox"]]``. A row of the result is empty if no row of the answer has the given cells of the gold's row, or
    if several rows have them. The answer has at most as many rows as the gold.

    Args:
        table: The table of the answer.
        gold: The table of the gold.
        given_columns: Indices of the gold's columns that the question gives, such as the numbers of the
            houses.
        asked_columns: Indices of the gold's columns that the question asks for.
    """
    # Each row of `rows` has the asked cells of a row of the answer first, then the given ones if the answer
    # has them. Missing cells are empty.
    columns = _columns_of_answer(table, gold, given_columns, asked_columns)
    rows = []
    for row in table.rows:
        rows.append([row[column] if column < len(row) else "" for column in columns])
    if len(columns) == len(asked_columns):  # no given column identifies the rows, so their order does
        missing_rows: list[list[str]] = [[] for _ in range(len(gold.rows) - len(rows))]
        return [*rows, *missing_rows]
    # The given cells identify the rows: {("2",): [["cat", "tea"]]} if one row is that of house 2.
    rows_by_given: dict[tuple[str, ...], list[list[str]]] = {}
    for cells in rows:
        asked_cells, given_cells = cells[: len(asked_columns)], cells[len(asked_columns) :]
        key = tuple(map(_number_of_position, given_cells))  # "house 2" and "second" become "2"
        rows_by_given.setdefault(key, []).append(asked_cells)
    filled_rows = []
    for gold_row in gold.rows:
        key = tuple(_number_of_position(gold_row[column]) for column in given_columns)
        candidates = rows_by_given.get(key, [])
        filled_rows.append(candidates[0] if len(candidates) == 1 else [])
    return filled_rows


def _columns_of_answer(
    table: ParsedTable, gold: ParsedTable, given_columns: Sequence[int], asked_columns: Sequence[int]
) -> list[int]:
    """Returns the indices of the asked columns in the answer, and then those of the given columns. If the
    answer lacks a given column, the result has only the asked ones.

    The answer's header says which column is which. If the header doesn't have the names of the gold, the
    order of the columns says it.

    Example: the gold has the columns house, name and pet, of which the house is given. For an answer with the
    columns pet, house and name, the result is ``[2, 0, 1]``: the indices of name, pet and house.

    Args:
        table: The table of the answer.
        gold: The table of the gold.
        given_columns: Indices of the gold's columns that the question gives.
        asked_columns: Indices of the gold's columns that the question asks for.
    """
    columns = _find_columns_in_header(table, gold, given_columns, asked_columns)
    if columns is not None:
        return columns
    if all(len(row) == len(asked_columns) for row in table.rows):
        return list(range(len(asked_columns)))  # the rows have only the asked cells
    # The answer has the gold's columns, in the same order.
    return [*asked_columns, *given_columns]


def _find_columns_in_header(
    table: ParsedTable, gold: ParsedTable, given_columns: Sequence[int], asked_columns: Sequence[int]
) -> list[int] | None:
    """Returns the result of `_columns_of_answer` by the names in the answer's header.

    Returns None if the header lacks the name of an asked column, or has a name twice, or if the gold has no
    header.
    """
    if not gold.header or not table.header or len(set(table.header)) < len(table.header):
        return None
    column_of = {name: column for column, name in enumerate(table.header)}
    if len(given_columns) == 1 and UNNAMED_COLUMN in column_of:
        # The keys of {"1": {"pet": "cat"}} are the positions.
        name_of_positions = gold.header[given_columns[0]]
        column_of.setdefault(name_of_positions, column_of[UNNAMED_COLUMN])
    asked_names = [gold.header[column] for column in asked_columns]
    if not all(name in column_of for name in asked_names):
        return None
    columns = [column_of[name] for name in asked_names]
    given_names = [gold.header[column] for column in given_columns]
    if all(name in column_of for name in given_names):
        columns += [column_of[name] for name in given_names]
    return columns


def read_table(text: str) -> ParsedTable | None:
    """Reads the table that the text is, or else the last table in it. The time is linear in the text.

    A table is ``{"header": […], "rows": [[…], …]}`` or only the list of rows in this, a list of objects with
    the same keys, ``{"1": {"pet": "cat"}, …}`` (whose keys become a column `UNNAMED_COLUMN`), any of these as
    the only value of an object, or lines of Markdown.
    """
    try:
        table = _table_of_json_value(read_value(text))
    except UnreadableValue:
        # `find_values` yields the last value first.
        tables = (_table_of_json_value(value) for _, value in find_values(text))
        table = next((table for table in tables if table is not None), None)
    if table is not None:
        return table
    return _read_markdown_table(text)


def _read_markdown_table(text: str) -> ParsedTable | None:
    """Reads the last table in Markdown. Its header is the line above the last rule, ``|---|---|``."""
    lines = [line.strip() for line in text.split("\n")]
    rules = [number for number, line in enumerate(lines) if len(line) > 2 and not line.strip("|:- ")]
    if not rules or rules[-1] == 0:  # no line above it could be the header
        return None
    rule = rules[-1]
    end = rule + 1
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    cells = []
    for line in (lines[rule - 1], *lines[rule + 1 : end]):
        # `removeprefix` and not `strip`: |a|| has an empty cell at its end, so only one bar is removed there.
        cells.append([cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")])
    return _make_table(cells[0], cells[1:])


def read_letters(text: str) -> ParsedTable | None:
    """Reads rows of single letters with ``/`` between them, ``am/bn``; None for any other text."""
    rows = text.split("/")
    if len(rows) > MOST_ROWS or not all(row.isalnum() and len(row) <= MOST_CELLS for row in rows):
        return None
    return _make_table((), [list(row) for row in rows])


def _table_of_json_value(value: Any) -> ParsedTable | None:
    """Makes a table of a JSON value: rows, objects, or an object that contains them. None for other
    values."""
    if isinstance(value, Mapping):
        keys = {comparable_text(str(key)): inner for key, inner in value.items()}
        if "rows" in keys:
            return _make_table(keys.get("header", keys.get("columns", ())), keys["rows"])
        items = list(value.values())
        if len(items) == 1 and isinstance(items[0], Mapping | list | tuple):  # {"solution": a table}
            return _table_of_json_value(items[0])
        if not all(isinstance(item, Mapping) for item in items):
            return None
        # {"1": {"pet": "cat"}}: the keys are a column
        value = [{UNNAMED_COLUMN: key, **row} for key, row in value.items()]
    if isinstance(value, list | tuple) and value and all(isinstance(row, Mapping) for row in value):
        header = list(value[0])
        return _make_table(header, [[row.get(name, "") for name in header] for row in value])
    return _make_table((), value)


def _make_table(header: Any, rows: Any) -> ParsedTable | None:
    """Makes a table of a header and rows. Returns None if they aren't lists, or if the rows are too many or
    too long."""
    if not isinstance(header, list | tuple) or not isinstance(rows, list | tuple):
        return None
    if not 1 <= len(rows) <= MOST_ROWS or not all(isinstance(row, list | tuple) for row in rows):
        return None
    if not all(1 <= len(row) <= MOST_CELLS for row in rows):
        return None
    return ParsedTable(tuple(comparable_texts(header)), tuple(tuple(comparable_texts(row)) for row in rows))


# Orders of names

MOST_CHARACTERS_OF_ORDER = 5_000
"""The most characters of an answer that are read. They suffice for hundreds of names."""

_SEPARATOR = re.compile(r"->|=>|[,;|\n<>←-⇿➔-➾]")
_SEPARATOR_OR_AND = re.compile(_SEPARATOR.pattern + r"|\band\b")
_SPACES = re.compile(r"\s+")
_NUMBER_OR_BULLET = re.compile(r"^(?:[0-9]{1,3}[.):]|[-*•]|and)\s+")
"""A number, a bullet or "and" before a name."""
_SIGNS_AROUND_NAME = " \"'`*_.“”‘’"


@Grader.register("ordering")
@dataclass(frozen=True, kw_only=True)
class OrderingGrader(Tagged):
    """Gives the reward 1 for the gold's order of names. Case and spaces don't matter.

    The answer is a list in JSON or Python, or names separated by commas, semicolons, arrows or newlines, with
    or without numbers. If all names of the gold are single letters or digits, they need no separators:
    ``cab``. The gold is written in the same ways. An answer that doesn't have the gold's names, each once,
    earns nothing. The share of positions with the right name is a number of the grade, ``cells``.
    """

    votes_by_value: ClassVar[bool] = True

    score: Literal["exact", "places"] = "exact"
    """The reward of another order: ``exact`` gives 0, and ``places`` the share of positions with the right
    name."""

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade:
        gold = gold_names(problem.gold)
        names = read_names(extracted, gold)
        if sorted(names) != sorted(gold):
            return Grade(
                reward=0.0, outcome="ok", message="other names than the gold's", numbers={"cells": 0.0}
            )
        right = sum(map(operator.eq, names, gold))
        return grade_parts(right, len(gold), partial_reward=self.score == "places")

    @override
    def same_answer(self, answer: str, other: str, problem: Problem) -> bool:
        # Both answers are read with the gold's names.
        gold = gold_names(problem.gold)
        return read_names(answer, gold) == read_names(other, gold)


@lru_cache(maxsize=1024)
def gold_names(gold: str) -> Sequence[str]:
    """Reads a gold. Raises ValueError for one without a name."""
    names = read_names(gold)
    if not names:
        raise ValueError(f"the gold {gold[:100]!r} holds no names")
    return names


def read_names(text: str, gold: Sequence[str] = ()) -> list[str]:
    """Reads names in their order, in the form for comparison (`comparable_text`).

    The separators may depend on the gold: single letters need none, and "and" or a space is a separator only
    if there would be too few names otherwise.
    """
    text = text.strip()[:MOST_CHARACTERS_OF_ORDER]
    # A list in JSON or Python, perhaps as the only value of an object: {"order": ["Ann", "Bob"]}
    try:
        value = read_value(text)
    except UnreadableValue:
        value = next((value for _, value in find_values(text, "[")), None)  # the last list in the text
    if isinstance(value, dict) and len(value) == 1:
        (value,) = value.values()
    if isinstance(value, list | tuple) and not any(isinstance(name, list | tuple | dict) for name in value):
        return [_comparable_name(str(name)) for name in value]
    # A list of names without quotes, such as [Ann, Bob], isn't a value. It is read as text.
    text = (last_box(text) or text).strip("[](){}")
    if text.isalnum() and gold and all(len(name) == 1 for name in gold):
        return [comparable_text(letter) for letter in text]
    parts = _split_names(_SEPARATOR, text)
    if len(parts) < len(gold):
        # "Ann Bob Cid" has no separator but spaces, and "Ann, Bob and Cid" has further names after an "and".
        parts = _split_names(_SPACES if len(parts) == 1 else _SEPARATOR_OR_AND, text)
    return parts


def _split_names(separator: re.Pattern[str], text: str) -> list[str]:
    """Splits a text into names, without numbers and bullets before them: "1. Ann; 2. Bob" is Ann and Bob."""
    parts = [_NUMBER_OR_BULLET.sub("", part.strip(), count=1) for part in separator.split(text)]
    parts[0] = parts[0].rpartition(":")[2]  # "from left to right: …"
    names = [part.strip(_SIGNS_AROUND_NAME) for part in parts]
    return [_comparable_name(name) for name in names if name]


def _comparable_name(text: str) -> str:
    """Returns a name without its article, and with one kind of apostrophe."""
    return comparable_text(text).replace("’", "'").removeprefix("the ")


# Grids

Grid = tuple[tuple[int, ...], ...]
"""Rows of cells, which have the same length."""

LARGEST_GRID = 100
"""The most rows, and the most cells of a row. ARC's grids have up to 30."""

_LONGEST_GRID = 10 * LARGEST_GRID * LARGEST_GRID
"""The most characters of a text that is read as a grid of lines: ten for each cell of the largest grid."""

_MARKUP_AROUND_GRID = re.compile(r"\\(?:begin|end)\{[a-z]*matrix\}|```[a-z]*")
_LINE_OF_GRID = re.compile(r"[0-9]{1,100}|[0-9]{1,3}(?:[ ,|\t]+[0-9]{1,3})+")


@Grader.register("grid")
@dataclass(frozen=True, kw_only=True)
class GridGrader(Tagged):
    r"""Gives the reward 1 for the gold's grid, compared cell by cell. It is for ARC, for BARC, and for the
    grid puzzles that treetune makes.

    A grid is one of these: a list of lists of whole numbers in JSON or Python; lines of numbers separated by
    spaces or commas; rows of digits, separated by newlines or ``/``, as in ``120/031``. In a text with other
    words, the last list of lists is the grid. The gold is written in the same ways.

    The share of right cells, among all cells of the larger grid, is a number of the grade.
    """

    votes_by_value: ClassVar[bool] = True

    score: Literal["exact", "cells"] = "exact"
    """The reward of a partly right grid: ``exact`` gives 0, and ``cells`` the share of right cells."""

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade:
        gold = gold_grid(problem.gold)
        grid = read_grid(extracted)
        if grid is None:
            return Grade(reward=0.0, outcome="ok", message="no grid")
        # Cells that only one of the two has count as wrong.
        rows, columns = max(len(gold), len(grid)), max(len(gold[0]), len(grid[0]))
        right = 0
        for row, gold_row in zip(grid, gold, strict=False):
            right += sum(map(operator.eq, row, gold_row))
        return grade_parts(right, rows * columns, partial_reward=self.score == "cells")


@lru_cache(maxsize=1024)
def gold_grid(gold: str) -> Grid:
    """Reads a gold. Raises ValueError for one that isn't a grid."""
    grid = read_grid(gold)
    if grid is None:
        raise ValueError(f"the gold {gold[:100]!r} is not a grid, such as [[1, 0], [0, 1]]")
    return grid


def read_grid(text: str) -> Grid | None:
    """Reads the grid that the text is, or else the last grid in it. The time is linear in the text."""
    grid = _read_lines_of_grid(text)
    if grid is not None:
        return grid
    try:
        return _make_grid(read_value(text))
    except UnreadableValue:
        # `find_values` yields the last value first.
        grids = (_make_grid(value) for _, value in find_values(text, "["))
        return next((grid for grid in grids if grid is not None), None)


def write_grid(grid: Grid) -> str:
    """Writes a grid with one digit for each cell: ``120/031``."""
    return "/".join("".join(map(str, row)) for row in grid)


def _read_lines_of_grid(text: str) -> Grid | None:
    """Reads ``0 1\\n2 3``, ``01/23`` or a matrix of LaTeX; None for any other text."""
    if len(text) > _LONGEST_GRID:
        return None
    # A matrix of LaTeX becomes lines.
    text = _MARKUP_AROUND_GRID.sub("", text).replace("\\\\", "\n").replace("&", " ")
    lines = [line.strip(" \t\r[](),|") for line in re.split("[\n/;]", text) if line.strip()]
    if not 1 <= len(lines) <= LARGEST_GRID or not all(map(_LINE_OF_GRID.fullmatch, lines)):
        return None
    rows = [re.findall("[0-9]+", line) for line in lines]
    if all(len(row) == 1 for row in rows):  # 120/031: each digit is a cell
        rows = [list(row[0]) for row in rows]
    return _make_grid(rows)


def _make_grid(rows: Any) -> Grid | None:
    """Makes a grid of a JSON value; None unless it is a list of equally long rows of whole numbers."""
    if isinstance(rows, dict) and len(rows) == 1:  # {"output": [[1, 0], [0, 1]]}
        (rows,) = rows.values()
    if not isinstance(rows, list | tuple) or not 1 <= len(rows) <= LARGEST_GRID:
        return None
    if all(isinstance(row, str) and row.isdecimal() for row in rows):  # ["10", "01"]
        rows = [list(row) for row in rows]
    if not all(isinstance(row, list | tuple) and 1 <= len(row) <= LARGEST_GRID for row in rows):
        return None
    if len({len(row) for row in rows}) != 1:
        return None
    grid = []
    for row in rows:
        cells = [number for cell in row if (number := _read_cell(cell)) is not None]
        if len(cells) < len(row):  # a cell is no whole number
            return None
        grid.append(tuple(cells))
    return tuple(grid)


def _read_cell(cell: Any) -> int | None:
    """Returns the whole number of a cell: 3 for 3, 3.0 and "3". Returns None for any other cell."""
    # A text has at most three digits, like a number of `_LINE_OF_GRID`.
    if isinstance(cell, str) and len(cell) <= 3 and cell.isdecimal():
        return int(cell)
    if isinstance(cell, float) and cell.is_integer():
        return int(cell)
    return cell if isinstance(cell, int) and not isinstance(cell, bool) else None
