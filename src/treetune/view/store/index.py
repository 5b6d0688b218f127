"""Finds the files of an experiment that hold answers, and makes an index of each.

An index is a folder in the viewer's cache. It is written as a whole, and again when the file has changed:

    rows.parquet    a row for each answer: its score, tokens, beginning, … (`columns.py`), for lists
    texts.parquet   the text of each answer, for searches
    about.json      `About`: where each batch of the Arrow files is, so only one batch is read for an answer

So lists and searches never read the tokens of all answers. The column `place` says where an answer is in its
file: its row in an Arrow file, or the byte where its line begins in JSON lines.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from treetune.rollouts.storage import REMAKE_REMEDY, SIGNALS
from treetune.runtime.directory import ANSWERS, EPISODES, TRAJECTORIES, verify_answers
from treetune.store.checksums import verify_once
from treetune.store.files import make_folder_atomically
from treetune.view.experiment import CREDITED_LOG
from treetune.view.store.columns import (
    COLUMNS_OF_ANSWERS,
    COLUMNS_OF_EPISODES,
    COLUMNS_OF_SIGNALS,
    answer_columns,
    episode_columns,
    line_columns,
    signal_columns,
)
from treetune.view.store.folders import Run, short_hash, stat_of
from treetune.view.store.foreign import FileReport, answers_in, json_lines
from treetune.view.store.foreign.layout import step_of
from treetune.view.text import make_writable

if TYPE_CHECKING:
    import pyarrow as pa

INDEX_VERSION = 12
"""The version of an index's files and columns. An index of another version is made again."""

ROWS_IN_GROUP = 2048
"""The number of rows in a row group of the index's Parquet files. The rows of a group are read together."""

ROWS_FILE, TEXTS_FILE, ABOUT_FILE = "rows.parquet", "texts.parquet", "about.json"

LINES_AT_ONCE = 4096
"""The number of an evaluation's lines that become columns together."""


@dataclass(frozen=True)
class AnswerFile:
    """A source of answers: a file, with the files that belong to it.

    Example: `AnswerFile("iteration", 4, "i4", "iteration 4", Path("…/iterations/0003/trajectories.arrow"),
    episodes=Path("…/iterations/0003/episodes.arrow"))`.
    """

    kind: Literal["iteration", "evaluation"]
    number: int
    """For an iteration its number, counted from 1. For an evaluation the number of finished iterations."""
    name: str
    """The name in addresses: ``i4``, ``e4-test``."""
    title: str
    """The displayed name."""
    path: Path
    """The file of answers. An iteration on demonstrations has only episodes, which are its answers."""
    episodes: Path | None = None
    """The file of the training rows that were made from the answers, with their credit."""
    signals: Path | None = None
    """The file of the numbers that the trainer recorded for the episodes' tokens."""
    label: str = ""
    """The name of the evaluation set, or for another program's run the label of the step
    (`RunStep.label`)."""
    content: str = "answers"
    """What pages call the texts in the file: "answers" or "demonstrations"."""
    is_foreign: bool = False
    """Whether the file is of another program's run. Its `number` is then the step or, if that is unknown, the
    position of the file in the run."""

    @property
    def grows(self) -> bool:
        """Whether another program may still be appending lines to the file."""
        return self.is_foreign and self.path.suffix == ".jsonl"

    @property
    def fingerprint(self) -> str:
        """A text that changes whenever one of its files changes."""
        return short_hash([stat_of(path) for path in self.files])

    @property
    def size(self) -> int:
        """The bytes of all files on disk. A file that was deleted meanwhile counts 0."""
        return sum(path.stat().st_size for path in self.files if path.is_file())

    @property
    def files(self) -> list[Path]:
        """The file of answers, and the other files if there are any."""
        return [path for path in (self.path, self.episodes, self.signals) if path is not None]


def find_sources(run: Run, left_out: list[Path] | None = None) -> list[AnswerFile]:
    """Returns all sources of a run.

    The sources of a run of treetune are its iterations and then its evaluations, each in their order. Those
    of another program's run are its files.

    Symbolic links that lead out of the viewer's folders are not read. A source with such a link is left out,
    and the link is added to `left_out`.
    """
    sources = []
    for source in (*_foreign_sources(run), *_iteration_sources(run), *_evaluation_sources(run)):
        forbidden_links = [path for path in source.files if not run.may_follow(path)]
        if not forbidden_links:
            sources.append(source)
        elif left_out is not None:
            left_out += forbidden_links
    return sources


