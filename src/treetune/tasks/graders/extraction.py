r"""Finds the answer in a response, for graders.

The time of every function is linear in the text, because a model may write a million brackets. Nothing is
executed: values are read with `json` and `ast.literal_eval`.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from treetune.exceptions import UnreadableValue

# Users' graders import this function from here, too.
from treetune.tasks.thoughts import after_thought as after_thought

OPENING_TAG = "<answer>"
CLOSING_TAG = "</answer>"

LONGEST_VALUE = 100_000
"""The number of characters of the longest value that is read. The syntax tree of a longer value takes
hundreds of megabytes."""

DEEPEST_VALUE = 50
"""The largest depth of brackets in a value that is read. Python's own parsers fail at a depth of some
hundreds."""

# Repetitions in this pattern and in `_STRING_IN_QUOTES` are possessive (`*+`), so that the search takes
# linear time even in a text that doesn't match.
_FENCE = re.compile(
    r"(?P<before>[ \t]*+(?:(?:>|[-*+]|\d{1,9}[.)])[ \t]++)*+)(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<info>[^\n]*+)"
)
"""A line that opens or closes a block of code. Before the fence there may be signs of indentation, quotation
or lists."""
_OPENING_OF_CLOSING = {"]": "[", ")": "(", "}": "{"}
_STRING_IN_QUOTES = {
    '"': re.compile(r'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"'),
    "'": re.compile(r"'[^'\\\n]*+(?:\\.[^'\\\n]*+)*+'"),
}
# LaTeX's \[ and \{ don't count as brackets.
_BRACKET_OR_QUOTE = re.compile(r"""\\.|["'\[\](){}]""", re.DOTALL)
_NESTING = re.compile(
    "|".join(pattern.pattern for pattern in _STRING_IN_QUOTES.values()) + r"""|(?P<sign>[\[({\])}"'])"""
)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?:(?P<brace>\{)|(?P<bare>[-+]?\d+(?:\.\d+)?|\\?[A-Za-z]+))")
_BARE_FRACTION = re.compile(r"\s*\d\s*\d")


def last_between(
    text: str, opening: str = OPENING_TAG, closing: str = CLOSING_TAG, *, unclosed: bool = False
) -> str | None:
    """Returns the text between the last `closing` and the last `opening` before it, stripped.

    The text may have several lines. With `unclosed`, it begins after the last `opening`, and ends at the next
    `closing`, or at the end of the text if there is none. Returns None if there is no such text, or if it
    is empty.
    """
    if unclosed:
        _, opening_found, after_opening = text.rpartition(opening)
        answer, _, _ = after_opening.partition(closing)
        is_there = bool(opening_found)
    else:
        text_before, closing_found, _ = text.rpartition(closing)
        _, opening_found, answer = text_before.rpartition(opening)
        is_there = bool(opening_found and closing_found)
    if not is_there:
        return None
    return answer.strip() or None


def fenced_blocks(text: str, *languages: str, unclosed: bool = False) -> list[str]:
    """Returns the contents of all closed blocks of code, from the first to the last.

    Fences are lines of three or more backticks or tildes, and are closed by at least as many, as in Markdown.
    They may be indented, quoted, or part of a list. The same indentation and quotation is removed from the
    content.

    Args:
        text: The text.
        languages: If any are given, only blocks with one of these languages after the fence are returned.
        unclosed: Whether to include the text after the last fence if this fence isn't closed.
    """
    blocks: list[str] = []
    # The fence that has opened the present block, and the block's lines so far.
    opening: re.Match[str] | None = None
    lines: list[str] = []

    def add_block(opened_by: re.Match[str]) -> None:
        """Adds the lines of the block that the fence `opened_by` has opened, if its language is among
        `languages`."""
        if not languages or _language_of_block(opened_by) in languages:
            blocks.append("\n".join(_remove_indentation(line, opened_by["before"]) for line in lines))

    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.rstrip("\r"))
        if fence is not None and fence["fence"][0] == "`" and "`" in fence["info"]:
            fence = None  # not a fence, but code within a line
        if opening is None:  # the line is outside of blocks, unless it is a fence and opens one
            opening, lines = fence, []
        elif fence is None or not fence["fence"].startswith(opening["fence"]):
            lines.append(line)
        elif fence["info"].strip():
            # A closing fence has nothing after it. So this fence opens a block, and the previous block was
            # never closed.
            opening, lines = fence, []
        else:
            add_block(opening)
            opening = None
    if unclosed and opening is not None:
        add_block(opening)
    return blocks


