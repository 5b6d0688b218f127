"""The rule `until`: further seeds that a table asks for, and why it asks for no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import fmean
from typing import Literal

from treetune.tables.measure import read
from treetune.tables.runs import TO_DO, TableRuns, all_needed, with_seeds
from treetune.tables.settings import Until
from treetune.tables.statistics import MeanWithInterval

Reason = Literal["narrow", "loses", "at_most", "lacking", "more"]
"""Why a row has the seeds that it has: the interval is as narrow as asked, the row is worse and stopped for
it, there are no further seeds, one of its runs has no result. "more" are to come."""


@dataclass(frozen=True)
class DifferenceVerdict:
    """On the difference of `row` to the row `to`: the first `seeds` of the table's are what it has. `known`
    is its confidence sequence with these, and `next_seed` the one that it lacks. `further` seeds like these
    would make it as narrow as asked; None where nobody knows, or all that are left wouldn't."""

    row: str
    to: str
    seeds: int
    reason: Reason
    known: MeanWithInterval | None = None
    next_seed: int | None = None
    further: int | None = None


def grown(plan: TableRuns) -> TableRuns:
    """The plan with all seeds that the table asks for, as far as the results that are there say. It has at
    most one seed of a row that hasn't been run: what comes after depends on it."""
    while True:
        wanted: dict[str, list[int]] = {}
        for verdict in verdicts(plan):
            if verdict.next_seed is not None:
                for name in experiments_of(plan, verdict.row, verdict.to):
                    wanted.setdefault(name, []).append(verdict.next_seed)
        more = with_seeds(plan, wanted)
        if len(more.runs) == len(plan.runs):
            return plan
        plan = more


def verdicts(plan: TableRuns) -> list[DifferenceVerdict]:
    """Returns a verdict on every difference of the rule, from the results that are there. The same results
    give the same seeds, in whatever order they came."""
    until = plan.table.until
    return [] if until is None else [_verdict(plan, until, row, to) for row, to in plan.table.decisive_pairs]


def _verdict(plan: TableRuns, until: Until, row: str, to: str) -> DifferenceVerdict:
    table = plan.table
    least, most = until.seeds.at_least, until.seeds.at_most or len(table.seeds)
    rows = [next(one for one in table.rows if one.name == name) for name in (row, to)]
    differences: list[float] = []
    known: MeanWithInterval | None = None

    def verdict(count: int, reason: Reason, next_seed: int | None = None) -> DifferenceVerdict:
        further = _further(table.level, until, differences, most) if reason == "more" else None
        return DifferenceVerdict(row, to, count, reason, known, next_seed, further)

    for count, seed in enumerate(table.seeds[:most], start=1):
        runs = [
            next((run for run in plan.of(name) if run.recipe.shared or run.seed == seed), None)
            for name in experiments_of(plan, row, to)
        ]
        if any(run is None for run in runs):
            return verdict(count - 1, "more", seed)
        try:
            own, theirs = (
                read(plan, run, one, table.judged).value for run, one in zip(runs, rows, strict=True) if run
            )
        except ValueError:
            to_come = any(run and plan.statuses[run.key].state in TO_DO for run in runs)
            return verdict(len(differences), "more") if to_come else verdict(count, "lacking")
        differences.append(own - theirs)
        known = until.sequence(differences, table.level)
        if count >= least and known.half_width is not None:
            if known.half_width <= until.difference:
                return verdict(count, "narrow")
            worse = {"higher": known.mean < 0, "lower": known.mean > 0}.get(table.judged.improves, False)
            if until.stop_losers and known.excludes_zero and worse:
                return verdict(count, "loses")
    return verdict(most, "at_most")


def _further(level: float, until: Until, differences: Sequence[float], most: int) -> int | None:
    for count in range(len(differences) + 1, most + 1) if len(differences) > 1 else ():
        like_these = until.sequence(list(islice(cycle(differences), count)), level)
        if like_these.half_width is not None and like_these.half_width <= until.difference:
            return count - len(differences)
    return None


def experiments_of(plan: TableRuns, row: str, to: str) -> list[str]:
    """Returns the experiments of both rows."""
    rows = {one.name: one for one in plan.table.rows}
    names = [rows[name].cell(plan.table.judged.name).experiment for name in (row, to)]
    return [name for name in names if name is not None]


def seconds_a_seed(plan: TableRuns, verdict: DifferenceVerdict) -> float | None:
    """Returns how long both rows and what they need took with a seed, on average; None where nobody knows."""
    names = {
        needed
        for name in experiments_of(plan, verdict.row, verdict.to)
        for needed, _ in all_needed(plan.table, name, [0])
    }
    each = [[run.seconds for run in plan.of(name) if run.seconds] for name in names]
    return sum(map(fmean, each)) if all(each) else None
