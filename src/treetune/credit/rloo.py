"""RLOO's credit: an answer's advantage is its reward minus the mean reward of the other answers.

Kool et al. 2019 (Buy 4 REINFORCE samples, get a baseline for free), applied to language models by Ahmadian et
al. (arXiv:2402.14740). All tokens of an answer share its advantage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from treetune.contracts import Advantages, Answers, CentredRewards, CreditForRewards, Need
from treetune.credit.base import Credit, GroupCredit
from treetune.rollouts.context import RolloutContext


@Credit.register("rloo")
@dataclass(frozen=True, kw_only=True)
class Rloo(GroupCredit):
    """RLOO (Ahmadian et al., arXiv:2402.14740): A_i = r_i − mean of r_j over the problem's other answers, see
    `leave_one_out_advantages`."""

    gives = (Advantages(before_training=True), CentredRewards(), CreditForRewards())
    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    @override
    def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        return leave_one_out_advantages(rewards)

    @override
    def is_unbiased(self, context: RolloutContext) -> bool:
        # A class that inherits from this one may return other advantages, which may be biased.
        return type(self).advantages is Rloo.advantages


def leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """Returns A_i = r_i − mean of r_j over j ≠ i. The policy gradient stays unbiased.

    Example: ``[1.0, 0.0, 0.0]`` becomes ``[1.0, -0.5, -0.5]``.

    Raises:
        ValueError: There are fewer than two rewards.
    """
    if len(rewards) < 2:
        raise ValueError(
            "rloo compares each answer with the others, and there is one answer: set the rollout's"
            " `samples` to 2 or more"
        )
    # Equal rewards get exactly zero. The formula could give about 1e-17, by rounding.
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    total = math.fsum(rewards)
    others = len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]
