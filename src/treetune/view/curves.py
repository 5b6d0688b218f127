"""Charts of what experiments recorded: one line for each experiment or setting, with bands and events."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from treetune.runtime.directory import SAMPLED_TOKENS, VALUE_TOKENS
from treetune.runtime.manifest import list_resumes
from treetune.view.charts import (
    N_COLOURS,
    Chart,
    Event,
    Series,
    StackedBar,
    better_direction_of,
    format_number,
)
from treetune.view.experiment import StoredExperiment

MOST_POINTS = 1200
"""The most points of a line. Of a longer line, the lowest and the highest of neighbouring points are kept."""

USUAL_CURVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("rounds of sampling until enough problems had answers of different scores", ("rollout/rounds",)),
    ("share of problems whose answers all have the same score", ("rollout/groups_dropped",)),
    ("share of trained tokens whose advantage is 0", ("credit/advantage_zero",)),
    ("loss", ("train/loss",)),
    ("KL to the reference", ("train/kl",)),
    ("entropy (nats per token)", ("train/entropy",)),
    ("gradient norm", ("train/grad_norm",)),
    ("clip fraction", ("train/clip_fraction",)),
    ("share of pairs that the policy prefers as it should", ("preference/accuracy",)),
    (
        "implicit reward of the better answers, and dashed of the others",
        ("preference/chosen_reward", "preference/rejected_reward"),
    ),
    ("response length (tokens)", ("episodes/response_tokens",)),
    ("share unfinished", ("episodes/unfinished",)),
    ("learning rate", ("train/learning_rate",)),
    ("critic: mean squared error of its values", ("critic/mse",)),
    ("engine: sampled tokens per second", ("engine/tokens_per_second",)),
    (
        "|engine − trainer log-prob|: mean, and dashed the largest",
        ("engine/logprob_gap_mean", "engine/logprob_gap_max"),
    ),
    (
        "canary after each weight sync, |engine − trainer log-prob|: mean, and dashed the largest",
        ("engine/canary_mean_gap", "engine/canary_gap"),
    ),
)
"""(title, metrics) of the usual charts that follow the chart of the reward. Metrics that were not recorded
have no chart."""

SIGN_PREFIX = "diagnostics/"
"""The prefix of the metrics that say for each sign of collapse whether it was found."""
SHAPING_PREFIX = "shaping/"
"""The prefix of the metrics of reward shaping. A user's component can add a metric of any name, so each
metric with this prefix has a chart."""

# The titles of charts whose y axis includes 0.
TITLES_FROM_ZERO = {
    "share unfinished",
    "clip fraction",
    "engine: sampled tokens per second",
    "rounds of sampling until enough problems had answers of different scores",
    "share of problems whose answers all have the same score",
    "share of trained tokens whose advantage is 0",
}

# Lines of a run's log: a resume, with the finished iterations before it; and a sign of collapse, with its
# name, the iteration in which it was reported, and the reason.
_RESUME_IN_LOG = re.compile(r"INFO continuing after iteration (\d+) of")
_SIGN_IN_LOG = re.compile(r"INFO warning: (\w+) in iterations \d+ to (\d+): (.*)")


X_AXES: Mapping[str, tuple[str, ...]] = {
    "finished iterations": (),
    "sampled tokens": (SAMPLED_TOKENS, VALUE_TOKENS),
    "seconds in iterations": ("seconds/total",),
    "optimiser steps": ("train/steps",),
}
"""The x axes that curves can be drawn over, and the metrics whose running sum is the position on each axis.
Finished iterations are counted without a metric."""


@dataclass(frozen=True)
class Bunch:
    """The experiments of a curve: a single one, or several that differ only in their seed.

    Example: `Bunch("ppo (3 seeds)", 0, [seed_1, seed_2, seed_3], "sampled tokens", {1.0: 4e5, 2.0: 8e5})`.
    """

    name: str
    colour: int
    """The number of the curve's colour: 0 for the first bunch, 1 for the second, and so on."""
    members: Sequence[StoredExperiment]
    x_axis: str = "finished iterations"
    """The axis, one of `X_AXES`."""
    positions: Mapping[float, float] = field(default_factory=dict)
    """The position on the axis for each number of finished iterations, as the mean over the members; empty if
    the axis is finished iterations itself."""


