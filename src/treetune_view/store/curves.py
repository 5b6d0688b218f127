"""Curves of experiments as a chart draws them: points, bands that say what they are, and events."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from treetune_view.report.directions import better_of
from treetune_view.report.experiment import Experiment
from treetune_view.report.sections.training import titled
from treetune_view.report.svg import N_COLOURS

MOST_POINTS = 1200
"""Of a line; of more, the lowest and the highest of neighbours stand for them."""

_RESUMED = re.compile(r"INFO continuing after iteration (\d+) of")
_SIGN = re.compile(r"INFO warning: (\w+) in iterations \d+ to (\d+): (.*)")


@dataclass(frozen=True)
class Line:
    """One curve: x rising, y, and the bounds of its band where it has one; `colour` is of the palette, and a
    line whose colour is `N_COLOURS` more has the same one, dashed."""

    name: str
    colour: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None


@dataclass(frozen=True)
class Event:
    """Something that happened after `x` finished iterations. `kind` chooses how it is drawn."""

    x: float
    kind: str
    words: str


@dataclass(frozen=True)
class Chart:
    """What `charts.js` draws. `better` is up, down or nothing; `band` says what the bands are."""

    title: str
    lines: Sequence[Line]
    better: str = ""
    band: str = ""
    x_name: str = "finished iterations"
    events: Sequence[Event] = field(default_factory=tuple)

    def as_json(self) -> dict[str, Any]:
        made = asdict(self)
        for line in made["lines"]:
            line["dash"], line["colour"] = divmod(line["colour"], N_COLOURS)
        return made


@dataclass(frozen=True)
class Bunch:
    """Experiments that a curve is of: one, or several that differ in their seed alone."""

    name: str
    colour: int
    members: Sequence[Experiment]


def bunches(experiments: Mapping[str, Experiment], together: bool) -> list[Bunch]:
    """Each experiment by itself, or those that differ in nothing but seed and name as one."""
    alike: dict[str, list[str]] = {}
    for name, one in experiments.items():
        alike.setdefault(setting_of(one.config) if together else name, []).append(name)
    made = []
    for i, names in enumerate(alike.values()):
        seeds = f" ({len(names)} seeds)" if len(names) > 1 else ""
        members = [experiments[name] for name in names]
        made.append(Bunch(_telling(names, list(experiments)) + seeds, i, members))
    return made


def _telling(own: Sequence[str], everyone: Sequence[str]) -> str:
    """What the names of a bunch have in common, without what all names have."""

    def shared(names: Sequence[str]) -> dict[int, str]:
        columns = zip(*(name.split("/") for name in names), strict=False)
        return {i: column[0] for i, column in enumerate(columns) if len(set(column)) == 1}

    lengths = {len(name.split("/")) for name in everyone}
    if len(everyone) == 1 or len(lengths) > 1:
        return own[0]
    common = shared(everyone)
    return "/".join(part for i, part in shared(own).items() if i not in common) or own[0]


def setting_of(config: Mapping[str, Any]) -> str:
    """What an experiment is but for its seed, its name and where it lies."""
    return repr(
        {k: v for k, v in sorted(config.items()) if k not in ("seed", "experiment_name", "directory")}
    )


def metric_names(experiments: Iterable[Experiment]) -> list[str]:
    """All numbers that they recorded, by name."""
    found = {
        key for one in experiments for row in one.metrics for key, value in row.items() if _is_number(value)
    }
    return sorted(found - {"iteration", "wall_time"})


def evaluation_charts(made: Sequence[Bunch], events: Sequence[Event] = ()) -> list[Chart]:
    """pass@1 on each evaluation set that was measured more than once."""
    labels = sorted({label for bunch in made for one in bunch.members for label in one.evaluations})
    charts = []
    bounded = all(len(bunch.members) == 1 for bunch in made)  # a chart's bands are all of one kind
    for label in labels:
        lines = [line for bunch in made if (line := _accuracy_line(bunch, label, bounded)) is not None]
        if any(len(line.x) > 1 for line in lines):
            title, band = f"pass@1 on {label}", _band_words(made, "95 % interval over problems")
            charts.append(Chart(title, lines, "up", band, events=events))
    return charts


def chosen_charts(made: Sequence[Bunch], names: Sequence[str], events: Sequence[Event] = ()) -> list[Chart]:
    """A chart for each metric of these names that somebody recorded."""
    return [
        Chart(name, lines, better_of(name), _band_words(made, ""), events=events)
        for name in names
        if (lines := _lines(made, name))
    ]


def usual_charts(made: Sequence[Bunch], events: Sequence[Event] = ()) -> list[Chart]:
    """Those that the report has too: reward, loss, KL, … as far as they were recorded."""
    charts = []
    for title, keys in titled([one for bunch in made for one in bunch.members]):
        lines = [
            _further(line, n, key, len(made) > 1) if len(keys) > 1 else line
            for n, key in enumerate(keys)
            for line in _lines(made, key)
        ]
        if lines:
            words = title.replace("in grey", "dashed")
            charts.append(Chart(words, lines, better_of(keys[0]), _band_words(made, ""), events=events))
    return charts


def _lines(made: Sequence[Bunch], name: str) -> list[Line]:
    """Of a metric, one for each bunch that recorded it."""
    return [line for bunch in made if (line := _metric_line(bunch, name)) is not None]


def _further(line: Line, number: int, key: str, several: bool) -> Line:
    """One of several metrics of a chart: in the colour of its experiment, dashed but for the first."""
    name = key.split("/", 1)[1]
    return replace(
        line, name=f"{line.name}: {name}" if several else name, colour=line.colour + number * N_COLOURS
    )


def events_of(one: Experiment) -> list[Event]:
    """Evaluations, restarts of the engine, signs of collapse that began or ended, resumes, other settings."""
    found = [
        Event(float(number), "evaluation", f"{label}: pass@1 {summary['pass_at_1']:.3f}")
        for label, summaries in one.evaluations.items()
        for number, summary in summaries.items()
    ]
    log = _text_of(one.path / "logs" / "run.log")
    said = {(sign, int(number)): words for sign, number, words in _SIGN.findall(log)}
    before: Mapping[str, Any] = {}
    for row in one.metrics:
        x = float(row["iteration"] + 1)
        if row.get("engine/restarts", 0) > before.get("engine/restarts", 0):
            found.append(Event(x, "restart", "the engine was started again"))
        for key, value in row.items():
            sign = key.removeprefix("diagnostics/")
            if sign != key and sign != "stop" and bool(value) != bool(before.get(key, 0)):
                why = said.get((sign, int(x)), "") if value else ""
                words = f"{sign} {'begins' if value else 'is over'}{': ' if why else ''}{why}"
                found.append(Event(x, "sign", words))
        if row.get("diagnostics/stop"):
            found.append(Event(x, "sign", "stopped by a sign of collapse"))
        before = row
    for change in one.manifest.get("continued", ()):
        words = ", ".join((change.get("changed") or {}).values()) or "on another machine"
        found.append(Event(float(change.get("after", 0)), "resume", f"went on with {words}"))
    found += [Event(float(n), "resume", "resumed") for n in _RESUMED.findall(log)]
    return sorted(found, key=lambda event: (event.x, event.kind, event.words))


def events_of_several(experiments: Mapping[str, Experiment]) -> list[Event]:
    """Of each with its name in front; evaluations stay out: each is a point of a curve of its own."""
    found = [
        replace(event, words=f"{name}: {event.words}")
        for name, one in experiments.items()
        for event in events_of(one)
        if event.kind != "evaluation"
    ]
    return sorted(found, key=lambda event: (event.x, event.kind, event.words))


def _text_of(log: Path) -> str:
    try:
        return log.read_text(errors="replace")
    except OSError:
        return ""


def _metric_line(bunch: Bunch, name: str) -> Line | None:
    curves = [dict(one.curve(name)) for one in bunch.members]
    return _line(bunch, curves, {})


def _accuracy_line(bunch: Bunch, label: str, bounded: bool) -> Line | None:
    """`bounded`: with the interval over problems, where it is one experiment's."""
    measured = [one.evaluations.get(label, {}) for one in bunch.members]
    curves = [{float(n): float(s["pass_at_1"]) for n, s in own.items()} for own in measured]
    bounds = {
        float(n): (float(s["ci_low"]), float(s["ci_high"]))
        for n, s in measured[0].items()
        if bounded and s.get("ci_low") is not None and s.get("ci_high") is not None
    }
    return _line(bunch, curves, bounds)


