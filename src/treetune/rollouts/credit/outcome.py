"""Credit without a baseline: what the answer earned, for every token of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treetune.contracts import Advantages, CreditForRewards
from treetune.rollouts.base import Credit, GroupCredit
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit.episodes import episode_of
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Episode, Metrics


@Credit.register("outcome")
@dataclass(frozen=True, kw_only=True)
class Outcome(GroupCredit):
    """REINFORCE (Williams 1992) with a zero baseline: A_i = r_i."""

    gives = (Advantages(before_training=True), CreditForRewards())

    def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        return rewards


@Credit.register("none")
@dataclass(frozen=True, kw_only=True)
class NoCredit(Credit):
    """No advantages, for objectives that need none (`mle`)."""

    gives = (CreditForRewards(),)

    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        return [episode_of(context, answer) for answer in answers_of(trees)], {}
