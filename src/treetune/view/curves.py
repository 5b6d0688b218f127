"""Charts of what experiments recorded: one line for each experiment or setting, with bands and events."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from treetune.runtime.directory import SAMPLED_TOKENS, VALUE_TOKENS
from treetune.view.charts import N_COLOURS, Chart, Event, Series, better_of, number
from treetune.view.experiment import StoredExperiment

MOST_POINTS = 1200
"""Points of a line; of more, the lowest and the highest of neighbours stand for them."""

CURVES: tuple[tuple[str, tuple[str, ...]], ...] = (
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
"""Title and the metrics in it, behind the reward. What an experiment did not record has no chart."""

SIGNS = "diagnostics/"
"""Begins the names of signs of collapse."""
SHAPING = "shaping/"
"""Begins the names of metrics of the parts of `shaping`, which may be anyone's: a chart for each."""

FROM_ZERO = {
    "share unfinished",
    "clip fraction",
    "engine: sampled tokens per second",
    "rounds of sampling until enough problems had answers of different scores",
    "share of problems whose answers all have the same score",
    "share of trained tokens whose advantage is 0",
}

_RESUMED = re.compile(r"INFO continuing after iteration (\d+) of")
_SIGN = re.compile(r"INFO warning: (\w+) in iterations \d+ to (\d+): (.*)")


OVER: Mapping[str, tuple[str, ...]] = {
    "finished iterations": (),
    "sampled tokens": (SAMPLED_TOKENS, VALUE_TOKENS),
    "seconds in iterations": ("seconds/total",),
    "optimiser steps": ("train/steps",),
}
"""What curves can be drawn over, and the metrics whose sum that is."""


@dataclass(frozen=True)
class Bunch:
    """Experiments that a curve is of: one, or several that differ in their seed alone. Curves are drawn over
    one of `OVER`: `places` has it after so many iterations, the mean over the members."""

    name: str
    colour: int
    members: Sequence[StoredExperiment]
    over: str = "finished iterations"
    places: Mapping[float, float] = field(default_factory=dict)


def bunches(
    experiments: Mapping[str, StoredExperiment], together: bool, over: str = "finished iterations"
) -> list[Bunch]:
    """Returns each experiment by itself, or those that differ in nothing but seed and name as one."""
    alike: dict[str, list[str]] = {}
    for name, one in experiments.items():
        alike.setdefault(setting_of(one.config) if together else name, []).append(name)
    made = []
    for i, names in enumerate(alike.values()):
        seeds = f" ({len(names)} seeds)" if len(names) > 1 else ""
        members = [experiments[name] for name in names]
        spent: dict[float, list[float]] = {}
        for one in members if OVER[over] else ():
            if over not in one.kept:
                each = (sum(row.get(key) or 0.0 for key in OVER[over]) for row in one.metrics)
                after = (float(row["iteration"] + 1) for row in one.metrics)
                one.kept[over] = dict(zip(after, itertools.accumulate(each)))
            for x, so_far in one.kept[over].items() if len(members) > 1 else ():
                spent.setdefault(x, []).append(so_far)
        places = {x: math.fsum(own) / len(own) for x, own in spent.items()} or members[0].kept.get(over, {})
        name = _distinct_name(names, list(experiments)) + seeds
        made.append(Bunch(name, i, members, over, places))
    return made


def _distinct_name(names: Sequence[str], all_names: Sequence[str]) -> str:
    """Returns what the names of a bunch have in common, without what all names have."""

    def shared(names: Sequence[str]) -> dict[int, str]:
        columns = zip(*(name.split("/") for name in names), strict=False)
        return {i: column[0] for i, column in enumerate(columns) if len(set(column)) == 1}

    lengths = {len(name.split("/")) for name in all_names}
    if len(all_names) == 1 or len(lengths) > 1:
        return names[0]
    common = shared(all_names)
    return "/".join(part for i, part in shared(names).items() if i not in common) or names[0]


def setting_of(config: Mapping[str, Any]) -> str:
    """Returns what an experiment is but for its seed, its name and where it lies."""
    return repr(
        {k: v for k, v in sorted(config.items()) if k not in ("seed", "experiment_name", "directory")}
    )


def metric_names(experiments: Iterable[StoredExperiment]) -> list[str]:
    """Returns the names of all numbers that they recorded."""
    names = {key for one in experiments for key in one.recorded if one.curve(key)}
    return sorted(names - {"iteration", "wall_time"})


# Charts


