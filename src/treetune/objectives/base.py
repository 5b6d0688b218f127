"""Defines objectives, the losses that a trainer minimises, over tokens or over pairs of answers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Need, SampledAnswers, UseOfAdvantages, UseOfPairs
from treetune.objectives.teacher import Teacher

if TYPE_CHECKING:
    from torch import Tensor


KlEstimator = Literal["k1", "k2", "k3"]


LARGEST_LOG_RATIO = 40.0
"""The bound of log ratios: ``e^40`` is far from every sensible ratio, and float32 overflows at ``e^88``."""


def ratio_of(log_ratio_N: Tensor) -> Tensor:
    """Returns ``exp`` of log ratios of probabilities, bounded by e^40 and so always finite.

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
    """The weight of each token, by the aggregation; 0 in a dummy, which only keeps the ranks in step."""
    lengths: tuple[int, ...] = ()
    """The trained tokens of each sequence, if the objective needs whole sequences; else empty."""
    weight_sum: float = 1.0
    """The sum of all weights of the minibatch: 1 if the loss is a mean."""
    sequence_weight: float = 0.0
    """1 / (number of sequences of the minibatch), for losses that are summed over a sequence; 0 in a
    dummy."""
    pair_weight: float = 0.0
    """1 / (number of pairs of the minibatch); 0 in a dummy."""
    advantages_N: Tensor | None = None
    old_logprobs_N: Tensor | None = None
    ref_logprobs_N: Tensor | None = None
    behaviour_logprobs_N: Tensor | None = None
    log_mass_N: Tensor | None = None
    marked_N: Tensor | None = None
    """The tokens that the objective marked, bool; None if it marks none, and in analyses, which compute the
    gradients of single answers."""
    ref_kl_N: Tensor | None = None
    """The exact KL of the policy before the iteration's first step to the reference; None if not needed."""
    own_advantages_N: Tensor | None = None
    """The objective's own advantages, from the policy before the iteration's first step
    (`Objective.precompute`); None if it isn't called."""
    has_teacher_N: Tensor | None = None
    """The tokens of answers with a privileged prompt, bool; None if the objective has no teacher."""
    terms: tuple[Tensor, ...] = ()
    """What `Objective.terms` and `Objective.compare` have computed, each [N]."""

    def mean(self, values_N: Tensor) -> Tensor:
        """Returns this micro-batch's part of a metric that is a mean over the minibatch's tokens, with the
        weights of the loss."""
        return (self.weights_N * values_N.detach()).sum() / self.weight_sum

    def by_sequence(self, values_N: Tensor) -> Sequence[Tensor]:
        """Splits values of tokens into those of each sequence."""
        assert self.lengths, "an objective that needs whole sequences must set needs_whole_sequences"
        return values_N.split(list(self.lengths))


