"""Problems that an environment makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, ClassVar

from annotated_types import Gt

from treetune.contracts import Finding
from treetune.tasks.base import Split, Task
from treetune.tasks.graders.base import Grader, Isolation
from treetune.vocabulary import Grade, Problem
from treetune_domains.environments.base import Game


@dataclass(frozen=True)
class EarnedInTurns(Grader):
    """Stands for the grader where an environment's rewards are all that there is."""

    isolation: ClassVar[Isolation] = "inline"

    def grade(self, response: str, problem: Problem) -> Grade:
        return Grade(reward=0.0, outcome="no_answer", message="an environment says what its answers earn")


@Task.register("environment")
@dataclass(frozen=True, kw_only=True)
class EnvironmentTask(Task):
    """The levels of a game, as many as each split says: no two splits share one.

    The rollout `multi_turn` plays them, and the game's rewards are what an answer earns; a grader is needed
    where the rollout's `reward` says so. Levels are numbers, from which the game makes its problems; those of
    validation and test don't change with `train_size`.
    """

    environment: Game = field()
    """What makes the problems, and answers in them."""
    train_size: Annotated[int, Gt(0)] = 1000
    """Problems to train on."""
    validation_size: Annotated[int, Gt(0)] = 100
    """Problems of the validation split."""
    test_size: Annotated[int, Gt(0)] = 200
    """Problems of the test split."""
    grader: Grader = field(default_factory=EarnedInTurns)

    def check(self, experiment: Any) -> Iterable[Finding]:
        there = self.environment.levels
        needed = self.train_size + self.validation_size + self.test_size
        if there is not None and needed > there:
            yield Finding(
                f"train_size + validation_size + test_size is {needed}, and the environment has {there}"
                " levels",
                "train_size",
                "lower the sizes, or make the environment larger",
            )

    def size(self, split: Split) -> int:
        return {"train": self.train_size, "validation": self.validation_size, "test": self.test_size}[split]

    def problems(self, split: Split) -> Sequence[Problem]:
        return _problems(self, split)

    def examples(self, count: int) -> Sequence[Problem]:
        if not self.environment.quick:
            return ()
        return [self.environment.problem(f"example/{level}", level) for level in range(count)]

    def step_boundaries(self, response: str) -> list[int]:
        """A response is one step; the rollout knows its turns."""
        return [0, len(response)] if response else [0]

    def alphabet(self) -> str:
        return self.environment.alphabet()


@lru_cache(maxsize=16)
def _problems(task: EnvironmentTask, split: Split) -> tuple[Problem, ...]:
    # Held-out levels come first, so that they stay when train_size changes.
    first = {"test": 0, "validation": task.test_size, "train": task.test_size + task.validation_size}[split]
    levels = range(first, first + task.size(split))
    return tuple(task.environment.problem(f"{split}/{place}", level) for place, level in enumerate(levels))