def group_into_bunches(
    experiments: Mapping[str, StoredExperiment], together: bool, x_axis: str = "finished iterations"
) -> list[Bunch]:
    """Groups experiments into bunches, each of which is drawn as one curve.

    With `together`, experiments that differ only in their seed are one bunch; without it, each experiment is
    a bunch. `experiments` has them by name, and `x_axis` is the x axis, one of `X_AXES`.
    """
    groups: dict[str, list[str]] = {}
    for name, experiment in experiments.items():
        key = setting_without_seed(experiment.config) if together else name
        groups.setdefault(key, []).append(name)
    all_bunches = []
    for colour, names in enumerate(groups.values()):
        members = [experiments[name] for name in names]
        bunch_name = _distinct_name(names, list(experiments))
        if len(names) > 1:
            bunch_name += f" ({len(names)} seeds)"
        all_bunches.append(Bunch(bunch_name, colour, members, x_axis, _positions_on_axis(members, x_axis)))
    return all_bunches


def _positions_on_axis(members: Sequence[StoredExperiment], x_axis: str) -> Mapping[float, float]:
    """Returns the position on the axis `x_axis` for each number of finished iterations.

    For several experiments it is the mean of their positions. The result is empty if the axis is finished
    iterations.
    """
    if not X_AXES[x_axis]:  # the axis is finished iterations, so the position is that number itself
        return {}
    if len(members) == 1:
        return _running_sum(members[0], x_axis)
    sums_by_iterations: dict[float, list[float]] = {}
    for experiment in members:
        for iterations, running_sum in _running_sum(experiment, x_axis).items():
            sums_by_iterations.setdefault(iterations, []).append(running_sum)
    return {iterations: math.fsum(sums) / len(sums) for iterations, sums in sums_by_iterations.items()}


def _running_sum(experiment: StoredExperiment, x_axis: str) -> Mapping[float, float]:
    """Returns the running sum of an axis' metrics, by finished iterations.

    It is computed once, and kept in the experiment's cache.
    """
    if x_axis not in experiment.cache:
        amounts = [sum(row.get(key) or 0.0 for key in X_AXES[x_axis]) for row in experiment.metrics]
        iterations = [float(row["iteration"] + 1) for row in experiment.metrics]
        experiment.cache[x_axis] = dict(zip(iterations, itertools.accumulate(amounts), strict=True))
    return experiment.cache[x_axis]


def _distinct_name(names: Sequence[str], all_names: Sequence[str]) -> str:
    """Returns a name for a bunch: the parts that its names have in common, without those that all names have.

    Example: a bunch of a/seed-1/ppo and a/seed-2/ppo is named "ppo" if a third name is a/seed-1/grpo: "a" is
    in all names, and the seed differs within the bunch. If no part remains, the bunch has its first name.
    """

    def shared_parts(names: Sequence[str]) -> dict[int, str]:
        """Returns the parts that are equal in all of these names, by position."""
        columns = zip(*(name.split("/") for name in names), strict=False)
        return {i: column[0] for i, column in enumerate(columns) if len(set(column)) == 1}

    lengths = {len(name.split("/")) for name in all_names}
    # Parts are compared by position, which says nothing about names of different lengths.
    if len(all_names) == 1 or len(lengths) > 1:
        return names[0]
    common_parts = shared_parts(all_names)
    distinct_parts = [part for i, part in shared_parts(names).items() if i not in common_parts]
    return "/".join(distinct_parts) or names[0]


def setting_without_seed(config: Mapping[str, Any]) -> str:
    """Returns a text that is equal for experiments that differ only in seed, name and directory."""
    names = sorted(set(config) - {"seed", "experiment_name", "directory"})
    return repr({name: config[name] for name in names})


def metric_names(experiments: Iterable[StoredExperiment]) -> list[str]:
    """Returns the names of all metrics that were recorded as finite numbers."""
    names: set[str] = set()
    for experiment in experiments:
        names |= {key for key in experiment.recorded if experiment.curve(key)}
    return sorted(names - {"iteration", "wall_time"})


# Charts


