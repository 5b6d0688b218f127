"""Rows of episodes and trajectories as Arrow columns, and back, with no Python per token."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
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
    """Half as long where no log-prob needs more."""
    wide = any(column is not None and column.dtype == np.float64 for column in columns)
    return NUMBERS if wide else pa.list_(pa.float32())


def lists(rows: Sequence[Column | None], kind: pa.ListType) -> pa.ListArray:
    """A row for each array, null for None."""
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
    """As `lists`, for what there is few of: a row for each tuple."""
    dtype = kind.value_type.to_pandas_dtype()
    return lists([None if row is None else np.array(row, dtype) for row in rows], kind)


def nested(counts: Sequence[int], values: pa.Array) -> pa.ListArray:
    """The values, so many to each row."""
    offsets = pa.array(_offsets(np.array(counts, np.int64)), pa.int32())
    return pa.ListArray.from_arrays(offsets, values)


def rows_of(column: pa.ListArray) -> Iterator[Column | None]:
    """Each row as a view of the column's buffer (a copy of it, where that is bits); None for null."""
    flat = column.values.to_numpy(zero_copy_only=False)
    ends = column.offsets.to_numpy().tolist()
    missing = column.is_null().to_pylist() if column.null_count else itertools.repeat(False)
    for begin, end, is_missing in zip(ends, ends[1:], missing):
        yield None if is_missing else flat[begin:end]


def tuples_of(column: pa.ListArray) -> Iterator[tuple[Any, ...] | None]:
    for row in rows_of(column):
        yield None if row is None else tuple(row.tolist())


def branches(rows: Sequence[Branch]) -> pa.Array:
    return pa.array([[list(pair) for pair in row] for row in rows], BRANCH)


def branch_of(row: Sequence[Sequence[int]] | None) -> Branch:
    return tuple((block, thread) for block, thread in row or ())


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


OF_STEPS = ("step_ends", "step_values", "step_errors", "step_rewards")


def episode_schema(episodes: Sequence[Episode], codec: TextCodec | None) -> pa.Schema:
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
    return schema if codec is None else schema.append(pa.field("prompt", pa.string()))


def episode_columns(codec: TextCodec | None) -> Callable[[Sequence[Episode], pa.Schema], list[pa.Array]]:
    def columns(episodes: Sequence[Episode], schema: pa.Schema) -> list[pa.Array]:
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
            if field.name in OF_STEPS:
                return tuples(values, field.type)
            return lists(values, field.type) if pa.types.is_list(field.type) else pa.array(values, field.type)

        return [column(field) for field in schema]

    return columns


def episodes_of(batch: pa.RecordBatch) -> Iterator[Episode]:
    names = [field.name for field in fields(Episode) if field.name in batch.schema.names]
    columns: dict[str, Any] = {}
    for name in names:  # a file from before a field was there: what the field is by default
        column = batch[name]
        if name == "stretches":
            columns[name] = [
                tuple(Stretch(one["end"], branch_of(one["branch"])) for one in row)
                for row in column.to_pylist()
            ]
        elif name in OF_STEPS:
            columns[name] = tuples_of(column)
        else:
            is_list = pa.types.is_list(column.type)
            columns[name] = rows_of(column) if is_list else column.to_pylist()
    for row in zip(*columns.values(), strict=True):
        yield Episode(**dict(zip(names, row)))


_TUPLE = "tuple()"


def trajectory_schema(trajectories: Sequence[Trajectory]) -> pa.Schema:
    text = pa.string()
    problem: dict[str, pa.DataType] = {"id": text, "prompt": text, "gold": text, "data": text}
    asked = [trajectory.problem for trajectory in trajectories]
    if any(one.domain for one in asked):
        problem["domain"] = text
    if any(one.messages or one.as_is for one in asked):
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
    def column(field: pa.Field) -> pa.Array:
        values = [getattr(trajectory, field.name) for trajectory in trajectories]
        if field.name == "segments":
            flat = [segment for of_row in values for segment in of_row]
            return nested(list(map(len, values)), _segment_columns(flat, field.type.value_type))
        if field.name == "problem":
            kept = [one.name for one in field.type]
            # Once for all answers to a problem: a row's tests may be long.
            asked = {id(problem): problem for problem in values}
            rows = {place: _problem_row(problem, kept) for place, problem in asked.items()}
            return pa.array([rows[id(problem)] for problem in values], field.type)
        if field.name == "grade":
            return pa.array([_grade_row(grade) for grade in values], field.type)
        if field.name == "numbers":
            return pa.array([list(numbers.items()) for numbers in values], field.type)
        if field.name in ("step_ends", "step_rewards"):
            return tuples(values, field.type)
        if field.name == "fork":
            return pa.array([None if one is None else one._asdict() for one in values], field.type)
        return lists(values, field.type) if pa.types.is_list(field.type) else pa.array(values, field.type)

    return [column(field) for field in schema]


def _segment_columns(segments: Sequence[Segment], kind: pa.StructType) -> pa.StructArray:
    parts = []
    for field in kind:
        values = [getattr(segment, field.name) for segment in segments]
        if field.name == "branch":
            parts.append(branches(values))
        else:
            is_list = pa.types.is_list(field.type)
            parts.append(lists(values, field.type) if is_list else pa.array(values, field.type))
    return pa.StructArray.from_arrays(parts, fields=list(kind))


def _problem_row(problem: Problem, kept: Sequence[str]) -> dict[str, Any]:
    row = vars(problem) | {"data": _json(problem), "messages": [vars(one) for one in problem.messages]}
    return {name: row[name] for name in kept}


def _problem(row: dict[str, Any]) -> Problem:
    data = json.loads(row["data"], object_hook=_unmarked)
    messages = tuple(Message(**one) for one in row.get("messages") or ())
    return Problem(**row | {"data": data, "messages": messages})


def _grade_row(grade: Grade) -> dict[str, Any]:
    return vars(grade) | {"numbers": list(grade.numbers.items())}


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


def trajectories_of(batch: pa.RecordBatch) -> Iterator[Trajectory]:
    names = batch.schema.names
    count = batch.num_rows
    segments = iter(_segments(batch["segments"].values))
    counts = batch["segments"].value_lengths().to_pylist()
    # A file from before there was shaping, or there were numbers.
    bonuses = batch["bonus"].to_pylist() if "bonus" in names else [0.0] * count
    counted = batch["numbers"].to_pylist() if "numbers" in names else [()] * count
    earned = tuples_of(batch["step_rewards"]) if "step_rewards" in names else [()] * count
    forks = batch["fork"].to_pylist() if "fork" in names else [None] * count
    problems: dict[str, Problem] = {}
    for (
        problem,
        sample,
        prompt_ids,
        n_segments,
        reason,
        text,
        grade,
        ends,
        bonus,
        numbers,
        rewards,
        fork,
    ) in zip(
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
        earned,
        forks,
        strict=True,
    ):
        key = json.dumps(problem)
        if key not in problems:
            problems[key] = _problem(problem)
        yield Trajectory(
            problem=problems[key],
            sample=sample,
            prompt_ids=prompt_ids,
            segments=tuple(next(segments) for _ in range(n_segments)),
            finish_reason=reason,
            text=text,
            grade=Grade(**grade | {"numbers": dict(grade.get("numbers") or ())}),
            step_ends=ends or (),
            bonus=bonus,
            numbers=dict(numbers or ()),
            step_rewards=rewards or (),
            fork=None if fork is None else Fork(**fork),
        )


def _segments(values: pa.StructArray) -> Iterator[Segment]:
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
