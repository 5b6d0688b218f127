"""Explains what set a key: every file of the import graph, environment variable and override, in order.

Jsonnet merges lazily and keeps no record of it. So each file is evaluated alone, with an empty object that
has a mark in place of each of its imports, also of those of the libraries that it calls. An import was merged
into the object in which its mark appears. The mark's number is the import's place in the order of merging.
All other keys are set by the file itself. A file that needs others (``$``, ``super``) may fail alone. Its
value is then reported as *computed*; nothing is guessed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from treetune.config import lexer
from treetune.config.errors import dotted_key
from treetune.config.jsonnet_frames import read_frames
from treetune.config.layers import (
    CONFIGS_FOLDER,
    Config,
    Layer,
    add_layers,
    evaluate_jsonnet,
    find_file,
    read_as_jsonnet,
    read_layer,
)
from treetune.config.registrable import Registrable
from treetune.contracts import KeyPath
from treetune.exceptions import ConfigError, Endless

# An object of Jsonnet with these keys takes the place of an import (`Explanation._mark_imports`).
_MARK_PREFIX = "<import> "
_NAME_OF_EVALUATED_TEXT = "<alone>"
_SET_BY_IMPORT = "<set by the import>"
_MERGE_NUMBER = f"(if {json.dumps(_MARK_PREFIX)} in super then super[{json.dumps(_MARK_PREFIX)}] else 0) + 1"
"""A Jsonnet expression: the number of imports that have been merged so far, this one included."""

# Functions for the expressions that `Explanation._probe` evaluates: `step` goes from an object or a list to
# the value at one part of a path, and `keys` lists the names that such a part may have.
_JSONNET_FUNCTIONS = """
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
    """The class of `COMPUTED_VALUE`, which messages show as "(computed)"."""

    @override
    def __repr__(self) -> str:
        return "(computed)"


COMPUTED_VALUE = _Computed()
"""Marks a value that a file sets only together with other files."""

MISSING_VALUE = object()
"""Marks a missing value, where None could be a value."""


@dataclass(frozen=True)
class Setting:
    """A place that sets a key, and the value that it sets.

    Example: ``Setting("configs/quickstart/grpo.jsonnet", 12, 0.001)``.
    """

    source: str
    """The file, environment variable or override."""
    line: int | None
    """The line in the file; None if it isn't known."""
    value: Any
    caller: str | None = None
    """The file that calls `source`, if that is a library."""

    @property
    def location(self) -> str:
        """The file and line, ``configs/grpo.jsonnet:12``, with the file that calls it for a library."""
        source = f"{self.source}:{self.line}" if self.line else self.source
        return f"{source}, called by {self.caller}" if self.caller else source