def _language_of_block(fence: re.Match[str]) -> str:
    """Returns a block's language: ``python`` for ``Python``, ``{.python}``, ``python title="x"``."""
    return re.split(r"[\s,:}]", fence["info"].strip().lstrip("{. "), maxsplit=1)[0].lower()


def _remove_indentation(line: str, text_before_fence: str) -> str:
    """Returns a line of a block without the indentation and the signs of quotation before the block's fence.

    Example: of a fence with ``>   `` before it, the line ``>     x = 1`` becomes ``  x = 1``.

    Args:
        line: The line.
        text_before_fence: The text before the fence: spaces, ``>`` for each quotation, and signs of lists.
    """
    for _ in range(text_before_fence.count(">")):
        line = re.sub(r"^[ \t]*> ?", "", line)  # the space after > belongs to the sign
    # The line may repeat the whole text before the fence, such as the sign of a list.
    if text_before_fence and line.startswith(text_before_fence):
        return line[len(text_before_fence) :]
    if ">" in text_before_fence:
        _, _, after_quotation = text_before_fence.rpartition(">")
        indentation_of_fence = len(after_quotation) - len(" ")  # without the space that belongs to the sign
    else:
        indentation_of_fence = len(text_before_fence)
    indentation = len(line) - len(line.lstrip(" \t"))
    return line[min(indentation_of_fence, indentation) :]


def last_box(text: str) -> str | None:
    r"""Returns the content of the last ``\boxed{…}`` or ``\fbox{…}`` that is closed. Returns None if there is
    none, or if it is empty. If the box contains only another box, the content is that of the inner box."""
    all_boxes = find_boxes(text)
    if not all_boxes:
        return None
    content = all_boxes[-1].content.strip()
    inner_boxes = find_boxes(content)
    if len(inner_boxes) == 1:
        inner_box = inner_boxes[0]
        spans_content = inner_box.start == 0 and inner_box.end == len(content)
        if spans_content:
            content = inner_box.content.strip()
    return content or None


def read_value(text: str) -> Any:
    """Reads a text that is a JSON value or a Python literal.

    Raises UnreadableValue for any other text, for a text that is longer than `LONGEST_VALUE` or nested deeper
    than `DEEPEST_VALUE`, and for a string over several lines, which JSON doesn't allow.
    """
    text = text.strip()
    if len(text) > LONGEST_VALUE:
        raise UnreadableValue(f"{len(text)} characters, more than {LONGEST_VALUE}")
    if _depth_of_brackets(text) > DEEPEST_VALUE:
        raise UnreadableValue(f"more than {DEEPEST_VALUE} brackets deep")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of unknown escapes, which a model may write
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise UnreadableValue(f"neither JSON nor a Python literal: {error}") from None


def find_values(text: str, brackets: str = "[{") -> Iterator[tuple[str, Any]]:
    """Yields each value in brackets within a text, with its text, from the last to the first.

    `brackets` are the opening brackets to search for. A value within another value in such brackets isn't
    yielded by itself.
    """
    for start, end in reversed(_find_outermost_pairs(text, brackets)):
        try:
            yield text[start:end], read_value(text[start:end])
        except UnreadableValue:
            continue


