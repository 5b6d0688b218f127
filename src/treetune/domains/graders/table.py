"""Questions on tables, whose answer is a number with its unit, a name, or several of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Lt, MinLen
from typing_extensions import override

from treetune.tasks.graders.base import Grader, Isolation
from treetune.tasks.graders.extraction import last_box
from treetune.tasks.graders.numeric import LONGEST, WrittenNumber, read_number
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem

MOST_ANSWERS = 50

_PERCENT = re.compile(r"%|\bper ?cent|\bpercent", re.IGNORECASE)
_COMMAS = re.compile(r",(?!\d{3}(?!\d))|;|\band\b")
_DRESS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textit)\s?(?=\{)|[{}$*`\"“”]|\\(?=[%$&#_])")


@Grader.register("table")
@dataclass(frozen=True, kw_only=True)
class TableGrader(Grader):
    r"""Right is the gold's answer in the last ``\boxed{…}`` after the last `think_end`; several answers stand
    between ``|``, in any order. The gold is written in the same way, or is a JSON list.

    Numbers are compared by value, whatever separators, currencies and units are written with them (see
    `numeric`): whole ones exactly, others to within `tolerance` of the gold. ``12 %`` is 0.12. Ratios such as
    ``3:2`` are fractions.

    Other answers are compared as texts, in any case. Nothing is evaluated.
    """

    votes_by_value: ClassVar[bool] = True

    tolerance: Annotated[float, Ge(0), Lt(0.1)] = 1e-3
    """Relative, of numbers that are not whole."""
    percent: Literal["written", "asked"] = "written"
    """A hundred times the gold, or a hundredth, is wrong; with ``asked``, where the question speaks of
    percent and one of the two has no sign, it is right: a table often leaves it out."""
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is no part of an answer; the default knows other models' tags, too
    (`tasks.thoughts`). null: all of a response counts."""

    isolation: ClassVar[Isolation] = "inline"

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        return last_box(response)

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade:
        golds = list(gold_answers(problem.gold))
        given = split_answers(extracted[: LONGEST * 10], len(golds))
        if len(given) != len(golds):
            return Grade(reward=0.0, outcome="ok", message=f"{len(given)} answers, of {len(golds)}")
        right = self._matches(given, golds, problem)
        return Grade(reward=float(right == len(golds)), outcome="ok", numbers={"answers": right / len(golds)})

    @override
    def same_answer(self, answer: str, other: str, problem: Problem) -> bool:
        # Both are read as answers: a gold may be JSON.
        count = len(gold_answers(problem.gold))
        parts, other_parts = (split_answers(text[: LONGEST * 10], count) for text in (answer, other))
        if len(parts) != len(other_parts) or not 0 < len(parts) <= MOST_ANSWERS:
            return False
        return self._matches(parts, other_parts, problem) == len(parts)

    def _matches(self, given: Sequence[str], golds: Sequence[str], problem: Problem) -> int:
        """Counts the answers that have a gold of their own."""
        hundredths = self.percent == "asked" and _PERCENT.search(problem.prompt) is not None
        # Which answer is which gold: few enough for a simple matching along alternating paths.
        taken: dict[int, int] = {}
        alike = [
            [index for index, gold in enumerate(golds) if self._same(answer, gold, hundredths)]
            for answer in given
        ]
        return sum(_matched(number, alike, taken, set()) for number in range(len(given)))

    def _same(self, given: str, gold: str, hundredths: bool) -> bool:
        if given == gold:
            return True
        one, other = read_answer(given), read_answer(gold)
        if one is None or other is None:
            return False
        if self._near(_value(one), _value(other)):
            return True
        if not hundredths or (one.percent and other.percent):
            return False
        return any(self._near(_value(one) * factor, _value(other)) for factor in (100, Fraction(1, 100)))

    def _near(self, given: Fraction, gold: Fraction) -> bool:
        if given == gold or gold.denominator == 1:
            return given == gold
        return abs(given - gold) <= abs(gold) * Fraction(self.tolerance)


def _matched(number: int, alike: Sequence[Sequence[int]], taken: dict[int, int], seen: set[int]) -> bool:
    """Returns whether this answer gets a gold of its own, others moving to another gold where they can."""
    for gold in alike[number]:
        if gold not in seen:
            seen.add(gold)
            if gold not in taken or _matched(taken[gold], alike, taken, seen):
                taken[gold] = number
                return True
    return False


def _value(number: WrittenNumber) -> Fraction:
    return number.value / 100 if number.percent else number.value


@lru_cache(maxsize=1024)
def gold_answers(gold: str) -> Sequence[str]:
    """Raises ValueError for a gold without an answer."""
    if gold.lstrip().startswith("["):
        answers = [_plain(one if isinstance(one, str) else json.dumps(one)) for one in json.loads(gold)]
    else:
        answers = split_answers(gold, None)
    if not any(answers) or len(answers) > MOST_ANSWERS:
        raise ValueError(f"the gold {gold[:100]!r} holds no answer, or more than {MOST_ANSWERS}")
    return tuple(answers)


def split_answers(text: str, expected: int | None) -> list[str]:
    """Splits the answers in a box. Where several are expected and there is no ``|``, commas and "and" part
    them, if that gives as many as expected."""
    parts = [one for part in re.split(r"\||\\mid\b|\\vert\b", text) if (one := _plain(part))]
    if expected is not None and expected > 1 and len(parts) == 1:
        by_commas = [one for part in _COMMAS.split(text) if (one := _plain(part))]
        if len(by_commas) == expected:
            return by_commas
    return parts


def _plain(text: str) -> str:
    text = text.replace("{,}", ",").replace("\\!", "")
    return " ".join(_DRESS.sub(" ", text).casefold().split()).lstrip(" ,;:").rstrip(" .,;:")


@lru_cache(maxsize=4096)
def read_answer(text: str) -> WrittenNumber | None:
    """Reads the number of an answer; a ratio is a fraction."""
    if re.fullmatch(r"\s*\d{1,15}(?:\.\d{1,15})?\s*:\s*\d{1,15}(?:\.\d{1,15})?\s*", text):
        one, other = (Fraction(part.strip()) for part in text.split(":"))
        return WrittenNumber(one / other) if other else None
    return read_number(text)
