"""Draws a table's figures: dots with intervals, and curves along training."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.tables.columns import PASS_AT_1, MeasuredColumn, Panel
from treetune.tables.curves import AXIS_TITLES, Curve, column_panel
from treetune.tables.measure import Results
from treetune.tables.settings import PanelAxis, Reproduction
from treetune.tables.text import MARKS_OF_DIFFERENCES, number_text, why_empty
from treetune.view.charts import BetterDirection, Chart, Series, better_direction_of, draw_series
from treetune.view.templates import colour_of, read_palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 160
TITLE_CHARACTERS_PER_INCH = 12
LEGEND_CHARACTERS_PER_INCH = 14
LEGEND_SAMPLE_CHARACTERS = 8
"""The width of a line sample and the space around a name in a legend, in characters."""
CHART_INCHES = (4.2, 3.0)
MEANING_OF_BAND = "range over seeds"
"""What the bands around curves show."""
PANELS_ACROSS = 2
"""The number of charts in a row. Panels have one more in a row if there would be more than this many rows."""


def row_colours(table: Reproduction) -> dict[str, str]:
    return {row.name: colour_of(number) for number, row in enumerate(table.rows)}


def curve_charts(results: Results, curves: Sequence[Curve]) -> list[Chart]:
    """Returns the charts of the columns that have a curve of more than one point: for each column a chart
    over iterations, and one over each cost.

    A chart's title names the evaluation set of its curves, which is seldom the set that the column reports.
    """
    # The panel of a column's curve has the column's name.
    drawn_columns = {curve.panel.name for curve in curves if len(curve.points) > 1}
    columns = [column for column in results.plan.table.columns if column.name in drawn_columns]
    charts = []
    for column in columns:
        title = f"pass@1 on {column.curve} (%)" + (f", {column.name}" if len(columns) > 1 else "")
        for axis, axis_title in AXIS_TITLES.items():
            series = _make_series(results, curves, column_panel(column), axis)
            charts.append(Chart(title, series, better="up", band=MEANING_OF_BAND, x_name=axis_title))
    return charts


def panel_charts(results: Results, curves: Sequence[Curve]) -> list[Chart]:
    """Returns a chart for each panel of the table. A panel whose number no finished run recorded has a chart
    without series."""
    axis = results.plan.table.panels_over
    charts = []
    for panel in results.plan.table.panels:
        series = _make_series(results, curves, panel, axis)
        better, axis_title = _better_direction(panel), AXIS_TITLES[axis]
        charts.append(Chart(panel.title, series, better, band=MEANING_OF_BAND, x_name=axis_title))
    return charts


def _better_direction(panel: Panel) -> BetterDirection:
    """Returns the direction in which a panel's number is better, or an empty text where the title shows no
    direction."""
    if panel.metric is not None:
        return better_direction_of(panel.metric)
    return "up" if panel.number == PASS_AT_1 else ""


def _make_series(results: Results, curves: Sequence[Curve], panel: Panel, axis: PanelAxis) -> list[Series]:
    """Returns a series for each row of a panel: means over seeds with their range."""
    colours = row_colours(results.plan.table)
    scale = 100.0 if panel.in_percent else 1.0
    all_series = []
    for curve in curves:
        if curve.panel == panel:
            xs = curve.xs(axis)
            means = [(x, scale * point.mean) for x, point in zip(xs, curve.points, strict=True)]
            ranges = {
                x: (scale * point.low, scale * point.high) for x, point in zip(xs, curve.points, strict=True)
            }
            is_level = len(curve.points) == 1  # then it is drawn as a line across the whole chart
            series = Series(curve.row.name, means, colours[curve.row.name], ranges, is_level=is_level)
            all_series.append(series)
    return all_series


def _new_figure(width: float, height: float, rows: int, columns: int) -> tuple[Figure, list[Axes]]:
    """Returns an empty figure of this size in inches, and its panels, row after row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)  # becomes the figure's canvas, which draws into files
    axes: list[Axes] = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(visible=True, color=read_palette()["line"], linewidth=0.7)
        panel.set_axisbelow(True)
        panel.tick_params(colors=read_palette()["soft"], labelsize=8)
    return figure, axes


def _put_title(figure: Figure, title: str, inches: float) -> None:
    lines = textwrap.wrap(title, max(20, int(inches * TITLE_CHARACTERS_PER_INCH)))
    figure.suptitle("\n".join(lines), fontsize=10)


def draw_table(results: Results, path: Path) -> None:
    """Draws a figure with a panel for each column. It shows for each row the mean and its interval, the seeds
    as dots, and the published number as a diamond."""
    table = results.plan.table
    width, height = 1.9 + 3.1 * len(table.columns), 1.5 + 0.42 * len(table.rows)
    figure, panels = _new_figure(width, height, rows=1, columns=len(table.columns))
    for panel, column in zip(panels, table.columns, strict=True):
        _draw_column(panel, results, column)
        # Only the first panel has the rows' names at its ticks.
        names = [row.name for row in table.rows] if panel is panels[0] else []
        panel.set_yticks(range(len(table.rows)), labels=names)
        panel.set_ylim(len(table.rows) - 0.4, -0.6)  # from the bottom up, so that the first row is on top
    _put_title(figure, table.title or table.name, width)
    figure.savefig(path)


