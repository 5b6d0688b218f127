"""Converts episodes and trajectories to Arrow columns and back, without a Python loop over tokens.

A field that is an array becomes a list column, of which a row is a view of the column's buffer. Example: two
episodes with the response ids ``[20, 31]`` and ``[9]`` have the column ``[[20, 31], [9]]``: the values ``[20,
31, 9]`` and the offsets ``[0, 2, 3]``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from treetune.vocabulary import (
    Branch,
    Episode,
    Fork,
    Grade,
    Message,
    Problem,
    Segment,
    Stretch,
    TextCodec,
    Trajectory,
    joined,
)

if TYPE_CHECKING:
    from treetune.vocabulary import Column

IDS, NUMBERS, MASK = pa.list_(pa.int32()), pa.list_(pa.float64()), pa.list_(pa.bool_())
BRANCH = pa.list_(pa.list_(pa.int64()))


def logprobs_type(columns: Sequence[Column | None]) -> pa.DataType:
    """Returns the type of a column of log-probs: float64 where an array has it, or else float32."""
    wide = any(column is not None and column.dtype == np.float64 for column in columns)
    return NUMBERS if wide else pa.list_(pa.float32())


def lists(rows: Sequence[Column | None], kind: pa.ListType) -> pa.ListArray:
    """Returns a list column with a row for each array; None becomes null."""
    lengths = np.fromiter((0 if row is None else len(row) for row in rows), np.int64, len(rows))
    values = [row for row in rows if row is not None]
    flat = joined(values) if values else np.empty(0)
    missing = pa.array([row is None for row in rows]) if len(values) < len(rows) else None
    return pa.ListArray.from_arrays(
        pa.array(_offsets(lengths), pa.int32()),
        pa.array(flat.astype(kind.value_type.to_pandas_dtype(), copy=False), kind.value_type),
        type=kind,
        mask=missing,
    )


def tuples(rows: Sequence[Sequence[Any] | None], kind: pa.ListType) -> pa.ListArray:
    """Returns a list column with a row for each tuple; None becomes null. For columns of few numbers."""
    dtype = kind.value_type.to_pandas_dtype()
    return lists([None if row is None else np.array(row, dtype) for row in rows], kind)


def column_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Returns a column of arrays or of single values."""
    return lists(values, kind) if pa.types.is_list(kind) else pa.array(values, kind)


def nested(counts: Sequence[int], values: pa.Array) -> pa.ListArray:
    """Returns a list column that distributes the values over rows, `counts[i]` of them to row i."""
    offsets = pa.array(_offsets(np.array(counts, np.int64)), pa.int32())
    return pa.ListArray.from_arrays(offsets, values)


def rows_of(column: pa.ListArray) -> Iterator[Column | None]:
    """Yields each row of a list column as a view of its buffer (a copy for booleans, which are bits); None
    for null."""
    flat = column.values.to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_numpy().tolist()  # one more than there are rows
    missing = column.is_null().to_pylist() if column.null_count else itertools.repeat(False)
    for begin, end, is_missing in zip(offsets, offsets[1:], missing):
        yield None if is_missing else flat[begin:end]


def tuples_of(column: pa.ListArray) -> Iterator[tuple[Any, ...] | None]:
    """Yields each row of a list column as a tuple; None for null."""
    for row in rows_of(column):
        yield None if row is None else tuple(row.tolist())


def values_of(column: pa.Array) -> Iterable[Any]:
    """Returns the values of a column of `column_of`."""
    return rows_of(column) if pa.types.is_list(column.type) else column.to_pylist()


def branches(rows: Sequence[Branch]) -> pa.Array:
    """Returns a column of branches, such as ``((0, 1), (0, 0))``."""
    return pa.array([[list(pair) for pair in row] for row in rows], BRANCH)


def branch_of(row: Sequence[Sequence[int]] | None) -> Branch:
    """Returns a row of `branches`."""
    return tuple((block, thread) for block, thread in row or ())


