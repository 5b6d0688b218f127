"""Rules for states that look at tokens, not at the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Le
from typing_extensions import override

from treetune.rollouts.states import OneLineStates
from treetune.rollouts.values import StateRule
from treetune.tasks.base import Task
from treetune.vocabulary import Trajectory


@StateRule.register("every_n_tokens")
@dataclass(frozen=True, kw_only=True)
class EveryNTokens(OneLineStates):
    """Steps of equally many tokens of an answer; the last one has what is left. No text is looked at, so a
    boundary depends on nothing that is sampled and the gradient of unbiased values stays unbiased."""

    tokens: Annotated[int, Gt(0)]
    """Tokens of a step."""

    @override
    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        return range(0, trajectory.step_ends[-1], self.tokens)

    @override
    def looks_back(self, task: Task) -> bool:
        return True

    @override
    def usual_states(self, tokens: float) -> float:
        return max(1.0, tokens / self.tokens)


@StateRule.register("low_probability")
@dataclass(frozen=True, kw_only=True)
class LowProbability(OneLineStates):
    """Steps that end with tokens that were sampled with a low probability: where the policy had a choice, the
    value may change (the cut points of SPO-chain, arXiv:2505.23564, section 4.1).

    The token itself belongs to the step that it ends. So a boundary depends on what stands before it alone,
    and the gradient of unbiased values stays unbiased. **Biased** where steps `begin_with` tokens: on the
    tests' language with `below` 0.6 and `every` 1 by 18 % of the gradient's length (cosine 0.992).
    """

    below: Annotated[float, Gt(0), Le(1)] = 0.9
    """Counts tokens that were sampled with a smaller probability."""
    every: Annotated[int, Gt(0)] = 5
    """Counted tokens of a step."""
    begin_with: bool = False
    """Whether steps begin with the first, the (n + 1)-th, … such token, as in the public code of SPO-chain,
    which values no prompt: what lies before the first one is none of its mask's."""

    @override
    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        unsure, at = list[int](), 0
        for segment in trajectory.segments:
            if segment.logprobs is not None:
                logprobs = enumerate(segment.logprobs.tolist(), start=at)
                unsure += [position for position, logprob in logprobs if logprob < math.log(self.below)]
            at += len(segment.token_ids)
        behind = [position + 1 for position in unsure[self.every - 1 :: self.every]]
        starts = unsure[:: self.every] if self.begin_with else behind
        return sorted({0, *(start for start in starts if start < at)})

    @override
    def looks_back(self, task: Task) -> bool:
        return not self.begin_with
