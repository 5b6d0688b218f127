"""Converts values of rows to plain values of Python and JSON, so that a gold is the same whichever file it
comes from.

Parquet has types that JSON doesn't have (decimals, dates, bytes), and tables fill in missing values. If a
column of whole numbers has a missing value, pandas writes the whole column as floats. If the objects of a
column have different keys from row to row, each row gets all of the keys, some of them with a null.
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

LARGEST_EXACT_INTEGER = 2.0**53
"""Up to this number, a float of 64 bits represents every whole number exactly."""

log = logging.getLogger(__name__)


def plain_value(value: Any) -> Any:
    """Converts a value to Python's plain types.

    Decimals (``42.50``), dates and times (ISO 8601), UUIDs, and bytes in UTF-8 become texts. Arrays and
    tuples become lists, and numpy's numbers become Python's. Other values stay as they are: `check_plain`
    refuses them for the fields that are used.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {key: plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, datetime | date | time):
        is_missing = value != value  # only true for pandas' NaT
        return None if is_missing else value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytes | bytearray):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            return value
    if type(value).__module__.partition(".")[0] == "numpy":
        # Times and durations: `tolist` would turn those in nanoseconds into numbers.
        if value.dtype.kind in "Mm":
            if value.ndim > 0:
                return [plain_value(item) for item in value]
            is_missing = value != value  # only true for NaT
            return None if is_missing else str(value)
        converted = value.tolist()
        if type(converted) is type(value):  # a `numpy.longdouble`, for which Python has no type
            return value
        return plain_value(converted)
    return value


