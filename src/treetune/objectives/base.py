"""The contract of an objective, the loss that a trainer minimises, token by token or pair by pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Need, SampledAnswers, UseOfAdvantages, UseOfPairs

if TYPE_CHECKING:
    from torch import Tensor


KlEstimator = Literal["k1", "k2", "k3"]


LARGEST_LOG_RATIO = 40.0
"""Beyond e^40 a ratio of probabilities says nothing but "far apart", and soon float32 has no number for
it."""


def ratio_of(log_ratio_N: Tensor) -> Tensor:
    """``exp`` of log ratios of probabilities, at most e^40 and always finite.

    An infinite ratio has an infinite gradient, and where a clip then leaves it out, 0 times infinity is no
    number and takes all weights with it. Below the bound, value and gradient are those of ``exp``, to the
    bit. Above it, the gradient is that at the bound, so that a token that moved too far is still pushed back.
    """
    beyond_N = (log_ratio_N - LARGEST_LOG_RATIO).clamp(min=0).detach()
    return (log_ratio_N - beyond_N).exp()


def kl_estimate(logprobs_N: Tensor, ref_logprobs_N: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimates KL(policy || reference) at each sampled token (J. Schulman, "Approximating KL divergence",
    2020), shape [N], with d = log p - log p_ref:

    k1 = d (unbiased, high variance); k2 = d²/2 (biased, its gradient is that of the KL);
    k3 = exp(-d) - 1 + d (unbiased and never negative).
    """
    difference_N = logprobs_N - ref_logprobs_N
    if estimator == "k1":
        return difference_N
    if estimator == "k2":
        return 0.5 * difference_N.square()
    return ratio_of(-difference_N) - 1 + difference_N


Aggregation = Literal["token", "sequence", "constant"]
"""Weighting by which tokens become one number: every trained token of the minibatch weighs the same, or every
sequence does (mean over sequences of the mean over their tokens), or each sequence's sum is divided by
a constant length before the mean over sequences (Dr. GRPO, Liu et al., arXiv:2503.20783)."""


@dataclass(frozen=True)
class TokenBatch:
    """A micro-batch as an objective sees it: flat float32 tensors over N trained tokens. Where it needs
    whole sequences, they are those of S of them, which have `lengths` each, one sequence after the other.

    `weights_N` carry the aggregation: a sum of weighted terms over all micro-batches and ranks is the
    minibatch's loss however it was cut. Over the minibatch they sum to `weight_sum`, which is 1 where
    the loss is a mean. Dummy micro-batches, which keep ranks in step, have weight 0.
    `sequence_weight` is for terms that are to be summed over a sequence's tokens: one over the
    minibatch's number of sequences, or 0; `pair_weight` is one over its number of pairs, or 0.
    `log_mass_N` is that of the old policy's distributions where sampling cut them (`Nucleus.log_mass`).
    `terms` are the objective's own (`Objective.terms`), each of shape [N].
    """

    weights_N: Tensor
    lengths: tuple[int, ...] = ()
    weight_sum: float = 1.0
    sequence_weight: float = 0.0
    pair_weight: float = 0.0
    advantages_N: Tensor | None = None
    old_logprobs_N: Tensor | None = None
    ref_logprobs_N: Tensor | None = None
    behaviour_logprobs_N: Tensor | None = None
    log_mass_N: Tensor | None = None
    terms: tuple[Tensor, ...] = ()

    def mean(self, values_N: Tensor) -> Tensor:
        """A part of a metric: the mean over the minibatch's tokens, weighted as the loss is."""
        return (self.weights_N * values_N.detach()).sum() / self.weight_sum

    def by_sequence(self, values_N: Tensor) -> Sequence[Tensor]:
        """The values of each sequence, in the tokens' order."""
        assert self.lengths, "an objective that looks at whole sequences says so: needs_whole_sequences"
        return values_N.split(list(self.lengths))


