"""Base classes of objectives whose loss reads more than the log-probs of the sampled tokens.

=======================  ==================================================================
`DistributionObjective`  the policy's whole next-token distributions
`TeacherObjective`       the whole next-token distributions of the policy and of a teacher
`ReferenceKlObjective`   the exact KL to the reference, before the iteration's first step
`MarkingObjective`       a mask of tokens that the objective chooses by looking at the whole
                         minibatch, such as those with the largest covariance (Clip-Cov)
=======================  ==================================================================

An objective may derive from one of these classes and from `PolicyGradient`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from treetune.objectives.base import Objective
from treetune.objectives.teacher import Teacher

if TYPE_CHECKING:
    from torch import Tensor


class DistributionObjective(Objective):
    """An objective that computes terms of its loss from whole next-token distributions."""

    def terms(self, logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, ...]:
        """Computes what `loss` needs from the whole next-token distributions: one or more tensors of shape
        [C], with gradient. `loss` finds them in `TokenBatch.terms`, for all tokens of its micro-batch.

        The trainer calls this for a chunk of C positions at a time, since the logits of all positions may not
        fit into memory.

        Args:
            logits_CV: The policy's logits, divided by the sampling temperature.
            labels_C: The sampled token at each position.
        """
        raise NotImplementedError


class TeacherObjective(Objective):
    """An objective that compares the policy's whole next-token distributions with those of a teacher, at the
    same tokens of the same answers."""

    teacher: Teacher
    """The settings of the teacher. The trainer runs the teacher before each forward pass of the policy."""
    compare_bytes: int = 20
    """The memory that `compare` takes, together with the teacher's logits, in bytes per logit of a chunk.
    `treetune plan` reads it."""
    importance_cap: float | None = None
    """The upper bound of the weights that correct for the engine's probabilities; None: no correction."""

    def compare(self, logits_CV: Tensor, teacher_logits_CV: Tensor) -> tuple[Tensor, ...]:
        """Computes what `loss` needs from the whole next-token distributions of the policy and the teacher:
        one or more tensors of shape [C], with gradient. `loss` finds them in `TokenBatch.terms`, for all
        tokens of its micro-batch.

        The trainer calls this for a chunk of C positions at a time, since the logits of all positions may not
        fit into memory. Both logits are divided by the sampling temperature.
        """
        raise NotImplementedError


class ReferenceKlObjective(Objective):
    """An objective that reads the exact KL of the policy to the reference at each token, as it is before the
    iteration's first step."""

    needs_reference = True

    def precompute(
        self, old_logprobs_N: Tensor, ref_logprobs_N: Tensor, ref_kl_N: Tensor, starts: Sequence[int]
    ) -> Tensor:
        """Computes the objective's own advantage of each of the iteration's N trained tokens, float32 [N].
        `loss` finds these advantages in `TokenBatch.own_advantages_N`.

        The trainer calls this once, before the iteration's first step.

        Args:
            old_logprobs_N: The policy's log-probs.
            ref_logprobs_N: The reference's log-probs.
            ref_kl_N: The KL of the policy's distribution to the reference's.
            starts: The index of each sequence's first token, and N at the end. Example: ``[0, 2, 3]`` for two
                sequences with 2 and 1 tokens.
        """
        raise NotImplementedError


class MarkingObjective(Objective):
    """An objective whose loss treats some tokens of a minibatch differently from the others."""

    def marked_tokens(self, logprobs_N: Tensor, advantages_N: Tensor, draw: random.Random) -> Tensor:
        """Returns a mask of the tokens to treat differently, bool [N], over the minibatch's N trained tokens.
        `loss` finds the part of its micro-batch in `TokenBatch.marked_N`.

        The trainer calls this before the minibatch is cut into micro-batches, with the same arguments on
        every rank.

        Args:
            logprobs_N: The policy's log-probs before the iteration's first step; in an iteration of a single
                step, the engine's.
            advantages_N: The advantages, after normalisation.
            draw: A source of random numbers for this minibatch.
        """
        raise NotImplementedError


def teacher_of(objective: Objective) -> Teacher | None:
    """Returns the settings of an objective's teacher; None if it has no teacher."""
    return objective.teacher if isinstance(objective, TeacherObjective) else None
