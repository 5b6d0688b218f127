"""A reproduction's table as LaTeX: a `tabular` with booktabs, to be \\input."""

from __future__ import annotations

from treetune.reports.tables.formats import (
    MARKS,
    has_published,
    legend,
    reason,
    shown_interval,
    shown_number,
)
from treetune.reports.tables.measure import CellResult, Results

_SIGNS = {
    "▲": r"$\blacktriangle$",
    "▼": r"$\blacktriangledown$",
    "△": r"$\triangle$",
    "▽": r"$\triangledown$",
}

_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "−": "$-$", "–": "--", "×": r"$\times$", **_SIGNS,
}  # fmt: skip


def as_latex(results: Results) -> str:
    """The table; its legend as a comment above it, for a caption."""
    table = results.plan.table
    heads, published = [""], []
    for column in table.columns:
        published.append(has_published(results, column))
        heads += [escape(column.name), "published"] if published[-1] else [escape(column.name)]
    lines = [f"% {table.title or table.name}", "% needs \\usepackage{booktabs,amssymb}"]
    lines += [f"% {words}" for words in legend(results)]
    lines += [rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", r"\toprule", _line(heads), r"\midrule"]
    for row in table.rows:
        cells = [escape(row.name)]
        for column, with_published in zip(table.columns, published, strict=True):
            cell = results.cells[row.name, column.name]
            cells.append(_cell(cell))
            if with_published:
                cells.append(escape(shown_number(cell.published, column)))
        lines.append(_line(cells))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _cell(cell: CellResult) -> str:
    if cell.estimate is None:
        return escape(reason(cell)) if cell.experiment is not None else "--"
    mean = escape(shown_number(cell.estimate.mean, cell.column))
    interval = escape(shown_interval(cell.estimate, cell.column))
    of = len(cell.seeds) + len(cell.absent)
    short = rf" \scriptsize ({len(cell.seeds)} of {of} seeds)" if cell.absent else ""
    mark = rf"\,{_SIGNS[MARKS[cell.called]]}" if cell.called else ""
    return f"{mean}{mark}" + (rf" {{\scriptsize {interval}}}" if interval else "") + short


def _line(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def escape(text: str) -> str:
    return "".join(_SPECIAL.get(character, character) for character in text)
