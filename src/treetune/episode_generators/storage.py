"""Trajectories and episodes as Arrow IPC streams: whole files or none, read back exactly.

Also in memory, for what the ranks of a run hand each other. No file has the text of single tokens: whoever
shows them looks it up in the experiment's `TOKENS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from treetune.files import whole_file
from treetune.vocabulary import Episode, Grade, Problem, Segment, Stretch, Trajectory

if TYPE_CHECKING:
    import pyarrow as pa

    from treetune.vocabulary import TextCodec

Row = TypeVar("Row")

ROWS_PER_BATCH = 1024
"""Keeps an Arrow list column, whose offsets have 32 bits, far below 2**31 elements."""

TOKENS = "tokens.arrow"
"""In an experiment's folder: the text of every token by its id, for readers who have no tokenizer."""

_TUPLE = "tuple()"


def write_episodes(path: Path, episodes: Sequence[Episode], codec: TextCodec | None = None) -> None:
    """One column per field of Episode; with a codec also `prompt`, its text."""
    _write(path, "episodes", _episode_schema(episodes, codec), episodes, _episode_columns(codec))


def read_episodes(path: Path) -> list[Episode]:
    """What `write_episodes` wrote. Raises ValueError for a file that is not whole or not of that
    kind, FileNotFoundError for none."""
    return _read(path, "episodes", _episodes)


def write_trajectories(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """One column per field of Trajectory. Raises ValueError for problem data other than JSON's types
    and tuples of them."""
    _write(path, "trajectories", _trajectory_schema(trajectories), trajectories, _trajectory_columns)


def read_trajectories(path: Path) -> list[Trajectory]:
    """What `write_trajectories` wrote. Raises as `read_episodes` does."""
    return _read(path, "trajectories", _trajectories)


def episodes_to_bytes(episodes: Sequence[Episode]) -> bytes:
    """As a file has them."""
    return _to_bytes("episodes", _episode_schema(episodes, None), episodes, _episode_columns(None))


def episodes_from_bytes(data: bytes) -> list[Episode]:
    return _from_bytes(data, "episodes", _episodes)


def trajectories_to_bytes(trajectories: Sequence[Trajectory]) -> bytes:
    """As a file has them."""
    return _to_bytes("trajectories", _trajectory_schema(trajectories), trajectories, _trajectory_columns)


def trajectories_from_bytes(data: bytes) -> list[Trajectory]:
    return _from_bytes(data, "trajectories", _trajectories)


def write_tokens(path: Path, codec: TextCodec, count: int) -> None:
    """The text of the tokens 0 to `count` - 1, special ones as nothing."""
    import pyarrow as pa

    texts = pa.array([codec.decode([token]) for token in range(count)], pa.string())
    table = pa.table({"text": texts})
    with whole_file(path, "wb") as file:
        _stream(file, table.schema, table.to_batches())


def read_tokens(path: Path) -> list[str]:
    """What `write_tokens` wrote."""
    import pyarrow as pa

    with path.open("rb") as file, pa.ipc.open_stream(file) as reader:
        return reader.read_all()["text"].to_pylist()


def _episode_schema(episodes: Sequence[Episode], codec: TextCodec | None) -> pa.Schema:
    import pyarrow as pa

    from treetune.episode_generators.columns import BRANCH, IDS, MASK, NUMBERS, logprobs_type

    schema = pa.schema(
        {
            "prompt_ids": IDS,
            "response_ids": IDS,
            "trained": MASK,
            "reward": pa.float64(),
            "group": pa.string(),
            "trajectory": pa.string(),
            "policy_version": pa.int64(),
            "finish_reason": pa.string(),
            "advantages": NUMBERS,
            "behaviour_logprobs": logprobs_type([e.behaviour_logprobs for e in episodes]),
            "step_ends": IDS,
            "step_values": NUMBERS,
            "text": pa.string(),
            "pair": pa.int64(),
            "chosen": pa.bool_(),
            "score": pa.float64(),
            "stretches": pa.list_(pa.struct({"end": pa.int64(), "branch": BRANCH})),
        }
    )
    return schema if codec is None else schema.append(pa.field("prompt", pa.string()))


def _episode_columns(codec: TextCodec | None) -> Callable[[Sequence[Episode], pa.Schema], list[pa.Array]]:
    def columns(episodes: Sequence[Episode], schema: pa.Schema) -> list[pa.Array]:
        import pyarrow as pa

        from treetune.episode_generators.columns import branches, lists, nested, tuples

        def column(field: pa.Field) -> pa.Array:
            if field.name == "prompt":
                assert codec is not None
                return pa.array([codec.decode(episode.prompt_ids) for episode in episodes], pa.string())
            values = [getattr(episode, field.name) for episode in episodes]
            if field.name == "stretches":
                flat = [stretch for of_row in values for stretch in of_row]
                ends = pa.array([stretch.end for stretch in flat], pa.int64())
                parts = [ends, branches([stretch.branch for stretch in flat])]
                return nested(
                    list(map(len, values)), pa.StructArray.from_arrays(parts, fields=field.type.value_type)
                )
            if field.name in ("step_ends", "step_values"):
                return tuples(values, field.type)
            return lists(values, field.type) if pa.types.is_list(field.type) else pa.array(values, field.type)

        return [column(field) for field in schema]

    return columns


def _episodes(batch: pa.RecordBatch) -> Iterator[Episode]:
    import pyarrow as pa

    from treetune.episode_generators.columns import branch_of, rows_of, tuples_of

    names = [field.name for field in fields(Episode) if field.name in batch.schema.names]
    columns: dict[str, Any] = {}
    for name in names:  # a file from before a field was there: what the field is by default
        column = batch[name]
        if name == "stretches":
            columns[name] = [
                tuple(Stretch(one["end"], branch_of(one["branch"])) for one in row)
                for row in column.to_pylist()
            ]
        elif name in ("step_ends", "step_values"):
            columns[name] = tuples_of(column)
        else:
            is_list = pa.types.is_list(column.type)
            columns[name] = rows_of(column) if is_list else column.to_pylist()
    for row in zip(*columns.values(), strict=True):
        yield Episode(**dict(zip(names, row)))


def _trajectory_schema(trajectories: Sequence[Trajectory]) -> pa.Schema:
    import pyarrow as pa

    from treetune.episode_generators.columns import BRANCH, IDS, logprobs_type

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
        "token_ids": IDS,
        "origin": text,
        "logprobs": logprobs_type([s.logprobs for t in trajectories for s in t.segments]),
        "policy_version": pa.int64(),
        "branch": BRANCH,
        "seconds": pa.float64(),
    }
    return pa.schema(
        {
            "problem": pa.struct(problem),
            "sample": pa.int64(),
            "prompt_ids": IDS,
            "segments": pa.list_(pa.struct(segment)),
            "finish_reason": text,
            "text": text,
            "grade": pa.struct(grade),
            "step_ends": IDS,
            "bonus": pa.float64(),
            "numbers": pa.map_(text, pa.float64()),
        }
    )


