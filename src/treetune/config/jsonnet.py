"""Loads a configuration: evaluates ``a + b + … + environment + overrides`` to one plain object.

When an evaluation fails, the message says which file, key or variable is at fault, and what to do.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treetune.config.errors import ConfigIssue
from treetune.config.jsonnet_errors import issue_of_message
from treetune.config.jsonnet_frames import location_of, read_frames
from treetune.config.layers import (
    EVALUATION_DEADLINE_S,
    NAME_OF_SUM,
    Config,
    Layer,
    evaluate_flattened,
    evaluate_jsonnet,
    find_file,
    import_sum,
    read_as_jsonnet,
    read_layer,
)
from treetune.config.yaml_files import LARGEST_WHOLE_NUMBER
from treetune.exceptions import ConfigError, Endless

ENVIRONMENT_KEYS = {
    "seed": "APP_SEED",
    "directory": "APP_DIRECTORY",
    "experiment_name": "APP_EXPERIMENT_NAME",
}
"""Root keys that an environment variable sets, over the files and under the overrides."""


_MISSING_VARIABLE = re.compile(r"RUNTIME ERROR: undefined external variable: (.+)")


def load(
    configs: Sequence[str],
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    environment_keys: Sequence[str] = tuple(ENVIRONMENT_KEYS),
) -> Config:
    """Evaluates ``configs[0] + configs[1] + … + environment + overrides[0] + …``.

    Args:
        environ: The environment, by default the process's. Its ``APP_*`` are the external variables.
        environment_keys: The root keys that an environment variable may set.

    Raises:
        ConfigError: A file or variable is missing, Jsonnet reports an error, or the result isn't an object.
    """
    environ = os.environ if environ is None else environ
    if not configs:
        remedy = "name the files, as in: treetune check grpo.jsonnet"
        raise ConfigError([ConfigIssue("no configuration given", "--configs", remedy=remedy)])
    layers = [read_layer(find_file(name, Path.cwd())) for name in configs]
    layers += _environment_layers(environ, environment_keys)
    for number, text in enumerate(overrides, start=1):
        layers.append(Layer("--override" if len(overrides) == 1 else f"--override {number}", text))
    # Jsonnet's Python module refuses a text with a character of code 0, and doesn't name the file.
    binary_files = [layer.name for layer in layers if "\0" in layer.text]
    if binary_files:
        remedy = "save it as plain text"
        raise ConfigError([ConfigIssue("has a character of code 0", binary_files[0], remedy=remedy)])
    variables = {name: value for name, value in environ.items() if name.startswith("APP_")}
    data = sum_of(layers, variables)
    if not isinstance(data, dict):
        raise ConfigError([_issue_of_no_object(layers, variables)])
    if issues := list(_issues_of_inexact_numbers(data, key="")):
        raise ConfigError(issues)
    return Config(data, tuple(layers), variables)


def _issues_of_inexact_numbers(value: Any, key: str) -> Iterator[ConfigIssue]:
    """Yields an issue for each whole number that Jsonnet can't represent, and may therefore have changed."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            yield from _issues_of_inexact_numbers(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, int) and abs(value) > LARGEST_WHOLE_NUMBER:
        fault = f"{value} is beyond 2**53 - 1 = {LARGEST_WHOLE_NUMBER}, where Jsonnet's numbers lose digits"
        yield ConfigIssue(fault, key, remedy=f"give a whole number of at most {LARGEST_WHOLE_NUMBER}")


def sum_of(layers: Sequence[Layer], variables: Mapping[str, str]) -> Any:
    """Returns the sum of the layers as plain data. Raises ConfigError if it can't be evaluated."""
    try:
        try:
            return evaluate_flattened(layers, variables)
        except (RuntimeError, ConfigError, OSError, UnicodeDecodeError):
            # `evaluate_flattened` joins all files to one text, and Jsonnet's message refers to that text.
            # With imports, the message names the files.
            return _evaluate_with_imports(layers, variables)
    except Endless as error:
        raise ConfigError([_issue_of_endless_layer(layers, variables)]) from error


def _evaluate_with_imports(layers: Sequence[Layer], variables: Mapping[str, str]) -> Any:
    """Evaluates the sum of the files as imports, so that messages name the files.

    Raises ConfigError, with all external variables that aren't set at once.
    """
    texts = {layer.import_name: layer.text for layer in layers}
    unread_file: list[ConfigIssue] = []

    def importer(directory: str, name: str) -> tuple[str, bytes]:
        """Returns the path and the text of an import: of a layer, or of a file that a layer imports."""
        if name in texts:
            return name, texts[name].encode()
        try:
            path = find_file(name, Path(directory or "."))
            return str(path), read_as_jsonnet(path).encode()
        except ConfigError as error:
            unread_file[:] = error.issues  # Jsonnet replaces the error by one of its own
            raise

    total = import_sum(layers)
    values = dict(variables)
    message_about: dict[str, str] = {}  # Jsonnet's message about each external variable that isn't set
    while True:
        try:
            data = evaluate_jsonnet(NAME_OF_SUM, total, values, importer)
            break
        except RuntimeError as error:
            message = str(error)
            match = _MISSING_VARIABLE.match(message)
            variable = match[1] if match else None
            if variable is not None and variable not in values:
                message_about[variable] = message
                # With a placeholder, the evaluation continues to the next variable that isn't set.
                values[variable] = "0"
                continue
            if variable is not None and message_about.get(variable) == message:
                # The placeholder hasn't changed the message. So it comes from a file's own `error`, and isn't
                # about a variable.
                del message_about[variable]
            # A placeholder may be the cause of this failure. So if variables aren't set, only they are
            # reported.
            issues = [_issue_of_unset_variable(name, text) for name, text in message_about.items()]
            if not issues:
                issues.append(_issue_of_failure(message, layers, variables, unread_file))
            raise ConfigError(issues) from error
    if message_about:
        raise ConfigError([_issue_of_unset_variable(name, text) for name, text in message_about.items()])
    return data


