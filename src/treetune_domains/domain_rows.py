"""Rows as data sets of many domains have them, in Parquet and in JSON lines.

``data_source`` (``<domain>__<name>``) says which grader a row is for, ``prompt`` is a list of messages,
``reward_model`` holds the ground truth, and ``extra_info`` whatever else a grader may want. This is the
schema that verl and Reasoning360 read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.store.files import whole_file
from treetune.tasks.sources import JSON_FIELDS, ROW_GROUP, files_matching, read_rows
from treetune.vocabulary import Message, Problem
from treetune_domains.foreign import GOLD_IS_JSON

if TYPE_CHECKING:
    import pyarrow as pa

DATA_SOURCE, PROMPT, RAW_PROMPT = "data_source", "prompt", "raw_prompt"
ABILITY, APPLY_CHAT_TEMPLATE = "ability", "apply_chat_template"
REWARD_MODEL, STYLE, GROUND_TRUTH, EXTRA_INFO = "reward_model", "style", "ground_truth", "extra_info"

SCHEMA = (DATA_SOURCE, PROMPT, RAW_PROMPT, ABILITY, APPLY_CHAT_TEMPLATE, REWARD_MODEL, EXTRA_INFO)
"""The columns of a row; others are columns of its own."""

LOW_PASS_RATE, HIGH_PASS_RATE = "low_pass_rate", "high_pass_rate"
"""Columns that a difficulty estimate adds. A row goes whose low rate is too low (a strong model's: it can't
be solved) or whose high rate is too high (a weak model's: it is too easy)."""

ROLES = ("system", "user", "assistant", "tool")
Row = dict[str, Any]


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
) -> Row:
    """Returns a row of the schema. A `prompt` of text is the user's one message; a `ground_truth` that is no
    text is written as JSON."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(dict, prompt))
    return {
        DATA_SOURCE: data_source,
        PROMPT: messages,
        RAW_PROMPT: raw_prompt,
        ABILITY: ability,
        APPLY_CHAT_TEMPLATE: apply_chat_template,
        REWARD_MODEL: {STYLE: "rule", GROUND_TRUTH: _text(ground_truth)},
        EXTRA_INFO: dict(extra_info or {}),
    }


def normalised(row: Mapping[str, Any]) -> Row:
    """Returns the row with all columns of the schema, and its own ones. Raises ValueError with what it
    lacks."""
    source = row.get(DATA_SOURCE)
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"it has no {DATA_SOURCE}, which says which domain it is of, such as 'math__dapo'")
    reward = _object(row.get(REWARD_MODEL), REWARD_MODEL)
    if reward.get(GROUND_TRUTH) is None:
        raise ValueError(f"its {REWARD_MODEL} has no {GROUND_TRUTH}")
    applies = row.get(APPLY_CHAT_TEMPLATE)
    applies = True if applies is None else applies
    raw = row.get(RAW_PROMPT) or ""
    if not isinstance(applies, bool) or not isinstance(raw, str):
        raise ValueError(f"its {APPLY_CHAT_TEMPLATE} should be true or false, and its {RAW_PROMPT} text")
    full = domain_row(
        source,
        _messages(row.get(PROMPT), raw if not applies else ""),
        reward[GROUND_TRUTH],
        ability=str(row.get(ABILITY) or ""),
        extra_info=_object(row.get(EXTRA_INFO) or {}, EXTRA_INFO),
        raw_prompt=raw,
        apply_chat_template=applies,
    )
    if isinstance(reward[GROUND_TRUTH], Mapping | list):
        full[EXTRA_INFO][GOLD_IS_JSON] = True
    full[REWARD_MODEL] = {STYLE: "rule", **reward, GROUND_TRUTH: full[REWARD_MODEL][GROUND_TRUTH]}
    return {**row, **full}


def prompt_text(row: Mapping[str, Any]) -> str:
    """Returns the question without roles: for graders and people, and for models that don't chat."""
    if not row[APPLY_CHAT_TEMPLATE] and row[RAW_PROMPT]:
        return str(row[RAW_PROMPT])
    return "\n\n".join(message["content"] for message in row[PROMPT])


def problem_of(row: Mapping[str, Any], id: str) -> Problem:
    """Returns the problem of a `normalised` row. Its data are the keys of `extra_info`, the source and the
    ability."""
    messages = tuple(Message(one["role"], one["content"]) for one in row[PROMPT])
    asked_alone = [message.role for message in messages] == ["user"]
    as_is = not row[APPLY_CHAT_TEMPLATE]
    return Problem(
        id=id,
        prompt=prompt_text(row),
        gold=row[REWARD_MODEL][GROUND_TRUTH],
        data={**row[EXTRA_INFO], DATA_SOURCE: row[DATA_SOURCE], ABILITY: row[ABILITY]},
        domain=domain_of(row[DATA_SOURCE]),
        messages=() if as_is or asked_alone else messages,
        as_is=as_is,
    )


