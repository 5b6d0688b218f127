"""Writes a table as Markdown and LaTeX, and makes the grids of text and the legend that all its forms
share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from treetune.rollouts.numbers import declared_numbers, declared_ratios
from treetune.runtime.console import format_duration
from treetune.tables.columns import MeasuredColumn, Panel
from treetune.tables.curves import AXES, Curve, panel_notes
from treetune.tables.measure import CellResult, Comparison, Results
from treetune.tables.runs import TableRuns
from treetune.tables.statistics import COVERAGE_OF_BOOTSTRAP, MeanWithInterval
from treetune.tables.until import judge_differences, seconds_a_seed

if TYPE_CHECKING:
    from pandas import DataFrame

SMALLEST_WITHOUT_DECIMALS = 999.5
"""The smallest number that is shown without decimals."""
DASH = "–"
WORDS_FOR_STATES = {"missing": "not run", "different": "other configuration", "wrong": "wrong configuration"}
"""The words that an empty cell shows for the state of its run, where they are not the state's name."""
MARKS_OF_DIFFERENCES = {"better": "▲", "worse": "▼", "higher": "△", "lower": "▽", None: ""}
"""The marks of significant differences, by `Comparison.significant_direction`."""
COST_NOTE = (
    "Means over seeds. Answers: those sampled for training. Tokens: of these answers, and of the"
    " continuations that estimate their credit. Seconds: without evaluation."
)


def number_text(value: float | None, column: MeasuredColumn, sign: bool = False) -> str:
    """Returns a number as its column shows it: in percent or not, with its digits and unit.

    With `sign`, a positive number has a plus sign, as differences do.
    """
    if value is None:
        return DASH
    plus = "+" if sign else ""
    if column.in_percent:
        digits = 1 if column.digits is None else column.digits
        text = f"{100 * value:{plus}.{digits}f}"
    elif column.digits is not None:
        text = f"{value:{plus},.{column.digits}f}"
    else:
        text = _write_three_digits(value, plus)
    return text.replace("-", "−") + column.unit


def interval_text(estimate: MeanWithInterval, column: MeasuredColumn, sign: bool = False) -> str:
    if estimate.low is None:
        return ""
    return f"[{number_text(estimate.low, column, sign)}, {number_text(estimate.high, column, sign)}]"


def _write_three_digits(value: float, sign: str = "") -> str:
    """Returns a number with three significant digits, or as a whole number if it has more than three digits
    before the decimal point."""
    return f"{value:{sign},.0f}" if abs(value) >= SMALLEST_WITHOUT_DECIMALS else f"{value:{sign}.3g}"


def why_empty(cell: CellResult) -> str:
    """Returns the reason why a cell without an estimate is empty, in a few words."""
    if cell.experiment is None:
        return DASH
    if cell.column.reach is not None and cell.seeds:
        return f"reached by {len(cell.seeds)} of {len(cell.seeds) + len(cell.absent)} seeds"
    # Reasons begin with the run's state: "failed: …", "skipped, because it needs …".
    states = {reason.split(":")[0].split(",")[0] for reason in cell.absent.values()}
    return " / ".join(sorted(WORDS_FOR_STATES.get(state, state) for state in states))


def seeds_note(cell: CellResult) -> str:
    """Returns how many seeds a cell has ("2 of 3 seeds") where some are missing, and otherwise an empty
    text."""
    return f"{len(cell.seeds)} of {len(cell.seeds) + len(cell.absent)} seeds" if cell.absent else ""


def _plain_cell(cell: CellResult) -> str:
    """Returns the mean, interval, mark and missing seeds of a cell, or the reason why it is empty.

    Example: "53.1 [51.0, 55.2] ▲ (2 of 3 seeds)".
    """
    if cell.estimate is None:
        return why_empty(cell)
    note = seeds_note(cell)
    parts = [
        number_text(cell.estimate.mean, cell.column),
        interval_text(cell.estimate, cell.column),
        MARKS_OF_DIFFERENCES[cell.significant_direction],
        f"({note})" if note else "",
    ]
    return " ".join(part for part in parts if part)


