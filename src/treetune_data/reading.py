"""Takes apart what a model answered, which may be anything."""

from __future__ import annotations

import json
import re
from typing import Any

from treetune_data.asking import Unreadable

Lines = tuple[int, int]
"""First and last line, counted from 1."""

_MARKUP = re.compile(r"</?parallel>|</?thread>|<none\s*/>", re.IGNORECASE)
_RANGE = re.compile(r"\s*(?:lines?\s+)?(\d{1,9})(?:\s*[-–]\s*(\d{1,9}))?\s*", re.IGNORECASE)


def ranges(text: str) -> list[list[Lines]]:
    """The groups of an answer, each with the lines of its threads as they stand there.

    Prose around the groups is passed over. Raises Unreadable for elements that aren't closed, are inside each
    other or hold anything else, and for an answer that names neither a group nor ``<none/>``.
    """
    groups: list[list[Lines]] = []
    opened: list[str] = []
    at, none = 0, False
    for match in _MARKUP.finditer(text):
        tag, between = match[0].lower(), text[at : match.start()]
        at = match.end()
        if tag.startswith("<none"):
            none = True
        elif tag.startswith("</"):
            if not opened or opened[-1] != tag[2:-1]:
                raise Unreadable(f"{tag} closes nothing")
            if opened.pop() == "thread":
                groups[-1].append(_lines(between))
            elif between.strip():
                raise Unreadable(f"a <parallel> holds {between.strip()[:60]!r} beside its threads")
        elif opened != ([] if tag == "<parallel>" else ["parallel"]):
            raise Unreadable(
                f"{tag} stands {'inside of <' + opened[-1] + '>' if opened else 'outside of <parallel>'}"
            )
        else:
            if opened and between.strip():
                raise Unreadable(f"a <parallel> holds {between.strip()[:60]!r} beside its threads")
            opened.append(tag[1:-1])
            if tag == "<parallel>":
                groups.append([])
    if opened:
        raise Unreadable(f"<{opened[-1]}> isn't closed")
    if not groups and not none:
        raise Unreadable("there is neither a <parallel> in it nor <none/>")
    return groups


def _lines(text: str) -> Lines:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise Unreadable(f"a <thread> holds {text[:60]!r} and not a first and last line such as 4-9")
    return int(match[1]), int(match[2] or match[1])


CONTROL = re.compile(r"[\x00-\x1f]")
"""What LaTeX with single backslashes becomes in JSON: ``\\frac`` a form feed, ``\\times`` a tab."""


def json_list(text: str) -> list[Any]:
    """The JSON list in an answer, which may stand between other words or in a code block.

    Raises Unreadable where there is none.
    """
    begin, end = text.find("["), text.rfind("]")
    if begin < 0 or end < begin:
        raise Unreadable("there is no JSON list in it")
    try:
        found = json.loads(text[begin : end + 1])
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"what stands between the first [ and the last ] is not JSON: {error}") from error
    assert isinstance(found, list)
    return found
