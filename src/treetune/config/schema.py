"""Reads schemas off constructors: which keys a part has, of which types, with which defaults."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import annotated_types
from pydantic import PydanticSchemaGenerationError, TypeAdapter

from treetune.config.registrable import Registrable

PARTS_ENTRY_POINT = "treetune.parts"
"""The group of entry points in which installed packages name their modules with parts."""

OWN_PACKAGE = "treetune"

NO_DEFAULT = object()
"""The default of a key that has none."""

_DESCRIPTIONS = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    type(None): "null",
    Path: "a path",
    Any: "anything",
    object: "anything",
}
_PLURALS = {
    "a whole number": "whole numbers",
    "a number": "numbers",
    "a string": "strings",
    "a path": "paths",
}
"""Names of plain types in lists: "a list of strings"."""
_BOUNDS: dict[type, tuple[str, str]] = {
    annotated_types.Gt: ("gt", "greater than"),
    annotated_types.Ge: ("ge", "at least"),
    annotated_types.Lt: ("lt", "less than"),
    annotated_types.Le: ("le", "at most"),
    annotated_types.MultipleOf: ("multiple_of", "a multiple of"),
    annotated_types.MinLen: ("min_length", "of length at least"),
    annotated_types.MaxLen: ("max_length", "of length at most"),
}
"""For each kind of constraint: the attribute that has the bound, and the words before the bound."""


@dataclass(frozen=True)
class Key:
    """A key of a part: its annotation and its default (NO_DEFAULT if it has none)."""

    name: str
    annotation: Any
    default: Any

    @property
    def required(self) -> bool:
        return self.default is NO_DEFAULT


IMPORTS_KEY = Key("imports", tuple[str, ...], ())
"""The key of every root: modules whose parts can be chosen. It is acted on before anything is built."""


@functools.cache
def keys_of(part: type) -> dict[str, Key]:
    """Returns the keys that an object of this class may or must have, by name."""
    assert dataclasses.is_dataclass(part), f"{part.__name__} is configuration and should be a dataclass"
    hints = typing.get_type_hints(part, include_extras=True)
    keys = {}
    for field in dataclasses.fields(part):
        if not field.init:
            continue
        default = field.default if field.default is not dataclasses.MISSING else NO_DEFAULT
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        keys[field.name] = Key(field.name, hints[field.name], default)
    if issubclass(part, Registrable) and part.root:  # a whole configuration, and not only a part of one
        keys[IMPORTS_KEY.name] = IMPORTS_KEY  # the modules whose parts can be chosen
    return keys


@functools.cache
def validator_of(annotation: Any) -> TypeAdapter[Any]:
    """Returns the validator of plain values for an annotation."""
    return TypeAdapter(annotation)


def check_annotation(annotation: Any) -> None:
    """Raises TypeError for a type that no value of a configuration can be checked against."""
    inner, _ = split_constraints(annotation)
    if holds_parts(inner):  # `build` makes such a value, and checks it then
        return
    try:
        validator_of(annotation)
    except PydanticSchemaGenerationError as error:
        raise TypeError(f"{inner} can't be the type of a configuration's values") from error


def is_family(annotation: Any) -> bool:
    """Returns whether the annotation is a family (a base class such as `Credit`) or one of its parts.

    Values of such an annotation are objects whose `type` chooses the part.
    """
    return (
        isinstance(annotation, type) and issubclass(annotation, Registrable) and annotation is not Registrable
    )


def is_plain_part(annotation: Any) -> bool:
    """Returns whether the annotation is a dataclass outside of all families. Its values are objects without
    `type`."""
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation) and not is_family(annotation)


def registered_parts(family: type[Registrable]) -> dict[str, type]:
    """Returns the registered parts that a value of type `family` can be, by name."""
    return {name: part for name, part in family.parts_by_name().items() if issubclass(part, family)}


def list_names(registered: Mapping[str, type]) -> str:
    """Returns names of parts in one line. A part from another package than its family is named with its
    module."""
    shown = []
    for name, part in sorted(registered.items()):
        shown.append(f"{name} (of {part.__module__})" if is_from_outside(part) else name)
    return ", ".join(shown) or "none"


def family_of(part: type) -> type[Registrable] | None:
    """Returns the family of a registered part; None for an object without `type`."""
    return next((base for base in part.__mro__ if Registrable in base.__bases__), None)


def is_from_outside(part: type) -> bool:
    """Returns whether a part comes from another package than its family."""
    family = family_of(part)
    assert family is not None, f"{part.__name__} is of no family"
    return package_of(part) != package_of(family)


def package_of(part: type) -> str:
    """Returns the name of the package that a part's module belongs to: ``treetune`` for its own parts."""
    return part.__module__.partition(".")[0]


