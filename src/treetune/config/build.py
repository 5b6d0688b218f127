"""From a plain object to a checked graph of parts. The constructors' signatures are the schema.

Nothing is built by halves: every mistake of the whole object is collected, each with its key path,
the file that made it and a remedy, and raised as one `ConfigError`.
"""

from __future__ import annotations

import functools
import json
import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from treetune.config import schema
from treetune.config.errors import ConfigError, ConfigIssue, KeyPath, did_you_mean, dotted, nearest
from treetune.config.explain import MISSING, Explanation
from treetune.config.registrable import Registrable

F = TypeVar("F", bound=Registrable)

_FAILED = object()
"""Stands for what couldn't be built; whatever holds it isn't built either, without a word more."""


def build(family: type[F], data: Any, explanation: Explanation | None = None) -> F:
    """The part of `family` that ``data`` (``{type: …, …}``) describes, with all parts within.

    `explanation` tells which file set which key. Raises ConfigError with every mistake at once.
    """
    builder = _Builder(explanation)
    part = builder.value(family, data, ())
    issues = builder.issues()
    if issues:
        raise ConfigError(issues)
    assert part is not _FAILED
    return part  # type: ignore[no-any-return]


def schema_key(family: type[Registrable], data: Any, path: KeyPath) -> schema.Key | None:
    """The key that the schema has at `path` of ``data``, so that defaults can be told; or None."""
    annotation: Any = family
    key: schema.Key | None = None
    for depth, name in enumerate(path):
        here = data if isinstance(data, dict) else {}
        part = _part_class(annotation, here)
        container = schema.item_types(schema.bare(annotation)[0])
        if part is not None:
            key = schema.keys_of(part).get(name)
            if key is None:
                return None
            annotation = key.annotation
        elif container and container[1]:
            annotation = container[1][-1]
            key = schema.Key(name, annotation, schema.REQUIRED)
        else:
            return key if depth and data is not MISSING else None
        data = here.get(name, {}) if isinstance(data, dict) else {}
    return key


def _part_class(annotation: Any, data: Mapping[str, Any]) -> type | None:
    for member in schema.members(schema.bare(annotation)[0]):
        if schema.is_family(member) and data.get("type") in schema.choices(member):
            return schema.choices(member)[data["type"]]
        if schema.is_plain_part(member):
            return member  # type: ignore[no-any-return]
    return None


