"""The clipped policy gradient: PPO's policy loss, which VinePPO, GRPO and RLOO share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Lt

from treetune.trainers.objectives.base import Aggregation, Objective, TokenBatch
from treetune.trainers.objectives.kl import KlEstimator, kl_estimate

if TYPE_CHECKING:
    from torch import Tensor


@Objective.register("ppo")
@dataclass(frozen=True, kw_only=True)
class ClippedPolicyGradient(Objective):
    """Schulman et al. 2017, eq. 7, with separate clip ranges below and above (DAPO, eq. 10):

    ``L = mean[ max(-A·ρ, -A·clip(ρ, 1-clip_low, 1+clip_high)) ] + β·KL - entropy_coef·mean[H]``
    with ``ρ = exp(log p - log p_old)``.

    `kl_placement` ``loss`` adds β times the estimator to the loss, its gradient flowing through the
    policy's log-probs: as the mean over tokens that the policy term is too (`kl_reduction`
    ``token_mean``, weighted as `aggregation` says), or summed over each sequence's tokens and
    averaged over the minibatch's sequences (``sequence_sum``: VinePPO's published runs, where β weighs
    as much more as answers are long). `kl_clamp` bounds each token's estimate from below and above,
    VinePPO's by 0 and 10; beyond it, no gradient flows. ``reward`` takes β times the estimate from
    each token's reward instead, before advantages are normalised.
    `importance_cap` multiplies the policy term by ``min(p_old / p_engine, cap)``: truncated
    importance sampling for engines that sample from slightly other probabilities than the trainer
    computes. None leaves it out; the gap is measured either way.
    """

    clip_low: Annotated[float, Gt(0), Lt(1)] = 0.2
    clip_high: Annotated[float, Gt(0)] = 0.2
    kl_coef: Annotated[float, Ge(0)] = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_placement: Literal["loss", "reward"] = "loss"
    kl_reduction: Literal["token_mean", "sequence_sum"] = "token_mean"
    kl_clamp: tuple[float, float] | None = None
    entropy_coef: Annotated[float, Ge(0)] = 0.0
    aggregation: Aggregation = "token"
    importance_cap: Annotated[float, Gt(0)] | None = None

    needs_advantages = True

    def __post_init__(self) -> None:
        if self.kl_clamp is not None and self.kl_clamp[0] >= self.kl_clamp[1]:
            raise ValueError(f"kl_clamp {list(self.kl_clamp)} must be [lowest, highest], such as [0, 10]")
        if self.kl_placement == "reward" and (self.kl_clamp or self.kl_reduction != "token_mean"):
            raise ValueError(
                "kl_clamp and kl_reduction are for kl_placement 'loss'; in the reward there is none"
            )

    @property
    def needs_reference(self) -> bool:  # type: ignore[override]
        return self.kl_coef > 0

    @property
    def entropy_needs_gradient(self) -> bool:  # type: ignore[override]
        return self.entropy_coef > 0

    @property
    def reward_kl_coef(self) -> float:  # type: ignore[override]
        return self.kl_coef if self.kl_placement == "reward" else 0.0

    def loss(
        self, batch: TokenBatch, logprobs_N: Tensor, entropy_N: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.advantages_N is not None, "the trainer gives every ppo batch its advantages"
        weights_N, advantages_N = batch.weights_N, batch.advantages_N
        # With a single update per iteration the policy is its own old policy: the ratio is 1 in
        # value and carries the policy gradient.
        old_N = logprobs_N.detach() if batch.old_logprobs_N is None else batch.old_logprobs_N
        log_ratio_N = logprobs_N - old_N
        ratio_N = log_ratio_N.exp()
        clipped_N = ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        unclipped_term_N = -advantages_N * ratio_N
        clipped_term_N = -advantages_N * clipped_N
        policy_N = unclipped_term_N.maximum(clipped_term_N)
        if self.importance_cap is not None:
            assert batch.behaviour_logprobs_N is not None, "sampled tokens carry the engine's log-probs"
            policy_N = policy_N * (old_N - batch.behaviour_logprobs_N).exp().clamp(max=self.importance_cap)
        policy_loss = (weights_N * policy_N).sum()
        metrics = {
            "train/policy_loss": policy_loss.detach(),
            "train/clip_fraction": (weights_N * (clipped_term_N > unclipped_term_N)).sum(),
            "train/approx_kl": (weights_N * 0.5 * log_ratio_N.detach().square()).sum(),
            "train/ratio": (weights_N * ratio_N.detach()).sum(),
        }
        loss = policy_loss
        if self.kl_coef > 0 and self.kl_placement == "loss":
            assert batch.reference_logprobs_N is not None, "the trainer scores the reference when asked"
            kl_N = kl_estimate(logprobs_N, batch.reference_logprobs_N, self.kl_estimator)
            if self.kl_clamp is not None:
                kl_N = kl_N.clamp(*self.kl_clamp)
            if self.kl_reduction == "token_mean":
                kl_loss = self.kl_coef * (weights_N * kl_N).sum()
            else:
                kl_loss = self.kl_coef * batch.sequence_weight * kl_N.sum()
            metrics["train/kl_loss"] = kl_loss.detach()
            loss = loss + kl_loss
        if self.entropy_coef > 0:
            loss = loss - self.entropy_coef * (weights_N * entropy_N).sum()
        return loss, metrics
