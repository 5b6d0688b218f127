"""An objective of one's own: the clipped policy gradient, with wrong answers weighed differently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from treetune import ClippedPolicyGradient, Objective, TokenBatch

if TYPE_CHECKING:
    from torch import Tensor


@Objective.register("weighted_ppo")
@dataclass(frozen=True, kw_only=True)
class WeightedClippedPolicyGradient(ClippedPolicyGradient):
    """PPO's clipped loss, in which tokens of positive advantage weigh `positive_weight` and those of negative
    advantage `negative_weight`: after W-REINFORCE (Zhu et al. 2025, arXiv:2506.01347), which learns from
    wrong answers above all.
    """

    positive_weight: Annotated[float, Ge(0)] = 0.1
    negative_weight: Annotated[float, Ge(0)] = 1.0

    def surrogate(self, batch: TokenBatch, logprobs_N: Tensor, log_ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        policy_N, clipped_N = super().surrogate(batch, logprobs_N, log_ratio_N)
        assert batch.advantages_N is not None, "every policy gradient is given advantages"
        positive_N = batch.advantages_N > 0
        weight_N = positive_N * self.positive_weight + ~positive_N * self.negative_weight
        return policy_N * weight_N, clipped_N
