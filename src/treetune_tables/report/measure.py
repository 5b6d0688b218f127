"""The cells of a reproduction's table, from what its runs left on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from treetune.config.hashing import config_hash
from treetune.rollouts.numbers import declared_ratios
from treetune.runtime.analysis import read_result
from treetune.runtime.directory import MEASURE_AGAIN, verify_answers
from treetune.runtime.manifest import read_config
from treetune.store.checksums import read_record
from treetune_tables.columns import Area, Column
from treetune_tables.intervals import Estimate, of_shares, over_seeds, over_seeds_and_problems
from treetune_tables.report.accuracy_curve import NotReached, area_under, cost_to_reach
from treetune_tables.report.cells import CellResult, Results, SeedResult
from treetune_tables.report.compare import compared
from treetune_tables.report.costs import costs_of
from treetune_tables.report.curves import measured_along, speedup
from treetune_tables.runs import MEASURABLE, Plan, PlannedRun
from treetune_tables.settings import MethodRow
from treetune_tables.values import by_problem, number_in


def measure(plan: Plan) -> Results:
    """Reads every cell. Runs that are missing, failed or of another configuration are left out, and said."""
    table = plan.table
    cells = {
        (row.name, column.name): _cell(plan, row, column) for row in table.rows for column in table.columns
    }
    cells, pairs, comparisons = compared(table, cells)
    costs = {name: costs_of(plan, name) for name in table.order()}
    return Results(plan, cells, costs, pairs, comparisons)


def _cell(plan: Plan, row: MethodRow, column: Column) -> CellResult:
    name = row.cell(column.name).experiment
    if name is None:
        return CellResult(row, column)
    found: list[SeedResult] = []
    absent: dict[int, str] = {}
    reached_by_all = True
    for run in plan.of(name):
        try:
            found.append(_read(plan, run, row, column))
        except NotReached as error:
            absent[run.seed], reached_by_all = str(error), False
        except ValueError as error:
            absent[run.seed] = str(error)
    estimate, notes = None, []
    if found and reached_by_all:  # a mean over those that did would say that all do
        try:
            estimate = _estimate(found, plan, column)
        except ValueError as error:
            notes.append(str(error))
            estimate = over_seeds([one.value for one in found], plan.table.interval)
        if column.evaluation is not None or column.area is not None:
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
    if column.curve is not None and (column.area is not None or column.reach is not None):
        return SeedResult(value=_of_curve(plan, run, column, column.curve), **common)
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


def _of_curve(plan: Plan, run: PlannedRun, column: Column, label: str) -> float:
    """The curve as one number. Raises NotReached."""
    asked = column.area or column.reach
    assert asked is not None
    along = measured_along(plan, run, label)
    points = sorted((costs[asked.over], accuracy) for costs, accuracy in along.values())
    if any(run.name in experiment.needs for experiment in plan.table.experiments.values()):
        points = [(0.0, accuracy) for _, accuracy in points[-1:]]  # what others start from costs them nothing
    if isinstance(asked, Area):
        return area_under(points, asked.upto)
    return cost_to_reach(points, asked.accuracy)


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
    return read_record(folder / "summary.json", MEASURE_AGAIN), folder


def _stored_hash(experiment: Path) -> str:
    """Of the configuration as the run stored it, seed and directory included."""
    return config_hash(read_config(experiment))


def _by_problem(path: Path, value: str) -> dict[str, float] | None:
    verify_answers(path)
    with path.open() as file:
        return by_problem(map(json.loads, file), value)


def _number_at(analysis: Path, path: str | None) -> tuple[float, tuple[float, float] | None]:
    """The number at a dotted key path of an analysis' result, and its interval where it has one."""
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
