"""Objectives: the losses that a trainer minimises, over tokens or over pairs of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from treetune.config.registrable import Registrable
from treetune.contracts import Feature, Need, SampledAnswers, UseOfAdvantages, UseOfPairs

if TYPE_CHECKING:
    from torch import Tensor


KlEstimator = Literal["k1", "k2", "k3"]
"""The formulas of `kl_estimate`."""


LARGEST_LOG_RATIO = 40.0
"""The largest log ratio that `ratio_of` takes as it is. ``e^40`` is far beyond every sensible ratio, and
float32 overflows at about ``e^88``."""


def ratio_of(log_ratio_N: Tensor) -> Tensor:
    """Returns ``exp`` of log ratios of probabilities, bounded by e^40, so it is finite for every finite log
    ratio.

    An infinite ratio has an infinite gradient. If a clip then multiplies this gradient by 0, the product is
    NaN, and the step makes all weights of the model NaN. Below the bound, value and gradient are exactly
    those of ``exp``. Above the bound, value and gradient are those at the bound, so a token that moved too
    far is still pushed back.
    """
    excess_N = (log_ratio_N - LARGEST_LOG_RATIO).clamp(min=0).detach()
    return (log_ratio_N - excess_N).exp()


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
"""The way in which the losses of a minibatch's tokens are put together.

``token``: the mean over all tokens. ``sequence``: the mean over each sequence's tokens, and then over the
sequences. ``constant``: the sum over each sequence's tokens, divided by a constant length, and then the mean
over the sequences (Dr. GRPO, Liu et al., arXiv:2503.20783).
"""


@dataclass(frozen=True)
class TokenBatch:
    """A micro-batch as an objective sees it: flat float32 tensors over its N trained tokens.

    A minibatch is the set of answers of one optimizer step. It is cut into micro-batches over all ranks. The
    sum of the weighted losses of all these micro-batches is the minibatch's loss, however it was cut.

    Example: two sequences with 2 and 1 trained tokens, in a minibatch of 4 sequences with 10 tokens, with the
    aggregation ``token``::

        TokenBatch(weights_N=[0.1, 0.1, 0.1], lengths=(2, 1), sequence_weight=0.25, advantages_N=[1, 1, -1])
    """

    weights_N: Tensor
    """The weight of each token in the loss, from `Objective.sequence_weights`. All are 0 in a dummy, a
    micro-batch that a rank computes only because the other ranks still compute one."""
    lengths: tuple[int, ...] = ()
    """The number of trained tokens of each sequence, if the objective needs whole sequences; otherwise
    empty."""
    weight_sum: float = 1.0
    """The sum of the weights of all tokens of the minibatch: 1 with the aggregations ``token`` and
    ``sequence``."""
    sequence_weight: float = 0.0
    """1 / (number of sequences of the minibatch), for losses with one term for each sequence; 0 in a
    dummy."""
    pair_weight: float = 0.0
    """1 / (number of pairs of the minibatch), for losses with one term for each pair; 0 in a dummy."""
    advantages_N: Tensor | None = None
    """The advantages, after penalties and normalisation; None if the objective needs none."""
    old_logprobs_N: Tensor | None = None
    """The policy's log-probs before the iteration's first step; None if they were not computed."""
    ref_logprobs_N: Tensor | None = None
    """The reference model's log-probs; None without a reference model."""
    behaviour_logprobs_N: Tensor | None = None
    """The engine's log-probs under the distribution from which it sampled; None if answers were not
    sampled."""
    log_mass_N: Tensor | None = None
    """The log of the probability of all tokens that top-p and top-k keep; None if they keep all."""
    marked_N: Tensor | None = None
    """The mask of the tokens that `MarkingObjective.marked_tokens` chose, bool. None if the objective marks
    no tokens, and in analyses, which compute gradients of single answers without a minibatch."""
    ref_kl_N: Tensor | None = None
    """The exact KL(π_old ‖ π_ref) at each token, where π_old is the policy before the iteration's first step;
    None if the objective doesn't need it."""
    own_advantages_N: Tensor | None = None
    """The advantages that `ReferenceKlObjective.precompute` returned; None if the objective is none of that
    class."""
    has_teacher_N: Tensor | None = None
    """Whether a token's answer has a privileged prompt, bool; None if the objective has no teacher."""
    terms: tuple[Tensor, ...] = ()
    """The tensors that `DistributionObjective.terms` or `TeacherObjective.compare` returned, each [N]."""

    def mean(self, values_N: Tensor) -> Tensor:
        """Returns this micro-batch's part of the mean of values over the minibatch's tokens, with the weights
        of the loss. The parts of all micro-batches add up to the mean."""
        return (self.weights_N * values_N.detach()).sum() / self.weight_sum

    def by_sequence(self, values_N: Tensor) -> Sequence[Tensor]:
        """Splits values of tokens into those of each sequence."""
        assert self.lengths, "an objective that needs whole sequences must set needs_whole_sequences"
        return values_N.split(list(self.lengths))