def _foreign_sources(run: Run) -> Iterator[AnswerFile]:
    """Yields the files of another program's run as sources."""
    name_counts = Counter(_name_in_folders(path.relative_to(run.path)) for path in run.files)
    for index, path in enumerate(run.files):
        step, relative_path = step_of(path, run.path), path.relative_to(run.path)
        # Files in different folders often have the same file name, such as traces.jsonl. So a file in a
        # folder is named after its whole path: a/b.jsonl is `e-a-b.jsonl`. A file directly in the run's
        # folder has its position in its name, so that it can't have the same name: a-b.jsonl is
        # `e0-a-b.jsonl`.
        if len(relative_path.parts) > 1:
            name_of_path = _name_in_folders(relative_path)
            name = f"e-{name_of_path}"
            # Two paths can have the same name, such as a/b-c.jsonl and a-b/c.jsonl.
            if name_counts[name_of_path] > 1:
                name += "-" + hashlib.blake2b(str(relative_path).encode(), digest_size=4).hexdigest()
            if step.number is None:
                title = str(relative_path)
            else:
                title = f"step {step.number} {step.label}".strip()
        else:
            name, title = f"e{index}-{path.name}", path.name
        number = index if step.number is None else step.number  # the position stands for an unknown step
        yield AnswerFile("evaluation", number, name, title, path, label=step.label, is_foreign=True)


def _name_in_folders(relative_path: Path) -> str:
    """Returns ``a-b.jsonl`` for the file ``a/b.jsonl``."""
    return "-".join(relative_path.parts)


def _iteration_sources(run: Run) -> Iterator[AnswerFile]:
    """Yields the iterations that have a file of answers, and those that have only training rows.

    An iteration that trains on demonstrations has only training rows (the file of episodes).
    """
    config = run.directory.config_file
    titles = _titles_of_credited_log(config, stat_of(config))
    for iteration in run.directory.iterations():
        folder = run.directory.iteration_folder(iteration)
        paths = [folder / name for name in (TRAJECTORIES, EPISODES, SIGNALS)]
        answers, episodes, signals = (path if path.is_file() else None for path in paths)
        if episodes is None:
            signals = None  # signals are numbers of the episodes' tokens
        main_file = answers or episodes
        if main_file is not None:
            number = iteration + 1  # folders count from 0
            yield AnswerFile(
                kind="iteration",
                number=number,
                name=f"i{number}",
                title=titles.get(str(number), f"iteration {number}"),
                path=main_file,
                episodes=episodes,
                signals=signals,
                content="answers" if answers else "demonstrations",
            )


@functools.lru_cache(maxsize=256)
def _titles_of_credited_log(config: Path, stat: object) -> Mapping[str, str]:
    """Returns the names of a credited log's files by iteration: {"10": "10.jsonl"}.

    A credited log is a log of another program that `treetune credit` has credited. The result is empty for a
    run of treetune. `stat` is only a part of the cache's key, so that a changed file is read again.
    """
    try:
        content = json.loads(config.read_bytes())
    except (OSError, ValueError):  # missing or damaged, which the experiment's page reports
        return {}
    is_credited_log = isinstance(content, dict) and content.get("type") == CREDITED_LOG
    return content.get("titles", {}) if is_credited_log else {}


def _evaluation_sources(run: Run) -> Iterator[AnswerFile]:
    """Yields the evaluations that have a file of answers."""
    for number, label in run.directory.evaluations():
        path = run.directory.evaluation_folder(number, label) / ANSWERS
        if path.is_file():
            title = f"{label} after {number} iterations"
            yield AnswerFile("evaluation", number, f"e{number}-{label}", title, path, label=label)


# Batches of an Arrow stream


@dataclass(frozen=True)
class StreamLayout:
    """The positions of the batches of an Arrow stream.

    Example: `StreamLayout(head=800, ends=(5000, 9000), rows=(0, 64, 100))` has batch 0 with rows 0 to 63 in
    bytes 800 to 4999, and batch 1 with rows 64 to 99 in bytes 5000 to 8999."""

    head: int
    """The first byte after the schema."""
    ends: tuple[int, ...]
    """The first byte after each batch."""
    rows: tuple[int, ...]
    """The number of rows before each batch, and then the number of all rows."""

    def batch_of(self, row: int) -> int:
        """Returns the number of the batch that has a row."""
        return bisect.bisect_right(self.rows, row) - 1


