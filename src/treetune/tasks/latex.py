r"""Finding the braces and boxes of LaTeX."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?:(?P<brace>\{)|(?P<bare>\d+(?:\.\d+)?|\\?[A-Za-z]+))")


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
