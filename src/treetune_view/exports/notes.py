"""Notes on answers as a data set: a row per note, with the answer that it was written on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from treetune.runtime.directory import ExperimentDirectory
from treetune.store.files import whole_file
from treetune_view.exports.evaluations import writable
from treetune_view.notes import Note, read_notes
from treetune_view.report.experiment import read_experiment

if TYPE_CHECKING:
    import pyarrow as pa

NUMBERS = ("score", "reward", "advantage")

Named = tuple[str, Note]
"""An experiment's name, and a note on one of its answers."""


def notes_of(paths: Sequence[Path]) -> list[Named]:
    """All notes of these experiments. Raises ValueError where one has none, or one that can't be read."""
    found: list[Named] = []
    for path in paths:
        experiment = read_experiment(path)
        own = read_notes(ExperimentDirectory(path).notes)
        if not own:
            raise ValueError(f"{path} has no notes: `treetune view` writes them, on the page of an answer")
        found += [(experiment.name, note) for note in own]
    return found


def write_notes(notes: Sequence[Named], path: Path) -> None:
    """Writes the file, whole, in the format that its ending says. Raises ValueError for an unknown one."""
    write = writer_of(path.suffix)
    with whole_file(path, "wb") as file:
        write(notes, file)


def writer_of(suffix: str) -> Callable[[Iterable[Named], IO[bytes]], None]:
    """Raises ValueError for an ending that is no format."""
    writers = {".parquet": _as_parquet, ".jsonl": _as_lines}
    if suffix not in writers:
        raise ValueError(f"notes are written as {' or '.join(writers)}, and not as {suffix or 'no ending'!r}")
    return writers[suffix]


def note_row(experiment: str, note: Note) -> dict[str, Any]:
    """What the data set says of a note. `time` is in UTC."""
    about = note.about
    row: dict[str, Any] = {
        "experiment": experiment,
        "source": about.source,
        "problem": about.problem,
        "sample": about.sample,
        "prompt": about.prompt,
        "answer": about.text,
        "gold": about.gold,
        "score": about.score,
        "reward": about.reward,
        "outcome": about.outcome,
        "advantage": about.advantage,
        "labels": list(map(writable, note.labels)),
        "note": note.text,
        "author": note.author,
    }
    words = {name: writable(value) for name, value in row.items() if isinstance(value, str)}
    return {**row, **words, "time": datetime.fromtimestamp(note.written, UTC)}


def _as_lines(notes: Iterable[Named], file: IO[bytes]) -> None:
    for row in (note_row(*named) for named in notes):
        line = json.dumps({**row, "time": row["time"].isoformat()}, ensure_ascii=False)
        file.write(line.encode() + b"\n")


def _as_parquet(notes: Iterable[Named], file: IO[bytes]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows: list[Mapping[str, Any]] = [note_row(*named) for named in notes]
    parquet.write_table(pa.Table.from_pylist(rows, schema=_schema()), file, compression="zstd")


def _schema() -> pa.Schema:
    import pyarrow as pa

    kinds = {
        "sample": pa.int64(),
        "labels": pa.list_(pa.string()),
        "time": pa.timestamp("ms", tz="UTC"),
        **dict.fromkeys(NUMBERS, pa.float64()),
    }
    names = (
        "experiment", "source", "problem", "sample", "prompt", "answer", "gold", "score", "reward", "outcome",
        "advantage", "labels", "note", "author", "time",
    )  # fmt: skip
    return pa.schema([pa.field(name, kinds.get(name, pa.large_string())) for name in names])
