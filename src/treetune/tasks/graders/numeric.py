"""Graders of GSM8K: by value, and as published code compares."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import MinLen

from treetune.tasks.graders.base import Grader, Isolation
from treetune.tasks.graders.extraction import boxes
from treetune.tasks.graders.numbers import denied, read_number
from treetune.vocabulary import Grade, Problem

THINK_END = "</think>"

_ANY_NUMBER = re.compile(r"[-+]?(?:\d*\.\d+|\d+\.?)(?:[eE][-+]?\d+)?")
_SEPARATED = re.compile(r"-?[$€£]?\d[\d,]*(?:\.\d+)?%?")


@Grader.register("numeric")
@dataclass(frozen=True, kw_only=True)
class Numeric(Grader):
    """Reward 1 if the answer is the gold's number, however it is written: ``1,080``, ``$1080.00``,
    ``1080 eggs``, ``2160/2``. Where either is no number, they must be the same text.

    The answer is the first line with text after the last `marker`; the gold may have the marker
    (a worked solution) or not. What the number is not (``not 72``) is no answer. Without an answer in the
    response, the outcome is ``no_answer``, or with `without_marker` the answer is the response's last
    number (``last_number``) or what stands in its last ``\\boxed{…}`` (``boxed``).

    With `think_end` (``</think>``), a model thinks up to there and answers behind it: what it thought is
    no answer. Where a response doesn't have it, all of it counts, or with `require_think_end` none.
    """

    marker: Annotated[str, MinLen(1)] = "####"
    without_marker: Literal["no_answer", "last_number", "boxed"] = "no_answer"
    think_end: Annotated[str, MinLen(1)] | None = None
    require_think_end: bool = False

    def __post_init__(self) -> None:
        if self.require_think_end and self.think_end is None:
            raise ValueError("require_think_end needs think_end, the text that ends a thought: '</think>'")

    def grade(self, response: str, problem: Problem) -> Grade:
        if self._said_aloud(response) is None:
            return Grade(reward=0.0, outcome="no_answer", message=f"no {self.think_end} in it")
        return super().grade(response, problem)

    def extract(self, response: str, problem: Problem) -> str | None:
        said_aloud = self._said_aloud(response)
        if said_aloud is None:
            return None
        found = after_marker(said_aloud, self.marker) or self._without_marker(said_aloud)
        return None if found is None or denied(found) else found

    def verdict(self, extracted: str, problem: Problem) -> Grade:
        gold = after_marker(problem.gold, self.marker)
        gold = problem.gold.strip() if gold is None else gold
        given, meant = read_number(extracted), read_number(gold)
        if given is None or meant is None:
            same = " ".join(extracted.lower().split()) == " ".join(gold.lower().split())
            return Grade(reward=float(same), outcome="ok", extracted=extracted)
        return Grade(reward=float(given.equals(meant)), outcome="ok", extracted=str(given))

    def _said_aloud(self, response: str) -> str | None:
        if self.think_end is None:
            return response
        _, found, answer = response.rpartition(self.think_end)
        return answer if found or not self.require_think_end else None

    def _without_marker(self, answer: str) -> str | None:
        if self.without_marker == "last_number":
            numbers = _SEPARATED.findall(answer)
            return numbers[-1].rstrip(",") if numbers else None
        if self.without_marker == "boxed":
            found = boxes(answer)
            return found[-1][2].strip() or None if found else None
        return None


@Grader.register("gsm8k_exact")
@dataclass(frozen=True, kw_only=True)
class Gsm8kExact(Grader):
    """The verdicts of the VinePPO paper's code on GSM8K, for numbers that can be compared with its.

    The text after the last ``####``, without commas, must be the gold's, letter by letter. Commas
    of the gold stay, so that the 14 test problems with one cannot be solved; 18.0 is not 18. With
    `original_format` off, the answer is the response's last number.
    """

    original_format: bool = True

    def extract(self, response: str, problem: Problem) -> str | None:
        if self.original_format:
            _, marker, text = response.rpartition("####")
            return text.strip() if marker else None
        numbers = _ANY_NUMBER.findall(response.replace(",", ""))
        return numbers[-1] if numbers else None

    def verdict(self, extracted: str, problem: Problem) -> float:
        gold = problem.gold.rpartition("####")[2].strip().lower()
        return float(extracted.replace(",", "").lower() == gold)


@Grader.register("gsm8k_lenient_substring")
@dataclass(frozen=True, kw_only=True)
class Gsm8kLenientSubstring(Grader):
    """The verdicts of the Exploring Paths code on GSM8K, for numbers that can be compared with its.

    The answer is the rest of the line behind the first ``####``, looked for after the first ``</think>``
    where there is one, else in the whole response. Right is what holds the gold's text anywhere: for a
    gold of 18 also ``118``, ``$18`` or a list of many numbers; a gold of 1,800 isn't in ``1800``.
    """

    # Searches in linear time, and nothing read: no process is needed for it.
    isolation: ClassVar[Isolation] = "inline"

    def extract(self, response: str, problem: Problem) -> str | None:
        _, thought, behind = response.partition(THINK_END)
        _, marker, rest = (behind if thought else response).partition("####")
        return rest.partition("\n")[0].strip() if marker else None

    def verdict(self, extracted: str, problem: Problem) -> float:
        return float(problem.gold.rpartition("####")[2].strip() in extracted)


def after_marker(text: str, marker: str) -> str | None:
    """The first line with text after the last marker, stripped; None if there is none."""
    _, found, rest = text.rpartition(marker)
    if not found:
        return None
    return next((line for line in map(str.strip, rest.split("\n")) if line), None)
