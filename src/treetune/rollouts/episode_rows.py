"""Rows of `Episode` as Arrow columns, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import pyarrow as pa

from treetune.rollouts.columns import (
    BRANCH,
    IDS,
    MASK,
    NUMBERS,
    branch_of,
    branches,
    lists,
    logprobs_type,
    nested,
    rows_of,
    tuples,
    tuples_of,
)
from treetune.vocabulary import Episode, Stretch, TextCodec

OF_STEPS = ("step_ends", "step_values", "step_errors", "step_rewards")


def schema_of(episodes: Sequence[Episode], codec: TextCodec | None) -> pa.Schema:
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


def columns_of(codec: TextCodec | None) -> Callable[[Sequence[Episode], pa.Schema], list[pa.Array]]:
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
