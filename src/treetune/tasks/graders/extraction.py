r"""Finds the answer in a response, for graders.

Every function takes any text, raises nothing, and needs time linear in it: a model writes a million
brackets sooner or later. Nothing is evaluated; values are read by `json` and `ast.literal_eval`.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator
from typing import Any

# Graders of users find it here, beside the others.
from treetune.tasks.thoughts import after_thought as after_thought

ANSWER = "<answer>"
ANSWER_END = "</answer>"

LONGEST_VALUE = 100_000
"""Characters of a value that is read: the syntax tree of a longer one takes hundreds of megabytes."""

DEEPEST_VALUE = 50
"""Brackets within brackets of a value that is read; Python's own parsers give up at some hundreds."""

# Possessive repetitions, here and in strings: what doesn't end as it should is given up in one pass.
_FENCE = re.compile(r"^[ \t]*+```[ \t]*+(?P<language>[^\s`]*+)[^\n`]*+$", re.MULTILINE)
_CLOSING = {"]": "[", ")": "(", "}": "{"}
_STRING = {
    '"': re.compile(r'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"'),
    "'": re.compile(r"'[^'\\\n]*+(?:\\.[^'\\\n]*+)*+'"),
}
_SIGN = re.compile(r"""\\.|["'\[\](){}]""", re.DOTALL)  # LaTeX's \[ and \{ are no brackets
_NESTING = re.compile("|".join(one.pattern for one in _STRING.values()) + r"""|(?P<sign>[\[({\])}"'])""")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?:(?P<brace>\{)|(?P<bare>\d+(?:\.\d+)?|\\?[A-Za-z]+))")


class NoValue(ValueError):
    """The text is no JSON value and no Python literal, or one larger than any answer."""


def last_between(
    text: str, opening: str = ANSWER, closing: str = ANSWER_END, *, unclosed: bool = False
) -> str | None:
    """Returns what stands between the last `closing` and the last `opening` before it, stripped, on
    however many lines. With `unclosed`: what follows the last `opening`, up to a `closing` if there is
    one. None where nothing stands there."""
    if unclosed:
        _, opened, rest = text.rpartition(opening)
        return rest.partition(closing)[0].strip() or None if opened else None
    before, closed, _ = text.rpartition(closing)
    _, opened, answer = before.rpartition(opening)
    return answer.strip() or None if closed and opened else None


def fenced_blocks(text: str, *languages: str) -> list[str]:
    """Returns the contents of all closed code blocks between lines of three backticks, from the first to
    the last; of those with one of these `languages` behind the backticks alone, where any are named."""
    blocks: list[str] = []
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
            continue
        if fence["language"]:
            opening = fence  # the block before was never closed
            continue
        if not languages or opening["language"].lower() in languages:
            blocks.append(text[opening.end() + 1 : max(fence.start() - 1, opening.end() + 1)])
        opening = None
    return blocks


def last_box(text: str) -> str | None:
    r"""Returns the content of the last ``\boxed{…}`` or ``\fbox{…}`` whose brace is closed; of a box that
    holds nothing but a box, what stands in that one. None where it is empty."""
    in_boxes = boxes(text)
    if not in_boxes:
        return None
    content = in_boxes[-1][2].strip()
    inner = boxes(content)
    if len(inner) == 1 and inner[0][:2] == (0, len(content)):
        content = inner[0][2].strip()
    return content or None


def read_value(text: str) -> Any:
    """Reads the JSON value or Python literal that all of the text is.

    Raises NoValue for any other text, for one over `LONGEST_VALUE`, for one nested deeper than
    `DEEPEST_VALUE`, and for strings over several lines, which JSON doesn't have.
    """
    text = text.strip()
    if len(text) > LONGEST_VALUE:
        raise NoValue(f"{len(text)} characters, more than {LONGEST_VALUE}")
    if _depth(text) > DEEPEST_VALUE:
        raise NoValue(f"more than {DEEPEST_VALUE} brackets deep")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings, which a model may write
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise NoValue(f"no JSON and no literal: {error}") from None


def values(text: str, brackets: str = "[{") -> Iterator[tuple[str, Any]]:
    """Yields the text and value of everything in `brackets` (their opening signs) that is a whole value,
    from the last to the first. What stands within another pair of `brackets` is part of that one."""
    for start, end in reversed(_outermost(text, brackets)):
        try:
            yield text[start:end], read_value(text[start:end])
        except NoValue:
            continue


def _outermost(text: str, brackets: str) -> list[tuple[int, int]]:
    """Returns where the outermost balanced pairs of these brackets begin and end, from left to right.

    One pass. Quotes count within brackets alone and up to the end of their line, so that an
    apostrophe in a sentence hides little. A bracket that closes another kind ends all that is open.
    """
    pairs: list[tuple[int, int]] = []
    open_ones: list[int] = []
    position = 0
    while (sign := _SIGN.search(text, position)) is not None:
        position = sign.end()
        if len(sign[0]) > 1:
            continue
        if sign[0] in _STRING:
            string = _STRING[sign[0]].match(text, sign.start()) if open_ones else None
            if string is not None:
                position = string.end()
            elif open_ones:
                position = _end_of_line(text, position, sign[0])
        elif sign[0] not in _CLOSING:
            open_ones.append(sign.start())
        elif open_ones and text[open_ones[-1]] == _CLOSING[sign[0]]:
            start = open_ones.pop()
            if text[start] in brackets:
                while pairs and pairs[-1][0] > start:
                    pairs.pop()
                pairs.append((start, position))
        else:
            open_ones.clear()
    return pairs


def _end_of_line(text: str, position: int, quote: str) -> int:
    """Returns where to go on behind a quote that isn't closed on its line: behind it, with no other like
    it to come before the line ends. (Each of a line's quotes would else look for its end anew.)"""
    end = text.find("\n", position)
    end = len(text) if end < 0 else end
    return position if text.find(quote, position, end) < 0 else end


def _depth(text: str) -> int:
    """Returns how deep brackets stand in brackets outside of strings."""
    deepest = depth = 0
    for match in _NESTING.finditer(text):
        if sign := match["sign"]:
            if sign in _STRING:
                raise NoValue("a string that its line doesn't end")
            depth += 1 if sign in "[({" else -1
            deepest = max(deepest, depth)
    return deepest


def braces(text: str) -> dict[int, int]:
    r"""Returns the offset of the closing brace for each one that is closed. ``\{`` and ``\}`` are signs, not
    braces.

    One pass: looking for each brace's end anew would be quadratic in what a model wrote.
    """
    opened: list[int] = []
    pairs: dict[int, int] = {}
    for sign in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if sign[0] == "{":
            opened.append(sign.start())
        elif sign[0] == "}" and opened:
            pairs[opened.pop()] = sign.start()
    return pairs


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Returns (start, end, content) of each ``\boxed{…}`` that is closed, from left to right; of a box in a
    box the outer one. ``\boxed 5`` holds the number, letters or command that follow."""
    boxed: list[tuple[int, int, str]] = []
    pairs = braces(text)
    for box in _BOX.finditer(text):
        if boxed and box.start() < boxed[-1][1]:
            continue  # within the box before
        if box["bare"]:
            boxed.append((box.start(), box.end(), box["bare"]))
            continue
        end = pairs.get(box.end() - 1)
        if end is not None:
            boxed.append((box.start(), end + 1, text[box.end() : end]))
    return boxed
