"""Graders of GSM8K: by value, and as the VinePPO paper's code compares."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import MinLen

from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.numbers import read_number
from treetune.vocabulary import Grade, Problem

_ANY_NUMBER = re.compile(r"[-+]?(?:\d*\.\d+|\d+\.?)(?:[eE][-+]?\d+)?")
_SEPARATED = re.compile(r"-?[$€£]?\d[\d,]*(?:\.\d+)?%?")


@Grader.register("numeric")
@dataclass(frozen=True, kw_only=True)
class Numeric(Grader):
    """Reward 1 if the answer is the gold's number, however it is written: ``1,080``, ``$1080.00``,
    ``1080 eggs``, ``2160/2``. Where either is no number, they must be the same text.

    The answer is the first line with text after the last `marker`; the gold may have the marker
    (a worked solution) or not. Without one in the response, the outcome is ``no_answer``, or with
    `without_marker` ``last_number`` the last number of the response is the answer.
    """

    marker: Annotated[str, MinLen(1)] = "####"
    without_marker: Literal["no_answer", "last_number"] = "no_answer"

    def grade(self, response: str, problem: Problem) -> Grade:
        answer = after_marker(response, self.marker)
        if answer is None and self.without_marker == "last_number":
            numbers = _SEPARATED.findall(response)
            answer = numbers[-1].rstrip(",") if numbers else None
        if answer is None:
            return Grade(reward=0.0, outcome="no_answer")
        gold = after_marker(problem.gold, self.marker)
        gold = problem.gold.strip() if gold is None else gold
        said, meant = read_number(answer), read_number(gold)
        if said is None or meant is None:
            same = " ".join(answer.lower().split()) == " ".join(gold.lower().split())
            return Grade(reward=float(same), outcome="ok", extracted=answer)
        return Grade(reward=float(said.equals(meant)), outcome="ok", extracted=str(said))


@Grader.register("gsm8k_exact")
@dataclass(frozen=True, kw_only=True)
class Gsm8kExact(Grader):
    """The verdicts of the VinePPO paper's code on GSM8K, for numbers that can be compared with its.

    The text after the last ``####``, without commas, must be the gold's, letter by letter. Commas
    of the gold stay, so that the 14 test problems with one cannot be solved; 18.0 is not 18. With
    `original_format` off, the answer is the response's last number.
    """

    original_format: bool = True

    def grade(self, response: str, problem: Problem) -> Grade:
        answer: str | None
        if self.original_format:
            _, marker, text = response.rpartition("####")
            answer = text.strip() if marker else None
        else:
            numbers = _ANY_NUMBER.findall(response.replace(",", ""))
            answer = numbers[-1] if numbers else None
        if answer is None:
            return Grade(reward=0.0, outcome="no_answer")
        gold = problem.gold.rpartition("####")[2].strip().lower()
        right = answer.replace(",", "").lower() == gold
        return Grade(reward=float(right), outcome="ok", extracted=answer)


def after_marker(text: str, marker: str) -> str | None:
    """The first line with text after the last marker, stripped; None if there is none."""
    _, found, rest = text.rpartition(marker)
    if not found:
        return None
    return next((line for line in map(str.strip, rest.split("\n")) if line), None)