def read_batch(
    path: Path, layout: StreamLayout, number: int, columns: Sequence[str] | None = None
) -> pa.RecordBatch:
    """Returns the batch `number` of an Arrow stream, without reading the other batches.

    With `columns`, the batch has only these columns, in the file's order. Raises ValueError for a file that
    has changed since the layout was made.
    """
    import pyarrow as pa

    verify_once(path, REMAKE_REMEDY)
    begin = layout.ends[number - 1] if number else layout.head
    with path.open("rb") as file:
        schema_bytes = file.read(layout.head)
        file.seek(begin)
        batch_bytes = file.read(layout.ends[number] - begin)
    options = pa.ipc.IpcReadOptions(use_threads=False)
    if columns is not None:
        names = pa.ipc.read_schema(pa.py_buffer(schema_bytes)).names
        options.included_fields = [names.index(name) for name in columns if name in names]
    try:
        # The schema and this batch together are a stream with a single batch.
        with pa.ipc.open_stream(pa.py_buffer(schema_bytes + batch_bytes), options=options) as reader:
            batch = reader.read_next_batch()
        batch.validate(full=True)  # files of earlier versions have no checksum
        return batch
    except (pa.ArrowInvalid, OSError, StopIteration) as error:
        raise ValueError(f"{path} has changed or is damaged ({error})") from error


def read_batches(path: Path, columns: Sequence[str]) -> Iterator[tuple[Any, int]]:
    """Yields (batch, first byte after the batch) for each batch of an Arrow file.

    Before these pairs, it yields the pair (schema, byte where the first batch begins). A batch has those of
    the named columns that the file has. Raises ValueError for a file that is incomplete or was changed.
    """
    import pyarrow as pa

    verify_once(path, REMAKE_REMEDY)
    with path.open("rb") as file:
        try:
            # The schema is read first, because columns are chosen by their numbers in it.
            with pa.ipc.open_stream(file) as reader:
                names = reader.schema.names
            metadata = reader.schema.metadata or {}
            file.seek(0)
            options = pa.ipc.IpcReadOptions(
                use_threads=False, included_fields=[names.index(name) for name in columns if name in names]
            )
            with pa.ipc.open_stream(file, options=options) as reader:
                yield reader.schema, file.tell()
                rows_so_far = 0
                for batch in reader:
                    batch.validate(full=True)
                    rows_so_far += batch.num_rows
                    yield batch, file.tell()
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path} is not a whole Arrow file ({error})") from error
    # A stream that was cut between two batches looks complete, but the schema has the number of rows.
    if b"rows" in metadata and rows_so_far != int(metadata[b"rows"]):
        raise ValueError(f"{path} is cut short: {rows_so_far} of {int(metadata[b'rows'])} rows")


# The index


@dataclass(frozen=True)
class About:
    """A description of an index: the state of the source that it was made from, and the layouts of the Arrow
    files."""

    rows: int
    """The number of answers."""
    fingerprint: str
    """The fingerprint that the source had when it was read."""
    answers: StreamLayout | None = None
    """The layout of the file of answers; None if that isn't an Arrow file, or if there are only episodes."""
    episodes: StreamLayout | None = None
    signals: StreamLayout | None = None
    note: str = ""
    """A message on rows of another program's file that are not answers; empty without any."""
    size: int = 0
    """The number of bytes that the source had when it was read."""


@dataclass(frozen=True)
class Indexed:
    """A source with its index, if it has one yet."""

    source: AnswerFile
    folder: Path
    """The folder of the index."""
    about: About | None
    """The description of the index; None if there is no index yet."""
    fault: str = ""
    """The reason why the index can't be made; empty if there is none."""
    is_behind: bool = False
    """Whether the index is of the file as it was before further lines were appended."""

    @property
    def is_awaited(self) -> bool:
        """Whether the index is still to be made."""
        return self.about is None and not self.fault


class TextWriter:
    """Writes the texts of a source's answers into a Parquet file, batch after batch, for searches.

    It doesn't keep the texts in memory, because those of an iteration may have gigabytes.
    """

    def __init__(self, path: Path, source_name: str) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        self._schema = pa.schema([("source", pa.string()), ("row", pa.int64()), ("text", pa.string())])
        self._writer = parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._source_name = source_name
        self._n_written_rows = 0

    def add(self, texts: pa.Array) -> None:
        """Writes the texts of the next rows."""
        import pyarrow as pa

        first = self._n_written_rows
        rows: np.ndarray = np.arange(first, first + len(texts), dtype=np.int64)
        columns = [pa.repeat(self._source_name, len(texts)), pa.array(rows), texts.cast(pa.string())]
        table = pa.Table.from_arrays(columns, schema=self._schema)
        self._writer.write_table(table, row_group_size=ROWS_IN_GROUP)
        self._n_written_rows += len(texts)

    def close(self) -> None:
        self._writer.close()


