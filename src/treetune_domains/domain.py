"""A domain of a mixture: a task with a name, a weight and settings of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from annotated_types import Ge, Gt, MinLen

from treetune.contracts import Part
from treetune.tasks.base import NoSplit, Params, Split, Task
from treetune.tasks.graders.base import Grader
from treetune.vocabulary import Problem
from treetune_domains.environments.base import Environment


@dataclass(frozen=True, kw_only=True)
class Difficulty(Part):
    """Which training problems are neither too easy nor too hard, by what their rows say: those whose `field`
    lies strictly between `above` and `below`, such as a pass rate between 0.1 and 0.9. None is no bound.

    Raises ValueError, when the problems are read, for one without that number.
    """

    field: Annotated[str, MinLen(1)]
    """A number in `Problem.data`."""
    above: float | None = None
    below: float | None = None

    def __post_init__(self) -> None:
        if self.above is not None and self.below is not None and self.above >= self.below:
            raise ValueError(
                f"above is {self.above:g} and below is {self.below:g}, which leaves nothing: the first has to"
                " be smaller"
            )

    def keeps(self, problem: Problem) -> bool:
        value = problem.data.get(self.field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(
                f"problem {problem.id!r} has no number {self.field!r} to choose it by (it has"
                f" {', '.join(map(repr, problem.data)) or 'nothing'}): name another field, or let the task"
                " keep the row's"
            )
        return (self.above is None or value > self.above) and (self.below is None or value < self.below)


@dataclass(frozen=True, kw_only=True)
class Domain(Part):
    """A task of a mixture.

    `weight` says how often it is drawn beside the others (see the mixture's `weighting`); 0 only measures it.
    `stop` are the strings that end its answers: those of the task's own `stop` where left out, or the
    rollout's where the task has none. Its answers have at most `max_tokens`, and never more than the rollout
    or an evaluation set allows. `difficulty` leaves out training problems; what is measured stays whole.
    """

    task: Task
    weight: Annotated[float, Ge(0)] = 1.0
    stop: tuple[str, ...] | None = None
    max_tokens: Annotated[int, Gt(0)] | None = None
    difficulty: Difficulty | None = None

    def __post_init__(self) -> None:
        if self.stop and "" in self.stop:
            raise ValueError("stop has an empty string, which would end every answer at once")


@dataclass(frozen=True)
class DomainTask(Task):
    """A task with the name, ids, stop strings and budget that it has as a domain of a mixture."""

    name: str
    domain: Domain

    @property
    def task(self) -> Task:
        return self.domain.task

    @property
    def grader(self) -> Grader:  # type: ignore[override]
        return self.task.grader

    @property
    def environment(self) -> Environment | None:  # type: ignore[override]
        return self.task.environment

    def problems(self, split: Split) -> Sequence[Problem]:
        problems, difficulty = self.task.problems(split), self.domain.difficulty
        if split == "train" and difficulty is not None:
            problems = [problem for problem in problems if difficulty.keeps(problem)]
            if not problems:
                raise ValueError("no training problem is of that difficulty: widen its bounds")
        return self._named(problems)

    def _named(self, problems: Sequence[Problem]) -> list[Problem]:
        return [replace(one, id=f"{self.name}/{one.id}", domain=self.name) for one in problems]

    def has(self, split: Split) -> bool:
        """Whether the mixture's split has problems of it."""
        if split == "train" and not self.domain.weight:
            return False
        try:
            self.task.size(split)
        except NoSplit:
            return split == "train"  # which it must have: `problems` says what is wrong
        return True

    def size(self, split: Split) -> int | None:
        selected = split == "train" and self.domain.difficulty is not None
        return None if selected else self.task.size(split)

    def missing(self) -> Sequence[str]:
        return self.task.missing()

    def examples(self, count: int) -> Sequence[Problem]:
        return self._named(self.task.examples(count))

    def sampling(self, params: Params) -> Params:
        given: Any = self.task.sampling(params)
        stop = self.domain.stop
        if stop is None:
            stop = getattr(self.task, "stop", ()) or given.stop
        budget = min(given.max_tokens, self.domain.max_tokens or given.max_tokens)
        return replace(given, max_tokens=budget, stop=stop)

    def check_demonstrations(self) -> None:
        self.task.check_demonstrations()

    def demonstration(self, problem: Problem, seed: int) -> str:
        return self.task.demonstration(problem, seed)

    def sequential_demonstration(self, problem: Problem, seed: int) -> str:
        return self.task.sequential_demonstration(problem, seed)

    def step_boundaries(self, response: str) -> list[int]:
        return self.task.step_boundaries(response)

    def answer_boundaries(self, response: str) -> list[int]:
        return self.task.answer_boundaries(response)

    def alphabet(self) -> str:
        return self.task.alphabet()
