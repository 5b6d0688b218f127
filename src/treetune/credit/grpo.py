"""GRPO's credit: an answer's advantage is its reward minus the mean reward of its group.

Shao et al., arXiv:2402.03300, section 4.1.2 (with division by the standard deviation), and Dr. GRPO, Liu et
al., arXiv:2503.20783, section 3.2 (without). All tokens of an answer share its advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Annotated

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Advantages, Answers, CentredRewards, CreditForRewards, Feature, Need
from treetune.credit.base import Credit, GroupCredit


@Credit.register("group")
@dataclass(frozen=True, kw_only=True)
class Group(GroupCredit):
    """GRPO (`std` true): A_i = (r_i − mean) / (standard deviation + `eps`) over the answers to a problem,
    with the unbiased standard deviation (n − 1). Dr. GRPO (`std` false): A_i = r_i − mean."""

    std: bool = True
    """Whether advantages are divided by the standard deviation of the group's rewards."""
    eps: Annotated[float, Gt(0)] = 1e-6
    """Added to the standard deviation, which may be 0 or close to it."""

    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        features: list[Feature] = [Advantages(before_training=True), CreditForRewards()]
        if not self.std:
            features.append(CentredRewards())
        return tuple(features)

    @override
    def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        return group_advantages(rewards, self.std, self.eps)


def group_advantages(rewards: Sequence[float], std: bool, eps: float) -> list[float]:
    """Returns A_i = r_i − mean(r), divided by (std(r) + eps) if `std`.

    Example: ``[1.0, 0.0]`` becomes ``[0.5, -0.5]``, and ``[0.71, -0.71]`` with `std`. If all rewards are
    equal, or there is only one, the advantages are 0.

    With `std` this is GRPO, whose published implementations take the unbiased standard deviation. Without
    `std` this is Dr. GRPO. Both are **biased**. The mean of the n rewards includes r_i itself, which shrinks
    the expected gradient to (n−1)/n of the true gradient; `rloo` leaves r_i out. With `std`, problems are
    also weighted by how much the rewards of their answers differ. Example, for a problem whose rewards are 0
    or 1: with `std` the expected gradient is 0.71 times the true one for n = 2, and 1.15 times for n = 3.
    """
    # Equal rewards get exactly zero. The formula could give 1e-17 / eps, since the mean is rounded.
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    mean_reward = fmean(rewards)
    scale = stdev(rewards) + eps if std else 1.0
    return [(reward - mean_reward) / scale for reward in rewards]