class Explanation:
    """Tells what set a key of an evaluated configuration. It raises nothing, whatever the key.

    Args:
        more_folders: Further folders in which the user's modules may be.
    """

    def __init__(self, config: Config, more_folders: Sequence[str] = ()) -> None:
        self._config = config
        self._more_folders = more_folders
        self._files: dict[Path, Layer] = {}  # the imported files that were read, by path
        # The object that each file makes without its imports; None until `_object_of_file` needs one of them.
        self._objects_of_files: dict[Layer, Any] | None = None
        # The results of `_probe`, by file, expression, replacements (as JSON) and path.
        self._probes: dict[tuple[Layer, str, str, KeyPath], Any] = {}

    @property
    def folders(self) -> list[Path]:
        """The folders in which the user's modules may be.

        First come the folders of the configuration files, then those of the user's files that these import,
        and then `more_folders`.
        """
        of_files = [layer.path.parent for layer in self._config.layers if layer.path]
        of_imports: list[Path] = []
        files = list(self._config.layers)
        for layer in files:  # the list grows meanwhile
            if layer.path is not None and layer.path.is_relative_to(CONFIGS_FOLDER):
                continue  # a shipped file imports none of the user's
            for _, imported in self._imports(layer):
                if imported in files or imported.path is None or imported.path.is_relative_to(CONFIGS_FOLDER):
                    continue
                files.append(imported)
                of_imports.append(imported.path.parent)
        return [*of_files, *of_imports, *map(Path, self._more_folders)]

    def value(self, key: KeyPath) -> Any:
        """Returns the value in the evaluated object, or MISSING_VALUE."""
        return value_at(self._config.data, key)

    def settings(self, key: KeyPath) -> list[Setting]:
        """Returns everything that sets `key`, in the order of merging: the last one wins."""
        settings: list[Setting] = []
        for layer in self._config.layers:
            settings += self._settings_in_layer(layer, key, active=())
        final_value = self.value(key)
        # The last setting has the value that its file computes alone, where `$.x * 2` uses the file's own x.
        # The whole configuration may have another x. If the two values differ, the value is a computed one.
        # An object isn't compared, since several files may set keys in it.
        is_comparable = final_value is not MISSING_VALUE and not isinstance(final_value, dict)
        if settings and is_comparable and settings[-1].value != final_value:
            settings[-1] = replace(settings[-1], value=COMPUTED_VALUE)
        return settings

    def source(self, key: KeyPath) -> str | None:
        """Returns the file and line that decided a key's value, for messages; None if they aren't known."""
        settings = self.settings(key)
        if not settings:
            return None
        return settings[-1].location + (" (computed)" if settings[-1].value is COMPUTED_VALUE else "")

    def _settings_in_layer(self, layer: Layer, key: KeyPath, active: tuple[Layer, ...]) -> list[Setting]:
        """Returns everything that sets the key in a file and its imports, in the order of merging.

        Args:
            active: The files whose imports are being followed. A file among them imports itself, and nothing
                is returned for it, which ends the recursion.
        """
        if layer in active:
            return []
        overridden_imports: list[Setting] = []
        winning_imports: list[Setting] = []
        of_file = self._settings_of_file(layer, key)
        # An import may be merged into the file's whole object (depth 0), or into an object on the way to the
        # key.
        for depth in range(len(key) + 1):
            for name, imported in self._merged_imports(layer, key[:depth]):
                of_import = self._settings_in_layer(imported, key[depth:], (*active, layer))
                if of_file and of_import and self._import_wins(layer, name, key, key[depth:]):
                    winning_imports += of_import
                else:
                    overridden_imports += of_import
        return overridden_imports + of_file + winning_imports

    def _settings_of_file(self, layer: Layer, key: KeyPath) -> list[Setting]:
        """Returns what the file itself sets, without its imports: one setting, or none."""
        setter = self._text_that_sets(layer, key)  # the file, or a library that the file calls
        # A setting in a library also names the file that calls the library.
        caller = None if setter is layer else layer.name
        line = None
        if key:  # the empty key is the whole configuration, which isn't set on a line
            if setter.path is not None:  # variables and overrides have no path, and no lines
                line = lexer.field_line(setter.text, key)
            names = self._keys_of_object(layer, key[:-1])
            if names is None:
                # The object depends on other files. Only the text shows whether this file sets the key.
                is_mentioned = lexer.mentions(setter.text, key[-1])
                return [Setting(setter.name, line, COMPUTED_VALUE, caller)] if is_mentioned else []
            if key[-1] not in names:
                return []
        value = self._value_in_file(layer, key)
        # A key that begins with `_MARK_PREFIX` stands for an import that is merged into the object.
        if isinstance(value, dict) and value and all(name.startswith(_MARK_PREFIX) for name in value):
            return []  # the object consists of imports, whose settings `_settings_in_layer` adds
        return [Setting(setter.name, line, _without_marks(value), caller)]

    def _text_that_sets(self, layer: Layer, key: KeyPath) -> Layer:
        """Returns the text that mentions the key: the file, or else the first library with a mention.

        The libraries are those that the file calls. If no text mentions the key, the file is returned. It is
        also returned for the empty key, which is the whole configuration.
        """
        if key and not lexer.mentions(layer.text, key[-1]):
            for library in self._libraries(layer):
                if lexer.mentions(library.text, key[-1]):
                    return library
        return layer

    def _merged_imports(self, layer: Layer, prefix: KeyPath) -> Iterator[tuple[str, Layer]]:
        """Yields the imports whose content is merged into the object at `prefix`, in the order of merging."""
        # In the object, a key stands for each import: its mark. The mark's value is the import's number in
        # the order of merging. If a number depends on other files, it is COMPUTED_VALUE, and the imports stay
        # in the order in which the file names them.
        names = self._keys_of_object(layer, prefix) or ()
        merged = [(name, imported) for name, imported in self._imports(layer) if _MARK_PREFIX + name in names]
        numbers = {name: self._value_in_file(layer, (*prefix, _MARK_PREFIX + name)) for name, _ in merged}
        has_all_numbers = COMPUTED_VALUE not in numbers.values()
        if has_all_numbers:
            merged.sort(key=lambda name_and_layer: numbers[name_and_layer[0]])
        yield from merged

    def _keys_of_object(self, layer: Layer, prefix: KeyPath) -> list[str] | None:
        """Returns the keys of the object at `prefix`, or the indices of the list there; None if the object or
        list depends on other files.

        Some of the keys are marks: a mark stands for an import that is merged into the object.
        """
        file_object = self._object_of_file(layer)
        if file_object is MISSING_VALUE:
            # Jsonnet is lazy. So this object may be evaluated even if another part of the file fails.
            # Only the file's whole object, whose prefix is empty, has no parent.
            parent_names = self._keys_of_object(layer, prefix[:-1]) if prefix else None
            if parent_names is not None and prefix[-1] not in parent_names:
                return []  # the file has nothing at `prefix`
            names = self._probe(layer, "keys(at)", prefix)
            return None if names is COMPUTED_VALUE else names
        value = value_at(file_object, prefix)
        if isinstance(value, list):
            return [str(index) for index in range(len(value))]
        return list(value) if isinstance(value, dict) else []

    def _value_in_file(self, layer: Layer, key: KeyPath) -> Any:
        """Returns the value that a file sets by itself; COMPUTED_VALUE if that depends on other files."""
        file_object = self._object_of_file(layer)
        if file_object is MISSING_VALUE:
            # The file fails as a whole, but perhaps not at this key.
            return self._probe(layer, "at", key)
        return value_at(file_object, key)

    def _object_of_file(self, layer: Layer) -> Any:
        """Returns the object that a file makes without its imports; MISSING_VALUE if the file fails as a
        whole.

        In the object, marks (keys that begin with `_MARK_PREFIX`) stand for the imports.

        Jsonnet parses its standard library again for every evaluation and every import, which takes tens of
        milliseconds. So all files are evaluated as one text. If a file fails, it is left out and the others
        are tried again.
        """
        if self._objects_of_files is None:
            candidates = self._layers_and_imports()
            self._objects_of_files = {}
            while candidates:
                texts = [f"(\n{self._mark_imports(candidate)}\n),\n" for candidate in candidates]
                try:
                    values = self._evaluate(f"[{''.join(texts)}]")
                except RuntimeError as error:
                    failed = _find_failed_text(texts, error)
                    if failed is None:  # the message doesn't tell which one failed
                        break
                    candidates = [*candidates[:failed], *candidates[failed + 1 :]]
                else:
                    self._objects_of_files = dict(zip(candidates, values, strict=True))
                    break
        return self._objects_of_files.get(layer, MISSING_VALUE)

    def _layers_and_imports(self) -> list[Layer]:
        """Returns the layers and all files that they import, directly or not."""
        layers = list(dict.fromkeys(self._config.layers))
        for layer in layers:  # the list grows meanwhile
            layers += [imported for _, imported in self._imports(layer) if imported not in layers]
        return layers

    def _imports(self, layer: Layer) -> list[tuple[str, Layer]]:
        """Returns the files that this file may be merged with: its imports, and those of the libraries that
        it calls."""
        files_by_name = dict(self._imported_files(layer, libraries=False))
        for library in self._libraries(layer):
            for _, file in self._imported_files(library, libraries=False):
                # The name that the library uses is relative to the library's folder, so it is not kept.
                files_by_name[file.name] = file
        return list(files_by_name.items())

    def _libraries(self, layer: Layer) -> list[Layer]:
        """Returns the libraries that a file calls, directly or not."""
        libraries = [library for _, library in self._imported_files(layer, libraries=True)]
        for library in libraries:  # the list grows meanwhile
            for _, called_library in self._imported_files(library, libraries=True):
                if called_library not in libraries:
                    libraries.append(called_library)
        return libraries

    def _imported_files(self, layer: Layer, libraries: bool) -> list[tuple[str, Layer]]:
        """Returns imports of a text: the name in the import, and the file.

        Args:
            libraries: Whether to return the imports of libraries (``.libsonnet``), or all others.
        """
        files = []
        for name in lexer.imported_names(layer.text):
            path = _find_import(name, layer)
            is_library = name.endswith(".libsonnet")
            if path is None or is_library != libraries:
                continue
            if path not in self._files:
                self._files[path] = read_layer(path)
            files.append((name, self._files[path]))
        return files

    def _import_wins(self, layer: Layer, name: str, key: KeyPath, key_in_import: KeyPath) -> bool:
        """Returns whether an import overrides the file's own object.

        For the test, an object that sets only this key takes the place of the import. The object sets the key
        to a text that no file has, the sentinel. The import wins if the key's value is then the sentinel.

        Args:
            name: The name of the import, as in its mark.
            key: The key in the file.
            key_in_import: The end of `key`, below the object into which the import is merged. With
                ("a", "b"), the object in place of the import is ``{"a"+: {"b": sentinel}}``.
        """
        if not key_in_import:
            return False  # the import is merged into the key's own object, and does not replace this object
        # The object is written from the inside out: first `{"b": sentinel}`, then `{"a"+: …}` around it.
        *outer_parts, last_part = key_in_import
        replacement = f"{{{json.dumps(last_part)}: {json.dumps(_SET_BY_IMPORT)}}}"
        for part in reversed(outer_parts):
            replacement = f"{{{json.dumps(part)}+: {replacement}}}"
        # The expression `at` is the value at the path.
        value = self._probe(layer, expression="at", path=key, replacements={name: replacement})
        return bool(value == _SET_BY_IMPORT)

    def _probe(
        self, layer: Layer, expression: str, path: KeyPath, replacements: dict[str, str] | None = None
    ) -> Any:
        """Evaluates an expression about one value of a file alone. Returns COMPUTED_VALUE if that fails.

        Args:
            expression: The Jsonnet expression. In the expression, ``at`` is the value at `path`, and the
                function ``keys`` lists the keys of a value (`_JSONNET_FUNCTIONS`).
            replacements: Texts that take the place of some imports, as for `_mark_imports`.
        """
        probe_key = (layer, expression, json.dumps(replacements), path)
        if probe_key not in self._probes:
            # A part of the path, such as "3", is the key of an object or the index of a list. A part that is
            # no number gets the index -1, which no item of a list has.
            steps = [{"key": part, "index": int(part) if part.isdecimal() else -1} for part in path]
            try:
                answer = self._evaluate(
                    f"local file = (\n{self._mark_imports(layer, replacements)}\n);\n{_JSONNET_FUNCTIONS}"
                    f"local at = std.foldl(step, {json.dumps(steps)}, file);\n{expression}",
                    replacements,
                )
            except RuntimeError:
                answer = COMPUTED_VALUE
            self._probes[probe_key] = answer
        return self._probes[probe_key]

    def _mark_imports(
        self, layer: Layer, replacements: Mapping[str, str] | None = None, is_library: bool = False
    ) -> str:
        """Returns the text of a file with an object of marks in place of each import that may be merged.

        Example: in place of the first such import, of ``b.jsonnet``, the text has the object ``{"<import>
        b.jsonnet": 1, "<import> ": 1}``. The first key marks the import. Its number is the import's place in
        the order of merging. The import that is merged next reads the second key, and gets the number 2.

        Args:
            replacements: Jsonnet texts that replace some marks, by the name in the mark.
            is_library: Whether the file is a library. Its marks have the files' own names, since the
                library's names for them are relative to its own folder.
        """
        # For each import that is not a library: the name in its mark, by the name in the text.
        mark_names: dict[str, str] = {}
        for name, file in self._imported_files(layer, libraries=False):
            mark_names[name] = file.name if is_library else name

        def mark(keyword: str, name: str) -> str:
            """Returns the text that takes the place of an import, such as ``import "b.jsonnet"``."""
            if keyword == "import" and name in mark_names:
                if replacements and mark_names[name] in replacements:
                    return replacements[mark_names[name]]
                # The first key marks this import. Its value n is the import's number in the order of merging.
                # The import that is merged next reads n from the second key (in `_MERGE_NUMBER`), and adds 1.
                mark_key = json.dumps(_MARK_PREFIX + mark_names[name])
                counter_key = json.dumps(_MARK_PREFIX)
                return f"{{ local n = {_MERGE_NUMBER}, {mark_key}: n, {counter_key}: n }}"
            # Libraries and texts (``importstr``) are still imported. They get their whole paths, since the
            # text may be evaluated outside of the file's folder.
            return f"{keyword} {json.dumps(str(_find_import(name, layer) or name))}"

        return lexer.replace_imports(layer.text, mark)

    def _evaluate(self, text: str, replacements: Mapping[str, str] | None = None) -> Any:
        """Evaluates a Jsonnet text in which marks, objects that stand for imports, have taken the place of
        imports (`_mark_imports`).

        The text still imports its libraries (``.libsonnet``). They are read with marks in place of their
        imports, too.

        Args:
            replacements: Jsonnet texts that take the place of some marks, by the name in the mark. For
                example, `_import_wins` tests an import with an object of one key in its place.
        """

        def importer(directory: str, name: str) -> tuple[str, bytes]:
            """Returns the path and the text of what a file in `directory` imports by `name`."""
            path = find_file(name, Path(directory or "."))
            if path.suffix == ".libsonnet":
                return str(path), self._mark_imports(read_layer(path), replacements, is_library=True).encode()
            # Any other file is imported as a text (``importstr``).
            return str(path), read_as_jsonnet(path).encode()

        return evaluate_jsonnet(_NAME_OF_EVALUATED_TEXT, text, self._config.variables, importer)


