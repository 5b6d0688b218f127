"""Episodes, trajectories, signals of tokens and texts of tokens in sealed Arrow files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from treetune.exceptions import Damaged
from treetune.rollouts.numbers import by_group
from treetune.store.checksums import SEALED, SealingFile, verify_once, verify_stream
from treetune.store.files import whole_file
from treetune.vocabulary import Column, Columnar, Episode, Trajectory

if TYPE_CHECKING:
    import pyarrow as pa

    from treetune.vocabulary import TextCodec

Row = TypeVar("Row")
ToColumns = Callable[[Sequence[Any], "pa.Schema"], "list[pa.Array]"]
FromBatch = Callable[["pa.RecordBatch"], Iterator[Row]]

ROWS_PER_BATCH = 1024
"""Keeps an Arrow list column, whose offsets have 32 bits, far below 2**31 elements."""

REMEDY = "delete it, and the same command makes it again from the iteration's journals"

TOKENS = "tokens.arrow"
"""In an experiment's folder: the text of every token by its id, for readers who have no tokenizer."""

SIGNALS = "token_signals.arrow"
"""In an iteration's folder: the `TokenSignals` of its episodes, in the order of ``episodes.arrow``."""

SIGNALS_REMEDY = "delete it: nothing is trained on it"

# Episodes and trajectories


def write_episodes(
    path: Path, episodes: Sequence[Episode], codec: TextCodec | None = None, iteration: int | None = None
) -> None:
    """Writes one column per field of Episode; with a codec also `prompt`, its text. The file says of which
    `iteration` it is."""
    from treetune.rollouts.rows import episode_columns, episode_schema

    with _sealed(path) as file:
        schema = episode_schema(episodes, codec)
        _write_stream(file, "episodes", episodes, schema, episode_columns(codec), iteration)


def read_episodes(path: Path) -> list[Episode]:
    """Reads what `write_episodes` wrote. Raises ValueError for a file that is not whole, not as it was
    written or not of that kind, FileNotFoundError for none."""
    return list(StoredEpisodes(path))


class StoredEpisodes(Collection[Episode]):
    """A file of `write_episodes`, read anew by every loop over it, so that nobody has all of it at once.
    Raises as `read_episodes` does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            verify_stream(file, str(path), REMEDY)
            with _stream(file, str(path), "episodes", REMEDY) as (_, self._count):
                pass

    @override
    def __len__(self) -> int:
        return self._count

    @override
    def __iter__(self) -> Iterator[Episode]:
        from treetune.rollouts.rows import episodes_of

        with self.path.open("rb") as file:
            yield from _read_stream(file, str(self.path), "episodes", episodes_of, REMEDY)

    @override
    def __contains__(self, episode: object) -> bool:
        return any(episode == other for other in self)


def write_trajectories(path: Path, trajectories: Sequence[Trajectory], iteration: int | None = None) -> None:
    """Writes one column per field of Trajectory; the file says of which `iteration` it is. Raises ValueError
    for problem data other than JSON's types and tuples of them."""
    from treetune.rollouts.rows import trajectory_columns, trajectory_schema

    with _sealed(path) as file:
        schema = trajectory_schema(trajectories)
        _write_stream(file, "trajectories", trajectories, schema, trajectory_columns, iteration)


def refuse_another_iterations(path: Path, iteration: int) -> None:
    """Raises Damaged where a stream says of itself that another iteration wrote it. Files of earlier versions
    don't say it."""
    import pyarrow as pa

    try:
        with path.open("rb") as file, pa.ipc.open_stream(file) as reader:
            written = (reader.schema.metadata or {}).get(b"iteration")
    except (pa.ArrowException, OSError):
        return  # whoever reads it says what is wrong with it
    if written is not None and int(written) != iteration:
        raise Damaged(
            f"{path} is of iteration {int(written) + 1} and lies in the folder of iteration {iteration + 1}:"
            " put the folders back as they were, or delete this file, and the same command makes it again"
        )