def _line(
    bunch: Bunch, curves: Sequence[Mapping[float, float]], bounds: Mapping[float, tuple[float, float]]
) -> Line | None:
    """One member's curve with its own bounds; of several the mean, where more than one has a point with the
    t-interval of the mean."""
    xs = sorted({x for curve in curves for x in curve})
    if not xs:
        return None
    means, low, high = [], list[float | None](), list[float | None]()
    for x in xs:
        values = [curve[x] for curve in curves if x in curve]
        means.append(math.fsum(values) / len(values))
        between = _t_interval(values) if len(curves) > 1 else bounds.get(x)
        low.append(between[0] if between else None)
        high.append(between[1] if between else None)
    if not any(bound is not None for bound in low):
        return Line(bunch.name, bunch.colour, *_thinned(xs, means))
    return Line(bunch.name, bunch.colour, xs, means, low, high)


def _t_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Of the mean of independent seeds, 95 %; None of one."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = float(t.ppf(0.975, len(values) - 1)) * math.sqrt(variance / len(values))
    return mean - half, mean + half


def _band_words(made: Sequence[Bunch], alone: str) -> str:
    most = max((len(bunch.members) for bunch in made), default=1)
    return f"95 % t-interval of the mean over up to {most} seeds" if most > 1 else alone


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    if len(xs) <= MOST_POINTS:
        return list(xs), list(ys)
    size = math.ceil(2 * len(xs) / MOST_POINTS)
    kept = set[int]()
    for start in range(0, len(xs), size):
        own = range(start, min(start + size, len(xs)))
        kept |= {min(own, key=ys.__getitem__), max(own, key=ys.__getitem__)}
    kept |= {0, len(xs) - 1}
    return [xs[i] for i in sorted(kept)], [ys[i] for i in sorted(kept)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