def evaluation_charts(made: Sequence[Bunch], events: Sequence[Event] = ()) -> list[Chart]:
    """Returns pass@1 on each evaluation set that was measured more than once; an experiment that was measured
    once is a level to compare with."""
    labels = sorted({label for bunch in made for one in bunch.members for label in one.evaluations})
    alone = all(len(bunch.members) == 1 for bunch in made)  # a chart's bands are all of one kind
    charts = []
    for label in labels:
        lines = []
        for bunch in made:
            measured = [one.evaluations.get(label, {}) for one in bunch.members]
            curves = [{float(n): float(s["pass_at_1"]) for n, s in own.items()} for own in measured]
            bounds = {
                float(n): (float(s["ci_low"]), float(s["ci_high"]))
                for n, s in measured[0].items()
                if alone and s.get("ci_low") is not None and s.get("ci_high") is not None
            }
            if (line := _line(bunch, curves, bounds)) is not None:
                lines.append(replace(line, is_level=len(line.points) == 1))
        if any(not line.is_level for line in lines):
            band = _band_words(made) or "95 % interval over problems"
            charts.append(Chart(f"pass@1 on {label}", lines, "up", band, events, x_name=made[0].over))
    return charts


def chosen_charts(made: Sequence[Bunch], names: Sequence[str], events: Sequence[Event] = ()) -> list[Chart]:
    """Returns a chart for each metric of these names that an experiment recorded."""
    return [
        Chart(name, lines, better_of(name), _band_words(made), events, x_name=made[0].over)
        for name in names
        if (lines := _lines(made, name))
    ]


def usual_charts(made: Sequence[Bunch], events: Sequence[Event] = ()) -> list[Chart]:
    """Returns the reward, a chart for each part of shaping that was recorded, and `CURVES`.

    Further metrics of a chart have the colour of their experiment and are dashed.
    """
    experiments = [one for bunch in made for one in bunch.members]
    data = " and ".join(sorted({one.trained_on for one in experiments}))
    recorded = {key for one in experiments for key in one.recorded if key.startswith(SHAPING)}
    titles: list[tuple[str, tuple[str, ...]]] = [(f"reward of the {data}", ("episodes/reward",))]
    titles += [(f"what shaping added: {key.removeprefix(SHAPING)}", (key,)) for key in sorted(recorded)]
    charts = []
    for title, keys in (*titles, *CURVES):
        lines = []
        for n, key in enumerate(keys):
            for line in _lines(made, key):
                metric = key.split("/", 1)[1]
                name = f"{line.name}: {metric}" if len(made) > 1 else metric
                further = replace(line, name=name, dash=line.dash + n)
                lines.append(further if len(keys) > 1 else line)
        if lines:
            better, band = better_of(keys[0]), _band_words(made)
            zero = title in FROM_ZERO
            charts.append(Chart(title, lines, better, band, events, zero, x_name=made[0].over))
    return charts


def _lines(made: Sequence[Bunch], metric: str) -> list[Series]:
    """Returns a metric's curve of each bunch that recorded it."""
    lines = list[Series | None]()
    for bunch in made:
        if len(bunch.members) > 1:
            lines.append(_line(bunch, [dict(one.curve(metric)) for one in bunch.members], {}))
            continue
        [one], key, (dash, colour) = bunch.members, f"{metric} {bunch.over}", divmod(bunch.colour, N_COLOURS)
        if key not in one.kept:  # of tens of thousands of iterations, for whoever looks again
            points, at = one.curve(metric), bunch.places
            one.kept[key] = _thinned([(at[x], y) for x, y in points if x in at] if at else points)
        lines.append(Series(bunch.name, one.kept[key], f"c{colour}", dash=dash) if one.kept[key] else None)
    return [line for line in lines if line is not None]


def _line(
    bunch: Bunch, curves: Sequence[Mapping[float, float]], bounds: Mapping[float, tuple[float, float]]
) -> Series | None:
    """Returns one member's curve with its own bounds; of several the mean, with the 95 % t-interval of the
    mean where more than one has a point."""
    xs = sorted({x for curve in curves for x in curve if x in bunch.places or not bunch.places})
    if not xs:
        return None
    if len(curves) > 1:
        from scipy.stats import t

        quantiles = t.ppf(0.975, range(1, len(curves)))
    means, interval = [], dict[float, tuple[float, float]]()
    if len(curves) == 1:
        [only] = curves
        means, interval = [only[x] for x in xs], {x: bounds[x] for x in xs if x in bounds}
    for x in xs if len(curves) > 1 else ():
        values = [curve[x] for curve in curves if x in curve]
        mean = math.fsum(values) / len(values)
        means.append(mean)
        if len(values) > 1:
            variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
            half = float(quantiles[len(values) - 2]) * math.sqrt(variance / len(values))
            interval[x] = mean - half, mean + half
    dash, colour = divmod(bunch.colour, N_COLOURS)
    points = list(zip(xs, means, strict=True))
    if at := bunch.places:
        points = [(at[x], y) for x, y in points]
        interval = {at[x]: own for x, own in interval.items()}
    return Series(bunch.name, points if interval else _thinned(points), f"c{colour}", interval, dash=dash)


def _band_words(made: Sequence[Bunch]) -> str:
    most = max((len(bunch.members) for bunch in made), default=1)
    return f"95 % t-interval of the mean over up to {most} seeds" if most > 1 else ""


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / MOST_POINTS)
    kept, ys = {0, len(points) - 1}, np.array([y for _, y in points])
    for start in range(0, len(points), size):
        near = ys[start : start + size]
        kept |= {start + int(near.argmin()), start + int(near.argmax())}
    return [points[i] for i in sorted(kept)]


