"""The files and texts that a configuration is the sum of: finding them, reading them, evaluating them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _jsonnet

from treetune.config.errors import ConfigIssue, nearest
from treetune.config.lexer import flatten_imports
from treetune.config.yaml_files import jsonnet_of_yaml
from treetune.exceptions import ConfigError, Endless

_IN_PACKAGE, _IN_CHECKOUT = (Path(__file__).resolve().parents[levels] / "configs" for levels in (1, 3))
CONFIGS_FOLDER = _IN_PACKAGE if _IN_PACKAGE.is_dir() else _IN_CHECKOUT
"""The shipped configurations, found from any working directory: a wheel has them in the package, next to the
examples."""

NAME_OF_SUM = "--configs"
"""The name, in Jsonnet's messages, of the text that adds the layers."""

EVALUATION_DEADLINE_S = 60.0
"""The seconds after which an evaluation is given up, since it may be an endless loop."""

Importer = Callable[[str, str], tuple[str, bytes]]
"""Finds an import: takes the importing file's folder and the name in the import, and returns the file's name
and content."""


@dataclass(frozen=True)
class Layer:
    """One operand of the sum: a file, the environment's settings or an override.

    Example: ``Layer("configs/quickstart/sft.jsonnet", "local quickstart = …", Path("/…/sft.jsonnet"))``; the
    override ``{seed: 3}`` is ``Layer("--override", "{seed: 3}")``, without a path.
    """

    name: str
    text: str
    path: Path | None = None

    @property
    def directory(self) -> Path:
        """The folder that the layer's imports are relative to."""
        return self.path.parent if self.path else Path.cwd()

    @property
    def import_name(self) -> str:
        """The name of the layer in Jsonnet's messages."""
        return str(self.path or self.name)