def check_plain(value: Any, name: str) -> None:
    """Raises NoPlainValue if a value, or a value within it, can't be written as JSON. The message calls the
    value `name`, the name of its field."""
    if value is None or isinstance(value, str | bool | int | float):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise NoPlainValue(f"its {name} has the key {key!r}, which is {type(key).__name__}, not text")
            check_plain(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            check_plain(item, f"{name}[{position}]")
    elif isinstance(value, bytes | bytearray):
        raise NoPlainValue(f"its {name} is {len(value)} bytes that aren't text in UTF-8")
    else:
        raise NoPlainValue(
            f"its {name} is of the type {type(value).__name__}, which is not text, a number or a list"
        )


def text_of_value(value: Any) -> str:
    """Returns a value as the text of a gold or a question. A text stays as it is. Any other value is written
    as JSON.

    A float with a whole value is written without a point (7.0 as ``7``): most such floats were whole numbers
    before a table turned them into floats.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST_EXACT_INTEGER:
        value = int(value)
    return json.dumps(value, ensure_ascii=False)


def is_empty(value: Any) -> bool:
    """Returns whether a value is null, NaN, or text that is only white space."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, str) and not value.strip())


_BEGINNING_OF_CHAT = re.compile(r"\s*(?:array\()?[\[{].{0,20}?['\"](?:role|content)['\"]\s*:", re.DOTALL)


def messages_in_text(text: str) -> list[dict[str, Any]] | None:
    """Returns the messages of a chat that is written as text, in JSON or Python. Returns None for any other
    text.

    Raises ValueError for a text that begins like a chat but can't be read as one. Without the error, the
    model would read JSON as its question.
    """
    if not _BEGINNING_OF_CHAT.match(text):
        return None
    try:
        value = read_value(text)
    except UnreadableValue as error:
        raise ValueError(
            f"begins like a chat in JSON or Python, and can't be read as one: {error}"
        ) from error
    messages = value if isinstance(value, list) else [value]
    if not all(isinstance(message, dict) and "role" in message for message in messages):
        return None  # a question about JSON
    return messages


# Columns of Arrow


def restore_integers(array: pa.Array, integer_fields: Mapping[str, Any]) -> pa.Array:
    """Returns an array in which floats that were whole numbers are whole numbers again.

    Args:
        array: A column, or a field of its objects.
        integer_fields: The result of `find_integer_fields` for the column: it says which of the floats were
            whole numbers. It is empty if none were.
    """
    import pyarrow as pa
    import pyarrow.compute as compute

    if not integer_fields:
        return array
    if pa.types.is_floating(array.type):
        # A missing number is null or NaN. NaN becomes null, because integers have no NaN.
        is_number = compute.fill_null(compute.invert(compute.is_nan(array)), False)
        numbers_or_nulls = compute.if_else(is_number, array, None)
        return compute.cast(numbers_or_nulls, pa.int64())
    names, restored_fields = [], []
    for index in range(array.type.num_fields):
        name = array.type.field(index).name
        names.append(name)
        restored_fields.append(restore_integers(array.field(index), integer_fields.get(name, {})))
    return pa.StructArray.from_arrays(restored_fields, names=names, mask=compute.is_null(array))


def find_integer_fields(column: pa.ChunkedArray) -> dict[str, Any]:
    """Returns which floats of a column were whole numbers before a null turned the column into floats.

    A column of floats was one of whole numbers if some of its numbers are missing (null or NaN), and all
    others are whole. If no number is missing, the column was written with floats.

    The result for such a column is ``{"": True}``: it only has to be not empty. For a column of objects, the
    result has the fields that are such columns: ``{"index": {"": True}}``. For any other column the result is
    empty.
    """
    import pyarrow as pa
    import pyarrow.compute as compute

    if pa.types.is_struct(column.type):
        by_name = {}
        for field in column.type:
            integer_fields = find_integer_fields(compute.struct_field(column, field.name))
            if integer_fields:
                by_name[field.name] = integer_fields
        return by_name
    if not pa.types.is_float64(column.type):
        return {}
    numbers = compute.drop_null(column)
    numbers = compute.filter(numbers, compute.invert(compute.is_nan(numbers)))
    if len(numbers) in (0, len(column)):  # all numbers are missing, or none is
        return {}
    is_whole = compute.and_(
        compute.equal(numbers, compute.floor(numbers)),
        compute.less_equal(compute.abs(numbers), LARGEST_EXACT_INTEGER),
    )
    return {"": True} if compute.all(is_whole).as_py() else {}


def refuse_unclear_nulls(column: pa.ChunkedArray, name: str, source: str) -> None:
    """Raises ValueError for a column of golds that are objects, if their nulls are probably missing keys.

    In Arrow all objects of a column have the same keys, and a missing key becomes null. If at least one row
    has all keys, nulls are read as nulls, with a warning. If no row has all keys, and different keys are
    missing in different rows, the objects probably had different keys when they were written. Right answers
    would count as wrong if such golds were read with nulls.

    Args:
        column: The golds.
        name: The name of the column in messages.
        source: The file or data set in messages.
    """
    paths_with_nulls = []
    for path, objects in _objects_within(column, name):
        # The different sets of keys that an object has, and the keys that at least one object has.
        key_sets = set(_present_keys(objects))
        all_keys = frozenset[str]().union(*key_sets)
        if len(key_sets) > 1 and all_keys not in key_sets:
            examples = sorted(key_sets, key=sorted)[:2]
            shown_keys = " and ".join("{" + ", ".join(sorted(keys)) + "}" for keys in examples)
            raise ValueError(
                f"the golds under {path} of {source} have different keys from row to row ({shown_keys}), and"
                " Parquet has filled in null for missing keys, so that these can't be distinguished from real"
                " nulls: write golds as JSON text, or the rows as JSON lines"
            )
        if any(keys != set(objects.type.names) for keys in key_sets):  # a null in an object
            paths_with_nulls.append(path)
    if paths_with_nulls:
        log.warning(
            "golds under %s of %s have nulls, which are read as nulls: Parquet can't distinguish a null from"
            " a missing key. If rows had missing keys, write golds as JSON text",
            ", ".join(paths_with_nulls),
            source,
        )


def _objects_within(column: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the path and the array of each column of objects: the column itself, and those within its lists
    and objects."""
    import pyarrow as pa
    import pyarrow.compute as compute

    column = compute.drop_null(column)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        yield from _objects_within(compute.list_flatten(column), f"{path}[]")
    elif pa.types.is_struct(column.type) and len(column):  # without an object, there is nothing within it
        yield path, column
        for field in column.type:
            yield from _objects_within(compute.struct_field(column, field.name), f"{path}.{field.name}")


def _present_keys(objects: Any) -> Sequence[frozenset[str]]:
    """Returns the keys whose values aren't null, for each of the objects in an Arrow array."""
    import pyarrow.compute as compute

    keys_by_object: list[set[str]] = [set() for _ in range(len(objects))]
    for name in objects.type.names:
        is_valid = compute.is_valid(compute.struct_field(objects, name)).to_pylist()
        for keys, valid in zip(keys_by_object, is_valid, strict=True):
            if valid:
                keys.add(name)
    return list(map(frozenset, keys_by_object))
