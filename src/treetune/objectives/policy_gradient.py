"""Policy gradients: their common loss, and the surrogate of PPO.

All policy gradients share `PolicyGradient.loss`. They differ in `surrogate`, the loss of a single token. To
add one, subclass `PolicyGradient`, implement `surrogate`, and register the class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Lt
from typing_extensions import override

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
from treetune.objectives.base import (
    Aggregation,
    KlEstimator,
    KlPenalty,
    KlPlacement,
    Objective,
    TokenBatch,
    check_aggregation,
    kl_estimate,
    needs_of_importance_cap,
    ratio_of,
)

if TYPE_CHECKING:
    from torch import Tensor

RATIO_METRIC = "train/ratio"
"""The name of a metric: the mean ratio to the old policy over a minibatch, with the weights of the loss."""


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Objective):
    """The loss ``L = Σ w·surrogate(A, ρ) + β·KL``, with the ratio ``ρ = exp(log p - log p_old)``, the weights
    w of `aggregation`, and the surrogate of the subclass."""

    kl_coef: Annotated[float, Ge(0)] = 0.0
    """β, the weight of the KL to the start model. With 0, no reference model is needed."""
    kl_estimator: KlEstimator = "k3"
    """With d = log p - log p_ref: ``k1`` d, ``k2`` d²/2, ``k3`` exp(-d) - 1 + d."""
    kl_placement: KlPlacement = "loss"
    """The place of the KL term, which is β times the estimate. ``loss``: added to the loss, with the gradient
    of the policy's log-probs. ``reward``: subtracted from each token's reward, before advantages are
    normalised, so a token is weighted by its own penalty and those of later tokens (PPO for RLHF, Ouyang et
    al. 2022; REINFORCE++). ``advantage``: subtracted from each token's advantage, after normalisation."""
    kl_reduction: Literal["token_mean", "sequence_sum"] = "token_mean"
    """How the KL term in the loss is averaged. ``token_mean``: over tokens, with the weights of
    `aggregation`, as the policy term is. ``sequence_sum``: its sum over each sequence's tokens is averaged
    over the minibatch's sequences, as in VinePPO's published runs. The KL term is then larger by a factor of
    about the number of tokens of an answer."""
    kl_clamp: tuple[float, float] | None = None
    """The smallest and the largest estimate of a token's KL in the loss, 0 and 10 for VinePPO. An estimate
    outside these bounds is replaced by the bound, and has no gradient."""
    entropy_coef: float = 0.0
    """The weight of the mean entropy. The weighted entropy is subtracted from the loss; the weight may be
    negative."""
    aggregation: Aggregation = "token"
    """Weighs every token alike (``token``), every sequence alike (``sequence``), or divides each sequence's
    sum by `constant_length` (``constant``)."""
    constant_length: Annotated[int, Gt(0)] | None = None
    """The divisor of each sequence's sum, with the aggregation ``constant``; null for the others."""
    importance_cap: Annotated[float, Gt(0)] | None = None
    """Multiplies the policy term by ``min(k, cap)``, with ``k = p_old / p_engine``: truncated importance
    sampling, for engines whose probabilities differ slightly from those that the trainer computes. If top-p
    or top-k cut the engine's distribution, p_old is cut in the same way, so k is 1 where engine and trainer
    agree. null: no such factor; the difference is measured either way. ``train/importance`` is the mean of k,
    ``train/importance_capped`` the share of tokens that the cap cuts."""
    importance_band: tuple[float, float] | None = None
    """Multiplies the policy term by k if k is between these two numbers, and by 0 if it isn't: IcePop
    (Ring-1T, arXiv:2510.18855; INTELLECT-3, arXiv:2512.16144, eq. 1). Example: 0.5 and 5."""
    importance_sequence: tuple[float, float] | None = None
    """Multiplies the policy term by 0 in sequences whose geometric mean of k isn't between these two numbers
    (geometric rejection, as in verl's rollout correction). It is the mean and not the product of k, since the
    size of a product depends on the number of tokens. ``train/importance_masked`` is the share of tokens that
    this and `importance_band` leave out."""
    ratio_threshold: Annotated[float, Gt(1)] | None = None
    """A minibatch whose mean ratio is above this has the loss 0, with KL and entropy. Its step is taken
    nevertheless, with a gradient of 0. VinePPO's published runs have 10, compared with the mean of each
    rank's micro-batch. Here it is the mean of the whole minibatch, so it doesn't matter how the minibatch is
    cut."""

    measures_kl = True

    @property
    @override
    def needs_whole_sequences(self) -> bool:  # type: ignore[override]
        return self.importance_sequence is not None

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        # The factor p_old / p_engine also corrects for answers that other weights of the policy have sampled.
        # `importance_sequence` has no such factor: it only leaves out sequences.
        has_weights = self.importance_cap is not None or self.importance_band is not None
        return (UseOfAdvantages(), StaleAnswers()) if has_weights else (UseOfAdvantages(),)

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (
            *needs_of_importance_cap(self.importance_cap),
            Need(Advantages(), "it makes tokens of positive advantage more likely"),
            Need(SampledAnswers(), "its gradient is that of what the policy itself samples"),
        )

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.constant_length)
        if self.kl_clamp is not None and self.kl_clamp[0] >= self.kl_clamp[1]:
            raise ValueError(f"kl_clamp {list(self.kl_clamp)} must be [lowest, highest], such as [0, 10]")
        for name in ("importance_band", "importance_sequence"):
            bounds = getattr(self, name)
            if bounds is not None and not 0 <= bounds[0] < 1 < bounds[1]:
                raise ValueError(f"{name} {list(bounds)} must be [below 1, above 1], such as [0.5, 5]")
        if self.importance_cap is not None and self.importance_band is not None:
            raise ValueError("importance_cap and importance_band both weigh tokens by the ratio: give one")
        if self.kl_placement != "loss" and (self.kl_clamp or self.kl_reduction != "token_mean"):
            raise ValueError(
                "kl_clamp and kl_reduction are for kl_placement 'loss'; elsewhere there is neither"
            )

    @property
    @override
    def needs_reference(self) -> bool:  # type: ignore[override]
        return self.kl_coef > 0

    @property
    @override
    def kl_penalty(self) -> KlPenalty | None:
        if self.kl_coef == 0 or self.kl_placement == "loss":
            return None
        return KlPenalty(self.kl_coef, self.kl_placement, self.kl_estimator)

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if experiment.restart == "every_iteration":
            yield Finding(
                "a policy gradient needs answers of the weights that are trained, and restart"
                " 'every_iteration' trains the start weights instead",
                "$.restart",
                "set restart to 'never', or choose an objective that imitates, such as 'mle'",
            )

    def surrogate(self, batch: TokenBatch, logprobs_N: Tensor, log_ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the loss of each token, without its weight.

        Args:
            batch: The micro-batch, with its advantages.
            logprobs_N: ``log p`` of the policy, with gradient.
            log_ratio_N: ``log p - log p_old``, with gradient.

        Returns:
            The loss of each token, float32 [N], and whether clipping stopped its gradient, bool [N].
        """
        raise NotImplementedError

    @override
    def loss(self, batch: TokenBatch, logprobs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # Without old log-probs, the iteration has only one step, in which the policy is still the old policy.
        # The ratio is then 1, and its gradient is that of log p: the plain policy gradient.
        old_logprobs_N = logprobs_N.detach() if batch.old_logprobs_N is None else batch.old_logprobs_N
        log_ratio_N = logprobs_N - old_logprobs_N
        surrogate_N, is_clipped_N = self.surrogate(batch, logprobs_N, log_ratio_N)
        correction_N, correction_metrics = self.engine_weights(batch, old_logprobs_N)
        if correction_N is not None:
            surrogate_N = surrogate_N * correction_N
        loss = (batch.weights_N * surrogate_N).sum()
        metrics = {
            "train/policy_loss": loss.detach(),
            "train/clip_fraction": batch.mean(is_clipped_N),
            "train/approx_kl": batch.mean(0.5 * log_ratio_N.detach().square()),
            RATIO_METRIC: batch.mean(ratio_of(log_ratio_N.detach())),
            **correction_metrics,
        }
        # With the other placements, the trainer has subtracted the KL from rewards or advantages already.
        if self.kl_coef > 0 and self.kl_placement == "loss":
            assert batch.ref_logprobs_N is not None, "the trainer scores the reference when asked"
            kl_N = kl_estimate(logprobs_N, batch.ref_logprobs_N, self.kl_estimator)
            if self.kl_clamp is not None:
                kl_N = kl_N.clamp(*self.kl_clamp)
            if self.kl_reduction == "token_mean":
                kl_loss = self.kl_coef * (batch.weights_N * kl_N).sum()
            else:  # "sequence_sum"; `sequence_weight` is 1 / the number of the minibatch's sequences
                kl_loss = self.kl_coef * batch.sequence_weight * kl_N.sum()
            metrics["train/kl_loss"] = kl_loss.detach()
            loss = loss + kl_loss
        return loss, metrics

    def engine_weights(
        self, batch: TokenBatch, old_logprobs_N: Tensor
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Computes the factors that correct for the engine's probabilities, from ``k = p_old / p_engine``.

        Args:
            batch: The micro-batch, with the engine's log-probs.
            old_logprobs_N: ``log p_old``.

        Returns:
            The factors, float32 [N], or None if no correction is configured; and metrics of k.
        """
        import torch

        cap, band, sequence_band = self.importance_cap, self.importance_band, self.importance_sequence
        if cap is None and band is None and sequence_band is None:
            return None, {}
        assert batch.behaviour_logprobs_N is not None, "sampled tokens carry the engine's log-probs"
        log_k_N = old_logprobs_N - batch.behaviour_logprobs_N
        if batch.log_mass_N is not None:
            # The engine's log-probs are those of a distribution that top-p and top-k have cut. So p_old is
            # cut in the same way: it is divided by the mass that remains.
            log_k_N = log_k_N - batch.log_mass_N
        k_N = ratio_of(log_k_N)
        metrics = {"train/importance": batch.mean(k_N)}
        if cap is not None:
            weights_N = k_N.clamp(max=cap)
            metrics["train/importance_capped"] = batch.mean(k_N > cap)
        elif band is not None:
            weights_N = k_N
        else:  # k only decides which sequences are left out
            weights_N = torch.ones_like(k_N)
        is_masked_N = torch.zeros_like(k_N, dtype=torch.bool)
        if band is not None:
            is_masked_N = (k_N < band[0]) | (k_N > band[1])
        if sequence_band is not None:
            # The geometric mean of k over each sequence, repeated at each token of the sequence.
            means = [log_k_T.mean().exp().expand(len(log_k_T)) for log_k_T in batch.by_sequence(log_k_N)]
            mean_k_N = torch.cat(means)
            is_masked_N = is_masked_N | (mean_k_N < sequence_band[0]) | (mean_k_N > sequence_band[1])
        if band is not None or sequence_band is not None:
            weights_N = weights_N.masked_fill(is_masked_N, 0.0)
            metrics["train/importance_masked"] = batch.mean(is_masked_N)
        return weights_N, metrics


def advantages_of(batch: TokenBatch) -> Tensor:
    """Returns the advantages of a batch, which a policy gradient always has."""
    assert batch.advantages_N is not None, "the trainer gives every policy gradient its advantages"
    return batch.advantages_N


LOSS_METRICS = ("train/loss", "train/policy_loss", "train/kl_loss")
"""The metrics that are losses. They are 0 in a step whose loss `ratio_threshold` dropped."""

SKIPPED_BY_RATIO = "train/skipped_by_ratio"
"""The name of a metric: the share of an iteration's steps whose loss `ratio_threshold` dropped."""


def without_skipped(objective: Objective, metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of a step, with losses of 0 if its mean ratio exceeds the `ratio_threshold`.

    Args:
        objective: The objective, which may have a `ratio_threshold`.
        metrics: The metrics of the whole minibatch. A micro-batch's own would make the result depend on the
            size of micro-batches.
    """
    if not isinstance(objective, PolicyGradient) or objective.ratio_threshold is None:
        return dict(metrics)
    # Every comparison with NaN is false, so with this `not` a ratio of NaN counts as too large.
    is_skipped = not metrics[RATIO_METRIC] <= objective.ratio_threshold
    step_metrics = {**metrics, SKIPPED_BY_RATIO: float(is_skipped)}
    if is_skipped:
        step_metrics |= {name: 0.0 for name in LOSS_METRICS if name in metrics}
    return step_metrics


@Objective.register("ppo")
@dataclass(frozen=True, kw_only=True)
class ClippedPolicyGradient(PolicyGradient):
    """PPO: the loss ``max(-A·ρ, -A·clip(ρ, 1-clip_low, 1+clip_high))`` for each token (Schulman et al. 2017,
    arXiv:1707.06347, eq. 7), with separate clip ranges below and above (DAPO, arXiv:2503.14476, eq. 10).
    """

    clip_low: Annotated[float, Gt(0), Lt(1)] = 0.2
    """For A < 0, the gradient is 0 if the ratio is below 1 - this."""
    clip_high: Annotated[float, Gt(0)] = 0.2
    """For A > 0, the gradient is 0 if the ratio is above 1 + this."""
    dual_clip: Annotated[float, Gt(1)] | None = None
    """c: for A < 0, the loss of a token is at most ``-A·c`` (Ye et al. 2020, arXiv:1912.09729, eq. 5, with c
    = 3). Without this bound, a token with a ratio far above 1 has an unbounded loss. null: there is no
    bound."""

    @override
    def surrogate(self, batch: TokenBatch, logprobs_N: Tensor, log_ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        advantages_N = advantages_of(batch)
        ratio_N = ratio_of(log_ratio_N)
        unclipped_N = -advantages_N * ratio_N
        clipped_N = -advantages_N * ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        surrogate_N = unclipped_N.maximum(clipped_N)
        is_clipped_N = clipped_N > unclipped_N
        if self.dual_clip is not None:
            # The bound limits the loss of tokens with a negative advantage. For other tokens it is the loss
            # itself, so it has no effect.
            bound_N = (-self.dual_clip * advantages_N).where(advantages_N < 0, surrogate_N)
            is_clipped_N = is_clipped_N | (surrogate_N > bound_N)
            surrogate_N = surrogate_N.minimum(bound_N)
        return surrogate_N, is_clipped_N
