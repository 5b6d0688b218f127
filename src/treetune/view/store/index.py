"""The files of an experiment that hold answers, and an index of each: a row of numbers and words per answer,
so that nobody reads all tokens.

An index lies in the viewer's own folder, goes in whole, and is made anew when the file is another.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from treetune.rollouts.storage import REMEDY, SIGNALS
from treetune.runtime.directory import verify_answers
from treetune.store.checksums import verify_once
from treetune.store.files import whole_folder
from treetune.view.store.columns import (
    OF_ANSWERS,
    OF_EPISODES,
    OF_SIGNALS,
    answer_columns,
    episode_columns,
    line_columns,
    signal_columns,
)
from treetune.view.store.folders import Run, digest, stat_of
from treetune.view.store.foreign import FileReport, answers_in, json_lines
from treetune.view.store.foreign.layout import step_of
from treetune.view.store.signatures import SignatureWriter
from treetune.view.text import writable

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 7
"""Version of the files of an index and their columns: another one makes all anew."""

ROWS_IN_GROUP = 2048
"""Rows of the Parquet file that are read together."""

ROWS, BITS, ABOUT = "rows.parquet", "bits", "about.json"

LINES_AT_ONCE = 4096


@dataclass(frozen=True)
class AnswerFile:
    """A file of answers. `number` counts as people do: the iteration from 1, for an evaluation the finished
    iterations. `label` is the evaluation's set, `episodes` the credit beside the answers and `signals` what
    the trainer recorded of their tokens, where these are there.

    An iteration on demonstrations has episodes alone: they are its answers.
    """

    kind: Literal["iteration", "evaluation"]
    number: int
    name: str
    """The name in addresses: ``i4``, ``e4-test``."""
    title: str
    """The name for people."""
    path: Path
    episodes: Path | None = None
    signals: Path | None = None
    label: str = ""
    content: str = "answers"
    """The kind of text that it holds."""
    is_foreign: bool = False
    """True for a file of another program's run; its `number` is the step, as far as that is known."""

    @property
    def grows(self) -> bool:
        """True for a file that another program may be writing: lines are added at its end."""
        return self.is_foreign and self.path.suffix == ".jsonl"

    @property
    def mark(self) -> str:
        """Another text as soon as one of its files is another."""
        return digest([stat_of(path) for path in self.files])

    @property
    def size(self) -> int:
        """Bytes on disk; 0 for what has gone meanwhile."""
        return sum(path.stat().st_size for path in self.files if path.is_file())

    @property
    def files(self) -> list[Path]:
        return [path for path in (self.path, self.episodes, self.signals) if path is not None]


def sources(run: Run, left_out: list[Path] | None = None) -> list[AnswerFile]:
    """Returns all that there are now, iterations first, each in their order. Files that are symbolic links
    out of the folders are added to `left_out`, and their sources left out."""

    def numbered(folder: Path) -> list[Path]:
        folders = [path for path in folder.glob("[0-9]*") if path.name.isdecimal()]
        return sorted(folders, key=lambda path: int(path.name))

    there: list[AnswerFile] = []
    for place, path in enumerate(run.files):
        step, below = step_of(path, run.path), path.relative_to(run.path)
        name = f"e{place}-{path.name}" if len(below.parts) == 1 else f"e-{'-'.join(below.parts)}"
        title = path.name
        if len(below.parts) > 1:
            title = f"step {step.number} {step.label}".strip() if step.number is not None else str(below)
        number = place if step.number is None else step.number
        there.append(AnswerFile("evaluation", number, name, title, path, label=step.label, is_foreign=True))
    for folder in numbered(run.path / "iterations"):
        answers, episodes, signals = (
            path if (path := folder / name).is_file() else None
            for name in ("trajectories.arrow", "episodes.arrow", SIGNALS)
        )
        if main := answers or episodes:
            number = int(folder.name) + 1
            source = AnswerFile("iteration", number, f"i{number}", f"iteration {number}", main, episodes)
            content = "answers" if answers else "demonstrations"
            there.append(replace(source, signals=signals if episodes else None, content=content))
    for folder in numbered(run.path / "evaluations"):
        for lines in sorted(folder.glob("*/answers.jsonl")):
            number, label = int(folder.name), lines.parent.name
            title = f"{label} after {number} iterations"
            there.append(AnswerFile("evaluation", number, f"e{number}-{label}", title, lines, label=label))
    links = [path for one in there for path in one.files if not run.follows(path)]
    if left_out is not None:
        left_out += links
    return [one for one in there if not links or not {*links}.intersection(one.files)]


# Batches of an Arrow stream


