"""What a grader is: a pure function from an answer and the gold to a grade."""

from __future__ import annotations

from treetune.config.registrable import Registrable
from treetune.vocabulary import Grade, Problem


class Grader(Registrable):
    """Grades one answer. Instances are picklable and run in worker processes (`GraderPool`)."""

    def grade(self, response: str, problem: Problem) -> Grade:
        raise NotImplementedError
