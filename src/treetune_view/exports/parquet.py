"""An evaluation as a Parquet file: one row per answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.store.files import whole_file
from treetune_view.exports.evaluations import Evaluation, writable

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_AT_ONCE = 4096

METADATA = b"treetune"
"""In the file's metadata: JSON with the experiment, the set, the iteration and the summary."""

TEXTS = ("problem", "domain", "prompt", "gold", "text", "outcome", "extracted", "finish_reason", "message")
COUNTS = ("sample", "tokens")
NUMBERS = ("reward",)


def write_parquet(evaluation: Evaluation, path: Path) -> int:
    """Writes the file, whole, and returns how many answers it has.

    Columns: `problem`, `sample`, `prompt`, `gold`, `text`, `extracted`, `reward` (null where nobody could
    grade), `outcome`, `finish_reason`, `tokens`, …, and each number of a grader or of an answer as
    ``group/name``.
    """
    import pyarrow.parquet as parquet

    schema = _schema(evaluation)
    count = 0
    with whole_file(path, "wb") as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for rows in _bunches(evaluation):
            writer.write_table(_table(rows, schema))
            count += len(rows)
    return count


def _schema(evaluation: Evaluation) -> pa.Schema:
    import pyarrow as pa

    names: dict[str, None] = {}
    for row in evaluation.rows():
        names |= dict.fromkeys(_flat(row))
    fields = [pa.field(name, _kind(name)) for name in names]
    about = {
        "experiment": evaluation.experiment.name,
        "set": evaluation.label,
        "iteration": evaluation.iteration,
        "summary": evaluation.summary,
    }
    return pa.schema(fields, metadata={METADATA: json.dumps(about)})


def _kind(name: str) -> pa.DataType:
    import pyarrow as pa

    if name in COUNTS:
        return pa.int64()
    if name in NUMBERS or "/" in name:
        return pa.float64()
    return pa.large_string()


def _table(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    return pa.table({name: [row.get(name) for row in rows] for name in schema.names}, schema=schema)


def _bunches(evaluation: Evaluation) -> Iterator[list[dict[str, Any]]]:
    own: list[dict[str, Any]] = []
    for row in evaluation.rows():
        own.append(_flat(row))
        if len(own) == ROWS_AT_ONCE:
            yield own
            own = []
    if own:
        yield own


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Groups of numbers as ``group/name``; text that can be written; whatever else as JSON."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{key}": float(number) for key, number in value.items() if number is not None}
        elif name in COUNTS or name in NUMBERS or value is None:
            flat[name] = value
        else:
            flat[name] = writable(value if isinstance(value, str) else json.dumps(value))
    return flat