def _find_failed_text(texts: Sequence[str], error: RuntimeError) -> int | None:
    """Returns the number of the text that Jsonnet's message is about; None if the message doesn't tell.

    The texts were evaluated as one text, in this order.
    """
    for frame in read_frames(str(error)):
        if frame.file != _NAME_OF_EVALUATED_TEXT:  # a file that one of the texts imports
            continue
        # The message's line is counted from the beginning of the first text. So the lines of the texts are
        # subtracted one after the other, until none is left.
        lines_left = frame.line
        for number, text in enumerate(texts):
            lines_left -= text.count("\n")
            if lines_left <= 0:
                return number
    return None


def _find_import(name: str, layer: Layer) -> Path | None:
    try:
        return find_file(name, layer.directory)
    except ConfigError:
        return None  # not needed: otherwise the evaluation of the whole would have failed


def value_at(data: Any, key: KeyPath) -> Any:
    """Returns the value at a path of keys and list indices, or MISSING_VALUE."""
    for part in key:
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        else:
            return MISSING_VALUE
    return data


def as_plain(value: Any) -> Any:
    """Returns a value that isn't of JSON's types, such as a default, as it is written in a configuration.

    A part becomes an object with its `type`, and a path becomes a text.
    """
    # `is_dataclass` is also true for the class itself.
    is_dataclass_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if not is_dataclass_instance:
        return str(value)
    keys = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    if not isinstance(value, Registrable):
        return keys
    return {"type": value.registered_name()} | keys


