"""A table as Markdown, LaTeX and grids of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from treetune.rollouts.numbers import declared, declared_ratios
from treetune_tables.columns import Column, Panel
from treetune_tables.curves import AXES, Curve, panel_notes
from treetune_tables.measure import CellResult, Comparison, Results
from treetune_tables.runs import Plan
from treetune_tables.statistics import HELD, Estimate
from treetune_tables.until import verdicts

if TYPE_CHECKING:
    from pandas import DataFrame

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


def frame_as_html(grid: DataFrame) -> str:
    return grid.to_html(index=False, border=0, classes="list", justify="unset")


def frame_as_markdown(grid: DataFrame, code: Sequence[str] = ()) -> str:
    """`code` are the columns that are set as such."""
    shown = grid.apply(lambda column: column.map(lambda cell: f"`{cell}`") if column.name in code else column)
    lines = [list(shown.columns), *shown.to_numpy().tolist()]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([rows[0], "|---" + "|---:" * (len(shown.columns) - 1) + "|", *rows[1:]])


def as_markdown(
    results: Results, account: Mapping[str, str], panels: Sequence[Curve] = (), figure: str | None = None
) -> str:
    """Table, panels, differences, costs, origins and the account of how it was made. `figure` is the
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
    if len(grid := difference_grid(results)):
        parts += [f"## Differences to {table.baseline}", frame_as_markdown(grid)]
    if len(grid := pair_grid(results)):
        parts += ["## Further differences", frame_as_markdown(grid)]
    if len(grid := cost_grid(results)):
        parts += ["## What it took", frame_as_markdown(grid), COST_WORDS]
    if len(grid := seeds_grid(results)):
        code = ("experiment", "configuration")
        parts += ["## Where the numbers are from", frame_as_markdown(grid, code)]
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
    """The table; its legend as a comment above it, for a caption."""
    table = results.plan.table
    grid = main_grid(results, _cell, _escaped)
    comments = [table.title or table.name, "needs \\usepackage{booktabs,amssymb}", *legend(results)]
    tabular = grid.to_latex(index=False, escape=False, column_format="l" + "r" * (len(grid.columns) - 1))
    return "".join(f"% {words}\n" for words in comments) + tabular


def _escaped(text: str) -> str:
    return text.translate(_SPECIAL)


def _cell(cell: CellResult) -> str:
    if cell.estimate is None:
        return _escaped(reason(cell) if cell.experiment is not None else DASH)
    mean = _escaped(shown_number(cell.estimate.mean, cell.column))
    interval = _escaped(shown_interval(cell.estimate, cell.column))
    of = len(cell.seeds) + len(cell.absent)
    short = rf" \scriptsize ({len(cell.seeds)} of {of} seeds)" if cell.absent else ""
    mark = rf"\,{_SIGNS[MARKS[cell.called]]}" if cell.called else ""
    return f"{mean}{mark}" + (rf" {{\scriptsize {interval}}}" if interval else "") + short
