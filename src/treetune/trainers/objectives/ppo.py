"""The clipped policy gradient: PPO's policy loss, which VinePPO, GRPO, RLOO and DAPO share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Lt

from treetune.trainers.objectives.base import Objective, TokenBatch
from treetune.trainers.objectives.policy_gradient import PolicyGradient, given_advantages

if TYPE_CHECKING:
    from torch import Tensor


@Objective.register("ppo")
@dataclass(frozen=True, kw_only=True)
class ClippedPolicyGradient(PolicyGradient):
    """``max(-A·ρ, -A·clip(ρ, 1-clip_low, 1+clip_high))`` per token: Schulman et al. 2017
    (arXiv:1707.06347), eq. 7, with separate clip ranges below and above (DAPO, arXiv:2503.14476, eq. 10).

    `dual_clip` c bounds what a token of negative advantage may add by ``-A·c`` (Ye et al. 2020,
    arXiv:1912.09729, eq. 5): a ratio far above 1 would otherwise weigh without bound. Theirs is 3.
    """

    clip_low: Annotated[float, Gt(0), Lt(1)] = 0.2
    """For negative advantages the gradient ends where the ratio is below 1 - this."""
    clip_high: Annotated[float, Gt(0)] = 0.2
    """For positive advantages the gradient ends where the ratio is above 1 + this."""
    dual_clip: Annotated[float, Gt(1)] | None = None

    def surrogate(self, batch: TokenBatch, logprobs_N: Tensor, log_ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        advantages_N = given_advantages(batch)
        ratio_N = log_ratio_N.exp()
        unclipped_N = -advantages_N * ratio_N
        clipped_N = -advantages_N * ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        policy_N, is_clipped_N = unclipped_N.maximum(clipped_N), clipped_N > unclipped_N
        if self.dual_clip is not None:
            most_N = (-self.dual_clip * advantages_N).where(advantages_N < 0, policy_N)
            is_clipped_N = is_clipped_N | (policy_N > most_N)
            policy_N = policy_N.minimum(most_N)
        return policy_N, is_clipped_N
