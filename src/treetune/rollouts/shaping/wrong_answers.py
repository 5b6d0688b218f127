"""Wrong answers cost something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from treetune.rollouts.base import Shaping
from treetune.rollouts.context import RolloutContext
from treetune.vocabulary import Trajectory


@Shaping.register("wrong_answers")
@dataclass(frozen=True, kw_only=True)
class WrongAnswers(Shaping):
    """`penalty` less for every answer that isn't right, whatever it scored, also for one that was cut
    off. With 1 and a grader of 0 and 1, rewards are 1 and −1."""

    penalty: Annotated[float, Gt(0)] = 1.0

    def bonuses(self, context: RolloutContext, trajectories: Sequence[Trajectory]) -> list[float]:
        return [0.0 if trajectory.grade.correct else -self.penalty for trajectory in trajectories]
