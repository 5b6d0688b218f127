"""Charts of curves: their content, and their drawing.

All code describes a chart as a `Chart` with `Series`. What draws it depends on the place:

    viewer      Chart.as_json ──► assets/charts.js (uPlot), which zooms and updates live
    report      line_chart ──► SVG, because reports and pages of tables are single files without scripts
    PNG         draw_series ──► matplotlib
    terminal    terminal.plot ──► characters
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from typing_extensions import override

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

CHART_WIDTH, CHART_HEIGHT = 440, 230
"""The size of an SVG chart, in SVG units."""
RIGHT_MARGIN, TOP_MARGIN, BOTTOM_MARGIN = 12, 10, 36
"""The margins around the area of the curves, in SVG units. That at the left depends on the labels
(`_Frame.begin`)."""
CHARACTER_WIDTH = 7.6
"""The approximate width of a digit at an axis, in SVG units."""
MOST_TICK_STEPS = 5
"""The number of steps that an axis has at most; it may have one tick more."""

MOST_MARKS = 80
"""The most points of a curve that are drawn as marks."""
MOST_BARS = 60
"""The most bars of a chart; neighbours are averaged if there are more (`average_neighbours`)."""

HIDING_DISTANCE = 0.01
"""A share of the length of the y axis, about the width of a line. Curves that differ by no more than it would
hide each other."""
DASH_LENGTH, LEVEL_GAP = 4.0, 2.0
"""The length of a dash, and of the gaps in levels and dashed curves, in widths of the line."""
LINE_WIDTH = 1.8
"""The width of a curve; `report.css` sets the same width for SVG."""

N_COLOURS = 12
"""The number of colours for experiments on a page and for rows of a table."""

# Which way is better

BetterDirection = Literal["up", "down", ""]
"""The direction in which a metric improves; empty if neither direction is better."""

BETTER_TEXT: Mapping[BetterDirection, str] = {"up": "↑ higher is better", "down": "↓ lower is better", "": ""}

BETTER_DIRECTIONS: Mapping[str, BetterDirection] = {
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
"""The direction in which a metric is better, for each metric where one direction is."""


def better_direction_of(name: str) -> BetterDirection:
    """Returns the direction in which a metric of an experiment is better, for example "up" for
    ``evaluation/test/pass_at_1``. Returns "" if neither direction is better."""
    if name.startswith("evaluation/"):
        return "up" if name.endswith(("/pass_at_1", "/majority_vote")) else ""
    return BETTER_DIRECTIONS.get(name, "")


def format_remark(better: BetterDirection, band: str = "") -> str:
    """Returns the remark after a figure's title: the better direction, and the meaning of its bands."""
    parts = [BETTER_TEXT[better], f"band: {band}" if band else ""]
    return "; ".join(part for part in parts if part)


# Numbers and axes


def format_number(value: float) -> str:
    """Formats a number with three significant digits, without zeros at its end: 0.0312, 0.3, 1.2e-06.

    From 1000 to 10 million, it is rounded to a whole number: 4 513. Numbers that aren't finite are "nan",
    "inf" and "-inf".
    """
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e7 or size < 1e-4:
        return f"{value:.3g}"
    if size >= 1000:
        return f"{value:,.0f}".replace(",", "\u2009")  # thin spaces between the thousands
    decimals = max(0, 2 - math.floor(math.log10(size)))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def tick_labels(values: Sequence[float]) -> list[str]:
    """Returns labels as short as they can be while neighbours differ: 36.01, 36.02; 12k, 14k; 2e-06."""
    size = max(map(abs, values), default=0.0)
    scale, letter = 1.0, ""
    for least, unit, unit_letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= least:
            scale, letter = unit, unit_letter
            break
    style = "e" if 0 < size < 1e-3 else "f"
    step = min((abs(b - a) for a, b in pairwise(values)), default=size)
    labels: list[str] = []
    for digits in range(12):  # the last labels are taken even if they are not exact enough
        labels = [f"{value / scale:.{digits}{style}}" for value in values]
        errors = [abs(float(label) * scale - value) for label, value in zip(labels, values)]
        # Enough digits: each label is right to a fiftieth of the distance to its neighbour.
        if all(error <= 0.02 * step for error in errors):
            break
    return ["0" if float(label) == 0 else f"{label}{letter}" for label in labels]


