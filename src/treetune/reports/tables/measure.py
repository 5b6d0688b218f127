"""The cells of a reproduction's table, from what its runs left on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from treetune.config.hashing import config_hash
from treetune.episode_generators.numbers import declared_ratios
from treetune.reports.tables.costs import Cost, costs_of
from treetune.reports.tables.curves import speedup
from treetune.tables.columns import Column
from treetune.tables.intervals import Estimate, of_shares, over_seeds, over_seeds_and_problems
from treetune.tables.runs import MEASURABLE, Plan, PlannedRun
from treetune.tables.settings import MethodRow
from treetune.tables.values import by_problem, number_in


@dataclass(frozen=True)
class SeedResult:
    """One seed's number. `by_problem` (each problem's mean) where it is a mean over answers."""

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
class CellResult:
    """One cell. `estimate` is None where no seed is measured; `absent` says why, by seed.

    `difference` is to the baseline's cell in the same column, over the seeds that both have, and
    `called` the way it goes where its interval excludes 0: "better" or "worse", or where neither way is
    better "higher" or "lower".
    """

    row: MethodRow
    column: Column
    seeds: tuple[SeedResult, ...] = ()
    absent: Mapping[int, str] = field(default_factory=dict)
    estimate: Estimate | None = None
    difference: Estimate | None = None
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
    def called(self) -> str | None:
        if self.difference is None or not self.difference.excludes_zero:
            return None
        up = self.difference.mean > 0
        if self.column.improves == "neither":
            return "higher" if up else "lower"
        return "better" if up == (self.column.improves == "higher") else "worse"


@dataclass(frozen=True)
class Results:
    """All cells by (row, column), costs by the table's experiment."""

    plan: Plan
    cells: Mapping[tuple[str, str], CellResult]
    costs: Mapping[str, list[Cost]]


def measure(plan: Plan) -> Results:
    """Reads every cell. Runs that are missing, failed or of another configuration are left out, and said."""
    table = plan.table
    cells = {
        (row.name, column.name): _cell(plan, row, column) for row in table.rows for column in table.columns
    }
    if table.baseline is not None:
        for (row, column), cell in cells.items():
            if row != table.baseline:
                cells[row, column] = _compared(cell, cells[table.baseline, column], plan)
    costs = {name: costs_of(plan, name) for name in table.order()}
    return Results(plan, cells, costs)


def _cell(plan: Plan, row: MethodRow, column: Column) -> CellResult:
    name = row.cell(column.name).experiment
    if name is None:
        return CellResult(row, column)
    found: list[SeedResult] = []
    absent: dict[int, str] = {}
    for run in plan.of(name):
        try:
            found.append(_read(plan, run, row, column))
        except ValueError as error:
            absent[run.seed] = str(error)
    estimate, notes = None, []
    if found:
        try:
            estimate = _estimate(found, plan, column)
        except ValueError as error:
            notes.append(str(error))
            estimate = over_seeds([one.value for one in found], plan.table.interval)
        if column.evaluation is not None:
            estimate = estimate.within(0.0, 1.0 if column.known.share else math.inf)
    return CellResult(row, column, tuple(found), absent, estimate, notes=tuple(notes))


def _estimate(found: list[SeedResult], plan: Plan, column: Column) -> Estimate:
    by_problem = [one.by_problem for one in found if one.by_problem is not None]
    if len(by_problem) == len(found):
        are_shares = column.evaluation is not None and column.known.share
        return (of_shares if are_shares else over_seeds_and_problems)(by_problem, plan.table.interval)
    (first, *others) = found
    if not others and first.bounds is not None:
        return Estimate(first.value, *first.bounds)
    return over_seeds([one.value for one in found], plan.table.interval)