def family_word(family: type) -> str:
    """Returns a family's name as people write it: ``ModelSource`` is "model source", and ``LORA`` "lora"."""
    name = family.__name__
    if name.isupper():
        return name.lower()
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()


def split_constraints(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns an annotation without its constraints, and the constraints.

    For ``Annotated[int, Gt(0)]``, they are ``int`` and ``(Gt(0),)``.
    """
    if typing.get_origin(annotation) is Annotated:
        inner, *constraints = typing.get_args(annotation)
        return inner, tuple(constraints)
    return annotation, ()


def alternatives_of(annotation: Any) -> tuple[Any, ...]:
    """Returns the alternatives of a union; for any other annotation, a tuple of the annotation alone.

    Examples: (int, NoneType) for ``int | None``, (int,) for ``int``.
    """
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def item_types(annotation: Any) -> tuple[str, tuple[Any, ...]] | None:
    """Returns the kind of a container and its items' annotations; None for anything else.

    ``dict[str, int]`` is ("object", (int,)), ``list[int]`` and ``tuple[int, ...]`` are ("list", (int,)), and
    ``tuple[int, str]`` is ("tuple", (int, str)). A container that doesn't say what its items are, such as
    ``list`` and ``typing.Tuple``, is ("list", ()) or ("object", ()).
    """
    if annotation in (tuple, typing.Tuple):  # noqa: UP006  (users may write either)
        return "list", ()
    origin = typing.get_origin(annotation) or annotation  # the class `list` has no origin
    arguments = typing.get_args(annotation)
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        return "tuple", arguments
    if origin in (list, tuple, set, frozenset, collections.abc.Sequence):
        return "list", arguments[:1]
    if origin in (dict, collections.abc.Mapping):
        return "object", arguments[1:]
    return None


@functools.cache
def holds_parts(annotation: Any) -> bool:
    """Returns whether a value of this type has parts in it, which must be built and not only checked."""
    annotation, _ = split_constraints(annotation)
    if is_family(annotation) or is_plain_part(annotation):
        return True
    container = item_types(annotation)
    if container is not None:
        _, inner_types = container
    else:
        inner_types = alternatives_of(annotation)
    # `alternatives_of` returns the annotation itself if it isn't a union.
    return any(holds_parts(inner) for inner in inner_types if inner is not annotation)


def describe_type(annotation: Any) -> str:
    """Returns a type in words, with its constraints: "a whole number greater than 0 or null"."""
    annotation, constraints = split_constraints(annotation)
    bounds = " and ".join(filter(None, map(_describe_bounds, constraints)))
    description = _describe_unconstrained_type(annotation)
    if not bounds:
        return description
    # Bounds of a list come before its items: "a list of length at least 1 of strings".
    container = item_types(annotation)
    if container is None:
        return f"{description} {bounds}"
    kind, _ = container
    beginning = "an object" if kind == "object" else "a list"  # a tuple is described as a list, too
    return f"{beginning} {bounds}{description.removeprefix(beginning)}"


def _describe_unconstrained_type(annotation: Any) -> str:
    """Returns a type in words, without its constraints: "a whole number", "a list of strings"."""
    if annotation in _DESCRIPTIONS:
        return _DESCRIPTIONS[annotation]
    if typing.get_origin(annotation) is Literal:
        return "one of " + ", ".join(json.dumps(value) for value in typing.get_args(annotation))
    if is_family(annotation):
        return f"an object {{type: …}} of {family_word(annotation)}"
    if is_plain_part(annotation):
        return f"an object with {', '.join(keys_of(annotation))}"
    container = item_types(annotation)
    if container:
        kind, items = container
        described_items = [describe_type(item) for item in items]
        if kind == "tuple":
            return f"a list of exactly {len(items)}: {', '.join(described_items)}"
        name = "an object" if kind == "object" else "a list"
        if not described_items:  # such as `list`, which doesn't say what the items are
            return name
        item = described_items[0]
        return f"{name} of {_PLURALS[item]}" if item in _PLURALS else f"{name} of: {item}"
    alternatives = alternatives_of(annotation)
    if len(alternatives) > 1:
        return " or ".join(describe_type(item) for item in alternatives)
    return getattr(annotation, "__name__", str(annotation))


def _describe_bounds(constraint: Any) -> str:
    """Returns a constraint in words, such as "greater than 0"; "" for a constraint of an unknown kind."""
    if isinstance(constraint, annotated_types.GroupedMetadata):  # such as Len: it holds MinLen and MaxLen
        return " and ".join(filter(None, map(_describe_bounds, constraint)))
    for kind, (attribute, phrase) in _BOUNDS.items():
        if isinstance(constraint, kind):
            return f"{phrase} {getattr(constraint, attribute)}"
    return ""