def legend_lines(results: Results) -> list[str]:
    """Returns the lines below the table that explain it."""
    table = results.plan.table
    not_shared = [cell for cell in results.cells.values() if not cell.is_shared(table)]
    seeds = max((len(cell.seeds) + len(cell.absent) for cell in not_shared), default=1)
    lines = []
    if any(column.in_percent for column in table.columns):
        lines.append("Shares in percent.")
    interval_over = f"{seeds} seeds and over the problems" if seeds > 1 else "the problems (of one seed)"
    lines.append(
        f"Means over {seeds} seed{'s' if seeds > 1 else ''} with 95 % intervals over {interval_over}."
    )
    shared = [row.name for row in table.rows if row.experiment and table.experiments[row.experiment].shared]
    if shared:
        lines.append(
            f"{', '.join(shared)} is a single run that all seeds share; its interval is over the problems."
        )
    lines += until_lines(results.plan)
    if table.interval == "bootstrap" and seeds in COVERAGE_OF_BOOTSTRAP:
        lines.append(
            f"Where most of the spread is between seeds, a bootstrap over {seeds} seeds contains the true"
            f" mean in about {100 * COVERAGE_OF_BOOTSTRAP[seeds]:.0f} of 100 cases, not 95: look at each"
            " seed's value below."
        )
    if table.comparisons:
        declared_pairs = ", ".join(f"{pair.row} − {pair.to}" for pair in table.comparisons)
        lines.append(
            f"▲ better and ▼ worse: only for the comparisons that were declared before ({declared_pairs}, in"
            f" {table.judged_column.name}), where the confidence sequence, at 95 % for all of them together"
            " (Bonferroni), excludes 0. The other differences are exploratory, and have no mark."
        )
    elif table.baseline is not None:
        count = f"{results.comparisons} comparison{'s' if results.comparisons != 1 else ''}"
        lines.append(
            f"▲ better and ▼ worse than {table.baseline}, paired by seed and problem, where the interval of"
            f" the difference excludes 0 and p is below 0.05 after Holm's correction for {count};"
            " without a mark the difference is not significant."
        )
        if any(cell.significant_direction in ("higher", "lower") for cell in results.cells.values()):
            lines.append("△ higher and ▽ lower: the same, for columns without a better direction.")
    for column in table.columns:
        if column.over is not None:
            # The column shows a ratio. `declared_ratios` has the full names of the ratio's two numbers.
            numerator, denominator = (
                declared_numbers()[name].title for name in declared_ratios()[column.number]
            )
            lines.append(
                f"{column.name}: {numerator} of {column.over} divided by {denominator} of the row, means by"
                " seed."
            )
        if column.area is not None:
            lines.append(
                f"{column.name}: the mean of pass@1 on {column.curve} from the start to"
                f" {column.area.upto:,.0f} {AXES[column.area.over]}, the area under the curve."
            )
        if column.reach is not None:
            lines.append(
                f"{column.name}: {AXES[column.reach.over]} until pass@1 on {column.curve} first reaches"
                f" {column.reach.accuracy:.0%}; empty unless every seed reached it."
            )
    lines.append(
        f"{HEAD_OF_FATES}: runs that ended with an error, and runs that ended below half of the best accuracy"
        " on their curve."
    )
    sources = dict.fromkeys(cell.source for cell in results.cells.values() if cell.source)
    if sources:
        lines.append(f"Published: {'; '.join(sources)}.")
    return [*lines, *table.notes]


