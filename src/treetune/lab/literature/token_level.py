"""What entries that tell tokens apart share: the policy's distributions, common beginnings, and credit over
another credit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from treetune.contracts import Advantages, Feature, Need
from treetune.rollouts.base import Credit, CriticSettings
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit import Group, advantage_metrics
from treetune.rollouts.valuation import shared_tokens
from treetune.rollouts.values import EarlyContinuations
from treetune.tree import Tree, trees_of
from treetune.vocabulary import Column, Episode, Metrics, Trajectory


@dataclass(frozen=True)
class Distributions:
    """The distributions that answers were sampled from: a service of contexts. Analyses lend them; a run,
    whose engine reports the probability of the sampled token alone, does not."""

    along: Callable[[Sequence[Episode]], list[tuple[Column, Column]]]
    """Returns for each row of this rank Σ_v π(v)² and the entropy in nats, each with one number for each
    response token: of the distribution that it was sampled from. Collective."""


def beginnings(answers: Sequence[Trajectory]) -> list[Column]:
    """Returns for each answer to a problem a mask of shape [T + 1, N]: whether answer n begins with its first
    t tokens. In row 0 and for the answer itself it is true. Answers in one line."""
    import numpy as np

    (tree,) = trees_of(answers)
    shared = shared_tokens(tree)
    masks = []
    for own, answer in enumerate(answers):
        shared[own][own] = len(answer.response_ids)
        masks.append(np.array(shared[own]) >= np.arange(len(answer.response_ids) + 1)[:, None])
    return masks


@dataclass(frozen=True, kw_only=True)
class OverAnotherCredit(Credit):
    """Credit that makes more of the episodes of another one, which gives their tokens advantages."""

    over: Credit = field(default_factory=Group)
    """The credit whose advantages it works on."""

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (Need(Advantages(before_training=True), "it weighs the advantages of tokens"),)

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        return self.over.gives

    @property
    @override
    def critic_settings(self) -> CriticSettings | None:
        return self.over.critic_settings

    @override
    def continuations(self, answers: int, tokens: float, limit: int) -> tuple[int, int]:
        return self.over.continuations(answers, tokens, limit)

    @override
    def early_continuations(self, context: RolloutContext) -> EarlyContinuations | None:
        return self.over.early_continuations(context)

    def weighed(self, context: RolloutContext, episodes: Sequence[Episode]) -> list[Episode]:
        """Returns the episodes with other advantages, or with fewer trained tokens. Collective."""
        raise NotImplementedError

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        episodes, metrics = self.over.assign(context, trees)
        episodes = self.weighed(context, episodes)
        return episodes, metrics | advantage_metrics(context, episodes)
