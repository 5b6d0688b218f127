"""Puzzles whose answer is an order of names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.extraction import NoValue, read_value, values
from treetune.tasks.graders.tagged import Tagged, all_plain, of_parts, plain
from treetune.vocabulary import Grade, Problem

LONGEST = 5_000
"""Characters of an answer that are read: hundreds of names."""

_BETWEEN = re.compile(r"->|=>|[,;|\n→<>]")
_NUMBERED = re.compile(r"^(?:[0-9]{1,3}[.):]|[-*•])\s+")
_QUOTES = "\"'`*_.“”‘’"


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
        given = read_names(extracted, letters=all(len(name) == 1 for name in gold))
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


def read_names(text: str, *, letters: bool = False) -> list[str]:
    """The names in their order, for comparison (see `plain`). With `letters`, a text of one word is a name
    for each of its letters."""
    text = text.strip()[:LONGEST]
    listed = _list_in(text)
    if listed is not None:
        return all_plain(listed)
    text = text.strip("[](){}")
    if letters and text.isalnum():
        return [plain(letter) for letter in text]
    parts = (_NUMBERED.sub("", part.strip(), count=1).strip(_QUOTES) for part in _BETWEEN.split(text))
    return [plain(part) for part in parts if part]


def _list_in(text: str) -> Sequence[object] | None:
    try:
        value = read_value(text)
    except NoValue:
        value = next((value for _, value in values(text, "[")), None)
    if not isinstance(value, list | tuple) or any(isinstance(name, list | tuple | dict) for name in value):
        return None
    return value
