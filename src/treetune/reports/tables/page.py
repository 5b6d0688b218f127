"""A reproduction as one self-contained HTML page: table, differences, curves, costs, origins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from treetune.reports.charts import Series, interval_mark, line_chart
from treetune.reports.html import N_COLOURS
from treetune.reports.tables.curves import AXES, Curve
from treetune.reports.tables.formats import (
    COST_WORDS,
    MARKS,
    cost_grid,
    difference_grid,
    has_published,
    legend,
    reason,
    seeds_grid,
    shown_interval,
    shown_number,
)
from treetune.reports.tables.measure import CellResult, Results
from treetune.reports.tables.panels import AXIS_WORDS, PanelCurve, panel_grid, panel_notes

STYLE = Path(__file__).parents[1] / "report.css"


def as_html(
    results: Results,
    curves: Sequence[Curve],
    account: Mapping[str, str],
    panels: Sequence[PanelCurve] = (),
) -> str:
    table = results.plan.table
    title = escape(table.title or table.name)
    body = [f"<h1>{title}</h1>", _table(results)]
    body += [f'<p class="note">{escape(words)}</p>' for words in legend(results)]
    body.append(_panels(results, panels))
    body.append(_curves(results, curves))
    heads, rows = difference_grid(results)
    if rows:
        body += [f"<h2>Differences to {escape(str(table.baseline))}</h2>", _grid(heads, rows)]
    heads, rows = cost_grid(results)
    if rows:
        body += ["<h2>What it took</h2>", f'<p class="note">{escape(COST_WORDS)}</p>', _grid(heads, rows)]
    body += ["<h2>Where the numbers are from</h2>", _grid(*seeds_grid(results)), "<h2>How it was made</h2>"]
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v.strip('`'))}</dd>" for k, v in account.items())
    body.append(f'<dl class="facts">{facts}</dl>')
    recipes = json.dumps({k: vars(v) for k, v in table.experiments.items()}, indent=1, ensure_ascii=False)
    body.append(
        f"<details><summary>the experiments’ configurations</summary><pre>{escape(recipes)}</pre></details>"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title} – treetune</title><style>{STYLE.read_text()}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _table(results: Results) -> str:
    table = results.plan.table
    heads = ["<th></th>"]
    for column in table.columns:
        wide = 2 if column.in_percent else 1
        heads.append(f'<th colspan="{wide}">{escape(column.name)}</th>')
        if has_published(results, column):
            heads.append("<th>published</th>")
    rows = []
    for number, row in enumerate(table.rows):
        cells = [f'<td><span class="chip c{number % N_COLOURS}"></span>{escape(row.name)}</td>']
        for column in table.columns:
            cell = results.cells[row.name, column.name]
            cells.append(_cell(cell, f"c{number % N_COLOURS}"))
            if has_published(results, column):
                source = f' title="{escape(cell.source, quote=True)}"' if cell.source else ""
                cells.append(f"<td{source}>{shown_number(cell.published, column)}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll"><table class="results"><thead><tr>{"".join(heads)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(cell: CellResult, colour: str) -> str:
    wide = 2 if cell.column.in_percent else 1
    if cell.estimate is None:
        words = escape("\n".join(f"seed {seed}: {why}" for seed, why in cell.absent.items()), quote=True)
        shown = escape(reason(cell)) if cell.experiment is not None else "–"
        return f'<td colspan="{wide}" class="absent" title="{words}">{shown}</td>'
    estimate, column = cell.estimate, cell.column
    interval = shown_interval(estimate, column)
    short = f" ({len(cell.seeds)} of {len(cell.seeds) + len(cell.absent)} seeds)" if cell.absent else ""
    words = f"<b>{shown_number(estimate.mean, column)}</b> {interval}{short} {MARKS[cell.called]}"
    origin = escape(
        "\n".join(f"seed {one.seed}: {one.value:.4g} ({one.directory})" for one in cell.seeds), quote=True
    )
    found = f'<td title="{origin}">{words}</td>'
    if wide == 2:
        low, high = (estimate.mean if bound is None else bound for bound in (estimate.low, estimate.high))
        found += f"<td>{interval_mark(estimate.mean, max(0.0, low), min(1.0, high), colour)}</td>"
    return found


def _curves(results: Results, curves: Sequence[Curve]) -> str:
    """For each column a chart over each cost; rows that are measured once are levels."""
    table = results.plan.table
    colours = {row.name: f"c{number % N_COLOURS}" for number, row in enumerate(table.rows)}
    parts = []
    for column in table.columns:
        own = [curve for curve in curves if curve.column.name == column.name]
        if not any(len(curve.points) > 1 for curve in own):
            continue
        charts = []
        for axis, words in AXES.items():
            series = [
                Series(
                    curve.row.name,
                    [(point.costs[axis], point.mean) for point in curve.points],
                    colours[curve.row.name],
                    {point.costs[axis]: (point.low, point.high) for point in curve.points},
                    is_level=len(curve.points) == 1,
                )
                for curve in own
            ]
            charts.append(line_chart(f"pass@1 on {column.curve} over {words}", series, x_name=words))
        names = "".join(
            f'<span><span class="chip {colours[curve.row.name]}"></span>{escape(curve.row.name)}</span>'
            for curve in own
        )
        parts.append(
            f"<h2>Over training: {escape(column.name)}</h2>"
            f'<p class="note">Means over seeds; bands are their range.</p>'
            f'<div class="legend">{names}</div><div class="charts">{"".join(charts)}</div>'
        )
    return "".join(parts)


def _panels(results: Results, panels: Sequence[PanelCurve]) -> str:
    """A chart for each panel, a legend for all, and where every method begins and ends."""
    table, notes = results.plan.table, panel_notes(results.plan, panels)
    if not notes:
        return ""
    colours = {row.name: f"c{number % N_COLOURS}" for number, row in enumerate(table.rows)}
    words, charts = AXIS_WORDS[table.panels_over], []
    for panel in table.panels:
        series, scale = [], 100.0 if panel.in_percent else 1.0
        for curve in panels:
            if curve.panel == panel:
                xs = curve.xs(table.panels_over)
                series.append(
                    Series(
                        curve.row.name,
                        [(x, scale * point.mean) for x, point in zip(xs, curve.points)],
                        colours[curve.row.name],
                        {x: (scale * point.low, scale * point.high) for x, point in zip(xs, curve.points)},
                        is_level=len(curve.points) == 1,
                    )
                )
        if series:
            charts.append(
                line_chart(f"{panel.name}{' (%)' if panel.in_percent else ''}", series, x_name=words)
            )
    drawn = dict.fromkeys(curve.row.name for curve in panels)
    names = "".join(
        f'<span><span class="chip {colours[name]}"></span>{escape(name)}</span>' for name in drawn
    )
    heads, rows = panel_grid(results.plan, panels)
    return (
        "<h2>Over training</h2>"
        + "".join(f'<p class="note">{escape(words)}</p>' for words in notes)
        + f'<div class="legend">{names}</div><div class="charts">{"".join(charts)}</div>'
        + (_grid(heads, rows) if rows else "")
    )


def _grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    lines = (f"<tr>{''.join(f'<td>{escape(cell.strip(chr(96)))}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="results"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
