"""Converts episodes and trajectories to Arrow columns and back, without a Python loop over tokens.

A field that is an array becomes a list column, of which a row is a view of the column's buffer. Example: two
episodes with the response ids ``[20, 31]`` and ``[9]`` have the column ``[[20, 31], [9]]``: the values ``[20,
31, 9]`` and the offsets ``[0, 2, 3]``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    SegmentSpan,
    TextCodec,
    Trajectory,
    concatenate,
)

if TYPE_CHECKING:
    from treetune.vocabulary import Column

IDS_TYPE, NUMBERS_TYPE, MASK_TYPE = pa.list_(pa.int32()), pa.list_(pa.float64()), pa.list_(pa.bool_())
BRANCH_TYPE = pa.list_(pa.list_(pa.int64()))


def logprobs_type(columns: Sequence[Column | None]) -> pa.DataType:
    """Returns the type of a column of log-probs: float64 if any of the arrays has it, or else float32."""
    wide = any(column is not None and column.dtype == np.float64 for column in columns)
    return NUMBERS_TYPE if wide else pa.list_(pa.float32())


def list_column(rows: Sequence[Column | None], arrow_type: pa.ListType) -> pa.ListArray:
    """Returns a list column with a row for each array; None becomes null."""
    lengths = np.fromiter((0 if row is None else len(row) for row in rows), np.int64, len(rows))
    values = [row for row in rows if row is not None]
    flat = concatenate(values) if values else np.empty(0)
    value_type = arrow_type.value_type
    flat = flat.astype(value_type.to_pandas_dtype(), copy=False)
    missing = pa.array([row is None for row in rows]) if len(values) < len(rows) else None
    return pa.ListArray.from_arrays(
        pa.array(_offsets(lengths), pa.int32()),
        pa.array(flat, value_type),
        type=arrow_type,
        mask=missing,
    )


def tuple_column(rows: Sequence[Sequence[Any] | None], arrow_type: pa.ListType) -> pa.ListArray:
    """Returns a list column with a row for each tuple; None becomes null. It copies each tuple, so it is
    meant for columns of few numbers."""
    dtype = arrow_type.value_type.to_pandas_dtype()
    return list_column([None if row is None else np.array(row, dtype) for row in rows], arrow_type)


def column_of(values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
    """Returns a column of arrays (if `arrow_type` is a list type) or of single values."""
    return list_column(values, arrow_type) if pa.types.is_list(arrow_type) else pa.array(values, arrow_type)


def nested_column(counts: Sequence[int], values: pa.Array) -> pa.ListArray:
    """Returns a list column that distributes the values over rows, `counts[i]` of them to row i."""
    offsets = pa.array(_offsets(np.array(counts, np.int64)), pa.int32())
    return pa.ListArray.from_arrays(offsets, values)


def rows_of(column: pa.ListArray) -> Iterator[Column | None]:
    """Yields each row of a list column as a view of the column's buffer. Yields None for null.

    Rows of booleans are views of a copy, since Arrow stores a boolean in one bit.
    """
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
    """Returns the values from which `column_of` made a column."""
    return rows_of(column) if pa.types.is_list(column.type) else column.to_pylist()


def column_of_branches(rows: Sequence[Branch]) -> pa.Array:
    """Returns a column of branches, such as ``((0, 1), (0, 0))``."""
    return pa.array(rows, BRANCH_TYPE)


def branch_of(row: Sequence[Sequence[int]] | None) -> Branch:
    """Returns the branch of a row of the column that `column_of_branches` makes; null is the empty branch."""
    return tuple((block, thread) for block, thread in row or ())


def _offsets(lengths: np.ndarray) -> np.ndarray:
    """Returns the offsets at which rows of these lengths begin, and the offset at which the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)])


# Episodes

FIELDS_OF_STEPS = ("step_ends", "step_values", "step_errors", "step_rewards")
"""Fields of episodes that are tuples with a number for each step, and not arrays."""


