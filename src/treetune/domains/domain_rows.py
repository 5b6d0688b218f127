"""Rows of data sets with many domains, in Parquet and in JSON lines.

This is the schema of verl and Reasoning360. ``data_source`` (``<domain>__<name>``) decides about the grader,
``prompt`` is a list of messages, ``reward_model`` contains the ground truth, and ``extra_info`` further
values for graders. Example::

    {"data_source": "math__dapo", "prompt": [{"role": "user", "content": "2 + 2 = ?"}],
     "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 17}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.domains.foreign import GOLD_IS_JSON
from treetune.store.files import write_atomically
from treetune.tasks.row_values import check_plain, is_empty, messages_in_text, text_of_value
from treetune.tasks.sources import JSON_FIELDS, ROW_GROUP, files_matching, read_rows
from treetune.vocabulary import Message, Problem

if TYPE_CHECKING:
    import pyarrow as pa

DATA_SOURCE, PROMPT, RAW_PROMPT = "data_source", "prompt", "raw_prompt"
ABILITY, APPLY_CHAT_TEMPLATE = "ability", "apply_chat_template"
REWARD_MODEL, STYLE, GROUND_TRUTH, EXTRA_INFO = "reward_model", "style", "ground_truth", "extra_info"

SCHEMA = (DATA_SOURCE, PROMPT, RAW_PROMPT, ABILITY, APPLY_CHAT_TEMPLATE, REWARD_MODEL, EXTRA_INFO)
"""The columns of the schema. A row may have others."""

LOW_PASS_RATE, HIGH_PASS_RATE = "low_pass_rate", "high_pass_rate"
"""Columns that a difficulty estimate adds. A problem can't be solved if the low rate, a strong model's, is
too low, and is too easy if the high rate, a weak model's, is too high."""

ROLES = ("system", "user", "assistant", "tool")
"""The roles that messages of a prompt may have."""
DomainRow = dict[str, Any]
"""A row with all columns of `SCHEMA`."""


def domain_of(data_source: str) -> str:
    """Returns ``math`` for ``math__dapo``."""
    return data_source.partition("__")[0]


def domain_row(
    data_source: str,
    prompt: str | Sequence[Mapping[str, str]],
    ground_truth: Any,
    *,
    ability: str = "",
    extra_info: Mapping[str, Any] | None = None,
    raw_prompt: str = "",
    apply_chat_template: bool = True,
) -> DomainRow:
    """Returns a row of the schema. A `prompt` that is text becomes one message of the user. A `ground_truth`
    that isn't text is written as JSON. Raises ValueError for values that can't be written as JSON."""
    check_plain(ground_truth, GROUND_TRUTH)
    check_plain(extra_info, EXTRA_INFO)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(dict, prompt))
    return {
        DATA_SOURCE: data_source,
        PROMPT: messages,
        RAW_PROMPT: raw_prompt,
        ABILITY: ability,
        APPLY_CHAT_TEMPLATE: apply_chat_template,
        REWARD_MODEL: {STYLE: "rule", GROUND_TRUTH: text_of_value(ground_truth)},
        EXTRA_INFO: dict(extra_info or {}),
    }


