"""Defines the interface of graders. A grader is a pure function from an answer and the gold to a grade."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from treetune.config.registrable import Registrable
from treetune.tasks.thoughts import read_thoughts
from treetune.vocabulary import Grade, Problem

T = TypeVar("T")

Isolation = Literal["inline", "process", "service"]
"""The place where a grader is called. See `Grader`."""

MetricSums = dict[str, tuple[float, float | None]]
"""Sums by the names of metrics, each with its divisor; None: the metric is the sum itself.

Example: ``{"judge/asked": (3.0, None), "judge/seconds": (12.0, 3.0)}``.
"""

LONGEST_FINAL_LINE = 1000
"""The number of characters at the end of a line in which a final answer is searched for."""

# A line that ends with an answer: \boxed{42}, "#### 42", "<answer>42</answer>", "The answer is 42."
_LINE_WITH_FINAL_ANSWER = re.compile(
    r"(?:\\boxed\s?\{[^\n]*\}|</answer>|</solution>|^\s*#{1,4}\s?[^\s#][^\n]{0,80}"
    r"|\b(?:final answer|answer is|answer:)[^\n.!?]{0,80}(?:\.\d+)?)[\s.$*)\]\\]*\Z",
    re.IGNORECASE,
)

RETURNED_NONE = "the reward function returned None"
"""The message of a grade whose function returned None: it found no answer in the response."""

GradeBy = Callable[["Grader", str, Problem], Grade]
"""Grades an answer with another grader, which is called according to its own isolation."""


class Service(Protocol):
    """The running form of a grader that waits for something outside of the run, with its connections."""

    @property
    def concurrency(self) -> int:
        """The largest number of calls at the same time."""

    def grade(self, response: str, problem: Problem) -> Grade:
        """Grades like `Grader.grade`. Several threads call it."""

    def take_counts(self) -> MetricSums:
        """Returns what the service has counted since the last call of this method."""

    def close(self) -> None:
        """Ends the service."""


class ServedJudge(Protocol):
    """The model that a run serves to judge answers (`domains.graders.judge.RunningJudge`)."""

    def refuse_unusable(self, task: Any, problems: Sequence[Problem]) -> None:
        """Raises ValueError if the model can't be asked about answers to the task's problems. Called before
        anything is sampled."""


@dataclass
class ServiceContext:
    """The objects of a run that the services of graders need. All services of a process share one context.
    Whoever made the context closes it after the services."""

    folder: Path | None = None
    """The folder in which services store replies; None: nothing is stored."""
    name: str = "0"
    """The name of this process's files in the folder."""
    judge: ServedJudge | None = None
    """The model that the run itself serves to judge answers; None if it serves none."""
    _shared: dict[Callable[[ServiceContext], Any], Any] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def shared(self, make: Callable[[ServiceContext], T]) -> T:
        """Returns the object that `make` makes. It is made once, and all services of this process share it.
        `close` closes it."""
        with self._lock:
            if make not in self._shared:
                self._shared[make] = make(self)
            return self._shared[make]

    def close(self) -> None:
        with self._lock:
            while self._shared:
                self._shared.popitem()[1].close()  # the object that was made last is closed first


