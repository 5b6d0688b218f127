"""Policy gradients with other ratios than PPO's: CISPO and GSPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Le, Lt
from typing_extensions import override

from treetune.objectives.base import Aggregation, Objective, TokenBatch, ratio_of
from treetune.objectives.policy_gradient import PolicyGradient, advantages_of

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

    @override
    def surrogate(self, batch: TokenBatch, logprobs_N: Tensor, log_ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        ratio_N = ratio_of(log_ratio_N.detach())
        weight_N = ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight_N * advantages_of(batch) * logprobs_N, weight_N != ratio_N


@Objective.register("gspo")
@dataclass(frozen=True, kw_only=True)
class SequencePolicyGradient(PolicyGradient):
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): the ratio of an answer is ``s = (p(y)/p_old(y))^(1/|y|)``,
    and a token's term ``max(-A·s, -A·clip(s, 1-clip_low, 1+clip_high))`` (eq. 5 and 7).

    Written token by token as the paper's GSPO-token (eq. 13 and 14), ``s·p/sg[p]``, which has the same
    value and, where an answer's tokens share their advantage, the same gradient; so credit by steps can
    be used as well. The mean over an answer lies so near 1 that its clip ranges are of another order
    than PPO's.
    """

    clip_low: Annotated[float, Gt(0), Lt(1)] = 3e-4
    """The ratio's gradient ends below 1 - this."""
    clip_high: Annotated[float, Gt(0)] = 4e-4
    """The ratio's gradient ends above 1 + this."""
    aggregation: Aggregation = "sequence"

    @property
    @override
    def needs_whole_sequences(self) -> bool:  # type: ignore[override]
        return True

    @override
    def surrogate(self, batch: TokenBatch, logprobs_N: Tensor, log_ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        advantages_N = advantages_of(batch)
        by_sequence = batch.by_sequence(log_ratio_N.detach())
        mean_N = torch.cat([part_N.mean().expand(len(part_N)) for part_N in by_sequence])
        ratio_N = ratio_of(mean_N + logprobs_N - logprobs_N.detach())
        unclipped_N = -advantages_N * ratio_N
        clipped_N = -advantages_N * ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        return unclipped_N.maximum(clipped_N), clipped_N > unclipped_N
