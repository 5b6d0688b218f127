"""A table as Markdown and LaTeX, and the grids of text and the legend that all its forms share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from treetune.rollouts.numbers import declared, declared_ratios
from treetune.runtime.console import duration
from treetune.tables.columns import MeasuredColumn, Panel
from treetune.tables.curves import AXES, Curve, panel_notes
from treetune.tables.measure import CellResult, Comparison, Results
from treetune.tables.runs import TableRuns
from treetune.tables.statistics import HELD, MeanWithInterval
from treetune.tables.until import seconds_a_seed, verdicts

if TYPE_CHECKING:
    from pandas import DataFrame

WHOLE_FROM = 999.5
"""Numbers from here on are shown without a fraction."""
DASH = "–"
STATES = {"missing": "not run", "different": "other configuration", "wrong": "wrong configuration"}
MARKS = {"better": "▲", "worse": "▼", "higher": "△", "lower": "▽", None: ""}
COST_WORDS = (
    "Means over seeds. Answers that were sampled to train on; tokens of those and of the continuations that"
    " gave them credit; seconds without evaluation."
)


def number_text(value: float | None, column: MeasuredColumn, sign: bool = False) -> str:
    if value is None:
        return DASH
    plus = "+" if sign else ""
    if column.in_percent:
        text = f"{100 * value:{plus}.{1 if column.digits is None else column.digits}f}"
    elif column.digits is not None:
        text = f"{value:{plus},.{column.digits}f}"
    else:
        text = _three_digits(value, plus)
    return text.replace("-", "−") + column.unit


def interval_text(estimate: MeanWithInterval, column: MeasuredColumn, sign: bool = False) -> str:
    if estimate.low is None:
        return ""
    return f"[{number_text(estimate.low, column, sign)}, {number_text(estimate.high, column, sign)}]"


def _three_digits(value: float, sign: str = "") -> str:
    """Returns three digits, or all of those before the point."""
    return f"{value:{sign},.0f}" if abs(value) >= WHOLE_FROM else f"{value:{sign}.3g}"


def why_empty(cell: CellResult) -> str:
    """Returns in a few words why a cell without an estimate is empty."""
    if cell.experiment is None:
        return DASH
    if cell.column.reach is not None and cell.seeds:
        return f"reached by {len(cell.seeds)} of {len(cell.seeds) + len(cell.absent)} seeds"
    words = {text.split(":")[0].split(",")[0] for text in cell.absent.values()}
    return " / ".join(sorted(STATES.get(word, word) for word in words))


def seeds_lacking(cell: CellResult) -> str:
    """Returns how many seeds a cell has where some are absent, else nothing."""
    return f"{len(cell.seeds)} of {len(cell.seeds) + len(cell.absent)} seeds" if cell.absent else ""


def _plain_cell(cell: CellResult) -> str:
    """Returns mean, interval, mark and lacking seeds; or why there is none."""
    if cell.estimate is None:
        return why_empty(cell)
    parts = [number_text(cell.estimate.mean, cell.column), interval_text(cell.estimate, cell.column)]
    lacking = seeds_lacking(cell)
    return " ".join(filter(None, [*parts, MARKS[cell.called], f"({lacking})" if lacking else ""]))


def legend(results: Results) -> list[str]:
    """Returns the lines that a reader needs below the table."""
    table = results.plan.table
    not_shared = [cell for cell in results.cells.values() if not cell.is_shared(table)]
    seeds = max((len(cell.seeds) + len(cell.absent) for cell in not_shared), default=1)
    lines = []
    if any(column.in_percent for column in table.columns):
        lines.append("Shares in percent.")
    over = f"{seeds} seeds and over the problems" if seeds > 1 else "the problems (of one seed)"
    lines.append(f"Means over {seeds} seed{'s' if seeds > 1 else ''} with 95 % intervals over {over}.")
    shared = [row.name for row in table.rows if row.experiment and table.experiments[row.experiment].shared]
    if shared:
        lines.append(f"{', '.join(shared)} is one run that all seeds share; its interval is of the problems.")
    lines += until_lines(results.plan)
    if table.interval == "bootstrap" and seeds in HELD:
        lines.append(
            f"Where seeds differ most, a bootstrap of {seeds} of them holds the true mean in about"
            f" {100 * HELD[seeds]:.0f} of 100 cases, not 95: read the seeds' own values below."
        )
    if table.comparisons:
        named = ", ".join(f"{pair.row} less {pair.to}" for pair in table.comparisons)
        lines.append(
            f"▲ better and ▼ worse: of the comparisons that were declared before ({named}, in"
            f" {table.judged.name}) alone, where the confidence sequence, at 95 % for all of them together"
            " (Bonferroni), excludes 0. The other differences are to look at, and have no mark."
        )
    elif table.baseline is not None:
        count = f"{results.comparisons} comparison{'s' if results.comparisons != 1 else ''}"
        lines.append(
            f"▲ better and ▼ worse than {table.baseline}, paired by seed and problem, where the interval of"
            f" the difference excludes 0 and p is below 0.05 after Holm's correction for {count};"
            " without a mark the two are not told apart."
        )
        if any(cell.called in ("higher", "lower") for cell in results.cells.values()):
            lines.append("△ and ▽ are the same where neither more nor less is better.")
    for column in table.columns:
        if column.over is not None:
            upper, lower = (declared()[name].title for name in declared_ratios()[column.number])
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
    lines.append(f"{FATE}: runs that ended with an error, that lost half of their curve's best accuracy.")
    sources = dict.fromkeys(cell.source for cell in results.cells.values() if cell.source)
    if sources:
        lines.append(f"Published: {'; '.join(sources)}.")
    return [*lines, *table.notes]


def until_lines(plan: TableRuns) -> list[str]:
    """Returns what is known of each difference that `until` judges, and what more would cost."""
    until, column = plan.table.until, plan.table.judged
    if until is None:
        return []
    asked = number_text(until.difference, column)
    lines = [
        f"Seeds are added until half the 95 % confidence sequence of a difference in {column.name} is at most"
        f" {asked}; it holds at every look."
    ]
    why = {
        "narrow": "which is as narrow as asked",
        "loses": "so that it loses and gets no further ones",
        "at_most": f"and there are no further ones, to ± {asked}",
        "lacking": "and one of the runs has no result",
        "more": f"and all that are left won't make it ± {asked}, if they are like these",
    }
    for one in verdicts(plan):
        reason, each = why[one.reason], seconds_a_seed(plan, one)
        if one.further is not None:
            takes = "" if each is None else f", about {duration(one.further * each)} of runs,"
            reason = f"and {one.further} more seed{'s' if one.further > 1 else ''}{takes} to ± {asked}"
        elif one.reason == "more" and one.seeds < until.seeds.at_least:
            reason = "and further ones are to be run"
        numbers = (None, None) if one.known is None else (one.known.mean, one.known.half_width)
        known = f"{number_text(numbers[0], column, sign=True)} ± {number_text(numbers[1], column)}"
        count = f"{one.seeds} seed{'s' if one.seeds != 1 else ''}"
        lines.append(f"{one.row} less {one.to}: difference {known} after {count}, {reason}.")
    return lines


def main_grid(
    results: Results,
    shown: Callable[[CellResult], str] = _plain_cell,
    text: Callable[[str], str] = str,
) -> DataFrame:
    """Returns the table itself, a row for each method; published numbers stand beside their column.

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
                cells.append(text(number_text(cell.published, column)))
    rows = [[*cells, text(results.fates[row.name])] for row, cells in zip(table.rows, rows, strict=True)]
    return frame([*heads, text(FATE)], rows)


