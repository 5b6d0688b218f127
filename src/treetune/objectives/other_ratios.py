"""Policy gradients that bound or average ratios differently from PPO: CISPO, GSPO, GMPO, SAPO and DPPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

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

    The ratio is a bounded weight without gradient (sg: stop gradient), so every token keeps a gradient. With
    PPO's clip, tokens whose probability has changed much have none, and rare words are often among them.
    """

    clip_low: Annotated[float, Gt(0), Le(1)] = 1.0
    """The weight is at least 1 - this. With 1, it has no lower bound, as in the paper."""
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
    ``max(-A·s, -A·clip(s, 1-clip_low, 1+clip_high))`` (eq. 5 and 7). The loss is computed as the paper's
    GSPO-token (eq. 13 and 14): ``s·p/sg[p]`` takes the place of s, where p is the token's probability, and
    sg[p] the same number without gradient. The value is that of s. If all tokens of an answer have the same
    advantage, the gradient of the answer's loss is that of s, too. The form also works for credit that gives
    each step its own advantage.

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
        # This is the log of the answer's ratio s. The last two terms cancel in the value, and give each token
        # the gradient of its own log-prob.
        log_ratio_of_answer_N = torch.cat(means) + logprobs_N - logprobs_N.detach()
        ratio_N = ratio_of(log_ratio_of_answer_N)
        unclipped_N = -advantages_N * ratio_N
        clipped_N = -advantages_N * ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        return unclipped_N.maximum(clipped_N), clipped_N > unclipped_N


