"""Costs of training, and measurements along it, for cells, curves and panels."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

from treetune.config.errors import did_you_mean
from treetune.exceptions import NotReached
from treetune.runtime.directory import SAMPLED_TOKENS, VALUE_TOKENS
from treetune.tables.columns import PASS_AT_1, Axis, MeasuredColumn, Panel, number_in
from treetune.tables.runs import MEASURABLE, PlannedRun, TableRuns
from treetune.tables.settings import MethodRow, PanelAxis
from treetune.view.experiment import read_summaries

Measured = dict[int, tuple[dict[Axis, float], float]]
"""(costs so far, value) by finished iterations."""

Points = Sequence[tuple[float, float]]
"""(cost so far, accuracy), by rising cost. Between two measurements accuracy is taken to change evenly."""

AXES: Mapping[Axis, str] = {
    "tokens": "sampled tokens",
    "seconds": "seconds without evaluation",
    "steps": "gradient steps",
}
AXIS_WORDS: dict[PanelAxis, str] = {"iterations": "iterations", **{axis: AXES[axis] for axis in AXES}}


@dataclass(frozen=True)
class Cost:
    """The cost of one run of an experiment, summed over its iterations."""

    seed: int
    answers: int
    sampled_tokens: int
    gradient_steps: int
    seconds: float


@dataclass(frozen=True)
class CurvePoint:
    """All seeds after the same number of iterations, or at their ends: mean costs, mean accuracy and its
    range."""

    iteration: float
    costs: Mapping[Axis, float]
    mean: float
    low: float
    high: float
    by_seed: Mapping[int, float]


@dataclass(frozen=True)
class Curve:
    """A row in a panel: the numbers that its finished runs recorded, over seeds. One with a single point is a
    level to compare with."""

    row: MethodRow
    panel: Panel
    points: tuple[CurvePoint, ...]
    seeds: tuple[int, ...]

    def xs(self, axis: PanelAxis) -> list[float]:
        return [
            float(point.iteration) if axis == "iterations" else point.costs[axis] for point in self.points
        ]


def _answers_in(row: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Returns the answers of an iteration that were sampled to train on; demonstrations are not, nor are
    continuations for values."""
    return float(row.get("episodes/count", 0.0)) if config["rollout"]["type"] != "demonstrations" else 0.0


