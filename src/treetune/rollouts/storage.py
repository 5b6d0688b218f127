"""Episodes, trajectories, signals of tokens and texts of tokens in sealed Arrow files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from treetune.store.checksums import SEALED, SealingFile, verify_once, verify_stream
from treetune.store.files import whole_file
from treetune.vocabulary import Column, Columnar, Episode, Trajectory

if TYPE_CHECKING:
    import pyarrow as pa

    from treetune.vocabulary import TextCodec

Row = TypeVar("Row")

ROWS_PER_BATCH = 1024
"""Keeps an Arrow list column, whose offsets have 32 bits, far below 2**31 elements."""

REMEDY = "delete it, and the same command makes it again from the iteration's journals"

_AGAIN = f"; {REMEDY}"

TOKENS = "tokens.arrow"
"""In an experiment's folder: the text of every token by its id, for readers who have no tokenizer."""


def write_episodes(path: Path, episodes: Sequence[Episode], codec: TextCodec | None = None) -> None:
    """One column per field of Episode; with a codec also `prompt`, its text."""
    with _sealed(path) as file:
        _stream_episodes(file, episodes, codec)


def read_episodes(path: Path) -> list[Episode]:
    """What `write_episodes` wrote. Raises ValueError for a file that is not whole, not as it was written or
    not of that kind, FileNotFoundError for none."""
    from treetune.rollouts.rows import episodes_of

    return read_rows(path, "episodes", episodes_of, REMEDY)


class StoredEpisodes(Collection[Episode]):
    """A file of `write_episodes`, read anew whenever somebody goes through it, so that nobody has all of it
    at once. Raises as `read_episodes` does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            verify_stream(file, str(path), REMEDY)
            self._count = _count_of(file, str(path), "episodes", _AGAIN)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Episode]:
        from treetune.rollouts.rows import episodes_of

        with self.path.open("rb") as file:
            yield from _rows_in_turn(file, str(self.path), "episodes", episodes_of, _AGAIN)

    def __contains__(self, one: object) -> bool:
        return any(one == other for other in self)


def write_trajectories(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """One column per field of Trajectory. Raises ValueError for problem data other than JSON's types
    and tuples of them."""
    with _sealed(path) as file:
        _stream_trajectories(file, trajectories)


def read_trajectories(path: Path) -> list[Trajectory]:
    """What `write_trajectories` wrote. Raises as `read_episodes` does."""
    from treetune.rollouts.rows import trajectories_of

    return read_rows(path, "trajectories", trajectories_of, REMEDY)


def episodes_to_bytes(episodes: Sequence[Episode]) -> bytes:
    """As a file has them."""
    return _bytes_of(lambda sink: _stream_episodes(sink, episodes, None))


def episodes_from_bytes(data: bytes) -> list[Episode]:
    from treetune.rollouts.rows import episodes_of

    return _rows(data, "what a rank sent", "episodes", episodes_of)


def trajectories_to_bytes(trajectories: Sequence[Trajectory]) -> bytes:
    """As a file has them."""
    return _bytes_of(lambda sink: _stream_trajectories(sink, trajectories))


def trajectories_from_bytes(data: bytes) -> list[Trajectory]:
    from treetune.rollouts.rows import trajectories_of

    return _rows(data, "what a rank sent", "trajectories", trajectories_of)


def write_rows(
    path: Path,
    kind: str,
    rows: Sequence[Row],
    schema: pa.Schema,
    columns: Callable[[Sequence[Row], pa.Schema], list[pa.Array]],
) -> None:
    """A sealed file of rows of any `kind`, in batches, which `columns` makes."""
    counted = _counted(schema, kind, rows)
    with _sealed(path) as file:
        _stream(file, counted, _batches(counted, rows, columns))


def read_rows(
    path: Path, kind: str, rows_of: Callable[[pa.RecordBatch], Iterator[Row]], remedy: str
) -> list[Row]:
    """What `write_rows` wrote. Raises as `read_episodes` does."""
    with path.open("rb") as file:
        verify_stream(file, str(path), remedy)
        return _rows(file, str(path), kind, rows_of, f"; {remedy}")


def write_tokens(path: Path, codec: TextCodec, count: int) -> None:
    """The text of the tokens 0 to `count` - 1, special ones as nothing."""
    import pyarrow as pa

    texts = pa.array([codec.decode([token]) for token in range(count)], pa.string())
    table = pa.table({"text": texts}, metadata={SEALED: ""})
    with _sealed(path) as file:
        _stream(file, table.schema, table.to_batches())


def read_tokens(path: Path) -> list[str]:
    """What `write_tokens` wrote. Raises ValueError for a file that isn't as it was written."""
    import pyarrow as pa

    verify_once(path, "delete it, and the same command writes it again")
    with path.open("rb") as file, _reading(file, str(path), "tokens", "") as reader:
        try:
            table = reader.read_all()
        except MemoryError as error:
            raise ValueError(f"{path} says that it is larger than memory") from error
        table.validate(full=True)  # of an earlier version, without a checksum
    if table.schema.names != ["text"] or table.schema.types != [pa.string()]:
        raise ValueError(f"{path} holds no texts of tokens")
    return table["text"].to_pylist()


# Streams


@contextmanager
def _sealed(path: Path) -> Iterator[SealingFile]:
    """A whole file with a checksum behind the end of its stream, where readers of Arrow don't look."""
    with whole_file(path, "wb") as file:
        sealing = SealingFile(file)
        yield sealing
        sealing.seal()


