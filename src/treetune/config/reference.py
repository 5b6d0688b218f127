"""What can be written into a configuration: every registered part with its keys, for people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from treetune.config import meanings, schema
from treetune.config.explain import as_plain
from treetune.config.registrable import Registrable


@dataclass(frozen=True)
class KeyEntry:
    """One key. `default` is as Jsonnet has it; None where the key must be given."""

    name: str
    type: str
    default: str | None
    meaning: str


@dataclass(frozen=True)
class PartEntry:
    """One part: a registered one with the `name` that users write as `type`, or a plain object's class."""

    family: str
    name: str | None
    part: type
    keys: tuple[KeyEntry, ...]

    @property
    def title(self) -> str:
        return f"{self.family} {self.name!r}" if self.name else self.family

    @property
    def text(self) -> str:
        return meanings.docstring(self.part)

    @property
    def place(self) -> str:
        return f"{self.part.__module__}.{self.part.__qualname__}"


def families() -> list[type[Registrable]]:
    """Every family that has a part, by name."""
    found = [family for family in Registrable.__subclasses__() if family.registered()]
    return sorted(found, key=schema.family_word)


def entries(family: type[Registrable]) -> list[PartEntry]:
    """The parts of a family, by name."""
    word = schema.family_word(family)
    return [entry(part, word, name) for name, part in sorted(family.registered().items())]


def entry(part: type, family: str | None = None, name: str | None = None) -> PartEntry:
    keys = tuple(key_entry(part, key) for key in schema.keys_of(part).values())
    return PartEntry(family or schema.family_word(part), name, part, keys)


def key_entry(part: type, key: schema.Key) -> KeyEntry:
    default = None if key.required else as_jsonnet(key.default)
    return KeyEntry(key.name, schema.describe(key.annotation), default, key_meaning(part, key))


def key_meaning(part: type, key: schema.Key) -> str:
    """What the part's class says of the key, or else what the objects are that may stand there."""
    if key is schema.IMPORTS:
        return "Modules of your own, such as 'my_package.my_part': their parts can then be chosen by `type`."
    found = meanings.meaning(part, key.name)
    if found:
        return found
    objects = [inner for inner in held(key.annotation) if meanings.summary(inner)]
    return meanings.summary(objects[0]) if objects else ""


def held(annotation: Any) -> Iterator[type]:
    """The families and plain parts that a value of this type may hold."""
    inner, _ = schema.bare(annotation)
    if schema.is_family(inner) or schema.is_plain_part(inner):
        yield inner
        return
    container = schema.item_types(inner)
    for member in container[1] if container else schema.members(inner):
        if member is not inner and member is not Ellipsis:
            yield from held(member)


def plain_parts(part: type) -> list[type]:
    """The classes of the objects without `type` that stand in a part, at any depth."""
    found: list[type] = []
    waiting = [part]
    while waiting:
        for key in schema.keys_of(waiting.pop()).values():
            new = [one for one in held(key.annotation) if schema.is_plain_part(one) and one not in found]
            found += new
            waiting += new
    return found


def describable() -> dict[str, list[PartEntry]]:
    """What `describe` knows, by every name that it may be asked for: type, family.type, object."""
    found: dict[str, list[PartEntry]] = {}
    plain: list[type] = []
    for family in families():
        for one in entries(family):
            assert one.name is not None
            found.setdefault(one.name, []).append(one)
            found.setdefault(f"{as_word(one.family)}.{one.name}", []).append(one)
            plain += [inner for inner in plain_parts(one.part) if inner not in plain]
    for part in plain:
        found.setdefault(as_word(schema.family_word(part)), []).append(entry(part))
    return found


def as_word(name: str) -> str:
    """A family's name in one word: ``model source`` → ``model_source``."""
    return re.sub(r"[\s_-]+", "_", name.strip().lower())


def as_jsonnet(value: Any) -> str:
    """A default as a configuration would say it."""
    return json.dumps(value, ensure_ascii=False, default=as_plain)
