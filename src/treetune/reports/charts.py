"""Curves and bars as SVG text, coloured by the page's style sheet so that they follow its theme.

Colours are classes: ``c0`` … ``c5`` for experiments, and the names of phases for bars. Marks carry a
<title>, which browsers show when the pointer rests on them: the page needs no script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 34
MOST_MARKS = 80
"""With more points than this a curve is drawn without marks."""
MOST_BARS = 60

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One curve: points (x rising, y), where known an interval (low, high) by x, a colour class."""

    name: str
    points: Sequence[Point]
    colour: str
    interval: Mapping[float, tuple[float, float]] = field(default_factory=dict)
    is_level: bool = False
    """Its one point is drawn across the whole chart, beside the others' curves."""


def number(value: float) -> str:
    """Three significant digits, without noise: 0.0312, 4 510, 1.2e-06."""
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


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover [low, high]."""
    span = high - low
    if not span > 0:
        span = abs(high) or 1.0
        low, high = low - span / 2, high + span / 2
    raw = span / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def line_chart(
    title: str, series: Sequence[Series], *, from_zero: bool = False, x_name: str = "iteration"
) -> str:
    """Curves over a shared x. Series without points are skipped; at least one must have some."""
    drawn = [one for one in series if one.points]
    assert drawn, f"nothing to draw in {title!r}"
    xs = [x for one in drawn for x, _ in one.points if not one.is_level] or [0.0]
    ys = [y for one in drawn for _, y in one.points]
    ys += [bound for one in drawn for bounds in one.interval.values() for bound in bounds]
    if from_zero:
        ys.append(0.0)
    y_ticks = ticks(min(ys), max(ys))
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    x_of = _scale(x_low, x_high, LEFT, WIDTH - RIGHT)
    y_of = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [_grid(y_ticks, y_of)]
    for x in _whole_ticks(x_low, x_high):
        parts.append(
            f'<text class="tick" x="{x_of(x):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">'
            f"{number(x)}</text>"
        )
    parts.append(
        f'<text class="axis" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(x_name)}</text>'
    )
    levels = [one for one in drawn if one.is_level]
    curves = [one for one in drawn if not one.is_level]
    parts += [_level(one, y_of) for one in levels]
    parts += [_band(one, x_of, y_of) for one in curves]
    parts += [_curve(one, x_of, y_of) for one in curves]
    return _figure(title, "".join(parts), WIDTH, HEIGHT)


def _level(one: Series, y_of: Callable[[float], float]) -> str:
    (x, y), *_ = one.points
    low, high = one.interval.get(x, (y, y))
    top, bottom = y_of(high), y_of(low)
    words = escape(f"{one.name}: {number(y)} [{number(low)}, {number(high)}]")
    return (
        f'<rect class="band {one.colour}" x="{LEFT}" y="{top:.1f}" width="{WIDTH - RIGHT - LEFT}"'
        f' height="{bottom - top:.1f}"><title>{words}</title></rect>'
        f'<path class="curve dashed {one.colour}" d="M{LEFT} {y_of(y):.1f}H{WIDTH - RIGHT}"/>'
    )


def _band(one: Series, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    bounded = [(x, *one.interval[x]) for x, _ in one.points if x in one.interval]
    if len(bounded) == 1:
        x, low, high = bounded[0]
        return f'<path class="whisker {one.colour}" d="M{x_of(x):.1f} {y_of(low):.1f}V{y_of(high):.1f}"/>'
    if not bounded:
        return ""
    upper = [f"{x_of(x):.1f},{y_of(high):.1f}" for x, _, high in bounded]
    lower = [f"{x_of(x):.1f},{y_of(low):.1f}" for x, low, _ in reversed(bounded)]
    return f'<polygon class="band {one.colour}" points="{" ".join(upper + lower)}"/>'


def _curve(one: Series, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    line = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in one.points)
    parts = [f'<polyline class="curve {one.colour}" points="{line}"/>']
    if len(one.points) <= MOST_MARKS:
        for x, y in one.points:
            bounds = one.interval.get(x)
            between = f" [{number(bounds[0])}, {number(bounds[1])}]" if bounds else ""
            words = escape(f"{one.name}, {number(x)}: {number(y)}{between}")
            parts.append(
                f'<circle class="mark {one.colour}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="2.6">'
                f"<title>{words}</title></circle>"
            )
    return "".join(parts)


def stacked_bars(title: str, rows: Sequence[tuple[str, Mapping[str, float]]], unit: str) -> str:
    """One bar per row (label, amount by class name), stacked in the order of the mapping.

    More than MOST_BARS rows are averaged over neighbours.
    """
    rows = _thinned(rows)
    highest = max(sum(amounts.values()) for _, amounts in rows)
    y_ticks = ticks(0.0, highest or 1.0)
    width = 2 * WIDTH
    y_of = _scale(0.0, y_ticks[-1], HEIGHT - BOTTOM, TOP)
    slot = (width - LEFT - RIGHT) / len(rows)
    parts = [_grid(y_ticks, y_of, width)]
    every = max(1, math.ceil(len(rows) / 16))
    for i, (label, amounts) in enumerate(rows):
        x, base = LEFT + i * slot, 0.0
        for name, amount in amounts.items():
            top, bottom = y_of(base + amount), y_of(base)
            base += amount
            if bottom - top > 0.05:
                words = escape(f"iteration {label}: {name} {number(amount)} {unit}")
                parts.append(
                    f'<rect class="phase {name}" x="{x + slot * 0.1:.1f}" y="{top:.1f}"'
                    f' width="{slot * 0.8:.1f}" height="{bottom - top:.1f}"><title>{words}</title></rect>'
                )
        if i % every == 0:
            parts.append(
                f'<text class="tick" x="{x + slot / 2:.1f}" y="{HEIGHT - BOTTOM + 15}"'
                f' text-anchor="middle">{escape(label)}</text>'
            )
    parts.append(
        f'<text class="axis" x="{width - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">iteration</text>'
    )
    return _figure(title, "".join(parts), width, HEIGHT)


def _thinned(rows: Sequence[tuple[str, Mapping[str, float]]]) -> Sequence[tuple[str, Mapping[str, float]]]:
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


def interval_mark(value: float, low: float, high: float, colour: str) -> str:
    """A point and its interval on a scale from 0 to 1, to stand in a table's cell."""
    x_of = _scale(0.0, 1.0, 4, 116)
    words = escape(f"{value:.3f} [{low:.3f}, {high:.3f}]")
    return (
        f'<svg class="inline" viewBox="0 0 120 16" width="120" height="16" role="img" aria-label="{words}">'
        f'<path class="gridline" d="M4 8H116M4 4V12M60 5V11M116 4V12"/>'
        f'<path class="whisker {colour}" d="M{x_of(low):.1f} 8H{x_of(high):.1f}"/>'
        f'<circle class="mark {colour}" cx="{x_of(value):.1f}" cy="8" r="2.8"><title>{words}</title></circle>'
        "</svg>"
    )


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _whole_ticks(low: float, high: float) -> list[float]:
    """Iterations are whole numbers, and so are the ticks."""
    step = max(1.0, *(b - a for a, b in zip(ticks(low, high), ticks(low, high)[1:])))
    first = math.ceil(low / math.ceil(step)) * math.ceil(step)
    return [float(x) for x in range(int(first), int(high) + 1, math.ceil(step))]


def _grid(y_ticks: Sequence[float], y_of: Callable[[float], float], width: int = WIDTH) -> str:
    return "".join(
        f'<path class="gridline" d="M{LEFT} {y_of(y):.1f}H{width - RIGHT}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{y_of(y) + 3.5:.1f}" text-anchor="end">{number(y)}</text>'
        for y in y_ticks
    )


def _figure(title: str, inner: str, width: int, height: int) -> str:
    label = escape(title, quote=True)
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {width} {height}" role="img"'
        f' aria-label="{label}">{inner}</svg></figure>'
    )