@dataclass(frozen=True)
class Config:
    """An evaluated configuration: the plain data, and the layers and variables that it was made from."""

    data: dict[str, Any]
    layers: tuple[Layer, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


def find_file(name: str, base: Path) -> Path:
    """Returns the file that `name` means in the folder `base`: a file there, else one of treetune's own.

    treetune's own files are found as ``grpo.jsonnet``, ``configs/grpo.jsonnet`` or ``examples/….jsonnet``.
    """
    names_own_folder = Path(name).parts[:1] in ((CONFIGS_FOLDER.name,), ("examples",))
    own_folder = CONFIGS_FOLDER.parent if names_own_folder else CONFIGS_FOLDER
    folders = list(dict.fromkeys([base, own_folder]))
    for folder in folders:
        candidate = Path(os.path.abspath(folder / name))  # without "..", and without following links
        if candidate.is_file():
            return candidate
    # The folder of an experiment has both files. The folder of a model has only a config.json.
    stored_config, manifest = Path(name) / "config.json", Path(name) / "manifest.json"
    if (base / stored_config).is_file() and (base / manifest).is_file():
        remedy = f"name the configuration in it: {stored_config}"
        raise ConfigError([ConfigIssue("is a folder, and a file is needed", name, remedy=remedy)])
    raise ConfigError([_no_such_file(name, folders)])


def _no_such_file(name: str, folders: Sequence[Path]) -> ConfigIssue:
    """Returns the issue of a file that is in none of the folders, with files of similar names."""
    searched_paths = ", ".join(shorten_path(folder / name) for folder in folders)
    # The files that could be meant. The key is a file's path from the folder, as a user would write it; the
    # value is the path that the message shows.
    shown_paths: dict[str, str] = {}
    for folder in folders:
        named_folder = Path(os.path.abspath(folder / name)).parent
        # "*sonnet" matches .jsonnet and .libsonnet.
        paths = [*sorted(folder.glob("*sonnet")), *sorted(named_folder.glob("*.jsonnet"))]
        # Users name shipped files from either folder: `quickstart/grpo.jsonnet` or
        # `configs/quickstart/grpo.jsonnet`.
        if folder in (CONFIGS_FOLDER, CONFIGS_FOLDER.parent):
            paths += find_configuration_files(CONFIGS_FOLDER)
        for path in paths:
            shown_paths[os.path.relpath(path, folder)] = shorten_path(path)
    files_of_similar_path = [shown_paths[match] for match in nearest(name, shown_paths, count=3)]
    # The stem of `configs/quickstart/grpo.jsonnet` is `grpo`.
    shown_paths_by_stem: dict[str, list[str]] = {}
    for path_as_written, shown_path in shown_paths.items():
        shown_paths_by_stem.setdefault(Path(path_as_written).stem, []).append(shown_path)
    files_of_similar_stem: list[str] = []
    for stem in nearest(Path(name).stem, shown_paths_by_stem, count=2):
        files_of_similar_stem += shown_paths_by_stem[stem]
    has_folder = Path(name).parent != Path(".")
    if has_folder:
        similar_files = files_of_similar_path + files_of_similar_stem
    else:  # the user may have left out the folder, so files of a similar name in any folder come first
        similar_files = files_of_similar_stem + files_of_similar_path
    suggestions = list(dict.fromkeys(similar_files))[:3]  # each once, the best three
    if suggestions:
        remedy = f"did you mean {' or '.join(suggestions)}?"
    else:
        remedy = "`treetune configs` lists the shipped files"
    return ConfigIssue("no such file", name, f"looked for {searched_paths}", remedy)


def find_configuration_files(folder: Path) -> list[Path]:
    """Returns all configurations below a folder."""
    return sorted(folder.rglob("*.jsonnet"))


def read_layer(path: Path) -> Layer:
    """Returns a file as a layer. Raises ConfigError if it can't be read."""
    try:
        return Layer(shorten_path(path), read_as_jsonnet(path), path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            [ConfigIssue(f"can't be read: {reason}", shorten_path(path), remedy="save it as UTF-8 text")]
        ) from error


def read_as_jsonnet(path: Path) -> str:
    """Returns the text of a file as Jsonnet. Raises as reading does, and ConfigError for a YAML file that
    can't be read."""
    text = path.read_text(encoding="utf-8")
    return jsonnet_of_yaml(text, shorten_path(path)) if path.suffix in (".yaml", ".yml") else text


def shorten_path(path: Path | str) -> str:
    """Returns a path for messages: relative to the working directory if it is below that."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def evaluate_jsonnet(name: str, text: str, variables: Mapping[str, str], importer: Importer) -> Any:
    """Evaluates a Jsonnet text to plain data. Raises RuntimeError with Jsonnet's own message, and Endless
    after its deadline."""
    results: list[str | BaseException] = []  # empty until the thread has ended

    def evaluate_and_store() -> None:
        """Evaluates the text, and puts the JSON text, or the error, into `results`."""
        try:
            results.append(
                _jsonnet.evaluate_snippet(name, text, ext_vars=dict(variables), import_callback=importer)
            )
        except BaseException as error:
            results.append(error)

    # Jsonnet can't be interrupted. A daemon thread ends with the process.
    thread = threading.Thread(target=evaluate_and_store, name="jsonnet", daemon=True)
    thread.start()
    thread.join(EVALUATION_DEADLINE_S)
    if not results:
        raise Endless
    if isinstance(results[0], BaseException):
        raise results[0]
    return json.loads(results[0])


def evaluate_flattened(layers: Sequence[Layer], variables: Mapping[str, str]) -> Any:
    """Evaluates the sum of all layers as one text, which is several times faster than with imports.

    Raises RuntimeError if that isn't possible, and passes on the errors of reading a file.
    """
    texts_and_directories = [(layer.text, layer.directory) for layer in layers]
    text_of_sum = flatten_imports(texts_and_directories, find_file, read_as_jsonnet)

    # `flatten_imports` has put the file's text in place of every `import`. So Jsonnet calls `importer` only
    # for `importstr` and `importbin`, in which `flatten_imports` has written whole paths.
    def importer(directory: str, path: str) -> tuple[str, bytes]:
        return path, Path(path).read_bytes()

    return evaluate_jsonnet(NAME_OF_SUM, text_of_sum, variables, importer)


def import_sum(layers: Sequence[Layer]) -> str:
    """Returns a Jsonnet text that imports each layer by its `import_name`, and adds them.

    Example: ``(import "/…/sft.jsonnet") + (import "--override")``.
    """
    return " + ".join(f"(import {json.dumps(layer.import_name)})" for layer in layers)


def add_layers(layers: Sequence[Layer], variables: Mapping[str, str]) -> Any:
    """Returns the sum of the layers as plain data.

    Raises:
        RuntimeError: Jsonnet's own message. `treetune.config.jsonnet.sum_of` explains it to users.
        ConfigError: A file is missing or can't be read.
        Endless: The evaluation takes too long.
    """
    try:
        return evaluate_flattened(layers, variables)
    except RuntimeError:
        # Some files can't be flattened, such as one that asks for its own name.
        texts = {layer.import_name: layer.text for layer in layers}

        def importer(directory: str, name: str) -> tuple[str, bytes]:
            """Returns the path and the content of what a file in `directory` imports by `name`."""
            if name in texts:
                return name, texts[name].encode()
            path = find_file(name, Path(directory or "."))
            return str(path), read_as_jsonnet(path).encode()

        return evaluate_jsonnet(NAME_OF_SUM, import_sum(layers), variables, importer)
