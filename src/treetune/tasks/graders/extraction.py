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

from treetune.exceptions import UnreadableValue

# Graders of users find it here, beside the others.
from treetune.tasks.thoughts import after_thought as after_thought

ANSWER = "<answer>"
ANSWER_END = "</answer>"

LONGEST_VALUE = 100_000
"""Characters of a value that is read: the syntax tree of a longer one takes hundreds of megabytes."""

DEEPEST_VALUE = 50
"""Brackets within brackets of a value that is read; Python's own parsers give up at some hundreds."""

# Possessive repetitions, here and in strings: what doesn't end as it should is given up in one pass.
_FENCE = re.compile(
    r"(?P<before>[ \t]*+(?:(?:>|[-*+]|\d{1,9}[.)])[ \t]++)*+)(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<info>[^\n]*+)"
)
"""A line that opens or closes a block of code, with what indents or quotes it, or makes it part of a list."""
_CLOSING = {"]": "[", ")": "(", "}": "{"}
_STRING = {
    '"': re.compile(r'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"'),
    "'": re.compile(r"'[^'\\\n]*+(?:\\.[^'\\\n]*+)*+'"),
}
_SIGN = re.compile(r"""\\.|["'\[\](){}]""", re.DOTALL)  # LaTeX's \[ and \{ are no brackets
_NESTING = re.compile("|".join(one.pattern for one in _STRING.values()) + r"""|(?P<sign>[\[({\])}"'])""")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?:(?P<brace>\{)|(?P<bare>[-+]?\d+(?:\.\d+)?|\\?[A-Za-z]+))")
_BARE_FRACTION = re.compile(r"\s*\d\s*\d")


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


def fenced_blocks(text: str, *languages: str, unclosed: bool = False) -> list[str]:
    """Returns the contents of all closed blocks of code, from the first to the last; of those with one of
    these `languages` behind the fence alone, where any are named. With `unclosed` also what stands behind the
    last fence, where nothing closes it.

    Fences are lines of three or more backticks or tildes, closed by at least as many, as in Markdown. They
    may be indented, quoted, or part of a list; their content loses as much.
    """
    blocks: list[str] = []
    opening: re.Match[str] | None = None
    lines: list[str] = []

    def close(block_of: re.Match[str]) -> None:
        if not languages or _language(block_of) in languages:
            blocks.append("\n".join(_unindented(line, block_of["before"]) for line in lines))

    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.rstrip("\r"))
        if fence is not None and fence["fence"][0] == "`" and "`" in fence["info"]:
            fence = None  # code within a line
        if opening is None:
            opening, lines = fence, []
        elif fence is None or not fence["fence"].startswith(opening["fence"]):
            lines.append(line)
        elif fence["info"].strip():
            opening, lines = fence, []  # the block before was never closed
        else:
            close(opening)
            opening = None
    if unclosed and opening is not None:
        close(opening)
    return blocks


def _language(fence: re.Match[str]) -> str:
    """Returns a block's language: ``python`` for ``Python``, ``{.python}``, ``python title="x"``."""
    return re.split(r"[\s,:}]", fence["info"].strip().lstrip("{. "), maxsplit=1)[0].lower()


def _unindented(line: str, before: str) -> str:
    """Returns a line of a block without what stands before the block's fence: signs of a quotation, and at
    most so many spaces."""
    for _ in range(before.count(">")):
        line = re.sub(r"^[ \t]*> ?", "", line)
    width = len(before.rpartition(">")[2]) - (1 if ">" in before else 0)
    if before and line.startswith(before):
        return line[len(before) :]
    space = len(line) - len(line.lstrip(" \t"))
    return line[min(width, space) :]


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

    Raises UnreadableValue for any other text, for one over `LONGEST_VALUE`, for one nested deeper than
    `DEEPEST_VALUE`, and for strings over several lines, which JSON doesn't have.
    """
    text = text.strip()
    if len(text) > LONGEST_VALUE:
        raise UnreadableValue(f"{len(text)} characters, more than {LONGEST_VALUE}")
    if _depth(text) > DEEPEST_VALUE:
        raise UnreadableValue(f"more than {DEEPEST_VALUE} brackets deep")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings, which a model may write
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise UnreadableValue(f"no JSON and no literal: {error}") from None


def find_values(text: str, brackets: str = "[{") -> Iterator[tuple[str, Any]]:
    """Yields the text and value of everything in `brackets` (their opening signs) that is a whole value,
    from the last to the first. What stands within another pair of `brackets` is part of that one."""
    for start, end in reversed(_outermost(text, brackets)):
        try:
            yield text[start:end], read_value(text[start:end])
        except UnreadableValue:
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
                raise UnreadableValue("a string that its line doesn't end")
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
    box the outer one. ``\boxed 5`` holds the number, letters or command that follow, and a command's groups:
    ``\boxed\frac{1}{2}`` is meant as a half."""
    boxed: list[tuple[int, int, str]] = []
    pairs = braces(text)
    for box in _BOX.finditer(text):
        if boxed and box.start() < boxed[-1][1]:
            continue  # within the box before
        if box["bare"]:
            is_command = box["bare"].startswith("\\")
            bare_end = _end_of_arguments(text, box, pairs) if is_command else box.end()
            boxed.append((box.start(), bare_end, text[box.start("bare") : bare_end]))
            continue
        end = pairs.get(box.end() - 1)
        if end is not None:
            boxed.append((box.start(), end + 1, text[box.end() : end]))
    return boxed


def _end_of_arguments(text: str, box: re.Match[str], pairs: dict[int, int]) -> int:
    """Returns the offset behind the groups in braces that follow a box's bare command."""
    end = box.end()
    if "frac" in box["bare"] and (digits := _BARE_FRACTION.match(text, end)) is not None:
        return digits.end()
    while (closing := pairs.get(end)) is not None:
        end = closing + 1
    return end