class _Builder:
    def __init__(self, explanation: Explanation | None) -> None:
        self._explanation = explanation
        self._issues: list[tuple[KeyPath, ConfigIssue]] = []
        self._unknown: list[tuple[KeyPath, type, str | None, type | None]] = []
        self._missing: list[tuple[KeyPath, schema.Key]] = []
        self._known: dict[KeyPath, list[str]] = {}

    def value(self, annotation: Any, data: Any, key: KeyPath) -> Any:
        """`data` as a value of `annotation`; _FAILED, with the mistakes noted, if it is none."""
        inner, constraints = schema.bare(annotation)
        if not schema.holds_parts(inner):
            return self._leaf(annotation, data, key)
        if constraints and not self._fits(annotation, constraints, data, key):
            return _FAILED
        if data is None and type(None) in schema.members(inner):
            return None
        alternatives = [member for member in schema.members(inner) if member is not type(None)]
        parts = [member for member in alternatives if schema.holds_parts(member)]
        if len(parts) < len(alternatives) and not isinstance(data, dict | list):
            return self._leaf(
                functools.reduce(operator.or_, [m for m in schema.members(inner) if m not in parts]),
                data,
                key,
            )
        families = [member for member in parts if schema.is_family(member)]
        if families and (isinstance(data, dict) or len(families) == len(parts)):
            return self._family_part(families, data, key, inner)
        if schema.is_plain_part(parts[0]):
            return self._object(parts[0], data, key, None, None, inner)
        return self._container(parts[0], data, key)

    def issues(self) -> list[ConfigIssue]:
        """All mistakes, in the order of their keys."""
        found = list(self._issues)
        meant: set[KeyPath] = set()
        for key, part, name, family in self._unknown:
            issue, instead = self._unknown_key(key, part, name, family)
            found.append((key, issue))
            meant |= instead
        for key, field in self._missing:
            if key not in meant:  # one misspelling is one mistake, not an unknown and a missing key
                found.append((key, self._missing_key(key, field)))
        return [issue for _, issue in sorted(found, key=lambda item: item[0])]

    def _family_part(self, families: Sequence[type], data: Any, key: KeyPath, annotation: Any) -> Any:
        registered = {name: part for family in families for name, part in schema.choices(family).items()}
        names = ", ".join(sorted(registered)) or "none"
        word = schema.family_word(families[0])
        if not isinstance(data, dict):
            what = f"should be an object {{type: …}}, is {_shown(data)}"
            return self._wrong(key, what, f"{self._how_to_set(key)}; types of {word}: {names}")
        if "type" not in data:
            return self._wrong(
                key,
                f"has no type, so that nobody knows which {word} it is",
                f"{self._how_to_set((*key, 'type'))}, one of: {names}",
            )
        name = data["type"]
        if not isinstance(name, str) or name not in registered:
            return self._wrong(
                (*key, "type"),
                f"there is no {word} {_shown(name)}",
                did_you_mean(str(name), list(registered)),
            )
        rest = {field: item for field, item in data.items() if field != "type"}
        return self._object(registered[name], rest, key, name, families[0], annotation)

    def _object(
        self, part: type, data: Any, key: KeyPath, name: str | None, family: type | None, annotation: Any
    ) -> Any:
        if not isinstance(data, dict):
            return self._wrong(key, f"should be {schema.describe(annotation)}, is {_shown(data)}", None)
        keys = schema.keys_of(part)
        self._known[key] = list(keys)
        for field in data.keys() - keys.keys():
            self._unknown.append(((*key, field), part, name, family))
        values = {}
        failed = bool(data.keys() - keys.keys())
        for field, declared in keys.items():
            if field in data:
                values[field] = self.value(declared.annotation, data[field], (*key, field))
                failed |= values[field] is _FAILED
            elif declared.required:
                self._missing.append(((*key, field), declared))
                failed = True
        if failed:
            return _FAILED
        try:
            return part(**values)
        except ValueError as error:
            return self._refused(part, key, data, error)

    def _refused(self, part: type, key: KeyPath, data: Mapping[str, Any], error: ValueError) -> Any:
        """The constructor said no: it saw keys that are each right and don't go together."""
        words = set(
            str(error).replace("'", " ").replace("`", " ").replace(",", " ").replace(".", " ").split()
        )
        sources = []
        for name in schema.keys_of(part):
            if name in words and name in data:
                sources.append(f"{name} from {self._source((*key, name))}")
        where = ", ".join(sources) or self._source(key)
        named = [name for name in schema.keys_of(part) if name in words]
        remedy = f"change {' or '.join(dotted((*key, name)) for name in named)}" if named else None
        if named:
            remedy += f", e.g. --override '{_nested((*key, named[0]))}'"  # type: ignore[operator]
        self._issues.append((key, ConfigIssue(str(error), dotted(key) or "configuration", where, remedy)))
        return _FAILED

    def _container(self, annotation: Any, data: Any, key: KeyPath) -> Any:
        described = schema.item_types(annotation)
        assert described is not None
        kind, items = described
        if not isinstance(data, dict if kind == "object" else list):
            return self._wrong(key, f"should be {schema.describe(annotation)}, is {_shown(data)}", None)
        if kind == "object":
            built = {name: self.value(items[0], item, (*key, name)) for name, item in data.items()}
            return _FAILED if any(item is _FAILED for item in built.values()) else built
        if kind == "tuple" and len(items) != len(data):
            return self._wrong(key, f"should be {schema.describe(annotation)}, has {len(data)}", None)
        each = items if kind == "tuple" else items * len(data)
        values = [self.value(each[i], item, (*key, str(i))) for i, item in enumerate(data)]
        if any(item is _FAILED for item in values):
            return _FAILED
        origin = getattr(annotation, "__origin__", list)
        return origin(values) if origin in (list, set, frozenset) else tuple(values)

    def _leaf(self, annotation: Any, data: Any, key: KeyPath) -> Any:
        try:
            return _adapter(annotation).validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            found = error.errors()[0]
            for step in found["loc"]:  # in a list or object of plain values, name the item that is wrong
                container = schema.item_types(schema.bare(annotation)[0])
                if container is None or not container[1] or not isinstance(data, dict | list):
                    break
                data = data[step]  # type: ignore[call-overload]
                key = (*key, str(step))
                annotation = container[1][int(step) if container[0] == "tuple" else 0]
            what = f"should be {schema.describe(annotation)}, is {_shown(data)}"
            if found["type"] in ("value_error", "predicate_failed"):
                what += f" ({found['msg']})"
            return self._wrong(key, what, _type_remedy(annotation, data))

    def _fits(self, annotation: Any, constraints: tuple[Any, ...], data: Any, key: KeyPath) -> bool:
        """Constraints on a list or object of parts, such as its length."""
        container = schema.item_types(schema.bare(annotation)[0])
        if container is None or not isinstance(data, list | dict):
            return True  # its own check will say what is wrong
        base: Any = dict[str, Any] if container[0] == "object" else list[Any]
        for constraint in constraints:
            base = Annotated[base, constraint]
        try:
            _adapter(base).validate_json(json.dumps(data), strict=True)
        except ValidationError:
            self._wrong(key, f"should be {schema.describe(annotation)}, has {len(data)}", None)
            return False
        return True

    def _wrong(self, key: KeyPath, what: str, remedy: str | None) -> Any:
        remedy = remedy or (f"{self._how_to_set(key)}" if key else None)
        self._issues.append(
            (key, ConfigIssue(what, dotted(key) or "configuration", self._source(key), remedy))
        )
        return _FAILED

    def _unknown_key(
        self, key: KeyPath, part: type, name: str | None, family: type | None
    ) -> tuple[ConfigIssue, set[KeyPath]]:
        field, owner = key[-1], key[:-1]
        known = list(schema.keys_of(part))
        what = f"unknown key of {schema.family_word(family)} {name!r}" if family else "unknown key"
        meant: set[KeyPath] = set()
        remedy = did_you_mean(field, known)
        match = nearest(field, known)
        elsewhere = [path for path, fields in self._known.items() if field in fields and _is_writable(path)]
        siblings = []
        if family:
            siblings = [
                other for other, cls in schema.choices(family).items() if field in schema.keys_of(cls)
            ]
        if siblings:
            remedy = (
                f"it is a key of {' and '.join(map(repr, siblings))}: choose that type, or drop the key; where the "
                f"type was changed over another file's object, write `{owner[-1] if owner else ''}: {{…}}` "
                "without `+` to start afresh"
            )
        elif elsewhere and not match:
            remedy = f"it belongs elsewhere: --override '{_nested((*elsewhere[0], field))}'"
        elif match:
            meant.add((*owner, match[0]))
        return ConfigIssue(what, dotted(key), self._source(key), remedy), meant

    def _missing_key(self, key: KeyPath, field: schema.Key) -> ConfigIssue:
        what = f"missing, should be {schema.describe(field.annotation)}"
        lost = self._explanation.settings(key) if self._explanation else []
        owner = self._source(key[:-1])
        if lost:
            remedy = (
                f"{lost[-1].place} sets it, and {owner} replaces the whole of {dotted(key[:-1])}: "
                f"write `{key[-2]}+: {{…}}` there to keep what was set before"
            )
            return ConfigIssue(what, dotted(key), owner, remedy)
        where = (
            f"no file sets it; the object is made by {owner}" if owner and len(key) > 1 else "no file sets it"
        )
        return ConfigIssue(what, dotted(key), where, self._how_to_set(key))

    def _how_to_set(self, key: KeyPath) -> str:
        return f"set {dotted(key)} in a file, or --override '{_nested(key)}'"

    def _source(self, key: KeyPath) -> str | None:
        if self._explanation is None:
            return None
        while key:
            found = self._explanation.source(key)
            if found:
                return found
            key = key[:-1]
        return None


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TypeAdapter(annotation)


