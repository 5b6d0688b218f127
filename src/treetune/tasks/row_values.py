"""Values of rows as Python and JSON know them, whatever the file's types were, with their nulls.

Parquet has types that JSON lacks (decimals, dates, bytes), and fills in what a row doesn't have: a whole
number that stands in a column with a null is a float once pandas wrote it, and an object whose keys differ
from row to row has all keys in every row. The readers of rows share what is here, so that a gold is the same
whichever file it comes from.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

from treetune.exceptions import NoPlainValue, UnreadableValue
from treetune.tasks.graders.extraction import read_value

if TYPE_CHECKING:
    import pyarrow as pa

LARGEST_EXACT = 2.0**53
"""The largest size up to which a float of 64 bits holds every whole number."""

log = logging.getLogger(__name__)


def plain_value(value: Any) -> Any:
    """Returns a value with text for decimals (``42.50``), dates and times (ISO 8601), UUIDs, and bytes that
    are UTF-8; lists for arrays and tuples; Python's numbers for numpy's. What is none of these stays as it
    is: `check_plain` refuses it where it is needed."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {key: plain_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(inner) for inner in value]
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, datetime | date | time):
        is_missing = value != value  # pandas' NaT
        return None if is_missing else value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytes | bytearray):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            return value
    if type(value).__module__.partition(".")[0] == "numpy":
        # `tolist` gives nanoseconds of numpy's finest times as a bare number.
        if getattr(value.dtype, "kind", "") in "Mm":
            return str(value) if value.ndim == 0 else value.astype(str).tolist()
        return plain_value(value.tolist())
    return value