def evaluation_charts(all_bunches: Sequence[Bunch], events: Sequence[Event] = ()) -> list[Chart]:
    """Returns a chart of pass@1 for each evaluation set on which a bunch has more than one point.

    A bunch is the experiments of one curve: one experiment, or several that differ only in their seed. A
    bunch with a single point is drawn as a level to compare with.
    """
    labels: set[str] = set()
    for bunch in all_bunches:
        for member in bunch.members:
            labels |= set(member.evaluations)
    has_seeds = any(len(bunch.members) > 1 for bunch in all_bunches)
    charts = []
    for label in sorted(labels):
        lines = []
        for bunch in all_bunches:
            measured = [member.evaluations.get(label, {}) for member in bunch.members]
            curves = [_accuracy_by_iterations(summaries) for summaries in measured]
            # All bands of a chart must mean the same: intervals over seeds if any bunch has several seeds,
            # and otherwise intervals over problems.
            bounds = {} if has_seeds else _interval_by_iterations(measured[0])
            line = _curve_of_bunch(bunch, curves, bounds)
            if line is not None:
                lines.append(replace(line, is_level=len(line.points) == 1))
        if any(not line.is_level for line in lines):
            band = _band_title(all_bunches) or "95 % interval over problems"
            x_name = all_bunches[0].x_axis  # the name of the x axis, which all bunches share
            charts.append(Chart(f"pass@1 on {label}", lines, "up", band, events, x_name=x_name))
    return charts


def _accuracy_by_iterations(summaries: Mapping[int, Mapping[str, Any]]) -> dict[float, float]:
    """Returns pass@1 by finished iterations."""
    return {float(iterations): float(summary["pass_at_1"]) for iterations, summary in summaries.items()}


def _interval_by_iterations(summaries: Mapping[int, Mapping[str, Any]]) -> dict[float, tuple[float, float]]:
    """Returns the interval of pass@1 by finished iterations, where the summaries have one."""
    intervals = {}
    for iterations, summary in summaries.items():
        low, high = summary.get("ci_low"), summary.get("ci_high")
        if low is not None and high is not None:
            intervals[float(iterations)] = float(low), float(high)
    return intervals


def chosen_charts(
    all_bunches: Sequence[Bunch], names: Sequence[str], events: Sequence[Event] = ()
) -> list[Chart]:
    """Returns a chart for each of the metrics `names` that at least one experiment recorded."""
    charts = []
    for name in names:
        lines = _curves_of_metric(all_bunches, name)
        if lines:
            x_name = all_bunches[0].x_axis  # the name of the x axis, which all bunches share
            better, band = better_direction_of(name), _band_title(all_bunches)
            charts.append(Chart(name, lines, better, band, events, x_name=x_name))
    return charts


def usual_charts(all_bunches: Sequence[Bunch], events: Sequence[Event] = ()) -> list[Chart]:
    """Returns charts of the reward, of each kind of reward shaping that was recorded, and of `USUAL_CURVES`.

    If a chart has two metrics, the curve of the second has the same colour as the first, and is dashed.
    """
    experiments: list[StoredExperiment] = []
    for bunch in all_bunches:
        experiments += bunch.members
    # `trained_on` is "sampled answers" or "demonstrations".
    data = " and ".join(sorted({experiment.trained_on for experiment in experiments}))
    shaping_metrics: set[str] = set()
    for experiment in experiments:
        shaping_metrics |= {key for key in experiment.recorded if key.startswith(SHAPING_PREFIX)}
    # (title, metrics) of each chart, as in `USUAL_CURVES`.
    planned_charts: list[tuple[str, tuple[str, ...]]] = [(f"reward of the {data}", ("episodes/reward",))]
    for key in sorted(shaping_metrics):
        planned_charts.append((f"reward added by shaping: {key.removeprefix(SHAPING_PREFIX)}", (key,)))
    planned_charts += USUAL_CURVES
    charts = []
    for title, keys in planned_charts:
        if len(keys) == 1:
            lines = _curves_of_metric(all_bunches, keys[0])
        else:  # the names of these curves tell the metrics apart
            lines = _curves_of_metrics(all_bunches, keys)
        if lines:
            better, band = better_direction_of(keys[0]), _band_title(all_bunches)
            from_zero = title in TITLES_FROM_ZERO
            x_name = all_bunches[0].x_axis  # the name of the x axis, which all bunches share
            charts.append(Chart(title, lines, better, band, events, from_zero=from_zero, x_name=x_name))
    return charts