class Grader(Registrable):
    """Grades one answer: `extract` finds the answer in a response, and `verdict` grades it.

    A sub-class implements `extract` and `verdict`, or only `grade` if the two can't be separated. Instances
    are picklable and have no state: the same answer gets the same grade in every process.

    If `think_end` is set, `extract` gets only the part of a response after the model's thought. This
    package's graders that search for an answer set it.

    `isolation` says where the grader is called:

    * ``process``: in worker processes, which are killed at the deadline. This is for graders that parse,
      evaluate or run what a model wrote. An answer on which one hangs or crashes has the outcome ``timeout``
      or ``error``.
    * ``inline``: in the run's own process. This is for graders that can't hang, crash or use unbounded
      memory, whatever the answer is: comparisons of strings in linear time.
    * ``service``: in threads of the run's process, `concurrency` at a time. This is for graders that wait for
      something outside. They have time limits of their own. A call that exceeds its deadline is given up, and
      the answer is ``unavailable``.
    """

    isolation: ClassVar[Isolation] = "process"
    reads_turns: ClassVar[bool] = False
    """Whether the grader reads all turns of an answer (`Problem.transcript`), and not only the text of the
    last turn."""
    votes_by_value: ClassVar[bool] = False
    """Whether `same_answer` works for this grader. If it does, a majority vote counts ½ and 0.5 as the same
    answer. If it doesn't, only answers with the same text count as the same. A grader that runs a program
    with tests, for example, can't compare two answers with each other."""
    deadline: float | None = None
    """The number of seconds for one answer; null: the run's `grader_deadline`."""
    concurrency: int = 16
    """The largest number of calls of a ``service`` at the same time."""
    think_end: str | None = None
    """The text that ends a thought, which is not part of an answer (`tasks.thoughts`); None: the whole
    response counts."""

    @property
    def best(self) -> float:
        """The largest reward of an answer."""
        return 1.0

    def of(self, problem: Problem) -> Grader:
        """Returns the grader of a problem: this grader, or the part of a routed grader that grades the
        problem. It is always the same object for the same problem."""
        return self

    def parts(self) -> Sequence[Grader]:
        """Returns all graders that `of` may return."""
        return (self,)

    def serve(self, context: ServiceContext, grade_by: GradeBy) -> Service | None:
        """Starts and returns the object that grades for this ``service`` grader during a run, for example one
        with connections to a server.

        Returns None if the grader needs no such object. The grader's own `grade` is then called.

        Args:
            context: The objects of the run that services need.
            grade_by: Grades an answer with another grader, such as a rule that this grader contains.
        """
        return None

    def prepare(self) -> None:
        """Called once in each worker process before its first answer. Do slow imports here: in `grade` they
        would take time from the first answer's deadline."""

    def after_thought(self, response: str, problem: Problem) -> str | None:
        """Returns the part of a response after its thought. Returns None if the response ends within a
        thought.

        There is one exception: a model may forget to end its thought, and still state an answer in the last
        line. The last line is then returned.
        """
        if self.think_end is None:
            return response
        reading = read_thoughts(response, self.think_end, is_open=problem.is_thought_open)
        if not reading.is_cut_off:
            return reading.answer
        last_line = response.rstrip().rpartition("\n")[2]
        # The line may be very long. Only its end is searched, since the answer must be at its end.
        end_of_line = last_line[-LONGEST_FINAL_LINE:]
        return last_line if _LINE_WITH_FINAL_ANSWER.search(end_of_line) else None

    def extract(self, response: str, problem: Problem) -> str | None:
        """Returns the answer in a response; None if there is none."""
        raise NotImplementedError

    def verdict(self, extracted: str, problem: Problem) -> Grade | float:
        """Returns the reward of an answer, or its complete grade."""
        raise NotImplementedError

    def same_answer(self, answer: str, other: str, problem: Problem) -> bool:
        """Returns whether two extracted answers are equal.

        By default they are equal if the first would be right with the second as the gold (the reference
        answer). If the second can't be read as a gold, they are not equal. A grader with `votes_by_value` is
        asked this for answers with different texts.
        """
        # `is_right_by` is a function: as a method, it would look like a part of the interface that every
        # sub-class has to support.
        return is_right_by(self, answer, replace(problem, gold=other))

    def without_answer(self, problem: Problem) -> Grade:
        """Returns the grade of a response that gives no answer."""
        return Grade(reward=0.0, outcome="no_answer")

    def grade(self, response: str, problem: Problem) -> Grade:
        """Returns the grade of a response.

        Raises Unavailable if something that the grader needs is missing, such as a judge. The grader pool
        turns any other exception into the outcome ``error``.
        """
        answer = self.after_thought(response, problem)
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
    """Returns whether an extracted answer is right; False if the gold can't be read."""
    try:
        verdict = grader.verdict(answer, problem)
    except ValueError:
        return False
    grade = verdict if isinstance(verdict, Grade) else Grade(reward=verdict, outcome="ok")
    return grade.correct
