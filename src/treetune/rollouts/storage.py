"""Writes and reads sealed Arrow files of episodes, trajectories, signals of tokens and texts of tokens.

A file is an Arrow stream of batches of `ROWS_PER_BATCH` rows, with the kind and the number of rows in its
metadata, and a checksum after the end of the stream. It is written whole or not at all.
`treetune.rollouts.rows` converts rows to columns and back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from treetune.exceptions import Damaged
from treetune.rollouts.numbers import group_numbers
from treetune.store.checksums import SEALED_MARK, SealingFile, verify_once, verify_stream
from treetune.store.files import write_atomically
from treetune.vocabulary import Column, Columnar, Episode, Trajectory

if TYPE_CHECKING:
    import pyarrow as pa

    from treetune.vocabulary import TextCodec

T = TypeVar("T")
ToColumns = Callable[[Sequence[Any], "pa.Schema"], "list[pa.Array]"]
FromBatch = Callable[["pa.RecordBatch"], Iterator[T]]

ROWS_PER_BATCH = 1024
"""Keeps an Arrow list column, whose offsets have 32 bits, far below 2**31 elements."""

REMAKE_REMEDY = "delete it, and the same command makes it again from the iteration's journals"
"""The remedy for a damaged file of episodes or trajectories."""

TOKENS = "tokens.arrow"
"""In an experiment's folder: the text of every token by its id, for readers without a tokenizer."""

SIGNALS = "token_signals.arrow"
"""In an iteration's folder: the `TokenSignals` of its episodes, in the order of ``episodes.arrow``."""

SIGNALS_REMEDY = "delete it: nothing is trained on it"
"""The remedy for a damaged file of signals."""

# Episodes and trajectories


def write_episodes(
    path: Path, episodes: Sequence[Episode], codec: TextCodec | None = None, iteration: int | None = None
) -> None:
    """Writes episodes, with a column for each field of Episode. With a codec, there is also a column `prompt`
    with the texts of the prompts. The file's metadata has the `iteration`."""
    from treetune.rollouts.rows import episode_columns, episode_schema

    with _open_sealed(path) as file:
        schema = episode_schema(episodes, codec)
        _write_stream(file, "episodes", episodes, schema, partial(episode_columns, codec=codec), iteration)


def read_episodes(path: Path) -> list[Episode]:
    """Reads a file of `write_episodes`.

    Raises:
        ValueError: The file is cut short, changed, or of another kind.
        FileNotFoundError: There is no such file.
    """
    return list(StoredEpisodes(path))


