"""Arrow arrays out of many NumPy arrays and back, with no Python per token.

Both ways a column of lists is one buffer and the places where its rows end: rows that are read are views.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from treetune.vocabulary import Branch, joined

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
