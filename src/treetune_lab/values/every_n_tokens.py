"""States at even distances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from treetune.rollouts.values.base import StateRule
from treetune.vocabulary import Trajectory
from treetune_lab.values.one_line import OneLineStates


@StateRule.register("every_n_tokens")
@dataclass(frozen=True, kw_only=True)
class EveryNTokens(OneLineStates):
    """A step is so many `tokens` of an answer; the last one what is left. No text is looked at, so a boundary
    depends on nothing that is sampled and the gradient of unbiased values stays unbiased."""

    tokens: Annotated[int, Gt(0)]

    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        return range(0, trajectory.step_ends[-1], self.tokens)

    def usual_states(self, tokens: float) -> float:
        return max(1.0, tokens / self.tokens)