def until_lines(plan: TableRuns) -> list[str]:
    """Returns a line about the rule `until`, and a line for each difference that the rule looks at, with the
    interval of the difference and the cost of further seeds. Returns no lines for a table without the rule.

    The rule adds seeds until the intervals of these differences are narrow enough.

    Example: "PPO − GRPO: difference +6.0 ± 7.0 after 8 seeds, 12 more seeds, about 3 h of runs, until ± 5.0."
    """
    until, column = plan.table.until, plan.table.judged_column
    if until is None:
        return []
    goal = number_text(until.difference, column)
    lines = [
        f"Seeds are added until the half-width of the 95 % confidence sequence of a difference in"
        f" {column.name} is at most {goal}; the sequence is valid at every look."
    ]
    reason_texts = {
        "narrow": "which is narrow enough",
        "loses": "which is worse, so that it gets no further seeds",
        "at_most": f"and the table has no further seeds to reach ± {goal}",
        "lacking": "and one of the runs has no result",
        "more": f"and all remaining seeds won't reach ± {goal} if they are like these",
    }
    for verdict in judge_differences(plan):
        reason = reason_texts[verdict.reason]
        if verdict.further is not None:  # this many more seeds like those so far would be enough
            seconds = seconds_a_seed(plan, verdict)
            cost = "" if seconds is None else f", about {format_duration(verdict.further * seconds)} of runs,"
            reason = f"{verdict.further} more seed{'s' if verdict.further > 1 else ''}{cost} until ± {goal}"
        elif verdict.reason == "more" and verdict.seeds < until.seeds.at_least:
            # Both rows get `at_least` seeds, even if no number of seeds makes the interval narrow enough.
            reason = "and further seeds are to be run"
        estimate = verdict.known  # None before the first seed has a result
        mean = None if estimate is None else estimate.mean
        half_width = None if estimate is None else estimate.half_width
        difference = f"{number_text(mean, column, sign=True)} ± {number_text(half_width, column)}"
        count = f"{verdict.seeds} seed{'s' if verdict.seeds != 1 else ''}"
        lines.append(f"{verdict.row} − {verdict.to}: difference {difference} after {count}, {reason}.")
    return lines


def main_grid(
    results: Results,
    cell_text: Callable[[CellResult], str] = _plain_cell,
    escape: Callable[[str], str] = str,
) -> DataFrame:
    """Returns the table's main part: a row for each method, with published numbers next to the measured ones.

    `cell_text` formats a measured cell; `escape` makes any other text safe for the output format. The last
    column, with the head `HEAD_OF_FATES`, says how many of a method's runs failed and how many collapsed.
    """
    table = results.plan.table
    heads = [""]
    rows = [[escape(row.name)] for row in table.rows]
    for column in table.columns:
        heads.append(escape(column.name))
        published = has_published(results, column)
        if published:
            heads.append("published")
        for row, cells in zip(table.rows, rows, strict=True):
            cell = results.cells[row.name, column.name]
            cells.append(cell_text(cell))
            if published:
                cells.append(escape(number_text(cell.published, column)))
    heads.append(escape(HEAD_OF_FATES))
    for row, cells in zip(table.rows, rows, strict=True):
        cells.append(escape(results.fates[row.name]))
    return as_frame(heads, rows)


HEAD_OF_FATES = "failed, collapsed"
"""The head of the column with `Results.fates`."""


def has_published(results: Results, column: MeasuredColumn) -> bool:
    return any(results.cells[row.name, column.name].published is not None for row in results.plan.table.rows)


COMPARISON_HEADS = ("seeds", "difference", "95 % interval", "p", "p (Holm)", "result")


def difference_grid(results: Results) -> DataFrame:
    """Returns a grid with every measured difference to the baseline, significant or not."""
    comparisons = [
        cell.comparison_to_baseline
        for cell in results.cells.values()
        if cell.comparison_to_baseline is not None
    ]
    rows = [[item.row, item.column.name, *_comparison_cells(item)] for item in comparisons]
    return as_frame(["", "column", *COMPARISON_HEADS], rows)


