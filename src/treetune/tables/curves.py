"""Computes the costs of training, and curves of measurements along it, for cells, curves and panels."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any, NamedTuple

from treetune.config.errors import did_you_mean
from treetune.exceptions import NotReached
from treetune.models.policy_files import CHECKPOINTS
from treetune.runtime.directory import SAMPLED_TOKENS, VALUE_TOKENS
from treetune.tables.columns import PASS_AT_1, Axis, MeasuredColumn, Panel, read_number_of_summary
from treetune.tables.runs import TRAINED_STATES, PlannedRun, TableRuns
from treetune.tables.settings import MethodRow, PanelAxis


class MeasuredPoint(NamedTuple):
    """A value that was measured along training, such as an accuracy, and the costs until then.

    Example: `MeasuredPoint({"tokens": 2e6, "seconds": 840.0, "steps": 400.0}, 0.48)`.
    """

    costs: dict[Axis, float]
    value: float


MeasuredPoints = dict[int, MeasuredPoint]
"""The measured points of a run, by finished iterations."""

Points = Sequence[tuple[float, float]]
"""Measurements along training, each as (cost so far, accuracy), by rising cost. Between two measurements, the
accuracy is taken to change linearly."""

AXES: Mapping[Axis, str] = {
    "tokens": "sampled tokens",
    "seconds": "seconds without evaluation",
    "steps": "gradient steps",
}
"""The costs of training, with their names in texts."""
AXIS_TITLES: dict[PanelAxis, str] = {"iterations": "iterations", **{axis: AXES[axis] for axis in AXES}}


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
    """A point of a curve: the mean over seeds, and their range, after the same number of iterations of each,
    or at the end of each.

    Example: `CurvePoint(50, {"tokens": 2e6, …}, mean=0.48, low=0.46, high=0.5, by_seed={1: 0.46, 2: 0.5})`.
    """

    iteration: float
    """The number of finished iterations. At the ends of runs that have different numbers of iterations, it is
    the mean of these numbers."""
    costs: Mapping[Axis, float]
    """The mean costs until then."""
    mean: float
    low: float
    """The smallest value of a seed."""
    high: float
    """The largest value of a seed."""
    by_seed: Mapping[int, float]


@dataclass(frozen=True)
class Curve:
    """The line of a row in a panel, from the row's finished runs.

    A curve with a single point is drawn as a level to compare with, such as an SFT model's accuracy.
    """

    row: MethodRow
    panel: Panel
    points: tuple[CurvePoint, ...]
    seeds: tuple[int, ...]

    def xs(self, axis: PanelAxis) -> list[float]:
        """Returns the position of each point on an axis: iterations, or a cost."""
        if axis == "iterations":
            return [float(point.iteration) for point in self.points]
        return [point.costs[axis] for point in self.points]


def _count_answers(row: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Returns how many answers an iteration sampled to train on.

    Demonstrations don't count, since they are not sampled. Continuations that estimate values don't count,
    since they are not trained on.

    Args:
        row: The metrics of the iteration.
        config: The configuration of the run.
    """
    if config["rollout"]["type"] == "demonstrations":
        return 0.0
    return float(row.get("episodes/count", 0.0))


