"""States behind the tokens at which the policy was least sure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Le

from treetune.rollouts.values.base import StateRule
from treetune.vocabulary import Trajectory
from treetune_lab.values.one_line import OneLineStates


@StateRule.register("low_probability")
@dataclass(frozen=True, kw_only=True)
class LowProbability(OneLineStates):
    """A step ends with every `every`-th token that was sampled with a probability `below` this: where the
    policy had a choice, the value may change (the cut points of SPO-chain, arXiv:2505.23564, section 4.1).

    The token itself belongs to the step that it ends. So a boundary depends on what stands before it alone,
    and the gradient of unbiased values stays unbiased.
    """

    below: Annotated[float, Gt(0), Le(1)] = 0.9
    every: Annotated[int, Gt(0)] = 5

    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        starts, at, seen = [0], 0, 0
        for segment in trajectory.segments:
            if segment.logprobs is not None:
                for place, logprob in enumerate(segment.logprobs.tolist(), start=at + 1):
                    seen += logprob < math.log(self.below)
                    if seen == self.every:
                        starts.append(place)
                        seen = 0
            at += len(segment.token_ids)
        return [start for start in starts if start < at] or [0]
