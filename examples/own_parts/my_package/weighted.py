"""An objective of your own: PPO's clipped policy gradient, with other weights for wrong answers."""

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
    """PPO's clipped loss. Tokens with a positive advantage have the weight `positive_weight`, others have
    `negative_weight`. With the defaults, training learns mostly from wrong answers, as W-REINFORCE does (Zhu
    et al. 2025, arXiv:2506.01347).
    """

    positive_weight: Annotated[float, Ge(0)] = 0.1
    negative_weight: Annotated[float, Ge(0)] = 1.0

    def surrogate(self, batch: TokenBatch, logprobs_N: Tensor, log_ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss of each token, and whether the clip stops its gradient."""
        loss_N, is_clipped_N = super().surrogate(batch, logprobs_N, log_ratio_N)
        assert batch.advantages_N is not None, "the trainer gives advantages to every policy gradient"
        is_positive_N = batch.advantages_N > 0
        weight_N = is_positive_N * self.positive_weight + ~is_positive_N * self.negative_weight
        return loss_N * weight_N, is_clipped_N