def axis_limits(values: Sequence[float], *, from_zero: bool = False) -> tuple[float, float]:
    """Returns the lower and the upper limit of an axis, with some room around the values.

    The room hardly reaches beyond 0, so that it doesn't suggest negative values where there are none. With
    `from_zero`, or if all values are equal, the axis includes 0.
    """
    low, high = min(values), max(values)
    if from_zero or high - low <= 1e-9 * max(abs(low), abs(high)):  # equal but for rounding
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:  # all values are 0
        high = 1.0
    room, room_beyond_zero = 0.06 * (high - low), 0.015 * (high - low)
    lower, upper = low - room, high + room
    if low >= 0:
        lower = max(-room_beyond_zero, lower)
    if high <= 0:
        upper = min(room_beyond_zero, upper)
    return lower, upper


# Charts


@dataclass(frozen=True)
class Series:
    """A curve of a chart, or a level: a line across the whole chart.

    Example: `Series("ppo", [(0.0, 0.41), (50.0, 0.48)], "c0", interval={50.0: (0.46, 0.5)})`.
    """

    name: str
    points: Sequence[tuple[float, float]]
    """(x, y) by rising x."""
    colour: str
    """A colour of the style sheet: ``c0`` to ``c11``, ``own`` or ``soft``."""
    interval: Mapping[float, tuple[float, float]] = field(default_factory=dict)
    """The interval (low, high) around y, by x; an x without a known interval is missing."""
    is_level: bool = False
    """Whether the series has a single point, which is drawn as a line across the whole chart to compare the
    curves with."""
    dash: int = 0
    """The number of the dash pattern, which tells apart several curves of one colour; 0 is a solid line."""

    def tooltip_of(self, point: tuple[float, float]) -> str:
        """Returns the tooltip of a point."""
        x, y = point
        at = "" if self.is_level else f", {format_number(x)}"
        bounds = self.interval.get(x)
        between = f" [{format_number(bounds[0])}, {format_number(bounds[1])}]" if bounds else ""
        return f"{self.name}{at}: {format_number(y)}{between}"


@dataclass(frozen=True)
class Event:
    """Something that happened after `x` finished iterations: `Event(12.0, "resume", "resumed")`."""

    x: float
    kind: str
    """Chooses how it is drawn: evaluation, restart, sign or resume."""
    text: str
    """The description of the event."""


@dataclass(frozen=True)
class Chart:
    """Curves under one title."""

    title: str
    series: Sequence[Series]
    better: BetterDirection = ""
    band: str = ""
    """The meaning of the intervals around the curves, for example "95 % interval over problems"."""
    events: Sequence[Event] = ()
    """Events that the viewer marks at their x."""
    from_zero: bool = False
    """Whether the y axis must include 0."""
    x_name: str = "finished iterations"

    def as_json(self) -> dict[str, Any]:
        """Returns what `charts.js` draws. Colours are numbers: the colour ``c3`` of the palette is 3."""
        lines = []
        for series in self.series:
            line: dict[str, Any] = {
                "name": series.name,
                "colour": int(series.colour[1:]),
                "dash": series.dash,
                "x": [x for x, _ in series.points],
                "y": [y for _, y in series.points],
                "low": None,
                "high": None,
            }
            if series.interval:
                intervals = [series.interval.get(x, (None, None)) for x, _ in series.points]
                line["low"] = [low for low, _ in intervals]
                line["high"] = [high for _, high in intervals]
            lines.append(line)
        return {
            "title": self.title,
            "lines": lines,
            "better": self.better,
            "band": self.band,
            "x_name": self.x_name,
            "events": [asdict(event) for event in self.events],
        }


def line_chart(chart: Chart) -> str:
    """Returns a chart as an HTML figure with SVG, for a page without scripts.

    Series without points are left out; at least one series must have points.
    """
    drawn = [series for series in chart.series if series.points]
    assert drawn, f"nothing to draw in {chart.title!r}"
    frame = _Frame.around(chart, drawn)
    parts = _axes_svg(chart, frame)
    # Curves that would hide each other are dashed, and the dashes of each are in the gaps of the others.
    turns_of_series = _take_turns(drawn, HIDING_DISTANCE * (frame.high - frame.low))
    for series, (turn, turns) in zip(drawn, turns_of_series, strict=True):
        parts.append(_series_svg(series, frame, turn, turns))
    has_intervals = any(series.interval for series in drawn)
    remark = format_remark(chart.better, chart.band if has_intervals else "")
    caption = f'<figcaption>{escape(chart.title)} <span class="about">{escape(remark)}</span></figcaption>'
    label = escape(chart.title, quote=True)
    size = f'viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}"'
    svg = f'<svg class="curves" {size} role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f"<figure>{caption}{svg}</figure>"