def pair_grid(results: Results) -> DataFrame:
    """Returns a grid with the differences of the table's comparisons and pairs."""
    rows = [[item.row, item.to, item.column.name, *_comparison_cells(item)] for item in results.pairs]
    return as_frame(["", "minus", "column", *COMPARISON_HEADS], rows)


def _comparison_cells(comparison: Comparison) -> list[str]:
    """Returns the cells of a comparison in the columns COMPARISON_HEADS."""
    column, difference, direction = comparison.column, comparison.difference, comparison.significant_direction
    return [
        str(comparison.seeds),
        number_text(difference.mean, column, sign=True),
        interval_text(difference, column, sign=True) or DASH,
        _p_text(comparison.p),
        _p_text(comparison.adjusted),
        f"{direction} {MARKS_OF_DIFFERENCES[direction]}" if direction else "not significant",
    ]


def _p_text(p: float | None) -> str:
    if p is None:
        return DASH
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def cost_grid(results: Results) -> DataFrame:
    """Returns a grid with the costs of each experiment, as means over its seeds."""
    quantities = ("answers", "sampled_tokens", "gradient_steps", "seconds")
    rows = []
    for name, costs in results.costs.items():
        if costs:
            means = [fmean(getattr(cost, quantity) for cost in costs) for quantity in quantities]
            rows.append([name, str(len(costs)), *(f"{mean:,.0f}" for mean in means)])
    heads = ["experiment", "seeds", "sampled answers", "sampled tokens", "gradient steps", "seconds"]
    return as_frame(heads, rows)


def seeds_grid(results: Results) -> DataFrame:
    """Returns a grid with the origin of every number, seed by seed: the directory and the configuration."""
    rows = []
    for cell in results.cells.values():
        names = [cell.row.name, cell.column.name]
        for result in cell.seeds:
            counts = DASH  # of problems and samples
            if result.by_problem is not None:
                counts = f"{len(result.by_problem)} × {result.samples}"
            value = number_text(result.value, cell.column)
            rows.append([*names, str(result.seed), value, counts, result.directory, result.config_hash])
        for seed, reason in cell.absent.items():
            # The reason why the seed has no number is in place of the directory.
            rows.append([*names, str(seed), DASH, DASH, reason.splitlines()[0], DASH])
    return as_frame(
        ["", "column", "seed", "value", "problems × samples", "experiment", "configuration"], rows
    )


def panel_grid(results: Results, panels: Sequence[Curve]) -> DataFrame:
    """Returns a grid with each method's first and last point in each panel: "40.1 → 53.2 [51.0, 55.0]".

    The brackets have the range over seeds at the last point.
    """
    table = results.plan.table
    curves = {(curve.row.name, curve.panel.name): curve for curve in panels}
    rows = []
    if curves:  # else the grid has no rows, and isn't shown
        for row in table.rows:
            cells = [_ends_text(curves.get((row.name, panel.name)), panel) for panel in table.panels]
            rows.append([row.name, *cells])
    return as_frame(["", *(panel.title for panel in table.panels)], rows)


def _ends_text(curve: Curve | None, panel: Panel) -> str:
    """Returns a curve's first and last mean, and the range over seeds of the last one, as `panel_grid` shows
    them."""

    def text(value: float) -> str:
        return (f"{100 * value:.1f}" if panel.in_percent else _write_three_digits(value)).replace("-", "−")

    if curve is None:
        return DASH
    first_point, last_point = curve.points[0], curve.points[-1]
    start = f"{text(first_point.mean)} → " if len(curve.points) > 1 else ""
    return f"{start}{text(last_point.mean)} [{text(last_point.low)}, {text(last_point.high)}]"