def _without_marks(value: Any) -> Any:
    """Returns a value without the keys that stand for imports (marks).

    An object with nothing but marks becomes a text with the names of its imports.
    """
    if isinstance(value, dict):
        plain = {
            name: _without_marks(item) for name, item in value.items() if not name.startswith(_MARK_PREFIX)
        }
        marks = [name.removeprefix(_MARK_PREFIX) for name in value if name.startswith(_MARK_PREFIX)]
        if marks and not plain:
            return f"import {', '.join(marks)}"
        return plain
    if isinstance(value, list):
        return [_without_marks(item) for item in value]
    return value


def key_paths(data: Any, prefix: KeyPath = ()) -> list[KeyPath]:
    """Returns every key of an evaluated object, parents before children.

    For ``{"trainer": {"rate": 0.5}}``, they are ("trainer",) and ("trainer", "rate").
    """
    if not isinstance(data, dict):
        return []
    paths: list[KeyPath] = []
    for name, value in data.items():
        path = (*prefix, name)
        paths += [path, *key_paths(value, path)]
    return paths


# Files that change nothing, because later files override everything that they set

MOST_SHOWN_KEYS = 4


def describe_overridden_files(config: Config) -> Iterator[str]:
    """Yields a sentence for each file whose settings are all overridden by later files.

    The most common case is a preset that comes before its experiment. A file that repeats what an earlier
    file sets is fine.
    """
    for index, layer in enumerate(config.layers):
        earlier_layers, later_layers = config.layers[:index], config.layers[index + 1 :]
        if layer.path is None or not later_layers:  # not a file, or nothing can override it
            continue
        if _sum_or_none([*earlier_layers, *later_layers], config) != config.data:
            continue  # it changes something
        without_it = _sum_or_none(earlier_layers, config)
        with_it = _sum_or_none([*earlier_layers, layer], config)
        if with_it is None or without_it == with_it:
            continue  # it needs later files, or repeats what earlier ones set
        overridden_paths = _changed_keys(without_it, with_it)
        overriding_files = _overriding_files(overridden_paths, layer, earlier_layers, later_layers, config)
        if not overriding_files:  # no later file overrides a key alone: they do it together
            overriding_files = [later_layer.name for later_layer in later_layers]
        shown_keys = ", ".join(dotted_key(path) for path in overridden_paths[:MOST_SHOWN_KEYS])
        ellipsis = ", …" if len(overridden_paths) > MOST_SHOWN_KEYS else ""
        yield (
            f"{layer.name} changes nothing: all that it sets ({shown_keys}{ellipsis}) is overridden by"
            f" {' and '.join(overriding_files)}: put it after {overriding_files[-1]}, or leave it out"
        )