@dataclass(frozen=True)
class Layout:
    """The places of the batches of a stream: `ends[k]` is the byte behind batch k, `rows[k]` how many rows
    come before it and `rows[-1]` all of them. The schema ends at `head`."""

    head: int
    ends: tuple[int, ...]
    rows: tuple[int, ...]

    def batch_of(self, row: int) -> int:
        return bisect.bisect_right(self.rows, row) - 1


def read_batch(
    path: Path, layout: Layout, number: int, columns: Sequence[str] | None = None
) -> pa.RecordBatch:
    """Reads batch `number` where it lies; of its columns those that are named, in the file's order. Raises
    ValueError for a file that isn't what the layout is of."""
    import pyarrow as pa

    verify_once(path, REMEDY)
    begin = layout.ends[number - 1] if number else layout.head
    with path.open("rb") as file:
        head = file.read(layout.head)
        file.seek(begin)
        body = file.read(layout.ends[number] - begin)
    options = pa.ipc.IpcReadOptions(use_threads=False)
    if columns is not None:
        names = pa.ipc.read_schema(pa.py_buffer(head)).names
        options.included_fields = [names.index(name) for name in columns if name in names]
    try:
        with pa.ipc.open_stream(pa.py_buffer(head + body), options=options) as reader:
            batch = reader.read_next_batch()
        batch.validate(full=True)  # of an earlier version, without a checksum
        return batch
    except (pa.ArrowInvalid, OSError, StopIteration) as error:
        raise ValueError(f"{path} is no longer what it was, or is damaged ({error})") from error


def walk(path: Path, columns: Sequence[str]) -> Iterator[tuple[Any, int]]:
    """Yields each batch with the columns that are named (as far as there are any), and the byte behind it.

    The first that is given is the schema, with the byte where the first batch begins. Raises ValueError for
    a file that isn't whole, or isn't as it was written.
    """
    import pyarrow as pa

    verify_once(path, REMEDY)
    with path.open("rb") as file:
        try:
            with pa.ipc.open_stream(file) as reader:
                names = reader.schema.names
            metadata = reader.schema.metadata or {}
            file.seek(0)
            options = pa.ipc.IpcReadOptions(
                use_threads=False, included_fields=[names.index(name) for name in columns if name in names]
            )
            with pa.ipc.open_stream(file, options=options) as reader:
                yield reader.schema, file.tell()
                count = 0
                for batch in reader:
                    batch.validate(full=True)
                    count += batch.num_rows
                    yield batch, file.tell()
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path} is not a whole Arrow file ({error})") from error
    if b"rows" in metadata and count != int(metadata[b"rows"]):
        raise ValueError(f"{path} is cut short: {count} of {int(metadata[b'rows'])} rows")


# The index


@dataclass(frozen=True)
class About:
    """The content of an index: how many answers, and where batches of its Arrow files lie."""

    rows: int
    mark: str
    answers: Layout | None = None
    episodes: Layout | None = None
    signals: Layout | None = None
    note: str = ""
    """What became of rows of another program's file that are no answers."""
    size: int = 0
    """Bytes of the source when it was read."""


@dataclass(frozen=True)
class Indexed:
    """A source and its index in `folder`, where that is made; `fault` is why it can't be. `is_behind` is true
    for an index of the file as it was before it grew."""

    source: AnswerFile
    folder: Path
    about: About | None
    fault: str = ""
    is_behind: bool = False

    @property
    def is_awaited(self) -> bool:
        """True while its index is still to come."""
        return self.about is None and not self.fault


def build(source: AnswerFile, folder: Path) -> None:
    """Makes the index of a source in a folder. Raises ValueError for a file that isn't whole."""
    import pyarrow as pa
    from pyarrow import parquet

    mark, size = source.mark, source.size
    report = FileReport()
    with whole_folder(folder) as made:
        bits = SignatureWriter(made / BITS)
        layouts: dict[str, Layout] = {}
        if source.kind == "evaluation":
            tables = list(_lines_table(source, bits, report))
        elif source.path == source.episodes:
            tables = [_episodes_table(source, bits, layouts)]
        else:
            tables = list(_stream_tables(source.path, OF_ANSWERS, answer_columns, bits, layouts, "answers"))
        bits.close()
        empty = pa.table({"place": pa.array([], pa.int64())})
        table = pa.concat_tables(tables, promote_options="permissive") if tables else empty
        table = table.append_column("source", pa.array([source.name] * table.num_rows, pa.string()))
        if source.episodes is not None and source.path != source.episodes:
            table = _with_credit(table, _episodes_table(source, None, layouts))
        table = table.append_column("row", pa.array(np.arange(table.num_rows, dtype=np.int64)))
        parquet.write_table(table, made / ROWS, compression="zstd", row_group_size=ROWS_IN_GROUP)
        note = report.note(source.title) if source.is_foreign else ""
        about = About(table.num_rows, mark, **layouts, note=note, size=size)
        (made / ABOUT).write_text(json.dumps({"version": VERSION, **asdict(about)}))