FATE = "failed, collapsed"


def has_published(results: Results, column: MeasuredColumn) -> bool:
    return any(results.cells[row.name, column.name].published is not None for row in results.plan.table.rows)


COMPARED = ("seeds", "difference", "95 % interval", "p", "p (Holm)", "called")


def difference_grid(results: Results) -> DataFrame:
    """Returns every measured difference to the baseline, significant or not."""
    found = [cell.against for cell in results.cells.values() if cell.against is not None]
    return frame(["", "column", *COMPARED], [[one.row, one.column.name, *_compared(one)] for one in found])


def pair_grid(results: Results) -> DataFrame:
    """Returns the differences of the table's pairs."""
    rows = [[one.row, one.to, one.column.name, *_compared(one)] for one in results.pairs]
    return frame(["", "less", "column", *COMPARED], rows)


def _compared(one: Comparison) -> list[str]:
    p_values = [DASH if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}" for p in (one.p, one.adjusted)]
    return [
        str(one.seeds),
        number_text(one.difference.mean, one.column, sign=True),
        interval_text(one.difference, one.column, sign=True) or DASH,
        *p_values,
        f"{one.called} {MARKS[one.called]}" if one.called else "not told apart",
    ]


def cost_grid(results: Results) -> DataFrame:
    """Returns the experiments' costs as means over their seeds."""
    quantities = ("answers", "sampled_tokens", "gradient_steps", "seconds")
    rows = [
        [name, str(len(costs)), *(f"{fmean(getattr(one, key) for one in costs):,.0f}" for key in quantities)]
        for name, costs in results.costs.items()
        if costs
    ]
    heads = ["experiment", "seeds", "sampled answers", "sampled tokens", "gradient steps", "seconds"]
    return frame(heads, rows)