def _changed_keys(before: Any, after: Any) -> list[KeyPath]:
    """Returns the keys of `after` whose values `before` doesn't have. An object is left out if the result has
    keys in it."""
    changed_paths = [path for path in key_paths(after) if value_at(after, path) != value_at(before, path)]
    objects_around: set[KeyPath] = set()
    for path in changed_paths:
        objects_around |= {path[:depth] for depth in range(1, len(path))}
    return [path for path in changed_paths if path not in objects_around]


def _overriding_files(
    paths: Sequence[KeyPath],
    layer: Layer,
    earlier_layers: Sequence[Layer],
    later_layers: Sequence[Layer],
    config: Config,
) -> list[str]:
    """Returns the names of the later layers that override one of the keys at `paths`, which `layer` sets."""
    names: list[str] = []
    for later_layer in later_layers:
        with_it = _sum_or_none([*earlier_layers, layer, later_layer], config)
        without_it = _sum_or_none([*earlier_layers, later_layer], config)
        if with_it is None or without_it is None:
            # The later layer needs those between the two, which may set the same keys. So only the layer
            # alone tells whether it sets a key.
            overrides_a_key = _sets_one_of(paths, later_layer, config)
        else:
            # `layer` changes the key's value. If the value is the same with and without `layer` once the
            # later layer is added, then the later layer overrides the key.
            overrides_a_key = any(value_at(with_it, path) == value_at(without_it, path) for path in paths)
        if overrides_a_key:
            names.append(later_layer.name)
    return names


def _sets_one_of(paths: Sequence[KeyPath], layer: Layer, config: Config) -> bool:
    """Returns whether a layer alone sets one of the keys, or an object around one of them."""
    explanation = Explanation(replace(config, layers=(layer,)))
    for path in paths:
        paths_of_objects = [path[:depth] for depth in range(len(path), 0, -1)]  # ("a", "b") and ("a",)
        if any(explanation.settings(path_of_object) for path_of_object in paths_of_objects):
            return True
    return False


def _sum_or_none(layers: Sequence[Layer], config: Config) -> Any:
    """Returns the sum of some of the layers; None if they can't be evaluated without the others."""
    try:
        return add_layers(layers, config.variables) if layers else {}
    except (RuntimeError, ConfigError, Endless):
        return None
