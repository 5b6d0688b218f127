"""What all policy-gradient losses share: the ratio to the old policy, KL and importance corrections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt

from treetune.contracts import (
    Advantages,
    Experiment,
    Feature,
    Finding,
    Need,
    SampledAnswers,
    StaleAnswers,
    UseOfAdvantages,
)
from treetune.trainers.objectives.base import (
    RATIO,
    Aggregation,
    Objective,
    TokenBatch,
    check_aggregation,
)
from treetune.trainers.objectives.kl import KlEstimator, kl_estimate

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Objective):
    """``L = Σ w·surrogate(A, ρ) + β·KL``, with ``ρ = exp(log p - log p_old)``.

    The surrogate is the subclass's. `kl_placement` says where β times the estimate of the KL to the
    start model goes:

    * ``loss``: added to the loss, its gradient flowing through the policy's log-probs: as the mean over
      tokens that the policy term is too (`kl_reduction` ``token_mean``, weighted as `aggregation` says),
      or summed over each sequence's tokens and averaged over the minibatch's sequences
      (``sequence_sum``: VinePPO's published runs, where β weighs as much more as answers are long).
      `kl_clamp` bounds each token's estimate from below and above, VinePPO's by 0 and 10; beyond it, no
      gradient flows.
    * ``reward``: taken from each token's reward, before advantages are normalised; a token answers for
      its own penalty and for those behind it (PPO for RLHF, Ouyang et al. 2022; REINFORCE++).
    * ``advantage``: taken from each token's own advantage, after these are normalised.

    `importance_cap` multiplies the policy term by ``min(p_old / p_engine, cap)``: truncated
    importance sampling for engines that sample from slightly other probabilities than the trainer
    computes. None leaves it out; the gap is measured either way. The engine's are of the distribution that
    top-p and top-k have cut, p_old is not: where these cut, the weight is the share that they leave, too.
    ``train/importance`` is the mean of the weights before the cap, ``train/importance_capped`` the share of
    tokens that it cuts.
    `entropy_coef` may have either sign.

    With a `ratio_threshold` a minibatch whose mean ratio is above it has no loss, KL and entropy included;
    its step is taken all the same, with a gradient of 0. VinePPO's published runs have 10, over each rank's
    micro-batch; here the mean is over the whole minibatch, so that the cut changes nothing.
    """

    kl_coef: Annotated[float, Ge(0)] = 0.0
    """β, the weight of the KL to the start model; 0 needs no reference."""
    kl_estimator: KlEstimator = "k3"
    """With d = log p - log p_ref: ``k1`` d, ``k2`` d²/2, ``k3`` exp(-d) - 1 + d."""
    kl_placement: Literal["loss", "reward", "advantage"] = "loss"
    kl_reduction: Literal["token_mean", "sequence_sum"] = "token_mean"
    kl_clamp: tuple[float, float] | None = None
    entropy_coef: float = 0.0
    aggregation: Aggregation = "token"
    """Weighs every token alike (``token``), every sequence alike (``sequence``), or divides each sequence's
    sum by `constant_length` (``constant``)."""
    constant_length: Annotated[int, Gt(0)] | None = None
    importance_cap: Annotated[float, Gt(0)] | None = None
    ratio_threshold: Annotated[float, Gt(1)] | None = None

    measures_kl = True

    @property
    def gives(self) -> tuple[Feature, ...]:
        corrected = () if self.importance_cap is None else (StaleAnswers(),)
        return UseOfAdvantages(), *corrected

    @property
    def needs(self) -> tuple[Need, ...]:
        return (
            *super().needs,
            Need(Advantages(), "it makes tokens of positive advantage more likely"),
            Need(SampledAnswers(), "its gradient is that of what the policy itself samples"),
        )

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.constant_length)
        if self.kl_clamp is not None and self.kl_clamp[0] >= self.kl_clamp[1]:
            raise ValueError(f"kl_clamp {list(self.kl_clamp)} must be [lowest, highest], such as [0, 10]")
        if self.kl_placement != "loss" and (self.kl_clamp or self.kl_reduction != "token_mean"):
            raise ValueError(
                "kl_clamp and kl_reduction are for kl_placement 'loss'; elsewhere there is neither"
            )

    @property
    def needs_reference(self) -> bool:  # type: ignore[override]
        return self.kl_coef > 0

    @property
    def reward_kl_coef(self) -> float:  # type: ignore[override]
        return self.kl_coef if self.kl_placement == "reward" else 0.0

    @property
    def advantage_kl_coef(self) -> float:  # type: ignore[override]
        return self.kl_coef if self.kl_placement == "advantage" else 0.0

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if experiment.restart == "every_iteration":
            yield Finding(
                "a policy gradient is taken where answers were sampled, and restart 'every_iteration' goes"
                " back to the start weights before each",
                "$.restart",
                "set restart to 'never', or choose an objective that imitates, such as 'mle'",
            )

    def remarks(self, experiment: Experiment) -> Iterable[str]:
        sampling = experiment.rollout.sampling
        cuts = sampling is not None and (sampling.top_p < 1 or sampling.top_k > 0)
        if self.importance_cap is not None and cuts:
            assert sampling is not None
            how = f"top_p {sampling.top_p:g}" if sampling.top_p < 1 else f"top_k {sampling.top_k}"
            yield (
                "importance_cap divides the trainer's probabilities by the engine's, which are of what"
                f" {how} leaves of the distribution: where the two agree, a token's weight is the share that"
                " was left where it was sampled, and not 1. Sample with top_p 1 and top_k -1 to correct for"
                " their difference alone"
            )

    def surrogate(self, batch: TokenBatch, logprobs_N: Tensor, log_ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        """What each token adds to the loss before its weight, float32 [N], and whether clipping stopped its
        gradient, bool [N]; `log_ratio_N` is ``log p - log p_old``.
        """
        raise NotImplementedError

    def loss(self, batch: TokenBatch, logprobs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # With a single update per iteration the policy is its own old policy: the ratio is 1 in
        # value and carries the policy gradient.
        old_N = logprobs_N.detach() if batch.old_logprobs_N is None else batch.old_logprobs_N
        log_ratio_N = logprobs_N - old_N
        policy_N, is_clipped_N = self.surrogate(batch, logprobs_N, log_ratio_N)
        if self.importance_cap is not None:
            assert batch.behaviour_logprobs_N is not None, "sampled tokens carry the engine's log-probs"
            importance_N = (old_N - batch.behaviour_logprobs_N).exp()
            policy_N = policy_N * importance_N.clamp(max=self.importance_cap)
        loss = (batch.weights_N * policy_N).sum()
        metrics = {
            "train/policy_loss": loss.detach(),
            "train/clip_fraction": batch.mean(is_clipped_N),
            "train/approx_kl": batch.mean(0.5 * log_ratio_N.detach().square()),
            RATIO: batch.mean(log_ratio_N.detach().exp()),
        }
        if self.importance_cap is not None:
            metrics["train/importance"] = batch.mean(importance_N)
            metrics["train/importance_capped"] = batch.mean(importance_N > self.importance_cap)
        if self.kl_coef > 0 and self.kl_placement == "loss":
            kl_loss = self._kl_loss(batch, logprobs_N)
            metrics["train/kl_loss"] = kl_loss.detach()
            loss = loss + kl_loss
        return loss, metrics

    def _kl_loss(self, batch: TokenBatch, logprobs_N: Tensor) -> Tensor:
        assert batch.ref_logprobs_N is not None, "the trainer scores the reference when asked"
        kl_N = kl_estimate(logprobs_N, batch.ref_logprobs_N, self.kl_estimator)
        if self.kl_clamp is not None:
            kl_N = kl_N.clamp(*self.kl_clamp)
        if self.kl_reduction == "token_mean":
            return self.kl_coef * (batch.weights_N * kl_N).sum()
        return self.kl_coef * batch.sequence_weight * kl_N.sum()


def given_advantages(batch: TokenBatch) -> Tensor:
    assert batch.advantages_N is not None, "the trainer gives every policy gradient its advantages"
    return batch.advantages_N