def normalise_row(row: Mapping[str, Any]) -> DomainRow:
    """Returns a row with all columns of the schema in their usual types, and with its other columns as they
    are.

    Raises ValueError with the reason if a column is missing or wrong.
    """
    source = row.get(DATA_SOURCE)
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"it has no {DATA_SOURCE}, which says which domain it is of, such as 'math__dapo'")
    reward = _read_object(row.get(REWARD_MODEL), REWARD_MODEL)
    ground_truth = reward.get(GROUND_TRUTH)
    if is_empty(ground_truth):
        state = "no" if ground_truth is None else "an empty"
        raise ValueError(f"its {REWARD_MODEL} has {state} {GROUND_TRUTH}")
    for name, value in row.items():
        if name not in (PROMPT, EXTRA_INFO):  # `_read_messages` and `domain_row` check these
            check_plain(value, name)
    applies_template = row.get(APPLY_CHAT_TEMPLATE)
    if applies_template is None:
        applies_template = True
    raw_prompt = row.get(RAW_PROMPT) or ""
    if not isinstance(applies_template, bool) or not isinstance(raw_prompt, str):
        raise ValueError(f"its {APPLY_CHAT_TEMPLATE} should be true or false, and its {RAW_PROMPT} text")
    # Without the chat template, the model gets the raw prompt as it is, and needs no messages.
    needs_messages = applies_template or not raw_prompt.strip()
    normalised = domain_row(
        source,
        _read_messages(row.get(PROMPT), needs_messages),
        ground_truth,
        ability=str(row.get(ABILITY) or ""),
        extra_info=_without_nulls(_read_object(row.get(EXTRA_INFO) or {}, EXTRA_INFO)),
        raw_prompt=raw_prompt,
        apply_chat_template=applies_template,
    )
    if isinstance(ground_truth, Mapping | list):
        # `domain_row` has written the ground truth as JSON text. With this mark, reward functions of other
        # libraries get it as the object or list that it was.
        normalised[EXTRA_INFO][GOLD_IS_JSON] = True
    # Keep the row's other keys of the reward model, such as its style.
    reward_fields = {name: value for name, value in reward.items() if value is not None}
    ground_truth_text = normalised[REWARD_MODEL][GROUND_TRUTH]
    normalised[REWARD_MODEL] = {STYLE: "rule", **reward_fields, GROUND_TRUTH: ground_truth_text}
    return {**row, **normalised}


def prompt_text(row: Mapping[str, Any]) -> str:
    """Returns the question without roles, for graders, people, and models without a chat."""
    if not row[APPLY_CHAT_TEMPLATE] and row[RAW_PROMPT]:
        return str(row[RAW_PROMPT])
    return "\n\n".join(message["content"] for message in row[PROMPT])


def problem_of(row: Mapping[str, Any], id: str) -> Problem:
    """Returns the problem of a row from `normalise_row`. Its data are the keys of `extra_info`, the source
    and the ability."""
    messages = tuple(Message(message["role"], message["content"]) for message in row[PROMPT])
    is_single_question = [message.role for message in messages] == ["user"]
    as_is = not row[APPLY_CHAT_TEMPLATE]
    return Problem(
        id=id,
        prompt=prompt_text(row),
        gold=row[REWARD_MODEL][GROUND_TRUTH],
        data={**row[EXTRA_INFO], DATA_SOURCE: row[DATA_SOURCE], ABILITY: row[ABILITY]},
        domain=domain_of(row[DATA_SOURCE]),
        # A single question has no `messages`, as in other tasks. It becomes a chat of one message anyway.
        messages=() if as_is or is_single_question else messages,
        as_is=as_is,
    )


def row_key(row: Mapping[str, Any]) -> str:
    """Returns a hash of source, prompt and ground truth. Rows with the same hash have the same question and
    answer."""
    question = [row[DATA_SOURCE], row[PROMPT], row[RAW_PROMPT], row[APPLY_CHAT_TEMPLATE]]
    text = json.dumps([*question, row[REWARD_MODEL][GROUND_TRUTH]], sort_keys=True)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()


def read_domain_rows(path: Path) -> Iterator[tuple[str, DomainRow]]:
    """Yields the rows of a file, or of all files that match the pattern `path`, as `normalise_row` returns
    them.

    Each row comes with its location, ``train.jsonl:18``. Raises ValueError for a row or a file that can't be
    read.
    """
    for file in files_matching(path):
        for file_and_line, row in read_rows(file):
            try:
                normalised = normalise_row(row)
            except ValueError as error:
                raise ValueError(f"{file_and_line}: {error}") from error
            yield file_and_line, normalised