def episode_schema(episodes: Sequence[Episode], codec: TextCodec | None) -> pa.Schema:
    """Returns the schema of a file of these episodes.

    Some columns are needed by few runs. The schema has them only if an episode has a value for them. With a
    codec, it also has the column `prompt`.
    """
    schema = pa.schema(
        {
            "prompt_ids": IDS_TYPE,
            "response_ids": IDS_TYPE,
            "trained": MASK_TYPE,
            "reward": pa.float64(),
            "group": pa.string(),
            "trajectory": pa.string(),
            "policy_version": pa.int64(),
            "finish_reason": pa.string(),
            "advantages": NUMBERS_TYPE,
            "behaviour_logprobs": logprobs_type([e.behaviour_logprobs for e in episodes]),
            "step_ends": IDS_TYPE,
            "step_values": NUMBERS_TYPE,
            "text": pa.string(),
            "pair": pa.int64(),
            "chosen": pa.bool_(),
            "score": pa.float64(),
            "stretches": pa.list_(pa.struct({"end": pa.int64(), "branch": BRANCH_TYPE})),
        }
    )
    if any(episode.step_rewards for episode in episodes):
        schema = schema.append(pa.field("step_rewards", NUMBERS_TYPE))
    if any(episode.step_errors is not None for episode in episodes):
        schema = schema.append(pa.field("step_errors", NUMBERS_TYPE))
    if any(episode.domain for episode in episodes):
        schema = schema.append(pa.field("domain", pa.string()))
    if any(episode.continuations for episode in episodes):
        schema = schema.append(pa.field("continuations", pa.map_(pa.int32(), NUMBERS_TYPE)))
    if any(episode.critic_prompt_ids is not None for episode in episodes):
        schema = schema.append(pa.field("critic_prompt_ids", IDS_TYPE))
    if any(episode.teacher_prompt_ids is not None for episode in episodes):
        schema = schema.append(pa.field("teacher_prompt_ids", IDS_TYPE))
    return schema if codec is None else schema.append(pa.field("prompt", pa.string()))


def episode_columns(
    episodes: Sequence[Episode], schema: pa.Schema, codec: TextCodec | None = None
) -> list[pa.Array]:
    """Returns the columns of a batch of episodes, one for each field of the schema. If the schema has the
    column `prompt`, the codec decodes the prompts for it."""
    return [_episode_column(episodes, field, codec) for field in schema]


def _episode_column(episodes: Sequence[Episode], field: pa.Field, codec: TextCodec | None) -> pa.Array:
    """Returns the column of a field, with a value for each episode."""
    if field.name == "prompt":
        assert codec is not None, "`episode_schema` adds this column only with a codec"
        return pa.array([codec.decode(episode.prompt_ids) for episode in episodes], pa.string())
    values = [getattr(episode, field.name) for episode in episodes]
    if field.name == "stretches":
        return _stretch_column(values, field.type)
    if field.name == "continuations":  # Arrow takes a map as a list of pairs
        return pa.array([list(continuations.items()) for continuations in values], field.type)
    if field.name in FIELDS_OF_STEPS:
        return tuple_column(values, field.type)
    return column_of(values, field.type)


def _stretch_column(
    stretches_by_episode: Sequence[Sequence[SegmentSpan]], arrow_type: pa.ListType
) -> pa.ListArray:
    """Returns a list column with the stretches of each episode as structs."""
    stretches = list(itertools.chain.from_iterable(stretches_by_episode))
    ends = pa.array([stretch.end for stretch in stretches], pa.int64())
    branch_column = column_of_branches([stretch.branch for stretch in stretches])
    structs = pa.StructArray.from_arrays([ends, branch_column], fields=arrow_type.value_type)
    return nested_column(
        [len(stretches_of_episode) for stretches_of_episode in stretches_by_episode], structs
    )


def episodes_of(batch: pa.RecordBatch) -> Iterator[Episode]:
    """Yields the episodes of a batch. A field that is missing in files of earlier versions has its
    default."""
    names = [field.name for field in fields(Episode) if field.name in batch.schema.names]
    columns = [_episode_values(name, batch[name]) for name in names]
    for row in zip(*columns, strict=True):
        yield Episode(**dict(zip(names, row)))


def _episode_values(name: str, column: pa.Array) -> Iterable[Any]:
    """Returns the values of a column of `_episode_column`, one for each episode."""
    if name == "stretches":
        return map(_stretches_of, column.to_pylist())
    if name == "continuations":
        return map(_continuations_of, column.to_pylist())
    if name in FIELDS_OF_STEPS:
        return tuples_of(column)
    return values_of(column)


def _stretches_of(row: Sequence[Mapping[str, Any]]) -> tuple[SegmentSpan, ...]:
    """Returns the stretches of an episode from its row in the column that `_stretch_column` makes."""
    return tuple(SegmentSpan(stretch["end"], branch_of(stretch["branch"])) for stretch in row)


def _continuations_of(
    row: Sequence[tuple[int, Sequence[float | None]]],
) -> dict[int, tuple[float | None, ...]]:
    """Returns an episode's `continuations` from its row, a list of pairs."""
    return {length: tuple(rewards) for length, rewards in row}


