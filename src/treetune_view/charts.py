"""Curves and bars: what a chart holds, and how matplotlib draws it, as SVG for a page or on axes of a file.

The viewer's `charts.js` draws the same charts live, from `Chart.as_json`.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 440, 230
RIGHT, TOP, BOTTOM = 12, 10, 36
FONT, CHARACTER = 12.5, 7.6
"""Size of the text at the axes, and about how wide a digit of it is."""

MOST_MARKS = 80
"""With more points than this a curve is drawn without marks."""
MOST_BARS = 60

SAME = 0.01
"""Curves that differ by less than this share of the axis, about the width of a line, hide each other."""
DASH, LEVEL_GAP = 4.0, 2.0
"""Lengths of dashes, in widths of the line."""

N_COLOURS = 12
"""Colours of experiments on a page and of rows in a table."""

NAMES = (
    *(f"c{i}" for i in range(N_COLOURS)), "own", "soft", "line", "paper",
    "generation", "credit", "training", "choice", "sync", "evaluation", "commit", "other",
)  # fmt: skip
"""The colours of the style sheet, which has each in a variable of that name, for light and for dark."""

PAGE: Mapping[str, str] = {name: f"#00{number:02x}ff" for number, name in enumerate(NAMES)}
"""The colours that a figure for the page is drawn with: each stands for its variable."""

_VARIABLES = {colour: f"var(--{name})" for name, colour in PAGE.items()}
_LEFT_OUT = ("font-family", "font-size", "stroke-linecap", "stroke-linejoin")

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
            lines.append(
                {
                    "name": one.name,
                    "colour": int(one.colour[1:]),
                    "x": [x for x, _ in one.points],
                    "y": [y for _, y in one.points],
                    "low": low,
                    "high": high,
                    "dash": one.dash,
                }
            )
        return {
            "title": self.title,
            "lines": lines,
            "better": self.better,
            "band": self.band,
            "x_name": self.x_name,
            "events": [asdict(event) for event in self.events],
        }

    def svg(self) -> str:
        """Returns the chart as a figure of a page without scripts."""
        return line_chart(
            self.title,
            self.series,
            self.better,
            band=self.band,
            from_zero=self.from_zero,
            x_name=self.x_name,
        )


def line_chart(
    title: str,
    series: Sequence[Series],
    better: Better,
    *,
    band: str = "",
    from_zero: bool = False,
    x_name: str = "iteration",
) -> str:
    """Returns curves over a shared x as a figure. Series without points are skipped; at least one must have
    some. `band` describes the intervals, where there are any."""
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


def stacked_bars(title: str, rows: Sequence[tuple[str, Mapping[str, float]]], unit: str) -> str:
    """Returns one bar per row (label, amount by the name of a colour), stacked in the order of the mapping.

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


Marks = tuple[float, Sequence[str]]
"""The points of a curve: their radius, and the tooltip of each."""

Titles = Mapping[str, str | Marks]
"""Tooltips by the `gid` of what was drawn: one text for all of it, or one for each point."""


def draw_series(
    axes: Axes,
    series: Sequence[Series],
    palette: Mapping[str, str],
    *,
    from_zero: bool = False,
    scale: float = 1.0,
) -> dict[str, str | Marks]:
    """Draws levels, bands and curves over a shared x, with the axis' limits and ticks; returns tooltips by
    `gid`.

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
        gap = (turns - 1) * DASH + (LEVEL_GAP if one.is_level or one.dash else 0.0)
        style: dict[str, Any] = {
            "color": colour,
            "linewidth": 1.8 * scale,
            "linestyle": (turn * DASH, (DASH, gap)) if gap else "-",
            "clip_on": False,
            "gid": gid,
            "label": one.name,
        }
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
            titles[f"marks_{n}"] = radius, [one.title(point) for point in one.points]
    return titles


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
        def format_ticks(self, values: Sequence[float]) -> list[str]:
            return tick_labels([float(value) for value in values])

        def __call__(self, x: float, pos: int | None = None) -> str:
            return number(x)

    axis.set_major_formatter(Labels())


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
    figure: Figure, axes: Axes, title: str, remark: str, x_name: str, width: float, titles: Titles
) -> str:
    low, high = axes.get_ylim()
    labels = tick_labels([float(tick) for tick in axes.get_yticks() if low <= tick <= high])
    left = 14 + CHARACTER * max(map(len, labels), default=1)
    axes.set_position(
        (left / width, BOTTOM / HEIGHT, (width - left - RIGHT) / width, 1 - (TOP + BOTTOM) / HEIGHT)
    )
    figure.text(1 - RIGHT / width, 4 / HEIGHT, x_name, ha="right", color=PAGE["soft"], fontsize=FONT)
    caption = f'{escape(title)} <span class="about">{escape(remark)}</span>'
    return f"<figure><figcaption>{caption}</figcaption>{svg_of(figure, title, titles)}</figure>"


# A figure as SVG


def svg_of(figure: Figure, label: str, titles: Titles) -> str:
    """Returns a matplotlib figure as a small SVG with the colours and the font of its page, and tooltips.

    It has no background and is sized by the page; `label` is for those who can't see it.
    """
    import matplotlib

    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "treetune"}):
        figure.savefig(buffer, format="svg", metadata=nothing, transparent=True)
    root = ElementTree.fromstring(buffer.getvalue())
    inner = "".join(_written(child, titles) for child in root)
    label = escape(label, quote=True)
    return f'<svg viewBox="{root.get("viewBox")}" role="img" aria-label="{label}">{inner}</svg>'


def _written(element: ElementTree.Element, titles: Titles) -> str:
    """Writes an element. Groups go, unless they have a title; definitions go with what they define."""
    tag = element.tag.rpartition("}")[2]
    style = _style(element.get("style") or "")
    if tag == "path":
        path = re.sub(r"\s*\n\s*|(?<=[MLCQ]) |\s+(?=[MLCQz])|\s+$", "", _rounded(element.get("d") or ""))
        return "" if "none" in style and "stroke:" not in style else f'<path d="{path}"{style}/>'
    if tag == "text":
        x, y = (_rounded(element.get(key) or "0") for key in "xy")
        return f'<text x="{x}" y="{y}"{style}>{escape(element.text or "")}</text>'
    if tag != "g":
        return ""
    title = titles.get(element.get("id") or "")
    if isinstance(title, tuple):
        radius, tooltips = title
        uses = [use for use in element.iter() if use.tag.rpartition("}")[2] == "use"]
        assert len(uses) == len(tooltips), "a mark lies outside of the figure"
        circles = (
            f'<circle cx="{_rounded(use.get("x") or "")}" cy="{_rounded(use.get("y") or "")}"'
            f' r="{radius:g}"><title>{escape(words)}</title></circle>'
            for use, words in zip(uses, tooltips)
        )
        return f"<g{_style(uses[0].get('style') or '')}>{''.join(circles)}</g>" if uses else ""
    inner = "".join(_written(child, titles) for child in element)
    return f"<g><title>{escape(title)}</title>{inner}</g>" if title and inner else inner


def _style(text: str) -> str:
    pairs = (part.partition(":")[::2] for part in text.split(";") if part.strip())
    kept = [(key.strip(), value.strip()) for key, value in pairs if key.strip() not in _LEFT_OUT]
    kept = [(key, value) for key, value in kept if (key, value) != ("stroke-dashoffset", "0")]
    joined = ";".join(f"{key}:{_VARIABLES.get(value, value)}" for key, value in kept)
    return f' style="{joined}"' if joined else ""


def _rounded(text: str) -> str:
    return re.sub(r"-?\d+\.\d+", lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), text)
