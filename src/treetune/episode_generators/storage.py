"""Trajectories and episodes as Arrow IPC streams: whole files or none, read back exactly."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from treetune.vocabulary import Branch, Episode, Grade, Problem, Segment, Stretch, Trajectory

if TYPE_CHECKING:
    import pyarrow as pa

    from treetune.vocabulary import TextCodec

Row = TypeVar("Row")

ROWS_PER_BATCH = 1024
"""Keeps an Arrow list column, whose offsets have 32 bits, far below 2**31 elements."""

_TUPLE = "tuple()"


def write_episodes(path: Path, episodes: Sequence[Episode], codec: TextCodec | None = None) -> None:
    """One column per field of Episode; with a codec also `prompt` (text) and `tokens` (the text of
    each response token), for readers who have no tokenizer."""
    import pyarrow as pa

    schema = _episode_schema()
    if codec is not None:
        schema = schema.append(pa.field("prompt", pa.string()))
        schema = schema.append(pa.field("tokens", pa.list_(pa.string())))
    _write(path, "episodes", schema, len(episodes), (_episode_row(e, codec) for e in episodes))


def read_episodes(path: Path) -> list[Episode]:
    """What `write_episodes` wrote. Raises ValueError for a file that is not whole or not of that
    kind, FileNotFoundError for none."""
    return _read(path, "episodes", _episode)


def write_trajectories(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """One column per field of Trajectory. Raises ValueError for problem data other than JSON's types
    and tuples of them."""
    rows = (_trajectory_row(trajectory) for trajectory in trajectories)
    _write(path, "trajectories", _trajectory_schema(), len(trajectories), rows)


def read_trajectories(path: Path) -> list[Trajectory]:
    """What `write_trajectories` wrote. Raises as `read_episodes` does."""
    return _read(path, "trajectories", _trajectory)


def _episode_schema() -> pa.Schema:
    import pyarrow as pa

    ids = pa.list_(pa.int32())
    numbers = pa.list_(pa.float64())
    return pa.schema(
        {
            "prompt_ids": ids,
            "response_ids": ids,
            "trained": pa.list_(pa.bool_()),
            "reward": pa.float64(),
            "group": pa.string(),
            "trajectory": pa.string(),
            "policy_version": pa.int64(),
            "finish_reason": pa.string(),
            "advantages": numbers,
            "behaviour_logprobs": numbers,
            "step_ends": ids,
            "step_values": numbers,
            "text": pa.string(),
            "pair": pa.int64(),
            "chosen": pa.bool_(),
            "score": pa.float64(),
            "stretches": pa.list_(pa.struct({"end": pa.int64(), "branch": _branch_type()})),
        }
    )


def _branch_type() -> pa.DataType:
    import pyarrow as pa

    return pa.list_(pa.list_(pa.int64()))


def _episode_row(episode: Episode, codec: TextCodec | None) -> dict[str, Any]:
    row = {field.name: getattr(episode, field.name) for field in fields(Episode)}
    row["stretches"] = [asdict(stretch) for stretch in episode.stretches]
    if codec is not None:
        row["prompt"] = codec.decode(episode.prompt_ids)
        row["tokens"] = [codec.decode([token]) for token in episode.response_ids]
    return row


def _episode(row: dict[str, Any]) -> Episode:
    # A file from before a field was there: what the field is by default.
    own = {field.name: _frozen(row[field.name]) for field in fields(Episode) if field.name in row}
    stretches = tuple(Stretch(one["end"], _branch(one["branch"])) for one in own.get("stretches", ()))
    return Episode(**own | {"stretches": stretches})


def _branch(rows: Sequence[Sequence[int]]) -> Branch:
    return tuple((block, thread) for block, thread in rows)


def _trajectory_schema() -> pa.Schema:
    import pyarrow as pa

    ids = pa.list_(pa.int32())
    text = pa.string()
    problem = {"id": text, "prompt": text, "gold": text, "data": text}
    grade = {
        "reward": pa.float64(),
        "outcome": text,
        "extracted": text,
        "seconds": pa.float64(),
        "message": text,
    }
    segment = {
        "token_ids": ids,
        "origin": text,
        "logprobs": pa.list_(pa.float64()),
        "policy_version": pa.int64(),
        "branch": _branch_type(),
        "seconds": pa.float64(),
    }
    return pa.schema(
        {
            "problem": pa.struct(problem),
            "sample": pa.int64(),
            "prompt_ids": ids,
            "segments": pa.list_(pa.struct(segment)),
            "finish_reason": text,
            "text": text,
            "grade": pa.struct(grade),
            "step_ends": ids,
            "bonus": pa.float64(),
            "numbers": pa.map_(text, pa.float64()),
        }
    )


def _trajectory_row(trajectory: Trajectory) -> dict[str, Any]:
    row = {field.name: getattr(trajectory, field.name) for field in fields(Trajectory)}
    problem = trajectory.problem
    row["problem"] = {
        "id": problem.id,
        "prompt": problem.prompt,
        "gold": problem.gold,
        "data": _json(problem),
    }
    row["segments"] = [asdict(segment) for segment in trajectory.segments]
    row["grade"] = asdict(trajectory.grade)
    return row


def _json(problem: Problem) -> str:
    try:
        return json.dumps(_marked(dict(problem.data)), ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"problem {problem.id!r} has data that can't be stored: {error}") from error


def _marked(value: Any) -> Any:
    """JSON's types, with tuples marked so that they come back as such; TypeError for all others."""
    if isinstance(value, dict):
        if _TUPLE in value or not all(isinstance(key, str) for key in value):
            raise TypeError(f"an object has keys other than texts, or the key {_TUPLE!r}")
        return {key: _marked(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return {_TUPLE: [_marked(inner) for inner in value]}
    if isinstance(value, list):
        return [_marked(inner) for inner in value]
    return value


def _unmarked(value: dict[str, Any]) -> Any:
    return tuple(value[_TUPLE]) if _TUPLE in value else value


def _trajectory(row: dict[str, Any]) -> Trajectory:
    problem = row["problem"]
    return Trajectory(
        problem=Problem(**problem | {"data": json.loads(problem["data"], object_hook=_unmarked)}),
        sample=row["sample"],
        prompt_ids=tuple(row["prompt_ids"]),
        segments=tuple(
            Segment(
                **{name: _frozen(value) for name, value in segment.items()}
                | {"branch": _branch(segment.get("branch", ()))}
            )
            for segment in row["segments"]
        ),
        finish_reason=row["finish_reason"],
        text=row["text"],
        grade=Grade(**row["grade"]),
        step_ends=tuple(row["step_ends"]),
        # A file from before there was shaping, or there were numbers.
        bonus=row.get("bonus", 0.0),
        numbers=dict(row.get("numbers") or ()),
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _write(path: Path, kind: str, schema: pa.Schema, count: int, rows: Iterable[Mapping[str, Any]]) -> None:
    """Beside, fsync, rename: a reader sees the whole file or none."""
    import pyarrow as pa

    # A stream that was cut between two batches looks whole to Arrow: the number of rows tells.
    schema = schema.with_metadata({"treetune": kind, "rows": str(count)})
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(beside, "wb") as file:
            with pa.ipc.new_stream(file, schema) as writer:
                for batch in _batches(rows):
                    writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _batches(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    batch: list[Mapping[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == ROWS_PER_BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _read(path: Path, kind: str, row_of: Callable[[dict[str, Any]], Row]) -> list[Row]:
    import pyarrow as pa

    with open(path, "rb") as file:
        try:
            with pa.ipc.open_stream(file) as reader:
                metadata = reader.schema.metadata or {}
                if metadata.get(b"treetune") != kind.encode():
                    raise ValueError(f"{path} holds no {kind}, but {metadata.get(b'treetune')!r}")
                rows = [row_of(row) for batch in reader for row in batch.to_pylist()]
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path} is not a whole Arrow file of {kind}: {error}") from error
    if len(rows) != int(metadata[b"rows"]):
        raise ValueError(
            f"{path} is cut short: {len(rows)} of {int(metadata[b'rows'])} {kind}; delete it and rerun"
        )
    return rows