def _find_outermost_pairs(text: str, brackets: str) -> list[tuple[int, int]]:
    """Returns the spans of the outermost balanced pairs of these opening brackets and their closing ones.

    The pairs are in the order of the text, and are found in one pass. Brackets within a string in quotes
    don't count. An apostrophe in a sentence should begin no long string. So a quote begins a string only
    within brackets, and the string ends in the same line. A closing bracket of the wrong kind discards all
    brackets that are open.
    """
    pairs: list[tuple[int, int]] = []
    open_brackets: list[int] = []
    position = 0
    while (sign := _BRACKET_OR_QUOTE.search(text, position)) is not None:
        position = sign.end()
        if len(sign[0]) > 1:
            continue  # a backslash and the character after it, such as LaTeX's \[
        if sign[0] in _STRING_IN_QUOTES:
            if not open_brackets:
                continue  # such a quote begins no string
            string = _STRING_IN_QUOTES[sign[0]].match(text, sign.start())
            if string is not None:
                position = string.end()
            # A quote that no second one closes in its line is read like any other character. The search fails
            # at most twice in each line, once for " and once for ', since any later " would close the first.
        elif sign[0] not in _OPENING_OF_CLOSING:
            open_brackets.append(sign.start())
        elif open_brackets and text[open_brackets[-1]] == _OPENING_OF_CLOSING[sign[0]]:
            start = open_brackets.pop()
            if text[start] in brackets:
                while pairs and pairs[-1][0] > start:  # a pair within this one isn't outermost
                    pairs.pop()
                pairs.append((start, position))
        else:
            open_brackets.clear()
    return pairs


def _depth_of_brackets(text: str) -> int:
    """Returns the largest number of brackets within each other, outside of strings."""
    deepest = depth = 0
    for match in _NESTING.finditer(text):
        sign = match["sign"]
        if sign is None:
            continue  # a whole string in quotes
        if sign in _STRING_IN_QUOTES:  # a quote by itself: no second one closes it
            raise UnreadableValue("a string that isn't closed in its line")
        depth += 1 if sign in "[({" else -1
        deepest = max(deepest, depth)
    return deepest


def find_braces(text: str) -> dict[int, int]:
    r"""Returns the offset of the closing brace for each opening brace that is closed: ``{0: 2}`` for ``{a}``.

    ``\{`` and ``\}`` don't count as braces. All pairs are found in one pass, because a separate search for
    the end of each brace would take quadratic time.
    """
    open_braces: list[int] = []
    pairs: dict[int, int] = {}
    for sign in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if sign[0] == "{":
            open_braces.append(sign.start())
        elif sign[0] == "}" and open_braces:
            pairs[open_braces.pop()] = sign.start()
    return pairs


class Box(NamedTuple):
    r"""A ``\boxed{…}`` in a text."""

    start: int
    end: int
    content: str


def find_boxes(text: str) -> list[Box]:
    r"""Returns each ``\boxed{…}`` that is closed, from left to right. A box within another one isn't
    returned.

    A box may also have no braces, as in ``\boxed 5``. Its content is then the number, the letters or the
    command that follow. A command includes its arguments: the content of ``\boxed\frac{1}{2}`` is
    ``\frac{1}{2}``.
    """
    boxes: list[Box] = []
    pairs = find_braces(text)
    for match in _BOX.finditer(text):
        if boxes and match.start() < boxes[-1].end:
            continue  # within the previous box
        if match["bare"]:  # a box without braces
            is_command = match["bare"].startswith("\\")
            bare_end = _end_of_arguments(text, match, pairs) if is_command else match.end()
            boxes.append(Box(match.start(), bare_end, text[match.start("bare") : bare_end]))
            continue
        closing_brace = pairs.get(match.end() - 1)  # the match ends with the opening brace
        if closing_brace is not None:
            boxes.append(Box(match.start(), closing_brace + 1, text[match.end() : closing_brace]))
    return boxes


def _end_of_arguments(text: str, box: re.Match[str], pairs: dict[int, int]) -> int:
    """Returns the offset after the arguments of a command, such as ``\\frac{1}{2}``, in a box without braces.

    `pairs` has the offset of the closing brace for each opening brace, as `find_braces` returns it.
    """
    end = box.end()
    if "frac" in box["bare"] and (digits := _BARE_FRACTION.match(text, end)) is not None:
        return digits.end()  # \boxed\frac12
    while (closing := pairs.get(end)) is not None:
        end = closing + 1
    return end
