"""Clipping the importance weight instead of the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Le

from treetune.trainers.objectives.base import Objective, TokenBatch
from treetune.trainers.objectives.policy_gradient import PolicyGradient, given_advantages

if TYPE_CHECKING:
    from torch import Tensor


@Objective.register("cispo")
@dataclass(frozen=True, kw_only=True)
class ClippedImportance(PolicyGradient):
    """CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5): ``-sg[clip(ρ, 1-clip_low, 1+clip_high)]·A·log p``.

    The weight is bounded and every token keeps its gradient, where PPO's clip silences those that moved
    far, rare words among them. `clip_low` 1 leaves the lower side unbounded, as the paper does.
    """

    clip_low: Annotated[float, Gt(0), Le(1)] = 1.0
    clip_high: Annotated[float, Gt(0)] = 0.28
    """The weight is at most 1 + this."""

    def surrogate(self, batch: TokenBatch, logprobs_N: Tensor, log_ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        ratio_N = log_ratio_N.detach().exp()
        weight_N = ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight_N * given_advantages(batch) * logprobs_N, weight_N != ratio_N