def _offsets(lengths: np.ndarray) -> np.ndarray:
    """Returns where rows of these lengths begin, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)])


# Episodes

OF_STEPS = ("step_ends", "step_values", "step_errors", "step_rewards")
"""Fields of episodes that are tuples of few numbers."""


def episode_schema(episodes: Sequence[Episode], codec: TextCodec | None) -> pa.Schema:
    """Returns the schema of a file of these episodes. Columns that few runs need are only there if an episode
    has them."""
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
    if any(episode.step_rewards for episode in episodes):
        schema = schema.append(pa.field("step_rewards", NUMBERS))
    if any(episode.step_errors is not None for episode in episodes):
        schema = schema.append(pa.field("step_errors", NUMBERS))
    if any(episode.domain for episode in episodes):
        schema = schema.append(pa.field("domain", pa.string()))
    if any(episode.continuations for episode in episodes):
        schema = schema.append(pa.field("continuations", pa.map_(pa.int32(), NUMBERS)))
    if any(episode.critic_prompt_ids is not None for episode in episodes):
        schema = schema.append(pa.field("critic_prompt_ids", IDS))
    if any(episode.teacher_prompt_ids is not None for episode in episodes):
        schema = schema.append(pa.field("teacher_prompt_ids", IDS))
    return schema if codec is None else schema.append(pa.field("prompt", pa.string()))


def episode_columns(codec: TextCodec | None) -> Callable[[Sequence[Episode], pa.Schema], list[pa.Array]]:
    """Returns the function that makes the columns of a batch of episodes."""

    def column(episodes: Sequence[Episode], field: pa.Field) -> pa.Array:
        if field.name == "prompt":
            assert codec is not None
            return pa.array([codec.decode(episode.prompt_ids) for episode in episodes], pa.string())
        values = [getattr(episode, field.name) for episode in episodes]
        if field.name == "continuations":
            return pa.array([list(continuations.items()) for continuations in values], field.type)
        if field.name == "stretches":
            flat = [stretch for stretches in values for stretch in stretches]
            ends = pa.array([stretch.end for stretch in flat], pa.int64())
            stretch_columns = [ends, branches([stretch.branch for stretch in flat])]
            structs = pa.StructArray.from_arrays(stretch_columns, fields=field.type.value_type)
            return nested([len(stretches) for stretches in values], structs)
        return tuples(values, field.type) if field.name in OF_STEPS else column_of(values, field.type)

    def columns(episodes: Sequence[Episode], schema: pa.Schema) -> list[pa.Array]:
        return [column(episodes, field) for field in schema]

    return columns


def episodes_of(batch: pa.RecordBatch) -> Iterator[Episode]:
    """Yields the episodes of a batch. A field that is missing in files of earlier versions has its
    default."""
    names = [field.name for field in fields(Episode) if field.name in batch.schema.names]
    columns: list[Iterable[Any]] = []
    for name in names:
        if name == "stretches":
            columns.append(
                tuple(Stretch(stretch["end"], branch_of(stretch["branch"])) for stretch in row)
                for row in batch[name].to_pylist()
            )
        elif name == "continuations":
            columns.append(
                {length: tuple(rewards) for length, rewards in row} for row in batch[name].to_pylist()
            )
        else:
            columns.append(tuples_of(batch[name]) if name in OF_STEPS else values_of(batch[name]))
    for row in zip(*columns, strict=True):
        yield Episode(**dict(zip(names, row)))


# Trajectories

_TUPLE = "tuple()"
"""Marks a tuple in a problem's data, since JSON has only lists: ``{"tuple()": [1, 2]}`` is ``(1, 2)``."""


