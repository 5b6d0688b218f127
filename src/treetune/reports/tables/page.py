"""A table as one self-contained HTML page: numbers, differences, curves, costs, origins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from treetune.reports.charts import line_chart
from treetune.reports.pages import page
from treetune.reports.tables import grids
from treetune.reports.tables.curves import AXES, Curve, column_panel
from treetune.reports.tables.lines import (
    curve_title,
    drawn_columns,
    row_colours,
    series_of,
)
from treetune.reports.tables.measure import CellResult, Results
from treetune.reports.tables.panels import AXIS_WORDS, panel_notes
from treetune.reports.tables.words import (
    COST_WORDS,
    DASH,
    MARKS,
    legend,
    reason,
    shown_interval,
    shown_number,
)


def as_html(
    results: Results,
    curves: Sequence[Curve],
    account: Mapping[str, str],
    panels: Sequence[Curve] = (),
) -> str:
    table, colours = results.plan.table, row_colours(results.plan.table)
    published = [grids.has_published(results, column) for column in table.columns]
    return page(
        "table.html",
        title=table.title or table.name,
        heads=list(zip((column.name for column in table.columns), published)),
        rows=[
            {
                "name": row.name,
                "colour": colours[row.name],
                "cells": [_cell(results.cells[row.name, column.name]) for column in table.columns],
            }
            for row in table.rows
        ],
        legend=legend(results),
        panels=_panels(results, panels),
        along=_curves(results, curves),
        baseline=table.baseline,
        differences=_html(grids.difference_grid(results)),
        costs=_html(grids.cost_grid(results)),
        cost_words=COST_WORDS,
        origins=_html(grids.seeds_grid(results)),
        account=account,
        experiments=json.dumps(
            {name: vars(one) for name, one in table.experiments.items()}, indent=1, ensure_ascii=False
        ),
    )


def _cell(cell: CellResult) -> dict[str, Any]:
    column, estimate = cell.column, cell.estimate
    shown: dict[str, Any] = {
        "published": shown_number(cell.published, column),
        "source": cell.source,
        "found": estimate is not None,
    }
    if estimate is None:
        why = "\n".join(f"seed {seed}: {words}" for seed, words in cell.absent.items())
        return shown | {"words": reason(cell) if cell.experiment is not None else DASH, "title": why}
    low, high = (estimate.mean if bound is None else bound for bound in (estimate.low, estimate.high))
    return shown | {
        "words": shown_number(estimate.mean, column),
        "title": "\n".join(f"seed {one.seed}: {one.value:.4g} ({one.directory})" for one in cell.seeds),
        "called": MARKS[cell.called],
        "interval": shown_interval(estimate, column),
        "seeds": f"{len(cell.seeds)} of {len(cell.seeds) + len(cell.absent)} seeds" if cell.absent else "",
        "mark": (estimate.mean, max(0.0, low), min(1.0, high)) if column.in_percent else None,
    }


def _curves(results: Results, curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """For each column a chart over each cost."""
    drawn, colours = drawn_columns(results, curves), row_colours(results.plan.table)
    found = []
    for column in drawn:
        title = curve_title(column, drawn)
        by_axis = {axis: series_of(results, curves, column_panel(column), axis) for axis in AXES}
        found.append(
            {
                "title": title,
                "rows": {one.name: colours[one.name] for series in by_axis.values() for one in series},
                "charts": [
                    line_chart(f"over {AXES[axis]}", series, x_name=AXES[axis])
                    for axis, series in by_axis.items()
                ],
            }
        )
    return found


def _panels(results: Results, panels: Sequence[Curve]) -> dict[str, Any] | None:
    """A chart for each panel, a legend for all, and where every method begins and ends."""
    table, notes = results.plan.table, panel_notes(results.plan, panels)
    if not notes:
        return None
    colours = row_colours(table)
    drawn = ((panel, series_of(results, panels, panel, table.panels_over)) for panel in table.panels)
    return {
        "notes": notes,
        "rows": {name: colours[name] for name in dict.fromkeys(curve.row.name for curve in panels)},
        "charts": [
            line_chart(panel.title, series, x_name=AXIS_WORDS[table.panels_over])
            for panel, series in drawn
            if series
        ],
        "ends": _html(grids.panel_grid(results, panels)),
    }


def _html(frame: Any) -> str:
    return grids.as_html(frame) if len(frame) else ""