def read_about(folder: Path) -> About | None:
    """Reads what an index holds; None where there is none of this version."""
    try:
        about = json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError):
        return None
    if about.pop("version", None) != VERSION:
        return None
    for name in ("answers", "episodes", "signals"):
        one = about[name]
        about[name] = Layout(one["head"], tuple(one["ends"]), tuple(one["rows"])) if one else None
    return About(**about)


def _stream_tables(
    path: Path,
    columns: Sequence[str],
    columns_of: Callable[[pa.RecordBatch], dict[str, Any]],
    bits: SignatureWriter | None,
    layouts: dict[str, Layout],
    kind: str,
) -> Iterator[pa.Table]:
    """Yields a table for each batch of an Arrow file, and adds the file's layout under `kind`."""
    import pyarrow as pa

    walking = walk(path, columns)
    _, head = next(walking)
    ends, rows = list[int](), [0]
    for batch, end in walking:
        ends.append(end)
        made = columns_of(batch)
        made["place"] = pa.array(np.arange(rows[-1], rows[-1] + batch.num_rows, dtype=np.int64))
        rows.append(rows[-1] + batch.num_rows)
        if bits is not None:
            bits.add(batch["text"])
        yield pa.table(made)
    layouts[kind] = Layout(head, tuple(ends), tuple(rows))


def _episodes_table(source: AnswerFile, bits: SignatureWriter | None, layouts: dict[str, Layout]) -> pa.Table:
    """Returns training rows with what the trainer recorded of their tokens. Raises ValueError where that is
    of others."""
    import pyarrow as pa

    assert source.episodes is not None
    made = list(_stream_tables(source.episodes, OF_EPISODES, episode_columns, bits, layouts, "episodes"))
    if not made:
        return pa.table({"place": pa.array([], pa.int64())})
    table = pa.concat_tables(made, promote_options="default")
    if source.signals is None:
        return table
    signals = pa.concat_tables(
        _stream_tables(source.signals, OF_SIGNALS, signal_columns, None, layouts, "signals"),
        promote_options="default",
    )
    if not signals["answer"].equals(table["answer"]):
        raise ValueError(f"{source.signals} is of other rows than {source.episodes}: delete it")
    for name in signals.column_names:
        if name not in table.column_names:
            table = table.append_column(name, signals[name])
    return table


def _with_credit(answers: pa.Table, episodes: pa.Table) -> pa.Table:
    """Adds to answers the credit over all episodes that an answer was cut into, and their places."""
    import duckdb

    of_signals = "".join(
        f"sum({name}_mean * trained) / nullif(sum(trained) FILTER ({name}_mean IS NOT NULL), 0)"
        f" AS {name}_mean, max({name}_most) AS {name}_most,"
        for name in ("entropy", "gap")
        if f"{name}_mean" in episodes.column_names
    )
    with duckdb.connect(":memory:") as connection:
        connection.register("answers", answers)
        connection.register("episodes", episodes)
        return connection.sql(
            f"""
            SELECT answers.*, credit.* EXCLUDE (credited) FROM answers LEFT JOIN (
                SELECT answer AS credited, count(*)::INTEGER AS episodes, min(place) AS episode_place,
                    max(place) AS episode_last,
                    sum(advantage_mean * trained)
                        / nullif(sum(trained) FILTER (advantage_mean IS NOT NULL), 0)
                        AS advantage_mean,
                    {of_signals}
                    min(advantage_least) AS advantage_least, max(advantage_most) AS advantage_most,
                    max(advantage_size) AS advantage_size,
                    arg_min(first_value, place) AS first_value
                FROM episodes GROUP BY answer
            ) AS credit ON credited = answers.answer ORDER BY answers.place
            """
        ).to_arrow_table()


def _lines_table(source: AnswerFile, bits: SignatureWriter, report: FileReport) -> Iterator[pa.Table]:
    """Yields tables of an evaluation's lines, some thousand at a time. Rows of another program that are no
    answers are counted in `report`."""
    import pyarrow as pa

    rows: list[dict[str, Any]] = []
    texts: list[str] = []

    def made() -> pa.Table:
        bits.add(pa.array(texts, pa.string()))
        names = dict.fromkeys(name for row in rows for name in row)
        table = pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
        rows.clear()
        texts.clear()
        return table

    verify_answers(source.path)
    lines = answers_in(source.path, report) if source.is_foreign else json_lines(source.path)
    for place, row in lines:
        columns = line_columns(row, place).items()
        rows.append({name: writable(x) if isinstance(x, str) else x for name, x in columns})
        texts.append(writable(row.get("text") or ""))
        if len(rows) == LINES_AT_ONCE:
            yield made()
    if rows:
        yield made()
