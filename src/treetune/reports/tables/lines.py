"""What a table knows along training, as series to draw: on its page and in its figures alike."""

from __future__ import annotations

from collections.abc import Sequence

from treetune.reports.charts import Series
from treetune.reports.pages import colour_of
from treetune.reports.tables.curves import Curve
from treetune.reports.tables.measure import Results
from treetune.reports.tables.panels import PanelCurve
from treetune.tables.columns import Axis, Column, Panel
from treetune.tables.settings import MethodRow, Reproduction


def row_colours(table: Reproduction) -> dict[str, str]:
    return {row.name: colour_of(number) for number, row in enumerate(table.rows)}


def drawn_columns(results: Results, curves: Sequence[Curve]) -> list[Column]:
    """Those with a curve of more than one point: else there is nothing along training to see."""
    drawn = {curve.column.name for curve in curves if len(curve.points) > 1}
    return [column for column in results.plan.table.columns if column.name in drawn]


def curve_title(column: Column, drawn: Sequence[Column]) -> str:
    """Named after the set that is drawn, which is seldom the one that the column reports."""
    title = f"pass@1 on {column.curve} (%)"
    return f"{title}, {column.name}" if len(drawn) > 1 else title


def curve_series(results: Results, curves: Sequence[Curve], column: Column, axis: Axis) -> list[Series]:
    """Percent over a cost, a series for each row; a row that is measured once is a level."""
    own = [curve for curve in curves if curve.column.name == column.name]
    return [
        _series(results, curve, [point.costs[axis] for point in curve.points], scale=100.0) for curve in own
    ]


def panel_series(results: Results, found: Sequence[PanelCurve], panel: Panel) -> list[Series]:
    scale, over = 100.0 if panel.in_percent else 1.0, results.plan.table.panels_over
    return [_series(results, curve, curve.xs(over), scale) for curve in found if curve.panel == panel]


def _series(results: Results, curve: Curve | PanelCurve, xs: Sequence[float], scale: float) -> Series:
    """Means over seeds, with their range."""
    row: MethodRow = curve.row
    return Series(
        row.name,
        [(x, scale * point.mean) for x, point in zip(xs, curve.points)],
        row_colours(results.plan.table)[row.name],
        {x: (scale * point.low, scale * point.high) for x, point in zip(xs, curve.points)},
        is_level=len(curve.points) == 1,
    )
