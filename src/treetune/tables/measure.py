"""The cells of a table: numbers by seed from what runs left on disk, estimates, and differences of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from treetune.exceptions import NotReached
from treetune.lab.paired import paired
from treetune.rollouts.numbers import declared_ratios
from treetune.runtime.analysis import read_result
from treetune.runtime.directory import MEASURE_AGAIN
from treetune.runtime.manifest import read_config
from treetune.store.checksums import config_hash, read_record
from treetune.tables.columns import Area, MeasuredColumn, number_in
from treetune.tables.curves import (
    Cost,
    area_under,
    cost_to_reach,
    costs_of,
    finished,
    measured_along,
    speedup,
)
from treetune.tables.runs import MEASURABLE, PlannedRun, TableRuns, problem_means
from treetune.tables.settings import MethodRow, Reproduction
from treetune.tables.statistics import (
    SIGNIFICANT,
    MeanWithInterval,
    holm,
    of_shares,
    over_seeds,
    over_seeds_and_problems,
)


@dataclass(frozen=True)
class SeedResult:
    """The number of one seed. `by_problem` (each problem's mean) where it is a mean over answers."""

    seed: int
    value: float
    directory: str
    config_hash: str
    iteration: int
    by_problem: Mapping[str, float] | None = None
    samples: int | None = None
    bounds: tuple[float, float] | None = None
    """An analysis' own interval, over what it looked at."""


@dataclass(frozen=True)
class Comparison:
    """A row less another one, in one column, over the seeds that both have, paired by seed and problem.

    `p` is that of a mean difference of 0 (None where nothing says how much it varies), and `adjusted` what it
    is among all comparisons of the table. Where the table declares some, the interval of a `declared` one is
    a confidence sequence, and there are no p-values: they don't hold at every look.
    """

    row: str
    to: str
    column: MeasuredColumn
    seeds: int
    difference: MeanWithInterval
    p: float | None = None
    adjusted: float | None = None
    declared: bool = False

    @property
    def called(self) -> str | None:
        """The direction, where its interval leaves out 0 and `adjusted` is below 0.05, or it is declared:
        "better" or "worse", or where neither is better "higher" or "lower". Elsewhere None: the two are not
        told apart."""
        told = self.declared or (self.adjusted is not None and self.adjusted < SIGNIFICANT)
        if not told or not self.difference.excludes_zero:
            return None
        up = self.difference.mean > 0
        if self.column.improves == "neither":
            return "higher" if up else "lower"
        return "better" if up == (self.column.improves == "higher") else "worse"


@dataclass(frozen=True)
class CellResult:
    """A cell. `estimate` is None where no seed is measured; `absent` says why, by seed.

    `against` is how it differs from the baseline's cell in the same column.
    """

    row: MethodRow
    column: MeasuredColumn
    seeds: tuple[SeedResult, ...] = ()
    absent: Mapping[int, str] = field(default_factory=dict)
    estimate: MeanWithInterval | None = None
    against: Comparison | None = None
    notes: tuple[str, ...] = ()

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
        return None if self.against is None else self.against.difference

    @property
    def called(self) -> str | None:
        return None if self.against is None else self.against.called

    def is_shared(self, table: Reproduction) -> bool:
        """Returns whether all seeds share the one run that it shows."""
        return self.experiment is not None and table.experiments[self.experiment].shared


@dataclass(frozen=True)
class Results:
    """All cells by (row, column), costs by the table's experiment, comparisons of rows that are not with the
    baseline, how many comparisons there are in all, and by row how many of its runs have failed, and how many
    collapsed: lost half of the best accuracy that they had on the first curve."""

    plan: TableRuns
    cells: Mapping[tuple[str, str], CellResult]
    costs: Mapping[str, list[Cost]]
    pairs: Sequence[Comparison] = ()
    comparisons: int = 0
    fates: Mapping[str, str] = field(default_factory=dict)


def measure(plan: TableRuns) -> Results:
    """Reads every cell. Runs that are missing, failed or of another configuration are left out, and named."""
    table = plan.table
    cells = {
        (row.name, column.name): _cell(plan, row, column) for row in table.rows for column in table.columns
    }
    costs = {name: costs_of(plan, name) for name in table.order()}
    asked = [(row.name, table.baseline) for row in table.rows if table.baseline not in (None, row.name)]
    further = (*table.comparisons, *table.pairs)
    asked += [(pair.row, pair.to) for pair in further]
    found: dict[tuple[str, str | None, str], Comparison] = {}
    remarks: dict[tuple[str, str], tuple[str, ...]] = {}
    for column in table.columns:
        for row, to in dict.fromkeys(asked):
            cell, other = cells[row, column.name], cells[to or row, column.name]
            try:
                comparison = _compared(table, cell, other)
            except ValueError as error:
                remarks[row, column.name] = (str(error),)
                continue
            if comparison is not None:
                found[row, to, column.name] = comparison
    tested = [] if table.comparisons else [key for key, one in found.items() if one.p is not None]
    for key, adjusted in zip(tested, holm([found[key].p or 0.0 for key in tested]), strict=True):
        found[key] = replace(found[key], adjusted=adjusted)
    cells = {
        (row, column): replace(
            cell,
            against=found.get((row, table.baseline, column)),
            notes=(*cell.notes, *remarks.get((row, column), ())),
        )
        for (row, column), cell in cells.items()
    }
    keys = [(pair.row, pair.to, column.name) for pair in dict.fromkeys(further) for column in table.columns]
    pairs = [found[key] for key in keys if key in found]
    fates = {row.name: _fate(plan, row) for row in table.rows}
    return Results(plan, cells, costs, pairs, len(table.comparisons) or len(found), fates)


def _fate(plan: TableRuns, row: MethodRow) -> str:
    runs, collapsed = plan.of(row.experiment), 0
    failed = sum(plan.statuses[run.key].state == "failed" for run in runs)
    labels = [column.curve for column in plan.table.columns if column.curve is not None]
    for run in finished(plan, row.experiment) if labels else ():
        accuracies = [accuracy for _, accuracy in measured_along(plan, run, labels[0]).values()]
        collapsed += bool(accuracies) and accuracies[-1] < max(accuracies) / 2
    return f"{failed}, {collapsed} of {len(runs)}" if runs else "–"


def _compared(table: Reproduction, cell: CellResult, other: CellResult) -> Comparison | None:
    """Returns None where they have no seed in common, or one of them no estimate."""

    def by_seed(cell: CellResult) -> dict[int, SeedResult]:
        if cell.is_shared(table):  # every seed is compared by the one result
            return {seed: one for seed in table.seeds for one in cell.seeds}
        return {one.seed: one for one in cell.seeds}

    own, theirs = by_seed(cell), by_seed(other)
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
    if table.comparisons and table.until is not None:
        numbers = [own[seed].value - theirs[seed].value for seed in common]
        declared = cell.column == table.judged and (cell.row.name, other.row.name) in table.decisive_pairs
        difference = table.until.sequence(numbers, table.level) if declared else over_seeds(numbers, kind)
        names = cell.row.name, other.row.name
        return Comparison(*names, cell.column, len(common), difference, declared=declared)
    if len(differences) == len(common):
        difference = over_seeds_and_problems(differences, kind)
    else:
        numbers = [own[seed].value - theirs[seed].value for seed in common]
        difference, differences = over_seeds(numbers, kind), [{"": number} for number in numbers]
    *_, p = paired(differences)
    return Comparison(cell.row.name, other.row.name, cell.column, len(common), difference, p)


def _cell(plan: TableRuns, row: MethodRow, column: MeasuredColumn) -> CellResult:
    name, kind = row.cell(column.name).experiment, plan.table.interval
    if name is None:
        return CellResult(row, column)
    found: list[SeedResult] = []
    absent: dict[int, str] = {}
    reached_by_all = True
    for run in plan.of(name):
        try:
            found.append(read(plan, run, row, column))
        except ValueError as error:
            absent[run.seed] = str(error)
            reached_by_all = reached_by_all and not isinstance(error, NotReached)
    estimate, notes = None, []
    if found and reached_by_all:  # a mean over those that did would say that all do
        try:
            estimate = _estimate(found, plan, column)
        except ValueError as error:
            notes.append(str(error))
            estimate = over_seeds([one.value for one in found], kind)
        if column.evaluation is not None or column.area is not None:
            estimate = estimate.within(0.0, 1.0 if column.known.share else math.inf)
    return CellResult(row, column, tuple(found), absent, estimate, notes=tuple(notes))


def _estimate(found: list[SeedResult], plan: TableRuns, column: MeasuredColumn) -> MeanWithInterval:
    means = [one.by_problem for one in found if one.by_problem is not None]
    if len(means) == len(found):
        are_shares = column.evaluation is not None and column.known.share
        return (of_shares if are_shares else over_seeds_and_problems)(means, plan.table.interval)
    if len(found) == 1 and found[0].bounds is not None:
        return MeanWithInterval(found[0].value, *found[0].bounds)
    return over_seeds([one.value for one in found], plan.table.interval)


def read(plan: TableRuns, run: PlannedRun, row: MethodRow, column: MeasuredColumn) -> SeedResult:
    """Returns the number of one run. Raises ValueError that says why there is none."""
    status = plan.statuses[run.key]
    if status.state not in MEASURABLE:
        lacking = plan.blocked_by(run) if status.state == "missing" else []
        lacking += [
            f"{name} ({plan.statuses[name, seed].state})"
            for name, seed in run.needs
            if plan.statuses[name, seed].state == "failed"
        ]
        why = f"{status.state}: {status.why}" if status.why else str(status.state)
        raise ValueError(f"skipped, for it needs {', '.join(lacking)}" if lacking else why)
    folder = run.directory.path
    common: dict[str, Any] = {
        "seed": run.seed,
        "directory": str(folder),
        "config_hash": config_hash(read_config(folder)),
        "iteration": run.iterations,
    }
    if column.analysis is not None:
        key = row.cell(column.name).value or column.value
        value, bounds = _number_at(folder / "analyses" / column.analysis, key)
        return SeedResult(value=value, bounds=bounds, **common)
    if column.speedup is not None:
        assert column.curve is not None
        of = _run_of(plan, column.speedup.of, column, run.seed)
        return SeedResult(value=speedup(plan, run, of, column.curve, column.speedup.over), **common)
    if (asked := column.area or column.reach) is not None:
        assert column.curve is not None
        along = measured_along(plan, run, column.curve)
        points = sorted((costs[asked.over], accuracy) for costs, accuracy in along.values())
        if any(run.name in experiment.needs for experiment in plan.table.experiments.values()):
            points = [(0.0, accuracy) for _, accuracy in points[-1:]]  # a start costs the others nothing
        found = (
            area_under(points, asked.upto)
            if isinstance(asked, Area)
            else cost_to_reach(points, asked.accuracy)
        )
        return SeedResult(value=found, **common)
    summary, folder = _summary(plan, run, column)
    common["samples"] = summary["samples"]
    if column.over is not None:
        upper, lower = declared_ratios()[column.number]
        own = number_in(summary, lower, folder / "summary.json")
        if not own:
            raise ValueError(f"no {column.number}: {lower} is 0 in {folder}")
        theirs, there = _summary(plan, _run_of(plan, column.over, column, run.seed), column)
        return SeedResult(value=number_in(theirs, upper, there / "summary.json") / own, **common)
    value = number_in(summary, column.number, folder / "summary.json")
    return SeedResult(value=value, by_problem=problem_means(folder, column.number), **common)


def _run_of(plan: TableRuns, row: str, column: MeasuredColumn, seed: int) -> PlannedRun:
    """Returns the run that fills another row's cell of the column."""
    name = next(one for one in plan.table.rows if one.name == row).cell(column.name).experiment
    if name is None:
        raise ValueError(f"{row} has no experiment in this column")
    run = next((run for run in plan.of(name) if run.recipe.shared or run.seed == seed), None)
    if run is None:
        raise ValueError(f"{name} has no run with seed {seed}")
    if plan.statuses[run.key].state not in MEASURABLE:
        raise ValueError(f"{run.name} is {plan.statuses[run.key].state}")
    return run


def _summary(plan: TableRuns, run: PlannedRun, column: MeasuredColumn) -> tuple[dict[str, Any], Path]:
    """Returns the summary at the run's end on the column's set, and the folder that it is in."""
    assert column.evaluation is not None
    folder = run.directory.evaluation(run.iterations, column.evaluation)
    if not (folder / "summary.json").is_file():
        raise ValueError(plan.statuses[run.key].why or f"not measured on {column.evaluation}")
    return read_record(folder / "summary.json", MEASURE_AGAIN), folder


def _number_at(analysis: Path, path: str | None) -> tuple[float, tuple[float, float] | None]:
    """Returns the number at a dotted key path of an analysis' result, and its interval where it has one."""
    result = analysis / "result.json"
    if path is None:
        raise ValueError(f"the table doesn't say which number of {result}: set value")
    if not result.is_file():
        raise ValueError(f"not analysed: {result} is not there")
    value: Any = read_result(analysis)
    for key in path.split("."):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            known = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"{result} has no {path!r}: at {key!r} there is {known}")
    bounds = None
    if isinstance(value, dict) and {"value", "low", "high"} <= value.keys():
        if value["low"] is not None and value["high"] is not None:
            bounds = float(value["low"]), float(value["high"])
        value = value["value"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{path!r} in {result} is no number")
    return float(value), bounds
