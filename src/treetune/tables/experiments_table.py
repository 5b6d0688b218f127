"""Tables of type `experiments`: reads evaluations, and writes the table as JSON and Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treetune.runtime.directory import ExperimentDirectory
from treetune.store.files import write_json, write_text
from treetune.tables.settings import ExperimentsTable, TableRow
from treetune.tables.text import DASH, as_frame, frame_as_markdown

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
"""The numbers that a row copies from an evaluation's summary, where the summary has them."""


@dataclass(frozen=True)
class FilledRow:
    """A row of the table, with the numbers of its evaluation.

    Example of `values`: `{"pass_at_1": 0.53, "n_problems": 500, "iteration": 1000, "experiment":
    "experiments/ppo", "evaluation": "test"}`.
    """

    row: TableRow
    values: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        published = {"published": self.row.published, "source": self.row.source}
        return {**self.values, **{key: value for key, value in published.items() if value is not None}}


def write_experiments_table(table: ExperimentsTable) -> list[Path]:
    """Writes the table as JSON and Markdown, prints it, and returns the files.

    Raises ValueError where required rows have no evaluation, with a message that names all of them.
    """
    results = fill_rows(table)
    output = Path(table.directory) / table.output
    write_json(output, {result.row.name: result.as_json() for result in results})
    markdown = as_markdown(table, results)
    write_text(output.with_suffix(".md"), markdown)
    print(markdown.strip())
    return [output, output.with_suffix(".md")]


def fill_rows(table: ExperimentsTable) -> list[FilledRow]:
    """Reads every row's evaluation, and leaves out optional rows that have none.

    Raises ValueError if rows that are not optional have no evaluation. The message names all such rows. Also
    raises ValueError if all rows are left out.
    """
    results, missing_rows = [], []
    for row in table.rows:
        folder = Path(table.directory) / row.experiment
        summary = _chosen_summary(ExperimentDirectory(folder), table)
        if summary is not None:
            values = {key: summary[key] for key in REPORTED if key in summary}
            origin = {"experiment": str(folder), "evaluation": table.evaluation}
            results.append(FilledRow(row, {**values, "iteration": summary["iteration"], **origin}))
        elif not row.optional:
            missing_rows.append(f"{row.name}: {folder} {_why_missing(ExperimentDirectory(folder), table)}")
    if missing_rows:
        raise ValueError(
            "rows without a measured checkpoint:\n  "
            + "\n  ".join(missing_rows)
            + "\nRun these experiments (`treetune run --configs …`, then `treetune evaluate --configs …`), or"
            " mark the rows optional"
        )
    if not results:
        raise ValueError(f"none of the optional rows has been evaluated yet in {table.directory}")
    return results


def _chosen_summary(experiment: ExperimentDirectory, table: ExperimentsTable) -> dict[str, Any] | None:
    """Returns the summary of the checkpoint that the table reports, or None where there is none that was
    measured as the table needs."""
    reported = experiment.read_summaries(table.evaluation)
    if not reported:
        return None
    if table.checkpoint == "last":
        return reported[max(reported)]
    selection = experiment.read_summaries(table.best_on)
    candidates = sorted(iteration for iteration in reported if iteration in selection)
    if not candidates:
        return None
    # Of equally good checkpoints, `max` takes the first one, which is the earliest and cost least.
    best = max(candidates, key=lambda iteration: selection[iteration]["pass_at_1"])
    return reported[best]


def _why_missing(experiment: ExperimentDirectory, table: ExperimentsTable) -> str:
    if not experiment.path.is_dir():
        return "does not exist"
    if table.checkpoint == "best" and experiment.read_summaries(table.evaluation):
        return f"has no checkpoint that was measured on both {table.evaluation!r} and {table.best_on!r}"
    return f"has no evaluation {table.evaluation!r}"


def as_markdown(table: ExperimentsTable, results: list[FilledRow]) -> str:
    """Returns the table as Markdown, with shares in percent."""
    with_published = any(result.row.published is not None for result in results)
    heads = ["", "pass@1", "95 % interval", "problems", "unfinished", "tokens", "iteration"]
    rows = [_cells(result, with_published) for result in results]
    note = f"`{table.evaluation}` of the {table.checkpoint} checkpoint"
    if table.checkpoint == "best":
        note += f" by `{table.best_on}`"
    if with_published:
        heads.append("published")
    parts = [f"## {table.title}"] if table.title else []
    parts.append(frame_as_markdown(as_frame(heads, rows)))
    parts.append(f"Shares in percent; {note}.")
    return "\n\n".join(parts) + "\n"


def _cells(result: FilledRow, with_published: bool) -> list[str]:
    """Returns the cells of a row as text, with shares in percent."""
    values, published = result.values, result.row.published

    def format_value(key: str, scale: float = 1.0) -> str:
        return f"{scale * values[key]:.1f}" if values.get(key) is not None else DASH

    cells = [
        result.row.name,
        format_value("pass_at_1", scale=100),
        f"{format_value('ci_low', scale=100)} – {format_value('ci_high', scale=100)}",
        f"{values.get('n_problems', DASH)} × {values.get('samples', DASH)}",
        format_value("unfinished", scale=100),
        format_value("mean_tokens"),
        str(values["iteration"]),
    ]
    if with_published:
        source = f" ({result.row.source})" if result.row.source else ""
        cells.append(DASH if published is None else f"{100 * published:.1f}{source}")
    return cells
