"""Accuracy along training, over what it cost: tokens, seconds, gradient steps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

from treetune.reports.experiment import read_summaries
from treetune.reports.tables.costs import seconds_of, tokens_of
from treetune.tables.columns import Axis, Column
from treetune.tables.runs import MEASURABLE, Plan, PlannedRun
from treetune.tables.settings import MethodRow
from treetune.tables.values import PASS_AT_1, number_in

Measured = dict[int, tuple[dict[Axis, float], float]]
"""(costs so far, value) by finished iterations."""

AXES: Mapping[Axis, str] = {
    "tokens": "sampled tokens",
    "seconds": "seconds without evaluation",
    "steps": "gradient steps",
}


@dataclass(frozen=True)
class CurvePoint:
    """All seeds after the same number of iterations: mean costs, mean accuracy and its range."""

    iteration: int
    costs: Mapping[Axis, float]
    mean: float
    low: float
    high: float
    by_seed: Mapping[int, float]


@dataclass(frozen=True)
class Curve:
    """One row in one column. A row with a single point is a level to compare with."""

    row: MethodRow
    column: Column
    points: tuple[CurvePoint, ...]
    seeds: tuple[int, ...]


def curves(plan: Plan) -> list[Curve]:
    """Of every column that names a set to draw, and every row with a finished run."""
    found = []
    for column in plan.table.columns:
        if column.curve is None:
            continue
        for row in plan.table.rows:
            name = row.cell(column.name).experiment
            if name is not None and (curve := _curve(plan, row, column, name)) is not None:
                found.append(curve)
    return found


def speedup(plan: Plan, run: PlannedRun, of: PlannedRun, label: str, axis: Axis) -> float:
    """How many times less of `axis` a run needs than another until that one's best accuracy.

    Each at the first checkpoint that is as good. Raises ValueError where one of them never is.
    """
    theirs, own = measured_along(plan, of, label), measured_along(plan, run, label)
    if not theirs or not own:
        raise ValueError(f"not measured along training on {label!r}")
    best = max(accuracy for _, accuracy in theirs.values())
    spent = next(costs[axis] for costs, accuracy in theirs.values() if accuracy >= best)
    needed = [costs[axis] for costs, accuracy in own.values() if accuracy >= best]
    if not needed:
        raise ValueError(f"never as good as {of.name} at its best ({best:.3f} on {label})")
    if not needed[0] or not spent:
        raise ValueError(f"{of.name} was at its best before training on {label!r} began")
    return spent / needed[0]


def _curve(plan: Plan, row: MethodRow, column: Column, name: str) -> Curve | None:
    assert column.curve is not None
    by_seed: dict[int, Measured] = {}
    for seed in plan.table.seeds:
        run = plan.run(name, seed)
        if plan.statuses[run.key].state in MEASURABLE:
            measured = measured_along(plan, run, column.curve)
            if measured:
                by_seed[seed] = measured
    return Curve(row, column, over_seeds(by_seed), tuple(by_seed)) if by_seed else None


def over_seeds(by_seed: Mapping[int, Measured]) -> tuple[CurvePoint, ...]:
    """Where all seeds have been measured: mean and range."""
    shared = set.intersection(*(set(points) for points in by_seed.values()))
    points = []
    for iteration in sorted(shared):
        here = {seed: points_of[iteration] for seed, points_of in by_seed.items()}
        values = {seed: value for seed, (_, value) in here.items()}
        costs: dict[Axis, float] = {axis: fmean(cost[axis] for cost, _ in here.values()) for axis in AXES}
        points.append(
            CurvePoint(
                iteration, costs, fmean(values.values()), min(values.values()), max(values.values()), values
            )
        )
    return tuple(points)


def costs_along(run: PlannedRun) -> tuple[list[dict[str, Any]], list[dict[Axis, float]]]:
    """The lines of a run's metrics, and what training had cost after none, one, two, … of them."""
    assert run.config is not None
    rows = sorted(run.directory.read_metrics(), key=lambda row: int(row["iteration"]))
    totals: dict[Axis, list[float]] = {
        "tokens": list(accumulate((tokens_of(row, run.config) for row in rows), initial=0.0)),
        "seconds": list(accumulate((seconds_of(row) for row in rows), initial=0.0)),
        "steps": list(accumulate((float(row.get("train/steps", 0.0)) for row in rows), initial=0.0)),
    }
    return rows, [{axis: totals[axis][done] for axis in AXES} for done in range(len(rows) + 1)]


def measured_along(plan: Plan, run: PlannedRun, label: str, value: str = PASS_AT_1) -> Measured:
    """Accuracy, or another number of the set. At 0 it is that of the start weights.

    Checkpoints whose summary lacks the number are left out."""
    rows, costs = costs_along(run)
    summaries = read_summaries(run.directory.path / "evaluations", label)
    if 0 not in summaries and (start := _start_summary(plan, run, label)) is not None:
        summaries = {0: start, **summaries}
    found = {}
    for done in sorted(summaries):
        if done <= len(rows):
            with contextlib.suppress(ValueError):
                found[done] = (costs[done], number_in(summaries[done], value, label))
    return found


def _start_summary(plan: Plan, run: PlannedRun, label: str) -> dict[str, Any] | None:
    """That of the needed run whose last checkpoint this one starts from."""
    assert run.config is not None
    start = str((run.config.get("model") or {}).get("name_or_path", ""))
    for needed in run.needs:
        other = plan.run(*needed)
        if other.config is not None and start.startswith(f"{other.directory.path}/checkpoints/"):
            summaries = read_summaries(other.directory.path / "evaluations", label)
            if other.iterations in summaries:
                return summaries[other.iterations]
    return None


def curves_json(found: list[Curve]) -> list[dict[str, Any]]:
    return [
        {
            "row": curve.row.name,
            "column": curve.column.name,
            "evaluation": curve.column.curve,
            "seeds": list(curve.seeds),
            "points": points_json(curve.points),
        }
        for curve in found
    ]


def points_json(points: Sequence[CurvePoint]) -> list[dict[str, Any]]:
    return [
        {
            "iteration": point.iteration,
            **{str(axis): cost for axis, cost in point.costs.items()},
            "mean": point.mean,
            "low": point.low,
            "high": point.high,
            "by_seed": {str(seed): value for seed, value in point.by_seed.items()},
        }
        for point in points
    ]
