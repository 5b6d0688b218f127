"""Several rewards as one: their weighted sum, and each as a number of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Annotated, ClassVar

from annotated_types import MinLen
from typing_extensions import override

from treetune.exceptions import Unavailable
from treetune.rollouts.numbers import NumberGroup
from treetune.tasks.graders.base import Counts, GradeBy, Grader, Isolation, ServiceContext
from treetune.vocabulary import Grade, Problem, TextCodec, Trajectory

PREFIX = "rewards/"


@NumberGroup.register("rewards", {})
def rewards(answers: Sequence[Trajectory], codec: TextCodec) -> list[dict[str, float]]:
    """The rewards that make up an answer's, where its grader tells them."""
    rewards_by_answer = []
    for answer in answers:
        numbers = answer.grade.numbers.items()
        of_answer = {key.removeprefix(PREFIX): value for key, value in numbers if key.startswith(PREFIX)}
        rewards_by_answer.append(of_answer)
    return rewards_by_answer


@Grader.register("weighted")
@dataclass(frozen=True, kw_only=True)
class Weighted(Grader):
    """The weighted sum of several graders' rewards; each is called where it wants to be, within its own
    deadline, and is the metric ``rewards/<its name>``.

    An answer that one of them could not judge is left out; one on which one of them hung or failed earns 0
    with that outcome. It is correct from a sum of 1 on.
    """

    graders: Annotated[Mapping[str, Grader], MinLen(1)] = field(hash=False)
    """The graders by their names."""
    weights: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Weights by the names of graders; 1 for those that have none here."""

    isolation: ClassVar[Isolation] = "service"
    reads_turns: ClassVar[bool] = True
    deadline: float = 3600.0
    concurrency: int = 256

    def __post_init__(self) -> None:
        if unknown := sorted(self.weights.keys() - self.graders.keys()):
            raise ValueError(f"weights has {', '.join(unknown)}: there is {', '.join(sorted(self.graders))}")

    @property
    @override
    def best(self) -> float:
        # A grader with a weight below 0 is best where it gives nothing.
        return sum(
            max(0.0, self.weights.get(name, 1.0) * grader.best) for name, grader in self.graders.items()
        )

    @override
    def parts(self) -> Sequence[Grader]:
        parts: list[Grader] = [self]
        for grader in self.graders.values():
            parts += grader.parts()
        return parts

    @override
    def serve(self, context: ServiceContext, grade_by: GradeBy) -> AtWork:
        return AtWork(self, grade_by)

    @override
    def grade(self, response: str, problem: Problem) -> Grade:
        def grade_at_once(grader: Grader, response: str, problem: Problem) -> Grade:
            return grader.of(problem).grade(response, problem)

        return AtWork(self, grade_at_once).grade(response, problem)


@dataclass(frozen=True)
class AtWork:
    """A weighted grader at work, whose graders are asked through `grade_by`."""

    grader: Weighted
    grade_by: GradeBy

    @property
    def concurrency(self) -> int:
        return self.grader.concurrency

    def grade(self, response: str, problem: Problem) -> Grade:
        total = 0.0
        shown = Grade(reward=0.0, outcome="no_answer")  # the first one with an answer
        # From the last step on: a grader that gives one reward gives it to the last step.
        steps_backwards: list[float] = []
        numbers: dict[str, float] = {}
        for name, grader in self.grader.graders.items():
            grade = self.grade_by(grader, response, problem)
            if not grade.is_known:
                raise Unavailable(f"{name}: {grade.message}")
            if grade.outcome in ("timeout", "error"):
                return replace(grade, reward=0.0, message=f"{name}: {grade.message}")
            weight = self.grader.weights.get(name, 1.0)
            total += weight * grade.reward
            rewards_backwards = reversed(grade.step_rewards or (grade.reward,))
            pairs = zip_longest(steps_backwards, rewards_backwards, fillvalue=0.0)
            steps_backwards = [sum_so_far + weight * reward for sum_so_far, reward in pairs]
            numbers |= {**grade.numbers, PREFIX + name: grade.reward}
            if shown.outcome == "no_answer":
                shown = grade
        if not math.isfinite(total):
            raise ValueError(f"the weighted sum is {total}")
        return replace(shown, reward=total, numbers=numbers, step_rewards=tuple(steps_backwards[::-1]))

    def counted(self) -> Counts:
        return {}

    def close(self) -> None:
        """Nothing is held: graders end with the pool."""
