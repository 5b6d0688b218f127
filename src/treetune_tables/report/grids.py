"""A table's contents as data frames of text, and what a frame is in HTML and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from treetune_tables.columns import Column
from treetune_tables.report.cells import CellResult, Comparison, Results
from treetune_tables.report.curves import Curve
from treetune_tables.report.words import (
    DASH,
    MARKS,
    cell_words,
    shown_interval,
    shown_number,
    shown_p,
    shown_value,
)

if TYPE_CHECKING:
    from pandas import DataFrame


def main_grid(
    results: Results,
    shown: Callable[[CellResult], str] = cell_words,
    text: Callable[[str], str] = str,
) -> DataFrame:
    """The table itself, a row for each method; published numbers stand beside their column.

    `shown` writes a measured cell, and `text` what is text already.
    """
    table = results.plan.table
    heads, rows = [""], [[text(row.name)] for row in table.rows]
    for column in table.columns:
        published = has_published(results, column)
        heads += [text(column.name), "published"] if published else [text(column.name)]
        for row, cells in zip(table.rows, rows, strict=True):
            cell = results.cells[row.name, column.name]
            cells.append(shown(cell))
            if published:
                cells.append(text(shown_number(cell.published, column)))
    return frame(heads, rows)


def has_published(results: Results, column: Column) -> bool:
    return any(results.cells[row.name, column.name].published is not None for row in results.plan.table.rows)


def difference_grid(results: Results) -> DataFrame:
    """Every measured difference to the baseline, called or not."""
    found = [cell.against for cell in results.cells.values() if cell.against is not None]
    return frame(["", "column", *_COMPARED], [[one.row, one.column.name, *_compared(one)] for one in found])


def pair_grid(results: Results) -> DataFrame:
    """The same of the table's pairs."""
    rows = [[one.row, one.to, one.column.name, *_compared(one)] for one in results.pairs]
    return frame(["", "less", "column", *_COMPARED], rows)


_COMPARED = ("seeds", "difference", "95 % interval", "p", "p (Holm)", "called")


def _compared(one: Comparison) -> list[str]:
    return [
        str(one.seeds),
        shown_number(one.difference.mean, one.column, sign=True),
        shown_interval(one.difference, one.column, sign=True) or DASH,
        shown_p(one.p),
        shown_p(one.adjusted),
        f"{one.called} {MARKS[one.called]}" if one.called else "not told apart",
    ]


def cost_grid(results: Results) -> DataFrame:
    """What the experiments took, as means over their seeds."""
    rows = []
    for name, costs in results.costs.items():
        if costs:
            means = [
                fmean(getattr(one, quantity) for one in costs)
                for quantity in ("answers", "sampled_tokens", "gradient_steps", "seconds")
            ]
            rows.append([name, str(len(costs)), *(f"{mean:,.0f}" for mean in means)])
    return frame(
        ["experiment", "seeds", "sampled answers", "sampled tokens", "gradient steps", "seconds"], rows
    )


def seeds_grid(results: Results) -> DataFrame:
    """Where every number is from: seed by seed, with directory and configuration."""
    rows = []
    for cell in results.cells.values():
        begin = [cell.row.name, cell.column.name]
        for one in cell.seeds:
            measured = f"{len(one.by_problem)} × {one.samples}" if one.by_problem is not None else DASH
            value = shown_number(one.value, cell.column)
            rows.append([*begin, str(one.seed), value, measured, one.directory, one.config_hash])
        for seed, why in cell.absent.items():
            rows.append([*begin, str(seed), DASH, DASH, why.splitlines()[0], DASH])
    return frame(["", "column", "seed", "value", "problems × samples", "experiment", "configuration"], rows)


def panel_grid(results: Results, found: Sequence[Curve]) -> DataFrame:
    """Where each method begins and ends in each panel, with the range over seeds."""
    table = results.plan.table
    by_place = {(curve.row.name, curve.panel.name): curve for curve in found}
    rows = []
    for row in table.rows if found else ():
        cells = [row.name]
        for panel in table.panels:
            curve = by_place.get((row.name, panel.name))
            if curve is None:
                cells.append(DASH)
                continue
            first, last = curve.points[0], curve.points[-1]
            low, high = shown_value(last.low, panel), shown_value(last.high, panel)
            began = f"{shown_value(first.mean, panel)} → " if len(curve.points) > 1 else ""
            cells.append(f"{began}{shown_value(last.mean, panel)} [{low}, {high}]")
        rows.append(cells)
    return frame(["", *(panel.title for panel in table.panels)], rows)


def frame(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> DataFrame:
    from pandas import DataFrame

    return DataFrame(rows, columns=list(heads), dtype=str)


def as_html(grid: DataFrame) -> str:
    return grid.to_html(index=False, border=0, classes="list", justify="unset")


def as_markdown(grid: DataFrame, code: Sequence[str] = ()) -> str:
    """`code` are the columns that are set as such."""
    shown = grid.apply(lambda column: column.map(lambda cell: f"`{cell}`") if column.name in code else column)
    lines = [list(shown.columns), *shown.to_numpy().tolist()]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([rows[0], "|---" + "|---:" * (len(shown.columns) - 1) + "|", *rows[1:]])
