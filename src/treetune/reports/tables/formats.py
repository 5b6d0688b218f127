"""A reproduction's table for readers and for programs: one content, several forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from treetune.episode_generators.numbers import declared, declared_ratios
from treetune.reports.tables.costs import Cost
from treetune.reports.tables.intervals import HELD, Estimate
from treetune.reports.tables.measure import CellResult, Results
from treetune.reports.tables.panels import PanelCurve, panel_grid, panel_notes, shown_size
from treetune.tables.columns import Column

DASH = "–"
STATES = {"missing": "not run", "different": "other configuration", "wrong": "wrong configuration"}
MARKS = {"better": "▲", "worse": "▼", "higher": "△", "lower": "▽", None: ""}


def shown_number(value: float | None, column: Column, sign: bool = False) -> str:
    if value is None:
        return DASH
    plus = "+" if sign else ""
    if column.in_percent:
        text = f"{100 * value:{plus}.{1 if column.digits is None else column.digits}f}"
    elif column.digits is not None:
        text = f"{value:{plus},.{column.digits}f}"
    else:
        text = shown_size(value, plus)
    return text.replace("-", "−") + column.unit


def shown_interval(estimate: Estimate, column: Column, sign: bool = False) -> str:
    if estimate.low is None:
        return ""
    return f"[{shown_number(estimate.low, column, sign)}, {shown_number(estimate.high, column, sign)}]"


def reason(cell: CellResult) -> str:
    """In a few words, why a cell is empty."""
    words = {text.split(":")[0].split(",")[0] for text in cell.absent.values()}
    return " / ".join(sorted(STATES.get(word, word) for word in words))


def cell_words(cell: CellResult) -> str:
    """Mean, interval, mark; or why there is none."""
    if cell.estimate is None:
        return reason(cell) if cell.experiment is not None else DASH
    parts = [shown_number(cell.estimate.mean, cell.column), shown_interval(cell.estimate, cell.column)]
    parts.append(MARKS[cell.called])
    if cell.absent:
        parts.append(f"({len(cell.seeds)} of {len(cell.seeds) + len(cell.absent)} seeds)")
    return " ".join(part for part in parts if part)


def has_published(results: Results, column: Column) -> bool:
    return any(results.cells[row.name, column.name].published is not None for row in results.plan.table.rows)


def main_grid(results: Results) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table itself."""
    table = results.plan.table
    heads, rows = [""], [[row.name] for row in table.rows]
    for column in table.columns:
        heads.append(column.name)
        published = has_published(results, column)
        if published:
            heads.append("published")
        for row, cells in zip(table.rows, rows, strict=True):
            cell = results.cells[row.name, column.name]
            cells.append(cell_words(cell))
            if published:
                cells.append(shown_number(cell.published, column))
    return heads, rows


def difference_grid(results: Results) -> tuple[list[str], list[list[str]]]:
    """Every measured difference to the baseline, called or not."""
    rows = []
    for cell in results.cells.values():
        if cell.difference is not None:
            rows.append(
                [
                    cell.row.name,
                    cell.column.name,
                    shown_number(cell.difference.mean, cell.column, sign=True),
                    shown_interval(cell.difference, cell.column, sign=True) or DASH,
                    f"{cell.called} {MARKS[cell.called]}" if cell.called else "not told apart",
                ]
            )
    return ["", "column", "difference", "95 % interval", "called"], rows


def seeds_grid(results: Results) -> tuple[list[str], list[list[str]]]:
    """Where every number is from: seed by seed, with directory and configuration."""
    rows = []
    for cell in results.cells.values():
        for one in cell.seeds:
            measured = f"{len(one.by_problem)} × {one.samples}" if one.by_problem is not None else DASH
            rows.append(
                [
                    cell.row.name,
                    cell.column.name,
                    str(one.seed),
                    shown_number(one.value, cell.column),
                    measured,
                    f"`{one.directory}`",
                    f"`{one.config_hash}`",
                ]
            )
        for seed, why in cell.absent.items():
            rows.append([cell.row.name, cell.column.name, str(seed), DASH, DASH, why.splitlines()[0], DASH])
    return ["", "column", "seed", "value", "problems × samples", "experiment", "configuration"], rows


def cost_grid(results: Results) -> tuple[list[str], list[list[str]]]:
    """What the experiments took, as means over their seeds."""
    rows = []
    for name, costs in results.costs.items():
        if costs:
            rows.append(
                [
                    name,
                    str(len(costs)),
                    _thousands(fmean(one.answers for one in costs)),
                    _thousands(fmean(one.sampled_tokens for one in costs)),
                    _thousands(fmean(one.gradient_steps for one in costs)),
                    _thousands(fmean(one.seconds for one in costs)),
                ]
            )
    return ["experiment", "seeds", "sampled answers", "sampled tokens", "gradient steps", "seconds"], rows


