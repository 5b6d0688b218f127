"""The rule `until`: further seeds that a table asks for, and why it asks for no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from treetune_tables.columns import Column
from treetune_tables.runs import MEASURABLE, TO_DO, Plan, PlannedRun, problem_means, with_seeds
from treetune_tables.settings import Until
from treetune_tables.statistics import confidence_sequence

ByProblem = Mapping[str, float]

Reason = Literal["narrow", "at_most", "lacking", "more"]
"""Why a row has the seeds that it has: the interval is as narrow as asked, there are no further seeds, one of
its runs has no result. "more" are to come."""


@dataclass(frozen=True)
class Verdict:
    """The first `seeds` of the table's are what a row has. `low` to `high` is the confidence sequence of its
    difference with these, and `next_seed` the one that it lacks."""

    row: str
    seeds: int
    reason: Reason
    low: float | None = None
    high: float | None = None
    next_seed: int | None = None

    @property
    def half_width(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


def grown(plan: Plan) -> Plan:
    """The plan with all seeds that the table asks for, as far as the results that are there say. It has at
    most one seed of a row that hasn't been run: what comes after depends on it."""
    while True:
        wanted = {
            name: [verdict.next_seed]
            for verdict in verdicts(plan)
            if verdict.next_seed is not None
            for name in _experiments(plan, verdict.row)
        }
        more = with_seeds(plan, wanted)
        if len(more.runs) == len(plan.runs):
            return plan
        plan = more


def verdicts(plan: Plan) -> list[Verdict]:
    """Returns a verdict on every row of the rule, from the results that are there. The same results give the
    same seeds, in whatever order they came."""
    until = plan.table.until
    return [] if until is None else [_verdict(plan, until, row) for row in until.rows]


def _verdict(plan: Plan, until: Until, row: str) -> Verdict:
    table = plan.table
    least, most = until.seeds.at_least, until.seeds.at_most or len(table.seeds)
    differences: list[float] = []
    known: tuple[float | None, float | None] = (None, None)
    for count, seed in enumerate(table.seeds[:most], start=1):
        runs = [_run(plan, name, seed) for name in _experiments(plan, row)]
        if any(run is None for run in runs):
            return Verdict(row, count - 1, "more", *known, seed)
        own, theirs = (results_of(plan, run, table.judged) for run in runs if run is not None)
        if own is None or theirs is None or own.keys() != theirs.keys():
            to_come = any(run and plan.statuses[run.key].state in TO_DO for run in runs)
            return Verdict(row, count, "more" if to_come else "lacking", *known)
        differences.append(fmean(own[problem] - theirs[problem] for problem in own))
        if count >= least:
            estimate = confidence_sequence(differences, until.bound)
            narrow = Verdict(row, count, "narrow", estimate.low, estimate.high)
            known = narrow.low, narrow.high
            if narrow.half_width is not None and narrow.half_width <= until.difference:
                return narrow
    return Verdict(row, most, "at_most", *known)


def _experiments(plan: Plan, row: str) -> list[str]:
    """Returns the experiments of the row and of the baseline."""
    rows = {one.name: one for one in plan.table.rows}
    names = [rows[name].cell(plan.table.judged.name).experiment for name in (row, plan.table.baseline or row)]
    return [name for name in names if name is not None]


def _run(plan: Plan, name: str, seed: int) -> PlannedRun | None:
    return next((run for run in plan.of(name) if run.recipe.shared or run.seed == seed), None)


def results_of(plan: Plan, run: PlannedRun, column: Column) -> ByProblem | None:
    """Each problem's mean at the end of training; None where the run has none."""
    if plan.statuses[run.key].state not in MEASURABLE or column.evaluation is None:
        return None
    folder = run.directory.evaluation(run.iterations, column.evaluation)
    return problem_means(folder, column.shown) if (folder / "answers.jsonl").is_file() else None
