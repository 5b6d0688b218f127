"""States at the task's step boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treetune.rollouts.values.base import StateRule
from treetune.vocabulary import Trajectory
from treetune_lab.values.one_line import OneLineStates


@StateRule.register("step_boundaries")
@dataclass(frozen=True, kw_only=True)
class StepBoundaries(OneLineStates):
    """Before every step of the answer (Kazemnejad et al., arXiv:2410.01679, section 4)."""

    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        return (0, *trajectory.step_ends[:-1])
