"""A table of kind `experiments`: filled from evaluations, and written as JSON and Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treetune.files import write_json, write_text
from treetune.reports.experiment import read_summaries
from treetune.tables.experiments import ExperimentsTable, Row

REPORTED = (
    "pass_at_1",
    "ci_low",
    "ci_high",
    "n_problems",
    "samples",
    "pass_at_k",
    "majority_vote",
    "unfinished",
    "mean_tokens",
    "temperature",
    "top_p",
    "seed",
)
"""What a row takes over from an evaluation's summary, where it is there."""


@dataclass(frozen=True)
class Result:
    """A filled row. `values` is a summary's part that is reported, and which checkpoint it is of."""

    row: Row
    values: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        published = {"published": self.row.published, "source": self.row.source}
        return {**self.values, **{key: value for key, value in published.items() if value is not None}}


def write_experiments_table(table: ExperimentsTable) -> list[Path]:
    """Writes the table as JSON and Markdown, prints it, and returns the files.

    Raises ValueError that names every required row without an evaluation.
    """
    results = fill(table)
    output = Path(table.directory) / table.output
    write_json(output, {result.row.name: result.as_json() for result in results})
    write_text(output.with_suffix(".md"), as_markdown(table, results))
    _print(table, results)
    return [output, output.with_suffix(".md")]


def fill(table: ExperimentsTable) -> list[Result]:
    """Reads every row's evaluation; optional rows that have none are left out."""
    results, missing = [], []
    for row in table.rows:
        folder = Path(table.directory) / row.experiment
        summary = _chosen_summary(folder / "evaluations", table)
        if summary is not None:
            values = {key: summary[key] for key in REPORTED if key in summary}
            place = {"experiment": str(folder), "evaluation": table.evaluation}
            results.append(Result(row, {**values, "iteration": summary["iteration"], **place}))
        elif not row.optional:
            missing.append(f"{row.name}: {folder} {_why_missing(folder, table)}")
    if missing:
        raise ValueError(
            "rows without a measured checkpoint:\n  "
            + "\n  ".join(missing)
            + "\nRun run_iteration_loop, then run_evaluation, of these experiments, or mark the rows optional"
        )
    if not results:
        raise ValueError(f"none of the optional rows has been evaluated yet in {table.directory}")
    return results


def _chosen_summary(evaluations: Path, table: ExperimentsTable) -> dict[str, Any] | None:
    reported = read_summaries(evaluations, table.evaluation)
    if not reported:
        return None
    if table.checkpoint == "last":
        return reported[max(reported)]
    chosen_on = read_summaries(evaluations, table.best_on)
    both = [iteration for iteration in reported if iteration in chosen_on]
    if not both:
        return None
    # Of equals the earliest: it cost least.
    return reported[max(sorted(both), key=lambda iteration: chosen_on[iteration]["pass_at_1"])]


def _why_missing(folder: Path, table: ExperimentsTable) -> str:
    if not folder.is_dir():
        return "does not exist"
    if table.checkpoint == "best" and read_summaries(folder / "evaluations", table.evaluation):
        return f"has no checkpoint that was measured on {table.evaluation!r} and on {table.best_on!r}"
    return f"has no evaluation {table.evaluation!r}"


# The same table for readers


def _columns(table: ExperimentsTable, results: list[Result]) -> list[str]:
    published = any(result.row.published is not None for result in results)
    columns = ["", "pass@1", "95 % interval", "problems", "unfinished", "tokens", "iteration"]
    return [*columns, "published"] if published else columns


def _cells(result: Result, columns: list[str]) -> list[str]:
    values = result.values

    def share(key: str) -> str:
        return f"{100 * values[key]:.1f}" if values.get(key) is not None else "–"

    cells = [
        result.row.name,
        share("pass_at_1"),
        f"{share('ci_low')} – {share('ci_high')}",
        f"{values.get('n_problems', '–')} × {values.get('samples', '–')}",
        share("unfinished"),
        f"{values['mean_tokens']:.1f}" if values.get("mean_tokens") is not None else "–",
        str(values["iteration"]),
    ]
    if "published" in columns:
        published = result.row.published
        source = f" ({result.row.source})" if result.row.source else ""
        cells.append("–" if published is None else f"{100 * published:.1f}{source}")
    return cells


def as_markdown(table: ExperimentsTable, results: list[Result]) -> str:
    """Shares in percent; a pipe in a name is escaped."""
    columns = _columns(table, results)
    rows = [[cell.replace("|", "\\|") for cell in _cells(result, columns)] for result in results]
    lines = [f"## {table.title}", ""] if table.title else []
    lines += ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    note = f"`{table.evaluation}` of the {table.checkpoint} checkpoint"
    if table.checkpoint == "best":
        note += f" by `{table.best_on}`"
    return "\n".join([*lines, "", f"Shares in percent; {note}.", ""])


def _print(table: ExperimentsTable, results: list[Result]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as RichTable

    columns = _columns(table, results)
    shown = RichTable(title=escape(table.title) or None, box=SIMPLE_HEAD)
    for number, column in enumerate(columns):
        shown.add_column(column, justify="right" if number else "left")
    for result in results:
        shown.add_row(*(escape(cell) for cell in _cells(result, columns)))
    Console().print(shown)
