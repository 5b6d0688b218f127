"""Settings and loss of an implicit reward model: a language model π_φ whose log-ratios to a reference model,
times β, are the rewards of tokens (Yuan et al., arXiv:2412.01981; Cui et al., arXiv:2502.01456). The module
`trainer.reward_model` trains it.

    r_t = β · (log π_φ(y_t) − log π_ref(y_t))           reward of a token (2502.01456, eq. 3)
    −[R log σ(Σ_t r_t) + (1 − R) log(1 − σ(Σ_t r_t))]   loss of an answer with the outcome R (Algorithm 1)

Example, with β = 0.05: an answer of two tokens has log-ratios of 4 and 6. Their sum times β is 0.5, which
predicts that the answer is correct with probability σ(0.5) = 0.62. If it is, its loss is −log 0.62 = 0.47.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Experiment, Finding, Part
from treetune.credit.base import Credit
from treetune.models.sources import ModelSource
from treetune.vocabulary import Column

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings(Part):
    """Settings of an implicit reward model that learns during the run. It is a whole language model. It has
    its own optimiser, with the trainer's minibatches, schedule, precision and sharding."""

    start: ModelSource | None = None
    """The model from which the reward model starts; null: the start model of the run. It must have the same
    tokenizer as the run's start model."""
    beta: Annotated[float, Gt(0)] = 0.05
    """β, the reward of a log-ratio of 1."""
    learning_rate: Annotated[float, Gt(0)] = 1e-6
    """The peak of the reward model's learning rate."""
    epochs: Annotated[int, Gt(0)] = 1
    """The number of passes over an iteration's answers."""
    scores: Literal["after_update", "before_update"] = "after_update"
    """Whether the rewards of an iteration come from the reward model after it has learned from the
    iteration's answers (the authors' "double forward"), or before it does (Algorithm 1, "single forward")."""

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if experiment.restart == "every_iteration":
            yield Finding(
                "restart 'every_iteration' discards the trained weights, and the reward model has to keep"
                " learning over iterations",
                "$.restart",
                "set restart to 'never', or choose a credit without a reward model, such as 'rloo'",
            )
        if not experiment.trainer.keeps_reference:
            yield Finding(
                "the reward model is compared with the trainer's reference model, and the trainer keeps none",
                "$.trainer.measure_kl",
                "set it to true",
            )


class RewardModelCredit(Credit):
    """A base class of credits whose advantages the trainer makes, with `from_implicit_rewards`, from the
    rewards of an implicit reward model that it trains."""

    reward_model: RewardModelSettings

    def from_implicit_rewards(self, rewards: Sequence[Column], outcomes: Sequence[float]) -> list[Column]:
        """Computes advantages from the rewards that the reward model gives to tokens, for the answers to one
        problem.

        Args:
            rewards: The reward of each trained token of each answer.
                Example: ``[array([0.2, 0.0]), array([0.1])]``.
            outcomes: The reward of each answer.

        Returns:
            The advantage of each trained token of each answer.
        """
        raise NotImplementedError


def reward_model_of(credit: Credit) -> RewardModelSettings | None:
    """Returns the settings of the reward model that the trainer trains for a credit; None if it trains
    none."""
    return credit.reward_model if isinstance(credit, RewardModelCredit) else None


def refuse_outcomes(outcomes: Sequence[float]) -> None:
    """Raises ValueError for outcomes that are not between 0 and 1, since the reward model learns their
    probability."""
    lowest, highest = min(outcomes), max(outcomes)
    if lowest < 0 or highest > 1:  # NaN would pass, but graders report none
        raise ValueError(
            "the reward model learns the probability of a correct answer, and the rewards of this iteration"
            f" go from {lowest:g} to {highest:g}: give answers rewards between 0 and 1, or choose a credit"
            " without a reward model, such as 'rloo'"
        )


def outcome_losses(returns_M: Tensor, outcomes_M: Tensor) -> Tensor:
    """Returns the cross-entropy of each answer's outcome, [M].

    Args:
        returns_M: The sums of the answers' implicit rewards, Σ_t r_t: the logits of being correct.
        outcomes_M: The answers' rewards, between 0 and 1. A reward of 0.7 counts as correct with the
            probability 0.7.
    """
    import torch

    # The function takes logits, since log(1 − σ(x)) would be −∞ in float32 for a large logit x.
    return torch.nn.functional.binary_cross_entropy_with_logits(returns_M, outcomes_M, reduction="none")
