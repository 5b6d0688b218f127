"""Grids of small numbers, as in ARC: the answer is the whole grid."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.extraction import NoValue, read_value, values
from treetune.vocabulary import Grade, Problem
from treetune_domains.graders.tagged import Tagged, of_parts

Grid = tuple[tuple[int, ...], ...]
"""Rows of cells, all equally long."""

LARGEST = 100
"""Rows, and cells of a row, that are read; ARC's grids have up to 30."""

_AROUND = re.compile(r"\\(?:begin|end)\{[a-z]*matrix\}|```[a-z]*")
_LINE = re.compile(r"[0-9]{1,100}|[0-9]{1,3}(?:[ ,|\t]+[0-9]{1,3})+")


@Grader.register("grid")
@dataclass(frozen=True, kw_only=True)
class GridGrader(Tagged):
    r"""Right is the gold's grid, cell by cell: for ARC, BARC and grids made here.

    A grid is a list of lists of whole numbers, JSON or Python, spaces and newlines anywhere; or rows of
    numbers with spaces or commas between them, a line each; or rows of digits without any, with newlines
    or ``/`` between the rows: ``120/031``. Among other text, the last list of lists is the grid. The
    gold is written in the same ways.

    `score` says what a grid that is not right all over earns: nothing (``exact``), or the share of cells
    that are (``cells``), of all cells that either grid has. That share is among the grade's numbers.
    """

    score: Literal["exact", "cells"] = "exact"

    def verdict(self, extracted: str, problem: Problem) -> Grade:
        gold = gold_grid(problem.gold)
        given = read_grid(extracted)
        if given is None:
            return Grade(reward=0.0, outcome="ok", message="no grid")
        rows, columns = max(len(gold), len(given)), max(len(gold[0]), len(given[0]))
        right = sum(
            one == other
            for row, other_row in zip(gold, given, strict=False)
            for one, other in zip(row, other_row, strict=False)
        )
        return of_parts(right, rows * columns, pays=self.score == "cells")


@lru_cache(maxsize=1024)
def gold_grid(gold: str) -> Grid:
    """Raises ValueError for a gold that is no grid."""
    grid = read_grid(gold)
    if grid is None:
        raise ValueError(f"the gold {gold[:100]!r} is no grid, such as [[1, 0], [0, 1]]")
    return grid


def read_grid(text: str) -> Grid | None:
    """The grid that the text is or, where it is none, the last one among it. Linear in the text."""
    grid = _of_lines(text)
    if grid is not None:
        return grid
    try:
        return _checked(read_value(text))
    except NoValue:
        found = (_checked(value) for _, value in values(text, "["))
        return next((grid for grid in found if grid is not None), None)


def written(grid: Grid) -> str:
    """``120/031``: a digit a cell."""
    return "/".join("".join(map(str, row)) for row in grid)


def _of_lines(text: str) -> Grid | None:
    if len(text) > 10 * LARGEST * LARGEST:
        return None
    text = _AROUND.sub("", text).replace("\\\\", "\n").replace("&", " ")
    lines = [line.strip(" \t\r[](),|") for line in re.split("[\n/;]", text) if line.strip()]
    if not 1 <= len(lines) <= LARGEST or not all(map(_LINE.fullmatch, lines)):
        return None
    rows = [re.findall("[0-9]+", line) for line in lines]
    return _checked([list(row[0]) for row in rows] if all(len(row) == 1 for row in rows) else rows)


def _checked(rows: Any) -> Grid | None:
    if isinstance(rows, dict) and len(rows) == 1:
        (rows,) = rows.values()
    if not isinstance(rows, list | tuple) or not 1 <= len(rows) <= LARGEST:
        return None
    if all(isinstance(row, str) and row.isdecimal() for row in rows):
        rows = [list(row) for row in rows]
    if not all(isinstance(row, list | tuple) and 1 <= len(row) <= LARGEST for row in rows):
        return None
    grid = tuple(tuple(_cell(cell) for cell in row) for row in rows)
    if len({len(row) for row in grid}) != 1 or any(cell is None for row in grid for cell in row):
        return None
    return grid  # type: ignore[return-value]


def _cell(cell: Any) -> int | None:
    if isinstance(cell, str) and len(cell) <= 3 and cell.isdecimal():
        return int(cell)
    if isinstance(cell, float) and cell.is_integer():
        return int(cell)
    return cell if isinstance(cell, int) and not isinstance(cell, bool) else None