@dataclass(frozen=True)
class _Frame:
    """The axes of an SVG chart, in units of the data, and their position in the drawing."""

    left: float
    right: float
    low: float
    high: float
    room: float
    """Room on both sides of the curves, in units of x."""
    whole_xs: bool
    """Whether every x is a whole number. The ticks of x are then whole numbers, too."""
    y_ticks: Sequence[float]
    y_labels: Sequence[str]

    @staticmethod
    def around(chart: Chart, drawn: Sequence[Series]) -> _Frame:
        """Returns the frame that holds these series of a chart."""
        xs: list[float] = []
        for series in drawn:
            if not series.is_level:  # a level is drawn at every x: the x of its point doesn't matter
                xs += [x for x, _ in series.points]
        xs = xs or [0.0]  # a chart that has only levels has an x axis around 0
        left, right = min(xs), max(xs)
        low, high = _y_limits(drawn, from_zero=chart.from_zero)
        y_ticks = _choose_ticks(low, high)
        whole_xs = all(x == round(x) for x in xs)
        room = 0.02 * (right - left) or 1.0  # 1 if there is only one x
        return _Frame(left, right, low, high, room, whole_xs, y_ticks, tick_labels(y_ticks))

    @property
    def begin(self) -> float:
        """The position of the y axis in SVG units from the left. The labels of y are left of it."""
        return 14 + CHARACTER_WIDTH * max(map(len, self.y_labels), default=1)

    def svg_x(self, x: float) -> float:
        """Returns the SVG units from the left of a value of x."""
        share = (x - self.left + self.room) / (self.right - self.left + 2 * self.room)
        return self.begin + (CHART_WIDTH - RIGHT_MARGIN - self.begin) * share

    def svg_y(self, y: float) -> float:
        """Returns the SVG units from the top of a value of y."""
        share = (y - self.low) / (self.high - self.low)
        return CHART_HEIGHT - BOTTOM_MARGIN - (CHART_HEIGHT - TOP_MARGIN - BOTTOM_MARGIN) * share

    def svg_point(self, x: float, y: float) -> str:
        """Returns a point as SVG writes it in the corners of a line: ``102.3,40.0``."""
        return f"{self.svg_x(x):.1f},{self.svg_y(y):.1f}"


def _axes_svg(chart: Chart, frame: _Frame) -> list[str]:
    """Returns the SVG elements of the axes.

    They are a line of the grid with its label for each tick of y, the labels of x, and the name of the x
    axis.
    """
    parts = []
    begin, end = frame.begin, CHART_WIDTH - RIGHT_MARGIN
    for y, label in zip(frame.y_ticks, frame.y_labels, strict=True):
        svg_y = frame.svg_y(y)
        line = f'<line class="grid" x1="{begin:.0f}" x2="{end}" y1="{svg_y:.1f}" y2="{svg_y:.1f}"/>'
        text = f'<text x="{begin - 6:.0f}" y="{svg_y + 4:.1f}" text-anchor="end">{label}</text>'
        parts.append(line + text)
    x_ticks = _choose_ticks(frame.left, frame.right, whole=frame.whole_xs)
    if not x_ticks:  # the only x isn't a whole number, such as 0.5
        x_ticks = [frame.left]
    for x, label in zip(x_ticks, tick_labels(x_ticks), strict=True):
        position = f'x="{frame.svg_x(x):.1f}" y="{CHART_HEIGHT - BOTTOM_MARGIN + 16}"'
        parts.append(f'<text {position} text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{end}" y="{CHART_HEIGHT - 4}" text-anchor="end">{escape(chart.x_name)}</text>')
    return parts