def write_parquet(path: Path, rows: Iterable[DomainRow]) -> None:
    """Writes rows of the schema to a Parquet file, completely or not at all. Equal rows give equal bytes.

    It iterates over `rows` twice. In `extra_info`, texts, numbers, booleans and lists of these keep their
    type. All other values become JSON text, which `read_rows` decodes.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    # The first pass finds the type of each column, and the second one writes.
    kinds_of_info: dict[str, str] = {}  # the kind of the values of each key in `extra_info`
    kinds_of_columns: dict[str, str] = {}  # the kind of the values of each column outside of the schema
    for row in rows:
        _note_kinds(kinds_of_info, row[EXTRA_INFO])
        _note_kinds(kinds_of_columns, {name: value for name, value in row.items() if name not in SCHEMA})
    schema = arrow_schema(kinds_of_info, kinds_of_columns)
    with (
        write_atomically(path, "wb") as file,
        parquet.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        batch: list[DomainRow] = []
        for row in rows:
            further_columns = {
                name: _encode_value(row[name], kind)
                for name, kind in sorted(kinds_of_columns.items())
                if name in row
            }
            # A key that is None in every row has no kind, and is left out.
            info = {
                name: _encode_value(value, kinds_of_info[name])
                for name, value in row[EXTRA_INFO].items()
                if name in kinds_of_info
            }
            schema_columns = {name: row[name] for name in SCHEMA}
            batch.append({**schema_columns, EXTRA_INFO: info, **further_columns})
            if len(batch) == ROW_GROUP:
                writer.write_table(pa.Table.from_pylist(batch, schema))
                batch = []
        writer.write_table(pa.Table.from_pylist(batch, schema))


def arrow_schema(kinds_of_info: Mapping[str, str], kinds_of_columns: Mapping[str, str]) -> pa.Schema:
    """Returns the Arrow schema of a file.

    Args:
        kinds_of_info: The kind of the values of each key in `extra_info`: ``text``, ``int``, ``float``,
            ``bool``, ``json``, or ``list of …``.
        kinds_of_columns: The kind of the values of each further column.
    """
    import pyarrow as pa

    scalar_types = {
        "text": pa.string(),
        "json": pa.string(),
        "int": pa.int64(),
        "float": pa.float64(),
        "bool": pa.bool_(),
    }
    list_types = {f"list of {kind}": pa.list_(scalar_type) for kind, scalar_type in scalar_types.items()}
    types = scalar_types | list_types

    def fields_of(kinds: Mapping[str, str]) -> list[pa.Field]:
        return [pa.field(name, types[kind]) for name, kind in sorted(kinds.items())]

    # Parquet can't hold an object without fields. So `extra_info` without keys gets an empty field "index".
    info = fields_of(kinds_of_info) or [pa.field("index", pa.int64())]
    message = pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())])
    fields = [
        pa.field(DATA_SOURCE, pa.string()),
        pa.field(PROMPT, pa.list_(message)),
        pa.field(RAW_PROMPT, pa.string()),
        pa.field(ABILITY, pa.string()),
        pa.field(APPLY_CHAT_TEMPLATE, pa.bool_()),
        pa.field(
            REWARD_MODEL, pa.struct([pa.field(STYLE, pa.string()), pa.field(GROUND_TRUTH, pa.string())])
        ),
        pa.field(EXTRA_INFO, pa.struct(info)),
        *fields_of(kinds_of_columns),
    ]
    # The names of the values that are written as JSON text, which `read_rows` decodes: keys of `extra_info`,
    # and, under "", whole columns.
    names_in_json = {
        EXTRA_INFO: sorted(name for name, kind in kinds_of_info.items() if kind == "json"),
        "": sorted(name for name, kind in kinds_of_columns.items() if kind == "json"),
    }
    return pa.schema(fields, metadata={JSON_FIELDS: json.dumps(names_in_json).encode()})


_UNSUPPORTED_KEYS = ("tool_calls", "function_call", "tool_call_id", "images", "audio", "videos")
"""Keys of messages that change the question, and that `Message` has no field for."""


def _read_messages(prompt: Any, are_needed: bool) -> list[dict[str, str]]:
    """Returns a row's messages, each with only a role and a content.

    The list may be empty if `are_needed` is False.

    Raises ValueError for a prompt that isn't a chat, for a chat without a question, and for a chat with more
    than text.
    """
    if isinstance(prompt, str) and prompt.strip():  # a question, or a chat that is written as text
        try:
            prompt = messages_in_text(prompt) or [{"role": "user", "content": prompt}]
        except ValueError as error:
            raise ValueError(f"its {PROMPT} {error}") from error
    if not prompt and not are_needed:
        return []
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
        raise ValueError(f"its {PROMPT} should be a list of messages, each with role and content")
    messages = []
    for message in prompt:
        content = _read_content(message)
        role = message.get("role")
        if role not in ROLES:
            raise ValueError(f"its {PROMPT} has a message of role {role!r}: roles are {', '.join(ROLES)}")
        unsupported = [name for name in _UNSUPPORTED_KEYS if message.get(name)]
        if unsupported:
            raise ValueError(
                f"its {PROMPT} has a message of the {role} with {', '.join(unsupported)}, which prompts can't"
                " contain: write it into the content, or leave the row out"
            )
        if role == "user" and not content.strip():
            raise ValueError(f"its {PROMPT} has a message of the user with nothing in its content")
        messages.append({"role": role, "content": content})
    if not any(message["content"].strip() for message in messages):
        raise ValueError(f"its {PROMPT} asks nothing: the content of all its messages is empty")
    return messages


def _read_content(message: Any) -> str:
    """Returns the content of a message, which is a text or a list of parts of text.

    Raises ValueError for any other content.
    """
    fields = message if isinstance(message, Mapping) else {}
    content = fields.get("content")
    if content is None and any(fields.get(name) for name in _UNSUPPORTED_KEYS):
        return ""  # `_read_messages` refuses the message because of its other keys
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts: list[str] = []
    other_types: set[str] = set()  # types of parts that aren't text, such as "image_url"
    for part in parts:
        if not isinstance(part, Mapping):
            continue  # the missing text makes the message wrong
        if part.get("type") != "text":
            other_types.add(str(part.get("type")))
        elif isinstance(part.get("text"), str):
            texts.append(part["text"])
    if parts and len(texts) == len(parts):
        return "".join(texts)
    if other_types:
        raise ValueError(
            f"its {PROMPT} has a message with {', '.join(sorted(other_types))}: prompts can only contain text"
        )
    raise ValueError(f"its {PROMPT} contains {str(message)[:80]!r}, which is not {{role, content}}")


def _without_nulls(value: Any) -> Any:
    """Returns a value without the keys whose value is null, also in objects within it. In Parquet, each
    object has the keys of all rows, so null means that the row doesn't have the key."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _read_object(value: Any, name: str) -> dict[str, Any]:
    """Returns a field's value as a dictionary. Raises ValueError unless the value is an object, or the JSON
    text of one. `name` is the field's name, for the message."""
    if value is None:
        raise ValueError(f"it has no {name}")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, Mapping):
        raise ValueError(f"its {name} should be an object")
    return dict(value)