def _type_remedy(annotation: Any, data: Any) -> str | None:
    """The same value written as it should be, where that can be guessed."""
    words = schema.describe(annotation)
    if isinstance(data, str):
        literals = [
            value
            for member in schema.members(schema.bare(annotation)[0])
            for value in getattr(member, "__args__", ())
            if isinstance(value, str)
        ]
        match = nearest(data, literals)
        if match:
            return f"did you mean {match[0]!r}?"
        try:
            float(data)
        except ValueError:
            pass
        else:
            return f"without quotes: {data}" if "number" in words else None
        if data.lower() in ("true", "false") and "true or false" in words:
            return f"without quotes: {data.lower()}"
    if isinstance(data, int | float) and words.startswith("a text"):
        return f"with quotes: '{data}'"
    return None


def _is_writable(key: KeyPath) -> bool:
    """Whether a path has only keys: Jsonnet has no way to change one item of a list."""
    return not any(part.isdecimal() for part in key)


def _nested(key: KeyPath) -> str:
    """``{trainer+: {learning_rate: …}}``, down to the first list on the way."""
    text = "…"
    for depth, part in enumerate(key):
        if part.isdecimal():
            key, text = key[:depth], "[…]"
            break
    for depth, part in enumerate(reversed(key)):
        text = f"{{{part}{'+' if depth else ''}: {text}}}"
    return text


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
