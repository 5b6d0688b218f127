"""Curves and bars of reports, drawn by matplotlib: as SVG for a page, or on axes of a figure in a file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from treetune_view.report.directions import Better, about
from treetune_view.report.svg import PAGE, Marks, svg_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 440, 230
RIGHT, TOP, BOTTOM = 12, 10, 36
FONT, CHARACTER = 12.5, 7.6
"""Size of the words at the axes, and about how wide a digit of them is."""

MOST_MARKS = 80
"""With more points than this a curve is drawn without marks."""
MOST_BARS = 60

SAME = 0.01
"""Curves that differ by less than this share of the axis, about the width of a line, hide each other."""
DASH, LEVEL_GAP = 4.0, 2.0
"""Lengths of dashes, in widths of the line."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One curve: points (x rising, y), where known an interval (low, high) by x, the name of a colour."""

    name: str
    points: Sequence[Point]
    colour: str
    interval: Mapping[float, tuple[float, float]] = field(default_factory=dict)
    is_level: bool = False
    """Its one point is drawn across the whole chart, beside the others' curves."""

    def title(self, point: Point) -> str:
        """What the point says when the pointer rests on it."""
        x, y = point
        at = "" if self.is_level else f", {number(x)}"
        bounds = self.interval.get(x)
        between = f" [{number(bounds[0])}, {number(bounds[1])}]" if bounds else ""
        return f"{self.name}{at}: {number(y)}{between}"