def read_trajectories(path: Path) -> list[Trajectory]:
    """Reads what `write_trajectories` wrote. Raises as `read_episodes` does."""
    from treetune.rollouts.rows import trajectories_of

    return _read_file(path, "trajectories", trajectories_of, REMEDY)


def episodes_to_bytes(episodes: Sequence[Episode]) -> bytes:
    """Returns what a file of `write_episodes` holds."""
    import pyarrow as pa

    from treetune.rollouts.rows import episode_columns, episode_schema

    sink = pa.BufferOutputStream()
    _write_stream(sink, "episodes", episodes, episode_schema(episodes, None), episode_columns(None))
    return sink.getvalue().to_pybytes()


def episodes_from_bytes(data: bytes) -> list[Episode]:
    from treetune.rollouts.rows import episodes_of

    return list(_read_stream(data, "what a rank sent", "episodes", episodes_of))


def trajectories_to_bytes(trajectories: Sequence[Trajectory]) -> bytes:
    """Returns what a file of `write_trajectories` holds."""
    import pyarrow as pa

    from treetune.rollouts.rows import trajectory_columns, trajectory_schema

    sink = pa.BufferOutputStream()
    _write_stream(sink, "trajectories", trajectories, trajectory_schema(trajectories), trajectory_columns)
    return sink.getvalue().to_pybytes()


def trajectories_from_bytes(data: bytes) -> list[Trajectory]:
    from treetune.rollouts.rows import trajectories_of

    return list(_read_stream(data, "what a rank sent", "trajectories", trajectories_of))


def answer_row(trajectory: Trajectory) -> dict[str, Any]:
    """Returns an answer as a line of an evaluation's ``answers.jsonl``."""
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
        **by_group(trajectory.numbers),
    }


# Signals and texts of tokens


@dataclass(frozen=True, eq=False)
class TokenSignals(Columnar):
    """The trainer's numbers of one episode, of the policy before the iteration's first update: float32 for
    each of its trained tokens, in their order; NaN where the trainer does not know."""

    trajectory: str
    logprobs: Column
    """The policy's log-probs, of the whole distribution at the rollout's temperature."""
    entropies: Column
    """The policy's entropies in nats, of the same distribution."""
    gaps: Column | None = None
    """The trainer's log-probs minus the engine's, both of what was sampled from; None without these."""
    log_ratios: Column | None = None
    """The policy's log-probs at the step that a token trained in last minus those before the first; None
    where the iteration takes a single step, in which they are 0."""


NUMBERS = ("logprobs", "entropies", "gaps", "log_ratios")


def write_token_signals(path: Path, rows: Sequence[TokenSignals]) -> None:
    """Writes one column per field: at most 16 bytes for each trained token, before compression."""
    import pyarrow as pa

    from treetune.rollouts.rows import lists

    numbers = pa.list_(pa.float32())

    def columns(rows: Sequence[TokenSignals], schema: pa.Schema) -> list[pa.Array]:
        trajectories = pa.array([row.trajectory for row in rows], pa.string())
        return [trajectories, *(lists([getattr(row, name) for row in rows], numbers) for name in NUMBERS)]

    schema = pa.schema({"trajectory": pa.string(), **dict.fromkeys(NUMBERS, numbers)})
    with _sealed(path) as file:
        _write_stream(file, "token signals", rows, schema, columns)


def read_token_signals(path: Path) -> list[TokenSignals]:
    """Reads what `write_token_signals` wrote. Raises as `read_episodes` does."""
    return _read_file(path, "token signals", signals_of, SIGNALS_REMEDY)


