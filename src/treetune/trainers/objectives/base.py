"""The fourth choice: what the trainer minimises, token by token or pair by pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from treetune.config.registrable import Registrable
from treetune.trainers.objectives.kl import KlEstimator

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token", "sequence"]
"""How tokens become one number: every trained token of the minibatch weighs the same, or every
sequence does (mean over sequences of the mean over their tokens)."""


@dataclass(frozen=True)
class PairCut:
    """The pairs of a micro-batch: sequences 2i and 2i+1 are the better and the other answer of pair i.

    `lengths` are the sequences' numbers of trained tokens, one after the other. `weight` is each
    pair's in the minibatch's mean over pairs; 0 in dummies.
    """

    lengths: tuple[int, ...]
    weight: float

    def sums(self, values_N: Tensor) -> Tensor:
        """Each sequence's sum, shape [S]; added up in the tokens' order, so always alike."""
        import torch

        return torch.stack([part_N.sum() for part_N in values_N.split(list(self.lengths))])


@dataclass(frozen=True)
class TokenBatch:
    """What an objective sees of a micro-batch: flat float32 tensors over its N trained tokens.

    `weights_N` carry the aggregation: over all micro-batches and ranks of a minibatch they sum to
    1, so a sum of weighted terms is the mean over the minibatch however it was cut. Dummy
    micro-batches, which keep ranks in step, have weight 0. `sequence_weight` is for terms that are
    to be summed over a sequence's tokens: one over the minibatch's number of sequences, or 0.
    `pairs` are given to objectives that need them.
    """

    weights_N: Tensor
    sequence_weight: float = 0.0
    advantages_N: Tensor | None = None
    old_logprobs_N: Tensor | None = None
    reference_logprobs_N: Tensor | None = None
    behaviour_logprobs_N: Tensor | None = None
    pairs: PairCut | None = None


class Objective(Registrable):
    """A loss as a weighted sum over trained tokens, or over pairs of sequences."""

    aggregation: Aggregation
    needs_advantages: bool = False
    needs_reference: bool = False
    needs_pairs: bool = False
    """Whether answers are compared: `selection` makes pairs then, which no cut separates."""
    entropy_needs_gradient: bool = False
    reward_kl_coef: float = 0.0
    """Coefficient of the KL penalty where it is part of the reward (0: it isn't)."""
    kl_estimator: KlEstimator = "k3"

    def loss(
        self, batch: TokenBatch, logprobs_N: Tensor, entropy_N: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the minibatch's loss, and of its metrics.

        Both are weighted sums: shares of all micro-batches and ranks add up to the minibatch's
        mean. Metrics carry no gradient.
        """
        raise NotImplementedError
