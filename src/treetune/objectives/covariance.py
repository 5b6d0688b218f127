"""Policy gradients that limit the effect of the few tokens that lower the entropy most: Clip-Cov and KL-Cov.

Cui et al. 2025, arXiv:2505.22617. If a token's log-prob and its advantage are both above their means, or both
below, an update at this token lowers the entropy. The covariance of a token is the product of its differences
from the two means::

    c_i = (log p_i - mean log p) · (A_i - mean A)

A small fraction of a minibatch's tokens has covariances hundreds of times larger than the mean. Both losses
mark some of these tokens before the minibatch's first micro-batch. So the means and the choice are those of
the whole minibatch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Le
from typing_extensions import override

from treetune.contracts import Experiment, Finding
from treetune.objectives.base import Objective, TokenBatch, ratio_of
from treetune.objectives.further_inputs import MarkingObjective
from treetune.objectives.policy_gradient import ClippedPolicyGradient, PolicyGradient, advantages_of

if TYPE_CHECKING:
    from torch import Tensor


@Objective.register("clip_cov")
@dataclass(frozen=True, kw_only=True)
class ClipCovariance(MarkingObjective, ClippedPolicyGradient):
    """Clip-Cov (as in verl's ``clip_cov``): PPO's loss, in which some tokens of large covariance have no
    gradient.

    The tokens are drawn at random among those whose covariance is between `least_covariance` and
    `largest_covariance`. The authors' code computes covariances in each micro-batch, from the log-probs of
    the step itself. Here they are computed over the whole minibatch, from the log-probs before the
    iteration's first step, so the result doesn't depend on how the minibatch is split.

    The authors' code also never draws a token that PPO's clip has already left without gradient. Here, tokens
    are drawn before any ratio is computed, so a drawn token may be one that PPO's clip leaves without
    gradient, too.
    """

    share: Annotated[float, Gt(0), Le(1)] = 2e-4
    """The share of the minibatch's tokens that lose their gradient. At least one token is drawn, if any
    covariance is between the bounds."""
    least_covariance: float = 1.0
    """Only tokens with a larger covariance are drawn."""
    largest_covariance: float = 5.0
    """Only tokens with a smaller covariance are drawn."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least_covariance >= self.largest_covariance:
            raise ValueError(
                f"least_covariance {self.least_covariance} must be below largest_covariance"
                f" {self.largest_covariance}"
            )

    @override
    def marked_tokens(self, logprobs_N: Tensor, advantages_N: Tensor, draw: random.Random) -> Tensor:
        covariances_N = token_covariances(logprobs_N, advantages_N)
        is_candidate_N = (covariances_N > self.least_covariance) & (covariances_N < self.largest_covariance)
        candidates = is_candidate_N.nonzero().flatten().tolist()
        tokens = len(logprobs_N)
        most_marked = max(1, int(self.share * tokens))
        marked = draw.sample(candidates, min(most_marked, len(candidates)))
        is_marked_N = is_candidate_N.new_zeros(tokens)
        is_marked_N[marked] = True
        return is_marked_N

    @override
    def surrogate(self, batch: TokenBatch, logprobs_N: Tensor, log_ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        surrogate_N, is_clipped_N = super().surrogate(batch, logprobs_N, log_ratio_N)
        if batch.marked_N is None:  # an analysis of single answers, in which no tokens are chosen
            return surrogate_N, is_clipped_N
        return surrogate_N.masked_fill(batch.marked_N, 0.0), is_clipped_N | batch.marked_N


@Objective.register("kl_cov")
@dataclass(frozen=True, kw_only=True)
class KlCovariance(MarkingObjective, PolicyGradient):
    """KL-Cov (as in verl's ``kl_cov``): the loss ``-A·ρ``, without a clip. For the tokens with the largest
    covariances, ``penalty·|log ρ|`` is added, their distance from the old policy.

    The penalty has no gradient at ρ = 1, so it only has an effect in iterations of several steps.
    """

    share: Annotated[float, Gt(0), Le(1)] = 2e-4
    """The share of the minibatch's tokens that are penalised, at least one token. The paper has 2e-3 for a
    model of 7 billion weights, and 2e-4 for one of 32 billion."""
    penalty: Annotated[float, Gt(0)] = 1.0
    """The weight of the distance ``|log ρ|``."""

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        yield from super().check(experiment)
        if experiment.trainer.minibatch_size is None and experiment.trainer.epochs == 1:
            yield Finding(
                "the objective 'kl_cov' penalises tokens that move from the old policy, and an iteration of"
                " one step ends before any has moved",
                "$.trainer.minibatch_size",
                "set it to a part of an iteration's answers, or choose the objective 'clip_cov'",
            )

    @override
    def marked_tokens(self, logprobs_N: Tensor, advantages_N: Tensor, draw: random.Random) -> Tensor:
        import torch

        covariances_N = token_covariances(logprobs_N, advantages_N)
        tokens = len(logprobs_N)
        count = max(1, int(self.share * tokens))
        is_marked_N = torch.zeros(tokens, dtype=torch.bool, device=covariances_N.device)
        is_marked_N[covariances_N.topk(count).indices] = True
        return is_marked_N

    @override
    def surrogate(self, batch: TokenBatch, logprobs_N: Tensor, log_ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        surrogate_N = -advantages_of(batch) * ratio_of(log_ratio_N)
        if batch.marked_N is not None:  # True for the tokens with the largest covariances (`marked_tokens`)
            surrogate_N = surrogate_N + self.penalty * log_ratio_N.abs() * batch.marked_N
        is_clipped_N = torch.zeros_like(surrogate_N, dtype=torch.bool)  # the penalty stops no gradient
        return surrogate_N, is_clipped_N


def token_covariances(logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Returns ``(log p - mean log p)·(A - mean A)`` of each token, in float64, shape [N].

    Example: with the log-probs ``[-0.5, -1.5]`` and the advantages ``[1, -1]``, both covariances are 0.5.
    """
    # The covariances are computed in float64, so that rounding does not decide which tokens are marked.
    logprobs, advantages = logprobs_N.double(), advantages_N.double()
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())
