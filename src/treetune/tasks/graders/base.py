"""The grader, a pure function from an answer and the gold to a grade, and how it wants to be called."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from treetune.config.registrable import Registrable
from treetune.tasks.thoughts import read_thoughts
from treetune.vocabulary import Grade, Problem

T = TypeVar("T")

Isolation = Literal["inline", "process", "service"]
"""The place where a grader is called; see `Grader`."""

Counts = dict[str, tuple[float, float | None]]
"""Sums by the names of metrics, each with its divisor; None: the metric is the sum itself."""

LONGEST_STATEMENT = 1000
"""Characters of a line that are looked at for a final answer."""

# A line that ends with an answer: \boxed{42}, "#### 42", "<answer>42</answer>", "The answer is 42."
_FINAL = re.compile(
    r"(?:\\boxed\s?\{[^\n]*\}|</answer>|</solution>|^\s*#{1,4}\s?[^\s#][^\n]{0,80}"
    r"|\b(?:final answer|answer is|answer:)[^\n.!?]{0,80}(?:\.\d+)?)[\s.$*)\]\\]*\Z",
    re.IGNORECASE,
)

RETURNED_NONE = "the reward function returned None"
"""The message of a grade whose function returned None: it found no answer in the response."""

GradeBy = Callable[["Grader", str, Problem], Grade]
"""Grades an answer by another grader, which is called where that grader wants to be."""


class Service(Protocol):
    """A grader at work that waits for something outside, and holds what it needs for that."""

    @property
    def concurrency(self) -> int:
        """Calls at a time."""

    def grade(self, response: str, problem: Problem) -> Grade:
        """Grades as `Grader.grade` does; called from several threads."""

    def counted(self) -> Counts:
        """Returns what it has done since this was last asked."""

    def close(self) -> None:
        """Stops asking."""


@runtime_checkable
class CheckedService(Protocol):
    """A service of a run that can say before anything is sampled that it won't do."""

    def refuse_unusable(self, task: Any, problems: Sequence[Problem]) -> None:
        """Raises ValueError where it can't be asked about answers to the task's problems."""


@dataclass
class ServiceContext:
    """The things that a run lends to graders which are services.

    `folder` is where they write down what they were answered, under this process's `name`; None: nowhere.
    `services` are those of the run itself (`runtime.sampler`), such as the model that judges answers.
    One for all graders of a process: close it when they are done.
    """

    folder: Path | None = None
    name: str = "0"
    services: Sequence[Any] = ()
    _shared: dict[Callable[[ServiceContext], Any], Any] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def get(self, kind: type[T]) -> T | None:
        """Returns the run's service of this type; None where the run has none."""
        return next((service for service in self.services if isinstance(service, kind)), None)

    def shared(self, make: Callable[[ServiceContext], T]) -> T:
        """Returns what `make` makes, once for all services of this process; it is closed with this."""
        with self._lock:
            if make not in self._shared:
                self._shared[make] = make(self)
            return self._shared[make]

    def close(self) -> None:
        with self._lock:
            while self._shared:
                self._shared.popitem()[1].close()


class Grader(Registrable):
    """Grades one answer: `extract` finds what it says, `verdict` judges that.

    A grader writes these two, or `grade` alone where they can't be told apart. Instances are picklable and
    have no state: the same answer gets the same grade, in whichever process.

    Where `think_end` is set, as in the graders of this distribution that look for an answer, `extract` gets
    the part of a response that stands behind the model's thought.

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
    reads_turns: ClassVar[bool] = False
    """Whether it reads all turns of an answer (`Problem.transcript`), and not the last one's text alone."""
    votes_by_value: ClassVar[bool] = False
    """Whether `same_answer` holds for this grader, so that a majority vote counts equal answers (½ and 0.5)
    as one. Not where two answers can't be compared without what made the gold, as with programs and tests:
    there answers are equal that are spelled alike."""
    deadline: float | None = None
    """Seconds for one answer; None: the run's `grader_deadline`."""
    concurrency: int = 16
    """Calls of a ``service`` at a time."""
    think_end: str | None = None
    """The text that ends a thought, which is no part of an answer (`tasks.thoughts`); None: all of a response
    counts."""

    @property
    def best(self) -> float:
        """Returns the most that an answer can earn."""
        return 1.0

    def of(self, problem: Problem) -> Grader:
        """Returns the grader of this problem: itself, or the one that a routed grader has for it; always
        the same object for the same problem."""
        return self

    def parts(self) -> Sequence[Grader]:
        """Returns all that `of` may give."""
        return (self,)

    def serve(self, context: ServiceContext, grade_by: GradeBy) -> Service | None:
        """Returns a ``service`` at work; None where the grader itself is called, and holds nothing.

        `grade_by` grades by others, such as a rule within it.
        """
        return None

    def prepare(self) -> None:
        """Called once in each worker process before its first answer. Imports that take seconds belong
        here: in `grade` they would be taken off the first answer's deadline."""

    def behind_thought(self, response: str, problem: Problem) -> str | None:
        """Returns the part of a response that may hold its answer; None where it was cut off in a thought.

        A model may forget to end its thought and still state its answer at the end: then it is the last line.
        """
        if self.think_end is None:
            return response
        reading = read_thoughts(response, self.think_end, is_open=problem.is_thought_open)
        if not reading.is_cut_off:
            return reading.answer
        last_line = response.rstrip().rpartition("\n")[2]
        return last_line if _FINAL.search(last_line[-LONGEST_STATEMENT:]) else None

    def extract(self, response: str, problem: Problem) -> str | None:
        """Returns the response's answer; None where it gives none."""
        raise NotImplementedError

    def verdict(self, extracted: str, problem: Problem) -> Grade | float:
        """Returns the reward of an answer, or the whole grade."""
        raise NotImplementedError

    def same_answer(self, answer: str, other: str, problem: Problem) -> bool:
        """Returns whether two answers, as they were extracted, say the same; by default, whether the one were
        right if the other were the gold. An answer that is no gold is like no other.

        Asked where `votes_by_value` is set, of two answers that are spelled differently.
        """
        # Not written here: a grader that has `grade` alone would count as one that lacks a verdict.
        return is_right_by(self, answer, replace(problem, gold=other))

    def without_answer(self, problem: Problem) -> Grade:
        """Grades a response that gives no answer."""
        return Grade(reward=0.0, outcome="no_answer")

    def grade(self, response: str, problem: Problem) -> Grade:
        """Raises Unavailable where what it needs isn't there; whatever else it raises is the outcome
        ``error``."""
        answer = self.behind_thought(response, problem)
        extracted = None if answer is None else self.extract(answer, problem)
        if extracted is None:
            return self.without_answer(problem)
        verdict = self.verdict(extracted, problem)
        if isinstance(verdict, Grade):
            return verdict if verdict.extracted is not None else replace(verdict, extracted=extracted)
        if not math.isfinite(verdict):
            raise ValueError(f"{type(self).__name__} gave {verdict} for {extracted[:100]!r}")
        return Grade(reward=float(verdict), outcome="ok", extracted=extracted)


def is_right_by(grader: Grader, answer: str, problem: Problem) -> bool:
    """Returns whether an answer that was extracted is right; not where the gold can't be read."""
    try:
        verdict = grader.verdict(answer, problem)
    except ValueError:
        return False
    grade = verdict if isinstance(verdict, Grade) else Grade(reward=verdict, outcome="ok")
    return grade.correct
