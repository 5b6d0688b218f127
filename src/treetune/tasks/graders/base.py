"""What a grader is: a pure function from an answer and the gold to a grade."""

from __future__ import annotations

from typing import ClassVar

from treetune.config.registrable import Registrable
from treetune.vocabulary import Grade, Problem


class Grader(Registrable):
    """Grades one answer. Instances are picklable and run in worker processes (`GraderPool`).

    A grader may set `isolated` to False, and is then called in the run's own process, only if it
    cannot hang, crash or allocate without bound whatever the answer says: comparisons of strings
    in linear time. Anything that parses, evaluates or runs what a model wrote stays isolated.
    """

    isolated: ClassVar[bool] = True

    @property
    def best(self) -> float:
        """The most that an answer can earn."""
        return 1.0

    def prepare(self) -> None:
        """Called once in each worker process before its first answer. Imports that take seconds belong
        here: in `grade` they would be taken off the first answer's deadline."""

    def grade(self, response: str, problem: Problem) -> Grade:
        raise NotImplementedError