def _note_kinds(kinds: dict[str, str], values: Mapping[str, Any]) -> None:
    """Adds the kind of each value to `kinds`, by the value's name. If `kinds` has another kind already, the
    name gets a kind that fits both: float for int and float (or lists of these), otherwise ``json``."""
    for name, value in values.items():
        if value is None:
            continue
        earlier_kind, kind = kinds.get(name), _kind_of_value(value)
        if earlier_kind is None or earlier_kind == kind:
            kinds[name] = kind
        elif {earlier_kind, kind} == {"int", "float"}:
            kinds[name] = "float"
        elif {earlier_kind, kind} == {"list of int", "list of float"}:
            kinds[name] = "list of float"
        else:
            kinds[name] = "json"


def _kind_of_value(value: Any) -> str:
    """Returns the kind of a value (see `arrow_schema`)."""
    if isinstance(value, bool):  # before int, of which bool is a subclass
        return "bool"
    if isinstance(value, int):
        return "int" if -(2**63) <= value < 2**63 else "json"  # Parquet's integers have 64 bits
    if isinstance(value, float):
        return "float"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list) and value:
        kinds = {_kind_of_value(item) for item in value}
        if len(kinds) == 1 and kinds <= {"bool", "int", "float", "text"}:
            return f"list of {kinds.pop()}"
    return "json"


def _encode_value(value: Any, kind: str) -> Any:
    """Returns a value as it is written to a column of a kind: JSON text for ``json``, else the value."""
    if value is None or kind != "json":
        return value
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
