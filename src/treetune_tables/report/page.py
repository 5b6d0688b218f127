"""A table as one self-contained HTML page: numbers, differences, curves, costs, origins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from treetune_tables.report import grids
from treetune_tables.report.cells import CellResult, Results
from treetune_tables.report.curves import Curve
from treetune_tables.report.lines import curve_charts, panel_charts, row_colours
from treetune_tables.report.panels import panel_notes
from treetune_tables.report.words import (
    COST_WORDS,
    DASH,
    MARKS,
    legend,
    reason,
    shown_interval,
    shown_number,
)
from treetune_view.report.charts import line_chart
from treetune_view.report.pages import page


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
        along=_along(results, curves, panels),
        baseline=table.baseline,
        differences=_html(grids.difference_grid(results)),
        pairs=_html(grids.pair_grid(results)),
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


def _along(results: Results, curves: Sequence[Curve], panels: Sequence[Curve]) -> dict[str, Any] | None:
    """Panels and curves with one legend, and where every method begins and ends in the panels."""
    charts = [*panel_charts(results, panels), *curve_charts(results, curves)]
    drawn = {one.name for chart in charts for one in chart.series}
    notes = panel_notes(results.plan, panels)
    if not drawn and not notes:
        return None
    return {
        "notes": notes or ["Means over seeds; bands are their range."],
        "rows": {name: c for name, c in row_colours(results.plan.table).items() if name in drawn},
        "charts": [
            line_chart(one.title, one.series, one.better, band="range over seeds", x_name=one.x_name)
            for one in charts
            if one.series
        ],
        "ends": _html(grids.panel_grid(results, panels)),
    }


def _html(frame: Any) -> str:
    return grids.as_html(frame) if len(frame) else ""