def row_key(row: Mapping[str, Any]) -> str:
    """Returns a hash of source, prompt and ground truth: rows with the same one ask the same question and
    have the same answer, wherever they are."""
    asked = [row[DATA_SOURCE], row[PROMPT], row[RAW_PROMPT], row[APPLY_CHAT_TEMPLATE]]
    text = json.dumps([*asked, row[REWARD_MODEL][GROUND_TRUTH]], sort_keys=True)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()


def read_domain_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yields the rows of a Parquet or JSON-lines file, or of all that match the pattern `path`, `normalised`,
    each with its place. Raises ValueError."""
    for file in files_matching(path):
        for place, row in read_rows(file):
            try:
                full = normalised(row)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            yield place, full


def write_parquet(path: Path, rows: Iterable[Row]) -> None:
    """Writes rows of the schema to a Parquet file, whole or not at all; the same rows give the same bytes.

    Goes through `rows` twice. Of `extra_info`, text, numbers, truth values and lists of such keep their type;
    all else is JSON text, which `read_rows` reads again.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    kinds: dict[str, str] = {}
    columns: dict[str, str] = {}
    for row in rows:
        _note_kinds(kinds, row[EXTRA_INFO])
        _note_kinds(columns, {name: value for name, value in row.items() if name not in SCHEMA})
    schema = arrow_schema(kinds, columns)
    with (
        whole_file(path, "wb") as file,
        parquet.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        batch: list[Row] = []
        for row in rows:
            more = {name: _stored(row[name], columns[name]) for name in sorted(columns) if name in row}
            info = {name: _stored(value, kinds[name]) for name, value in row[EXTRA_INFO].items()}
            batch.append({**{name: row[name] for name in SCHEMA}, EXTRA_INFO: info, **more})
            if len(batch) == ROW_GROUP:
                writer.write_table(pa.Table.from_pylist(batch, schema))
                batch = []
        writer.write_table(pa.Table.from_pylist(batch, schema))


def arrow_schema(kinds: Mapping[str, str], columns: Mapping[str, str]) -> pa.Schema:
    """Returns the schema of a file, given the kinds of values in its `extra_info` (``text``, ``int``,
    ``float``, ``bool``, ``json``, or ``list of …``) and in its columns beside the schema's own."""
    import pyarrow as pa

    plain = {
        "text": pa.string(),
        "json": pa.string(),
        "int": pa.int64(),
        "float": pa.float64(),
        "bool": pa.bool_(),
    }
    types = {**plain, **{f"list of {name}": pa.list_(kind) for name, kind in plain.items()}}
    # Parquet can't hold an object without fields.
    info = [pa.field(name, types[kinds[name]]) for name in sorted(kinds)] or [pa.field("index", pa.int64())]
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
        *(pa.field(name, types[columns[name]]) for name in sorted(columns)),
    ]
    in_json = {
        EXTRA_INFO: sorted(name for name, kind in kinds.items() if kind == "json"),
        "": sorted(name for name, kind in columns.items() if kind == "json"),
    }
    return pa.schema(fields, metadata={JSON_FIELDS: json.dumps(in_json).encode()})


def _messages(prompt: Any, raw: str) -> list[dict[str, str]]:
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": prompt}]
    if not prompt and raw.strip():
        return []
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
        raise ValueError(f"its {PROMPT} should be a list of messages, each with role and content")
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise ValueError(f"its {PROMPT} holds {str(message)[:80]!r}, which is no {{role, content}}")
        if message.get("role") not in ROLES:
            raise ValueError(
                f"its {PROMPT} has a message of role {message.get('role')!r}: roles are {', '.join(ROLES)}"
            )
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def _object(value: Any, name: str) -> dict[str, Any]:
    """Returns a field that is an object, or JSON text of one, as a dictionary."""
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


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _note_kinds(kinds: dict[str, str], values: Mapping[str, Any]) -> None:
    """Widens `kinds` to the narrowest kind that holds all values under each name."""
    for name, value in values.items():
        if value is None:
            continue
        seen, now = kinds.get(name), _kind(value)
        if seen is None or seen == now:
            kinds[name] = now
        elif {seen, now} == {"int", "float"}:
            kinds[name] = "float"
        elif {seen, now} == {"list of int", "list of float"}:
            kinds[name] = "list of float"
        else:
            kinds[name] = "json"


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if -(2**63) <= value < 2**63 else "json"
    if isinstance(value, float):
        return "float"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list) and value:
        kinds = {_kind(one) for one in value}
        if len(kinds) == 1 and (kind := kinds.pop()) in ("bool", "int", "float", "text"):
            return f"list of {kind}"
    return "json"


def _stored(value: Any, kind: str) -> Any:
    if value is None or kind != "json":
        return value
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
