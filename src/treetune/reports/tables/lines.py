"""What a table knows along training, as series to draw: on its page and in its figures alike."""

from __future__ import annotations

from collections.abc import Sequence

from treetune.reports.charts import Series
from treetune.reports.pages import colour_of
from treetune.reports.tables.curves import Curve
from treetune.reports.tables.measure import Results
from treetune.tables.columns import Column, Panel
from treetune.tables.settings import PanelAxis, Reproduction


def row_colours(table: Reproduction) -> dict[str, str]:
    return {row.name: colour_of(number) for number, row in enumerate(table.rows)}


def drawn_columns(results: Results, curves: Sequence[Curve]) -> list[Column]:
    """Those with a curve of more than one point: else there is nothing along training to see."""
    drawn = {curve.panel.name for curve in curves if len(curve.points) > 1}
    return [column for column in results.plan.table.columns if column.name in drawn]


def curve_title(column: Column, drawn: Sequence[Column]) -> str:
    """Named after the set that is drawn, which is seldom the one that the column reports."""
    title = f"pass@1 on {column.curve} (%)"
    return f"{title}, {column.name}" if len(drawn) > 1 else title


def series_of(results: Results, found: Sequence[Curve], panel: Panel, axis: PanelAxis) -> list[Series]:
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
