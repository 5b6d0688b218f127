"""How rows differ, and which of the differences are ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from treetune_tables.intervals import over_seeds, over_seeds_and_problems
from treetune_tables.report.cells import CellResult, Comparison, SeedResult
from treetune_tables.report.paired import holm, paired_test
from treetune_tables.settings import Reproduction

Cells = Mapping[tuple[str, str], CellResult]


def compared(
    table: Reproduction, cells: Cells
) -> tuple[dict[tuple[str, str], CellResult], list[Comparison], int]:
    """The cells with their difference to the baseline, those between the table's pairs, and their number."""
    wanted = [(row.name, table.baseline) for row in table.rows if table.baseline not in (None, row.name)]
    wanted += [(pair.row, pair.to) for pair in table.pairs]
    found: dict[tuple[str, str | None, str], Comparison] = {}
    remarks: dict[tuple[str, str], str] = {}
    for column in table.columns:
        for row, to in dict.fromkeys(wanted):
            cell, other = cells[row, column.name], cells[to or row, column.name]
            try:
                comparison = _compared(table, cell, other)
            except ValueError as error:
                remarks[row, column.name] = str(error)
                continue
            if comparison is not None:
                found[row, to, column.name] = comparison
    tested = [key for key, one in found.items() if one.p is not None]
    for key, adjusted in zip(tested, holm([found[key].p or 0.0 for key in tested]), strict=True):
        found[key] = replace(found[key], adjusted=adjusted)
    with_differences = {
        (row, column): replace(
            cell,
            against=found.get((row, table.baseline, column)),
            notes=(*cell.notes, *filter(None, [remarks.get((row, column))])),
        )
        for (row, column), cell in cells.items()
    }
    pairs = [
        found[pair.row, pair.to, column.name]
        for pair in table.pairs
        for column in table.columns
        if (pair.row, pair.to, column.name) in found
    ]
    return with_differences, pairs, len(found)


def _compared(table: Reproduction, cell: CellResult, other: CellResult) -> Comparison | None:
    """None where they have no seed in common, or one of them no estimate."""
    own, theirs = _of_every_seed(table, cell), _of_every_seed(table, other)
    common = [seed for seed in own if seed in theirs]
    if cell.is_shared(table) and other.is_shared(table):
        common = common[:1]
    if not common or cell.estimate is None or other.estimate is None:
        return None
    pairs = [(own[seed].by_problem, theirs[seed].by_problem) for seed in common]
    differences = [
        {problem: a[problem] - b[problem] for problem in a}
        for a, b in pairs
        if a is not None and b is not None and a.keys() == b.keys()
    ]
    kind = table.interval
    if len(differences) == len(common):
        difference = over_seeds_and_problems(differences, kind)
    else:
        numbers = [own[seed].value - theirs[seed].value for seed in common]
        difference, differences = over_seeds(numbers, kind), [{"": number} for number in numbers]
    p = paired_test(differences)
    return Comparison(cell.row.name, other.row.name, cell.column, len(common), difference, p)


def _of_every_seed(table: Reproduction, cell: CellResult) -> dict[int, SeedResult]:
    """What a seed is compared by: its own result, or the one that all seeds share."""
    if cell.is_shared(table):
        return {seed: one for seed in table.seeds for one in cell.seeds}
    return {one.seed: one for one in cell.seeds}
