"""PRIME: process rewards from a reward model that learns from the outcomes of each iteration's answers
(arXiv:2502.01456).

`Prime.assign` only makes rows, without advantages. The trainer does the following before its first step:

    answers, outcomes ──> π_φ learns the outcomes (`credit.reward_models`)
                               │
    answers ── π_φ, π_ref ──> r_t = β · log(π_φ(y_t)/π_ref(y_t)) ── `from_implicit_rewards` ──> advantages

π_ref is the trainer's reference, the start model. The reward model π_φ starts from it, or from another model.

The source is the paper: eq. 3 and 5, Algorithm 1, and the settings of section 4.1 (β 0.05, learning rate
1e-6). In section 3.1, π_φ first learns and then gives the rewards; in Algorithm 1 it is the other way round.
`RewardModelSettings.scores` chooses between the two. Where the authors' recipe in verl differs, this module
follows the paper; see `implicit_reward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.contracts import Advantages, Answers, CreditForRewards, Need, OneLine, UseOfAdvantages
from treetune.credit.base import THREADS_REMEDY, UNUSED_ADVANTAGES_REMEDY, Credit
from treetune.credit.episodes import make_episode
from treetune.credit.literature.implicit_reward import process_advantages
from treetune.credit.reward_models import RewardModelCredit, RewardModelSettings
from treetune.credit.rloo import leave_one_out_advantages
from treetune.rollouts.context import RolloutContext
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Column, Episode, Metrics


@Credit.register("prime")
@dataclass(frozen=True, kw_only=True)
class Prime(RewardModelCredit):
    """PRIME (Cui et al., arXiv:2502.01456) with a reward model π_φ that learns from each iteration's answers.
    For token t of answer i, the advantage is (eq. 5)

    A_i,t = `weight` · Σ_{s≥t} γ^(s−t) (r_i,s − mean_{j≠i} r̄_j) + `outcome_weight` · (R_i − mean_{j≠i} R_j)

    with r_i,t = β (log π_φ(y_t) − log π_ref(y_t)), the implicit reward of the token, r̄_j the mean of r over
    the tokens of answer j, and π_ref the trainer's reference model. R is the reward of an answer, its
    outcome. In each iteration π_φ learns the outcomes, by the cross-entropy of σ(Σ_t r_t), and gives the
    rewards r.

    The reward model learns only from the answers that the selection keeps, and the means are over these
    answers, too. If the selection keeps only one answer to a problem, it has the advantage 0. Outcomes must
    be between 0 and 1. The authors' code whitens the advantages (`trainer.advantage_normalisation`).

    **Biased** unless, in each state, the sum of the rewards from a token on equals the token's true advantage
    plus a number that is the same for all tokens. A reward model that is equal to π_ref, since it hasn't
    learned yet, gives rewards of 0, and the gradient is RLOO's. On the tests' language, with two answers, β =
    0.3 and a reward model with a logit for each state and token, the expected gradient is off by 3.8 times
    its length (cosine 0.95) after 10 steps of gradient descent on the exact loss, and by 8.0 times (cosine
    0.89) after 100: the process rewards become much larger than the outcomes."""

    reward_model: RewardModelSettings = field(default_factory=RewardModelSettings)
    """Settings of the reward model π_φ."""
    gamma: Annotated[float, Gt(0), Le(1)] = 1.0
    """γ, the discount per token of the rewards of later tokens."""
    weight: Annotated[float, Gt(0)] = 1.0
    """The weight of the process rewards."""
    outcome_weight: Annotated[float, Ge(0)] = 1.0
    """The weight of the answers' rewards."""

    gives = (Advantages(), CreditForRewards())
    needs = (
        Need(OneLine(turns=True), "it scores an answer token by token", THREADS_REMEDY),
        Need(Answers(2), "it compares each answer with the others to its problem"),
        Need(UseOfAdvantages(), "it trains a reward model for them", UNUSED_ADVANTAGES_REMEDY),
    )

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        # The rows have no advantages: the trainer makes them, once the reward model has learned.
        return [make_episode(context, answer) for answer in answers_of(trees)], {}

    @override
    def from_implicit_rewards(self, rewards: Sequence[Column], outcomes: Sequence[float]) -> list[Column]:
        import numpy as np

        if len(rewards) == 1:  # there is no other answer with which this one could be compared
            return [np.zeros_like(rewards[0])]
        advantages_of_process = process_advantages(rewards, self.gamma)
        advantages_of_outcomes = leave_one_out_advantages(outcomes)
        advantages = []
        for process_T, outcome in zip(advantages_of_process, advantages_of_outcomes, strict=True):
            advantages.append(self.weight * process_T + self.outcome_weight * outcome)
        return advantages
