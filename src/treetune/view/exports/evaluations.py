"""Reads a stored evaluation for export, and writes it as a Parquet file with a row for each answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from treetune.runtime.directory import ANSWERS, SUMMARY, verify_answers
from treetune.store.files import write_atomically
from treetune.view.experiment import StoredExperiment, read_experiment
from treetune.view.text import make_writable

EVALUATE_REMEDY = "run `treetune evaluate`"

ROWS_AT_ONCE = 4096
"""The number of answers in memory while a Parquet file is written."""

METADATA_KEY = b"treetune"
"""The key of treetune's entry in the Parquet file's metadata, which is JSON with the experiment, set,
iteration and summary."""

INTEGER_COLUMNS = ("sample", "tokens")
"""The columns of integers."""
FLOAT_COLUMNS = ("reward",)
"""The columns of floats, besides those of groups of numbers (``grade/rule``)."""


@dataclass(frozen=True)
class MeasuredSet:
    """An evaluation on a set of problems, after `iteration` finished iterations of an experiment."""

    experiment: StoredExperiment
    label: str
    """The name of the set."""
    iteration: int

    @property
    def summary(self) -> Mapping[str, Any]:
        return self.experiment.evaluations[self.label][self.iteration]

    @property
    def answers(self) -> Path:
        """The file with the answers."""
        return self.experiment.directory.evaluation_folder(self.iteration, self.label) / ANSWERS

    @property
    def measured_at(self) -> float:
        """The time when the evaluation's summary was written, in seconds since 1970."""
        return self.answers.with_name(SUMMARY).stat().st_mtime

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields the answers in their order, one at a time, so that not all must fit in memory.

        Raises ValueError for a line that is not an answer.
        """
        verify_answers(self.answers)
        with self.answers.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                    row["problem"], row["sample"]  # a line without them is not an answer
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"{self.answers}:{number} is not an answer ({error!r}): delete its folder and"
                        " evaluate again"
                    ) from error
                yield row


def choose_evaluation(path: Path, label: str | None, iteration: int | None) -> MeasuredSet:
    """Returns an evaluation of an experiment.

    Args:
        path: the experiment's directory.
        label: the evaluation set; None if the experiment has only one.
        iteration: the number of finished iterations; None for the newest evaluation.

    Raises:
        ValueError: There is no such evaluation, or `label` is None and there are several sets. The message
            lists those that exist.
    """
    experiment = read_experiment(path)
    evaluations_by_set = experiment.evaluations
    if not evaluations_by_set:
        raise ValueError(f"{path} has no evaluation: {EVALUATE_REMEDY}")
    if label is None:
        if len(evaluations_by_set) > 1:
            raise ValueError(
                f"{path} has evaluations of {', '.join(evaluations_by_set)}: choose one with --set"
            )
        label = next(iter(evaluations_by_set))
    if label not in evaluations_by_set:
        raise ValueError(f"{path} has no evaluation of {label!r}; it has {', '.join(evaluations_by_set)}")
    iteration = max(evaluations_by_set[label]) if iteration is None else iteration
    if iteration not in evaluations_by_set[label]:
        evaluated = ", ".join(map(str, evaluations_by_set[label]))
        raise ValueError(
            f"{label} was not evaluated after {iteration} iterations of {path}, only after {evaluated}"
        )
    evaluation = MeasuredSet(experiment, label, iteration)
    if not evaluation.answers.is_file():
        raise ValueError(f"{evaluation.answers} is missing: delete its folder, and {EVALUATE_REMEDY} again")
    return evaluation


def task_of_set(config: Mapping[str, Any], label: str) -> Mapping[str, Any]:
    """Returns the configuration of an evaluation set's task, or of the experiment's task if the set has
    none."""
    for evaluation_set in (config.get("evaluation") or {}).get("sets") or ():
        name = evaluation_set.get("name") or evaluation_set.get("split")
        if name == label and evaluation_set.get("task"):
            return evaluation_set["task"]
    return config.get("task") or {}


def write_parquet(evaluation: MeasuredSet, path: Path) -> int:
    """Writes a Parquet file and returns the number of its answers.

    If the writing fails, no incomplete file is left. The columns are `problem`, `sample`, `prompt`, `gold`,
    `text`, `extracted`, `reward` (null if the answer could not be graded), `outcome`, `finish_reason`,
    `tokens`, …, and the numbers of graders and answers as ``group/name``.
    """
    import pyarrow as pa
    from pyarrow import parquet

    def column_type(name: str) -> pa.DataType:
        if name in INTEGER_COLUMNS:
            return pa.int64()
        is_in_group = "/" in name  # a number of a group, such as "grade/rule"
        return pa.float64() if name in FLOAT_COLUMNS or is_in_group else pa.large_string()

    # Answers can have different numbers, so the file is read once to find all columns.
    names: dict[str, None] = {}  # a dictionary as an ordered set
    for row in evaluation.rows():
        names |= dict.fromkeys(_flatten_answer(row))
    about = {
        "experiment": evaluation.experiment.name,
        "set": evaluation.label,
        "iteration": evaluation.iteration,
        "summary": evaluation.summary,
    }
    fields = [pa.field(name, column_type(name)) for name in names]
    schema = pa.schema(fields, metadata={METADATA_KEY: json.dumps(about)})
    flat_rows = map(_flatten_answer, evaluation.rows())
    count = 0
    with (
        write_atomically(path, "wb") as file,
        parquet.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        while rows := list(islice(flat_rows, ROWS_AT_ONCE)):
            columns = {name: [row.get(name) for row in rows] for name in schema.names}
            writer.write_table(pa.table(columns, schema=schema))
            count += len(rows)
    return count


def _flatten_answer(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an answer as a flat row: {"sample": 0, "reward": 1.0, "grade/rule": 1.0, "text": "…"}.

    Groups of numbers become columns ``group/name``, and other values that are not text become JSON.
    """
    flat_row: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            for key, number in value.items():
                if number is not None:
                    flat_row[f"{name}/{key}"] = float(number)
        elif name in INTEGER_COLUMNS or name in FLOAT_COLUMNS or value is None:
            flat_row[name] = value
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            flat_row[name] = make_writable(text)
    return flat_row
