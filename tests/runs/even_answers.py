"""Graders to whom many random answers are right, importable by worker processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from treetune.exceptions import Unavailable
from treetune.tasks.graders.base import Grader
from treetune.vocabulary import Grade, Problem


@dataclass(frozen=True)
class EvenAnswers(Grader):
    """Right is what has an even number of characters."""

    def grade(self, response: str, problem: Problem) -> Grade:
        return Grade(float(len(response) % 2 == 0), "ok", response)


@dataclass(frozen=True)
class OutOfOrder(Grader):
    """As `EvenAnswers`, and isn't there for every third answer, or for all while a file is there."""

    switch: str = ""

    def grade(self, response: str, problem: Problem) -> Grade:
        if len(response) % 3 == 0 or (self.switch and Path(self.switch).exists()):
            raise Unavailable("the judge is down")
        return Grade(float(len(response) % 2 == 0), "ok", response)
