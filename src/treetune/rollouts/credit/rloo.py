"""Credit relative to the mean of the other answers: leave one out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from treetune.contracts import Advantages, Answers, CreditForRewards, Need
from treetune.rollouts.base import Credit, GroupCredit


def leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i − mean of r_j over j ≠ i: an unbiased policy gradient.

    Kool et al. 2019 (Buy 4 REINFORCE samples, get a baseline for free), brought to language models
    by Ahmadian et al. (arXiv:2402.14740). Raises ValueError for fewer than two rewards.
    """
    if len(rewards) < 2:
        raise ValueError(
            "rloo compares each answer with the others, and there is one answer: set the rollout's"
            " `samples` to 2 or more"
        )
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    total = math.fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


@Credit.register("rloo")
@dataclass(frozen=True, kw_only=True)
class Rloo(GroupCredit):
    """RLOO's credit: see `leave_one_out_advantages`."""

    gives = (Advantages(before_training=True), CreditForRewards())
    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        return leave_one_out_advantages(rewards)
