"""A reproduction's figures: the table as dots with intervals, and the curves along training."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.reports.charts import Series, draw_series
from treetune.reports.pages import colour_of
from treetune.reports.tables.curves import AXES, Curve, column_panel
from treetune.reports.tables.lines import curve_title, drawn_columns, series_of
from treetune.reports.tables.measure import Results
from treetune.reports.tables.panels import AXIS_WORDS
from treetune.reports.tables.words import MARKS, reason, shown_number
from treetune.tables.columns import Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROWS = ("#2f6fde", "#d9730d", "#1f8a5b", "#a33fb5", "#b3381f", "#5b6b7d", "#0e8ea8", "#8a6d1f")
COLOURS = {f"c{number}": colour for number, colour in enumerate(_ROWS)}
"""Those of the page on white paper, by their names."""

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
        cell, colour = results.cells[row.name, column.name], COLOURS[colour_of(y)]
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


def draw_curves(results: Results, curves: Sequence[Curve], paths: Sequence[Path]) -> Figure:
    """A row of panels for each column: accuracy over each cost, mean over seeds with their range."""
    drawn = drawn_columns(results, curves)
    assert drawn, "no curve has two points"
    width = 3.6 * len(AXES)
    figure, panels = _new_figure(width, 3.3 * len(drawn) + 0.5, len(drawn), len(AXES))
    for line, column in zip(panels, drawn, strict=True):
        for panel, (axis, words) in zip(line, AXES.items(), strict=True):
            _draw_lines(panel, series_of(results, curves, column_panel(column), axis), words)
        line[0].set_title(curve_title(column, drawn), fontsize=9, loc="left")
    _finish(figure, results, "means over seeds and their range, along training", width, panels, paths)
    return figure


def draw_panels(results: Results, found: Sequence[Curve], paths: Sequence[Path]) -> None:
    """All panels in one figure: mean over seeds with their range, one legend for all."""
    table = results.plan.table
    across = min(len(table.panels), PANELS_ACROSS if len(table.panels) <= PANELS_ACROSS**2 else 3)
    down = -(-len(table.panels) // across)
    width = 4.6 * across
    figure, grid = _new_figure(width, 3.0 * down + 1.0, down, across)
    places = [place for line in grid for place in line]
    for place, panel in zip(places, table.panels):
        place.set_title(panel.title, fontsize=9, loc="left")
        if series := series_of(results, found, panel, table.panels_over):
            _draw_lines(place, series, AXIS_WORDS[table.panels_over])
        else:
            place.annotate(
                "nothing recorded", (0.5, 0.5), xycoords="axes fraction", fontsize=8, ha="center", va="center"
            )
    for place in places[len(table.panels) :]:
        place.set_visible(False)
    _finish(figure, results, "means over seeds and their range", width, grid, paths)


def _draw_lines(axes: Axes, series: Sequence[Series], words: str) -> None:
    draw_series(axes, series, COLOURS, scale=0.8)
    axes.set_xlabel(words, fontsize=8)
    axes.set_xlim(left=0)


def _finish(
    figure: Figure,
    results: Results,
    words: str,
    width: float,
    panels: list[list[Axes]],
    paths: Sequence[Path],
) -> None:
    """The title, one legend for all panels, and the files."""
    table = results.plan.table
    figure.suptitle(_wrapped(f"{table.title or table.name}: {words}", width), fontsize=10)
    handles = [axes.get_legend_handles_labels() for line in panels for axes in line]
    lines = {name: handle for some, names in handles for handle, name in zip(some, names)}
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
