"""Curves: what a chart holds, and how it is drawn: as SVG for a page without scripts, or by matplotlib on the
axes of a file.

The viewer's `charts.js` draws the same charts live, from `Chart.as_json`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from itertools import count, pairwise, takewhile
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

WIDTH, HEIGHT = 440, 230
RIGHT, TOP, BOTTOM = 12, 10, 36
CHARACTER = 7.6
"""About how wide a digit at an axis is."""
TICKS = 5

MOST_MARKS = 80
"""With more points than this a curve is drawn without marks."""
MOST_BARS = 60

SAME = 0.01
"""Curves that differ by less than this share of the axis, about the width of a line, hide each other."""
DASH, LEVEL_GAP = 4.0, 2.0
"""Lengths of dashes, in widths of the line."""

N_COLOURS = 12
"""Colours of experiments on a page and of rows in a table."""

# Which way is better

Better = Literal["up", "down", ""]
"""More of it is better, less of it, or neither."""

WORDS: Mapping[Better, str] = {
    "up": "↑ more is better",
    "down": "↓ less is better",
    "": "neither way is better",
}

BETTER: Mapping[str, Better] = {
    "episodes/reward": "up",
    "episodes/score": "up",
    "episodes/correct": "up",
    "episodes/unfinished": "down",
    "preference/accuracy": "up",
    "engine/tokens_per_second": "up",
    "engine/logprob_gap_mean": "down",
    "engine/logprob_gap_max": "down",
    "engine/canary_gap": "down",
    "engine/canary_mean_gap": "down",
    "critic/mse": "down",
    "seconds/total": "down",
}
"""The direction of each metric that has a good one."""


def better_of(name: str) -> Better:
    """Returns which way a metric of `metrics.jsonl` is better."""
    if name.startswith("evaluation/"):
        return "up" if name.endswith(("/pass_at_1", "/majority_vote")) else ""
    return BETTER.get(name, "")


def about(better: Better, band: str = "") -> str:
    """Returns the remark behind a figure's title: which way is better, and what its bands are."""
    return f"{WORDS[better]}; band: {band}" if band else WORDS[better]


# Numbers and axes


def number(value: float) -> str:
    """Writes three significant digits, without noise: 0.0312, 4 510, 1.2e-06; nan and inf by their names."""
    if not math.isfinite(value):
        return str(float(value))
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e7 or size < 1e-4:
        return f"{value:.3g}"
    if size >= 1000:
        return f"{value:,.0f}".replace(",", "\u2009")
    decimals = max(0, 2 - math.floor(math.log10(size)))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def tick_labels(values: Sequence[float]) -> list[str]:
    """Returns labels as short as they can be while neighbours differ: 36.01, 36.02; 12k, 14k; 2e-06."""
    size = max(map(abs, values), default=0.0)
    scale, letter = next(((s, x) for s, x in ((1e9, "G"), (1e6, "M"), (1e4, "k")) if size >= s), (1.0, ""))
    scale = 1e3 if letter == "k" else scale
    style = "e" if 0 < size < 1e-3 else "f"
    step = min((abs(b - a) for a, b in pairwise(values)), default=size)
    labels: list[str] = []
    for digits in range(12):
        labels = [f"{value / scale:.{digits}{style}}" for value in values]
        if all(abs(float(label) * scale - value) <= 0.02 * step for label, value in zip(labels, values)):
            break
    return ["0" if float(label) == 0 else f"{label}{letter}" for label in labels]


def limits(values: Sequence[float], *, from_zero: bool = False) -> tuple[float, float]:
    """Returns an axis' limits with a little room, which goes a hair beyond 0 only where no value does.

    A value that is always the same is shown from 0 on.
    """
    low, high = min(values), max(values)
    if from_zero or high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        high = 1.0
    room, hair = 0.06 * (high - low), 0.015 * (high - low)
    return (
        max(-hair, low - room) if low >= 0 else low - room,
        min(hair, high + room) if high <= 0 else high + room,
    )


# Charts


@dataclass(frozen=True)
class Series:
    """A curve: points (x rising, y), where known an interval (low, high) by x, the name of a colour."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    interval: Mapping[float, tuple[float, float]] = field(default_factory=dict)
    is_level: bool = False
    """Draws its one point across the whole chart, beside the others' curves."""
    dash: int = 0
    """Tells curves of one colour apart: 0 is drawn through, 1 and more are kinds of dashes."""

    def title(self, point: tuple[float, float]) -> str:
        """Returns the tooltip of a point."""
        x, y = point
        at = "" if self.is_level else f", {number(x)}"
        bounds = self.interval.get(x)
        between = f" [{number(bounds[0])}, {number(bounds[1])}]" if bounds else ""
        return f"{self.name}{at}: {number(y)}{between}"


