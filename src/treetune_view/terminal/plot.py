"""A curve of characters: dots of Unicode's braille patterns, eight to a character, or stars."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treetune_view.report.charts import limits

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Of a braille pattern, by row and column."""
BRAILLE = 0x2800

Curve = Sequence[tuple[float, float]]


def plot(curves: Sequence[Curve], width: int, height: int, *, braille: bool = True) -> list[str]:
    """`height` lines of `width` characters with all curves (x rising) over shared axes, y within `bounds`.

    Points are joined; a curve of one point is a dot. There must be a point, and all must be finite.
    """
    across, down = (2, 4) if braille else (1, 1)
    columns, rows = width * across, height * down
    xs = [x for curve in curves for x, _ in curve]
    low, high = bounds(curves)
    span = max(xs) - min(xs)
    grid = [[False] * columns for _ in range(rows)]

    def place(x: float, y: float) -> tuple[int, int]:
        column = round((x - min(xs)) / span * (columns - 1)) if span else columns // 2
        return column, round((high - y) / (high - low) * (rows - 1))

    for curve in curves:
        places = [place(x, y) for x, y in curve]
        for begin, end in zip(places, places[1:] or places):
            for column, row in _between(begin, end):
                grid[row][column] = True
    return [_line(grid[top : top + down], across, braille) for top in range(0, rows, down)]


def bounds(curves: Sequence[Curve]) -> tuple[float, float]:
    """Of the axis of y."""
    values = [y for curve in curves for _, y in curve]
    low, high = min(values), max(values)
    return (low, high) if low < high else limits(values)


def bar(share: float, width: int, *, braille: bool = True) -> str:
    """A bar as long as a share of `width`; what is above 0 can be seen."""
    whole, rest = divmod(max(0.0, min(1.0, share)) * width, 1)
    if not braille:
        return "#" * max(round(share * width), 1 if share > 0 else 0)
    eighths = "▏▎▍▌▋▊▉"
    part = math.ceil(rest * 8) if share > 0 else 0
    return "█" * int(whole) + ("" if part == 0 else "█" if part == 8 else eighths[part - 1])


def _between(begin: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Dots of the straight line from one to the other."""
    steps = max(abs(end[0] - begin[0]), abs(end[1] - begin[1]), 1)
    return [
        (
            round(begin[0] + (end[0] - begin[0]) * step / steps),
            round(begin[1] + (end[1] - begin[1]) * step / steps),
        )
        for step in range(steps + 1)
    ]


def _line(rows: Sequence[Sequence[bool]], across: int, braille: bool) -> str:
    if not braille:
        return "".join("*" if dot else " " for dot in rows[0])
    return "".join(
        chr(BRAILLE + sum(DOTS[row][i] for row in range(4) for i in range(2) if rows[row][left + i]))
        for left in range(0, len(rows[0]), across)
    )