def _read(plan: Plan, run: PlannedRun, row: MethodRow, column: Column) -> SeedResult:
    """Raises ValueError that says why there is no number."""
    status = plan.statuses[run.key]
    if status.state not in MEASURABLE:
        lacking = plan.blocked_by(run) if status.state == "missing" else []
        lacking += [
            f"{name} ({plan.statuses[name, seed].state})"
            for name, seed in run.needs
            if plan.statuses[name, seed].state == "failed"
        ]
        reason = f"{status.state}: {status.why}" if status.why else str(status.state)
        raise ValueError(f"skipped, for it needs {', '.join(lacking)}" if lacking else reason)
    directory = run.directory
    iteration = run.iterations
    common: dict[str, Any] = {
        "seed": run.seed,
        "directory": str(directory.path),
        "config_hash": _stored_hash(directory.path),
        "iteration": iteration,
    }
    if column.analysis is not None:
        path = row.cell(column.name).value or column.value
        value, bounds = _number_at(directory.path / "analyses" / column.analysis, path)
        return SeedResult(value=value, bounds=bounds, **common)
    if column.speedup is not None:
        assert column.curve is not None
        of = _run_of(plan, column.speedup.of, column, run.seed)
        return SeedResult(value=speedup(plan, run, of, column.curve, column.speedup.over), **common)
    summary, folder = _summary(plan, run, column)
    common["samples"] = summary["samples"]
    if column.over is not None:
        upper, lower = declared_ratios()[column.shown]
        own = number_in(summary, lower, folder / "summary.json")
        if not own:
            raise ValueError(f"no {column.shown}: {lower} is 0 in {folder}")
        theirs, there = _summary(plan, _run_of(plan, column.over, column, run.seed), column)
        return SeedResult(value=number_in(theirs, upper, there / "summary.json") / own, **common)
    value = number_in(summary, column.shown, folder / "summary.json")
    return SeedResult(value=value, by_problem=_by_problem(folder / "answers.jsonl", column.shown), **common)


def _run_of(plan: Plan, row: str, column: Column, seed: int) -> PlannedRun:
    """The run that fills another row's cell of the column."""
    name = next(one for one in plan.table.rows if one.name == row).cell(column.name).experiment
    if name is None:
        raise ValueError(f"{row} has no experiment in this column")
    run = next((run for run in plan.of(name) if run.recipe.shared or run.seed == seed), None)
    if run is None:
        raise ValueError(f"{name} has no run with seed {seed}")
    if plan.statuses[run.key].state not in MEASURABLE:
        raise ValueError(f"{run.name} is {plan.statuses[run.key].state}")
    return run


def _summary(plan: Plan, run: PlannedRun, column: Column) -> tuple[dict[str, Any], Path]:
    """Of the run's end on the column's set, and the folder that it is in."""
    assert column.evaluation is not None
    folder = run.directory.evaluation(run.iterations, column.evaluation)
    if not (folder / "summary.json").is_file():
        raise ValueError(plan.statuses[run.key].why or f"not measured on {column.evaluation}")
    return json.loads((folder / "summary.json").read_text()), folder


def _stored_hash(experiment: Path) -> str:
    """Of the configuration as the run stored it, seed and directory included."""
    return config_hash(json.loads((experiment / "config.json").read_text()))


def _by_problem(path: Path, value: str) -> dict[str, float] | None:
    with path.open() as file:
        return by_problem(map(json.loads, file), value)


def _number_at(analysis: Path, path: str | None) -> tuple[float, tuple[float, float] | None]:
    """The number at a dotted key path of an analysis' result, and its interval where it has one."""
    result = analysis / "result.json"
    if path is None:
        raise ValueError(f"the table doesn't say which number of {result}: set value")
    if not result.is_file():
        raise ValueError(f"not analysed: {result} is not there")
    value: Any = json.loads(result.read_text())
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


def _is_shared(cell: CellResult, plan: Plan) -> bool:
    return cell.experiment is not None and plan.table.experiments[cell.experiment].shared


def _of_every_seed(cell: CellResult, plan: Plan) -> dict[int, SeedResult]:
    """What a seed is compared by: its own result, or the one that all seeds share."""
    if _is_shared(cell, plan):
        return {seed: one for seed in plan.table.seeds for one in cell.seeds}
    return {one.seed: one for one in cell.seeds}


def _compared(cell: CellResult, base: CellResult, plan: Plan) -> CellResult:
    """With the difference to the baseline, paired by seed and problem."""
    own, theirs = _of_every_seed(cell, plan), _of_every_seed(base, plan)
    common = [seed for seed in own if seed in theirs]
    if _is_shared(cell, plan) and _is_shared(base, plan):
        common = common[:1]
    if not common:
        return cell
    kind = plan.table.interval
    try:
        pairs = [(own[seed].by_problem, theirs[seed].by_problem) for seed in common]
        by_problem = [
            {problem: a[problem] - b[problem] for problem in a}
            for a, b in pairs
            if a is not None and b is not None and a.keys() == b.keys()
        ]
        if len(by_problem) == len(common):
            difference = over_seeds_and_problems(by_problem, kind)
        else:
            difference = over_seeds([own[seed].value - theirs[seed].value for seed in common], kind)
    except ValueError as error:
        return replace(cell, notes=(*cell.notes, str(error)))
    return replace(cell, difference=difference)