def _tokens_in(row: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Returns the tokens that the engine sampled in an iteration, for answers and for their credit."""
    # Runs of earlier versions did not count those of answers.
    counted = _answers_in(row, config) * row.get("episodes/response_tokens", 0.0)
    return float(row.get(SAMPLED_TOKENS, counted) + row.get(VALUE_TOKENS, 0.0))


def _seconds_in(row: Mapping[str, Any]) -> float:
    return float(row.get("seconds/total", 0.0) - row.get("seconds/evaluation", 0.0))


def finished(plan: TableRuns, name: str | None) -> list[PlannedRun]:
    """Returns the runs of an experiment that were trained to the end."""
    return [run for run in plan.of(name) if plan.statuses[run.key].state in MEASURABLE]


def costs_of(plan: TableRuns, name: str) -> list[Cost]:
    """Returns the costs of an experiment's finished runs."""
    found = []
    for run in finished(plan, name):
        if (config := run.template) is None:
            continue
        rows = run.directory.read_metrics()
        found.append(
            Cost(
                seed=run.seed,
                answers=round(sum(_answers_in(row, config) for row in rows)),
                sampled_tokens=round(sum(_tokens_in(row, config) for row in rows)),
                gradient_steps=round(sum(row.get("train/steps", 0.0) for row in rows)),
                seconds=sum(map(_seconds_in, rows)),
            )
        )
    return found


def _costs_along(run: PlannedRun) -> tuple[list[dict[str, Any]], list[dict[Axis, float]]]:
    """Returns the lines of a run's metrics, and the cost of training after none, one, two, … of them."""
    config = run.config
    assert config is not None
    rows = sorted(run.directory.read_metrics(), key=lambda row: int(row["iteration"]))
    totals: dict[Axis, list[float]] = {
        "tokens": list(accumulate((_tokens_in(row, config) for row in rows), initial=0.0)),
        "seconds": list(accumulate(map(_seconds_in, rows), initial=0.0)),
        "steps": list(accumulate((float(row.get("train/steps", 0.0)) for row in rows), initial=0.0)),
    }
    return rows, [{axis: totals[axis][done] for axis in AXES} for done in range(len(rows) + 1)]


def measured_along(plan: TableRuns, run: PlannedRun, label: str, value: str = PASS_AT_1) -> Measured:
    """Returns accuracy, or another number of the set, along training. At 0 it is that of the start weights.

    Checkpoints whose summary lacks the number are left out."""
    rows, costs = _costs_along(run)
    summaries = read_summaries(run.directory.path / "evaluations", label)
    if 0 not in summaries:
        # The start weights may have been measured by the needed run whose last checkpoint they are.
        start = str(((run.config or {}).get("model") or {}).get("name_or_path", ""))
        for other in (plan.run(*needed) for needed in run.needs):
            if other.config is not None and start.startswith(f"{other.directory.path}/checkpoints/"):
                theirs = read_summaries(other.directory.path / "evaluations", label)
                if other.iterations in theirs:
                    summaries = {0: theirs[other.iterations], **summaries}
                    break
    found = {}
    for done in sorted(summaries):
        if done <= len(rows):
            with contextlib.suppress(ValueError):
                found[done] = (costs[done], number_in(summaries[done], value, label))
    return found


def curve_of(plan: TableRuns, row: MethodRow, panel: Panel, name: str | None) -> Curve | None:
    """Returns the curve of the experiment called `name`; None where no finished run of it has what the panel
    shows. The number that an iteration recorded stands where the iteration was finished, as in the report."""
    by_seed: dict[int, Measured] = {}
    for run in finished(plan, name):
        if panel.evaluation is not None:
            measured = measured_along(plan, run, panel.evaluation, panel.number)
        else:
            assert panel.metric is not None
            rows, costs = _costs_along(run)
            values = {done: line.get(panel.metric) for done, line in enumerate(rows, start=1)}
            measured = {
                done: (costs[done], float(value))
                for done, value in values.items()
                if isinstance(value, int | float) and math.isfinite(value)
            }
        if measured:
            by_seed[run.seed] = measured
    return Curve(row, panel, _over_seeds(by_seed), tuple(by_seed)) if by_seed else None


def _over_seeds(by_seed: Mapping[int, Measured]) -> tuple[CurvePoint, ...]:
    """Returns mean and range where all seeds have been measured. Runs that a budget ends have no last
    iteration in common, and their ends are one point."""
    ends = {seed: max(points) for seed, points in by_seed.items()}
    shared = set.intersection(*(set(points) for points in by_seed.values()))
    iterations = [dict.fromkeys(by_seed, iteration) for iteration in sorted(shared)]
    if len(set(ends.values())) > 1:
        iterations = [one for one in iterations if max(one.values()) < min(ends.values())] + [ends]
    points = []
    for of_seeds in iterations:
        here = {seed: by_seed[seed][done] for seed, done in of_seeds.items()}
        values = {seed: value for seed, (_, value) in here.items()}
        costs: dict[Axis, float] = {axis: fmean(cost[axis] for cost, _ in here.values()) for axis in AXES}
        mean, low, high = fmean(values.values()), min(values.values()), max(values.values())
        points.append(CurvePoint(fmean(of_seeds.values()), costs, mean, low, high, values))
    return tuple(points)


def column_panel(column: MeasuredColumn) -> Panel:
    """Returns the panel of a column that names a set to draw along training."""
    return Panel(name=column.name, evaluation=column.curve)


def curves(plan: TableRuns) -> list[Curve]:
    """Returns the curves of every column that names a set to draw, and every row with a finished run. Columns
    that read the same curves have them once."""
    table = plan.table
    columns = {
        (column.curve, *(row.cell(column.name).experiment for row in table.rows)): column
        for column in reversed(table.columns)
        if column.curve is not None
    }
    found = [
        curve_of(plan, row, column_panel(column), row.cell(column.name).experiment)
        for column in reversed(columns.values())
        for row in table.rows
    ]
    return [curve for curve in found if curve is not None]


def panel_curves(plan: TableRuns) -> list[Curve]:
    """Returns panel after panel the curves of every row with an experiment of its own and a finished run.

    Metrics that an experiment recorded before others start from it are not beside theirs. Measurements of
    its weights are where they begin.
    """
    before = {name for experiment in plan.table.experiments.values() for name in experiment.needs}
    found = [
        curve_of(plan, row, panel, row.experiment)
        for panel in plan.table.panels
        for row in plan.table.rows
        if panel.metric is None or row.experiment not in before
    ]
    return [curve for curve in found if curve is not None]


def panel_notes(plan: TableRuns, found: Sequence[Curve]) -> list[str]:
    """Returns notes on what is drawn, and on metrics that no finished run has recorded."""
    if not plan.table.panels:
        return []
    notes = ["Means over seeds, with their range, along training."] if found else []
    for panel in plan.table.panels:
        if any(curve.panel == panel for curve in found):
            continue
        if panel.metric is None:
            if panel.value is not None and found:
                notes.append(
                    f"No finished run's measurements on {panel.evaluation} have {panel.value} ({panel.name})."
                )
            continue
        runs = [run for row in plan.table.rows for run in finished(plan, row.experiment)]
        known = {key for run in runs for line in run.directory.read_metrics()[:1] for key in line}
        if known:
            notes.append(
                f"No finished run recorded {panel.metric} ({panel.name}):"
                f" {did_you_mean(panel.metric, sorted(known))}"
            )
    return notes


def speedup(plan: TableRuns, run: PlannedRun, of: PlannedRun, label: str, axis: Axis) -> float:
    """Returns how many times less of `axis` a run needs than another until that one's best accuracy.

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


def area_under(points: Points, upto: float) -> float:
    """Returns the mean accuracy from no cost to the cost `upto`. Behind the last measurement it stays.

    Raises ValueError where the start was not measured."""
    if not points or points[0][0] > 0:
        raise ValueError("the start model was not measured on the curve's set")
    total = 0.0
    for (begin, low), (end, high) in pairwise([*points, (max(upto, points[-1][0]), points[-1][1])]):
        if begin >= upto or end <= begin:
            continue
        cut = min(end, upto)
        at_cut = low + (high - low) * (cut - begin) / (end - begin)
        total += (cut - begin) * (low + at_cut) / 2
    return total / upto


def cost_to_reach(points: Points, accuracy: float) -> float:
    """Returns the cost at which the curve first comes to an accuracy. Raises NotReached."""
    if points and points[0][1] >= accuracy:
        return points[0][0]
    for (begin, low), (end, high) in pairwise(points):
        if high >= accuracy:
            return begin + (end - begin) * (accuracy - low) / (high - low)
    best = max((accuracy for _, accuracy in points), default=0.0)
    raise NotReached(f"not reached: {best:.3f} at best")


def curves_json(found: Sequence[Curve], **heads: str) -> list[dict[str, Any]]:
    """Returns curves for programs. `heads` are keys and the properties of their panels that stand there."""
    return [
        {
            **{key: getattr(curve.panel, name) for key, name in heads.items()},
            "row": curve.row.name,
            "seeds": list(curve.seeds),
            "points": [
                {
                    "iteration": point.iteration,
                    **{str(axis): cost for axis, cost in point.costs.items()},
                    "mean": point.mean,
                    "low": point.low,
                    "high": point.high,
                    "by_seed": {str(seed): value for seed, value in point.by_seed.items()},
                }
                for point in curve.points
            ],
        }
        for curve in found
    ]
