"""REINFORCE's credit: an answer's advantage is its reward, without a baseline (Williams 1992)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from treetune.contracts import Advantages, CreditForRewards
from treetune.credit.base import Credit, GroupCredit
from treetune.rollouts.context import RolloutContext


@Credit.register("outcome")
@dataclass(frozen=True, kw_only=True)
class Outcome(GroupCredit):
    """REINFORCE (Williams 1992) with a zero baseline: the advantage of every token is its answer's reward,
    A_i = r_i."""

    gives = (Advantages(before_training=True), CreditForRewards())

    @override
    def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        return rewards

    @override
    def is_unbiased(self, context: RolloutContext) -> bool:
        # A class that inherits from this one may return other advantages, which may be biased.
        return type(self).advantages is Outcome.advantages
