"""The grader of questions about tables, whose answer is a number with its unit, a name, or several of
them."""

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
from treetune.tasks.graders.numeric import MOST_CHARACTERS_OF_NUMBER, WrittenNumber, read_number
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem

MOST_GOLD_ANSWERS = 50
"""The most answers of a gold."""
LONGEST_BOX = 10 * MOST_CHARACTERS_OF_NUMBER
"""The most characters of a box that are read. A longer box holds no answer to such a question, and to split
it takes long."""

_WORD_FOR_PERCENT = re.compile(r"%|\bper ?cent|\bpercent", re.IGNORECASE)
_BAR = re.compile(r"\||\\mid\b|\\vert\b")
_COMMA_OR_AND = re.compile(r",(?!\d{3}(?!\d))|;|\band\b")
_MARKUP_AND_QUOTES = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textit)\s?(?=\{)|[{}$*`\"“”]|\\(?=[%$&#_])")


@Grader.register("table")
@dataclass(frozen=True, kw_only=True)
class TableGrader(Grader):
    r"""Gives the reward 1 for the gold's answer in the last ``\boxed{…}`` after the last `think_end`. Several
    answers are separated by ``|``, in any order. The gold is written in the same way, or is a JSON list.

    Numbers are compared by value, without separators, currencies and units (see `numeric`). Integers have to
    be equal, and other numbers may differ from the gold by `tolerance`. ``12 %`` is 0.12. Ratios such as
    ``3:2`` are fractions.

    Other answers are compared as texts, without case. Expressions aren't evaluated.
    """

    votes_by_value: ClassVar[bool] = True

    tolerance: Annotated[float, Ge(0), Lt(0.1)] = 1e-3
    """The relative tolerance of numbers that aren't integers."""
    percent: Literal["written", "asked"] = "written"
    """With ``written``, a hundred times the gold, or a hundredth of it, is wrong. With ``asked`` such an
    answer is right if the question mentions percent and the answer or the gold has no percent sign, since
    tables often leave the sign out."""
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is not part of an answer. The default also recognizes the tags of
    other models (`tasks.thoughts`). null: the whole response counts."""

    isolation: ClassVar[Isolation] = "inline"

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        return last_box(response)

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade:
        golds = list(gold_answers(problem.gold))
        answers = _split_box(extracted, len(golds))
        if len(answers) != len(golds):
            return Grade(reward=0.0, outcome="ok", message=f"{len(answers)} answers, of {len(golds)}")
        right = self._count_matches(answers, golds, problem)
        return Grade(reward=float(right == len(golds)), outcome="ok", numbers={"answers": right / len(golds)})

    @override
    def same_answer(self, answer: str, other: str, problem: Problem) -> bool:
        # Both texts are split like answers, and not like golds: only a gold may be a JSON list.
        count = len(gold_answers(problem.gold))
        parts, other_parts = _split_box(answer, count), _split_box(other, count)
        if len(parts) != len(other_parts):
            return False
        if not 0 < len(parts) <= MOST_GOLD_ANSWERS:
            return False  # no such text can be right, and to compare very many parts takes long
        return self._count_matches(parts, other_parts, problem) == len(parts)

    def _count_matches(self, answers: Sequence[str], golds: Sequence[str], problem: Problem) -> int:
        """Returns the greatest number of answers that can be paired with equal golds, each gold once."""
        may_lack_percent = self.percent == "asked" and _WORD_FOR_PERCENT.search(problem.prompt) is not None
        # The golds that each answer equals: [[0, 1], [0]] if the first answer equals both.
        equal_golds: list[list[int]] = []
        for answer in answers:
            equal_golds.append(
                [index for index, gold in enumerate(golds) if self._is_same(answer, gold, may_lack_percent)]
            )
        # Pairs each answer with a gold, and pairs earlier answers anew where this is needed. This is quick
        # enough, since there are few answers.
        answer_of_gold: dict[int, int] = {}
        return sum(_match_answer(index, equal_golds, answer_of_gold, set()) for index in range(len(answers)))

    def _is_same(self, answer: str, gold: str, may_lack_percent: bool) -> bool:
        """Compares two answers as texts, then as numbers, then as percentages without their sign."""
        if answer == gold:
            return True
        number, gold_number = read_number_or_ratio(answer), read_number_or_ratio(gold)
        if number is None or gold_number is None:
            return False
        value, gold_value = _value_of_number(number), _value_of_number(gold_number)
        if self._is_near(value, gold_value):
            return True
        if not may_lack_percent or (number.percent and gold_number.percent):
            return False
        # 50 may mean 50 %, in the answer or in the gold.
        return self._is_near(value * 100, gold_value) or self._is_near(value / 100, gold_value)

    def _is_near(self, value: Fraction, gold: Fraction) -> bool:
        if value == gold or gold.denominator == 1:  # an integer has to be equal
            return value == gold
        return abs(value - gold) <= abs(gold) * Fraction(self.tolerance)


def _match_answer(
    answer: int, equal_golds: Sequence[Sequence[int]], answer_of_gold: dict[int, int], tried_golds: set[int]
) -> bool:
    """Pairs an answer with an equal gold, and returns whether this was possible.

    If another answer has this gold already, that answer is paired anew, with another of its equal golds.

    Args:
        answer: The number of the answer.
        equal_golds: The numbers of the golds that each answer equals.
        answer_of_gold: The answer of each paired gold. A new pair is added here.
        tried_golds: The golds that were tried so far. They are not tried again.
    """
    for gold in equal_golds[answer]:
        if gold not in tried_golds:
            tried_golds.add(gold)
            is_free = gold not in answer_of_gold
            if is_free or _match_answer(answer_of_gold[gold], equal_golds, answer_of_gold, tried_golds):
                answer_of_gold[gold] = answer
                return True
    return False


def _value_of_number(number: WrittenNumber) -> Fraction:
    """Returns a number's value: 0.12 for ``12 %``."""
    return number.value / 100 if number.percent else number.value


@lru_cache(maxsize=1024)
def gold_answers(gold: str) -> Sequence[str]:
    """Returns the answers of a gold: two for ``12 % | Rome`` and for the JSON list ``["12 %", "Rome"]``.

    Raises ValueError for a gold without an answer, or with more than `MOST_GOLD_ANSWERS`.
    """
    if gold.lstrip().startswith("["):
        answers = []
        for item in json.loads(gold):
            text = item if isinstance(item, str) else json.dumps(item)
            answers.append(_comparable_answer(text))
    else:
        # Without a number of expected answers, the gold is split at "|", and not at commas or "and".
        answers = split_answers(gold, expected=None)
    if not any(answers) or len(answers) > MOST_GOLD_ANSWERS:
        raise ValueError(f"the gold {gold[:100]!r} contains no answer, or more than {MOST_GOLD_ANSWERS}")
    return tuple(answers)


def _split_box(content: str, expected: int) -> list[str]:
    """Splits the answers in a box; see `split_answers`. What exceeds `LONGEST_BOX` isn't read."""
    return split_answers(content[:LONGEST_BOX], expected)


def split_answers(text: str, expected: int | None) -> list[str]:
    """Splits the answers in a box: ``12 | Rome``.

    If several are `expected` and there is no ``|``, the text is split at commas and "and", provided that this
    gives as many as expected: ``12 and Rome``.
    """
    answers = _comparable_answers(_BAR.split(text))
    if expected is not None and expected > 1 and len(answers) == 1:
        answers_between_commas = _comparable_answers(_COMMA_OR_AND.split(text))
        if len(answers_between_commas) == expected:
            return answers_between_commas
    return answers


def _comparable_answers(texts: Sequence[str]) -> list[str]:
    """Returns the texts as answers for comparison, without those that are empty."""
    plain_texts = [_comparable_answer(text) for text in texts]
    return [text for text in plain_texts if text]


def _comparable_answer(text: str) -> str:
    r"""Returns an answer for comparison: ``new york`` for ``\text{New York}.``, ``1,200`` for ``1{,}200``."""
    text = text.replace("{,}", ",").replace("\\!", "")
    return " ".join(_MARKUP_AND_QUOTES.sub(" ", text).casefold().split()).lstrip(" ,;:").rstrip(" .,;:")


@lru_cache(maxsize=4096)
def read_number_or_ratio(text: str) -> WrittenNumber | None:
    """Reads the number of an answer. A ratio is read as a fraction."""
    if re.fullmatch(r"\s*\d{1,15}(?:\.\d{1,15})?\s*:\s*\d{1,15}(?:\.\d{1,15})?\s*", text):
        numerator, denominator = (Fraction(part.strip()) for part in text.split(":"))
        return WrittenNumber(numerator / denominator) if denominator else None
    return read_number(text)