# Trajectories

_TUPLE_KEY = "tuple()"
"""Marks a tuple in a problem's data, since JSON has only lists: ``{"tuple()": [1, 2]}`` is ``(1, 2)``."""


def trajectory_schema(trajectories: Sequence[Trajectory]) -> pa.Schema:
    """Returns the schema of a file of these trajectories.

    Some columns and fields are needed by few runs. The schema has them only if a trajectory has a value for
    them.
    """
    text = pa.string()
    problem_fields: dict[str, pa.DataType] = {"id": text, "prompt": text, "gold": text, "data": text}
    problems = [trajectory.problem for trajectory in trajectories]
    if any(problem.domain for problem in problems):
        problem_fields["domain"] = text
    if any(problem.messages or problem.as_is for problem in problems):
        problem_fields["messages"] = pa.list_(pa.struct({"role": text, "content": text}))
        problem_fields["as_is"] = pa.bool_()
    grade_fields = {
        "reward": pa.float64(),
        "outcome": text,
        "extracted": text,
        "seconds": pa.float64(),
        "message": text,
    }
    if any(trajectory.grade.numbers for trajectory in trajectories):
        grade_fields["numbers"] = pa.map_(text, pa.float64())
    segments = list(itertools.chain.from_iterable(trajectory.segments for trajectory in trajectories))
    segment_fields = {
        "token_ids": IDS_TYPE,
        "origin": text,
        "logprobs": logprobs_type([segment.logprobs for segment in segments]),
        "policy_version": pa.int64(),
        "branch": BRANCH_TYPE,
        "seconds": pa.float64(),
    }
    if any(segment.snapshot is not None for segment in segments):
        segment_fields["snapshot"] = pa.binary()
    schema = pa.schema(
        {
            "problem": pa.struct(problem_fields),
            "sample": pa.int64(),
            "prompt_ids": IDS_TYPE,
            "segments": pa.list_(pa.struct(segment_fields)),
            "finish_reason": text,
            "text": text,
            "grade": pa.struct(grade_fields),
            "step_ends": IDS_TYPE,
            "bonus": pa.float64(),
            "numbers": pa.map_(text, pa.float64()),
        }
    )
    if any(trajectory.step_rewards for trajectory in trajectories):
        schema = schema.append(pa.field("step_rewards", NUMBERS_TYPE))
    if any(trajectory.fork is not None for trajectory in trajectories):
        fork_type = pa.struct({"sample": pa.int64(), "tokens": pa.int64()})
        schema = schema.append(pa.field("fork", fork_type))
    return schema


def trajectory_columns(trajectories: Sequence[Trajectory], schema: pa.Schema) -> list[pa.Array]:
    """Returns the columns of a batch of trajectories, one for each field of the schema."""
    return [_trajectory_column(trajectories, field) for field in schema]


def _trajectory_column(trajectories: Sequence[Trajectory], field: pa.Field) -> pa.Array:
    """Returns the column of a field, with a value for each trajectory. Arrow takes a map as a list of
    pairs."""
    values = [getattr(trajectory, field.name) for trajectory in trajectories]
    match field.name:
        case "problem":
            return _problem_column(values, field.type)
        case "segments":
            return _segment_column(values, field.type)
        case "grade":
            grades = [vars(grade) | {"numbers": list(grade.numbers.items())} for grade in values]
            return pa.array(grades, field.type)
        case "numbers":
            return pa.array([list(numbers.items()) for numbers in values], field.type)
        case "step_ends" | "step_rewards":
            return tuple_column(values, field.type)
        case "fork":
            return pa.array([None if fork is None else fork._asdict() for fork in values], field.type)
    return column_of(values, field.type)


def _problem_column(problems: Sequence[Problem], arrow_type: pa.StructType) -> pa.StructArray:
    """Returns a column with the problem of each trajectory."""
    names = [field.name for field in arrow_type]
    # Each problem object is converted once, not for each of its answers: its data may be long.
    row_by_problem: dict[int, dict[str, Any]] = {}  # by `id`: a problem has no hash, since `data` is a dict
    for problem in problems:
        if id(problem) not in row_by_problem:
            row_by_problem[id(problem)] = _problem_row(problem, names)
    return pa.array([row_by_problem[id(problem)] for problem in problems], arrow_type)


