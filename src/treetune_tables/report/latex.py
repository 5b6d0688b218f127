"""A table as LaTeX: a `tabular` with booktabs, to be \\input."""

from __future__ import annotations

from treetune_tables.report.cells import CellResult, Results
from treetune_tables.report.grids import main_grid
from treetune_tables.report.words import DASH, MARKS, legend, reason, shown_interval, shown_number

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
    frame = main_grid(results, _cell, _escaped)
    comments = [table.title or table.name, "needs \\usepackage{booktabs,amssymb}", *legend(results)]
    tabular = frame.to_latex(index=False, escape=False, column_format="l" + "r" * (len(frame.columns) - 1))
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