def build_index(source: AnswerFile, folder: Path) -> None:
    """Makes the index of a source in a folder.

    Raises ValueError for a file that is incomplete or damaged.
    """
    import pyarrow as pa
    from pyarrow import parquet

    # The fingerprint is taken before anything is read. If the file changes while it is read, it then has
    # another fingerprint than the index, and the index is made again.
    fingerprint, size = source.fingerprint, source.size
    report = FileReport()
    # The layouts of the Arrow files, by kind. The functions that read the files add them.
    layouts: dict[str, StreamLayout] = {}
    with (
        make_folder_atomically(folder) as new_folder,
        closing(TextWriter(new_folder / TEXTS_FILE, source.name)) as texts,
    ):
        if source.kind == "evaluation":
            tables = list(_line_tables(source, texts, report))
        elif source.path == source.episodes:  # demonstrations: the training rows are the answers
            tables = [_episodes_table(source, texts, layouts)]
        else:
            tables = list(
                _stream_tables(source.path, COLUMNS_OF_ANSWERS, answer_columns, texts, layouts, "answers")
            )
        # Tables may have different columns, and numbers of different types in a column ("permissive").
        empty = pa.table({"place": pa.array([], pa.int64())})
        table = pa.concat_tables(tables, promote_options="permissive") if tables else empty
        table = table.append_column("source", pa.array([source.name] * table.num_rows, pa.string()))
        if source.episodes is not None and source.path != source.episodes:
            table = _with_credit(table, _episodes_table(source, None, layouts))
        table = table.append_column("row", pa.array(np.arange(table.num_rows, dtype=np.int64)))
        parquet.write_table(table, new_folder / ROWS_FILE, compression="zstd", row_group_size=ROWS_IN_GROUP)
        note = report.note(source.title) if source.is_foreign else ""
        # The kinds of `layouts` are fields of `About`: "answers", "episodes" and "signals".
        about = About(table.num_rows, fingerprint, **layouts, note=note, size=size)
        (new_folder / ABOUT_FILE).write_text(json.dumps({"version": INDEX_VERSION, **asdict(about)}))


def read_about(folder: Path) -> About | None:
    """Returns the description of the index in a folder. Returns None if there is no index of this version."""
    try:
        about = json.loads((folder / ABOUT_FILE).read_text())
    except (OSError, ValueError):
        return None
    if about.pop("version", None) != INDEX_VERSION:
        return None
    for name in ("answers", "episodes", "signals"):
        layout = about[name]
        if layout is not None:
            about[name] = StreamLayout(layout["head"], tuple(layout["ends"]), tuple(layout["rows"]))
    return About(**about)


def _stream_tables(
    path: Path,
    columns: Sequence[str],
    columns_of: Callable[[pa.RecordBatch], dict[str, Any]],
    texts: TextWriter | None,
    layouts: dict[str, StreamLayout],
    kind: str,
) -> Iterator[pa.Table]:
    """Yields a table with the columns of the index for each batch of an Arrow file.

    Args:
        path: The file.
        columns: The columns of the file that are read.
        columns_of: Computes the columns of the index from a batch.
        texts: Gets the texts of all rows; None for no texts.
        layouts: Gets the layout of the file, under `kind`, when all tables have been yielded.
        kind: "answers", "episodes" or "signals".
    """
    import pyarrow as pa

    batches = read_batches(path, columns)
    _, schema_end = next(batches)  # before the batches come the schema, and the byte where it ends
    ends = list[int]()  # the byte where each batch ends
    first_places = [0]  # the place of each batch's first row, and at last the number of all rows
    for batch, end in batches:
        ends.append(end)
        table = columns_of(batch)
        first_place, next_place = first_places[-1], first_places[-1] + batch.num_rows
        table["place"] = pa.array(np.arange(first_place, next_place, dtype=np.int64))
        first_places.append(next_place)
        if texts is not None:
            texts.add(batch["text"])
        yield pa.table(table)
    layouts[kind] = StreamLayout(head=schema_end, ends=tuple(ends), rows=tuple(first_places))