def _draw_column(panel: Axes, results: Results, column: MeasuredColumn) -> None:
    """Draws one measured number of all rows: each row's mean with its interval, the values of its seeds, and
    the published number, where these exist."""
    scale = 100.0 if column.in_percent else 1.0
    for y, row in enumerate(results.plan.table.rows):
        cell, colour = results.cells[row.name, column.name], read_palette()[colour_of(y)]
        if cell.published is not None:
            grey = read_palette()["soft"]
            panel.plot(scale * cell.published, y, "D", color=grey, fillstyle="none", markersize=6, zorder=2)
        if cell.estimate is None:
            if cell.experiment is not None:  # a row without an experiment in this column stays empty
                panel.annotate(
                    why_empty(cell), (0.02, y), xycoords=("axes fraction", "data"), fontsize=7, va="center"
                )
            continue
        low, high = cell.estimate.low, cell.estimate.high
        if low is not None and high is not None:
            panel.plot([scale * low, scale * high], [y, y], color=colour, linewidth=2.4, alpha=0.55)
        values = [scale * result.value for result in cell.seeds]
        # The seeds' dots are a little below the mean: the y axis points downwards.
        panel.plot(values, [y + 0.22] * len(values), ".", color=colour, markersize=4, alpha=0.8)
        panel.plot(scale * cell.estimate.mean, y, "o", color=colour, markersize=6)
        # The mark shows a significant difference from the row that this row is compared with.
        panel.annotate(
            f"{number_text(cell.estimate.mean, column)} {MARKS_OF_DIFFERENCES[cell.significant_direction]}",
            (scale * cell.estimate.mean, y),
            xytext=(0, 6),
            textcoords="offset points",
            fontsize=8,
            ha="center",
        )
    panel.set_title(f"{column.name}{' (%)' if column.in_percent else ''}", fontsize=9)
    panel.margins(x=0.12)


def draw_curves(results: Results, curves: Sequence[Curve], paths: Sequence[Path]) -> Figure:
    """Draws the curves of columns, and writes the figure to each of the paths: accuracy over iterations and
    over each cost, as means over seeds with their range."""
    return _draw_charts(results, curve_charts(results, curves), PANELS_ACROSS, paths)


def draw_panels(results: Results, curves: Sequence[Curve], paths: Sequence[Path]) -> Figure:
    """Draws all panels in one figure, as means over seeds with their range, and writes it to each of the
    paths."""
    charts = panel_charts(results, curves)
    # A row has PANELS_ACROSS charts, or one more if there would be more than PANELS_ACROSS rows.
    charts_across = PANELS_ACROSS if len(charts) <= PANELS_ACROSS**2 else PANELS_ACROSS + 1
    return _draw_charts(results, charts, min(len(charts), charts_across), paths)


def _draw_charts(
    results: Results, charts: Sequence[Chart], charts_across: int, paths: Sequence[Path]
) -> Figure:
    """Draws charts in rows of `charts_across`, with one legend for all, into each of the files."""
    import matplotlib

    table = results.plan.table
    chart_rows = math.ceil(len(charts) / charts_across)
    width = CHART_INCHES[0] * charts_across
    title_and_legend_inches = 1.0
    height = CHART_INCHES[1] * chart_rows + title_and_legend_inches
    figure, axes = _new_figure(width, height, rows=chart_rows, columns=charts_across)
    for panel, chart in zip(axes, charts):
        panel.set_title(chart.title, fontsize=9, loc="left")
        if chart.series:
            draw_series(panel, chart.series, read_palette(), scale=0.8)
            panel.set_xlabel(chart.x_name, fontsize=8)
            panel.set_xlim(left=0)
        else:
            panel.annotate(
                "nothing recorded", (0.5, 0.5), xycoords="axes fraction", fontsize=8, ha="center", va="center"
            )
    for panel in axes[len(charts) :]:
        panel.set_visible(False)
    title = f"{table.title or table.name}: means over seeds and their range, along training"
    _put_title(figure, title, width)
    drawn_rows: set[str] = set()
    for chart in charts:
        drawn_rows |= {series.name for series in chart.series}
    colours = {
        name: read_palette()[colour] for name, colour in row_colours(table).items() if name in drawn_rows
    }
    _put_legend(figure, colours, width)
    for path in paths:
        # An SVG has its texts as texts, since outlines of letters are larger. With a fixed salt and without
        # a date, the same numbers give the same bytes.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "treetune"}):
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return figure


def _put_legend(figure: Figure, colours: Mapping[str, str], width: float) -> None:
    """Puts a legend below the charts: the names of rows with their colours. `width` is that of the figure in
    inches."""
    from matplotlib.lines import Line2D

    characters_of_entry = max(map(len, colours), default=1) + LEGEND_SAMPLE_CHARACTERS
    entries_across = int(width * LEGEND_CHARACTERS_PER_INCH) // characters_of_entry
    figure.legend(
        [Line2D([], [], color=colour, linewidth=1.6) for colour in colours.values()],
        list(colours),
        loc="outside lower center",
        ncols=max(1, min(8, len(colours), entries_across)),
        fontsize=8,
        frameon=False,
    )
