"""Countdown: reach the target from the given numbers with + − × ÷ and brackets, exactly."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Literal

from annotated_types import Ge, MinLen

from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.countdown_expression import MOST_DIGITS, NotAnExpression, read_expression
from treetune.vocabulary import Grade, Problem

LONGEST_SHOWN = 200
"""Characters of a malformed answer that are kept in its grade."""

_NUMBER = rf"[0-9]{{1,{MOST_DIGITS}}}"
_GOLD = re.compile(rf"(-?{_NUMBER}) from ({_NUMBER}(?: {_NUMBER})*)")


@dataclass(frozen=True, kw_only=True)
class CountdownScores:
    """What an answer earns. `correct` is at least 1 and the others are less: that is how everything
    else, pass@1 above all, tells correct from wrong.

    `no_answer`: there is none; `malformed`: it is no expression of the given numbers;
    `wrong`: it is one, of another value.
    """

    no_answer: float = 0.0
    malformed: float = 0.0
    wrong: float = 0.0
    correct: Annotated[float, Ge(1)] = 1.0

    def __post_init__(self) -> None:
        for name in ("no_answer", "malformed", "wrong"):
            if getattr(self, name) >= 1:
                raise ValueError(
                    f"scores.{name} is {getattr(self, name)}, and what earns 1 or more counts as correct: "
                    "choose less than 1"
                )


@Grader.register("countdown")
@dataclass(frozen=True, kw_only=True)
class CountdownGrader(Grader):
    r"""Right is an expression of the given numbers whose value, in exact rational arithmetic, is the
    target. The gold says both: ``39 from 12 34 7``.

    Numbers are compared as multisets: with `require_all` each given one is used exactly once, else
    at most once. What an expression may be is said in `countdown_expression`; nothing is evaluated.
    LaTeX is none beyond three signs, so that ``$62+70+71$`` and ``\frac{62}{70}+71`` are malformed, and
    so is a leading plus.

    The answer stands between the last `closing` and the last `opening` before it, across newlines;
    earlier answers don't count. With `unclosed` it is what follows the last `opening`, up to a
    `closing` if there is one: for answers that a stop string ends, which graders don't see.

    Of an answer with ``=``, what stands left of the first is the expression, and where `equation` is
    ``refused`` it is malformed. The right-hand side is not looked at.

    `scores` are what the four verdicts earn. The outcome is ``no_answer`` or ``ok``; the message says
    what was wrong with a malformed answer, and `extracted` is the answer.
    """

    opening: Annotated[str, MinLen(1)] = "<answer>"
    closing: Annotated[str, MinLen(1)] = "</answer>"
    unclosed: bool = False
    equation: Literal["left", "refused"] = "left"
    require_all: bool = True
    scores: CountdownScores = field(default_factory=CountdownScores)

    def extract(self, response: str, problem: Problem) -> str | None:
        read_gold(problem.gold)  # one that is none is told whatever the response says
        return self._answer(response) or None

    def without_answer(self, problem: Problem) -> Grade:
        return Grade(reward=self.scores.no_answer, outcome="no_answer")

    def verdict(self, extracted: str, problem: Problem) -> Grade:
        target, given = read_gold(problem.gold)
        expression, equals, _ = extracted.partition("=")
        try:
            if equals and self.equation == "refused":
                raise NotAnExpression("it is an equation")
            value = self._value(expression, given)
        except NotAnExpression as error:
            shown = extracted if len(extracted) <= LONGEST_SHOWN else extracted[:LONGEST_SHOWN] + "…"
            return Grade(reward=self.scores.malformed, outcome="ok", extracted=shown, message=str(error))
        reward = self.scores.correct if value == target else self.scores.wrong
        return Grade(reward=reward, outcome="ok", extracted=expression.strip())

    def _answer(self, response: str) -> str | None:
        if self.unclosed:
            _, opened, rest = response.rpartition(self.opening)
            return rest.partition(self.closing)[0].strip() if opened else None
        before, closed, _ = response.rpartition(self.closing)
        _, opened, answer = before.rpartition(self.opening)
        return answer.strip() if closed and opened else None

    def _value(self, text: str, given: Counter[int]) -> Fraction:
        expression = read_expression(text)
        used = Counter(expression.numbers)
        if too_many := used - given:
            raise NotAnExpression(f"{_listed(too_many)} not given, or used too often")
        if self.require_all and (left := given - used):
            raise NotAnExpression(f"{_listed(left)} not used")
        return expression.value


def gold_of(target: int, numbers: Sequence[int]) -> str:
    """The gold of a problem: all that the grader has to know, in the one text that it gets."""
    return f"{target} from {' '.join(map(str, numbers))}"


@lru_cache(maxsize=1024)
def read_gold(gold: str) -> tuple[int, Counter[int]]:
    """The target and the given numbers. Raises ValueError for another text."""
    found = _GOLD.fullmatch(gold.strip())
    if found is None:
        raise ValueError(f"the gold {gold[:100]!r} is none of Countdown, such as '39 from 12 34 7'")
    return int(found[1]), Counter(map(int, found[2].split()))


def _listed(numbers: Counter[int]) -> str:
    return ", ".join(map(str, sorted(numbers.elements())))