class Objective(Registrable):
    """A loss as a weighted sum over trained tokens, or over pairs of sequences."""

    aggregation: Aggregation = "token"
    constant_length: int | None = None
    """The divisor of each sequence's sum, with the aggregation ``constant``."""
    needs_reference: bool = False
    needs_whole_sequences: bool = False
    """Whether the loss needs all tokens of a sequence together. All rows of the sequence, of which an answer
    with threads has several, are then in the same micro-batch."""
    measures_kl: bool = False
    """Whether the KL to the start model is measured even if the loss doesn't need it."""
    entropy_coef: float = 0.0
    """The trainer subtracts this times the mean entropy at trained tokens, with the weights of the loss.
    Above 0 it increases the entropy, below 0 it decreases it."""
    kl_coef: float = 0.0
    """Coefficient of the KL to the start model."""
    kl_placement: Literal["loss", "reward", "advantage"] = "loss"
    """The place of the KL: the loss; or each token's reward or advantage, as a penalty that the trainer
    subtracts before the first step."""
    kl_estimator: KlEstimator = "k3"
    importance_cap: float | None = None
    """The upper bound of the weights that correct for the engine's probabilities; None: no correction."""
    needs_reference_kl: bool = False
    """Whether the loss needs the exact KL of the policy to the reference at each token, as it is before the
    iteration's first step. `precompute` is then called with it, before that step."""
    has_terms: bool = False
    """Whether the loss needs `terms`."""
    teacher: Teacher | None = None
    """The teacher whose whole distributions the loss compares with the policy's, at the same tokens of the
    same answers; null: no teacher. `compare` is then called in each forward pass."""
    compare_bytes: int = 20
    """The bytes for each logit of a chunk that the teacher's logits and `compare` need, for plans."""
    marks_tokens: bool = False
    """Whether the loss treats some tokens of a minibatch otherwise, which `marked_tokens` chooses."""
    ratio_threshold: float | None = None
    """The mean ratio to the old policy above which a minibatch has no loss; None: no threshold."""

    @property
    @final
    def needs_advantages(self) -> bool:
        return UseOfAdvantages() in self.gives

    @property
    @final
    def needs_pairs(self) -> bool:
        """Whether the loss compares pairs of answers, which `selection` makes. A pair is always in one
        micro-batch."""
        return UseOfPairs() in self.gives

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        if self.importance_cap is None:
            return ()
        remedy = "set the objective's importance_cap to null, or choose a rollout that samples"
        return (Need(SampledAnswers(), "importance_cap compares with the engine's log-probs", remedy),)

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

    def marked_tokens(self, logprobs_N: Tensor, advantages_N: Tensor, draw: random.Random) -> Tensor:
        """Chooses the tokens of a minibatch that the loss treats differently: bool [N], for its N tokens.

        Called before the minibatch is cut into micro-batches, with the same arguments on every rank. Called
        only with `marks_tokens`.

        Args:
            logprobs_N: The policy's log-probs before the iteration's first step; in an iteration of a single
                step, the engine's.
            advantages_N: The advantages, after normalisation.
            draw: A source of random numbers for this minibatch.
        """
        raise NotImplementedError(f"{type(self).__name__} marks no tokens")

    def precompute(
        self, old_logprobs_N: Tensor, ref_logprobs_N: Tensor, ref_kl_N: Tensor, starts: Sequence[int]
    ) -> Tensor:
        """Returns numbers that the loss needs, one for each of the iteration's N trained tokens, float32 [N].

        Called once before the first step, only with `needs_reference_kl`.

        Args:
            old_logprobs_N: The policy's log-probs.
            ref_logprobs_N: The reference's log-probs.
            ref_kl_N: The KL of the policy's distribution to the reference's.
            starts: The offsets of the sequences, with the end of the last one.
        """
        raise NotImplementedError(f"{type(self).__name__} precomputes nothing")

    def terms(self, logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, ...]:
        """Computes the terms of the loss that need whole next-token distributions. Each term has the shape
        [C], with gradient.

        Called only with `has_terms`, for a chunk of C positions at a time, since the logits of all positions
        may not fit into memory. The logits are divided by the sampling temperature.
        """
        raise NotImplementedError(f"{type(self).__name__} has no terms")

    def compare(self, logits_CV: Tensor, teacher_logits_CV: Tensor) -> tuple[Tensor, ...]:
        """Computes what the loss needs of the policy's and the teacher's next-token distributions, each of
        shape [C], with gradient.

        Called only with a `teacher`, for a chunk of C positions at a time, as `terms` is. The logits of both
        are divided by the sampling temperature.
        """
        raise NotImplementedError(f"{type(self).__name__} compares nothing with a teacher")

    def loss(self, batch: TokenBatch, logprobs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes a micro-batch's part of the minibatch's loss and of its metrics.

        The parts of all micro-batches of all ranks add up to the loss and the metrics of the minibatch.

        Args:
            logprobs_N: The policy's log-probs, float32 [N], with gradient.

        Returns:
            The loss, a scalar with gradient, and scalar metrics without gradient.
        """
        raise NotImplementedError


RATIO = "train/ratio"
"""The metric of the mean ratio to the old policy over a minibatch, weighted as the loss is."""

LOSSES = ("train/loss", "train/policy_loss", "train/kl_loss")

SKIPPED_BY_RATIO = "train/skipped_by_ratio"
"""The metric of the share of an iteration's steps whose loss `ratio_threshold` dropped."""


def without_skipped(objective: Objective, metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of a step, with losses of 0 if its mean ratio exceeds the `ratio_threshold`.

    The metrics are those of the whole minibatch, so that the size of micro-batches doesn't matter.
    """
    if objective.ratio_threshold is None:
        return dict(metrics)
    # Written with `not`, so that a ratio of NaN is too large.
    is_skipped = not metrics[RATIO] <= objective.ratio_threshold
    result = {**metrics, SKIPPED_BY_RATIO: float(is_skipped)}
    if is_skipped:
        result |= {name: 0.0 for name in LOSSES if name in metrics}
    return result


def check_aggregation(aggregation: Aggregation, constant_length: int | None) -> None:
    """Raises ValueError for a constant length without its aggregation, and the other way round."""
    if (aggregation == "constant") != (constant_length is not None):
        raise ValueError(
            "constant_length and aggregation 'constant' belong together: set both or neither; usually the"
            " length is the most tokens of an answer"
        )
