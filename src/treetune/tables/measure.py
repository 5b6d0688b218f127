"""Fills the cells of a table: reads numbers by seed from disk, estimates means, and compares rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from treetune.exceptions import NotReached
from treetune.lab.paired import compare_pairs
from treetune.rollouts.numbers import declared_ratios
from treetune.runtime.analysis import read_result
from treetune.runtime.directory import MEASURE_AGAIN_REMEDY, RESULT, SUMMARY
from treetune.runtime.manifest import read_config
from treetune.store.checksums import config_hash, read_record
from treetune.tables.columns import Axis, MeasuredColumn, read_number_of_summary
from treetune.tables.curves import (
    Cost,
    area_under,
    cost_to_reach,
    read_costs,
    read_measured_points,
    speedup,
    trained_runs,
)
from treetune.tables.runs import STATES_TO_DO, TRAINED_STATES, PlannedRun, TableRuns, problem_means
from treetune.tables.settings import MethodRow, Reproduction
from treetune.tables.statistics import (
    SIGNIFICANCE_LEVEL,
    MeanWithInterval,
    holm,
    interval_of_shares,
    interval_over_seeds,
    interval_over_seeds_and_problems,
)


@dataclass(frozen=True)
class SeedResult:
    """The number of one seed in a cell.

    Example: `SeedResult(1, 0.53, "experiments/seed-1/ppo", "9f2c…", 1000, {"test/0": 0.75, …}, samples=16)`.
    """

    seed: int
    value: float
    directory: str
    config_hash: str
    iteration: int
    by_problem: Mapping[str, float] | None = None
    """Each problem's mean, where the number is a mean over answers."""
    samples: int | None = None
    """The number of answers to each problem."""
    bounds: tuple[float, float] | None = None
    """The interval that an analysis gives with its number."""


@dataclass(frozen=True)
class Comparison:
    """The difference between two rows (`row` minus `to`) in one column, paired by seed and problem.

    Example::

        difference = MeanWithInterval(0.06, 0.02, 0.1)
        Comparison("PPO", "GRPO", column, seeds=3, difference=difference, p=0.004, adjusted=0.012)
    """

    row: str
    to: str
    column: MeasuredColumn
    seeds: int
    """The number of seeds that both rows have."""
    difference: MeanWithInterval
    p: float | None = None
    """The p-value of the hypothesis that the mean difference is 0. None where the spread is unknown, and
    where the table declares comparisons: their results are looked at again and again, which p-values don't
    allow."""
    adjusted: float | None = None
    """The p-value after Holm's correction for all comparisons of the table that have a p-value."""
    declared: bool = False
    """Whether the table declared the comparison before anything ran; its interval is then a confidence
    sequence."""

    @property
    def significant_direction(self) -> str | None:
        """The direction of a significant difference; None where it isn't significant.

        "better" or "worse", or "higher" or "lower" where neither direction is an improvement. A difference is
        significant if its interval excludes 0 and one more condition holds: the table declared the comparison
        before anything ran, or the adjusted p is below 0.05.
        """
        has_small_p = self.adjusted is not None and self.adjusted < SIGNIFICANCE_LEVEL
        is_significant = self.difference.excludes_zero and (self.declared or has_small_p)
        if not is_significant:
            return None
        is_higher = self.difference.mean > 0
        if self.column.improves == "neither":
            return "higher" if is_higher else "lower"
        is_better = is_higher if self.column.improves == "higher" else not is_higher
        return "better" if is_better else "worse"