def _issue_of_failure(
    message: str, layers: Sequence[Layer], variables: Mapping[str, str], unread_file: Sequence[ConfigIssue]
) -> ConfigIssue:
    """Returns the issue of Jsonnet's error message about the sum of the files.

    Args:
        unread_file: The issue of an imported file that can't be read; empty if all were read.
    """
    if not read_frames(message) and len(layers) > 1:
        # No single file has the error, so the sum of the files failed: one of them isn't an object.
        return _issue_of_no_object(layers, variables)
    if "couldn't open import" in message and unread_file:
        unread = unread_file[0]
        frames = read_frames(message)  # the places of the error, the import first
        imported_in = f"imported in {location_of(frames[0])}" if frames else None
        source = "; ".join(filter(None, [imported_in, unread.source]))
        return replace(unread, source=source or None)
    return issue_of_message(message, layers, variables)


def _environment_layers(environ: Mapping[str, str], keys: Sequence[str]) -> list[Layer]:
    """Returns a layer for each of these root keys that an environment variable sets. Raises ConfigError."""
    layers, issues = [], []
    for key in keys:
        variable = ENVIRONMENT_KEYS[key]
        if variable not in environ:
            continue
        text = environ[variable].strip()
        value: int | str = text
        if key == "seed":
            if not re.fullmatch(r"[+-]?[0-9]+", text) or abs(int(text)) > LARGEST_WHOLE_NUMBER:
                issues.append(
                    _issue_of_bad_variable(variable, environ[variable], "a whole number", "export APP_SEED=1")
                )
                continue
            value = int(text)
        elif not text:
            issues.append(
                _issue_of_bad_variable(variable, environ[variable], "not empty", f"unset {variable}")
            )
            continue
        layers.append(Layer(f"environment variable {variable}", json.dumps({key: value})))
    if issues:
        raise ConfigError(issues)
    return layers


def _issue_of_bad_variable(variable: str, value: str, should: str, remedy: str) -> ConfigIssue:
    return ConfigIssue(f"should be {should}, is {value!r}", variable, "the environment variable", remedy)


def _issue_of_unset_variable(variable: str, message: str) -> ConfigIssue:
    """Returns the issue of an external variable that isn't set, from Jsonnet's `message` about it."""
    # The innermost place in a user's file that the message names
    frame = next(iter(read_frames(message)), None)
    remedy = f"export {variable}=…"
    if not variable.startswith("APP_"):
        remedy = f"only variables named APP_… reach a configuration: use std.extVar('APP_{variable}') there"
    where = location_of(frame) if frame else None
    return ConfigIssue("external variable is not set", variable, where, remedy)


def _issue_of_endless_layer(layers: Sequence[Layer], variables: Mapping[str, str]) -> ConfigIssue:
    """Returns the issue of the layer whose evaluation alone doesn't end, or else of all layers together."""
    label = ", ".join(layer.name for layer in layers)
    layers_to_try = layers if len(layers) > 1 else ()  # a single layer needs no search
    for layer in layers_to_try:
        try:
            evaluate_flattened([layer], variables)
        except Endless:
            label = layer.name
            break
        except (RuntimeError, ConfigError, OSError, UnicodeDecodeError):
            continue  # it needs the other layers
    remedy = "look in it, and in its imports, for an endless loop, such as a function that calls itself"
    return ConfigIssue(
        f"evaluating it took more than {EVALUATION_DEADLINE_S:.0f} s and was stopped", label, remedy=remedy
    )


def _issue_of_no_object(layers: Sequence[Layer], variables: Mapping[str, str]) -> ConfigIssue:
    """Returns the issue of a configuration that isn't an object. The issue names the layer at fault.

    A configuration is the sum of its layers. A layer is a file, the environment's settings or an override.
    """
    fault = "should be an object {…}"
    for layer in layers:
        try:
            alone = sum_of([layer], variables)
        except ConfigError:
            # The layer uses `super`, so it fails without the layers before it. Only an object can use
            # `super`, so this layer is an object.
            continue
        if not isinstance(alone, dict):
            shown_value = json.dumps(alone)[:60]  # a list or a text may be long
            return ConfigIssue(f"{fault}, is {shown_value}", layer.name, remedy="put braces around it")
    return ConfigIssue(f"the configuration {fault}")
