"""Explains Jsonnet's error messages to users: which key was being computed, from which other keys, and which
files set those."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treetune.config import lexer
from treetune.config.errors import ConfigIssue, dotted_key
from treetune.config.explain import COMPUTED_VALUE, Explanation
from treetune.config.jsonnet_frames import STATIC_ERROR, Frame, location_of, read_frames
from treetune.config.layers import Config, Layer
from treetune.contracts import KeyPath

SHOWN_COLUMNS = 100

_REFERENCE = re.compile(r"(?:\$|\bself|\bsuper)((?:\.[A-Za-z_]\w*)+)")


def issue_of_message(message: str, layers: Sequence[Layer], variables: Mapping[str, str]) -> ConfigIssue:
    """Returns the issue of an evaluation that failed.

    It has file and line of the error, the key that was being computed, the keys that this key is computed
    from, and a remedy.
    """
    texts = {layer.import_name: layer.text for layer in layers}
    error_frames = read_frames(message)
    syntax_error = STATIC_ERROR.match(message)
    fault = syntax_error["what"] if syntax_error else message.splitlines()[0].removeprefix("RUNTIME ERROR: ")
    is_recursive = "max stack frames" in fault
    remedy = _choose_remedy(fault)
    if not error_frames:
        return ConfigIssue(f"Jsonnet: {fault.strip()}", remedy=remedy)
    innermost_frame = error_frames[0]
    # An error of syntax has no key that was being computed. An endless recursion may end at any key.
    where = None if syntax_error or is_recursive else _describe_origin(error_frames, texts, layers, variables)
    return ConfigIssue(
        f"Jsonnet: {fault.strip()}",
        location_of(innermost_frame),
        where,
        remedy,
        _excerpt_at(innermost_frame, texts),
    )


_REMEDIES = (
    (
        "max stack frames",
        "something is defined by itself: look for files that import each other, or keys that refer to"
        " themselves",
    ),
    (
        "Unknown variable",
        "a string needs quotes; a key of the experiment is $.key, and another file's content an import",
    ),
    ("field does not exist", "check the key's spelling, and whether an earlier file sets it"),
    ("uplicate field", "leave one of the two out"),
    ("manifest function", "call the function, or hide the field with ::"),
    ("division by zero", "check the divisor"),
    ("no super class", "a key is extended with +: if an earlier file has it, and set with : otherwise"),
)
_FIX_SYNTAX = "fix it where the arrow points: {…} around keys, a comma between them, quotes around texts"
_LOOK_AT_VALUES = (
    "look at the expression that the arrow points at; `treetune print_config` shows the values of keys"
)


def _choose_remedy(message: str) -> str:
    """Returns the remedy for one of Jsonnet's error messages."""
    for phrase, remedy in _REMEDIES:
        if phrase in message:
            return remedy
    # Messages about syntax begin with one of these words.
    is_syntax = re.match(r"(?i)(expected|unexpected|unterminated|unclosed|could not lex|not a)", message)
    return _FIX_SYNTAX if is_syntax else _LOOK_AT_VALUES


def _describe_origin(
    error_frames: Sequence[Frame],
    texts: Mapping[str, str],
    layers: Sequence[Layer],
    variables: Mapping[str, str],
) -> str | None:
    """Returns the key that was being computed, what that key is computed from, and which files set that.

    The layers are the files and overrides that are added up to the configuration. An error may lie in another
    file, such as a library that a layer imports. Then the returned text also has the place in a layer from
    which that file was called.

    Args:
        error_frames: The places of the error, innermost first.
        texts: The texts of the layers, by file.
    """
    key_and_setters = _describe_computed_key(error_frames, texts, layers, variables) or ""
    caller = next((location_of(frame) for frame in error_frames if frame.file in texts), "")
    is_outside_of_layers = error_frames[0].file not in texts
    # The key's description may name the same place already.
    if caller and is_outside_of_layers and caller not in key_and_setters:
        return "; ".join(filter(None, [key_and_setters, f"called from {caller}"]))
    return key_and_setters or None


def _describe_computed_key(
    error_frames: Sequence[Frame],
    texts: Mapping[str, str],
    layers: Sequence[Layer],
    variables: Mapping[str, str],
) -> str | None:
    """Returns the key whose value was being computed, the keys that it is computed from, and the files that
    set those."""
    # The innermost place within an object is in the value of a key. Places before it are in functions or
    # variables.
    depth = next((number for number, frame in enumerate(error_frames) if frame.in_object), None)
    if depth is None:
        return None
    frame = error_frames[depth]
    text = _read_text_of(frame.file, texts)
    key = lexer.field_at(text, frame.line, frame.column)
    if not key:
        return None
    # The keys that the value refers to, such as $.trainer.rate, each once
    referenced_keys: dict[KeyPath, None] = {}
    for inner_frame in error_frames[: depth + 1]:
        if inner_frame.file == frame.file:
            for match in _REFERENCE.finditer(inner_frame.text(text)):
                referenced_keys[tuple(match[1].strip(".").split("."))] = None
    setters = [_describe_setter(path, layers, variables) for path in referenced_keys]
    return "; ".join([f"in the value of {dotted_key(key)} ({location_of(frame)})", *filter(None, setters)])


def _describe_setter(key: KeyPath, layers: Sequence[Layer], variables: Mapping[str, str]) -> str | None:
    """Returns what sets a key, or else what sets an object around the key; None if nothing is found.

    The whole configuration can't be evaluated, so the single files are looked at.
    """
    explanation = Explanation(Config(data={}, layers=tuple(layers), variables=variables))
    while key:
        if settings := explanation.settings(key):
            value: Any = settings[-1].value
            text = "" if value is COMPUTED_VALUE else f" ({_shorten_value(value)})"
            return f"it is made from {dotted_key(key)}, which {settings[-1].location} sets{text}"
        key = key[:-1]
    return None


def _shorten_value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _read_text_of(file: str, texts: Mapping[str, str]) -> str:
    """Returns the text of a layer or of a file that layers import; "" if it can't be found."""
    if file in texts:
        return texts[file]
    return Path(file).read_text(encoding="utf-8", errors="replace") if Path(file).is_file() else ""


def _excerpt_at(frame: Frame, texts: Mapping[str, str]) -> str | None:
    """Returns a line of the file with a mark below the column; of a long line, the part around the column."""
    lines = _read_text_of(frame.file, texts).splitlines()
    if not 0 < frame.line <= len(lines):
        return None
    # A tab becomes one space, so that every character is one column wide.
    line = lines[frame.line - 1].replace("\t", " ")
    column = frame.column - 1
    # The column is in the middle of the part that is shown, unless the line begins or ends there.
    start = max(0, min(column - SHOWN_COLUMNS // 2, len(line) - SHOWN_COLUMNS))
    shown = line[start : start + SHOWN_COLUMNS]
    return f"    {shown}\n    {' ' * (column - start)}^"
