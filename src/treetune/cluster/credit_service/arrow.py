"""Requests and responses of the service as Arrow IPC streams, for batches that would be large as JSON.

A request is a table with a row for each answer. Its columns are the keys of an answer (`data` as a text with
JSON), and its schema has the settings as JSON in the metadata, under the key ``treetune``::

    table = pa.table({"prompt_ids": [[12, 7]], "response_ids": [[5, 6, 0]], "reward": [1.0], ...})
    table = table.replace_schema_metadata({"treetune": json.dumps({"credit": "rloo"})})

The response is such a table, too: a row for each answer, with cost and metrics in the metadata.

A small stream can hold a large table: with compressed buffers, or with columns whose rows refer to the same
values. Such streams are refused, so that the limit on the body's size bounds the memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from treetune.cluster.credit_service.messages import MOST_ANSWERS
from treetune.credit import CreditedAnswers, GradedAnswer

if TYPE_CHECKING:
    import pyarrow as pa

MEDIA_TYPE = "application/vnd.apache.arrow.stream"
METADATA_KEY = b"treetune"
"""The key in a schema's metadata that holds a request's settings, or the cost and the metrics of a
response."""

RECORD_BATCH, DICTIONARY_BATCH = 3, 2
"""The numbers of types of messages in a stream, from Arrow's Message.fbs."""
HEADER_TYPE_FIELD, HEADER_FIELD, COMPRESSION_FIELD = 1, 2, 3
"""The numbers of fields in Arrow's Message.fbs: the first two are fields of a Message, the last one is a
field of a RecordBatch."""


def read_request(body: bytes) -> tuple[str, list[GradedAnswer]]:
    """Returns the settings of a request as a JSON text, and its answers.

    Raises:
        ValueError: The body isn't an Arrow stream, it is compressed or has dictionaries, or the metadata or a
            column is missing or wrong.
    """
    import pyarrow as pa

    try:
        for message in _read_messages(body):
            _refuse_dictionaries_and_compression(message)
        table = pa.ipc.open_stream(body).read_all()
        table.validate(full=True)  # the offsets of lists may point anywhere
    except (pa.ArrowException, struct.error, EOFError, OSError) as error:
        raise ValueError(
            f"the body is not an Arrow IPC stream ({error}): write it with pyarrow.ipc.new_stream"
        ) from error
    if not 0 < table.num_rows <= MOST_ANSWERS:
        raise ValueError(f"the table has {table.num_rows} rows: give 1 to {MOST_ANSWERS} answers")
    settings = (table.schema.metadata or {}).get(METADATA_KEY)
    if settings is None:
        raise ValueError(
            "the schema's metadata has no key 'treetune': give the settings there as JSON, such as"
            ' {"credit": "rloo"}'
        )
    names = table.schema.names
    if len(set(names)) < len(names):
        raise ValueError("the table has two columns of the same name: give each once")
    columns = {}
    for field in table.schema:
        columns[field.name] = list(_read_column(field, table.column(field.name)))
    required_columns = ("prompt_ids", "response_ids", "reward")
    missing_columns = [name for name in required_columns if name not in columns]
    if missing_columns:
        raise ValueError(f"the column {missing_columns[0]!r} is missing")
    answers = []
    for number in range(table.num_rows):
        row = {}
        for name, column in columns.items():
            # An optional value that is missing gets the default of GradedAnswer. A required value that is
            # missing stays None, which `treetune.credit` reports with the number of the answer.
            if column[number] is not None or name in required_columns:
                row[name] = column[number]
        answers.append(GradedAnswer(**row))
    return settings.decode("utf-8", "replace"), answers


def write_response(credited: CreditedAnswers, cost_and_metrics: Mapping[str, Any]) -> bytes:
    """Returns the Arrow stream of a response, with `cost_and_metrics` as JSON in its schema's metadata."""
    import pyarrow as pa

    left_out = [False] * len(credited.advantages)
    for number in credited.left_out:
        left_out[number] = True
    table = pa.table(
        {
            "advantages": pa.array(credited.advantages, pa.list_(pa.float64())),
            "trained": pa.array(credited.trained, pa.list_(pa.bool_())),
            "step_ends": pa.array(credited.step_ends, pa.list_(pa.int64())),
            "values": pa.array(credited.values, pa.list_(pa.float64())),
            "errors": pa.array(credited.errors, pa.list_(pa.float64())),
            "left_out": pa.array(left_out, pa.bool_()),
        },
        metadata={METADATA_KEY: json.dumps(cost_and_metrics)},
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    contents: bytes = sink.getvalue().to_pybytes()
    return contents


# Columns


def _read_column(field: pa.Field, column: pa.ChunkedArray) -> Iterator[Any]:
    """Yields the values of a column; lists of numbers become NumPy arrays, and missing values None. Raises
    ValueError for a column whose name is unknown or whose type is wrong."""
    expected = _REQUEST_COLUMNS.get(field.name)
    if expected is None:
        raise ValueError(f"there is no column {field.name!r}; columns are {', '.join(_REQUEST_COLUMNS)}")
    description, fits, read = expected
    if not fits(field.type):
        raise ValueError(
            f"the column {field.name!r} has the type {field.type}: give {description}, without dictionaries"
            " and views"
        )
    for value in column:
        yield read(field.name, value) if value.is_valid else None


def _read_numbers(name: str, scalar: Any) -> Any:
    return scalar.values.to_numpy(zero_copy_only=False)


def _read_value(name: str, scalar: Any) -> Any:
    return scalar.as_py()


def _read_json(name: str, scalar: Any) -> Any:
    """Returns the object of a JSON text. Raises ValueError with the column's name."""
    try:
        value = json.loads(scalar.as_py())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the column {name!r} has a text that is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"the column {name!r} has {str(value)[:40]!r}: give a JSON object")
    return value


