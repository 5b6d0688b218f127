"""What a grader is: a pure function from an answer and the gold to a grade, and how it wants to be called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from treetune.config.registrable import Registrable
from treetune.tasks.graders.service import GradeBy, Plain, Service, Surroundings
from treetune.vocabulary import Grade, Problem

Isolation = Literal["inline", "process", "service"]
"""Where a grader is called; see `Grader`."""


class Unavailable(Exception):
    """What the grader needs isn't there (a judge, a sandbox), so that the answer stays without a verdict.

    Never for what the answer itself is or does. The answer is left out of training and measurements, and
    counted; the message says what was missing.
    """


class Grader(Registrable):
    """Grades one answer: `extract` finds what it says, `verdict` judges that.

    A grader writes these two, or `grade` alone where they can't be told apart. Instances are picklable and
    have no state: the same answer gets the same grade, in whichever process.

    `isolation` says where it is called:

    * ``process``: in worker processes, killed at the deadline. For all that parses, evaluates or runs what a
      model wrote. An answer on which it hangs or crashes has the outcome ``timeout`` or ``error``.
    * ``inline``: in the run's own process, where it cannot hang, crash or allocate without bound whatever
      the answer says: comparisons of strings in linear time.
    * ``service``: in threads of the run's process, `concurrency` at a time, since it waits for something
      outside. It has time limits of its own; a call that takes longer than its deadline is given up, and
      the answer ``unavailable``.
    """

    isolation: ClassVar[Isolation] = "process"
    deadline: float | None = None
    """Seconds for one answer; None: the run's `grader_deadline`."""
    concurrency: int = 16
    """Calls of a ``service`` at a time."""

    @property
    def best(self) -> float:
        """The most that an answer can earn."""
        return 1.0

    def of(self, problem: Problem) -> Grader:
        """The grader of this problem: itself, or the one that a routed grader has for it; always the same
        object for the same problem."""
        return self

    def parts(self) -> Sequence[Grader]:
        """All that `of` may give."""
        return (self,)

    def serve(self, around: Surroundings, grade_by: GradeBy) -> Service:
        """Of a ``service``: itself at work. `grade_by` grades by others, such as a rule within it."""
        return Plain(self)

    def missing(self) -> Sequence[str]:
        """What it needs and isn't there (a package, a sandbox), in words, with what to do about it."""
        return ()

    def prepare(self) -> None:
        """Called once in each worker process before its first answer. Imports that take seconds belong
        here: in `grade` they would be taken off the first answer's deadline."""

    def extract(self, response: str, problem: Problem) -> str | None:
        """What the response gives as its answer; None where it gives none."""
        raise NotImplementedError

    def verdict(self, extracted: str, problem: Problem) -> Grade | float:
        """What an answer is worth, or the whole grade of it."""
        raise NotImplementedError

    def without_answer(self, problem: Problem) -> Grade:
        """The grade of a response that gives no answer."""
        return Grade(reward=0.0, outcome="no_answer")

    def grade(self, response: str, problem: Problem) -> Grade:
        """Raises Unavailable where what it needs isn't there; whatever else it raises is the outcome
        ``error``."""
        extracted = self.extract(response, problem)
        if extracted is None:
            return self.without_answer(problem)
        found = self.verdict(extracted, problem)
        if isinstance(found, Grade):
            return found if found.extracted is not None else replace(found, extracted=extracted)
        if not math.isfinite(found):
            raise ValueError(f"{type(self).__name__} gave {found} for {extracted[:100]!r}")
        return Grade(reward=float(found), outcome="ok", extracted=extracted)