def _segment_column(
    segments_by_trajectory: Sequence[Sequence[Segment]], arrow_type: pa.ListType
) -> pa.ListArray:
    """Returns a list column with the segments of each trajectory as structs."""
    segments = list(itertools.chain.from_iterable(segments_by_trajectory))
    segment_fields = list(arrow_type.value_type)
    columns = []
    for field in segment_fields:
        values = [getattr(segment, field.name) for segment in segments]
        columns.append(
            column_of_branches(values) if field.name == "branch" else column_of(values, field.type)
        )
    structs = pa.StructArray.from_arrays(columns, fields=segment_fields)
    return nested_column([len(segments_of_answer) for segments_of_answer in segments_by_trajectory], structs)


def trajectories_of(batch: pa.RecordBatch) -> Iterator[Trajectory]:
    """Yields the trajectories of a batch. A field that is missing in files of earlier versions has its
    default."""
    names = [field.name for field in fields(Trajectory) if field.name in batch.schema.names]
    columns = [_trajectory_values(name, batch[name]) for name in names]
    for row in zip(*columns, strict=True):
        yield Trajectory(**dict(zip(names, row)))


def _trajectory_values(name: str, column: pa.Array) -> Iterable[Any]:
    """Returns the values of a column of `_trajectory_column`, one for each trajectory."""
    match name:
        case "prompt_ids":
            return rows_of(column)
        case "segments":
            return _segments_of(column)
        case "step_ends" | "step_rewards":
            return (row or () for row in tuples_of(column))
    # `to_pylist` makes a Python object of each value. That is too slow for columns of tokens, which are read
    # above.
    rows = column.to_pylist()
    match name:
        case "problem":
            return _problems_of(rows)
        case "grade":
            return (Grade(**row | {"numbers": dict(row.get("numbers") or ())}) for row in rows)
        case "numbers":
            return (dict(row or ()) for row in rows)
        case "fork":
            return (None if row is None else Fork(**row) for row in rows)
    return rows


def _problems_of(rows: Sequence[dict[str, Any]]) -> Iterator[Problem]:
    """Yields the problem of each row of `_problem_column`. Equal rows share one object."""
    problem_by_json: dict[str, Problem] = {}
    for row in rows:
        row_json = json.dumps(row)
        if row_json not in problem_by_json:
            data = json.loads(row["data"], object_hook=_restore_tuple)
            messages = tuple(Message(**message) for message in row.get("messages") or ())
            problem_by_json[row_json] = Problem(**row | {"data": data, "messages": messages})
        yield problem_by_json[row_json]


def _segments_of(column: pa.ListArray) -> Iterator[tuple[Segment, ...]]:
    """Yields the segments of each row of `_segment_column`."""
    # For each field, its values in the segments of all answers, one after the other.
    values_by_field: dict[str, Iterable[Any]] = {}
    for field in column.values.type:
        values = column.values.field(field.name)
        if field.name == "branch":
            values_by_field["branch"] = map(branch_of, values.to_pylist())
        else:
            values_by_field[field.name] = values_of(values)
    rows = zip(*values_by_field.values(), strict=True)  # a row has a value for each field of a segment
    all_segments = (Segment(**dict(zip(values_by_field, row))) for row in rows)
    # `all_segments` goes on where the previous answer's segments have ended.
    for count in column.value_lengths().to_pylist():
        yield tuple(itertools.islice(all_segments, count))


def _problem_row(problem: Problem, names: Sequence[str]) -> dict[str, Any]:
    """Returns the fields `names` of a problem in the form that Arrow takes: `data` is JSON text, and messages
    are dictionaries."""
    try:
        data = json.dumps(_mark_tuples(dict(problem.data)), ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"problem {problem.id!r} has data that can't be stored: {error}") from error
    row = vars(problem) | {"data": data, "messages": [vars(message) for message in problem.messages]}
    return {name: row[name] for name in names}


def _mark_tuples(value: Any) -> Any:
    """Returns the value with its tuples marked, so that `_restore_tuple` restores them.

    Raises:
        TypeError: An object has a key that is not a string, or the key that marks a tuple.
    """
    if isinstance(value, dict):
        if _TUPLE_KEY in value or not all(isinstance(key, str) for key in value):
            raise TypeError(f"an object has keys other than texts, or the key {_TUPLE_KEY!r}")
        return {key: _mark_tuples(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return {_TUPLE_KEY: [_mark_tuples(inner) for inner in value]}
    if isinstance(value, list):
        return [_mark_tuples(inner) for inner in value]
    return value


def _restore_tuple(value: dict[str, Any]) -> Any:
    """Returns a JSON object unchanged, or the tuple in its place if it marks one."""
    return tuple(value[_TUPLE_KEY]) if _TUPLE_KEY in value else value