def seeds_grid(results: Results) -> DataFrame:
    """Returns the origin of every number: seed by seed, with directory and configuration."""
    rows = []
    for cell in results.cells.values():
        begin = [cell.row.name, cell.column.name]
        for one in cell.seeds:
            measured = f"{len(one.by_problem)} × {one.samples}" if one.by_problem is not None else DASH
            value = number_text(one.value, cell.column)
            rows.append([*begin, str(one.seed), value, measured, one.directory, one.config_hash])
        for seed, why in cell.absent.items():
            rows.append([*begin, str(seed), DASH, DASH, why.splitlines()[0], DASH])
    return frame(["", "column", "seed", "value", "problems × samples", "experiment", "configuration"], rows)


def panel_grid(results: Results, panels: Sequence[Curve]) -> DataFrame:
    """Returns each method's first and last point in each panel, with the range over seeds."""
    table = results.plan.table
    curves = {(curve.row.name, curve.panel.name): curve for curve in panels}

    def cell(curve: Curve | None, panel: Panel) -> str:
        if curve is None:
            return DASH
        last = curve.points[-1]
        numbers = [curve.points[0].mean, last.mean, last.low, last.high]
        first, mean, low, high = (
            (f"{100 * one:.1f}" if panel.in_percent else _three_digits(one)).replace("-", "−")
            for one in numbers
        )
        return f"{f'{first} → ' if len(curve.points) > 1 else ''}{mean} [{low}, {high}]"

    rows = [
        [row.name, *(cell(curves.get((row.name, panel.name)), panel) for panel in table.panels)]
        for row in (table.rows if panels else ())
    ]
    return frame(["", *(panel.title for panel in table.panels)], rows)


def frame(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> DataFrame:
    from pandas import DataFrame

    return DataFrame(rows, columns=list(heads), dtype=str)


def frame_as_markdown(grid: DataFrame, code: Sequence[str] = ()) -> str:
    """Returns a grid in Markdown; `code` are the columns that are set as such."""
    shown = grid.apply(lambda column: column.map(lambda cell: f"`{cell}`") if column.name in code else column)
    lines = [list(shown.columns), *shown.to_numpy().tolist()]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([rows[0], "|---" + "|---:" * (len(shown.columns) - 1) + "|", *rows[1:]])


def as_markdown(
    results: Results, account: Mapping[str, str], panels: Sequence[Curve] = (), figure: str | None = None
) -> str:
    """Returns table, panels, differences, costs, origins and the account of how it was made. `figure` is the
    panels' file beside it."""
    table = results.plan.table
    parts = [f"# {table.title or table.name}", frame_as_markdown(main_grid(results))]
    parts.append("\n".join(legend(results)))
    if notes := panel_notes(results.plan, panels):
        parts.append("## Over training")
        if panels:
            parts.append(frame_as_markdown(panel_grid(results, panels)))
        if figure is not None:
            parts.append(f"![Over training]({figure})")
        parts.append("\n".join(notes))
    for head, grid, code, note in (
        (f"Differences to {table.baseline}", difference_grid(results), (), ""),
        ("Further differences", pair_grid(results), (), ""),
        ("What it took", cost_grid(results), (), COST_WORDS),
        ("Where the numbers are from", seeds_grid(results), ("experiment", "configuration"), ""),
    ):
        if len(grid):
            parts += filter(None, [f"## {head}", frame_as_markdown(grid, code), note])
    facts = {**account, "command": f"`{account['command']}`"}
    parts += ["## How it was made", "\n".join(f"* {key}: {value}" for key, value in facts.items())]
    return "\n\n".join(parts) + "\n"


_SIGNS = {
    "▲": r"$\blacktriangle$",
    "▼": r"$\blacktriangledown$",
    "△": r"$\triangle$",
    "▽": r"$\triangledown$",
}

_SPECIAL = str.maketrans({
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "−": "$-$", "–": "--", "×": r"$\times$", **_SIGNS,
})  # fmt: skip


def as_latex(results: Results) -> str:
    """Returns a `tabular` with booktabs, to be \\input; its legend is a comment above it, for a caption."""

    def escaped(text: str) -> str:
        return text.translate(_SPECIAL)

    def cell_text(cell: CellResult) -> str:
        if cell.estimate is None:
            return escaped(why_empty(cell))
        interval = escaped(interval_text(cell.estimate, cell.column))
        lacking = seeds_lacking(cell)
        return (
            escaped(number_text(cell.estimate.mean, cell.column))
            + (rf"\,{_SIGNS[MARKS[cell.called]]}" if cell.called else "")
            + (rf" {{\scriptsize {interval}}}" if interval else "")
            + (rf" \scriptsize ({lacking})" if lacking else "")
        )

    table, grid = results.plan.table, main_grid(results, cell_text, escaped)
    comments = [table.title or table.name, "needs \\usepackage{booktabs,amssymb}", *legend(results)]
    tabular = grid.to_latex(index=False, escape=False, column_format="l" + "r" * (len(grid.columns) - 1))
    return "".join(f"% {words}\n" for words in comments) + tabular