def check_plain(value: Any, name: str) -> None:
    """Raises NoPlainValue where a value, or one within it, can't be written as JSON; `name` is its field."""
    if value is None or isinstance(value, str | bool | int | float):
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise NoPlainValue(f"its {name} has the key {key!r}, which is {type(key).__name__}, not text")
            check_plain(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            check_plain(inner, f"{name}[{position}]")
    elif isinstance(value, bytes | bytearray):
        raise NoPlainValue(f"its {name} is {len(value)} bytes that are no text in UTF-8")
    else:
        raise NoPlainValue(
            f"its {name} is of the type {type(value).__name__}, which is no text, number or list"
        )


def text_of_value(value: Any) -> str:
    """Returns a value as the text of a gold or a question: text as it is, all else as JSON. A float that is a
    whole number is written as one (7.0 as ``7``), whoever wrote it: most were whole before a table made
    floats of them."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST_EXACT:
        value = int(value)
    return json.dumps(value, ensure_ascii=False)


def is_empty(value: Any) -> bool:
    """Returns whether a value says nothing: null, white space or NaN."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, str) and not value.strip())


_CHAT = re.compile(r"\s*(?:array\()?[\[{].{0,20}?['\"](?:role|content)['\"]\s*:", re.DOTALL)


def messages_in_text(text: str) -> list[dict[str, Any]] | None:
    """Returns the messages of a chat that was written as text, JSON's or Python's; None for any other text.

    Raises ValueError for a text that begins like a chat and can't be read as one: asked as it is, it would be
    another question.
    """
    if not _CHAT.match(text):
        return None
    try:
        value = read_value(text)
    except UnreadableValue as error:
        raise ValueError(f"begins like a chat written as text, and can't be read as one: {error}") from error
    messages = value if isinstance(value, list) else [value]
    if not all(isinstance(message, dict) and "role" in message for message in messages):
        return None  # a question about JSON
    return messages


# Columns of Arrow


def restored_integers(array: pa.Array, whole: Mapping[str, Any]) -> pa.Array:
    """Returns an array of rows in which floats that were whole numbers before they stood beside a null are
    whole numbers again. `whole` says which: see `whole_fields`."""
    import pyarrow as pa
    import pyarrow.compute as compute

    if not whole:
        return array
    if pa.types.is_floating(array.type):
        is_number = compute.fill_null(compute.invert(compute.is_nan(array)), False)
        return compute.cast(compute.if_else(is_number, array, None), pa.int64())
    fields = [array.type.field(index) for index in range(array.type.num_fields)]
    inner = [
        restored_integers(array.field(index), whole.get(field.name, {})) for index, field in enumerate(fields)
    ]
    names = [field.name for field in fields]
    return pa.StructArray.from_arrays(inner, names=names, mask=compute.is_null(array))


def whole_fields(column: pa.ChunkedArray) -> dict[str, Any]:
    """Returns which floats of a column are whole numbers that a null made floats of.

    That is: in all rows they are whole numbers or missing, and they are missing in some. A column without
    nulls is of floats because somebody wanted floats. The result is ``{"": True}`` for the column itself, the
    same by the names of its fields where it holds objects, and empty where there are none.
    """
    import pyarrow as pa
    import pyarrow.compute as compute

    if pa.types.is_struct(column.type):
        by_name = {}
        for field in column.type:
            inner = whole_fields(compute.struct_field(column, field.name))
            if inner:
                by_name[field.name] = inner
        return by_name
    if not pa.types.is_float64(column.type):
        return {}
    numbers = compute.drop_null(column)
    numbers = compute.filter(numbers, compute.invert(compute.is_nan(numbers)))
    some_missing = 0 < len(numbers) < len(column)
    if not some_missing:
        return {}
    is_whole = compute.and_(
        compute.equal(numbers, compute.floor(numbers)),
        compute.less_equal(compute.abs(numbers), LARGEST_EXACT),
    )
    return {"": True} if compute.all(is_whole).as_py() else {}


def refuse_unclear_nulls(column: pa.ChunkedArray, name: str, where: str) -> None:
    """Raises ValueError for a column of golds that are objects, where a null may be a missing key.

    In Arrow each row of a column has the same keys: one that a row lacks is null there. Where some row has
    all of them, nulls are taken as nulls, and a warning says so. Where none has, and rows lack different
    ones, they had different keys before: read with nulls, right answers would be wrong.
    """
    filled = []
    for path, objects in _objects_within(column, name):
        present_by_row = _present_keys(objects)
        patterns = set(present_by_row)
        ever_present = set().union(*patterns)
        if len(patterns) > 1 and ever_present not in patterns:
            examples = sorted(patterns, key=sorted)[:2]
            shown = " and ".join("{" + ", ".join(sorted(keys)) + "}" for keys in examples)
            raise ValueError(
                f"the golds under {path} of {where} have other keys from row to row ({shown}), and Parquet"
                " has filled in null for the keys that a row lacks, so that nobody can tell these from"
                " real nulls: write golds as JSON text, or the rows as JSON lines"
            )
        if any(keys != set(objects.type.names) for keys in patterns):
            filled.append(path)
    if filled:
        log.warning(
            "golds under %s of %s have nulls, which are taken as they stand: Parquet can't tell a null from"
            " a key that a row lacks. If rows lacked keys, write golds as JSON text",
            ", ".join(filled),
            where,
        )


def _objects_within(column: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields every array of objects in a column, also those in lists and in other objects, with its path."""
    import pyarrow as pa
    import pyarrow.compute as compute

    column = compute.drop_null(column)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        yield from _objects_within(compute.list_flatten(column), f"{path}[]")
    elif pa.types.is_struct(column.type) and len(column):
        yield path, column
        for field in column.type:
            yield from _objects_within(compute.struct_field(column, field.name), f"{path}.{field.name}")


def _present_keys(objects: Any) -> Sequence[frozenset[str]]:
    """Returns the keys of each object that aren't null."""
    import pyarrow.compute as compute

    names = objects.type.names
    is_there = [compute.is_valid(compute.struct_field(objects, name)).to_pylist() for name in names]
    return [
        frozenset(name for name, there in zip(names, row, strict=True) if there)
        for row in zip(*is_there, strict=True)
    ]