def as_frame(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> DataFrame:
    from pandas import DataFrame

    return DataFrame(rows, columns=list(heads), dtype=str)


def frame_as_markdown(grid: DataFrame, code: Sequence[str] = ()) -> str:
    """Returns a grid in Markdown. The cells of the columns that `code` names are in backticks."""
    heads = list(grid.columns)
    rows = [heads]
    for row in grid.to_numpy().tolist():
        rows.append([f"`{cell}`" if head in code else cell for head, cell in zip(heads, row, strict=True)])
    lines = []
    for row in rows:
        escaped_cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(escaped_cells)} |")
    alignment = "|---" + "|---:" * (len(heads) - 1) + "|"
    return "\n".join([lines[0], alignment, *lines[1:]])


def as_markdown(
    results: Results, account: Mapping[str, str], panels: Sequence[Curve] = (), figure: str | None = None
) -> str:
    """Returns a document with the table, panels, differences, costs, origins, and how it was made.

    Args:
        results: Everything that the table shows.
        account: How the table was made: command, time, machine and versions.
        panels: The curves of the panels.
        figure: The name of the file of the panels' picture in the same folder; None where there is none.
    """
    table = results.plan.table
    parts = [f"# {table.title or table.name}", frame_as_markdown(main_grid(results))]
    parts.append("\n".join(legend_lines(results)))
    if notes := panel_notes(results.plan, panels):
        parts.append("## During training")
        if panels:
            parts.append(frame_as_markdown(panel_grid(results, panels)))
        if figure is not None:
            parts.append(f"![During training]({figure})")
        parts.append("\n".join(notes))

    def add_section(head: str, grid: DataFrame, code: Sequence[str] = (), note: str = "") -> None:
        """Adds a section with a grid, unless the grid is empty. `code` names columns that hold code."""
        if len(grid):
            parts.extend([f"## {head}", frame_as_markdown(grid, code)])
            if note:
                parts.append(note)

    add_section(f"Differences from {table.baseline}", difference_grid(results))
    add_section("Further differences", pair_grid(results))
    add_section("Costs", cost_grid(results), note=COST_NOTE)
    add_section("Origin of the numbers", seeds_grid(results), code=("experiment", "configuration"))
    facts = {**account, "command": f"`{account['command']}`"}
    parts += ["## About this table", "\n".join(f"* {key}: {value}" for key, value in facts.items())]
    return "\n\n".join(parts) + "\n"


_LATEX_OF_SIGNS = {
    "▲": r"$\blacktriangle$",
    "▼": r"$\blacktriangledown$",
    "△": r"$\triangle$",
    "▽": r"$\triangledown$",
}

_LATEX_ESCAPES = str.maketrans({
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "−": "$-$", "–": "--", "×": r"$\times$", **_LATEX_OF_SIGNS,
})  # fmt: skip


def as_latex(results: Results) -> str:
    """Returns a LaTeX `tabular` with booktabs, to be included by \\input. The comments above it have the
    legend, for a caption."""

    def escape(text: str) -> str:
        return text.translate(_LATEX_ESCAPES)

    def cell_text(cell: CellResult) -> str:
        if cell.estimate is None:
            return escape(why_empty(cell))
        interval = escape(interval_text(cell.estimate, cell.column))
        text = escape(number_text(cell.estimate.mean, cell.column))
        direction = cell.significant_direction  # such as "better", if the difference is significant
        if direction is not None:
            sign = MARKS_OF_DIFFERENCES[direction]
            text += rf"\,{_LATEX_OF_SIGNS[sign]}"
        if interval:
            text += rf" {{\scriptsize {interval}}}"
        if note := seeds_note(cell):
            text += rf" \scriptsize ({note})"
        return text

    table, grid = results.plan.table, main_grid(results, cell_text, escape)
    comments = [table.title or table.name, "needs \\usepackage{booktabs,amssymb}", *legend_lines(results)]
    tabular = grid.to_latex(index=False, escape=False, column_format="l" + "r" * (len(grid.columns) - 1))
    return "".join(f"% {line}\n" for line in comments) + tabular