@Objective.register("gmpo")
@dataclass(frozen=True, kw_only=True)
class GeometricMean(PolicyGradient):
    """GMPO (Zhao et al. 2025, arXiv:2507.20673, as in verl's ``geo_mean``): ``-A·g``, where g is the
    geometric mean of an answer's token ratios, each of which is clipped before the mean.

    Log ratios x are clipped: to ``min(x, clip_high)`` where A > 0, and to ``max(x, -clip_low)`` where A < 0.
    GSPO clips after the mean, so that all tokens of an answer lose their gradient together. The range is much
    wider than PPO's, since one token moves the mean little.

    The loss is computed token by token, as GSPO's is: ``g·exp(x - sg[x])`` takes the place of g, where x is
    the clipped log ratio and sg[x] the same number without gradient. Value and gradient are those of the
    paper if all tokens of an answer have the same advantage.
    """

    clip_low: Annotated[float, Gt(0)] = 0.4
    """For A < 0, the gradient is 0 if the log ratio is below minus this."""
    clip_high: Annotated[float, Gt(0)] = 0.4
    """For A > 0, the gradient is 0 if the log ratio is above this."""
    aggregation: Aggregation = "sequence"

    @property
    @override
    def needs_whole_sequences(self) -> bool:  # type: ignore[override]
        return True

    @override
    def surrogate(self, batch: TokenBatch, logprobs_N: Tensor, log_ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        advantages_N = advantages_of(batch)
        # A log ratio is clipped only on the side to which its advantage pushes it.
        bounded_above_N = log_ratio_N.clamp(max=self.clip_high)
        bounded_below_N = log_ratio_N.clamp(min=-self.clip_low)
        clipped_N = bounded_above_N.where(advantages_N > 0, bounded_below_N)
        means = []
        for clipped_T in batch.by_sequence(clipped_N.detach()):
            means.append(clipped_T.mean().expand(len(clipped_T)))
        # This is the log of the geometric mean g of the answer's ratios. The last two terms cancel in the
        # value, and give each token the gradient of its own clipped log ratio.
        log_mean_N = torch.cat(means) + clipped_N - clipped_N.detach()
        return -advantages_N * ratio_of(log_mean_N), clipped_N != log_ratio_N


@Objective.register("sapo")
@dataclass(frozen=True, kw_only=True)
class SoftAdaptive(PolicyGradient):
    """SAPO (Gao et al. 2025, arXiv:2511.20347, as in verl's ``sapo``): ``-A·(4/τ)·σ(τ·(ρ - 1))``, a soft gate
    in place of a clip.

    The gradient of a token's loss is that of ``-A·ρ`` times ``4·p·(1 - p)``, with ``p = σ(τ·(ρ - 1))``. This
    factor is 1 at ρ = 1, and falls towards 0 on both sides. τ is larger for negative advantages: their
    gradients raise the many other tokens of the vocabulary, and are less stable.
    """

    tau_positive: Annotated[float, Gt(0)] = 1.0
    """τ where A > 0."""
    tau_negative: Annotated[float, Gt(0)] = 1.05
    """τ where A ≤ 0."""
    aggregation: Aggregation = "sequence"

    @override
    def surrogate(self, batch: TokenBatch, logprobs_N: Tensor, log_ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        advantages_N = advantages_of(batch)
        positive, negative = advantages_N.new_tensor([self.tau_positive, self.tau_negative])
        tau_N = torch.where(advantages_N > 0, positive, negative)
        # With the factor 4 / τ, the gradient at a ratio of 1 is that of the ratio itself.
        gate_N = 4 / tau_N * torch.sigmoid(tau_N * (ratio_of(log_ratio_N) - 1))
        is_clipped_N = torch.zeros_like(gate_N, dtype=torch.bool)  # the gate stops no gradient entirely
        return -advantages_N * gate_N, is_clipped_N


@Objective.register("dppo")
@dataclass(frozen=True, kw_only=True)
class DivergenceBounded(PolicyGradient):
    """DPPO (Qi et al. 2026, arXiv:2602.04879, as in verl's ``dppo_tv`` and ``dppo_kl``):
    ``-sg[min(ρ, largest_ratio)]·A·log p`` (sg: stop gradient). It is 0 for tokens whose probability has moved
    too far in the direction of A.

    How far it has moved is a distance between two distributions with two outcomes each, this token or any
    other. The token has the probability q under the old policy and p under the policy:

    ==============  ====================================================
    ``tv``          |p - q|, the total variation
    ``kl``          q·log(q/p) + (1 - q)·log((1 - q)/(1 - p)), the KL
    ==============  ====================================================

    A ratio is a poor measure of this distance. A rare token that becomes ten times likelier hardly changes
    the distribution, but PPO clips it. A token whose probability falls from 0.99 to 0.8 changes the
    distribution much, but PPO's range of 0.2 doesn't clip it.
    """

    divergence: Literal["tv", "kl"] = "tv"
    """The formula of the distance between the old policy and the policy, see above."""
    limit_low: Annotated[float, Gt(0)] = 0.15
    """For A < 0, the gradient is 0 if the token has become less likely and its distance exceeds this. verl's
    example has 0.15 for ``tv`` and 0.05 for ``kl``."""
    limit_high: Annotated[float, Gt(0)] = 0.15
    """For A > 0, the gradient is 0 if the token has become likelier and its distance exceeds this."""
    largest_ratio: Annotated[float, Gt(1)] = 20.0
    """The weight of a token is at most this."""

    @override
    def surrogate(self, batch: TokenBatch, logprobs_N: Tensor, log_ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        advantages_N = advantages_of(batch)
        p_N = logprobs_N.detach().exp()  # the token's probability under the policy
        q_N = (logprobs_N - log_ratio_N).detach().exp()  # the same under the old policy
        if self.divergence == "tv":
            distance_N = (p_N - q_N).abs()
        else:
            # The KL of two distributions with two outcomes, this token or any other. 1e-8 is added, since a
            # probability of 1 would give log 0.
            log_ratio_of_others_N = ((1 - q_N + 1e-8) / (1 - p_N + 1e-8)).log()
            distance_N = -q_N * log_ratio_N.detach() + (1 - q_N) * log_ratio_of_others_N
        is_too_likely_N = (p_N > q_N) & (distance_N > self.limit_high)
        is_too_unlikely_N = (p_N < q_N) & (distance_N > self.limit_low)
        # The mask has the tokens that have moved too far in the direction of their advantage.
        is_masked_N = torch.where(advantages_N > 0, is_too_likely_N, is_too_unlikely_N)
        weight_N = ratio_of(log_ratio_N.detach()).clamp(max=self.largest_ratio)
        weight_N = weight_N.masked_fill(is_masked_N, 0.0)
        return -weight_N * advantages_N * logprobs_N, is_masked_N
