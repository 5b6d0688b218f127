"""A reproduction's figures: the table as dots with intervals, and the curves along training."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.reports.tables.curves import AXES, Curve
from treetune.reports.tables.formats import MARKS, reason, shown_number
from treetune.reports.tables.measure import Results
from treetune.reports.tables.panels import AXIS_WORDS, PanelCurve
from treetune.tables.columns import Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2f6fde", "#d9730d", "#1f8a5b", "#a33fb5", "#b3381f", "#5b6b7d", "#0e8ea8", "#8a6d1f")
"""Those of the page, by row."""

DPI = 160
CHARACTERS_PER_INCH = 12
"""Of a title."""
LEGEND_CHARACTERS_PER_INCH = 14
LEGEND_LINE = 8
"""Characters that a line and the space around a name take in a legend."""

PANELS_ACROSS = 2
"""Three where that would be more than a square."""


def _new_figure(width: float, height: float, rows: int, columns: int) -> tuple[Figure, list[list[Axes]]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for row in axes:
        for one in row:
            one.spines[["top", "right"]].set_visible(False)
            one.grid(visible=True, color="#dde1e7", linewidth=0.7)
            one.set_axisbelow(True)
            one.tick_params(colors="#5d6673", labelsize=8)
    return figure, [list(row) for row in axes]


def draw_table(results: Results, path: Path) -> None:
    """One panel per column: mean and interval of every row, its seeds as dots, published as diamonds."""
    table = results.plan.table
    width, height = 1.9 + 3.1 * len(table.columns), 1.5 + 0.42 * len(table.rows)
    figure, [panels] = _new_figure(width, height, 1, len(table.columns))
    for panel, column in zip(panels, table.columns, strict=True):
        _draw_column(panel, results, column)
        panel.set_yticks(
            range(len(table.rows)), [row.name for row in table.rows] if panel is panels[0] else []
        )
        panel.set_ylim(len(table.rows) - 0.4, -0.6)
    figure.suptitle(_wrapped(table.title or table.name, width), fontsize=10)
    figure.savefig(path)


def _draw_column(panel: Axes, results: Results, column: Column) -> None:
    scale = 100.0 if column.in_percent else 1.0
    for y, row in enumerate(results.plan.table.rows):
        cell, colour = results.cells[row.name, column.name], COLOURS[y % len(COLOURS)]
        if cell.published is not None:
            panel.plot(
                scale * cell.published, y, "D", color="#5d6673", fillstyle="none", markersize=6, zorder=2
            )
        if cell.estimate is None:
            if cell.experiment is not None:
                panel.annotate(
                    reason(cell), (0.02, y), xycoords=("axes fraction", "data"), fontsize=7, va="center"
                )
            continue
        low, high = cell.estimate.low, cell.estimate.high
        if low is not None and high is not None:
            panel.plot([scale * low, scale * high], [y, y], color=colour, linewidth=2.4, alpha=0.55)
        values = [scale * one.value for one in cell.seeds]
        panel.plot(values, [y + 0.22] * len(values), ".", color=colour, markersize=4, alpha=0.8)
        panel.plot(scale * cell.estimate.mean, y, "o", color=colour, markersize=6)
        panel.annotate(
            f"{shown_number(cell.estimate.mean, column)} {MARKS[cell.called]}",
            (scale * cell.estimate.mean, y),
            xytext=(0, 6),
            textcoords="offset points",
            fontsize=8,
            ha="center",
        )
    panel.set_title(f"{column.name}{' (%)' if column.in_percent else ''}", fontsize=9)
    panel.margins(x=0.12)


def draw_curves(results: Results, curves: Sequence[Curve], paths: Sequence[Path]) -> None:
    """A row of panels for each column: accuracy over each cost, mean over seeds with their range."""
    table = results.plan.table
    drawn = [
        column
        for column in table.columns
        if any(curve.column.name == column.name and len(curve.points) > 1 for curve in curves)
    ]
    assert drawn, "no curve has two points"
    figure, panels = _new_figure(3.6 * len(AXES), 3.3 * len(drawn) + 0.5, len(drawn), len(AXES))
    colours = {row.name: COLOURS[number % len(COLOURS)] for number, row in enumerate(table.rows)}
    for line, column in zip(panels, drawn, strict=True):
        for panel, (axis, words) in zip(line, AXES.items(), strict=True):
            for curve in curves:
                if curve.column.name != column.name:
                    continue
                colour, name = colours[curve.row.name], curve.row.name
                means = [100 * point.mean for point in curve.points]
                if len(curve.points) == 1:
                    panel.axhline(means[0], color=colour, linestyle="--", linewidth=1.2, label=name)
                    continue
                xs = [point.costs[axis] for point in curve.points]
                lows = [100 * point.low for point in curve.points]
                highs = [100 * point.high for point in curve.points]
                panel.fill_between(xs, lows, highs, color=colour, alpha=0.13, linewidth=0)
                panel.plot(xs, means, "o-", color=colour, markersize=3, linewidth=1.6, label=name)
            panel.set_xlabel(words, fontsize=8)
            panel.set_xlim(left=0)
            panel.ticklabel_format(axis="x", style="plain")
            panel.xaxis.set_major_formatter(lambda x, _: _short(x))
        line[0].set_ylabel(f"pass@1 on {column.curve} (%)", fontsize=8)
        line[0].set_title(f"{column.name}: mean over seeds and their range", fontsize=9, loc="left")
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower center", ncols=min(8, len(names)), fontsize=8, frameon=False
    )
    for path in paths:
        figure.savefig(path)


def draw_panels(results: Results, found: Sequence[PanelCurve], paths: Sequence[Path]) -> None:
    """All panels in one figure: mean over seeds with their range, one legend for all."""
    table = results.plan.table
    across = min(len(table.panels), PANELS_ACROSS if len(table.panels) <= PANELS_ACROSS**2 else 3)
    down = -(-len(table.panels) // across)
    width = 4.6 * across
    figure, grid = _new_figure(width, 3.0 * down + 1.0, down, across)
    places = [place for line in grid for place in line]
    colours = {row.name: COLOURS[number % len(COLOURS)] for number, row in enumerate(table.rows)}
    lines = {}
    for place, panel in zip(places, table.panels):
        scale = 100.0 if panel.in_percent else 1.0
        own = [curve for curve in found if curve.panel == panel]
        for curve in own:
            colour, name = colours[curve.row.name], curve.row.name
            means = [scale * point.mean for point in curve.points]
            if len(curve.points) == 1:
                lines[name] = place.axhline(means[0], color=colour, linestyle="--", linewidth=1.2)
                continue
            xs = curve.xs(table.panels_over)
            lows = [scale * point.low for point in curve.points]
            highs = [scale * point.high for point in curve.points]
            place.fill_between(xs, lows, highs, color=colour, alpha=0.13, linewidth=0)
            (lines[name],) = place.plot(xs, means, "o-", color=colour, markersize=2.5, linewidth=1.6)
        if not own:
            place.annotate(
                "nothing recorded", (0.5, 0.5), xycoords="axes fraction", fontsize=8, ha="center", va="center"
            )
        place.set_title(f"{panel.name}{' (%)' if panel.in_percent else ''}", fontsize=9, loc="left")
        place.set_xlabel(AXIS_WORDS[table.panels_over], fontsize=8)
        place.set_xlim(left=0)
        place.xaxis.set_major_formatter(lambda x, _: _short(x))
    for place in places[len(table.panels) :]:
        place.set_visible(False)
    title = f"{table.title or table.name}: means over seeds and their range"
    figure.suptitle(_wrapped(title, width), fontsize=10)
    names = [row.name for row in table.rows if row.name in lines]
    figure.legend(
        [lines[name] for name in names], names,
        loc="outside lower center", ncols=_names_across(names, width), fontsize=8, frameon=False,
    )  # fmt: skip
    for path in paths:
        figure.savefig(path)


def _names_across(names: Sequence[str], inches: float) -> int:
    """How many names stand side by side in a legend of that width, each behind its line."""
    longest = max(map(len, names), default=1) + LEGEND_LINE
    return max(1, min(8, len(names), int(inches * LEGEND_CHARACTERS_PER_INCH) // longest))


def _wrapped(title: str, inches: float) -> str:
    return "\n".join(textwrap.wrap(title, max(20, int(inches * CHARACTERS_PER_INCH))))


def _short(value: float) -> str:
    """12k, 3.4M: as long as a tick may be."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