def number(value: float) -> str:
    """Three significant digits, without noise: 0.0312, 4 510, 1.2e-06; nan and inf by their names."""
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
    """As short as they can be while each is told from its neighbours: 36.01, 36.02; 12k, 14k; 2e-06."""
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
    """Of an axis: a little room around the values, and a hair of it beyond 0 where there are none.

    What is always the same is shown from 0 on.
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


def draw_series(
    axes: Axes,
    series: Sequence[Series],
    palette: Mapping[str, str],
    *,
    from_zero: bool = False,
    scale: float = 1.0,
) -> dict[str, str | Marks]:
    """Levels, bands and curves over a shared x, with the axis' limits and ticks; titles by `gid`.

    Curves that would hide each other take turns along the line, each with its own dashes, and levels lie
    above them. `scale` is what sizes of lines and marks are multiplied with.
    """
    ys = [y for one in series for _, y in one.points]
    ys += [bound for one in series for bounds in one.interval.values() for bound in bounds]
    low, high = limits(ys, from_zero=from_zero)
    axes.set_ylim(low, high)
    _label_ticks(axes.yaxis)
    _label_ticks(axes.xaxis)
    titles: dict[str, str | Marks] = {}
    for one in series:
        _draw_band(axes, one, palette[one.colour])
    for n, (one, (turn, turns)) in enumerate(zip(series, _turns(series, SAME * (high - low)))):
        colour, gid = palette[one.colour], f"curve_{n}"
        gap = (turns - 1) * DASH + (LEVEL_GAP if one.is_level else 0.0)
        dashes = (turn * DASH, (DASH, gap)) if gap else "-"
        style: dict[str, Any] = {
            "color": colour,
            "linewidth": 1.8 * scale,
            "linestyle": dashes,
            "clip_on": False,
        }
        style |= {"gid": gid, "label": one.name}
        titles[gid] = one.title(one.points[-1])
        xs, values = [x for x, _ in one.points], [y for _, y in one.points]
        if one.is_level:
            axes.axhline(values[0], zorder=2.5, **style)
            continue
        axes.plot(xs, values, **style)
        if len(one.points) <= MOST_MARKS:
            radius = (2.6 + min(1.2, 2.4 / turns) * (turns - 1 - turn)) * scale
            axes.plot(
                xs, values, "o", color=colour, markersize=2 * radius, mew=0, gid=f"marks_{n}", clip_on=False
            )
            titles[f"marks_{n}"] = Marks(radius, [one.title(point) for point in one.points])
    return titles


def _turns(series: Sequence[Series], near: float) -> list[tuple[int, int]]:
    """Of each curve, its place among those that it coincides with, and how many these are."""

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
        def format_ticks(self, values: Sequence[float]) -> list[str]:
            return tick_labels([float(value) for value in values])

        def __call__(self, x: float, pos: int | None = None) -> str:
            return number(x)

    axis.set_major_formatter(Labels())


def line_chart(
    title: str,
    series: Sequence[Series],
    better: Better,
    *,
    band: str = "",
    from_zero: bool = False,
    x_name: str = "iteration",
) -> str:
    """Curves over a shared x. Series without points are skipped; at least one must have some. It is said
    which way is `better`, and what the `band` around a curve is where one is drawn."""
    from matplotlib.ticker import MaxNLocator

    drawn = [one for one in series if one.points]
    assert drawn, f"nothing to draw in {title!r}"
    figure, axes = _page_figure(WIDTH)
    xs = [x for one in drawn for x, _ in one.points if not one.is_level] or [0.0]
    low, high = min(xs), max(xs)
    room = 0.02 * (high - low) or 1.0
    axes.set_xlim(low - room, high + room)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=all(x == round(x) for x in xs), min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 2.5, 5, 10)))
    titles = draw_series(axes, drawn, PAGE, from_zero=from_zero)
    has_band = any(one.interval for one in drawn)
    return _chart(figure, axes, title, about(better, band if has_band else ""), x_name, WIDTH, titles)


def accuracy_chart(title: str, series: Sequence[Series]) -> str:
    """pass@1 of checkpoints, with its interval."""
    band = "95 % interval over problems"
    return line_chart(title, series, "up", band=band, x_name="finished iterations")


def stacked_bars(title: str, rows: Sequence[tuple[str, Mapping[str, float]]], unit: str) -> str:
    """One bar per row (label, amount by the name of a colour), stacked in the order of the mapping.

    More than MOST_BARS rows are averaged over neighbours. Amounts are costs: less is better.
    """
    rows = thinned(rows)
    width, titles = 2 * WIDTH, {}
    figure, axes = _page_figure(width)
    for i, (label, amounts) in enumerate(rows):
        base = 0.0
        for name, amount in amounts.items():
            if amount > 0:
                gid = f"bar_{i}_{name}"
                axes.bar(i, amount, 0.8, base, color=PAGE[name], linewidth=0, gid=gid)
                titles[gid] = f"iteration {label}: {name} {number(amount)} {unit}"
                base += amount
    every = max(1, math.ceil(len(rows) / 16))
    axes.set_xticks(range(0, len(rows), every), [label for label, _ in rows[::every]])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylim(0, max(sum(amounts.values()) for _, amounts in rows) * 1.04 or 1.0)
    _label_ticks(axes.yaxis)
    return _chart(figure, axes, title, about("down"), "iteration", width, titles)


def thinned(rows: Sequence[tuple[str, Mapping[str, float]]]) -> Sequence[tuple[str, Mapping[str, float]]]:
    """At most MOST_BARS: neighbours are averaged."""
    size = math.ceil(len(rows) / MOST_BARS)
    if size <= 1:
        return rows
    thinned = []
    for start in range(0, len(rows), size):
        bunch = rows[start : start + size]
        names = dict.fromkeys(name for _, amounts in bunch for name in amounts)
        mean = {
            name: math.fsum(amounts.get(name, 0.0) for _, amounts in bunch) / len(bunch) for name in names
        }
        label = bunch[0][0] if len(bunch) == 1 else f"{bunch[0][0]}–{bunch[-1][0]}"
        thinned.append((label, mean))
    return thinned


def _page_figure(width: float) -> tuple[Figure, Axes]:
    # Not pyplot: nothing global, no window, whatever the machine has. An inch is 72 of the page's units.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, HEIGHT / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.spines[:].set_visible(False)
    axes.grid(axis="y", color=PAGE["line"], linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=FONT, labelcolor=PAGE["soft"], pad=6)
    return figure, axes


def _chart(
    figure: Figure,
    axes: Axes,
    title: str,
    words: str,
    x_name: str,
    width: float,
    titles: Mapping[str, str | Marks],
) -> str:
    low, high = axes.get_ylim()
    labels = tick_labels([float(tick) for tick in axes.get_yticks() if low <= tick <= high])
    left = 14 + CHARACTER * max(map(len, labels), default=1)
    axes.set_position(
        (left / width, BOTTOM / HEIGHT, (width - left - RIGHT) / width, 1 - (TOP + BOTTOM) / HEIGHT)
    )
    figure.text(1 - RIGHT / width, 4 / HEIGHT, x_name, ha="right", color=PAGE["soft"], fontsize=FONT)
    said = f'{escape(title)} <span class="about">{escape(words)}</span>'
    return f"<figure><figcaption>{said}</figcaption>{svg_of(figure, title, titles)}</figure>"
