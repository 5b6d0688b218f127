"""The rule `until`: finds the further seeds that a table needs, or the reason why it needs no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import fmean
from typing import Literal

from treetune.tables.measure import read_seed_result
from treetune.tables.runs import STATES_TO_DO, PlannedRun, TableRuns, add_seeds, needed_run_keys
from treetune.tables.settings import MeasuredColumn, MethodRow, Until
from treetune.tables.statistics import MeanWithInterval

Reason = Literal["narrow", "loses", "at_most", "lacking", "more"]
"""The reason why the difference of two rows gets no further seeds, or that it gets more:

* narrow: the interval of the difference is as narrow as the table asks for;
* loses: the row is worse than the other one, and `stop_losers` gives it no further seeds;
* at_most: the table allows no further seeds;
* lacking: one of the runs has no result;
* more: further seeds are to be run.
"""


@dataclass(frozen=True)
class DifferenceVerdict:
    """The state of the difference between `row` and the row `to`, after the first `seeds` of the table's
    seeds.

    Example::

        DifferenceVerdict(
            "PPO", "GRPO", 8, "more", MeanWithInterval(0.06, -0.01, 0.13), next_seed=9, further=12
        )
    """

    row: str
    to: str
    seeds: int
    reason: Reason
    known: MeanWithInterval | None = None
    """The confidence sequence of the difference over these seeds."""
    next_seed: int | None = None
    """The seed to be added to the plan next; None where none is needed or it is in the plan already."""
    further: int | None = None
    """The number of further seeds that would make the interval as narrow as the table asks for, if their
    differences repeated those so far. None where the number is unknown, and where all remaining seeds are too
    few."""


def add_needed_seeds(plan: TableRuns) -> TableRuns:
    """Returns the plan with all seeds that the table needs, judged by the results on disk.

    At most one added seed of a row has no result yet: its result decides whether another seed follows.
    """
    while True:  # an added seed may have results on disk already, after which the next one may be needed
        wanted_seeds: dict[str, list[int]] = {}
        for verdict in judge_differences(plan):
            if verdict.next_seed is not None:
                for name in experiments_of_rows(plan, verdict.row, verdict.to):
                    wanted_seeds.setdefault(name, []).append(verdict.next_seed)
        larger_plan = add_seeds(plan, wanted_seeds)
        if len(larger_plan.runs) == len(plan.runs):
            return plan
        plan = larger_plan


def judge_differences(plan: TableRuns) -> list[DifferenceVerdict]:
    """Returns a verdict on every difference that the rule `until` names, from the results on disk.

    The order in which results arrived changes nothing: seeds are always looked at in the table's order.
    """
    until = plan.table.until
    if until is None:
        return []
    return [_judge_difference(plan, until, row, other_row) for row, other_row in plan.table.decisive_pairs]


def _judge_difference(plan: TableRuns, until: Until, row: str, other_row: str) -> DifferenceVerdict:
    """Adds seed after seed to the difference of two rows, and returns the verdict.

    It stops at the first seed with which there are enough seeds, that has no result, or that isn't planned
    yet.
    """
    table = plan.table
    fewest_seeds = until.seeds.at_least
    most_seeds = until.seeds.at_most or len(table.seeds)
    rows_by_name = {table_row.name: table_row for table_row in table.rows}
    differences: list[float] = []
    sequence: MeanWithInterval | None = None

    def verdict(count: int, reason: Reason, next_seed: int | None = None) -> DifferenceVerdict:
        further = _further_seeds(table.level, until, differences, most_seeds) if reason == "more" else None
        return DifferenceVerdict(row, other_row, count, reason, sequence, next_seed, further)

    experiments = experiments_of_rows(plan, row, other_row)
    for count, seed in enumerate(table.seeds[:most_seeds], start=1):
        if any(not _is_planned(plan, experiment, seed) for experiment in experiments):
            return verdict(count - 1, "more", next_seed=seed)
        runs = [plan.run(experiment, seed) for experiment in experiments]
        difference = _read_difference(plan, rows_by_name[row], rows_by_name[other_row], runs)
        if difference is None:
            is_to_come = any(plan.statuses[run.key].state in (*STATES_TO_DO, "running") for run in runs)
            # No next seed is asked for while a result is to come, since this one is planned already.
            return verdict(count - 1, "more") if is_to_come else verdict(count, "lacking")
        differences.append(difference)
        sequence = until.sequence(differences, table.level)
        if count >= fewest_seeds and sequence.half_width is not None:
            if sequence.half_width <= until.difference:
                return verdict(count, "narrow")
            if until.stop_losers and _is_worse(sequence, table.judged_column):
                return verdict(count, "loses")
    return verdict(most_seeds, "at_most")


def _read_difference(
    plan: TableRuns, row: MethodRow, other_row: MethodRow, runs: Sequence[PlannedRun]
) -> float | None:
    """Returns the difference of two rows with one seed; None if one of their runs has no result, or none yet.

    `runs` has the two rows' runs with the seed.
    """
    # There are two: the check of the table's settings refuses a compared row without an experiment.
    run, other_run = runs
    column = plan.table.judged_column
    try:
        value = read_seed_result(plan, run, row, column).value
        other_value = read_seed_result(plan, other_run, other_row, column).value
    except ValueError:
        return None
    return value - other_value


def _is_worse(difference: MeanWithInterval, column: MeasuredColumn) -> bool:
    """Returns whether a difference shows that the row is worse than the other one."""
    if not difference.excludes_zero:
        return False
    better_direction = column.improves  # "higher", "lower" or "neither"
    if better_direction == "lower":
        return difference.mean > 0
    return better_direction == "higher" and difference.mean < 0


def _is_planned(plan: TableRuns, name: str, seed: int) -> bool:
    return any(run.recipe.shared or run.seed == seed for run in plan.runs_of(name))


def _further_seeds(level: float, until: Until, differences: Sequence[float], most_seeds: int) -> int | None:
    """Returns how many further seeds would suffice if their differences repeated those so far.

    Returns None for fewer than two differences, and where `most_seeds` seeds in all would not suffice."""
    if len(differences) < 2:
        return None
    for count in range(len(differences) + 1, most_seeds + 1):
        repeated = list(islice(cycle(differences), count))
        half_width = until.sequence(repeated, level).half_width
        if half_width is not None and half_width <= until.difference:
            return count - len(differences)
    return None


def experiments_of_rows(plan: TableRuns, row: str, other_row: str) -> list[str]:
    """Returns the experiments of both rows in the column whose differences decide about further seeds."""
    rows_by_name = {table_row.name: table_row for table_row in plan.table.rows}
    column = plan.table.judged_column.name
    names = [rows_by_name[name].cell(column).experiment for name in (row, other_row)]
    return [name for name in names if name is not None]


def seconds_a_seed(plan: TableRuns, verdict: DifferenceVerdict) -> float | None:
    """Returns the seconds that one seed of both rows takes on average, with all runs that it needs.

    Returns None where an experiment has no run with recorded seconds.
    """
    names = set()
    for name in experiments_of_rows(plan, verdict.row, verdict.to):
        any_seed = 0  # only the names of the needed runs count
        names |= {needed for needed, _ in needed_run_keys(plan.table, name, [any_seed])}
    means = []
    for name in names:
        seconds = [run.seconds for run in plan.runs_of(name) if run.seconds]
        if not seconds:
            return None
        means.append(fmean(seconds))
    return sum(means)