def _trajectory_columns(trajectories: Sequence[Trajectory], schema: pa.Schema) -> list[pa.Array]:
    import pyarrow as pa

    from treetune.episode_generators.columns import lists, nested, tuples

    def column(field: pa.Field) -> pa.Array:
        values = [getattr(trajectory, field.name) for trajectory in trajectories]
        if field.name == "segments":
            flat = [segment for of_row in values for segment in of_row]
            return nested(list(map(len, values)), _segment_columns(flat, field.type.value_type))
        if field.name == "problem":
            return pa.array([_problem_row(problem) for problem in values], field.type)
        if field.name == "grade":
            return pa.array([vars(grade) for grade in values], field.type)
        if field.name == "numbers":
            return pa.array([list(numbers.items()) for numbers in values], field.type)
        if field.name == "step_ends":
            return tuples(values, field.type)
        return lists(values, field.type) if pa.types.is_list(field.type) else pa.array(values, field.type)

    return [column(field) for field in schema]


def _segment_columns(segments: Sequence[Segment], kind: pa.StructType) -> pa.StructArray:
    import pyarrow as pa

    from treetune.episode_generators.columns import branches, lists

    parts = []
    for field in kind:
        values = [getattr(segment, field.name) for segment in segments]
        if field.name == "branch":
            parts.append(branches(values))
        else:
            is_list = pa.types.is_list(field.type)
            parts.append(lists(values, field.type) if is_list else pa.array(values, field.type))
    return pa.StructArray.from_arrays(parts, fields=list(kind))


def _problem_row(problem: Problem) -> dict[str, str]:
    return {"id": problem.id, "prompt": problem.prompt, "gold": problem.gold, "data": _json(problem)}


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