def _curves_of_metrics(all_bunches: Sequence[Bunch], metrics: Sequence[str]) -> list[Series]:
    """Returns the curves of several metrics in one chart, each named after its metric.

    The name has the bunch as well if there are several: ``ppo: canary_gap``. Each metric has another dash.
    """
    lines = []
    for dash, metric in enumerate(metrics):
        short_name = metric.split("/", 1)[1]
        for line in _curves_of_metric(all_bunches, metric):
            name = f"{line.name}: {short_name}" if len(all_bunches) > 1 else short_name
            lines.append(replace(line, name=name, dash=line.dash + dash))
    return lines


def _curves_of_metric(all_bunches: Sequence[Bunch], metric: str) -> list[Series]:
    """Returns a metric's curve for each bunch that recorded the metric."""
    lines = []
    for bunch in all_bunches:
        if len(bunch.members) > 1:
            # The line is the mean of the members, and its intervals come from their differences.
            curves = [dict(member.curve(metric)) for member in bunch.members]
            line = _curve_of_bunch(bunch, curves, bounds={})
        else:
            # The points of a single member need no mean, and are computed once.
            points = _points_of_single(bunch, metric)
            dash, colour = divmod(bunch.colour, N_COLOURS)  # after the last colour, lines are dashed
            line = Series(bunch.name, points, f"c{colour}", dash=dash) if points else None
        if line is not None:
            lines.append(line)
    return lines


def _points_of_single(bunch: Bunch, metric: str) -> list[tuple[float, float]]:
    """Returns the points of a metric for a bunch with one member, with x on the bunch's axis.

    They are kept in the member's cache: the page asks for them every few seconds, and there may be thousands.
    """
    [member] = bunch.members
    key = f"{metric} {bunch.x_axis}"  # `x_axis` is the name of the axis
    if key not in member.cache:
        points = member.curve(metric)  # with x in finished iterations
        # `positions` has the position on another axis for each number of finished iterations.
        if bunch.positions:
            points = [(bunch.positions[x], y) for x, y in points if x in bunch.positions]
        member.cache[key] = _thin_points(points)
    return member.cache[key]


def _curve_of_bunch(
    bunch: Bunch, curves: Sequence[Mapping[float, float]], bounds: Mapping[float, tuple[float, float]]
) -> Series | None:
    """Returns the line of a bunch, from a curve for each member (value by finished iterations).

    If the bunch has a single member, the line has the intervals `bounds` (by finished iterations). If it has
    several, the line is their mean, with the 95 % t-interval of the mean at each x where more than one member
    has a point, and `bounds` is not used. Returns None if there is no point.
    """
    all_iterations: set[float] = set()
    for curve in curves:
        all_iterations |= set(curve)
    # `bunch.positions` has the position on the axis for each number of finished iterations. It is empty if
    # the axis is finished iterations.
    if bunch.positions:
        all_iterations &= set(bunch.positions)
    xs = sorted(all_iterations)
    if not xs:
        return None
    if len(curves) == 1:
        values = [curves[0][x] for x in xs]
        interval = {x: bounds[x] for x in xs if x in bounds}
    else:
        values, interval = _means_over_seeds(curves, xs)
    points = list(zip(xs, values, strict=True))
    if bunch.positions:
        points = [(bunch.positions[x], y) for x, y in points]
        interval = {bunch.positions[x]: limits for x, limits in interval.items()}
    dash, colour = divmod(bunch.colour, N_COLOURS)  # after the last colour, lines are dashed
    shown_points = points if interval else _thin_points(points)  # bands are drawn at every point
    return Series(bunch.name, shown_points, f"c{colour}", interval, dash=dash)


