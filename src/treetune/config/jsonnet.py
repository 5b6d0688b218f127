"""From files, environment and overrides to one plain object: ``a + b + … + environment + overrides``."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import _jsonnet

from treetune.config.errors import ConfigIssue, nearest
from treetune.config.jsonnet_errors import TOTAL, frames, issue, location_of
from treetune.config.lexer import flattened
from treetune.config.yaml_files import LARGEST_WHOLE, jsonnet_of_yaml
from treetune.exceptions import ConfigError, Endless

_IN_PACKAGE, _IN_CHECKOUT = (Path(__file__).resolve().parents[above] / "configs" for above in (1, 3))
CONFIGS = _IN_PACKAGE if _IN_PACKAGE.is_dir() else _IN_CHECKOUT
"""The shipped configurations, found from any working directory: a wheel has them in the package, with the
examples beside them."""

ENVIRONMENT_KEYS = {
    "seed": "APP_SEED",
    "directory": "APP_DIRECTORY",
    "experiment_name": "APP_EXPERIMENT_NAME",
}
"""Root keys that an environment variable sets, over the files and under the overrides."""

DEADLINE_S = 60.0

Importer = Callable[[str, str], tuple[str, bytes]]
"""From the importing file's folder and the import's text to a name and the content."""

_MISSING_VARIABLE = re.compile(r"undefined external variable: (\S+)")


@dataclass(frozen=True)
class Layer:
    """An operand of the sum. `path` is None for text that came from no file."""

    name: str
    text: str
    path: Path | None = None

    @property
    def directory(self) -> Path:
        """What the layer's imports are relative to."""
        return self.path.parent if self.path else Path.cwd()

    @property
    def import_name(self) -> str:
        """What the layer is called in Jsonnet's messages."""
        return str(self.path or self.name)