def _thousands(value: float) -> str:
    return f"{value:,.0f}"


def legend(results: Results) -> list[str]:
    """What a reader must know to read the table."""
    table = results.plan.table
    seeds = len(table.seeds)
    lines = []
    if any(column.in_percent for column in table.columns):
        lines.append("Shares in percent.")
    over = f"{seeds} seeds and over the problems" if seeds > 1 else "the problems (of one seed)"
    lines.append(f"Means over {seeds} seed{'s' if seeds > 1 else ''} with 95 % intervals over {over}.")
    if table.interval == "bootstrap" and seeds in HELD:
        lines.append(
            f"Where seeds differ most, a bootstrap of {seeds} of them holds the true mean in about"
            f" {100 * HELD[seeds]:.0f} of 100 cases, not 95: read the seeds' own values below."
        )
    if table.baseline is not None:
        lines.append(
            f"▲ better and ▼ worse than {table.baseline}, paired by seed and problem, where the interval of"
            " the difference excludes 0; without a mark the two are not told apart."
        )
        if any(cell.called in ("higher", "lower") for cell in results.cells.values()):
            lines.append("△ and ▽ are the same where neither more nor less is better.")
    for column in table.columns:
        if column.over is not None:
            upper, lower = (declared()[name].title for name in declared_ratios()[column.shown])
            lines.append(f"{column.name}: {upper} of {column.over} over {lower} of the row, means by seed.")
    sources = dict.fromkeys(cell.source for cell in results.cells.values() if cell.source)
    if sources:
        lines.append(f"Published: {'; '.join(sources)}.")
    return [*lines, *table.notes]


def as_markdown(
    results: Results, account: Mapping[str, str], panels: Sequence[PanelCurve] = (), figure: str | None = None
) -> str:
    """Table, panels, differences, origins, costs and the account of how it was made. `figure` is the
    panels' file beside it."""
    table = results.plan.table
    lines = [f"# {table.title or table.name}", "", *_markdown_grid(*main_grid(results)), ""]
    lines += [*legend(results), ""]
    lines += _markdown_panels(results, panels, figure)
    sections = (
        (f"Differences to {table.baseline}", difference_grid(results)),
        ("What it took", cost_grid(results)),
        ("Where the numbers are from", seeds_grid(results)),
    )
    for title, (heads, rows) in sections:
        if rows:
            lines += [f"## {title}", "", *_markdown_grid(heads, rows), ""]
            if title == "What it took":
                lines += [COST_WORDS, ""]
    lines += ["## How it was made", "", *(f"* {key}: {value}" for key, value in account.items()), ""]
    return "\n".join(lines)


def _markdown_panels(results: Results, panels: Sequence[PanelCurve], figure: str | None) -> list[str]:
    notes = panel_notes(results.plan, panels)
    if not notes:
        return []
    lines = ["## Over training", ""]
    heads, rows = panel_grid(results.plan, panels)
    if rows:
        lines += [*_markdown_grid(heads, rows), ""]
    if figure is not None:
        lines += [f"![Over training]({figure})", ""]
    return [*lines, *notes, ""]


COST_WORDS = (
    "Means over seeds. Answers that were sampled to train on; tokens of those and of the continuations that"
    " gave them credit; seconds without evaluation."
)


def _markdown_grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(heads), "|---" + "|---:" * (len(heads) - 1) + "|", *map(line, rows)]


def as_json(results: Results, account: Mapping[str, str]) -> dict[str, Any]:
    table = results.plan.table
    return {
        "name": table.name,
        "title": table.title,
        "seeds": list(table.seeds),
        "baseline": table.baseline,
        "interval": table.interval,
        "cells": [_cell_json(cell) for cell in results.cells.values()],
        "costs": {name: [_cost_json(one) for one in costs] for name, costs in results.costs.items()},
        "account": dict(account),
    }


def _estimate_json(estimate: Estimate | None) -> dict[str, float | None] | None:
    if estimate is None:
        return None
    return {"mean": estimate.mean, "ci_low": estimate.low, "ci_high": estimate.high}


def _cell_json(cell: CellResult) -> dict[str, Any]:
    return {
        "row": cell.row.name,
        "column": cell.column.name,
        "measured": _estimate_json(cell.estimate),
        "difference": _estimate_json(cell.difference),
        "called": cell.called,
        "published": cell.published,
        "source": cell.source,
        "experiment": cell.experiment,
        "seeds": [
            {
                "seed": one.seed,
                "value": one.value,
                "directory": one.directory,
                "config_hash": one.config_hash,
                "iteration": one.iteration,
                "problems": None if one.by_problem is None else len(one.by_problem),
                "samples": one.samples,
            }
            for one in cell.seeds
        ],
        "absent": {str(seed): why for seed, why in cell.absent.items()},
        "notes": list(cell.notes),
    }


def _cost_json(cost: Cost) -> dict[str, float]:
    return dict(vars(cost))