def _count_tokens(row: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Returns how many tokens the engine sampled in an iteration, for answers and for their credit."""
    # Runs of earlier versions have no count of the answers' tokens, only their mean length.
    tokens_by_mean = _count_answers(row, config) * row.get("episodes/response_tokens", 0.0)
    return float(row.get(SAMPLED_TOKENS, tokens_by_mean) + row.get(VALUE_TOKENS, 0.0))


def _count_seconds(row: Mapping[str, Any]) -> float:
    return float(row.get("seconds/total", 0.0) - row.get("seconds/evaluation", 0.0))


def trained_runs(plan: TableRuns, name: str | None) -> list[PlannedRun]:
    """Returns the runs of an experiment that were trained to the end."""
    return [run for run in plan.runs_of(name) if plan.statuses[run.key].state in TRAINED_STATES]


def read_costs(plan: TableRuns, name: str) -> list[Cost]:
    """Returns the costs of an experiment's finished runs."""
    costs = []
    for run in trained_runs(plan, name):
        # The configuration with the table's first seed, which is evaluated already. Only the type of the
        # rollout is read from it, and all seeds have the same one.
        config = run.checked_config
        assert config is not None
        rows = run.directory.read_metrics()
        costs.append(
            Cost(
                seed=run.seed,
                answers=round(sum(_count_answers(row, config) for row in rows)),
                sampled_tokens=round(sum(_count_tokens(row, config) for row in rows)),
                gradient_steps=round(sum(row.get("train/steps", 0.0) for row in rows)),
                seconds=sum(map(_count_seconds, rows)),
            )
        )
    return costs


def _read_costs_along(run: PlannedRun) -> tuple[list[dict[str, Any]], list[dict[Axis, float]]]:
    """Returns the rows of a run's metrics, one for each iteration, and the costs of training after 0, 1, 2, …
    iterations."""
    config = run.config
    assert config is not None
    rows = sorted(run.directory.read_metrics(), key=lambda row: int(row["iteration"]))
    totals: dict[Axis, list[float]] = {
        "tokens": list(accumulate((_count_tokens(row, config) for row in rows), initial=0.0)),
        "seconds": list(accumulate(map(_count_seconds, rows), initial=0.0)),
        "steps": list(accumulate((float(row.get("train/steps", 0.0)) for row in rows), initial=0.0)),
    }
    costs = []
    for iteration in range(len(rows) + 1):
        costs.append({axis: totals[axis][iteration] for axis in AXES})
    return rows, costs


def read_measured_points(
    plan: TableRuns, run: PlannedRun, label: str, value: str = PASS_AT_1
) -> MeasuredPoints:
    """Returns the accuracy on an evaluation set, or another number of it, after each measured iteration.

    The number after 0 iterations is that of the start weights. Checkpoints whose summary has no such number
    are left out.

    Args:
        label: The name of the evaluation set.
        value: The name of the number, such as "pass_at_8".
    """
    rows, costs = _read_costs_along(run)
    summaries = run.directory.read_summaries(label)
    if 0 not in summaries:
        start_summary = _summary_of_start(plan, run, label)
        if start_summary is not None:
            summaries = {0: start_summary, **summaries}
    measured = {}
    for iteration in sorted(summaries):
        if iteration <= len(rows):  # else its costs are unknown: a line of the metrics is missing
            with contextlib.suppress(ValueError):  # the summary has no such number
                number = read_number_of_summary(summaries[iteration], value, label)
                measured[iteration] = MeasuredPoint(costs[iteration], number)
    return measured


def _summary_of_start(plan: TableRuns, run: PlannedRun, label: str) -> dict[str, Any] | None:
    """Returns the summary of the evaluation of a run's start weights, or None if there is none.

    The start weights may be a checkpoint of another run of the table, which may have evaluated it at its end.
    `label` is the name of the evaluation set.
    """
    assert run.config is not None
    model = run.config.get("model") or {}
    start_weights = str(model.get("name_or_path", ""))
    for needed_key in run.needs:
        needed_run = plan.run(*needed_key)
        if needed_run.config is None:  # it can't be built, so the run's directory is unknown
            continue
        checkpoints = f"{needed_run.directory.path}/{CHECKPOINTS}/"
        if start_weights.startswith(checkpoints):
            summaries = needed_run.directory.read_summaries(label)
            if needed_run.iterations in summaries:
                return summaries[needed_run.iterations]
    return None


def _read_recorded_points(run: PlannedRun, metric: str) -> MeasuredPoints:
    """Returns a metric at the end of each iteration that recorded it as a finite number."""
    rows, costs = _read_costs_along(run)
    recorded = {}
    for iteration, row in enumerate(rows, start=1):
        value = row.get(metric)
        if isinstance(value, int | float) and math.isfinite(value):
            recorded[iteration] = MeasuredPoint(costs[iteration], float(value))
    return recorded


def make_curve(plan: TableRuns, row: MethodRow, panel: Panel, name: str | None) -> Curve | None:
    """Returns the curve of an experiment in a panel, or None where no finished run has the panel's number.

    A metric is drawn at the end of the iteration that recorded it.

    Args:
        row: The row that the curve belongs to.
        name: The name of the experiment in the table.
    """
    by_seed: dict[int, MeasuredPoints] = {}
    for run in trained_runs(plan, name):
        if panel.evaluation is not None:
            measured = read_measured_points(plan, run, panel.evaluation, panel.number)
        else:
            assert panel.metric is not None
            measured = _read_recorded_points(run, panel.metric)
        if measured:
            by_seed[run.seed] = measured
    return Curve(row, panel, _average_over_seeds(by_seed), tuple(by_seed)) if by_seed else None


def _average_over_seeds(by_seed: Mapping[int, MeasuredPoints]) -> tuple[CurvePoint, ...]:
    """Returns a point for each iteration at which all seeds were measured.

    Runs that end with their budget may have different last iterations. In this case the points end where the
    first run ends, and one more point is the mean over the last measurements of all runs.
    """
    last_iterations = {seed: max(measured) for seed, measured in by_seed.items()}
    first_end = min(last_iterations.values())
    have_different_ends = len(set(last_iterations.values())) > 1
    shared_iterations = sorted(set.intersection(*(set(measured) for measured in by_seed.values())))
    if have_different_ends:
        shared_iterations = [iteration for iteration in shared_iterations if iteration < first_end]
    # The iteration of each seed, for each point.
    iterations_of_points = [dict.fromkeys(by_seed, iteration) for iteration in shared_iterations]
    if have_different_ends:
        iterations_of_points.append(last_iterations)
    points = []
    for iterations in iterations_of_points:
        measured = [by_seed[seed][iteration] for seed, iteration in iterations.items()]
        costs: dict[Axis, float] = {axis: fmean(point.costs[axis] for point in measured) for axis in AXES}
        values = {seed: by_seed[seed][iteration].value for seed, iteration in iterations.items()}
        mean, low, high = fmean(values.values()), min(values.values()), max(values.values())
        points.append(CurvePoint(fmean(iterations.values()), costs, mean, low, high, values))
    return tuple(points)


def column_panel(column: MeasuredColumn) -> Panel:
    """Returns a panel for the `curve` of a column. It has the column's name."""
    return Panel(name=column.name, evaluation=column.curve)


def make_column_curves(plan: TableRuns) -> list[Curve]:
    """Returns the curves of all columns that name an evaluation set to draw (`column.curve`), for all rows
    with a finished run.

    Of columns with the same evaluation set and the same experiments, only the first is drawn.
    """
    table = plan.table
    # By the evaluation set and the rows' experiments.
    columns: dict[tuple[str | None, ...], MeasuredColumn] = {}
    for column in table.columns:
        if column.curve is not None:
            experiments = [row.cell(column.name).experiment for row in table.rows]
            columns.setdefault((column.curve, *experiments), column)
    all_curves = []
    for column in columns.values():
        panel = column_panel(column)
        for row in table.rows:
            curve = make_curve(plan, row, panel, row.cell(column.name).experiment)
            if curve is not None:
                all_curves.append(curve)
    return all_curves


def make_panel_curves(plan: TableRuns) -> list[Curve]:
    """Returns the curves of all panels, for all rows with a finished run.

    An experiment that others start from, such as an SFT, has no curve in a panel of metrics: its iterations
    came before those of the others. It has a curve in a panel of evaluations, because the others begin with
    its weights.
    """
    starts = plan.table.start_experiments
    all_curves = []
    for panel in plan.table.panels:
        for row in plan.table.rows:
            if panel.metric is not None and row.experiment in starts:
                continue
            curve = make_curve(plan, row, panel, row.experiment)
            if curve is not None:
                all_curves.append(curve)
    return all_curves


def panel_notes(plan: TableRuns, drawn: Sequence[Curve]) -> list[str]:
    """Returns notes below the panels: on what is drawn, and on numbers that no finished run has recorded."""
    if not plan.table.panels:
        return []
    notes = ["Means over seeds, with their range, along training."] if drawn else []
    for panel in plan.table.panels:
        if any(curve.panel == panel for curve in drawn):
            continue
        if panel.metric is not None:
            metrics = _recorded_metrics(plan)
            if metrics:
                notes.append(
                    f"No finished run recorded {panel.metric} ({panel.name}):"
                    f" {did_you_mean(panel.metric, metrics)}"
                )
        # Without a `value` the panel shows pass@1, which every measurement has. Without any curve, it may be
        # that no run has finished yet.
        elif panel.value is not None and drawn:
            notes.append(
                f"No finished run's measurements on {panel.evaluation} have {panel.value} ({panel.name})."
            )
    return notes


def _recorded_metrics(plan: TableRuns) -> list[str]:
    """Returns the names of the metrics that finished runs recorded in their first iteration. They are
    suggested in place of a name that no run recorded."""
    names: set[str] = set()
    for row in plan.table.rows:
        for run in trained_runs(plan, row.experiment):
            metrics_of_iterations = run.directory.read_metrics()
            if metrics_of_iterations:
                names |= set(metrics_of_iterations[0])
    return sorted(names)


def speedup(plan: TableRuns, run: PlannedRun, other_run: PlannedRun, label: str, axis: Axis) -> float:
    """Returns how many times cheaper it is for `run` than for `other_run` to reach the best accuracy of
    `other_run`.

    For each of the two runs, the cost is that of the first checkpoint that is as good as the best of
    `other_run`. Raises ValueError where `run` has no such checkpoint.

    Args:
        label: The name of the evaluation set on which accuracies are measured.
        axis: The kind of cost.
    """
    measured = read_measured_points(plan, run, label)
    other_measured = read_measured_points(plan, other_run, label)
    if not other_measured or not measured:
        raise ValueError(f"not measured along training on {label!r}")
    best = max(accuracy for _, accuracy in other_measured.values())

    def costs_of_good_checkpoints(points: MeasuredPoints) -> list[float]:
        """Returns the costs of all checkpoints that are as good as the best of `other_run`."""
        return [costs[axis] for costs, accuracy in points.values() if accuracy >= best]

    costs = costs_of_good_checkpoints(measured)
    if not costs:
        raise ValueError(f"never as good as {other_run.name} at its best ({best:.3f} on {label})")
    cost = costs[0]
    other_cost = costs_of_good_checkpoints(other_measured)[0]
    if not cost or not other_cost:  # the start weights, which cost nothing, are as good
        raise ValueError(f"{other_run.name} was at its best before training on {label!r} began")
    return other_cost / cost


def area_under(points: Points, upto: float) -> float:
    """Returns the mean accuracy from cost 0 to the cost `upto`: the area under the curve, divided by `upto`.

    After the last measurement the accuracy stays as it is. Raises ValueError where the start was not
    measured."""
    if not points or points[0][0] > 0:
        raise ValueError("the start model was not measured on the curve's set")
    last_cost, last_accuracy = points[-1]
    if last_cost < upto:
        points = [*points, (upto, last_accuracy)]
    area = 0.0
    for (begin, accuracy_at_begin), (end, accuracy_at_end) in pairwise(points):
        if begin >= upto or end <= begin:  # beyond the area, or two measurements at the same cost
            continue
        cut = min(end, upto)
        rise = accuracy_at_end - accuracy_at_begin
        accuracy_at_cut = accuracy_at_begin + rise * (cut - begin) / (end - begin)
        area += (cut - begin) * (accuracy_at_begin + accuracy_at_cut) / 2
    return area / upto


def cost_to_reach(points: Points, accuracy: float) -> float:
    """Returns the cost at which the curve first reaches an accuracy. Raises NotReached where it never
    does."""
    if points and points[0][1] >= accuracy:
        return points[0][0]
    for (begin, low), (end, high) in pairwise(points):
        if high >= accuracy:  # for the first time, so `low` is below `accuracy`
            return begin + (end - begin) * (accuracy - low) / (high - low)
    best = max((measured for _, measured in points), default=0.0)
    raise NotReached(f"not reached: {best:.3f} at best")


def curves_json(curves: Sequence[Curve], **panel_keys: str) -> list[dict[str, Any]]:
    """Returns curves as JSON, for programs.

    `panel_keys` are keys to add, each with the attribute of the curve's panel that is its value:
    `curves_json(curves, column="name")` adds `"column": curve.panel.name`.
    """
    return [_curve_json(curve, panel_keys) for curve in curves]


def _point_json(point: CurvePoint) -> dict[str, Any]:
    return {
        "iteration": point.iteration,
        **{str(axis): cost for axis, cost in point.costs.items()},
        "mean": point.mean,
        "low": point.low,
        "high": point.high,
        "by_seed": {str(seed): value for seed, value in point.by_seed.items()},
    }


def _curve_json(curve: Curve, panel_keys: Mapping[str, str]) -> dict[str, Any]:
    """Returns a curve as JSON.

    `panel_keys` are further keys, each with the name of an attribute of the curve's panel. The key gets the
    value of that attribute.
    """
    values_of_panel = {key: getattr(curve.panel, attribute) for key, attribute in panel_keys.items()}
    points = [_point_json(point) for point in curve.points]
    return {**values_of_panel, "row": curve.row.name, "seeds": list(curve.seeds), "points": points}