def _means_over_seeds(
    curves: Sequence[Mapping[float, float]], xs: Sequence[float]
) -> tuple[list[float], dict[float, tuple[float, float]]]:
    """Returns the mean of the curves at each x, and its 95 % t-interval at each x where several curves have a
    value."""
    from scipy.stats import t

    # The quantile for n values, which have n - 1 degrees of freedom, is at index n - 2.
    quantiles = t.ppf(0.975, range(1, len(curves)))
    means: list[float] = []
    intervals: dict[float, tuple[float, float]] = {}
    for x in xs:
        values = [curve[x] for curve in curves if x in curve]
        mean = math.fsum(values) / len(values)
        means.append(mean)
        if len(values) > 1:
            variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
            half_width = float(quantiles[len(values) - 2]) * math.sqrt(variance / len(values))
            intervals[x] = mean - half_width, mean + half_width
    return means, intervals


def _band_title(all_bunches: Sequence[Bunch]) -> str:
    """Returns the title of bands over seeds, and "" if each bunch has a single experiment."""
    most = max((len(bunch.members) for bunch in all_bunches), default=1)
    return f"95 % t-interval of the mean over up to {most} seeds" if most > 1 else ""


def _thin_points(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns about MOST_POINTS of the points if there are more: the first, the last, and the lowest and
    highest of neighbouring points."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / MOST_POINTS)  # of each `size` neighbours, two are kept
    ys = np.array([y for _, y in points])
    chosen = {0, len(points) - 1}
    for start in range(0, len(points), size):
        neighbours = ys[start : start + size]
        chosen |= {start + int(neighbours.argmin()), start + int(neighbours.argmax())}
    return [points[i] for i in sorted(chosen)]


# Events


def events_of(experiment: StoredExperiment) -> list[Event]:
    """Returns the events of an experiment, by rising x.

    They are evaluations, restarts of the engine, resumes (the beginning of a fork among them), and the begins
    and ends of signs of collapse.
    """
    try:
        log = experiment.directory.run_log.read_text(errors="replace")
    except OSError:  # without a log, resumes and the reasons of signs of collapse are left out
        log = ""
    events = _evaluation_events(experiment)
    events += _metric_events(experiment, log)
    # The log has all resumes, and the manifest some of them, with what they changed. So that each is one
    # event, a resume of the manifest is taken off the count of those in the log.
    logged_resumes = Counter(int(iterations) for iterations in _RESUME_IN_LOG.findall(log))
    if experiment.forked is not None:
        # A fork's first start continues from the other run's state, so the log calls it a resume.
        iterations = experiment.forked["after"]
        events.append(Event(float(iterations), "resume", f"forked from {experiment.forked['run']}"))
        logged_resumes[iterations] -= 1
    for iterations, changes in list_resumes(experiment.manifest):
        text = f"continued with changes: {'; '.join(changes)}" if changes else "continued"
        events.append(Event(float(iterations), "resume", text))
        logged_resumes[iterations] -= 1
    for iterations in logged_resumes.elements():  # those that only the log has: counts above 0
        events.append(Event(float(iterations), "resume", "resumed"))
    return sorted(events, key=_order_of_event)


def _evaluation_events(experiment: StoredExperiment) -> list[Event]:
    events = []
    for label, summaries in experiment.evaluations.items():
        for iterations, summary in summaries.items():
            text = f"{label}: pass@1 {summary['pass_at_1']:.3f}"
            events.append(Event(float(iterations), "evaluation", text))
    return events


def _metric_events(experiment: StoredExperiment, log: str) -> list[Event]:
    """Returns the events that metrics tell: restarts of the engine, and signs of collapse.

    `log` is the run's log, which has the reasons of the signs.
    """
    events = []
    logged_reasons = {
        (sign, int(iterations)): reason for sign, iterations, reason in _SIGN_IN_LOG.findall(log)
    }
    signs = sorted(
        key for key in experiment.recorded if key.startswith(SIGN_PREFIX) and key != f"{SIGN_PREFIX}stop"
    )
    present_signs: set[str] = set()
    for row in experiment.metrics:
        x = float(row["iteration"] + 1)
        if row.get("engine/restarts"):  # the restarts of this iteration only
            events.append(Event(x, "restart", "the engine was started again"))
        for key in signs:
            was_present = key in present_signs
            # A row without the sign's metric doesn't tell, so the sign neither begins nor ends there.
            is_present = bool(row.get(key, was_present))
            if is_present == was_present:
                continue
            sign = key.removeprefix(SIGN_PREFIX)
            reason = logged_reasons.get((sign, int(x)), "")
            if is_present:
                present_signs.add(key)
                text = f"{sign} begins: {reason}" if reason else f"{sign} begins"
            else:
                present_signs.remove(key)
                text = f"{sign} ends"
            events.append(Event(x, "sign", text))
        if row.get("diagnostics/stop"):
            events.append(Event(x, "sign", "stopped by a sign of collapse"))
    return events


def _order_of_event(event: Event) -> tuple[float, str, str]:
    return event.x, event.kind, event.text


def events_of_several(experiments: Mapping[str, StoredExperiment]) -> list[Event]:
    """Returns the events of several experiments, each with its experiment's name in the text.

    Evaluations are left out, because the curves of pass@1 have a point at each.
    """
    events = []
    for name, experiment in experiments.items():
        for event in events_of(experiment):
            if event.kind != "evaluation":
                events.append(replace(event, text=f"{name}: {event.text}"))
    return sorted(events, key=_order_of_event)


# Time by phase

DESCRIPTION_BY_PHASE: Mapping[str, str] = {
    "generation": "answers are sampled, or demonstrations taken, and graded",
    "credit": "steps are valued and advantages computed",
    "training": "the policy, and a critic where there is one, learn from the answers",
    "choice": "the weights of each epoch are measured",
    "sync": "the new weights go into the engine that samples",
    "evaluation": "checkpoints are measured",
    "commit": "answers, metrics and checkpoints are written to disk",
    "other": "everything else",
}
"""The phases of the loop, and what is done in each."""


class PlannedMetric(NamedTuple):
    """A metric of an iteration, planned and measured: ("seconds/training", "40 s", "44 s", "+10%")."""

    metric: str
    planned: str
    measured: str
    difference: str


def compare_with_plan(experiment: StoredExperiment) -> list[PlannedMetric]:
    """Compares the plan of one iteration with the mean over the finished iterations, for each planned metric.

    Generation and credit overlap in time if the run samples continuations while it samples answers. They are
    then a single row, with the sum of their seconds.
    """
    planned_by_metric = dict(experiment.predicted)
    if experiment.curve("credit/value_overlap_seconds") and "seconds/credit" in planned_by_metric:
        seconds = planned_by_metric.pop("seconds/generation") + planned_by_metric.pop("seconds/credit")
        planned_by_metric = {"seconds/generation + seconds/credit": seconds} | planned_by_metric
    rows = []
    for metric, planned in planned_by_metric.items():
        # "a + b" is the sum of two metrics, iteration by iteration.
        summands = [experiment.curve(name) for name in metric.split(" + ")]
        values = [math.fsum(y for _, y in points) for points in zip(*summands, strict=False)]
        if not values or not isinstance(planned, int | float) or planned <= 0:
            continue
        mean = math.fsum(values) / len(values)
        unit = {"seconds": " s", "memory": " GiB"}.get(metric.partition("/")[0], "")
        scale = 2**30 if unit == " GiB" else 1  # metrics of memory are in bytes
        planned_text = f"{format_number(planned / scale)}{unit}"
        measured_text = f"{format_number(mean / scale)}{unit}"
        rows.append(PlannedMetric(metric, planned_text, measured_text, f"{mean / planned - 1:+.0%}"))
    return rows


def phase_seconds(experiment: StoredExperiment) -> list[StackedBar]:
    """Returns a bar for each iteration: its seconds by phase."""
    by_phase = {phase: dict(experiment.curve(f"seconds/{phase}")) for phase in DESCRIPTION_BY_PHASE}
    iterations: set[float] = set()
    for seconds_by_iteration in by_phase.values():
        iterations |= set(seconds_by_iteration)
    bars = []
    for iteration in sorted(iterations):
        seconds_of_phases = {phase: seconds.get(iteration, 0.0) for phase, seconds in by_phase.items()}
        bars.append(StackedBar(f"{iteration:.0f}", seconds_of_phases))
    return bars


def phase_totals(bars: Sequence[StackedBar]) -> dict[str, float]:
    """Returns the seconds of each phase, summed over the bars, without phases that took no time."""
    totals = {phase: math.fsum(bar.amounts[phase] for bar in bars) for phase in DESCRIPTION_BY_PHASE}
    return {phase: seconds for phase, seconds in totals.items() if seconds > 0}