def _series_svg(series: Series, frame: _Frame, turn: int, turns: int) -> str:
    """Returns a curve with its band and marks.

    Args:
        series: The curve.
        frame: The axes.
        turn: The number of the curve among those that coincide with it, from 0 (see `_take_turns`).
        turns: The number of curves that coincide, this curve included.
    """
    points, interval = series.points, series.interval
    if series.is_level:
        # The only point, and its interval, are drawn across the whole chart.
        [(x, y)] = points
        points = [(frame.left - frame.room, y), (frame.right + frame.room, y)]
        interval = {end: interval[x] for end, _ in points} if interval else {}
    points_with_bounds = [(x, *interval[x]) for x, _ in points if x in interval]
    outline = [frame.svg_point(x, low) for x, low, _ in points_with_bounds]
    outline += [frame.svg_point(x, high) for x, _, high in reversed(points_with_bounds)]
    band = f'<polygon points="{" ".join(outline)}"/>' if outline else ""
    # Curves that coincide take turns: each has dashes with gaps for the dashes of the others.
    gap = (turns - 1) * DASH_LENGTH
    if series.is_level or series.dash:
        gap += LEVEL_GAP  # levels and dashed curves have gaps even if they coincide with no other
    dashes = ""
    if gap:
        # SVG expects lengths in units of the drawing, not in widths of the line.
        dash_length, gap_length = LINE_WIDTH * DASH_LENGTH, LINE_WIDTH * gap
        offset = LINE_WIDTH * turn * DASH_LENGTH
        dashes = f' stroke-dasharray="{dash_length:g} {gap_length:g}" stroke-dashoffset="{offset:g}"'
    corners = " ".join(frame.svg_point(x, y) for x, y in points)
    tooltip = f"<title>{escape(series.tooltip_of(series.points[-1]))}</title>"
    line = f'<polyline points="{corners}"{dashes}>{tooltip}</polyline>'
    marks = []
    if len(points) <= MOST_MARKS and not series.is_level:
        radius = _mark_radius(turn, turns)
        for x, y in points:
            circle = f'<circle cx="{frame.svg_x(x):.1f}" cy="{frame.svg_y(y):.1f}" r="{radius:.3g}">'
            marks.append(f"{circle}<title>{escape(series.tooltip_of((x, y)))}</title></circle>")
    return f'<g class="{series.colour}">{band}{line}{"".join(marks)}</g>'


def _mark_radius(turn: int, turns: int) -> float:
    """Returns the radius of a curve's marks.

    If curves coincide, those that are drawn first have larger marks, which are seen as rings around the marks
    of the later curves.

    Args:
        turn: The number of the curve among those that coincide with it, from 0, in the order of drawing.
        turns: The number of curves that coincide, this curve included.
    """
    ring_width = min(1.2, 2.4 / turns)  # with many curves the rings are narrower, and the largest stays small
    return 2.6 + ring_width * (turns - 1 - turn)


