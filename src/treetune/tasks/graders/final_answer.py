"""The grader of tasks whose answer comes after a marker."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import MinLen
from typing_extensions import override

from treetune.tasks.graders.base import Grader, Isolation
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Problem

_INTEGER = re.compile(r"([+-]?)0*([0-9]+)")


@Grader.register("final_answer")
@dataclass(frozen=True, kw_only=True)
class FinalAnswer(Grader):
    """Gives the reward 1 if the text after the last `marker` is equal to the gold: by value if both are whole
    numbers, or else by their characters, without the white space around them.

    Without a marker, or without a text after it, the outcome is ``no_answer``.
    """

    votes_by_value: ClassVar[bool] = True

    marker: Annotated[str, MinLen(1)] = "#"
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is not part of an answer. The default also recognizes the tags of
    other models (`tasks.thoughts`). null: the whole response counts."""

    # The grader makes two searches and a comparison, in time linear in the answer. It can't hang, so it needs
    # no process.
    isolation: ClassVar[Isolation] = "inline"

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        _, marker, answer = response.rpartition(self.marker)
        if not marker:
            return None
        return answer.strip() or None

    @override
    def verdict(self, extracted: str, problem: Problem) -> float:
        return float(_canonical_number(extracted) == _canonical_number(problem.gold.strip()))


def _canonical_number(answer: str) -> str:
    """Returns a whole number without a plus sign, leading zeros and the sign of zero. Returns any other text
    unchanged.

    The result is a text and not an `int`, because `int` takes quadratic time, and reads ``1_0`` as ten.
    """
    match = _INTEGER.fullmatch(answer)
    if match is None:
        return answer
    sign, digits = match.groups()
    return f"-{digits}" if sign == "-" and digits != "0" else digits
