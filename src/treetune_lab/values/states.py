"""Rules for states that look at tokens, not at the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Le

from treetune.rollouts.states import OneLineStates
from treetune.rollouts.values import StateRule
from treetune.vocabulary import Trajectory


@StateRule.register("every_n_tokens")
@dataclass(frozen=True, kw_only=True)
class EveryNTokens(OneLineStates):
    """Steps of equally many tokens of an answer; the last one has what is left. No text is looked at, so a
    boundary depends on nothing that is sampled and the gradient of unbiased values stays unbiased."""

    tokens: Annotated[int, Gt(0)]
    """Tokens of a step."""

    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        return range(0, trajectory.step_ends[-1], self.tokens)

    def usual_states(self, tokens: float) -> float:
        return max(1.0, tokens / self.tokens)


@StateRule.register("low_probability")
@dataclass(frozen=True, kw_only=True)
class LowProbability(OneLineStates):
    """Steps that end with tokens that were sampled with a low probability: where the policy had a choice, the
    value may change (the cut points of SPO-chain, arXiv:2505.23564, section 4.1).

    The token itself belongs to the step that it ends. So a boundary depends on what stands before it alone,
    and the gradient of unbiased values stays unbiased.
    """

    below: Annotated[float, Gt(0), Le(1)] = 0.9
    """Counts tokens that were sampled with a smaller probability."""
    every: Annotated[int, Gt(0)] = 5
    """Counted tokens of a step."""

    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        starts, at, seen = [0], 0, 0
        for segment in trajectory.segments:
            if segment.logprobs is not None:
                for position, logprob in enumerate(segment.logprobs.tolist(), start=at + 1):
                    seen += logprob < math.log(self.below)
                    if seen == self.every:
                        starts.append(position)
                        seen = 0
            at += len(segment.token_ids)
        return [start for start in starts if start < at] or [0]
