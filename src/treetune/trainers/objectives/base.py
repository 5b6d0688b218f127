"""The fourth choice: what the trainer minimises, token by token."""

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
class TokenBatch:
    """What an objective sees of a micro-batch: flat float32 tensors over its N trained tokens.

    `weights_N` carry the aggregation: over all micro-batches and ranks of a minibatch they sum to
    1, so a sum of weighted terms is the mean over the minibatch however it was cut. Dummy
    micro-batches, which keep ranks in step, have weight 0.
    """

    weights_N: Tensor
    advantages_N: Tensor | None = None
    old_logprobs_N: Tensor | None = None
    reference_logprobs_N: Tensor | None = None
    behaviour_logprobs_N: Tensor | None = None


class Objective(Registrable):
    """A loss as a weighted sum over trained tokens."""

    aggregation: Aggregation
    needs_advantages: bool = False
    needs_reference: bool = False
    entropy_needs_gradient: bool = False
    reward_kl_coef: float = 0.0
    """Coefficient of the KL penalty where it is part of the reward (0: it isn't)."""
    kl_estimator: KlEstimator = "k3"

    def loss(
        self, batch: TokenBatch, logprobs_N: Tensor, entropy_N: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the minibatch's loss, and of its metrics.

        Both are sums weighted by `weights_N`: shares of all micro-batches and ranks add up to the
        minibatch's mean. Metrics carry no gradient.
        """
        raise NotImplementedError