class Objective(Registrable):
    """A loss as a weighted sum over trained tokens, or over pairs of sequences."""

    aggregation: Aggregation = "token"
    constant_length: int | None = None
    """Divisor of each sequence's sum where the aggregation is ``constant``."""
    needs_reference: bool = False
    needs_whole_sequences: bool = False
    """Whether it looks at a sequence's tokens together: then all of its rows run at once, which an
    answer with threads has several of."""
    measures_kl: bool = False
    """Whether the distance from the start model is worth knowing even where the loss doesn't need it."""
    entropy_coef: float = 0.0
    """The trainer subtracts this times the mean entropy at trained tokens, weighted as the loss is.
    Above 0 it keeps the policy undecided, below 0 it makes it surer."""
    kl_coef: float = 0.0
    """Coefficient of the KL to the start model."""
    kl_placement: Literal["loss", "reward", "advantage"] = "loss"
    """Place of the KL: the objective's loss; or, as a penalty that the trainer takes before the first step,
    each token's reward or its advantage."""
    kl_estimator: KlEstimator = "k3"
    importance_cap: float | None = None
    """Bound of a correction for the engine's probabilities (None: there is no correction)."""
    has_terms: bool = False
    ratio_threshold: float | None = None
    """Bound of a minibatch's mean ratio to the old policy, above which it has no loss (None: there is
    none)."""

    @property
    @final
    def needs_advantages(self) -> bool:
        return UseOfAdvantages() in self.gives

    @property
    @final
    def needs_pairs(self) -> bool:
        """Returns whether answers are compared: `selection` makes pairs then, which no cut separates."""
        return UseOfPairs() in self.gives

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        if self.importance_cap is None:
            return ()
        remedy = "set the objective's importance_cap to null, or choose a rollout that samples"
        return (Need(SampledAnswers(), "importance_cap compares with the engine's log-probs", remedy),)

    def sequence_weights(self, lengths: Sequence[int], scores: Sequence[float]) -> list[float]:
        """The weight in the loss of a token of each sequence of a minibatch, given the sequences' numbers of
        trained tokens and the grader's scores. Sequences of weight 0 are not run.
        """
        if self.aggregation == "token":
            return [1 / sum(lengths)] * len(lengths)
        if self.aggregation == "sequence":
            return [1 / (len(lengths) * length) for length in lengths]
        assert self.constant_length is not None, "checked when the objective is built"
        return [1 / (len(lengths) * self.constant_length)] * len(lengths)

    def terms(self, logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, ...]:
        """Everything that the loss needs of whole next-token distributions, each of shape [C], with gradient.

        Called where `has_terms`, for some positions at a time; logits are at the sampling temperature.
        """
        raise NotImplementedError(f"{type(self).__name__} has no terms")

    def loss(self, batch: TokenBatch, logprobs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's part of the minibatch's loss, and of its metrics: scalars.

        `logprobs_N` are the policy's, float32 of shape [N], with gradient. Both results are weighted sums:
        parts of all micro-batches and ranks add up to the minibatch's loss and means. Metrics carry no
        gradient.
        """
        raise NotImplementedError


RATIO = "train/ratio"
"""Metric: the mean of a minibatch's ratios to the old policy, weighted as the loss is."""

LOSSES = ("train/loss", "train/policy_loss", "train/kl_loss")

SKIPPED_BY_RATIO = "train/skipped_by_ratio"
"""Metric: the share of an iteration's steps without a loss, where there is a `ratio_threshold`."""


def without_skipped(objective: Objective, metrics: Mapping[str, float]) -> dict[str, float]:
    """Sets the losses among a whole minibatch's metrics to 0 where its ratio is too large for a loss, and
    says whether it is.

    Metrics of the whole minibatch, whoever computed which part of it, decide, and the cut does not. A ratio
    that is no number is too large.
    """
    if objective.ratio_threshold is None:
        return dict(metrics)
    skipped = not metrics[RATIO] <= objective.ratio_threshold
    losses = {name: 0.0 for name in LOSSES if name in metrics} if skipped else {}
    return {**metrics, **losses, SKIPPED_BY_RATIO: float(skipped)}


def check_aggregation(aggregation: Aggregation, constant_length: int | None) -> None:
    """Raises ValueError for a constant length without its aggregation, and the other way round."""
    if (aggregation == "constant") != (constant_length is not None):
        raise ValueError(
            "constant_length and aggregation 'constant' belong together: give both, or neither; the usual"
            " length is the longest that an answer may be"
        )
