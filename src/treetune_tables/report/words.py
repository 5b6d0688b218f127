"""How a table says its numbers, and what a reader must know to read them."""

from __future__ import annotations

from treetune.rollouts.numbers import declared, declared_ratios
from treetune_tables.columns import Column, Panel
from treetune_tables.intervals import HELD, Estimate
from treetune_tables.report.cells import CellResult, Results
from treetune_tables.report.curves import AXES
from treetune_tables.runs import Plan
from treetune_tables.until import verdicts

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


def shown_p(value: float | None) -> str:
    if value is None:
        return DASH
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def reason(cell: CellResult) -> str:
    """In a few words, why a cell is empty."""
    if cell.column.reach is not None and cell.seeds:
        return f"reached by {len(cell.seeds)} of {len(cell.seeds) + len(cell.absent)} seeds"
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
    seeds = _most_seeds(results)
    lines = []
    if any(column.in_percent for column in table.columns):
        lines.append("Shares in percent.")
    over = f"{seeds} seeds and over the problems" if seeds > 1 else "the problems (of one seed)"
    lines.append(f"Means over {seeds} seed{'s' if seeds > 1 else ''} with 95 % intervals over {over}.")
    if shared := [
        row.name for row in table.rows if row.experiment and table.experiments[row.experiment].shared
    ]:
        lines.append(f"{', '.join(shared)} is one run that all seeds share; its interval is of the problems.")
    lines += seed_lines(results.plan)
    if table.interval == "bootstrap" and seeds in HELD:
        lines.append(
            f"Where seeds differ most, a bootstrap of {seeds} of them holds the true mean in about"
            f" {100 * HELD[seeds]:.0f} of 100 cases, not 95: read the seeds' own values below."
        )
    if table.baseline is not None:
        lines.append(
            f"▲ better and ▼ worse than {table.baseline}, paired by seed and problem, where the interval of"
            f" the difference excludes 0 and p is below 0.05 after Holm's correction for {_counted(results)};"
            " without a mark the two are not told apart."
        )
        if any(cell.called in ("higher", "lower") for cell in results.cells.values()):
            lines.append("△ and ▽ are the same where neither more nor less is better.")
    for column in table.columns:
        if column.over is not None:
            upper, lower = (declared()[name].title for name in declared_ratios()[column.shown])
            lines.append(f"{column.name}: {upper} of {column.over} over {lower} of the row, means by seed.")
        if column.area is not None:
            lines.append(
                f"{column.name}: the mean of pass@1 on {column.curve} from the start to"
                f" {column.area.upto:,.0f} {AXES[column.area.over]}, the area under the curve."
            )
        if column.reach is not None:
            lines.append(
                f"{column.name}: {AXES[column.reach.over]} until pass@1 on {column.curve} first comes to"
                f" {column.reach.accuracy:.0%}; a mean stands where every seed came to it."
            )
    sources = dict.fromkeys(cell.source for cell in results.cells.values() if cell.source)
    if sources:
        lines.append(f"Published: {'; '.join(sources)}.")
    return [*lines, *table.notes]


def _most_seeds(results: Results) -> int:
    """Of rows whose seeds all have runs of their own."""
    own = [cell for cell in results.cells.values() if not cell.is_shared(results.plan.table)]
    return max((len(cell.seeds) + len(cell.absent) for cell in own), default=1)


def _counted(results: Results) -> str:
    return f"{results.comparisons} comparison{'s' if results.comparisons != 1 else ''}"


def seed_lines(plan: Plan) -> list[str]:
    """How many seeds each row has whose number the table's rule finds, and why it has no more."""
    until, column = plan.table.until, plan.table.judged
    if until is None:
        return []
    asked = shown_number(until.difference, column)
    why = {
        "narrow": f"which is at most {asked}",
        "at_most": f"which is more than {asked}, and they are all that may be run",
        "lacking": "and one of the runs has no result",
        "more": "and further ones are to be run",
    }
    lines = [
        f"Seeds are added to {', '.join(until.rows)} until half the 95 % confidence sequence of the"
        f" difference to {plan.table.baseline} in {column.name} is at most {asked}; it holds at every look."
    ]
    for verdict in verdicts(plan):
        half = shown_number(verdict.half_width, column)
        found = f"{verdict.row}: {verdict.seeds} seeds, half of it {half}"
        lines.append(f"{found}, {why[verdict.reason]}.")
    return lines