@dataclass(frozen=True)
class CellResult:
    """A cell of the table: one row in one column, over all seeds."""

    row: MethodRow
    column: MeasuredColumn
    seeds: tuple[SeedResult, ...] = ()
    absent: Mapping[int, str] = field(default_factory=dict)
    """The reason why a seed has no number, by seed: {3: "failed: …"}."""
    estimate: MeanWithInterval | None = None
    """The mean over seeds; None where no seed has a number."""
    comparison_to_baseline: Comparison | None = None
    """The difference to the baseline's cell in the same column; None where there is none."""
    notes: tuple[str, ...] = ()
    """Messages about an estimate or a comparison that could not be made as usual, for example because seeds
    were measured on different problems."""

    @property
    def published(self) -> float | None:
        return self.row.cell(self.column.name).published

    @property
    def source(self) -> str | None:
        return self.row.cell(self.column.name).source

    @property
    def experiment(self) -> str | None:
        return self.row.cell(self.column.name).experiment

    @property
    def difference(self) -> MeanWithInterval | None:
        return None if self.comparison_to_baseline is None else self.comparison_to_baseline.difference

    @property
    def significant_direction(self) -> str | None:
        return (
            None if self.comparison_to_baseline is None else self.comparison_to_baseline.significant_direction
        )

    def is_shared(self, table: Reproduction) -> bool:
        """Returns whether the cell shows a single run that all seeds share."""
        return self.experiment is not None and table.experiments[self.experiment].shared


@dataclass(frozen=True)
class Results:
    """Everything that a table shows."""

    plan: TableRuns
    cells: Mapping[tuple[str, str], CellResult]
    """The cells by the names of their row and column."""
    costs: Mapping[str, list[Cost]]
    """The costs of finished runs, by the experiment's name in the table."""
    pairs: Sequence[Comparison] = ()
    """The comparisons that the table declares or names as pairs, in each column."""
    comparisons: int = 0
    """The number of declared comparisons. If the table declares none, it is the number of p-values, for which
    Holm's correction corrects."""
    fates: Mapping[str, str] = field(default_factory=dict)
    """By the name of the row, how many of its runs failed and how many collapsed: "0, 1 of 3"."""


def measure_cells(plan: TableRuns) -> Results:
    """Reads every cell, and compares rows.

    Runs that are missing, have failed or have another configuration are left out; their cells say so.
    """
    table = plan.table
    cells = _read_cells(plan)
    costs = {name: read_costs(plan, name) for name in table.order()}
    baseline_pairs = []
    if table.baseline is not None:
        baseline_pairs = [(row.name, table.baseline) for row in table.rows if row.name != table.baseline]
    # The pairs that the table names, each once.
    named_pairs = list(dict.fromkeys((pair.row, pair.to) for pair in (*table.comparisons, *table.pairs)))
    comparisons: dict[tuple[str, str, str], Comparison] = {}  # by row, other row, column
    remarks: dict[tuple[str, str], list[str]] = {}  # by row and column
    for column in table.columns:
        for row, other_row in dict.fromkeys([*baseline_pairs, *named_pairs]):
            try:
                comparison = _compare(table, cells[row, column.name], cells[other_row, column.name])
            except ValueError as error:  # such as seeds that were measured on different problems
                remarks.setdefault((row, column.name), []).append(str(error))
                continue
            if comparison is not None:
                comparisons[row, other_row, column.name] = comparison
    n_comparisons = len(table.comparisons)
    # With declared comparisons, the results decide how many seeds are run, so they are looked at again and
    # again. P-values are not valid then, and there are none.
    if not table.comparisons:
        p_values = {key: comparison.p for key, comparison in comparisons.items() if comparison.p is not None}
        for key, adjusted in zip(p_values, holm(list(p_values.values())), strict=True):
            comparisons[key] = replace(comparisons[key], adjusted=adjusted)
        n_comparisons = len(p_values)
    for (row, column_name), cell in cells.items():
        to_baseline = None
        if table.baseline is not None:
            to_baseline = comparisons.get((row, table.baseline, column_name))
        different_remarks = dict.fromkeys(remarks.get((row, column_name), ()))
        cells[row, column_name] = replace(
            cell, comparison_to_baseline=to_baseline, notes=(*cell.notes, *different_remarks)
        )
    comparisons_of_pairs = []
    for row, other_row in named_pairs:
        for column in table.columns:
            if (row, other_row, column.name) in comparisons:
                comparisons_of_pairs.append(comparisons[row, other_row, column.name])
    failed_and_collapsed = {row.name: _failed_and_collapsed(plan, row) for row in table.rows}
    return Results(plan, cells, costs, comparisons_of_pairs, n_comparisons, fates=failed_and_collapsed)