@dataclass(frozen=True)
class Config:
    """An evaluated configuration and what it was made of."""

    data: dict[str, Any]
    layers: tuple[Layer, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


def load(
    configs: Sequence[str],
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    environment_keys: Sequence[str] = tuple(ENVIRONMENT_KEYS),
) -> Config:
    """Evaluates ``configs[0] + configs[1] + … + environment + overrides[0] + …``.

    `environ` is the process's by default; its ``APP_*`` are the external variables. Raises
    ConfigError for a missing file or variable, an error in Jsonnet, or a result that is no object.
    """
    environ = os.environ if environ is None else environ
    if not configs:
        remedy = "name the files, as in: treetune check grpo.jsonnet"
        raise ConfigError([ConfigIssue("no configuration given", "--configs", remedy=remedy)])
    layers = [read_layer(find_file(name, Path.cwd())) for name in configs]
    layers += _environment_layers(environ, environment_keys)
    for number, text in enumerate(overrides, start=1):
        layers.append(Layer("--override" if len(overrides) == 1 else f"--override {number}", text))
    if strange := [layer.name for layer in layers if "\0" in layer.text]:
        issue = ConfigIssue("has a character of code 0", strange[0], remedy="save it as plain text")
        raise ConfigError([issue])
    variables = {name: value for name, value in environ.items() if name.startswith("APP_")}
    data = sum_of(layers, variables)
    if not isinstance(data, dict):
        raise ConfigError([_not_an_object(layers, variables)])
    if issues := list(_inexact(data, "")):
        raise ConfigError(issues)
    return Config(data, tuple(layers), variables)


def _inexact(value: Any, key: str) -> Iterator[ConfigIssue]:
    """Whole numbers that Jsonnet can't hold: what was written may have been another one."""
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _inexact(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, int) and abs(value) > LARGEST_WHOLE:
        fault = f"{value} is beyond 2**53 - 1 = {LARGEST_WHOLE}, where Jsonnet's numbers lose digits"
        yield ConfigIssue(fault, key, remedy=f"give a whole number of at most {LARGEST_WHOLE}")


def evaluate(name: str, text: str, variables: Mapping[str, str], importer: Importer) -> Any:
    """Evaluates a Jsonnet text to plain data. Raises RuntimeError with Jsonnet's own message, and Endless
    after its deadline."""
    results: list[str | BaseException] = []  # empty until the thread has ended

    def work() -> None:
        try:
            results.append(
                _jsonnet.evaluate_snippet(name, text, ext_vars=dict(variables), import_callback=importer)
            )
        except BaseException as error:
            results.append(error)

    # Nothing can stop it: its thread ends with the process.
    thread = threading.Thread(target=work, name="jsonnet", daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    if not results:
        raise Endless
    if isinstance(results[0], BaseException):
        raise results[0]
    return json.loads(results[0])


def find_file(name: str, base: Path) -> Path:
    """Returns the file that `name` means in the folder `base`: the one there, else one of treetune's own.

    These are found as ``grpo.jsonnet``, ``configs/grpo.jsonnet`` or ``examples/….jsonnet``.
    """
    names_own_folder = Path(name).parts[:1] in ((CONFIGS.name,), ("examples",))
    own_folder = CONFIGS.parent if names_own_folder else CONFIGS
    folders = list(dict.fromkeys([base, own_folder]))
    for folder in folders:
        candidate = Path(os.path.abspath(folder / name))
        if candidate.is_file():
            return candidate
    raise ConfigError([_no_such_file(name, folders)])


def configurations(folder: Path) -> list[Path]:
    """Returns all configurations below a folder."""
    return sorted(folder.rglob("*.jsonnet"))


def text_of(path: Path) -> str:
    """Returns the text of a file as Jsonnet. Raises as reading does, and ConfigError for a YAML file that
    can't be read."""
    text = path.read_text(encoding="utf-8")
    return jsonnet_of_yaml(text, relative(path)) if path.suffix in (".yaml", ".yml") else text


def read_layer(path: Path) -> Layer:
    try:
        return Layer(relative(path), text_of(path), path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            [ConfigIssue(f"can't be read: {reason}", relative(path), remedy="save it as UTF-8 text")]
        ) from error


def relative(path: Path | str) -> str:
    """A path as people read it: relative to the working directory where it lies below."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def sum_of(layers: Sequence[Layer], variables: Mapping[str, str]) -> Any:
    """The layers added from left to right, as plain data; ConfigError where that fails."""
    try:
        try:
            return _evaluate_flattened(layers, variables)
        except (RuntimeError, ConfigError, OSError, UnicodeDecodeError):
            # Its messages would be about the flattened text: the slow way says what is wrong, and where.
            return _evaluate_with_imports(layers, variables)
    except Endless as error:
        raise ConfigError([_endless(layers, variables)]) from error


def _evaluate_flattened(layers: Sequence[Layer], variables: Mapping[str, str]) -> Any:
    """All files as one text. Raises RuntimeError, or what reading raises, where that doesn't work out."""
    operands = [(layer.text, layer.directory) for layer in layers]
    text = flattened(operands, find_file, text_of)

    def importer(directory: str, name: str) -> tuple[str, bytes]:
        return name, Path(name).read_bytes()  # only `importstr` and `importbin` are left

    return evaluate(TOTAL, text, variables, importer)


def _evaluate_with_imports(layers: Sequence[Layer], variables: Mapping[str, str]) -> Any:
    """Evaluates the sum of the files as imports, so that messages name them. Raises ConfigError.

    All variables that aren't set are told at once.
    """
    texts = {layer.import_name: layer.text for layer in layers}
    unread_file: list[ConfigIssue] = []

    def importer(directory: str, name: str) -> tuple[str, bytes]:
        if name in texts:
            return name, texts[name].encode()
        try:
            path = find_file(name, Path(directory or "."))
            return str(path), text_of(path).encode()
        except ConfigError as error:
            unread_file[:] = error.issues
            raise

    total = " + ".join(f"(import {json.dumps(layer.import_name)})" for layer in layers)
    values, unset = dict(variables), []
    while True:
        try:
            data = evaluate(TOTAL, total, values, importer)
        except RuntimeError as error:
            variable = _MISSING_VARIABLE.search(str(error))
            if variable and variable[1] not in values:
                # A stand-in lets the evaluation go on to the next one that is missing.
                unset.append(_missing_variable(variable[1], str(error)))
                values[variable[1]] = "0"
                continue
            if unset:
                raise ConfigError(unset) from error
            if not frames(str(error)) and len(layers) > 1:  # it is the sum that failed: what was added?
                raise ConfigError([_not_an_object(layers, variables)]) from error
            if "couldn't open import" in str(error) and unread_file:
                unread, importing = unread_file[0], frames(str(error))
                imported_in = f"imported in {location_of(importing[0])}" if importing else None
                source = "; ".join(filter(None, [imported_in, unread.source]))
                raise ConfigError([replace(unread, source=source or None)]) from error
            raise ConfigError([issue(str(error), layers, variables)]) from error
        if unset:
            raise ConfigError(unset)
        return data


def _environment_layers(environ: Mapping[str, str], keys: Sequence[str]) -> list[Layer]:
    layers, issues = [], []
    for key in keys:
        variable = ENVIRONMENT_KEYS[key]
        if variable not in environ:
            continue
        text = environ[variable].strip()
        value: int | str = text
        if key == "seed":
            if not re.fullmatch(r"[+-]?[0-9]+", text) or abs(int(text)) > LARGEST_WHOLE:
                issues.append(
                    _bad_variable(variable, environ[variable], "a whole number", "export APP_SEED=1")
                )
                continue
            value = int(text)
        elif not text:
            issues.append(_bad_variable(variable, environ[variable], "not empty", f"unset {variable}"))
            continue
        layers.append(Layer(f"environment variable {variable}", json.dumps({key: value})))
    if issues:
        raise ConfigError(issues)
    return layers


def _bad_variable(variable: str, value: str, should: str, remedy: str) -> ConfigIssue:
    return ConfigIssue(f"should be {should}, is {value!r}", variable, "the environment variable", remedy)


def _missing_variable(variable: str, message: str) -> ConfigIssue:
    frame = next(iter(frames(message)), None)
    remedy = f"export {variable}=…"
    if not variable.startswith("APP_"):
        remedy = f"only variables named APP_… reach a configuration: use std.extVar('APP_{variable}') there"
    where = location_of(frame) if frame else None
    return ConfigIssue("external variable is not set", variable, where, remedy)


def _no_such_file(name: str, searched: Sequence[Path]) -> ConfigIssue:
    """Returns the issue of a file that is in none of the folders, with files of nearly that name."""
    looked = ", ".join(relative(folder / name) for folder in searched)
    # Files that could be meant: as one would name them, and as they are shown
    candidates: dict[str, str] = {}
    for folder in searched:
        named_folder = Path(os.path.abspath(folder / name)).parent
        paths = [*sorted(folder.glob("*sonnet")), *sorted(named_folder.glob("*.jsonnet"))]
        if folder in (CONFIGS, CONFIGS.parent):
            paths += configurations(CONFIGS)
        for path in paths:
            candidates[os.path.relpath(path, folder)] = relative(path)
    # First those whose whole name is near, then those in another folder, by their stem.
    similar = [candidates[match] for match in nearest(name, candidates, count=3)]
    by_stem: dict[str, list[str]] = {}
    for candidate, shown in candidates.items():
        by_stem.setdefault(Path(candidate).stem, []).append(shown)
    for stem in nearest(Path(name).stem, by_stem, count=2):
        similar += by_stem[stem]
    near = list(dict.fromkeys(similar))[:3]
    remedy = f"did you mean {' or '.join(near)}?" if near else "`treetune configs` lists the shipped files"
    return ConfigIssue("no such file", name, f"looked for {looked}", remedy)


def _endless(layers: Sequence[Layer], variables: Mapping[str, str]) -> ConfigIssue:
    """Returns the issue of the layer that comes to no end by itself, or else of all of them together."""
    guilty = ", ".join(layer.name for layer in layers)
    for layer in layers if len(layers) > 1 else ():
        try:
            _evaluate_flattened([layer], variables)
        except Endless:
            guilty = layer.name
            break
        except (RuntimeError, ConfigError, OSError, UnicodeDecodeError):
            continue  # leans on the others
    remedy = "look in it, and in its imports, for an endless loop, such as a function that calls itself"
    return ConfigIssue(
        f"evaluating it took more than {DEADLINE_S:.0f} s and was stopped", guilty, remedy=remedy
    )


def _not_an_object(layers: Sequence[Layer], variables: Mapping[str, str]) -> ConfigIssue:
    """Returns the issue of the layer to blame for a sum that is no object."""
    fault = "should be an object {…}"
    for layer in layers:
        try:
            alone = sum_of([layer], variables)
        except ConfigError:
            continue  # leans on the others, which only an object can
        if not isinstance(alone, dict):
            shown_value = json.dumps(alone)[:60]
            return ConfigIssue(f"{fault}, is {shown_value}", layer.name, remedy="put braces around it")
    return ConfigIssue(f"the configuration {fault}")
