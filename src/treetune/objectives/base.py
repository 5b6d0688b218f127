"""Defines objectives, the losses that a trainer minimises, over tokens or over pairs of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from treetune.config.registrable import Registrable
from treetune.contracts import Need, SampledAnswers, UseOfAdvantages, UseOfPairs

if TYPE_CHECKING:
    from torch import Tensor


KlEstimator = Literal["k1", "k2", "k3"]


LARGEST_LOG_RATIO = 40.0
"""The bound of log ratios: ``e^40`` is far from every sensible ratio, and float32 overflows at ``e^88``."""


def ratio_of(log_ratio_N: Tensor) -> Tensor:
    """Returns ``exp`` of log ratios of probabilities, bounded by e^40, so it is finite for every finite log
    ratio.

    An infinite ratio has an infinite gradient. If a clip then gives it the weight 0, the product is NaN,
    which spoils all weights of the model. Below the bound, value and gradient are exactly those of ``exp``.
    Above it, the gradient is that at the bound, so that a token that moved too far is still pushed back.
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
"""The weights with which the losses of a minibatch's tokens are summed.

``token``: the mean over all tokens. ``sequence``: the mean over sequences of the mean over their tokens.
``constant``: the mean over sequences of the sum over their tokens, divided by a constant length (Dr. GRPO,
Liu et al., arXiv:2503.20783).
"""


@dataclass(frozen=True)
class TokenBatch:
    """A micro-batch as an objective sees it: flat float32 tensors over its N trained tokens.

    The sum of weighted losses over all micro-batches of all ranks is the minibatch's loss, however the
    minibatch was cut into micro-batches.

    Example: two sequences with 2 and 1 trained tokens, in a minibatch of 4 sequences with 10 tokens, with the
    aggregation ``token``::

        TokenBatch(weights_N=[0.1, 0.1, 0.1], lengths=(2, 1), sequence_weight=0.25, advantages_N=[1, 1, -1])
    """

    weights_N: Tensor
    """The weight of each token in the loss, from `Objective.sequence_weights`. All are 0 in a dummy, a
    micro-batch that a rank computes only because the other ranks still compute one."""
    lengths: tuple[int, ...] = ()
    """The trained tokens of each sequence, if the objective needs whole sequences; else empty."""
    weight_sum: float = 1.0
    """The sum of all weights of the minibatch: 1 with the aggregations ``token`` and ``sequence``."""
    sequence_weight: float = 0.0
    """1 / (number of sequences of the minibatch), for losses that are summed over a sequence; 0 in a
    dummy."""
    pair_weight: float = 0.0
    """1 / (number of pairs of the minibatch); 0 in a dummy."""
    advantages_N: Tensor | None = None
    """The advantages, after penalties and normalisation; None if the objective needs none."""
    old_logprobs_N: Tensor | None = None
    """The policy's log-probs before the iteration's first step; None if they are not scored."""
    ref_logprobs_N: Tensor | None = None
    """The reference's log-probs; None without a reference."""
    behaviour_logprobs_N: Tensor | None = None
    """The engine's log-probs, of the distribution that it sampled from; None if answers were not sampled."""
    log_mass_N: Tensor | None = None
    """The log of the probability of all tokens that top-p and top-k keep; None if they keep all."""
    marked_N: Tensor | None = None
    """The mask of the tokens that `MarkingObjective.marked_tokens` chose, bool. None if the objective marks
    no tokens, and in analyses, which compute gradients of single answers without a minibatch."""
    ref_kl_N: Tensor | None = None
    """The exact KL of the policy before the iteration's first step to the reference; None if not needed."""
    own_advantages_N: Tensor | None = None
    """The objective's own advantages, from the policy before the iteration's first step
    (`ReferenceKlObjective.precompute`); None if it isn't called."""
    has_teacher_N: Tensor | None = None
    """The tokens of answers with a privileged prompt, bool; None if the objective has no teacher."""
    terms: tuple[Tensor, ...] = ()
    """What `DistributionObjective.terms` or `TeacherObjective.compare` have computed, each [N]."""

    def mean(self, values_N: Tensor) -> Tensor:
        """Returns this micro-batch's part of a metric that is a mean over the minibatch's tokens, with the
        weights of the loss."""
        return (self.weights_N * values_N.detach()).sum() / self.weight_sum

    def by_sequence(self, values_N: Tensor) -> Sequence[Tensor]:
        """Splits values of tokens into those of each sequence."""
        assert self.lengths, "an objective that needs whole sequences must set needs_whole_sequences"
        return values_N.split(list(self.lengths))


KlPlacement = Literal["loss", "reward", "advantage"]


@dataclass(frozen=True)
class KlPenalty:
    """A penalty that the trainer subtracts from rewards or advantages before an iteration's first step:
    `coef` times the estimated KL to the reference."""

    coef: float
    placement: Literal["reward", "advantage"]
    estimator: KlEstimator


class Objective(Registrable):
    """A loss as a weighted sum over trained tokens, or over pairs of sequences.

    Every objective overrides `loss`. A loss that reads more than log-probs derives from a class in
    `objectives/further_inputs.py`; a policy gradient derives from `PolicyGradient`.
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

        Sequences of weight 0 are not computed.

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
    needs_whole_sequences: bool = False
    """Whether the loss needs all tokens of a sequence together. All rows of the sequence, of which an answer
    with threads has several, are then in the same micro-batch."""
    measures_kl: bool = False
    """Whether the KL to the start model is measured even if the loss doesn't need it."""
    entropy_coef: float = 0.0
    """The trainer subtracts this times the mean entropy at trained tokens, with the weights of the loss.
    Above 0 it increases the entropy, below 0 it decreases it."""

    @property
    def kl_penalty(self) -> KlPenalty | None:
        """The KL penalty in rewards or advantages; None if there is none. A KL in the loss is part of
        `loss`."""
        return None

    # What follows from `gives`

    @property
    @final
    def needs_advantages(self) -> bool:
        return UseOfAdvantages() in self.gives

    @property
    @final
    def needs_pairs(self) -> bool:
        """Whether the loss compares pairs of answers, which the selection makes.

        A pair is in one micro-batch only if `needs_whole_sequences` is also True.
        """
        return UseOfPairs() in self.gives


def needs_of_importance_cap(importance_cap: float | None) -> tuple[Need, ...]:
    """Returns what an objective with this `importance_cap` needs: sampled answers; nothing if it is None."""
    if importance_cap is None:
        return ()
    remedy = "set the objective's importance_cap to null, or choose a rollout that samples"
    return (Need(SampledAnswers(), "importance_cap compares with the engine's log-probs", remedy),)


def check_aggregation(aggregation: Aggregation, constant_length: int | None) -> None:
    """Raises ValueError for a constant length without its aggregation, and the other way round."""
    if (aggregation == "constant") != (constant_length is not None):
        raise ValueError(
            "constant_length and aggregation 'constant' belong together: set both or neither; usually the"
            " length is the most tokens of an answer"
        )