def signals_of(batch: pa.RecordBatch) -> Iterator[TokenSignals]:
    """Yields the rows of a batch of such a file."""
    from treetune.rollouts.rows import rows_of

    # Files from before log-ratios were written lack these.
    numbers = (rows_of(batch[name]) for name in NUMBERS if name in batch.schema.names)
    for trajectory, logprobs, entropies, *more in zip(batch["trajectory"].to_pylist(), *numbers, strict=True):
        assert logprobs is not None and entropies is not None, "these columns have no null"
        yield TokenSignals(trajectory, logprobs, entropies, *more)


def write_tokens(path: Path, codec: TextCodec, count: int) -> None:
    """Writes the text of the tokens 0 to `count` - 1, special ones as nothing."""
    import pyarrow as pa

    texts = pa.array([codec.decode([token]) for token in range(count)], pa.string())
    table = pa.table({"text": texts}, metadata={SEALED: ""})
    with _sealed(path) as file:
        _write_batches(file, table.schema, table.to_batches())


def read_tokens(path: Path) -> list[str]:
    """Reads what `write_tokens` wrote. Raises ValueError for a file that isn't as it was written."""
    import pyarrow as pa

    verify_once(path, "delete it, and the same command writes it again")
    with path.open("rb") as file, _reader(file, str(path), "tokens", "") as reader:
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
    """Opens a whole file with a checksum behind the end of its stream, where readers of Arrow don't look."""
    with whole_file(path, "wb") as file:
        sealing = SealingFile(file)
        yield sealing
        sealing.seal()


def _write_stream(
    sink: Any,
    kind: str,
    rows: Sequence[Any],
    schema: pa.Schema,
    columns: ToColumns,
    iteration: int | None = None,
) -> None:
    import pyarrow as pa

    # A stream that was cut between two batches looks whole to Arrow: the number of rows tells.
    about: dict[str | bytes, str] = {"treetune": kind, "rows": str(len(rows)), SEALED: ""}
    if iteration is not None:
        about["iteration"] = str(iteration)
    schema = schema.with_metadata(about)
    starts = range(0, len(rows), ROWS_PER_BATCH)
    batches = (columns(rows[start : start + ROWS_PER_BATCH], schema) for start in starts)
    _write_batches(sink, schema, (pa.RecordBatch.from_arrays(batch, schema=schema) for batch in batches))


def _write_batches(sink: Any, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    import pyarrow as pa

    # A mask, or advantages that are the same all through a step, then take next to nothing.
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _read_file(path: Path, kind: str, parse: FromBatch[Row], remedy: str) -> list[Row]:
    with path.open("rb") as file:
        verify_stream(file, str(path), remedy)
        return list(_read_stream(file, str(path), kind, parse, remedy))


def _read_stream(source: Any, name: str, kind: str, parse: FromBatch[Row], remedy: str = "") -> Iterator[Row]:
    seen = 0
    with _stream(source, name, kind, remedy) as (reader, count):
        for batch in reader:
            batch.validate(full=True)  # of an earlier version, without a checksum
            seen += batch.num_rows
            yield from parse(batch)
    if seen != count:
        raise ValueError(f"{name} is cut short: {seen} of {count} {kind}" + (f"; {remedy}" if remedy else ""))


@contextmanager
def _stream(source: Any, name: str, kind: str, remedy: str) -> Iterator[tuple[Any, int]]:
    """Opens a stream of rows of that kind, with their number."""
    with _reader(source, name, kind, remedy) as reader:
        metadata = reader.schema.metadata or {}
        if metadata.get(b"treetune") != kind.encode():
            raise ValueError(f"{name} holds no {kind}, but {metadata.get(b'treetune')!r}")
        yield reader, int(metadata[b"rows"])


@contextmanager
def _reader(source: Any, name: str, kind: str, remedy: str) -> Iterator[Any]:
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(source) as reader:
            yield reader
    except (pa.ArrowException, OSError) as error:
        because = f"{name} is not a whole Arrow file of {kind} ({error})"
        raise ValueError(f"{because}; {remedy}" if remedy else because) from error