def _stream_episodes(sink: Any, episodes: Sequence[Episode], codec: TextCodec | None) -> None:
    from treetune.rollouts.rows import episode_columns, episode_schema

    schema = _counted(episode_schema(episodes, codec), "episodes", episodes)
    _stream(sink, schema, _batches(schema, episodes, episode_columns(codec)))


def _stream_trajectories(sink: Any, trajectories: Sequence[Trajectory]) -> None:
    from treetune.rollouts.rows import trajectory_columns, trajectory_schema

    schema = _counted(trajectory_schema(trajectories), "trajectories", trajectories)
    _stream(sink, schema, _batches(schema, trajectories, trajectory_columns))


def _bytes_of(stream: Callable[[Any], None]) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    stream(sink)
    return sink.getvalue().to_pybytes()


def _counted(schema: pa.Schema, kind: str, rows: Sequence[Any]) -> pa.Schema:
    # A stream that was cut between two batches looks whole to Arrow: the number of rows tells.
    return schema.with_metadata({"treetune": kind, "rows": str(len(rows)), SEALED: ""})


def _stream(sink: Any, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    import pyarrow as pa

    # A mask, or advantages that are the same all through a step, then take next to nothing.
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _batches(
    schema: pa.Schema, rows: Sequence[Row], columns: Callable[[Sequence[Row], pa.Schema], list[pa.Array]]
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for start in range(0, len(rows), ROWS_PER_BATCH):
        own = columns(rows[start : start + ROWS_PER_BATCH], schema)
        yield pa.RecordBatch.from_arrays(own, schema=schema)


def _rows(
    source: Any,
    name: str,
    kind: str,
    rows_of: Callable[[pa.RecordBatch], Iterator[Row]],
    remedy: str = "",
) -> list[Row]:
    return list(_rows_in_turn(source, name, kind, rows_of, remedy))


def _rows_in_turn(
    source: Any, name: str, kind: str, rows_of: Callable[[pa.RecordBatch], Iterator[Row]], remedy: str
) -> Iterator[Row]:
    found = 0
    with _reading(source, name, kind, remedy) as reader:
        count = _rows_said(reader, name, kind)
        for batch in reader:
            batch.validate(full=True)  # of an earlier version, without a checksum
            found += batch.num_rows
            yield from rows_of(batch)
    if found != count:
        raise ValueError(f"{name} is cut short: {found} of {count} {kind}{remedy}")


def _count_of(source: Any, name: str, kind: str, remedy: str) -> int:
    with _reading(source, name, kind, remedy) as reader:
        return _rows_said(reader, name, kind)


@contextmanager
def _reading(source: Any, name: str, kind: str, remedy: str) -> Iterator[Any]:
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(source) as reader:
            yield reader
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{name} is not a whole Arrow file of {kind} ({error}){remedy}") from error


def _rows_said(reader: Any, name: str, kind: str) -> int:
    metadata = reader.schema.metadata or {}
    if metadata.get(b"treetune") != kind.encode():
        raise ValueError(f"{name} holds no {kind}, but {metadata.get(b'treetune')!r}")
    return int(metadata[b"rows"])


SIGNALS = "token_signals.arrow"
"""In an iteration's folder. Row i is of episode i of ``episodes.arrow``."""

SIGNALS_REMEDY = "delete it: nothing is trained on it"


@dataclass(frozen=True, eq=False)
class TokenSignals(Columnar):
    """Of one episode: float32 for each of its trained tokens, in their order; NaN where the trainer does not
    know.

    `logprobs` and `entropies` (nats) are the policy's before the iteration's first update, of the whole
    distribution at the rollout's temperature. `gaps` are the trainer's log-probs minus the engine's, both of
    what was sampled from; None where the engine's are not there.
    """

    trajectory: str
    logprobs: Column
    entropies: Column
    gaps: Column | None


def write_token_signals(path: Path, rows: Sequence[TokenSignals]) -> None:
    """One column per field: at most 12 bytes for each trained token, before compression."""
    from treetune.rollouts.storage import write_rows

    write_rows(path, "token signals", rows, _schema(), _columns)


def read_token_signals(path: Path) -> list[TokenSignals]:
    """What `write_token_signals` wrote. Raises as `read_episodes` does."""
    from treetune.rollouts.storage import read_rows

    return read_rows(path, "token signals", signals_of, SIGNALS_REMEDY)


def signals_of(batch: pa.RecordBatch) -> Iterator[TokenSignals]:
    from treetune.rollouts.rows import rows_of

    numbers = (rows_of(batch[name]) for name in ("logprobs", "entropies", "gaps"))
    for trajectory, logprobs, entropies, gaps in zip(batch["trajectory"].to_pylist(), *numbers, strict=True):
        assert logprobs is not None and entropies is not None, "these columns have no null"
        yield TokenSignals(trajectory, logprobs, entropies, gaps)


def _schema() -> pa.Schema:
    import pyarrow as pa

    numbers = pa.list_(pa.float32())
    return pa.schema({"trajectory": pa.string(), "logprobs": numbers, "entropies": numbers, "gaps": numbers})


def _columns(rows: Sequence[TokenSignals], schema: pa.Schema) -> list[pa.Array]:
    import pyarrow as pa

    from treetune.rollouts.rows import lists

    names = [field.name for field in schema if field.name != "trajectory"]
    own = [lists([getattr(row, name) for row in rows], schema.field(name).type) for name in names]
    return [pa.array([row.trajectory for row in rows], pa.string()), *own]
