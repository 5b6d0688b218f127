"""What a table knows along training, as series to draw: on its page and in its figures alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treetune_tables.columns import Panel
from treetune_tables.report.cells import Results
from treetune_tables.report.curves import Curve, column_panel
from treetune_tables.report.panels import AXIS_WORDS
from treetune_tables.settings import PanelAxis, Reproduction
from treetune_view.report.charts import Series
from treetune_view.report.directions import Better, better_of
from treetune_view.report.pages import colour_of


def row_colours(table: Reproduction) -> dict[str, str]:
    return {row.name: colour_of(number) for number, row in enumerate(table.rows)}


@dataclass(frozen=True)
class Chart:
    """Lines under one title over `x_name`; without series where no finished run has recorded any."""

    title: str
    series: list[Series]
    x_name: str
    better: Better


def curve_charts(results: Results, curves: Sequence[Curve]) -> list[Chart]:
    """Of every column with a curve of more than one point, one over each cost.

    They are named after the set that is drawn, which is seldom the one that the column reports.
    """
    drawn = {curve.panel.name for curve in curves if len(curve.points) > 1}
    columns = [column for column in results.plan.table.columns if column.name in drawn]
    return [
        Chart(
            f"pass@1 on {column.curve} (%)" + (f", {column.name}" if len(columns) > 1 else ""),
            _series(results, curves, column_panel(column), axis),
            words,
            "up",
        )
        for column in columns
        for axis, words in AXIS_WORDS.items()
    ]


def panel_charts(results: Results, found: Sequence[Curve]) -> list[Chart]:
    """One for each panel of the table."""
    table = results.plan.table
    words = AXIS_WORDS[table.panels_over]
    return [
        Chart(panel.title, _series(results, found, panel, table.panels_over), words, _better(panel))
        for panel in table.panels
    ]


def _better(panel: Panel) -> Better:
    """Of a metric as its name says; of what is measured, accuracy alone has a good direction."""
    if panel.metric is not None:
        return better_of(panel.metric)
    return "up" if panel.value in (None, "pass_at_1") else ""


def _series(results: Results, found: Sequence[Curve], panel: Panel, axis: PanelAxis) -> list[Series]:
    """Means over seeds with their range, a series for each row; one that is measured once is a level."""
    colours, scale = row_colours(results.plan.table), 100.0 if panel.in_percent else 1.0
    return [
        Series(
            curve.row.name,
            [(x, scale * point.mean) for x, point in zip(curve.xs(axis), curve.points)],
            colours[curve.row.name],
            {x: (scale * point.low, scale * point.high) for x, point in zip(curve.xs(axis), curve.points)},
            is_level=len(curve.points) == 1,
        )
        for curve in found
        if curve.panel == panel
    ]
