"""Describes for people and their editors what a configuration can hold: each registered part with its keys.

A key is explained by the text literal below its field or, where there is none, by the sentences of the
class's docstring that name it in backticks. The class itself is asked before those that it builds on.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from treetune.config import schema
from treetune.config.explain import as_plain
from treetune.config.registrable import Registrable

_ABBREVIATION = re.compile(r"(?:\b(?:al|dr|eq|sec|e\.g|i\.e|vs|cf|fig|no)\.)$", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[^a-z\s])")


@dataclass(frozen=True)
class KeyEntry:
    """A key of a part. `default` is the default in Jsonnet; None if the key must be given."""

    name: str
    type: str
    default: str | None
    meaning: str


@dataclass(frozen=True)
class PartEntry:
    """A part: a registered one with the `name` that users write as `type`, or a plain object's class."""

    family: str
    name: str | None
    part: type
    keys: tuple[KeyEntry, ...]

    @property
    def title(self) -> str:
        return f"{self.family} {self.name!r}" if self.name else self.family

    @property
    def text(self) -> str:
        return docstring_of(self.part)

    @property
    def qualified_name(self) -> str:
        return f"{self.part.__module__}.{self.part.__qualname__}"


def list_families() -> list[type[Registrable]]:
    """Returns every family that has a part, sorted by name."""
    with_parts = [family for family in Registrable.__subclasses__() if family.parts_by_name()]
    return sorted(with_parts, key=schema.family_word)


def part_entries(family: type[Registrable]) -> list[PartEntry]:
    """Returns the parts of a family, sorted by name."""
    word = schema.family_word(family)
    return [part_entry(part, word, name) for name, part in sorted(family.parts_by_name().items())]


def part_entry(part: type, family: str | None = None, name: str | None = None) -> PartEntry:
    """Returns what `describe` says about a part. `family` and `name` are None for a plain object's class."""
    keys = tuple(key_entry(part, key) for key in schema.keys_of(part).values())
    return PartEntry(family or schema.family_word(part), name, part, keys)


def key_entry(part: type, key: schema.Key) -> KeyEntry:
    """Returns what `describe` says about a key of a part."""
    default = None if key.required else as_jsonnet(key.default)
    return KeyEntry(key.name, schema.describe_type(key.annotation), default, key_meaning(part, key))


def key_meaning(part: type, key: schema.Key) -> str:
    """Returns what the part's class says about the key.

    If the class says nothing, returns what the class of an object in the key's value says about itself.
    """
    if key is schema.IMPORTS_KEY:
        return "Modules of your own, such as 'my_package.my_part': their parts can then be chosen by `type`."
    if text := meaning_of_key(part, key.name):
        return text
    for object_class in objects_within(key.annotation):
        if text := first_sentence_of(object_class):
            return text
    return ""


def objects_within(annotation: Any) -> Iterator[type]:
    """Yields the families and plain parts that a value of this type may hold."""
    inner, _ = schema.split_constraints(annotation)
    if schema.is_family(inner) or schema.is_plain_part(inner):
        yield inner
        return
    container = schema.item_types(inner)
    if container is not None:
        _, contained_types = container
    else:
        contained_types = schema.alternatives_of(inner)
    for contained in contained_types:
        # `alternatives_of` returns a type that isn't a union as it is, and such a type holds nothing.
        if contained is not inner:
            yield from objects_within(contained)


def plain_parts(part: type) -> list[type]:
    """Returns the plain parts that a part may hold, at any depth: the classes of objects without `type`."""
    parts_without_type: list[type] = []
    to_visit = [part]
    while to_visit:
        for key in schema.keys_of(to_visit.pop()).values():
            for inner in objects_within(key.annotation):
                if schema.is_plain_part(inner) and inner not in parts_without_type:
                    parts_without_type.append(inner)
                    to_visit.append(inner)
    return parts_without_type


def find_describable_entries() -> dict[str, list[PartEntry]]:
    """Returns the entries of `describe` by every name that `describe` takes.

    A part with a `type` has two names: ``grpo`` and ``objective.grpo``. Several parts may share a type. A
    plain part, which is an object without `type`, has the name of its class.
    """
    by_name: dict[str, list[PartEntry]] = {}
    plain: list[type] = []
    for family in list_families():
        for entry in part_entries(family):
            assert entry.name is not None
            by_name.setdefault(entry.name, []).append(entry)
            by_name.setdefault(f"{with_underscores(entry.family)}.{entry.name}", []).append(entry)
            plain += [inner for inner in plain_parts(entry.part) if inner not in plain]
    for part in plain:
        by_name.setdefault(with_underscores(schema.family_word(part)), []).append(part_entry(part))
    return by_name