# Events


def events_of(one: StoredExperiment) -> list[Event]:
    """Returns evaluations, restarts of the engine, signs of collapse that began or ended, resumes, other
    settings."""
    events = [
        Event(float(done), "evaluation", f"{label}: pass@1 {summary['pass_at_1']:.3f}")
        for label, summaries in one.evaluations.items()
        for done, summary in summaries.items()
    ]
    try:
        log = (one.path / "logs" / "run.log").read_text(errors="replace")
    except OSError:
        log = ""
    logged = {(sign, int(number)): words for sign, number, words in _SIGN.findall(log)}
    before: Mapping[str, Any] = {}
    signs = sorted(key for key in one.recorded if key.startswith(SIGNS) and key != f"{SIGNS}stop")
    for row in one.metrics:
        x = float(row["iteration"] + 1)
        if row.get("engine/restarts", 0) > before.get("engine/restarts", 0):
            events.append(Event(x, "restart", "the engine was started again"))
        for key in signs:
            value, sign = row.get(key, before.get(key, 0)), key.removeprefix(SIGNS)
            if bool(value) != bool(before.get(key, 0)):
                why = logged.get((sign, int(x)), "") if value else ""
                words = f"{sign} {'begins' if value else 'is over'}{': ' if why else ''}{why}"
                events.append(Event(x, "sign", words))
        if row.get("diagnostics/stop"):
            events.append(Event(x, "sign", "stopped by a sign of collapse"))
        before = row
    for change in one.manifest.get("continued", ()):
        words = ", ".join((change.get("changed") or {}).values()) or "on another machine"
        events.append(Event(float(change.get("after", 0)), "resume", f"went on with {words}"))
    events += [Event(float(n), "resume", "resumed") for n in _RESUMED.findall(log)]
    return sorted(events, key=lambda event: (event.x, event.kind, event.words))


def events_of_several(experiments: Mapping[str, StoredExperiment]) -> list[Event]:
    """Returns the events of each with its name in front, but for evaluations: each is a point of a curve."""
    events = [
        replace(event, words=f"{name}: {event.words}")
        for name, one in experiments.items()
        for event in events_of(one)
        if event.kind != "evaluation"
    ]
    return sorted(events, key=lambda event: (event.x, event.kind, event.words))


# Time by phase

PHASES: Mapping[str, str] = {
    "generation": "answers are sampled, or demonstrations taken, and graded",
    "credit": "steps are valued and advantages computed",
    "training": "the policy, and a critic where there is one, learn from the answers",
    "choice": "the weights of each epoch are measured",
    "sync": "the new weights go into the engine that samples",
    "evaluation": "checkpoints are measured",
    "commit": "what was done is written to disk",
    "other": "all else",
}
"""The phases of the loop, and what is done in each."""


def plan_beside(experiment: StoredExperiment) -> list[tuple[str, str, str, str]]:
    """Returns what the plan said of an iteration, what one took on average, and by how much that is more or
    less: in words, by the metric's name. Nothing that wasn't recorded. The seconds of answers and of the
    continuations beside them are one row."""
    rows, predicted = [], dict(experiment.predicted)
    if experiment.curve("credit/value_overlap_seconds") and "seconds/credit" in predicted:
        seconds = predicted.pop("seconds/generation") + predicted.pop("seconds/credit")
        predicted = {"seconds/generation + seconds/credit": seconds} | predicted
    for metric, planned in predicted.items():
        parts = [experiment.curve(part) for part in metric.split(" + ")]
        values = [math.fsum(y for _, y in points) for points in zip(*parts, strict=False)]
        if not values or not isinstance(planned, int | float) or planned <= 0:
            continue
        mean = math.fsum(values) / len(values)
        unit = {"seconds": " s", "memory": " GiB"}.get(metric.partition("/")[0], "")
        of_unit = 2**30 if unit == " GiB" else 1
        said, took = (f"{number(one / of_unit)}{unit}" for one in (planned, mean))
        rows.append((metric, said, took, f"{mean / planned - 1:+.0%}"))
    return rows


def phase_seconds(experiment: StoredExperiment) -> list[tuple[str, dict[str, float]]]:
    """Returns seconds by phase of each iteration, in its order, after the iteration's number."""
    by_phase = {phase: dict(experiment.curve(f"seconds/{phase}")) for phase in PHASES}
    return [
        (f"{x:.0f}", {phase: points.get(x, 0.0) for phase, points in by_phase.items()})
        for x in sorted({x for points in by_phase.values() for x in points})
    ]


def phase_totals(rows: Sequence[tuple[str, Mapping[str, float]]]) -> dict[str, float]:
    """Returns seconds of the phases that took any, over all of these iterations."""
    totals = {phase: math.fsum(own[phase] for _, own in rows) for phase in PHASES}
    return {phase: seconds for phase, seconds in totals.items() if seconds > 0}
