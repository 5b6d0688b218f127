"""Tools of the credits that give the tokens of an answer different advantages.

* `mark_shared_prefixes`: which answers begin with the same tokens.
* `OverAnotherCredit`: the base of credits that change another credit's advantages; `innermost_credit` returns
  the credit that is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from treetune.contracts import Advantages, CentredRewards, Feature, Need
from treetune.credit.base import ContinuingCredit, Credit, CriticSettings, TrainerScores
from treetune.credit.episodes import advantage_metrics
from treetune.credit.grpo import Group
from treetune.credit.states.early import EarlyContinuations
from treetune.credit.values.base import shared_tokens
from treetune.rollouts.context import RolloutContext
from treetune.tree import Tree, trees_of
from treetune.vocabulary import Column, Episode, Metrics, Trajectory


def mark_shared_prefixes(answers: Sequence[Trajectory]) -> list[Column]:
    """Returns for each of the N answers to a problem which answers share its first tokens, as a mask.

    The mask of an answer with T tokens has the shape [T + 1, N]. Its entry [t, n] is True if answer n begins
    with the first t tokens of this answer. So all of row 0 is True, and all of the answer's own column. The
    answers must have no threads.

    Example: of the answers ``ab`` and ``ac`` the first has the mask
    ``[[True, True], [True, True], [True, False]]``.
    """
    import numpy as np

    (tree,) = trees_of(answers)
    # For each answer, the number of tokens that it has in common with each of the N answers at the beginning.
    shared_with_all = shared_tokens(tree)
    masks = []
    for index, answer in enumerate(answers):
        length = len(answer.response_ids)
        shared_N = shared_with_all[index]
        shared_N[index] = length  # `shared_tokens` has 0 for an answer with itself
        masks.append(np.array(shared_N) >= np.arange(length + 1)[:, None])
    return masks


@dataclass(frozen=True, kw_only=True)
class OverAnotherCredit(ContinuingCredit):
    """A base class of credits that change the advantages of another credit, or that train fewer tokens."""

    over: Credit = field(default_factory=Group)
    """The other credit, whose advantages or trained tokens are changed."""

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (Need(Advantages(before_training=True), "it weighs the advantages of tokens"),)

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        # `CentredRewards` promises one advantage for all tokens of an answer. The changed ones differ.
        return tuple(feature for feature in self.over.gives if not isinstance(feature, CentredRewards))

    @property
    @override
    def trainer_scores(self) -> TrainerScores:
        return self.over.trainer_scores

    @property
    @override
    def critic_settings(self) -> CriticSettings | None:
        return self.over.critic_settings

    @property
    @override
    def further_answers(self) -> int:
        return self.over.further_answers if isinstance(self.over, ContinuingCredit) else 0

    @override
    def continuations(self, answers: int, tokens: float, limit: int) -> tuple[int, int]:
        if not isinstance(self.over, ContinuingCredit):
            return 0, 0
        return self.over.continuations(answers, tokens, limit)

    @override
    def early_continuations(self, context: RolloutContext) -> EarlyContinuations | None:
        return self.over.early_continuations(context) if isinstance(self.over, ContinuingCredit) else None

    def weigh_tokens(self, context: RolloutContext, episodes: Sequence[Episode]) -> list[Episode]:
        """Returns the episodes with other advantages, or with fewer trained tokens. Collective."""
        raise NotImplementedError

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        episodes, metrics = self.over.assign(context, trees)
        episodes = self.weigh_tokens(context, episodes)
        # The metrics of the changed advantages replace those of the other credit's advantages.
        return episodes, metrics | advantage_metrics(context, episodes)


def innermost_credit(credit: Credit) -> Credit:
    """Returns the credit whose advantages `credit` changes, or `credit` itself if it changes no other one's.

    Example: `monte_carlo` of a `weighted_by` over `hicra` over `monte_carlo`.
    """
    while isinstance(credit, OverAnotherCredit):
        credit = credit.over
    return credit