def _choose_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Returns the ticks of an axis: round numbers from `low` to `high`, at most `MOST_TICK_STEPS` + 1 of
    them.

    Args:
        whole: Whether all ticks must be whole numbers.
    """
    # An axis without length has steps of 1, because the logarithm of 0 doesn't exist.
    least_step = (high - low) / MOST_TICK_STEPS or 1.0
    power = 10.0 ** math.floor(math.log10(least_step))
    # The factors 20 and 50 are for rounding errors: without such errors, 10 * power exceeds `least_step`.
    steps = [power * factor for factor in (1, 2, 2.5, 5, 10, 20, 50)]
    if whole:
        steps = [step for step in steps if step >= 1 and step == round(step)]
    step = next(step for step in steps if (high - low) / step <= MOST_TICK_STEPS)
    # A tick at an end of the axis must not be lost by rounding.
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [multiple * step for multiple in range(first, last + 1)]


def _y_limits(series: Sequence[Series], *, from_zero: bool) -> tuple[float, float]:
    """Returns the limits of a y axis that has room for curves and their bands."""
    ys: list[float] = []
    for line in series:
        ys += [y for _, y in line.points]
        for bounds in line.interval.values():
            ys += bounds
    return axis_limits(ys, from_zero=from_zero)


class StackedBar(NamedTuple):
    """A bar of several amounts, such as an iteration's seconds by phase.

    Example: ``StackedBar("12", {"generation": 4.0, "training": 2.5})``.
    """

    label: str
    amounts: Mapping[str, float]


def average_neighbours(bars: Sequence[StackedBar]) -> Sequence[StackedBar]:
    """Returns at most MOST_BARS bars, for which neighbours are averaged if there are more.

    Example: of 120 bars, the first two become one with the label ``1–2`` and the mean of each amount.
    """
    size = math.ceil(len(bars) / MOST_BARS)
    if size <= 1:
        return bars
    averaged = []
    for start in range(0, len(bars), size):
        neighbours = bars[start : start + size]
        names: dict[str, None] = {}  # a dictionary as an ordered set
        for bar in neighbours:
            names |= dict.fromkeys(bar.amounts)
        means = {}
        for name in names:
            total = math.fsum(bar.amounts.get(name, 0.0) for bar in neighbours)
            means[name] = total / len(neighbours)
        first, last = neighbours[0].label, neighbours[-1].label
        label = first if len(neighbours) == 1 else f"{first}–{last}"
        averaged.append(StackedBar(label, means))
    return averaged


# Drawing


def draw_series(
    axes: Axes,
    series: Sequence[Series],
    palette: Mapping[str, str],
    *,
    scale: float = 1.0,
) -> None:
    """Draws series on matplotlib's axes, with limits and ticks.

    A series is a curve with a band of its intervals, or a level: a line across the chart. Curves that would
    hide each other are dashed, and the dashes of each are in the gaps of the others. Levels are drawn above
    curves.

    Args:
        axes: The axes to draw on.
        series: The curves and levels.
        palette: A matplotlib colour for each name of a colour: ``{"c0": "#1f77b4"}``.
        scale: A factor for the sizes of lines and marks.
    """
    low, high = _y_limits(series, from_zero=False)
    axes.set_ylim(low, high)
    _label_ticks(axes.yaxis)
    _label_ticks(axes.xaxis)
    for line in series:
        _draw_band(axes, line, palette[line.colour])
    for line, (turn, turns) in zip(series, _take_turns(series, HIDING_DISTANCE * (high - low))):
        colour = palette[line.colour]
        gap = (turns - 1) * DASH_LENGTH  # room for a dash of each of the others
        if line.is_level or line.dash:
            gap += LEVEL_GAP  # levels and dashed curves have gaps even if they coincide with no other
        style: dict[str, Any] = {
            "color": colour,
            "linewidth": LINE_WIDTH * scale,
            # The offset of the first dash, and the lengths of dashes and gaps, in widths of the line.
            "linestyle": (turn * DASH_LENGTH, (DASH_LENGTH, gap)) if gap else "-",
            "clip_on": False,
            "label": line.name,
        }
        xs, values = [x for x, _ in line.points], [y for _, y in line.points]
        if line.is_level:
            axes.axhline(values[0], zorder=2.5, **style)  # curves have 2
            continue
        axes.plot(xs, values, **style)
        if len(line.points) <= MOST_MARKS:
            radius = _mark_radius(turn, turns) * scale
            axes.plot(xs, values, "o", color=colour, markersize=2 * radius, mew=0, clip_on=False)


def _take_turns(series: Sequence[Series], tolerance: float) -> list[tuple[int, int]]:
    """Returns (turn, turns) for each curve: its number among the curves that coincide, and their number.

    The second of three curves that coincide has (1, 3). A curve that coincides with no other has (0, 1). Two
    curves coincide if at each x their ys differ by at most `tolerance`.
    """
    turns = []
    for line in series:
        group = [other for other in series if _coincide(line, other, tolerance)]
        turn = next(i for i, other in enumerate(group) if other is line)
        turns.append((turn, len(group)))
    return turns


def _coincide(a: Series, b: Series, tolerance: float) -> bool:
    """Returns whether two curves have the same xs, and ys that differ by at most `tolerance`.

    Two levels coincide if their ys do. A level and a curve never coincide.
    """
    if a.is_level != b.is_level:
        return False
    if a.is_level:
        return abs(a.points[0][1] - b.points[0][1]) <= tolerance
    ys_of_b = dict(b.points)
    if ys_of_b.keys() != {x for x, _ in a.points}:
        return False
    return all(abs(y - ys_of_b[x]) <= tolerance for x, y in a.points)


def _draw_band(axes: Axes, series: Series, colour: str) -> None:
    """Draws the intervals of a series.

    The intervals of a curve are drawn as an area, or as a bar if there is only one. A level has a single
    point, which is drawn as a line across the chart. Its interval is a strip around this line.
    """
    xs, lows, highs = [], [], []
    for x, _ in series.points:
        if x in series.interval:  # not every point has an interval
            low, high = series.interval[x]
            xs.append(x)
            lows.append(low)
            highs.append(high)
    if not xs:
        return
    if series.is_level:
        axes.axhspan(lows[0], highs[0], color=colour, alpha=0.12, linewidth=0)
    elif len(xs) == 1:
        axes.plot([xs[0], xs[0]], [lows[0], highs[0]], color=colour, linewidth=2.6, alpha=0.55)
    else:
        # A polygon: along the upper ends, and back along the lower ends.
        axes.fill(xs + xs[::-1], highs + lows[::-1], color=colour, alpha=0.16, linewidth=0)


def _label_ticks(axis: Axis) -> None:
    """Labels the ticks of a matplotlib axis as `tick_labels` does.

    A label depends on all ticks of the axis, so labels are made in `format_ticks`. `__call__` formats a
    single number.
    """
    from matplotlib.ticker import Formatter

    class Labels(Formatter):
        @override
        def format_ticks(self, values: Sequence[float]) -> list[str]:
            return tick_labels([float(value) for value in values])

        @override
        def __call__(self, x: float, pos: int | None = None) -> str:
            return format_number(x)

    axis.set_major_formatter(Labels())
