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

    The ratio is a bounded weight without gradient (sg), so every token keeps a gradient. With PPO's clip,
    tokens whose probability has moved far have none, and rare words are often among them. With `clip_low` 1,
    the lower side has no bound, as in the paper.
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
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): PPO's loss with one ratio for each answer.

    The ratio of answer y is ``s = (p(y)/p_old(y))^(1/|y|)``, and each token's term is
    ``max(-A·s, -A·clip(s, 1-clip_low, 1+clip_high))`` (eq. 5 and 7). It is computed as the paper's GSPO-token
    (eq. 13 and 14), with ``s·p/sg[p]`` for s, where p is the token's probability, and sg[p] the same number
    without gradient. This has the same value. It has the same gradient if all tokens of an answer have the
    same advantage, and also works for credit that gives each step its own.

    As a mean over an answer, s is much closer to 1 than a token's ratio, so the clip ranges are much smaller
    than PPO's.
    """

    clip_low: Annotated[float, Gt(0), Lt(1)] = 3e-4
    """For A < 0, the gradient is 0 if the ratio is below 1 - this."""
    clip_high: Annotated[float, Gt(0)] = 4e-4
    """For A > 0, the gradient is 0 if the ratio is above 1 + this."""
    aggregation: Aggregation = "sequence"

    @property
    @override
    def needs_whole_sequences(self) -> bool:  # type: ignore[override]
        return True

    @override
    def surrogate(self, batch: TokenBatch, logprobs_N: Tensor, log_ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        advantages_N = advantages_of(batch)
        means = []
        for log_ratio_T in batch.by_sequence(log_ratio_N.detach()):
            means.append(log_ratio_T.mean().expand(len(log_ratio_T)))
        # log s, with the gradient of the token's log-prob: the last two terms cancel in the value.
        log_ratio_of_answer_N = torch.cat(means) + logprobs_N - logprobs_N.detach()
        ratio_N = ratio_of(log_ratio_of_answer_N)
        unclipped_N = -advantages_N * ratio_N
        clipped_N = -advantages_N * ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        return unclipped_N.maximum(clipped_N), clipped_N > unclipped_N
