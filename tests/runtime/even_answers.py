"""A grader to whom many random answers are right, importable by worker processes."""

from __future__ import annotations

from dataclasses import dataclass

from treetune.tasks.graders.base import Grader
from treetune.vocabulary import Grade, Problem


@dataclass(frozen=True)
class EvenAnswers(Grader):
    """Right is what has an even number of characters."""

    def grade(self, response: str, problem: Problem) -> Grade:
        return Grade(float(len(response) % 2 == 0), "ok", response)