def _is_list_of(is_type: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Returns a function that says whether an Arrow type is a list whose entries' type `is_type` accepts."""

    def fits(type_: Any) -> bool:
        import pyarrow as pa

        return (pa.types.is_list(type_) or pa.types.is_large_list(type_)) and is_type(type_.value_type)

    return fits


def _is_integer(type_: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(type_))


def _is_number(type_: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_floating(type_) or pa.types.is_integer(type_))


def _is_bool(type_: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_boolean(type_))


def _is_text(type_: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


# The functions `_read_…` have the same arguments: the column's name and an Arrow scalar.
_Column = tuple[str, Callable[[Any], bool], Callable[[str, Any], Any]]

_REQUEST_COLUMNS: Mapping[str, _Column] = {
    "prompt_ids": ("lists of integers", _is_list_of(_is_integer), _read_numbers),
    "response_ids": ("lists of integers", _is_list_of(_is_integer), _read_numbers),
    "reward": ("numbers", _is_number, _read_value),
    "group": ("texts", _is_text, _read_value),
    "logprobs": ("lists of numbers", _is_list_of(_is_number), _read_numbers),
    "sampled": ("lists of booleans", _is_list_of(_is_bool), _read_numbers),
    "finished": ("booleans", _is_bool, _read_value),
    "prompt": ("texts", _is_text, _read_value),
    "gold": ("texts", _is_text, _read_value),
    "data": ("texts with JSON", _is_text, _read_json),
    "step_ends": ("lists of integers", _is_list_of(_is_integer), _read_value),
    "step_rewards": ("lists of numbers", _is_list_of(_is_number), _read_value),
    "fork": ("lists of two integers", _is_list_of(_is_integer), _read_value),
}
"""For each column, by its name: a description of its type for messages, a function that says whether an Arrow
type is right, and a function that reads a value from the column's name and an Arrow scalar."""


# Messages


def _read_messages(body: bytes) -> Iterator[pa.Message]:
    """Yields the messages of a stream: its schema, dictionaries and record batches."""
    import pyarrow as pa

    yield from pa.ipc.MessageReader.open_stream(body)


def _refuse_dictionaries_and_compression(message: pa.Message) -> None:
    """Raises ValueError for a message with dictionaries or with compressed buffers.

    pyarrow doesn't show whether a batch is compressed, so the metadata of the message is read here. The
    metadata is a flatbuffer: tables with fields. A field for another table holds the distance to that table.
    """
    metadata = message.metadata.to_pybytes()
    (root,) = struct.unpack_from("<I", metadata, 0)  # the position of the outermost table
    type_position = _field_position(metadata, root, HEADER_TYPE_FIELD)
    header_position = _field_position(metadata, root, HEADER_FIELD)
    if type_position is None or header_position is None:
        return
    header_type = metadata[type_position]
    if header_type == DICTIONARY_BATCH:
        raise ValueError("the stream has dictionaries: write plain columns")
    if header_type != RECORD_BATCH:
        return
    (distance,) = struct.unpack_from("<I", metadata, header_position)
    if _field_position(metadata, header_position + distance, COMPRESSION_FIELD) is not None:
        raise ValueError("the stream is compressed: write it without compression")


def _field_position(metadata: bytes, table: int, field: int) -> int | None:
    """Returns the position of a table's field in a flatbuffer; None if the table doesn't have it."""
    # A table begins with the distance back to its list of offsets, which flatbuffers call a vtable.
    (distance_back,) = struct.unpack_from("<i", metadata, table)
    offsets = table - distance_back
    # The list has numbers of two bytes. It begins with its own size in bytes and the table's size. Then comes
    # the offset of each field in the table, or 0 if the table doesn't have the field.
    (size,) = struct.unpack_from("<H", metadata, offsets)
    position = 4 + 2 * field
    if position + 2 > size:  # fields at the end may be left out
        return None
    (offset,) = struct.unpack_from("<H", metadata, offsets + position)
    return table + offset if offset else None