def _failed_and_collapsed(plan: TableRuns, row: MethodRow) -> str:
    """Returns how many of a row's runs failed, and how many collapsed: "0, 1 of 3".

    A run has collapsed if it ends with less than half of its best accuracy on the table's first curve.
    """
    runs = plan.runs_of(row.experiment)
    if not runs:
        return "–"
    failed = sum(plan.statuses[run.key].state == "failed" for run in runs)
    collapsed = 0
    labels = [column.curve for column in plan.table.columns if column.curve is not None]
    if labels:
        for run in trained_runs(plan, row.experiment):
            accuracies = [accuracy for _, accuracy in read_measured_points(plan, run, labels[0]).values()]
            if accuracies and accuracies[-1] < max(accuracies) / 2:
                collapsed += 1
    return f"{failed}, {collapsed} of {len(runs)}"


def _compare(table: Reproduction, cell: CellResult, other_cell: CellResult) -> Comparison | None:
    """Compares two cells of a column, paired by seed, and also by problem where both cells have means of
    problems.

    Returns None where the cells have no seed in common, and where one of them has no estimate.
    """
    by_seed, other_by_seed = _results_by_seed(table, cell), _results_by_seed(table, other_cell)
    seeds = [seed for seed in by_seed if seed in other_by_seed]
    if cell.is_shared(table) and other_cell.is_shared(table):
        seeds = seeds[:1]  # every seed has the same two results
    if not seeds or cell.estimate is None or other_cell.estimate is None:
        return None
    pairs = [(by_seed[seed], other_by_seed[seed]) for seed in seeds]
    differences = [result.value - other_result.value for result, other_result in pairs]
    names, interval_kind = (cell.row.name, other_cell.row.name), table.interval
    if table.comparisons and table.until is not None:
        # The results decide how many seeds are run, so they are looked at again and again. Only a confidence
        # sequence is valid at every look. Differences that the table declared have such a sequence. All other
        # differences are exploratory, and have an ordinary interval. No difference has a p-value.
        declared = cell.column == table.judged_column and names in table.decisive_pairs
        if declared:
            difference = table.until.sequence(differences, table.level)
        else:
            difference = interval_over_seeds(differences, interval_kind)
        return Comparison(*names, cell.column, len(seeds), difference, declared=declared)
    differences_by_problem = []  # one entry for each seed whose two runs have means of the same problems
    for result, other_result in pairs:
        means, other_means = result.by_problem, other_result.by_problem
        if means is not None and other_means is not None and means.keys() == other_means.keys():
            differences_by_problem.append(
                {problem: means[problem] - other_means[problem] for problem in means}
            )
    if len(differences_by_problem) == len(seeds):
        difference = interval_over_seeds_and_problems(differences_by_problem, interval_kind)
    else:
        difference = interval_over_seeds(differences, interval_kind)
        # As if there were a single problem: the p-value below is then one over seeds alone.
        differences_by_problem = [{"": number} for number in differences]
    *_, p = compare_pairs(differences_by_problem)  # the mean and the interval come from `difference`
    return Comparison(*names, cell.column, len(seeds), difference, p)


def _results_by_seed(table: Reproduction, cell: CellResult) -> dict[int, SeedResult]:
    if cell.is_shared(table) and cell.seeds:
        [only_result] = cell.seeds  # it is compared with the result of every seed
        return dict.fromkeys(table.seeds, only_result)
    return {result.seed: result for result in cell.seeds}


def _read_cells(plan: TableRuns) -> dict[tuple[str, str], CellResult]:
    """Returns the table's cells, by the names of their row and column."""
    cells = {}
    for row in plan.table.rows:
        for column in plan.table.columns:
            cells[row.name, column.name] = _read_cell(plan, row, column)
    return cells