@dataclass(frozen=True)
class Event:
    """Something that happened after `x` finished iterations. `kind` chooses how it is drawn."""

    x: float
    kind: str
    words: str


@dataclass(frozen=True)
class Chart:
    """Curves under one title. `band` describes the intervals around them."""

    title: str
    series: Sequence[Series]
    better: Better = ""
    band: str = ""
    events: Sequence[Event] = ()
    from_zero: bool = False
    x_name: str = "finished iterations"

    def as_json(self) -> dict[str, Any]:
        """Returns what `charts.js` draws; a colour of the palette is its number."""
        lines = []
        for one in self.series:
            low, high = (
                [one.interval[x][i] if x in one.interval else None for x, _ in one.points]
                if one.interval
                else None
                for i in (0, 1)
            )
            xs, ys = [x for x, _ in one.points], [y for _, y in one.points]
            own = {"name": one.name, "colour": int(one.colour[1:]), "dash": one.dash}
            lines.append(own | {"x": xs, "y": ys, "low": low, "high": high})
        return {
            "title": self.title,
            "lines": lines,
            "better": self.better,
            "band": self.band,
            "x_name": self.x_name,
            "events": [asdict(event) for event in self.events],
        }


def line_chart(chart: Chart) -> str:
    """Returns a chart as a figure of a page without scripts. Series without points are skipped; at least one
    must have some."""
    drawn = [one for one in chart.series if one.points]
    assert drawn, f"nothing to draw in {chart.title!r}"
    xs = [x for one in drawn for x, _ in one.points if not one.is_level] or [0.0]
    left, right = min(xs), max(xs)
    room = 0.02 * (right - left) or 1.0
    low, high = _span(drawn, from_zero=chart.from_zero)
    ys = _ticks(low, high)
    labels = tick_labels(ys)
    begin = 14 + CHARACTER * max(map(len, labels), default=1)

    def at(x: float, y: float) -> str:
        return f"{_across(x):.1f},{_up(y):.1f}"

    def _across(x: float) -> float:
        return begin + (WIDTH - RIGHT - begin) * (x - left + room) / (right - left + 2 * room)

    def _up(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / (high - low)

    parts = []
    for y, label in zip(ys, labels, strict=True):
        line = (
            f'<line class="grid" x1="{begin:.0f}" x2="{WIDTH - RIGHT}" y1="{_up(y):.1f}" y2="{_up(y):.1f}"/>'
        )
        parts.append(f'{line}<text x="{begin - 6:.0f}" y="{_up(y) + 4:.1f}" text-anchor="end">{label}</text>')
    below = _ticks(left, right, whole=all(x == round(x) for x in xs)) or [left]
    for x, label in zip(below, tick_labels(below), strict=True):
        place = f'x="{_across(x):.1f}" y="{HEIGHT - BOTTOM + 16}"'
        parts.append(f'<text {place} text-anchor="middle">{label}</text>')
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(chart.x_name)}</text>'
    )
    for one, (turn, turns) in zip(drawn, _turns(drawn, SAME * (high - low))):
        points, interval = one.points, one.interval
        if one.is_level:
            [(x, y)] = points
            points = [(left - room, y), (right + room, y)]
            interval = {at: interval[x] for at, _ in points} if interval else {}
        bounded = [(x, *interval[x]) for x, _ in points if x in interval]
        around = [at(x, y) for x, y, _ in bounded] + [at(x, y) for x, _, y in reversed(bounded)]
        band_drawn = f'<polygon points="{" ".join(around)}"/>' if around else ""
        gap = (turns - 1) * DASH + (LEVEL_GAP if one.is_level or one.dash else 0.0)
        dashes = f' stroke-dasharray="{1.8 * DASH:g} {1.8 * gap:g}" stroke-dashoffset="{1.8 * turn * DASH:g}"'
        line = f'<polyline points="{" ".join(at(x, y) for x, y in points)}"{dashes if gap else ""}>'
        radius = 2.6 + min(1.2, 2.4 / turns) * (turns - 1 - turn)
        marked = points if len(points) <= MOST_MARKS and not one.is_level else ()
        marks = (
            f'<circle cx="{_across(x):.1f}" cy="{_up(y):.1f}" r="{radius:.3g}">'
            f"<title>{escape(one.title((x, y)))}</title></circle>"
            for x, y in marked
        )
        last = f"<title>{escape(one.title(one.points[-1]))}</title>"
        parts.append(f'<g class="{one.colour}">{band_drawn}{line}{last}</polyline>{"".join(marks)}</g>')
    remark = about(chart.better, chart.band if any(one.interval for one in drawn) else "")
    caption = f'<figcaption>{escape(chart.title)} <span class="about">{escape(remark)}</span></figcaption>'
    label = escape(chart.title, quote=True)
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    svg = f'<svg class="curves" {size} role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f"<figure>{caption}{svg}</figure>"


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Returns at most about `TICKS` round numbers between two others."""
    power = 10.0 ** math.floor(math.log10((high - low) / TICKS or 1.0))
    steps = (power * factor for factor in (1, 2, 2.5, 5, 10, 20, 50))
    step = next(s for s in steps if (high - low) / s <= TICKS and (not whole or s == round(s) > 0))
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in takewhile(lambda i: i * step <= high + 1e-9 * step, count(first))]


def _span(series: Sequence[Series], *, from_zero: bool) -> tuple[float, float]:
    """Returns the limits of an axis that holds curves and their bands."""
    ys = [y for one in series for _, y in one.points]
    ys += [bound for one in series for bounds in one.interval.values() for bound in bounds]
    return limits(ys, from_zero=from_zero)


def thinned(rows: Sequence[tuple[str, Mapping[str, float]]]) -> Sequence[tuple[str, Mapping[str, float]]]:
    """Averages neighbours until there are at most MOST_BARS."""
    size = math.ceil(len(rows) / MOST_BARS)
    if size <= 1:
        return rows
    averaged = []
    for start in range(0, len(rows), size):
        bunch = rows[start : start + size]
        names = dict.fromkeys(name for _, amounts in bunch for name in amounts)
        mean = {
            name: math.fsum(amounts.get(name, 0.0) for _, amounts in bunch) / len(bunch) for name in names
        }
        averaged.append((bunch[0][0] if len(bunch) == 1 else f"{bunch[0][0]}–{bunch[-1][0]}", mean))
    return averaged


# Drawing


def draw_series(
    axes: Axes,
    series: Sequence[Series],
    palette: Mapping[str, str],
    *,
    scale: float = 1.0,
) -> None:
    """Draws levels, bands and curves over a shared x, with the axis' limits and ticks.

    Curves that would hide each other take turns along the line, each with its own dashes, and levels lie
    above them. `scale` is what sizes of lines and marks are multiplied with.
    """
    low, high = _span(series, from_zero=False)
    axes.set_ylim(low, high)
    _label_ticks(axes.yaxis)
    _label_ticks(axes.xaxis)
    for one in series:
        _draw_band(axes, one, palette[one.colour])
    for one, (turn, turns) in zip(series, _turns(series, SAME * (high - low))):
        colour = palette[one.colour]
        gap = (turns - 1) * DASH + (LEVEL_GAP if one.is_level or one.dash else 0.0)
        style: dict[str, Any] = {
            "color": colour,
            "linewidth": 1.8 * scale,
            "linestyle": (turn * DASH, (DASH, gap)) if gap else "-",
            "clip_on": False,
            "label": one.name,
        }
        xs, values = [x for x, _ in one.points], [y for _, y in one.points]
        if one.is_level:
            axes.axhline(values[0], zorder=2.5, **style)
            continue
        axes.plot(xs, values, **style)
        if len(one.points) <= MOST_MARKS:
            radius = (2.6 + min(1.2, 2.4 / turns) * (turns - 1 - turn)) * scale
            axes.plot(xs, values, "o", color=colour, markersize=2 * radius, mew=0, clip_on=False)


def _turns(series: Sequence[Series], near: float) -> list[tuple[int, int]]:
    """Returns each curve's place among those that it coincides with, and how many these are."""

    def coincide(a: Series, b: Series) -> bool:
        theirs = dict(b.points)
        return (
            a.is_level == b.is_level
            and (a.is_level or theirs.keys() == {x for x, _ in a.points})
            and all(abs(y - (b.points[0][1] if b.is_level else theirs[x])) <= near for x, y in a.points)
        )

    groups = [[other for other in series if coincide(one, other)] for one in series]
    return [
        (next(i for i, other in enumerate(group) if other is one), len(group))
        for one, group in zip(series, groups)
    ]


def _draw_band(axes: Axes, one: Series, colour: str) -> None:
    bounded = [(x, *one.interval[x]) for x, _ in one.points if x in one.interval]
    if not bounded:
        return
    xs, lows, highs = (list(part) for part in zip(*bounded))
    if one.is_level:
        axes.axhspan(lows[0], highs[0], color=colour, alpha=0.12, linewidth=0)
    elif len(bounded) == 1:
        axes.plot([xs[0]] * 2, [lows[0], highs[0]], color=colour, linewidth=2.6, alpha=0.55)
    else:
        axes.fill(xs + xs[::-1], highs + lows[::-1], color=colour, alpha=0.16, linewidth=0)


def _label_ticks(axis: Axis) -> None:
    from matplotlib.ticker import Formatter

    class Labels(Formatter):
        @override
        def format_ticks(self, values: Sequence[float]) -> list[str]:
            return tick_labels([float(value) for value in values])

        @override
        def __call__(self, x: float, pos: int | None = None) -> str:
            return number(x)

    axis.set_major_formatter(Labels())
