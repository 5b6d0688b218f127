"""Keys, types, names and numbers that are wrong by what the schema says of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import annotated_types

import treetune.parts  # noqa: F401  (registers them)
from tests.endurance.wrong_configurations.mutation import (
    COUNTDOWN,
    MECHANICAL,
    VINEPPO,
    Mutation,
    override,
)
from treetune.config import schema
from treetune.config.jsonnet import load
from treetune.runtime.base import Runtime


@dataclass(frozen=True)
class Place:
    """A key of a configuration that is written in an object, and what the schema says of it."""

    path: tuple[str, ...]
    value: Any
    annotation: Any


def places(configs: str) -> list[Place]:
    """Every key that can be overridden: those not within a list."""
    data = load([configs], environ={}).data
    return list(_places(Runtime, data, ()))


def _places(annotation: Any, data: dict[str, Any], path: tuple[str, ...]) -> Iterator[Place]:
    part = _class_of(annotation, data)
    if part is None:
        return
    for name, key in schema.keys_of(part).items():
        if name not in data:
            continue
        yield Place((*path, name), data[name], key.annotation)
        if isinstance(data[name], dict):
            yield from _places(schema.bare(key.annotation)[0], data[name], (*path, name))


def _class_of(annotation: Any, data: Mapping[str, Any]) -> type | None:
    for member in schema.members(annotation):
        if schema.is_family(member):
            return schema.choices(member).get(data.get("type", ""))
        if schema.is_plain_part(member):
            return member
    return None


def misspelt(name: str) -> str:
    """The name with two letters in the middle exchanged, or one twice where they are the same."""
    middle = len(name) // 2
    swapped = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
    return swapped if swapped != name else name[:middle] + name[middle - 1] + name[middle:]


def keys() -> Iterator[Mutation]:
    """A key that no object has, by two exchanged letters, by a foreign name, or in another object's place."""
    for configs in (VINEPPO, COUNTDOWN):
        found = places(configs)
        objects = {place.path for place in found if isinstance(place.value, dict) and "type" in place.value}
        for place in found:
            if len(place.path[-1]) > 3:
                wrong = (*place.path[:-1], misspelt(place.path[-1]))
                yield Mutation(
                    "keys", f"misspelt {'.'.join(wrong)}", configs, (override(wrong, _json(place.value)),)
                )
        for path in sorted(objects):
            yield Mutation(
                "keys", f"unknown key in {'.'.join(path)}", configs, (override((*path, "colour"), "1"),)
            )
        by_name = {place.path[-1]: place for place in found}
        for path, (name, place) in itertools.product(sorted(objects), sorted(by_name.items())):
            siblings = {other.path[-1] for other in found if other.path[:-1] == path}
            part = next((p for p in found if p.path == path), None)
            owner = _class_of(schema.bare(part.annotation)[0], part.value) if part else None
            if owner is None or name in siblings or name in schema.keys_of(owner) or place.path[:-1] == path:
                continue
            if (len(name) + len(path[-1])) % 7 == 0:  # some of the many
                label = f"{name} in {'.'.join(path)}"
                yield Mutation("keys", label, configs, (override((*path, name), _json(place.value)),))


def types() -> Iterator[Mutation]:
    """A value of another type than the key's."""
    for configs in MECHANICAL:
        for place in places(configs):
            words = schema.describe(place.annotation)
            wrong = None
            if isinstance(place.value, bool):
                wrong = "'yes'"
            elif isinstance(place.value, int | float):
                wrong = "'many'" if "a text" not in words else "[1]"
            elif isinstance(place.value, str) and place.path[-1] != "type":
                wrong = "{}" if "number" in words else "7"
            elif isinstance(place.value, dict | list):
                wrong = "7"
            if wrong is not None and words != "anything":
                label = f"{'.'.join(place.path)} is {wrong}"
                yield Mutation("types", label, configs, (override(place.path, wrong),))


def names() -> Iterator[Mutation]:
    """The name of a part, or of one of a few choices, that is none of them."""
    for configs in MECHANICAL:
        for place in places(configs):
            if isinstance(place.value, dict) and "type" in place.value:
                path = (*place.path, "type")
                wrong = misspelt(place.value["type"]) + "x"
                yield Mutation(
                    "names", f"{'.'.join(path)}: {wrong}", configs, (override(path, _json(wrong)),)
                )
                label = f"{'.'.join(place.path)} without a type"
                yield Mutation("names", label, configs, (override(place.path, '{"size": 1}'),))
            inner = schema.bare(place.annotation)[0]
            choices = [get_args(member) for member in schema.members(inner) if _is_choice(member)]
            if choices:
                label = f"{'.'.join(place.path)}: none of its choices"
                yield Mutation("names", label, configs, (override(place.path, '"neither"'),))


def _is_choice(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is Literal


def numbers() -> Iterator[Mutation]:
    """A number beyond the bound that its key declares; a fraction for a count."""
    for configs in MECHANICAL:
        for place in places(configs):
            if isinstance(place.value, bool) or not isinstance(place.value, int | float):
                continue
            for wrong in sorted(set(_beyond(place.annotation))):
                label = f"{'.'.join(place.path)} is {wrong:g}"
                yield Mutation("numbers", label, configs, (override(place.path, repr(wrong)),))
            if schema.describe(place.annotation).startswith("a whole number"):
                label = f"{'.'.join(place.path)} is 2.5"
                yield Mutation("numbers", label, configs, (override(place.path, "2.5"),))


def _beyond(annotation: Any) -> Iterator[float]:
    for member in schema.members(annotation):
        for constraint in schema.bare(member)[1]:
            if isinstance(constraint, annotated_types.Gt):
                yield float(constraint.gt)  # type: ignore[arg-type]
            elif isinstance(constraint, annotated_types.Ge):
                yield constraint.ge - 1  # type: ignore[operator]
            elif isinstance(constraint, annotated_types.Lt):
                yield float(constraint.lt)  # type: ignore[arg-type]
            elif isinstance(constraint, annotated_types.Le):
                yield constraint.le + 1  # type: ignore[operator]


def _json(value: Any) -> str:
    return json.dumps(value)