def trajectory_schema(trajectories: Sequence[Trajectory]) -> pa.Schema:
    """Returns the schema of a file of these trajectories. Columns that few runs need are only there if a
    trajectory has them."""
    text = pa.string()
    problem: dict[str, pa.DataType] = {"id": text, "prompt": text, "gold": text, "data": text}
    problems = [trajectory.problem for trajectory in trajectories]
    if any(row.domain for row in problems):
        problem["domain"] = text
    if any(row.messages or row.as_is for row in problems):
        problem |= {"messages": pa.list_(pa.struct({"role": text, "content": text})), "as_is": pa.bool_()}
    grade = {
        "reward": pa.float64(),
        "outcome": text,
        "extracted": text,
        "seconds": pa.float64(),
        "message": text,
    }
    if any(trajectory.grade.numbers for trajectory in trajectories):
        grade["numbers"] = pa.map_(text, pa.float64())
    segment = {
        "token_ids": IDS,
        "origin": text,
        "logprobs": logprobs_type([s.logprobs for t in trajectories for s in t.segments]),
        "policy_version": pa.int64(),
        "branch": BRANCH,
        "seconds": pa.float64(),
    }
    if any(s.snapshot is not None for t in trajectories for s in t.segments):
        segment["snapshot"] = pa.binary()
    schema = pa.schema(
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
    if any(trajectory.step_rewards for trajectory in trajectories):
        schema = schema.append(pa.field("step_rewards", NUMBERS))
    if any(trajectory.fork is not None for trajectory in trajectories):
        fork = pa.struct({"sample": pa.int64(), "tokens": pa.int64()})
        schema = schema.append(pa.field("fork", fork))
    return schema


def trajectory_columns(trajectories: Sequence[Trajectory], schema: pa.Schema) -> list[pa.Array]:
    """Returns the columns of a batch of trajectories."""

    def column(field: pa.Field) -> pa.Array:
        values = [getattr(trajectory, field.name) for trajectory in trajectories]
        match field.name:
            case "segments":
                flat = [segment for segments in values for segment in segments]
                segment_columns = []
                for part in field.type.value_type:
                    if part.name == "branch":
                        segment_columns.append(branches([segment.branch for segment in flat]))
                    else:
                        part_values = [getattr(segment, part.name) for segment in flat]
                        segment_columns.append(column_of(part_values, part.type))
                structs = pa.StructArray.from_arrays(segment_columns, fields=list(field.type.value_type))
                return nested([len(segments) for segments in values], structs)
            case "problem":
                names = [part.name for part in field.type]
                # Each problem object is converted once, not for each of its answers: its data may be long.
                rows: dict[int, dict[str, Any]] = {}
                for problem in values:
                    if id(problem) not in rows:
                        rows[id(problem)] = _problem_row(problem, names)
                return pa.array([rows[id(problem)] for problem in values], field.type)
            case "grade":
                grades = [vars(grade) | {"numbers": list(grade.numbers.items())} for grade in values]
                return pa.array(grades, field.type)
            case "numbers":
                return pa.array([list(numbers.items()) for numbers in values], field.type)
            case "step_ends" | "step_rewards":
                return tuples(values, field.type)
            case "fork":
                return pa.array([None if fork is None else fork._asdict() for fork in values], field.type)
        return column_of(values, field.type)

    return [column(field) for field in schema]


def trajectories_of(batch: pa.RecordBatch) -> Iterator[Trajectory]:
    """Yields the trajectories of a batch. A field that is missing in files of earlier versions has its
    default."""
    names = [field.name for field in fields(Trajectory) if field.name in batch.schema.names]
    problems: dict[str, Problem] = {}  # equal problems become one object

    def problem_of(row: dict[str, Any]) -> Problem:
        key = json.dumps(row)
        if key not in problems:
            data = json.loads(row["data"], object_hook=_restore_tuple)
            messages = tuple(Message(**message) for message in row.get("messages") or ())
            problems[key] = Problem(**row | {"data": data, "messages": messages})
        return problems[key]

    def segments(column: pa.ListArray) -> Iterator[tuple[Segment, ...]]:
        parts: dict[str, Iterable[Any]] = {}
        for field in column.values.type:
            values = column.values.field(field.name)  # of the segments of all answers
            if field.name == "branch":
                parts[field.name] = [branch_of(row) for row in values.to_pylist()]
            else:
                parts[field.name] = values_of(values)
        # One iterator over the segments of all answers: each answer takes as many as it has.
        all_segments = (Segment(**dict(zip(parts, row))) for row in zip(*parts.values(), strict=True))
        for count in column.value_lengths().to_pylist():
            yield tuple(itertools.islice(all_segments, count))

    def values(name: str) -> Iterable[Any]:
        column = batch[name]
        match name:
            case "segments":
                return segments(column)
            case "step_ends" | "step_rewards":
                return (row or () for row in tuples_of(column))
        if name == "prompt_ids":
            return rows_of(column)
        # A Python object for each value: too slow for columns of tokens, which are read above.
        plain = column.to_pylist()
        match name:
            case "problem":
                return map(problem_of, plain)
            case "grade":
                return (Grade(**row | {"numbers": dict(row.get("numbers") or ())}) for row in plain)
            case "numbers":
                return (dict(row or ()) for row in plain)
            case "fork":
                return (None if row is None else Fork(**row) for row in plain)
        return plain

    for row in zip(*map(values, names), strict=True):
        yield Trajectory(**dict(zip(names, row)))


def _problem_row(problem: Problem, names: Sequence[str]) -> dict[str, Any]:
    """Returns these fields of a problem as Arrow takes them, its `data` as JSON."""
    try:
        data = json.dumps(_mark_tuples(dict(problem.data)), ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"problem {problem.id!r} has data that can't be stored: {error}") from error
    row = vars(problem) | {"data": data, "messages": [vars(message) for message in problem.messages]}
    return {name: row[name] for name in names}


def _mark_tuples(value: Any) -> Any:
    """Returns the value with its tuples marked, so that `_restore_tuple` restores them.

    Raises:
        TypeError: Keys of an object are not strings, or look like a mark.
    """
    if isinstance(value, dict):
        if _TUPLE in value or not all(isinstance(key, str) for key in value):
            raise TypeError(f"an object has keys other than texts, or the key {_TUPLE!r}")
        return {key: _mark_tuples(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return {_TUPLE: [_mark_tuples(inner) for inner in value]}
    if isinstance(value, list):
        return [_mark_tuples(inner) for inner in value]
    return value


def _restore_tuple(value: dict[str, Any]) -> Any:
    """Returns an object of JSON, or the tuple that it marks."""
    return tuple(value[_TUPLE]) if _TUPLE in value else value