KlPlacement = Literal["loss", "reward", "advantage"]
"""The place of the KL penalty; see `PolicyGradient.kl_placement`."""


@dataclass(frozen=True)
class KlPenalty:
    """A penalty that the trainer subtracts from the rewards or the advantages of tokens before an iteration's
    first step: `coef` times the estimated KL to the reference model."""

    coef: float
    placement: Literal["reward", "advantage"]
    estimator: KlEstimator


class Objective(Registrable):
    """A loss that is a weighted sum over trained tokens, or over pairs of sequences.

    Every objective overrides `loss`. An objective whose loss reads more than log-probs derives from a class
    in `objectives/further_inputs.py`; a policy gradient derives from `PolicyGradient`.
    """

    # The loss

    def loss(self, batch: TokenBatch, logprobs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes a micro-batch's part of the minibatch's loss and of its metrics.

        The parts of all micro-batches of all ranks add up to the loss and the metrics of the minibatch.

        Args:
            logprobs_N: The policy's log-probs, float32 [N], with gradient.

        Returns:
            The loss, a scalar with gradient, and scalar metrics without gradient.
        """
        raise NotImplementedError

    aggregation: Aggregation = "token"
    constant_length: int | None = None
    """The divisor of each sequence's sum, with the aggregation ``constant``."""

    def sequence_weights(self, lengths: Sequence[int], scores: Sequence[float]) -> list[float]:
        """Returns for each sequence of a minibatch the weight of each of its tokens in the loss.

        The trainer doesn't run the model over sequences of weight 0.

        Args:
            lengths: The number of trained tokens of each sequence.
            scores: The grader's score of each sequence.
        """
        if self.aggregation == "token":
            return [1 / sum(lengths)] * len(lengths)
        if self.aggregation == "sequence":
            return [1 / (len(lengths) * length) for length in lengths]
        assert self.constant_length is not None, "checked when the objective is built"
        return [1 / (len(lengths) * self.constant_length)] * len(lengths)

    # What the trainer does for the loss, and adds to it

    needs_reference: bool = False
    """Whether the loss or a penalty needs the reference model."""
    needs_whole_sequences: bool = False
    """Whether the loss needs all tokens of a sequence together. All rows of a sequence are then in the same
    micro-batch. (An answer with threads has several rows.)"""
    measures_kl: bool = False
    """Whether the KL to the start model is measured even if the loss doesn't need it."""
    entropy_coef: float = 0.0
    """The weight of the entropy. The trainer subtracts from the loss this times the mean entropy at trained
    tokens, with the weights of the loss. A value above 0 increases the entropy, one below 0 decreases it."""

    @property
    def kl_penalty(self) -> KlPenalty | None:
        """The KL penalty in rewards or advantages; None if there is none. A KL in the loss is not meant: it
        is part of `loss`."""
        return None

    # Derived from `gives`

    @property
    @final
    def needs_advantages(self) -> bool:
        return self._has_feature(UseOfAdvantages)

    @property
    @final
    def needs_pairs(self) -> bool:
        """Whether the loss compares pairs of answers, which the selection makes.

        A pair is in one micro-batch only if `needs_whole_sequences` is also True.
        """
        return self._has_feature(UseOfPairs)

    def _has_feature(self, feature: type[Feature]) -> bool:
        """Returns whether the features that this objective declares in `gives` include one of this class."""
        return any(isinstance(declared, feature) for declared in self.gives)


def capped_engine_ratio(batch: TokenBatch, logprobs_N: Tensor, cap: float) -> Tensor:
    """Returns ``min(p / p_engine, cap)`` of the sampled tokens, shape [N]."""
    assert batch.behaviour_logprobs_N is not None, "sampled tokens carry the engine's log-probs"
    log_ratio_N = logprobs_N - batch.behaviour_logprobs_N
    if batch.log_mass_N is not None:
        # The engine's log-probs are those of a distribution that top-p and top-k have cut. If the policy's
        # distribution is cut in the same way, the log-prob is log p minus the log of the mass that remains.
        log_ratio_N = log_ratio_N - batch.log_mass_N
    return ratio_of(log_ratio_N).clamp(max=cap)


def needs_of_importance_cap(importance_cap: float | None) -> tuple[Need, ...]:
    """Returns the needs of an objective with this `importance_cap`: sampled answers, or none if it is
    None."""
    if importance_cap is None:
        return ()
    remedy = "set the objective's importance_cap to null, or choose a rollout that samples"
    return (Need(SampledAnswers(), "importance_cap compares with the engine's log-probs", remedy),)


def check_aggregation(aggregation: Aggregation, constant_length: int | None) -> None:
    """Raises ValueError for a `constant_length` without the aggregation ``constant``, and the other way
    round."""
    if (aggregation == "constant") != (constant_length is not None):
        raise ValueError(
            "constant_length and aggregation 'constant' belong together: set both or neither; usually the"
            " length is the most tokens of an answer"
        )
