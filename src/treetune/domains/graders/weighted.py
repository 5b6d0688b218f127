"""A grader that adds the weighted rewards of several graders, and reports each of them."""

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
from treetune.tasks.graders.base import GradeBy, Grader, Isolation, MetricSums, ServiceContext
from treetune.vocabulary import Grade, Problem, TextCodec, Trajectory

METRIC_PREFIX = "rewards/"
"""The beginning of the keys of single rewards among a grade's numbers."""


@NumberGroup.register("rewards", {})
def rewards(answers: Sequence[Trajectory], codec: TextCodec) -> list[dict[str, float]]:
    """Returns for each answer its single rewards, by the name of the grader or function that gave them.

    The dictionary is empty for an answer whose grader doesn't report single rewards. `codec` isn't needed
    here: the functions of all groups of numbers have the same parameters.
    """
    rewards_by_answer = []
    for answer in answers:
        single_rewards: dict[str, float] = {}
        for key, value in answer.grade.numbers.items():
            if key.startswith(METRIC_PREFIX):
                single_rewards[key.removeprefix(METRIC_PREFIX)] = value
        rewards_by_answer.append(single_rewards)
    return rewards_by_answer


@Grader.register("weighted")
@dataclass(frozen=True, kw_only=True)
class Weighted(Grader):
    """Gives the weighted sum of several graders' rewards. Each grader is called according to its own
    isolation and deadline, and its reward is a metric, ``rewards/<its name>``.

    If a grader is ``unavailable``, the answer is left out. If a grader hangs or fails, the answer earns 0,
    and its outcome is that of this grader. An answer is correct if the sum is 1 or more.
    """

    graders: Annotated[Mapping[str, Grader], MinLen(1)] = field(hash=False)
    """The graders by their names."""
    weights: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Weights by the names of graders. The default of a weight is 1."""

    isolation: ClassVar[Isolation] = "service"
    reads_turns: ClassVar[bool] = True
    deadline: float = 3600.0
    concurrency: int = 256

    def __post_init__(self) -> None:
        unknown = sorted(self.weights.keys() - self.graders.keys())
        if unknown:
            raise ValueError(
                f"weights has {', '.join(unknown)}, and graders are only {', '.join(sorted(self.graders))}"
            )

    @property
    @override
    def best(self) -> float:
        # With a negative weight, the best reward of a grader is 0.
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
    def serve(self, context: ServiceContext, grade_by: GradeBy) -> WeightedService:
        return WeightedService(self, grade_by)

    @override
    def grade(self, response: str, problem: Problem) -> Grade:
        """Grades without a pool of graders: each grader is called directly, without its isolation and
        deadline."""

        def grade_at_once(grader: Grader, response: str, problem: Problem) -> Grade:
            return grader.of(problem).grade(response, problem)

        return WeightedService(self, grade_at_once).grade(response, problem)


@dataclass(frozen=True)
class WeightedService:
    """The service of a weighted grader, which calls the graders through `grade_by`."""

    grader: Weighted
    grade_by: GradeBy

    @property
    def concurrency(self) -> int:
        return self.grader.concurrency

    def grade(self, response: str, problem: Problem) -> Grade:
        total = 0.0
        # The result has the extracted text, the outcome and the message of the first grade with an answer.
        # Only its rewards and numbers come from all grades.
        first_with_answer = Grade(reward=0.0, outcome="no_answer")
        # The steps' rewards from the last to the first. A grader that gives only one reward gives it to the
        # last step.
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
            numbers |= {**grade.numbers, METRIC_PREFIX + name: grade.reward}
            if first_with_answer.outcome == "no_answer":
                first_with_answer = grade
        if not math.isfinite(total):
            raise ValueError(f"the weighted sum is {total}")
        step_rewards = tuple(reversed(steps_backwards))
        return replace(first_with_answer, reward=total, numbers=numbers, step_rewards=step_rewards)

    def take_counts(self) -> MetricSums:
        return {}

    def close(self) -> None:
        """Does nothing: the graders end with the pool."""
