"""In what a configuration differs from the one that a run was begun with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from treetune.config.build import part_at
from treetune.config.explain import as_plain
from treetune.config.schema import keys_of
from treetune.contracts import Part
from treetune.runtime.base import Runtime

NOT_SET = object()
SHOWN = 60
"""Characters of a value in a message."""


@dataclass(frozen=True)
class Difference:
    """A key whose value is another one. `changeable` says whether a run goes on with it."""

    key: tuple[str, ...]
    before: Any
    now: Any
    changeable: bool

    @property
    def name(self) -> str:
        return ".".join(self.key)

    def __str__(self) -> str:
        return f"{self.name} was {_shown(self.before)} and is {_shown(self.now)}"


def differences(stored: Mapping[str, Any], plain: Mapping[str, Any]) -> list[Difference]:
    """All of them, as deep as both have the same parts. A default that one of them spells out is none."""
    return list(_between((), stored, plain, plain, changeable=False))


def _between(
    path: tuple[str, ...], before: Any, now: Any, root: Mapping[str, Any], changeable: bool
) -> Iterator[Difference]:
    if _same(before, now):
        return
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        if before.get("type") != now.get("type"):
            yield Difference((*path, "type"), before.get("type"), now.get("type"), changeable)
            return
        part = part_at(Runtime, root, path)
        defaults = {} if part is None else {name: key.default for name, key in keys_of(part).items()}
        free = part.changeable(now) if part is not None and issubclass(part, Part) else frozenset()
        for key in sorted(before.keys() | now.keys()):
            default = defaults.get(key, NOT_SET)
            pair = before.get(key, default), now.get(key, default)
            yield from _between((*path, key), *pair, root, changeable or key in free)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, pair in enumerate(zip(before, now, strict=True)):
            yield from _between((*path, str(i)), *pair, root, changeable)
    else:
        yield Difference(path, before, now, changeable)


def _same(before: Any, now: Any) -> bool:
    return before == now or _plain(before) == _plain(now)


def _plain(value: Any) -> Any:
    """Defaults are Python's objects, and what is set is JSON's."""
    if value is NOT_SET or isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    described = value if isinstance(value, Mapping) else as_plain(value)
    if isinstance(described, Mapping):
        return {key: _plain(item) for key, item in described.items()}
    return described


def _shown(value: Any) -> str:
    if value is NOT_SET:
        return "not set"
    text = repr(_plain(value))
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
