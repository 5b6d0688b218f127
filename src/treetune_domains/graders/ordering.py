"""Puzzles whose answer is an order of names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.extraction import NoValue, last_box, read_value, values
from treetune.vocabulary import Grade, Problem
from treetune_domains.graders.tagged import Tagged, of_parts, plain

LONGEST = 5_000
"""Characters of an answer that are read: hundreds of names."""

_BETWEEN = re.compile(r"->|=>|[,;|\n<>←-⇿➔-➾]")
_BETWEEN_OR_AND = re.compile(_BETWEEN.pattern + r"|\band\b")
_SPACE = re.compile(r"\s+")
_BEFORE = re.compile(r"^(?:[0-9]{1,3}[.):]|[-*•]|and)\s+")
_QUOTES = " \"'`*_.“”‘’"


@Grader.register("ordering")
@dataclass(frozen=True, kw_only=True)
class OrderingGrader(Tagged):
    """Right is the gold's order of names, in any case, with any spaces.

    The answer is a list, JSON or Python, or names with commas, semicolons, arrows or newlines between them,
    numbered or not; where all names of the gold are single letters or digits, also without anything:
    ``cab``. The gold is written in the same ways.

    `score` says what another order earns: nothing (``exact``), or the share of places that hold the right
    name (``places``). That share is among the grade's numbers as ``cells``. An answer that isn't made of
    the gold's names, each once, earns nothing.
    """

    score: Literal["exact", "places"] = "exact"

    def verdict(self, extracted: str, problem: Problem) -> Grade:
        gold = gold_names(problem.gold)
        given = read_names(extracted, gold)
        if sorted(given) != sorted(gold):
            return Grade(
                reward=0.0, outcome="ok", message="other names than the gold's", numbers={"cells": 0.0}
            )
        right = sum(one == other for one, other in zip(gold, given, strict=True))
        return of_parts(right, len(gold), pays=self.score == "places")


@lru_cache(maxsize=1024)
def gold_names(gold: str) -> Sequence[str]:
    """Raises ValueError for a gold without a name."""
    names = read_names(gold)
    if not names:
        raise ValueError(f"the gold {gold[:100]!r} holds no names")
    return names


def read_names(text: str, gold: Sequence[str] = ()) -> list[str]:
    """The names in their order, for comparison (see `plain`). What stands between them may depend on the
    gold: letters need nothing, and "and" or a space is looked for where there would be too few names."""
    text = text.strip()[:LONGEST]
    listed = _list_in(text)
    if listed is not None:
        return [_name(str(name)) for name in listed]
    text = (last_box(text) or text).strip("[](){}")
    if text.isalnum() and gold and all(len(name) == 1 for name in gold):
        return [plain(letter) for letter in text]
    parts = _parts(_BETWEEN, text)
    if len(parts) < len(gold):
        parts = _parts(_SPACE if len(parts) == 1 else _BETWEEN_OR_AND, text)
    return parts


def _parts(between: re.Pattern[str], text: str) -> list[str]:
    parts = [_BEFORE.sub("", part.strip(), count=1) for part in between.split(text)]
    parts[0] = parts[0].rpartition(":")[2]  # "from left to right: …"
    return [_name(part.strip(_QUOTES)) for part in parts if part.strip(_QUOTES)]


def _name(text: str) -> str:
    """Without an article, and with one kind of apostrophe."""
    return plain(text).replace("’", "'").removeprefix("the ")


def _list_in(text: str) -> Sequence[object] | None:
    try:
        value = read_value(text)
    except NoValue:
        value = next((value for _, value in values(text, "[")), None)
    if isinstance(value, dict) and len(value) == 1:
        (value,) = value.values()
    if not isinstance(value, list | tuple) or any(isinstance(name, list | tuple | dict) for name in value):
        return None
    return value