def with_underscores(name: str) -> str:
    """Returns a name as a single word in small letters: ``model_source`` for ``Model source``."""
    return re.sub(r"[\s_-]+", "_", name.strip().lower())


def as_jsonnet(value: Any) -> str:
    """Returns a default value as a configuration would write it."""
    return json.dumps(value, ensure_ascii=False, default=as_plain)


# The same as a JSON schema, for editors


def json_schema(roots: Sequence[type[Registrable]]) -> dict[str, Any]:
    """Returns the JSON schema (draft 2020-12) of every whole configuration: parts, keys, types, bounds.

    The schema says what `build` checks in each single value. No schema can say what constructors refuse, or
    what parts find wrong in other parts.
    """
    shared: dict[str, Any] = {}  # the schemas of families and parts, which refer to each other
    reference_to_schema_of_roots = _add_schema_of_families(roots, shared)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **reference_to_schema_of_roots,
        "$defs": shared,
    }


def _add_schema_of_families(families: Sequence[type[Registrable]], shared: dict[str, Any]) -> dict[str, Any]:
    """Returns a reference to the schema of these families' parts, and adds the schema itself to `shared`.

    The schema is that of objects whose `type` chooses a part of the families.
    """
    title = " or ".join(schema.family_word(family) for family in families)
    if title not in shared:
        parts: dict[str, type] = {}
        for family in families:
            parts |= schema.registered_parts(family)
        default = families[0].default  # `build` takes this part for an object without `type`
        cases: list[dict[str, Any]] = []
        # The schema is added before its parts are read, since a part may hold another part of its own family.
        shared[title] = {"type": "object", "allOf": cases}
        for name, part in sorted(parts.items()):
            # The condition of this case is that the object's `type` is `name`. For the default part, an
            # object without `type` meets it, too.
            required = [] if name == default else ["type"]
            is_chosen = {"properties": {"type": {"const": name}}, "required": required}
            cases.append({"if": is_chosen, "then": _object_schema(part, shared, name)})
        shared[title] |= {
            "properties": {"type": {"enum": sorted(parts), "description": first_sentence_of(families[0])}},
            "required": [] if default in parts else ["type"],
        }
    return {"$ref": f"#/$defs/{title.replace(' ', '%20')}"}


