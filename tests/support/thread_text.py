"""The text of answers with threads, as tests read it."""

from __future__ import annotations

import re


def without_threads(text: str) -> str:
    """Returns the sequential text that is left without tags, outlines and thread headers: the text before a
    block, its threads' texts in their order, each on lines of its own, its conclusion, what follows.

    For any text; what isn't closed loses its tags alone.
    """
    for pattern, left in _REMOVED:
        text = pattern.sub(left, text)
    return text


_REMOVED = [
    (re.compile(r"<Outlines>(?:(?!<Outlines>)[\s\S])*?</Outlines>\s*"), ""),
    (re.compile(r"<Outline>(?:(?!<Outline>)[\s\S])*?</Outline>\s*"), ""),
    (re.compile(r"<Thread>\s*(?:[0-9]+(?:\.[0-9]+)*: ?)?"), ""),
    (re.compile(r"\n?</Thread>\s*"), "\n"),
    (re.compile(r"<(?:Parallel|Conclusion)>\s*"), ""),
    (re.compile(r"\n?</Conclusion>\s*"), "\n"),
    (re.compile(r"</Parallel>\n?|</?Outlines?>"), ""),
]
