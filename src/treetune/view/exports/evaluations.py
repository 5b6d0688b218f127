"""An evaluation as it lies on disk, to be written in another form; and as a Parquet file, one row per
answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from treetune.runtime.directory import ExperimentDirectory, verify_answers
from treetune.store.files import whole_file
from treetune.view.experiment import StoredExperiment, read_experiment
from treetune.view.text import writable

EVALUATE = "`treetune evaluate` measures it"

ROWS_AT_ONCE = 4096

METADATA = b"treetune"
"""Key of the Parquet file's metadata: JSON with the experiment, the set, the iteration and the summary."""

COUNTS = ("sample", "tokens")
NUMBERS = ("reward",)


@dataclass(frozen=True)
class MeasuredSet:
    """A set, measured after `iteration` finished iterations of an experiment."""

    experiment: StoredExperiment
    label: str
    iteration: int

    @property
    def summary(self) -> Mapping[str, Any]:
        return self.experiment.evaluations[self.label][self.iteration]

    @property
    def answers(self) -> Path:
        directory = ExperimentDirectory(self.experiment.path)
        return directory.evaluation(self.iteration, self.label) / "answers.jsonl"

    @property
    def measured_at(self) -> float:
        """The time when its summary was written, in seconds since 1970."""
        return self.answers.with_name("summary.json").stat().st_mtime

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields the answers in their order, without holding them all. Raises ValueError for what is none."""
        verify_answers(self.answers)
        with self.answers.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                    row["problem"], row["sample"]
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"{self.answers}:{number} is no answer ({error!r}): delete its folder and evaluate"
                        " again"
                    ) from error
                yield row


def chosen_evaluation(path: Path, label: str | None, iteration: int | None) -> MeasuredSet:
    """Returns the newest one of the only set, or what is named. Raises ValueError with what there is."""
    experiment = read_experiment(path)
    measured = experiment.evaluations
    if not measured:
        raise ValueError(f"{path} has no evaluation: {EVALUATE}")
    if label is None:
        if len(measured) > 1:
            raise ValueError(f"{path} has evaluations of {', '.join(measured)}: choose one with --set")
        label = next(iter(measured))
    if label not in measured:
        raise ValueError(f"{path} has no evaluation of {label!r}; there are {', '.join(measured)}")
    iteration = max(measured[label]) if iteration is None else iteration
    if iteration not in measured[label]:
        there = ", ".join(map(str, measured[label]))
        raise ValueError(
            f"{label} was not measured after {iteration} iterations of {path}; it was after {there}"
        )
    chosen = MeasuredSet(experiment, label, iteration)
    if not chosen.answers.is_file():
        raise ValueError(f"{chosen.answers} is not there: delete its folder, and {EVALUATE} again")
    return chosen


def task_of_set(config: Mapping[str, Any], label: str) -> Mapping[str, Any]:
    """Returns the configuration of the task that a set's problems are of: its own, or the experiment's."""
    sets = (config.get("evaluation") or {}).get("sets") or ()
    own = [one.get("task") for one in sets if (one.get("name") or one.get("split")) == label]
    return next((task for task in own if task), None) or config.get("task") or {}


def write_parquet(evaluation: MeasuredSet, path: Path) -> int:
    """Writes the file, whole, and returns how many answers it has.

    Columns: `problem`, `sample`, `prompt`, `gold`, `text`, `extracted`, `reward` (null where nobody could
    grade), `outcome`, `finish_reason`, `tokens`, …, and each number of a grader or of an answer as
    ``group/name``.
    """
    import pyarrow as pa
    from pyarrow import parquet

    def kind(name: str) -> pa.DataType:
        if name in COUNTS:
            return pa.int64()
        return pa.float64() if name in NUMBERS or "/" in name else pa.large_string()

    names = dict.fromkeys(name for row in evaluation.rows() for name in _flat(row))
    about = {
        "experiment": evaluation.experiment.name,
        "set": evaluation.label,
        "iteration": evaluation.iteration,
        "summary": evaluation.summary,
    }
    fields = [pa.field(name, kind(name)) for name in names]
    schema = pa.schema(fields, metadata={METADATA: json.dumps(about)})
    flat, count = map(_flat, evaluation.rows()), 0
    with whole_file(path, "wb") as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        while rows := list(islice(flat, ROWS_AT_ONCE)):
            columns = {name: [row.get(name) for row in rows] for name in schema.names}
            writer.write_table(pa.table(columns, schema=schema))
            count += len(rows)
    return count


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Names groups of numbers ``group/name``; writes text that can be written, and whatever else as JSON."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{key}": float(number) for key, number in value.items() if number is not None}
        elif name in COUNTS or name in NUMBERS or value is None:
            flat[name] = value
        else:
            flat[name] = writable(value if isinstance(value, str) else json.dumps(value))
    return flat
