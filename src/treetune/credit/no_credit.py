"""No credit: training rows without advantages, for objectives that need none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from treetune.contracts import CreditForRewards
from treetune.credit.base import Credit
from treetune.credit.episodes import make_episode
from treetune.rollouts.context import RolloutContext
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Episode, Metrics


@Credit.register("none")
@dataclass(frozen=True, kw_only=True)
class NoCredit(Credit):
    """Gives no advantages, for objectives that need none (`mle`)."""

    gives = (CreditForRewards(),)

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        return [make_episode(context, answer) for answer in answers_of(trees)], {}