def _episodes_table(
    source: AnswerFile, texts: TextWriter | None, layouts: dict[str, StreamLayout]
) -> pa.Table:
    """Returns a table of the training rows, with the numbers that the trainer recorded for their tokens.

    Args:
        source: A source with episodes.
        texts: Gets the rows' texts; None if the index already has the texts of the answers.
        layouts: Gets the layouts of the two files, under "episodes" and "signals".

    Raises:
        ValueError: The file of the trainer's numbers has other rows than the file of episodes.
    """
    import pyarrow as pa

    assert source.episodes is not None
    tables = list(
        _stream_tables(source.episodes, COLUMNS_OF_EPISODES, episode_columns, texts, layouts, "episodes")
    )
    if not tables:
        return pa.table({"place": pa.array([], pa.int64())})
    table = pa.concat_tables(tables, promote_options="default")
    if source.signals is None:
        return table
    signals = pa.concat_tables(
        _stream_tables(source.signals, COLUMNS_OF_SIGNALS, signal_columns, None, layouts, "signals"),
        promote_options="default",
    )
    if not signals["answer"].equals(table["answer"]):
        raise ValueError(f"{source.signals} has other rows than {source.episodes}: delete it")
    for name in signals.column_names:
        if name not in table.column_names:
            table = table.append_column(name, signals[name])
    return table


def _with_credit(answers: pa.Table, episodes: pa.Table) -> pa.Table:
    """Returns the answers with further columns about the episodes that each answer was cut into.

    `episode_place` and `episode_last` are the numbers of its first and last episode in their file. The other
    columns have the credit and the signals of its episodes.
    """
    import duckdb

    def mean_sql(column: str) -> str:
        """Returns the SQL of a mean over all trained tokens of an answer's episodes.

        `column` has the mean of each episode, which is weighted by its number of trained tokens (`trained`).
        An episode whose mean is null doesn't count. The result is null if no trained token counts.
        """
        return f"sum({column} * trained) / nullif(sum(trained) FILTER ({column} IS NOT NULL), 0) AS {column}"

    signals_sql = ""
    for name in ("entropy", "gap", "kl"):  # "gap": the trainer's log-prob of a token minus the engine's
        if f"{name}_mean" in episodes.column_names:
            signals_sql += f"{mean_sql(f'{name}_mean')}, max({name}_most) AS {name}_most,"
    with duckdb.connect(":memory:") as connection:
        connection.register("answers", answers)
        connection.register("episodes", episodes)
        return connection.sql(
            f"""
            SELECT answers.*, credit.* EXCLUDE (credited) FROM answers LEFT JOIN (
                SELECT answer AS credited, count(*)::INTEGER AS episodes, min(place) AS episode_place,
                    max(place) AS episode_last,
                    {mean_sql("advantage_mean")},
                    {signals_sql}
                    min(advantage_least) AS advantage_least, max(advantage_most) AS advantage_most,
                    max(advantage_size) AS advantage_size,
                    arg_min(first_value, place) AS first_value
                FROM episodes GROUP BY answer
            ) AS credit ON credited = answers.answer ORDER BY answers.place
            """
        ).to_arrow_table()


def _line_tables(source: AnswerFile, texts: TextWriter, report: FileReport) -> Iterator[pa.Table]:
    """Yields tables with the columns of the index, each for LINES_AT_ONCE lines of an evaluation.

    The lines' texts are added to `texts`. The rows of another program's file that are not answers are counted
    in `report`.
    """
    import pyarrow as pa

    def table_of(rows: list[dict[str, Any]]) -> pa.Table:
        """Returns a table with all columns that any of the rows has."""
        names: dict[str, None] = {}  # a dictionary as an ordered set
        for row in rows:
            names |= dict.fromkeys(row)
        return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})

    verify_answers(source.path)
    lines = answers_in(source.path, report) if source.is_foreign else json_lines(source.path)
    rows: list[dict[str, Any]] = []
    row_texts: list[str] = []
    # A line is found again by its place: the byte where it begins, or in a file without lines its number.
    for place, line in lines:
        row = line_columns(line, place)
        for name, value in row.items():
            if isinstance(value, str):
                row[name] = make_writable(value)
        rows.append(row)
        row_texts.append(make_writable(line.get("text") or ""))
        if len(rows) == LINES_AT_ONCE:
            texts.add(pa.array(row_texts, pa.string()))
            yield table_of(rows)
            rows, row_texts = [], []
    if rows:
        texts.add(pa.array(row_texts, pa.string()))
        yield table_of(rows)