def _trajectories(batch: pa.RecordBatch) -> Iterator[Trajectory]:
    from treetune.episode_generators.columns import rows_of, tuples_of

    names = batch.schema.names
    count = batch.num_rows
    segments = iter(_segments(batch["segments"].values))
    counts = batch["segments"].value_lengths().to_pylist()
    # A file from before there was shaping, or there were numbers.
    bonuses = batch["bonus"].to_pylist() if "bonus" in names else [0.0] * count
    counted = batch["numbers"].to_pylist() if "numbers" in names else [()] * count
    problems: dict[str, Problem] = {}
    for problem, sample, prompt_ids, n_segments, reason, text, grade, ends, bonus, numbers in zip(
        batch["problem"].to_pylist(),
        batch["sample"].to_pylist(),
        rows_of(batch["prompt_ids"]),
        counts,
        batch["finish_reason"].to_pylist(),
        batch["text"].to_pylist(),
        batch["grade"].to_pylist(),
        tuples_of(batch["step_ends"]),
        bonuses,
        counted,
        strict=True,
    ):
        key = json.dumps(problem)
        if key not in problems:
            data = json.loads(problem["data"], object_hook=_unmarked)
            problems[key] = Problem(**problem | {"data": data})
        yield Trajectory(
            problem=problems[key],
            sample=sample,
            prompt_ids=prompt_ids,
            segments=tuple(next(segments) for _ in range(n_segments)),
            finish_reason=reason,
            text=text,
            grade=Grade(**grade),
            step_ends=ends or (),
            bonus=bonus,
            numbers=dict(numbers or ()),
        )


def _segments(values: pa.StructArray) -> Iterator[Segment]:
    import pyarrow as pa

    from treetune.episode_generators.columns import branch_of, rows_of

    columns: dict[str, Any] = {}
    for field in values.type:
        column = values.field(field.name)
        if field.name == "branch":
            columns[field.name] = [branch_of(row) for row in column.to_pylist()]
        else:
            is_list = pa.types.is_list(field.type)
            columns[field.name] = rows_of(column) if is_list else column.to_pylist()
    for row in zip(*columns.values(), strict=True):
        yield Segment(**dict(zip(columns, row)))


# Files


def _write(
    path: Path,
    kind: str,
    schema: pa.Schema,
    rows: Sequence[Row],
    columns: Callable[[Sequence[Row], pa.Schema], list[pa.Array]],
) -> None:
    schema = _counted(schema, kind, rows)
    with whole_file(path, "wb") as file:
        _stream(file, schema, _batches(schema, rows, columns))


def _to_bytes(
    kind: str,
    schema: pa.Schema,
    rows: Sequence[Row],
    columns: Callable[[Sequence[Row], pa.Schema], list[pa.Array]],
) -> bytes:
    import pyarrow as pa

    schema = _counted(schema, kind, rows)
    sink = pa.BufferOutputStream()
    _stream(sink, schema, _batches(schema, rows, columns))
    return sink.getvalue().to_pybytes()


def _counted(schema: pa.Schema, kind: str, rows: Sequence[Any]) -> pa.Schema:
    # A stream that was cut between two batches looks whole to Arrow: the number of rows tells.
    return schema.with_metadata({"treetune": kind, "rows": str(len(rows))})


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


def _read(path: Path, kind: str, rows_of: Callable[[pa.RecordBatch], Iterator[Row]]) -> list[Row]:
    with open(path, "rb") as file:
        return _rows(file, str(path), kind, rows_of)


def _from_bytes(data: bytes, kind: str, rows_of: Callable[[pa.RecordBatch], Iterator[Row]]) -> list[Row]:
    return _rows(data, "what a rank sent", kind, rows_of)


def _rows(source: Any, name: str, kind: str, rows_of: Callable[[pa.RecordBatch], Iterator[Row]]) -> list[Row]:
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(source) as reader:
            metadata = reader.schema.metadata or {}
            if metadata.get(b"treetune") != kind.encode():
                raise ValueError(f"{name} holds no {kind}, but {metadata.get(b'treetune')!r}")
            rows = [row for batch in reader for row in rows_of(batch)]
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{name} is not a whole Arrow file of {kind}: {error}") from error
    if len(rows) != int(metadata[b"rows"]):
        raise ValueError(
            f"{name} is cut short: {len(rows)} of {int(metadata[b'rows'])} {kind}; delete it and rerun"
        )
    return rows