def _object_schema(part: type, shared: dict[str, Any], name: str | None = None) -> dict[str, Any]:
    """Returns a reference to the schema of objects of one class. If `name` is given, it is their `type`.

    The schema itself is added to `shared`, which has the schemas that references lead to.
    """
    title = f"{part.__module__}.{part.__qualname__}{f' {name}' if name else ''}"
    if title not in shared:
        keys = schema.keys_of(part)
        shared[title] = {}  # set before the keys are read, since a part may hold another of its class
        properties: dict[str, Any] = {"type": {"const": name}} if name else {}
        for key in keys.values():
            value_schema = _value_schema(key.annotation, shared)
            if text := key_meaning(part, key):
                value_schema = value_schema | {"description": text}
            if not key.required:
                # `as_jsonnet` writes objects, such as parts and paths, as plain values.
                default = json.loads(as_jsonnet(key.default))
                value_schema = value_schema | {"default": default}
            properties[key.name] = value_schema
        shared[title] = {
            "type": "object",
            "description": first_sentence_of(part),
            "properties": properties,
            "required": [key.name for key in keys.values() if key.required],
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{title.replace(' ', '%20')}"}


def _value_schema(annotation: Any, shared: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a key's value.

    The schema of a part in it is added to `shared`, and the returned schema refers to it there.
    """
    inner, constraints = schema.split_constraints(annotation)
    if not schema.holds_parts(inner):
        return schema.validator_of(annotation).json_schema()
    if schema.is_family(inner):
        return _add_schema_of_families([inner], shared)
    if schema.is_plain_part(inner):
        return _object_schema(inner, shared)
    container = schema.item_types(inner)
    if container is not None:
        kind, item_annotations = container
        return _container_schema(kind, item_annotations, constraints, shared)
    # The type is a union. All families in it have one schema, in which `type` chooses the part.
    alternatives = schema.alternatives_of(inner)
    families = [alternative for alternative in alternatives if schema.is_family(alternative)]
    schemas = [_add_schema_of_families(families, shared)] if families else []
    for alternative in alternatives:
        if not schema.is_family(alternative):
            schemas.append(_value_schema(alternative, shared))
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _container_schema(
    kind: str, item_annotations: Sequence[Any], constraints: Sequence[Any], shared: dict[str, Any]
) -> dict[str, Any]:
    """Returns the schema of a "list", a "tuple" or an "object" that contains parts.

    `constraints` bound its length. The schemas of the parts are added to `shared`.
    """
    item_schemas = [_value_schema(item, shared) for item in item_annotations]
    schema_of_items: dict[str, Any]
    if kind == "tuple":
        count = len(item_schemas)
        schema_of_items = {"prefixItems": item_schemas, "minItems": count, "maxItems": count}
    elif kind == "object":
        schema_of_items = {"additionalProperties": item_schemas[0]}
    else:
        schema_of_items = {"items": item_schemas[0]}
    # Pydantic can't describe parts, but it translates the constraints: MinLen of a list is minItems. So it
    # gets the container with items of any type.
    container_of_anything: Any = dict[str, Any] if kind == "object" else list[Any]
    for constraint in constraints:
        container_of_anything = Annotated[container_of_anything, constraint]
    return schema.validator_of(container_of_anything).json_schema() | schema_of_items


# Meanings: the words that a class has for itself and its keys


def docstring_of(part: type) -> str:
    """Returns the class's own docstring, or "" where it has none. (A dataclass's signature is no
    docstring.)"""
    text = inspect.cleandoc(part.__dict__.get("__doc__") or "")
    return "" if text.startswith(f"{part.__name__}(") else text


def first_sentence_of(part: type) -> str:
    """Returns the first sentence of a part's docstring.

    If the part's class has no docstring, it is that of the nearest base class with a docstring.
    """
    for base in part.__mro__[:-1]:
        if text := split_sentences(docstring_of(base)):
            return text[0]
    return ""


def meaning_of_key(part: type, key: str) -> str:
    """Returns the meaning of a part's key, or "" where nothing explains it.

    The meaning is the text below the key's field. If there is none, it is those sentences of the class's
    docstring that name the key. If the class says nothing, its base classes are asked in their order.
    """
    # Matches the key in single backquotes, but not in double ones.
    name = re.compile(rf"(?<!`)`{re.escape(key)}`(?!`)")
    for base in part.__mro__[:-1]:
        file = inspect.getsourcefile(base)
        texts_of_classes = _texts_of_file(file) if file else {}
        texts_of_fields = texts_of_classes.get(base.__qualname__, {})
        if text := texts_of_fields.get(key):
            return text
        naming = [sentence for sentence in split_sentences(docstring_of(base)) if name.search(sentence)]
        if naming:
            return " ".join(naming)
    return ""


def split_sentences(text: str) -> list[str]:
    """Returns the sentences of a docstring, each in one line. The end of a paragraph ends a sentence."""
    result: list[str] = []
    for paragraph in re.split(r"\n\s*\n", textwrap.dedent(text)):
        if not paragraph.strip():
            continue
        first_piece, *further_pieces = _SENTENCE_END.split(" ".join(paragraph.split()))
        result.append(first_piece)
        for piece in further_pieces:
            # After an abbreviation the sentence goes on: "by Kim et al. (2023)".
            if _ABBREVIATION.search(result[-1]):
                result[-1] += f" {piece}"
            else:
                result.append(piece)
    return result


@functools.cache
def _texts_of_file(file: str) -> dict[str, dict[str, str]]:
    """Returns the docstrings of fields, by class and field, of a Python file."""
    if not Path(file).is_file():  # e.g. for a class that was defined at a prompt
        return {}
    texts_by_class: dict[str, dict[str, str]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                texts_by_class[prefix + node.name] = _texts_of_class(node)
                visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(Path(file).read_text(encoding="utf-8")).body, "")
    return texts_by_class


def _texts_of_class(node: ast.ClassDef) -> dict[str, str]:
    """Returns the text literals directly below annotated fields of a class, by field."""
    texts = {}
    for field, below in itertools.pairwise(node.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            texts[field.target.id] = " ".join(below.value.value.split())
    return texts
