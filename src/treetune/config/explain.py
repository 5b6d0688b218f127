"""Who set this key? Every file of the import graph, environment variable and override, in order.

Jsonnet merges lazily and keeps no record, so each file is evaluated alone, with a marked empty
object in place of each of its imports. Where a mark appears is where that import was merged in;
what the file then still sets is its own. A file that leans on others (``$``, ``super``) may not
stand alone: it is then reported as having *computed* the value, never guessed at.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treetune.config import lexer
from treetune.config.errors import ConfigError, KeyPath
from treetune.config.jsonnet import Config, Layer, evaluate, find_file, read_layer

_MARK = "<import> "
_SENTINEL = "<set by the import>"

_WALK = """
local step(x, s) =
  if std.isObject(x) && std.objectHasAll(x, s.key) then x[s.key]
  else if std.isArray(x) && s.index >= 0 && s.index < std.length(x) then x[s.index]
  else null;
local keys(x) =
  if std.isObject(x) then std.objectFields(x)
  else if std.isArray(x) then [std.toString(i) for i in std.range(0, std.length(x) - 1)]
  else [];
"""


class _Computed:
    def __repr__(self) -> str:
        return "(computed)"


COMPUTED = _Computed()
"""Stands for a value that a file gives only together with others."""

MISSING = object()
"""Stands for no value, where None could be one."""


@dataclass(frozen=True)
class Setting:
    """One place that sets a key: file (or variable, or override), line if known, its value alone."""

    source: str
    line: int | None
    value: Any

    @property
    def place(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


class Explanation:
    """Answers, for one evaluated configuration, what set a key. Never raises for a key."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._files: dict[Path, Layer] = {}
        self._keys: dict[tuple[Layer, KeyPath], list[str] | None] = {}

    def value(self, key: KeyPath) -> Any:
        """The value in the evaluated object, or MISSING."""
        return value_at(self._config.data, key)

    def settings(self, key: KeyPath) -> list[Setting]:
        """Everything that sets `key`, from the base to the overlay that wins."""
        found = [
            setting for layer in self._config.layers for setting in self._in_layer(layer, key, active=())
        ]
        final = self.value(key)
        # Evaluated alone, `$.x * 2` sees the file's own x: the value that counts is the result's.
        if found and final is not MISSING and not isinstance(final, dict) and found[-1].value != final:
            found[-1] = replace(found[-1], value=COMPUTED)
        return found

    def source(self, key: KeyPath) -> str | None:
        """The place that decided a key's value, for messages; None if nothing is known."""
        found = self.settings(key)
        if not found:
            return None
        return found[-1].place + (" (computed)" if found[-1].value is COMPUTED else "")

    def _in_layer(self, layer: Layer, key: KeyPath, active: tuple[Layer, ...]) -> list[Setting]:
        if layer in active:
            return []
        names = lexer.imports(layer.text)
        before: list[Setting] = []
        after: list[Setting] = []
        own = self._own(layer, key)
        for depth in range(len(key) + 1):
            for name in self._mounted(layer, key[:depth], names):
                imported = self._imported(layer, name)
                rest = key[depth:]
                inner = self._in_layer(imported, rest, (*active, layer)) if imported else []
                wins = own and inner and rest and self._import_wins(layer, name, key, rest)
                (after if wins else before).extend(inner)
        return before + own + after

    def _own(self, layer: Layer, key: KeyPath) -> list[Setting]:
        """What the file sets itself, without its imports."""
        line = lexer.field_line(layer.text, key) if key and layer.path else None
        if key:
            keys = self._fields(layer, key[:-1])
            if keys is None:
                known = lexer.mentions(layer.text, key[-1])
                return [Setting(layer.name, line, COMPUTED)] if known else []
            if key[-1] not in keys:
                return []
        try:
            value = self._probe(layer, "at", key)
        except RuntimeError:
            return [Setting(layer.name, line, COMPUTED)]
        if isinstance(value, dict) and any(name.startswith(_MARK) for name in value):
            value = {name: item for name, item in value.items() if not name.startswith(_MARK)}
            if not value:
                return []
        return [Setting(layer.name, line, _without_marks(value))]

    def _mounted(self, layer: Layer, prefix: KeyPath, names: Sequence[str]) -> list[str]:
        """The imports whose content is merged into the object at `prefix`, in textual order."""
        fields = self._fields(layer, prefix) if names else None
        return [name for name in names if _MARK + name in (fields or ())]

    def _fields(self, layer: Layer, prefix: KeyPath) -> list[str] | None:
        """Keys (and marks) of the object at `prefix`; None where the file can't stand alone."""
        if (layer, prefix) not in self._keys:
            try:
                self._keys[layer, prefix] = self._probe(layer, "keys(at)", prefix)
            except RuntimeError:
                self._keys[layer, prefix] = None
        return self._keys[layer, prefix]

    def _import_wins(self, layer: Layer, name: str, key: KeyPath, rest: KeyPath) -> bool:
        """Whether an import is added to the right of the file's own object."""
        content = json.dumps(_SENTINEL)
        for part in reversed(rest):
            content = (
                f"{{{json.dumps(part)}+: {content}}}"
                if content[0] == "{"
                else f"{{{json.dumps(part)}: {content}}}"
            )
        try:
            return bool(self._probe(layer, "at", key, {name: content}) == _SENTINEL)
        except RuntimeError:
            return False

    def _probe(self, layer: Layer, result: str, path: KeyPath, instead: dict[str, str] | None = None) -> Any:
        replaced = {
            name: json.dumps({_MARK + name: None})
            for name in lexer.imports(layer.text)
            if not name.endswith(".libsonnet")  # a library is not merged in: its functions are called
        } | (instead or {})

        def importer(directory: str, name: str) -> tuple[str, bytes]:
            if name in replaced:
                return f"<marked>/{name}", replaced[name].encode()
            path = find_file(name, Path(directory) if directory else layer.directory)
            return str(path), path.read_bytes()

        steps = [{"key": part, "index": int(part) if part.isdecimal() else -1} for part in path]
        text = (
            f"local file = (\n{layer.text}\n);\n{_WALK}"
            f"local at = std.foldl(step, {json.dumps(steps)}, file);\n{result}"
        )
        return evaluate(str(layer.path or layer.name), text, self._config.variables, importer)

    def _imported(self, layer: Layer, name: str) -> Layer | None:
        try:
            path = find_file(name, layer.directory)
            if path not in self._files:
                self._files[path] = read_layer(path)
        except ConfigError:
            return None
        return self._files[path]


def value_at(data: Any, key: KeyPath) -> Any:
    """The value at a path of keys and list indices, or MISSING."""
    for part in key:
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        else:
            return MISSING
    return data


def _without_marks(value: Any) -> Any:
    if isinstance(value, dict):
        plain = {name: _without_marks(item) for name, item in value.items() if not name.startswith(_MARK)}
        marks = [name.removeprefix(_MARK) for name in value if name.startswith(_MARK)]
        if marks and not plain:
            return f"import {', '.join(marks)}"
        return plain
    if isinstance(value, list):
        return [_without_marks(item) for item in value]
    return value


def key_paths(data: Any, prefix: KeyPath = ()) -> list[KeyPath]:
    """Every key of an evaluated object, parents before children."""
    found = []
    for name, value in data.items() if isinstance(data, dict) else ():
        found += [(*prefix, name), *key_paths(value, (*prefix, name))]
    return found
