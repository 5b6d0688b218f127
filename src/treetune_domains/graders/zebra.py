"""Zebra puzzles: who has what, in a table of positions and attributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from treetune.tasks.graders.base import Grader
from treetune.vocabulary import Grade, Problem
from treetune_domains.graders.answer_tables import UNNAMED, Table, read_letters, read_table
from treetune_domains.graders.tagged import Tagged, all_plain, of_parts

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


@Grader.register("zebra")
@dataclass(frozen=True, kw_only=True)
class ZebraGrader(Tagged):
    """Right is the gold's table: ``{"header": ["Position", "Pet"], "rows": [["1", "cat"], …]}`` in JSON
    or Python, or its rows alone, or objects with the header's keys, or in Markdown. Names count in any case.

    Where all asked cells of the gold are single letters, also ``am/bn``, a row of them behind the other.

    The header and the columns `given`, which the question tells as numbers, earn nothing: rows are found by
    what stands in these columns (or by their order, where either table has none of them), columns by the
    header (or by their order, where the answer's header doesn't name them). An answer with more rows earns
    nothing.

    `score` says what a table that isn't right all over earns: nothing (``exact``), or the share of asked
    cells that are right (``cells``). That share is among the grade's numbers.
    """

    given: tuple[str, ...] = ("Position", "House")
    score: Literal["exact", "cells"] = "cells"

    def verdict(self, extracted: str, problem: Problem) -> Grade:
        gold = gold_table(problem.gold)
        known = self._known(gold)
        asked = [place for place in range(len(gold.rows[0])) if place not in known]
        if not asked:
            raise ValueError(
                f"the gold's columns {', '.join(gold.header)} are all among given: nothing is asked"
            )
        letters = all(len(row[place]) == 1 for row in gold.rows for place in asked)
        table = read_letters(extracted) if letters else None
        table = table or read_table(extracted)
        if table is None:
            return Grade(reward=0.0, outcome="ok", message="no table")
        if len(table.rows) > len(gold.rows):
            return Grade(reward=0.0, outcome="ok", message="more rows than there are positions")
        given = _cells(table, gold, known, asked)
        meant = [[row[place] for place in asked] for row in gold.rows]
        right = sum(
            one == other
            for row, other_row in zip(given, meant, strict=True)
            for one, other in zip(row, other_row, strict=False)
        )
        return of_parts(right, len(asked) * len(gold.rows), pays=self.score == "cells")

    def _known(self, gold: Table) -> list[int]:
        """Columns that the question tells: named `given`, with a number in each cell. A house may also be an
        attribute: whoever lives in the red one."""
        return [
            place
            for place, name in enumerate(gold.header)
            if name in all_plain(self.given) and all(_place(row[place]).isdigit() for row in gold.rows)
        ]


@lru_cache(maxsize=1024)
def gold_table(gold: str) -> Table:
    """Raises ValueError for a gold that is no table with equal rows."""
    table = read_table(gold)
    if table is None or len({len(row) for row in table.rows}) != 1:
        raise ValueError(
            f"the gold {gold[:100]!r} is no table, such as"
            " {'header': ['Position', 'Pet'], 'rows': [['1', 'cat']]}"
        )
    if table.header and len(table.header) != len(table.rows[0]):
        raise ValueError(
            f"the gold's header has {len(table.header)} names, its rows {len(table.rows[0])} cells"
        )
    return table


def _place(cell: str) -> str:
    """A position is known by its number: ``House 2``, ``second`` and ``2`` are one."""
    if cell in _ORDINALS:
        return str(_ORDINALS.index(cell) + 1)
    return "".join(sign for sign in cell if sign.isdigit()) or cell


def _cells(table: Table, gold: Table, known: Sequence[int], asked: Sequence[int]) -> list[list[str]]:
    """For each of the gold's rows the asked cells of the row that claims its place; none where no row does,
    or several do."""
    places = _columns(table, gold, known, asked)
    rows = [[row[place] if place < len(row) else "" for place in places] for row in table.rows]
    if len(places) == len(asked):  # nothing says where a row belongs but its own place
        return [*rows, *[[] for _ in gold.rows]][: len(gold.rows)]
    claims: dict[tuple[str, ...], list[list[str]]] = {}
    for row in rows:
        claims.setdefault(tuple(map(_place, row[len(asked) :])), []).append(row[: len(asked)])
    of_places = [claims.get(tuple(_place(row[place]) for place in known), []) for row in gold.rows]
    return [claim[0] if len(claim) == 1 else [] for claim in of_places]


def _columns(table: Table, gold: Table, known: Sequence[int], asked: Sequence[int]) -> list[int]:
    """Where the asked columns stand in the answer and, if they do, the known ones: by the header, or in
    the gold's order where there is none of the gold's names."""
    if table.header and len(set(table.header)) == len(table.header):
        at = {name: place for place, name in enumerate(table.header)}
        if len(known) == 1 and UNNAMED in at:
            at.setdefault(gold.header[known[0]], at[UNNAMED])
        if all(gold.header[place] in at for place in asked):
            there = all(gold.header[place] in at for place in known)
            return [at[gold.header[place]] for place in (*asked, *(known if there else ()))]
    if all(len(row) == len(asked) for row in table.rows):
        return list(range(len(asked)))
    return [*asked, *known]
