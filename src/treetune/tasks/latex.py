r"""Finding the braces and boxes of LaTeX."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?:(?P<brace>\{)|(?P<bare>\d+(?:\.\d+)?|\\?[A-Za-z]+))")


def braces(text: str) -> dict[int, int]:
    r"""Returns the offset of the closing brace for each one that is closed. ``\{`` and ``\}`` are signs, not
    braces.

    One pass: looking for each brace's end anew would be quadratic in what a model wrote.
    """
    open_ones: list[int] = []
    pairs: dict[int, int] = {}
    for found in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if found[0] == "{":
            open_ones.append(found.start())
        elif found[0] == "}" and open_ones:
            pairs[open_ones.pop()] = found.start()
    return pairs


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Returns (start, end, content) of each ``\boxed{…}`` that is closed, from left to right; of a box in a
    box the outer one. ``\boxed 5`` holds the number, letters or command that follow."""
    found: list[tuple[int, int, str]] = []
    pairs = braces(text)
    for box in _BOX.finditer(text):
        if found and box.start() < found[-1][1]:
            continue  # within the box before
        if box["bare"]:
            found.append((box.start(), box.end(), box["bare"]))
            continue
        end = pairs.get(box.end() - 1)
        if end is not None:
            found.append((box.start(), end + 1, text[box.end() : end]))
    return found