def _read_cell(plan: TableRuns, row: MethodRow, column: MeasuredColumn) -> CellResult:
    """Returns a cell with the result of each seed, the reasons for missing results, and the mean over seeds.

    The mean is missing where there is no result, and where some seed never reaches the accuracy whose cost
    the column shows.
    """
    name = row.cell(column.name).experiment
    if name is None:
        return CellResult(row, column)
    results: list[SeedResult] = []
    absent: dict[int, str] = {}
    reached_by_all = True
    for run in plan.runs_of(name):
        try:
            results.append(read_seed_result(plan, run, row, column))
        except ValueError as error:
            absent[run.seed] = str(error)
            reached_by_all = reached_by_all and not isinstance(error, NotReached)
    estimate, notes = None, []
    # Where some seeds never reach the accuracy, a mean over the others would look as if all did.
    if results and reached_by_all:
        try:
            estimate = _estimate_mean(results, plan, column)
        except ValueError as error:
            notes.append(str(error))
            estimate = interval_over_seeds([result.value for result in results], plan.table.interval)
        # Areas and the numbers of evaluations are at least 0, and shares at most 1. The computed interval may
        # reach beyond these limits. A number of an analysis may have any value.
        if column.evaluation is not None or column.area is not None:
            largest = 1.0 if column.kind.share else math.inf
            estimate = estimate.within(smallest=0.0, largest=largest)
    return CellResult(row, column, tuple(results), absent, estimate, notes=tuple(notes))


def _estimate_mean(results: list[SeedResult], plan: TableRuns, column: MeasuredColumn) -> MeanWithInterval:
    """Returns a cell's mean with its interval.

    If every seed has means of problems, the interval is over seeds and problems, and otherwise only over
    seeds. A single seed whose analysis gives an interval keeps that interval.
    """
    means = [result.by_problem for result in results if result.by_problem is not None]
    if len(means) == len(results):
        if column.kind.share:
            # Shares that are all 0, or all 1, need an interval of another kind: resampling finds no spread.
            return interval_of_shares(means, plan.table.interval)
        return interval_over_seeds_and_problems(means, plan.table.interval)
    if len(results) == 1 and results[0].bounds is not None:
        return MeanWithInterval(results[0].value, *results[0].bounds)
    return interval_over_seeds([result.value for result in results], plan.table.interval)


def read_seed_result(plan: TableRuns, run: PlannedRun, row: MethodRow, column: MeasuredColumn) -> SeedResult:
    """Returns the number of one run in a row and column.

    Raises ValueError where there is none, with a message that says why."""
    _refuse_unmeasurable(plan, run)
    directory = run.directory.path
    common_fields: dict[str, Any] = {
        "seed": run.seed,
        "directory": str(directory),
        "config_hash": config_hash(read_config(directory)),
        "iteration": run.iterations,
    }
    if column.analysis is not None:
        key = row.cell(column.name).value or column.value  # a row may show another number of the analysis
        value, bounds = _read_number(run.directory.analysis_folder(column.analysis), key)
        return SeedResult(value=value, bounds=bounds, **common_fields)
    if column.speedup is not None:
        assert column.curve is not None
        other_run = _find_run(plan, column.speedup.of, column, run.seed)
        factor = speedup(plan, run, other_run, column.curve, column.speedup.over)
        return SeedResult(value=factor, **common_fields)
    if column.area is not None:
        points = _points_of_curve(plan, run, column, column.area.over)
        return SeedResult(value=area_under(points, column.area.upto), **common_fields)
    if column.reach is not None:
        points = _points_of_curve(plan, run, column, column.reach.over)
        return SeedResult(value=cost_to_reach(points, column.reach.accuracy), **common_fields)
    summary, folder = _read_summary(plan, run, column)
    common_fields["samples"] = summary["samples"]
    if column.over is not None:
        # A ratio such as "speed_up" is a number of the row `over`, divided by a number of this row.
        numerator_name, denominator_name = declared_ratios()[column.number]
        denominator = read_number_of_summary(summary, denominator_name, folder / SUMMARY)
        if not denominator:
            raise ValueError(f"no {column.number}: {denominator_name} is 0 in {folder}")
        other_run = _find_run(plan, column.over, column, run.seed)
        other_summary, other_folder = _read_summary(plan, other_run, column)
        numerator = read_number_of_summary(other_summary, numerator_name, other_folder / SUMMARY)
        return SeedResult(value=numerator / denominator, **common_fields)
    value = read_number_of_summary(summary, column.number, folder / SUMMARY)
    return SeedResult(value=value, by_problem=problem_means(folder, column.number), **common_fields)


