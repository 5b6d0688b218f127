r"""Where the formulas, figures and listings of a text are: a full stop in them ends no sentence."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OPENING = re.compile(
    r"\\begin\{(?P<environment>[A-Za-z]{1,24}\*?)\}|(?P<asy>\[asy\])|(?P<listing>```)|(?P<dollars>\$\$?)"
    r"|\\(?P<bracket>[\[(])|\\.",
    re.DOTALL,
)
_END_OF_INLINE = re.compile(r"\\.|(?P<end>\$)|(?P<gap>\n[ \t]*\n)", re.DOTALL)
_PROSE = re.compile(r"[.!?]\s+[A-Z][a-z]+\s")


@dataclass(frozen=True)
class Span:
    """``text[start:end]`` belongs together. `display`: it stands on lines of its own, so that its
    rows may be steps."""

    start: int
    end: int
    display: bool


def formulas(text: str) -> list[Span]:
    r"""Outermost spans from left to right: ``$…$``, ``\(…\)``, ``$$…$$``, ``\[…\]``, environments,
    ``[asy]`` figures, listings. Linear in the text.

    What is not closed is no span: an unpaired dollar, or one that pairs only across a blank line or
    a sentence ("costs $5. She pays $6"), is text like any other.
    """
    spans: list[Span] = []
    never_closed: set[str] = set()
    position = 0
    while (found := _OPENING.search(text, position)) is not None:
        position = found.end()
        if found[0] == "$":
            end = _inline_end(text, found.end())
            if end is not None:
                spans.append(Span(found.start(), end, display=False))
                position = end
            continue
        closing = _closing(found)
        if closing is None or closing in never_closed:
            continue
        at = text.find(closing, found.end())
        if at < 0:
            never_closed.add(closing)
            continue
        position = at + len(closing)
        spans.append(Span(found.start(), position, display=found["bracket"] != "("))
    return spans


def _closing(found: re.Match[str]) -> str | None:
    if found["environment"]:
        return f"\\end{{{found['environment']}}}"
    if found["bracket"]:
        return {"[": "\\]", "(": "\\)"}[found["bracket"]]
    return {"[asy]": "[/asy]", "```": "```", "$$": "$$"}.get(found[0])


def _inline_end(text: str, start: int) -> int | None:
    """Behind the dollar that closes the one before `start`."""
    position = start
    while (found := _END_OF_INLINE.search(text, position)) is not None:
        if found["gap"]:
            return None
        if found["end"]:
            inside = text[start : found.start()]
            return found.end() if inside and not _PROSE.search(inside) else None
        position = found.end()
    return None
