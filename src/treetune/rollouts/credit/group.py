"""Credit relative to the other answers to the same problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Annotated

from annotated_types import Gt

from treetune.contracts import Advantages, Answers, CreditForRewards, Need
from treetune.rollouts.base import Credit, GroupCredit


def group_advantages(rewards: Sequence[float], std: bool, eps: float) -> list[float]:
    """A_i = r_i − mean(r), divided by (std(r) + eps) if `std`.

    With `std` this is GRPO (Shao et al., arXiv:2402.03300, section 4.1.2), whose published
    implementations take the unbiased standard deviation; without it, Dr. GRPO (Liu et al.,
    arXiv:2503.20783, section 3.2). The mean holds r_i itself, which shrinks the expected gradient
    to (n−1)/n of the true one; `rloo` does not. With `std` problems weigh otherwise, too, by how much their
    answers differ (that of the tests' language 0.71 with n = 2, 0.85 with 3). Equal rewards, and one answer
    alone, give zero.
    """
    # Exactly zero, where the rounded mean of equal rewards would leave 1e-17 / eps.
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    centre = fmean(rewards)
    scale = stdev(rewards) + eps if std else 1.0
    return [(reward - centre) / scale for reward in rewards]


@Credit.register("group")
@dataclass(frozen=True, kw_only=True)
class Group(GroupCredit):
    """GRPO's credit (`std` true) or Dr. GRPO's (false): see `group_advantages`."""

    std: bool = True
    eps: Annotated[float, Gt(0)] = 1e-6
    """Added to the standard deviation, which may be 0."""

    gives = (Advantages(before_training=True), CreditForRewards())
    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        return group_advantages(rewards, self.std, self.eps)