class StoredEpisodes(Collection[Episode]):
    """The episodes in a file of `write_episodes`. Every loop over them reads the file again, so that they are
    never all in memory. The constructor and loops raise the same errors as `read_episodes`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            verify_stream(file, str(path), REMAKE_REMEDY)
            # Only the metadata is read here: the kind of the file, and the number of its rows.
            with _open_rows(file, str(path), "episodes", REMAKE_REMEDY) as (_, count):
                self._count = count

    @override
    def __len__(self) -> int:
        return self._count

    @override
    def __iter__(self) -> Iterator[Episode]:
        from treetune.rollouts.rows import episodes_of

        with self.path.open("rb") as file:
            yield from _read_stream(file, str(self.path), "episodes", episodes_of, REMAKE_REMEDY)

    @override
    def __contains__(self, episode: object) -> bool:
        return any(episode == other for other in self)


def write_trajectories(path: Path, trajectories: Sequence[Trajectory], iteration: int | None = None) -> None:
    """Writes trajectories, with a column for each field of Trajectory. The file's metadata has the
    `iteration`.

    Raises:
        ValueError: A problem's data has a value that is neither of a JSON type nor a tuple.
    """
    from treetune.rollouts.rows import trajectory_columns, trajectory_schema

    with _open_sealed(path) as file:
        schema = trajectory_schema(trajectories)
        _write_stream(file, "trajectories", trajectories, schema, trajectory_columns, iteration)


def refuse_another_iterations(path: Path, iteration: int) -> None:
    """Raises Damaged if a file of episodes or trajectories belongs to another iteration, by its metadata.

    Files of earlier versions have no iteration in their metadata, and are accepted.
    """
    import pyarrow as pa

    try:
        with path.open("rb") as file, pa.ipc.open_stream(file) as reader:
            iteration_of_file = (reader.schema.metadata or {}).get(b"iteration")
    except (pa.ArrowException, OSError):
        return  # reading it will raise with the reason
    if iteration_of_file is not None and int(iteration_of_file) != iteration:
        raise Damaged(
            f"{path} is of iteration {int(iteration_of_file) + 1} and lies in the folder of iteration"
            f" {iteration + 1}: put the folders back as they were, or delete this file, and the same command"
            " makes it again"
        )


def read_trajectories(path: Path) -> list[Trajectory]:
    """Reads a file of `write_trajectories`. Raises as `read_episodes` does."""
    from treetune.rollouts.rows import trajectories_of

    return _read_file(path, "trajectories", trajectories_of, REMAKE_REMEDY)


def episodes_to_bytes(episodes: Sequence[Episode]) -> bytes:
    """Returns the episodes as a stream of bytes, as ranks send them to each other."""
    import pyarrow as pa

    from treetune.rollouts.rows import episode_columns, episode_schema

    sink = pa.BufferOutputStream()
    _write_stream(sink, "episodes", episodes, episode_schema(episodes, codec=None), episode_columns)
    return sink.getvalue().to_pybytes()


def episodes_from_bytes(data: bytes) -> list[Episode]:
    """Reads the bytes of `episodes_to_bytes`."""
    from treetune.rollouts.rows import episodes_of

    return list(_read_stream(data, "what a rank sent", "episodes", episodes_of))


def trajectories_to_bytes(trajectories: Sequence[Trajectory]) -> bytes:
    """Returns the trajectories as a stream of bytes, as ranks send them to each other."""
    import pyarrow as pa

    from treetune.rollouts.rows import trajectory_columns, trajectory_schema

    sink = pa.BufferOutputStream()
    _write_stream(sink, "trajectories", trajectories, trajectory_schema(trajectories), trajectory_columns)
    return sink.getvalue().to_pybytes()


def trajectories_from_bytes(data: bytes) -> list[Trajectory]:
    """Reads the bytes of `trajectories_to_bytes`."""
    from treetune.rollouts.rows import trajectories_of

    return list(_read_stream(data, "what a rank sent", "trajectories", trajectories_of))


def answer_row(trajectory: Trajectory) -> dict[str, Any]:
    """Returns an answer as a row of an evaluation's ``answers.jsonl``.

    The row has ``domain`` and ``grade`` (the grader's numbers) only if they are not empty, and ``message``
    only if the answer could not be graded.
    """
    return {
        "problem": trajectory.problem.id,
        "sample": trajectory.sample,
        **({"domain": trajectory.problem.domain} if trajectory.problem.domain else {}),
        "prompt": trajectory.problem.prompt,
        "gold": trajectory.problem.gold,
        "text": trajectory.text,
        "reward": trajectory.reward if trajectory.grade.is_known else None,
        "outcome": trajectory.grade.outcome,
        "extracted": trajectory.grade.extracted,
        "finish_reason": trajectory.finish_reason,
        "tokens": len(trajectory.response_ids),
        **({"message": trajectory.grade.message} if not trajectory.grade.is_known else {}),
        **({"grade": dict(trajectory.grade.numbers)} if trajectory.grade.numbers else {}),
        **group_numbers(trajectory.numbers),  # {"g/x": 1.0} -> {"g": {"x": 1.0}}
    }


# Signals and texts of tokens


@dataclass(frozen=True, eq=False)
class TokenSignals(Columnar):
    """The trainer's numbers about one episode: a float32 for each of its trained tokens, in their order.

    A number that the trainer doesn't have is NaN. Unless a field says otherwise, the numbers are of the
    policy before the iteration's first update.
    """

    trajectory: str
    logprobs: Column
    """The policy's log-probs at the rollout's temperature, without `top_p` and `top_k`."""
    entropies: Column
    """The policy's entropies in nats, of the same distributions."""
    gaps: Column | None = None
    """The trainer's log-probs minus the engine's, both under the distributions that were sampled from; None
    if the engine gave no log-probs."""
    log_ratios: Column | None = None
    """The policy's log-probs at the last optimiser step that trained a token, minus those before the first
    step. None if the iteration has a single step, since all differences are then 0."""
    ref_logprobs: Column | None = None
    """The log-probs under the reference model, at the same temperature as `logprobs`; None if training has no
    reference model."""


SIGNAL_NAMES = ("logprobs", "entropies", "gaps", "log_ratios", "ref_logprobs")


def write_token_signals(path: Path, rows: Sequence[TokenSignals]) -> None:
    """Writes one column per field of TokenSignals.

    Before compression, a trained token takes at most 20 bytes: a float32 in each of the five columns
    `SIGNAL_NAMES`.
    """
    import pyarrow as pa

    from treetune.rollouts.rows import list_column

    list_of_floats = pa.list_(pa.float32())

    def signal_columns(rows: Sequence[TokenSignals], schema: pa.Schema) -> list[pa.Array]:
        columns = [pa.array([row.trajectory for row in rows], pa.string())]
        for name in SIGNAL_NAMES:
            columns.append(list_column([getattr(row, name) for row in rows], list_of_floats))
        return columns

    schema = pa.schema({"trajectory": pa.string(), **dict.fromkeys(SIGNAL_NAMES, list_of_floats)})
    with _open_sealed(path) as file:
        _write_stream(file, "token signals", rows, schema, signal_columns)


def read_token_signals(path: Path) -> list[TokenSignals]:
    """Reads a file of `write_token_signals`. Raises as `read_episodes` does."""
    return _read_file(path, "token signals", signals_of, SIGNALS_REMEDY)


def signals_of(batch: pa.RecordBatch) -> Iterator[TokenSignals]:
    """Yields the rows of a batch of a file that `write_token_signals` has written."""
    from treetune.rollouts.rows import rows_of

    # Files of earlier versions lack the last column (`ref_logprobs`), or the last two (`log_ratios`, too).
    columns = (rows_of(batch[name]) for name in SIGNAL_NAMES if name in batch.schema.names)
    rows = zip(batch["trajectory"].to_pylist(), *columns, strict=True)
    for trajectory, logprobs, entropies, *optional_signals in rows:
        assert logprobs is not None and entropies is not None, "these columns have no null"
        yield TokenSignals(trajectory, logprobs, entropies, *optional_signals)


def write_tokens(path: Path, codec: TextCodec, count: int) -> None:
    """Writes the texts of the tokens 0 to `count` - 1; special tokens have an empty text."""
    import pyarrow as pa

    texts = pa.array([codec.decode([token]) for token in range(count)], pa.string())
    # `SEALED_MARK` announces that the file has a checksum after its Arrow stream.
    table = pa.table({"text": texts}, metadata={SEALED_MARK: ""})
    with _open_sealed(path) as file:
        _write_batches(file, table.schema, table.to_batches())


def read_tokens(path: Path) -> list[str]:
    """Reads a file of `write_tokens`. Raises ValueError for a file that was changed."""
    import pyarrow as pa

    verify_once(path, "delete it, and the same command writes it again")
    with path.open("rb") as file, _open_reader(file, str(path), "tokens") as reader:
        try:
            table = reader.read_all()
        except MemoryError as error:  # a damaged file may have any sizes in it
            raise ValueError(f"{path} claims to be larger than memory") from error
        # `verify_once` has checked the checksum, but files of earlier versions have none.
        table.validate(full=True)
    if table.schema.names != ["text"] or table.schema.types != [pa.string()]:
        raise ValueError(f"{path} holds no texts of tokens")
    return table["text"].to_pylist()


# Streams


@contextmanager
def _open_sealed(path: Path) -> Iterator[SealingFile]:
    """Opens a file for writing. It is written whole or not at all.

    At the end, a checksum is put after the Arrow stream: readers of Arrow stop at the stream's end, so it
    doesn't disturb them.
    """
    with write_atomically(path, "wb") as file:
        sealing = SealingFile(file)
        yield sealing
        sealing.seal()


def _write_stream(
    sink: Any,
    content: str,
    rows: Sequence[Any],
    schema: pa.Schema,
    columns: ToColumns,
    iteration: int | None = None,
) -> None:
    """Writes rows of a kind, such as "episodes", as an Arrow stream.

    Args:
        columns: Makes the columns of a batch of rows.
    """
    import pyarrow as pa

    # A stream that was cut between two batches looks complete to Arrow, so the stream's metadata has the
    # number of rows. `SEALED_MARK` announces that a file has a checksum after the stream.
    stream_metadata: dict[str | bytes, str] = {"treetune": content, "rows": str(len(rows)), SEALED_MARK: ""}
    if iteration is not None:
        stream_metadata["iteration"] = str(iteration)
    schema = schema.with_metadata(stream_metadata)
    starts = range(0, len(rows), ROWS_PER_BATCH)

    def batches() -> Iterator[pa.RecordBatch]:
        for start in starts:
            arrays = columns(rows[start : start + ROWS_PER_BATCH], schema)
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    _write_batches(sink, schema, batches())


def _write_batches(sink: Any, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Writes batches as a compressed Arrow stream."""
    import pyarrow as pa

    # Masks need almost no space when they are compressed. The same holds for advantages that are equal for
    # all tokens of a step.
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _read_file(path: Path, content: str, parse: FromBatch[T], remedy: str) -> list[T]:
    with path.open("rb") as file:
        verify_stream(file, str(path), remedy)
        return list(_read_stream(file, str(path), content, parse, remedy))


def _read_stream(source: Any, name: str, content: str, parse: FromBatch[T], remedy: str = "") -> Iterator[T]:
    """Yields the rows of a stream.

    Raises ValueError for a stream that is damaged, of another kind, or cut short. It may already have yielded
    rows by then.
    """
    rows_read = 0
    with _open_rows(source, name, content, remedy) as (reader, count):
        for batch in reader:
            batch.validate(full=True)  # files of earlier versions have no checksum
            rows_read += batch.num_rows
            yield from parse(batch)
    if rows_read != count:
        message = f"{name} is cut short: {rows_read} of {count} {content}"
        raise ValueError(f"{message}; {remedy}" if remedy else message)


@contextmanager
def _open_rows(source: Any, name: str, content: str, remedy: str) -> Iterator[tuple[Any, int]]:
    """Opens a stream of rows, and yields its reader and the number of its rows. Raises ValueError for a
    stream of another kind."""
    with _open_reader(source, name, content, remedy) as reader:
        metadata = reader.schema.metadata or {}
        kind = metadata.get(b"treetune")
        if kind != content.encode():
            raise ValueError(f"{name} holds no {content}, but {kind!r}")
        yield reader, int(metadata[b"rows"])


@contextmanager
def _open_reader(source: Any, name: str, content: str, remedy: str = "") -> Iterator[Any]:
    """Opens an Arrow stream. Errors of Arrow within the block become ValueErrors that name the file."""
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(source) as reader:
            yield reader
    except (pa.ArrowException, OSError) as error:  # Arrow also raises OSError for a stream that is cut short
        message = f"{name} is not a whole Arrow file of {content} ({error})"
        raise ValueError(f"{message}; {remedy}" if remedy else message) from error