def _refuse_unmeasurable(plan: TableRuns, run: PlannedRun) -> None:
    """Raises ValueError, with the reason, for a run that is not trained to the end."""
    status = plan.statuses[run.key]
    if status.state in TRAINED_STATES:
        return
    unmet_needs = []
    if status.state == "missing":  # the other states have their reason in `status.why`
        unmet_needs = plan.blocked_by(run)
    if status.state in STATES_TO_DO:  # any other state keeps the run from being run, whatever it needs
        # `blocked_by` leaves out needed runs that have failed, since the next `reproduce_table` tries again.
        for name, seed in run.needs:
            state = plan.statuses[name, seed].state
            if state == "failed":
                unmet_needs.append(f"{name} ({state})")
    if unmet_needs:
        raise ValueError(f"skipped, because it needs {', '.join(unmet_needs)}")
    raise ValueError(f"{status.state}: {status.why}" if status.why else status.state)


def _points_of_curve(
    plan: TableRuns, run: PlannedRun, column: MeasuredColumn, axis: Axis
) -> list[tuple[float, float]]:
    """Returns the accuracies on the column's curve as (cost, accuracy), the lowest cost first. `axis` is the
    kind of cost."""
    assert column.curve is not None
    measurements = read_measured_points(plan, run, column.curve).values()
    points = sorted((costs[axis], accuracy) for costs, accuracy in measurements)
    if points and run.name in plan.table.start_experiments:
        # Other experiments start from this run. They begin with its last accuracy, at no cost.
        _, last_accuracy = points[-1]
        return [(0.0, last_accuracy)]
    return points


def _find_run(plan: TableRuns, row_name: str, column: MeasuredColumn, seed: int) -> PlannedRun:
    """Returns the run whose result with this seed is shown in a row and column.

    Raises ValueError where there is none, or where it is not trained to the end."""
    row = next(row for row in plan.table.rows if row.name == row_name)
    name = row.cell(column.name).experiment
    if name is None:
        raise ValueError(f"{row_name} has no experiment in this column")
    # A shared experiment is run only once, for all seeds.
    run = next((run for run in plan.runs_of(name) if run.recipe.shared or run.seed == seed), None)
    if run is None:
        raise ValueError(f"{name} has no run with seed {seed}")
    if plan.statuses[run.key].state not in TRAINED_STATES:
        raise ValueError(f"{run.name} is {plan.statuses[run.key].state}")
    return run


def _read_summary(plan: TableRuns, run: PlannedRun, column: MeasuredColumn) -> tuple[dict[str, Any], Path]:
    """Returns the summary of the column's evaluation at the end of a run, and the evaluation's folder."""
    assert column.evaluation is not None
    folder = run.directory.evaluation_folder(run.iterations, column.evaluation)
    if not (folder / SUMMARY).is_file():
        raise ValueError(plan.statuses[run.key].why or f"not measured on {column.evaluation}")
    return read_record(folder / SUMMARY, MEASURE_AGAIN_REMEDY), folder


def _read_number(analysis: Path, path: str | None) -> tuple[float, tuple[float, float] | None]:
    """Returns the number at a dotted key path of an analysis' result, and its interval if it has one.

    `_read_number(folder, "states.0.error")` reads 0.2 from `{"states": [{"error": 0.2}]}`, and 0.2 with the
    interval (0.1, 0.3) from `{"states": [{"error": {"value": 0.2, "low": 0.1, "high": 0.3}}]}`.
    """
    result = analysis / RESULT
    if path is None:
        raise ValueError(f"the table doesn't say which number of {result}: set value")
    if not result.is_file():
        raise ValueError(f"not analysed: {result} is missing")
    value: Any = read_result(analysis)
    for key in path.split("."):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            content = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"{result} has no {path!r}: instead of {key!r} it has {content}")
    bounds = None
    if isinstance(value, dict) and {"value", "low", "high"} <= value.keys():
        if value["low"] is not None and value["high"] is not None:
            bounds = float(value["low"]), float(value["high"])
        value = value["value"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{path!r} in {result} is not a number")
    return float(value), bounds
