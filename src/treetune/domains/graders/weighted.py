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
    named = [answer.grade.numbers.items() for answer in answers]
    return [{key.removeprefix(PREFIX): one for key, one in own if key.startswith(PREFIX)} for own in named]


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
        weights = {name: self.weights.get(name, 1.0) for name in self.graders}
        return sum(max(0.0, weights[name] * one.best) for name, one in self.graders.items())

    @override
    def parts(self) -> Sequence[Grader]:
        return [self, *(part for one in self.graders.values() for part in one.parts())]

    @override
    def serve(self, context: ServiceContext, grade_by: GradeBy) -> AtWork:
        return AtWork(self, grade_by)

    @override
    def grade(self, response: str, problem: Problem) -> Grade:
        return AtWork(self, lambda one, said, about: one.of(about).grade(said, about)).grade(
            response, problem
        )


@dataclass(frozen=True)
class AtWork:
    """A weighted grader at work, whose graders are asked through `grade_by`."""

    grader: Weighted
    grade_by: GradeBy

    @property
    def concurrency(self) -> int:
        return self.grader.concurrency

    def grade(self, response: str, problem: Problem) -> Grade:
        total, last = 0.0, Grade(reward=0.0, outcome="no_answer")
        steps: list[float] = []  # from the last one on
        numbers: dict[str, float] = {}
        for name, one in self.grader.graders.items():
            grade = self.grade_by(one, response, problem)
            if not grade.is_known:
                raise Unavailable(f"{name}: {grade.message}")
            if grade.outcome in ("timeout", "error"):
                return replace(grade, reward=0.0, message=f"{name}: {grade.message}")
            weight = self.grader.weights.get(name, 1.0)
            total += weight * grade.reward
            parts = reversed(grade.step_rewards or (grade.reward,))
            steps = [one + weight * part for one, part in zip_longest(steps, parts, fillvalue=0.0)]
            numbers |= {**grade.numbers, PREFIX + name: grade.reward}
            if last.outcome == "no_answer":
                last = grade
        if not math.isfinite(total):
            raise ValueError(f"the weighted sum is {total}")
        return replace(last, reward=total, numbers=numbers, step_rewards=tuple(steps[::-1]))

    def counted(self) -> Counts:
        return {}

    def close(self) -> None:
        """Nothing is held: graders end with the pool."""
