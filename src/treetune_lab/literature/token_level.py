"""What entries that tell tokens apart share: the policy's distributions, common beginnings, rows, and credit
that weighs another credit's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from treetune.contracts import Advantages, Feature, Need
from treetune.rollouts.base import Credit, CriticSettings
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit import Group, advantage_metrics, episode_of
from treetune.rollouts.valuation import shared_tokens
from treetune.rollouts.values import EarlyContinuations
from treetune.tree import Tree, trees_of
from treetune.vocabulary import Column, Episode, Metrics, Trajectory


@dataclass(frozen=True)
class Distributions:
    """The distributions that answers were sampled from: a service of contexts. An engine reports the
    probability of the sampled token alone; a run lends none of these, who knows the policy's tables may."""

    along: Callable[[Sequence[Trajectory]], list[tuple[Column, Column]]]
    """Returns for each answer of this rank Σ_v π(v)² and the entropy in nats, each with one number for each
    response token: of the distribution that it was sampled from. Collective."""


def beginnings(answers: Sequence[Trajectory]) -> list[Column]:
    """Returns for each answer to a problem a mask of shape [T + 1, N]: whether answer n begins with its first
    t tokens. In row 0 and for the answer itself it is true. Answers in one line."""
    import numpy as np

    if not answers:
        return []
    ((tree),) = trees_of(answers)
    shared = shared_tokens(tree)
    masks = []
    for own, answer in enumerate(answers):
        shared[own][own] = len(answer.response_ids)
        masks.append(np.array(shared[own]) >= np.arange(len(answer.response_ids) + 1)[:, None])
    return masks


def logprobs_of(answer: Trajectory) -> Column:
    """Returns the log-probs of an answer's tokens, 0 for injected ones."""
    import numpy as np

    columns = [
        np.zeros(len(one.token_ids)) if one.logprobs is None else one.logprobs.astype(np.float64)
        for one in answer.segments
    ]
    return np.concatenate(columns)


def token_rows(
    context: RolloutContext, answers: Sequence[Trajectory], advantages: Sequence[Column]
) -> tuple[list[Episode], Metrics]:
    """Returns episodes with an advantage for each response token, and metrics. Collective."""
    episodes = [
        replace(episode_of(context, answer), advantages=of_answer)
        for answer, of_answer in zip(answers, advantages, strict=True)
    ]
    return episodes, advantage_metrics(context, episodes)


@dataclass(frozen=True, kw_only=True)
class OverAnotherCredit(Credit):
    """Credit that makes more of the episodes of another one, which gives their tokens advantages."""

    over: Credit = field(default_factory=Group)
    """The credit whose advantages it works on."""

    @property
    def needs(self) -> tuple[Need, ...]:
        return (Need(Advantages(before_training=True), "it weighs the advantages of tokens"),)

    @property
    def gives(self) -> tuple[Feature, ...]:
        return self.over.gives

    @property
    def critic_settings(self) -> CriticSettings | None:
        return self.over.critic_settings

    def continuations(self, answers: int, tokens: float, limit: int) -> tuple[int, int]:
        return self.over.continuations(answers, tokens, limit)

    def early_continuations(self, context: RolloutContext) -> EarlyContinuations | None:
        return self.over.early_continuations(context)

    def weighed(
        self, context: RolloutContext, answers: Sequence[Trajectory], episodes: Sequence[Episode]
    ) -> list[Episode]:
        """Returns the episodes with other advantages, or with fewer trained tokens, given the answers that
        they are the rows of. Collective."""
        raise NotImplementedError

    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        episodes, metrics = self.over.assign(context, trees)
        by_id = {leaf.id: leaf for tree in trees for leaf in tree.leaves}
        answers = [by_id[episode.trajectory] for episode in episodes]
        episodes = self.weighed(context, answers, episodes)
        return episodes, metrics | advantage_metrics(context, episodes)
