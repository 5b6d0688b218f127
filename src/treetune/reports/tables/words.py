"""How a table says its numbers, and what a reader must know to read them."""

from __future__ import annotations

from treetune.episode_generators.numbers import declared, declared_ratios
from treetune.reports.tables.measure import CellResult, Results
from treetune.tables.columns import Column, Panel
from treetune.tables.intervals import HELD, Estimate

WHOLE_FROM = 999.5
"""What has more than three digits before the point is shown whole."""
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


def shown_size(value: float, sign: str = "") -> str:
    """Three digits, or all of those before the point."""
    return f"{value:{sign},.0f}" if abs(value) >= WHOLE_FROM else f"{value:{sign}.3g}"


def shown_value(value: float, panel: Panel) -> str:
    text = f"{100 * value:.1f}" if panel.in_percent else shown_size(value)
    return text.replace("-", "−")


COST_WORDS = (
    "Means over seeds. Answers that were sampled to train on; tokens of those and of the continuations that"
    " gave them credit; seconds without evaluation."
)


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
