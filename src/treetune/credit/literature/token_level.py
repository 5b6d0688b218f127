"""Shared by the credits of papers that treat tokens of an answer differently.

* `Distributions`: the entropy and Σ π² of the policy's next-token distributions.
* `ReferenceDistances`: the distance of the policy's distributions from the reference model's.
* `GroupDivergences`: the divergence of the policy's distributions from their mean over a problem's answers.
* `shared_prefixes`: which answers begin with the same tokens.
* `OverAnotherCredit`: the base of credits that change another credit's advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from typing_extensions import override

from treetune.contracts import Advantages, CentredRewards, Feature, Need
from treetune.credit.base import Credit, CriticSettings
from treetune.credit.episodes import advantage_metrics
from treetune.credit.grpo import Group
from treetune.credit.states.early import EarlyContinuations
from treetune.credit.values.base import shared_tokens
from treetune.models.sources import ModelSource
from treetune.rollouts.context import RolloutContext
from treetune.tree import Tree, trees_of
from treetune.vocabulary import Column, Episode, Metrics, Trajectory


@dataclass(frozen=True)
class Distributions:
    """The distributions that answers were sampled from: a service of contexts. Contexts of analyses have it,
    and those of runs whose credit `asks_distributions`. The engine reports only the probability of the
    sampled token, so the trainer runs the policy over the answers once more.

    They are the distributions at the rollout's temperature, before top-p and top-k cut them.
    """

    along: Callable[[Sequence[Episode]], list[tuple[Column, Column]]]
    """Returns for each row of this rank Σ_v π(v)² and the entropy in nats, each of shape [T]: of the
    distributions that the response tokens were sampled from. In runs, 0 at tokens that aren't trained.
    Collective."""


class Deviation(NamedTuple):
    """How far the policy's distributions along a row are from the reference's, and how uncertain the policy
    is, each of shape [T].

    Example: of two tokens, the policy is sure of the first one as the reference is, and has moved at the
    second one: ``Deviation(distances_T=[0.0, 0.12], relative_entropies_T=[0.0, 0.4])``.
    """

    distances_T: Column
    """1 − Σ_v √(π(v)·π_ref(v)), the square of the Hellinger distance, between 0 and 1."""
    relative_entropies_T: Column
    """The policy's entropy / log V, where V is the size of the vocabulary; between 0 and 1."""


@dataclass(frozen=True)
class ReferenceDistances:
    """The distances of the policy from the trainer's reference model: a service of contexts of runs whose
    credit `asks_distributions` and `asks_reference`."""

    along: Callable[[Sequence[Episode]], list[Deviation]]
    """Returns the deviations along each row of this rank; 0 at tokens that aren't trained. Collective."""


@dataclass(frozen=True)
class GroupDivergences:
    """The divergences of the policy's distributions from their means over the answers to a problem: a service
    of contexts of runs whose credit `asks_distributions`, and of the arena.

    Example: at position 2, two answers to a problem have the distributions ``[0.9, 0.1]`` and ``[0.1, 0.9]``.
    Their mean is ``[0.5, 0.5]``, from which both have the divergence 0.10.
    """

    along: Callable[[Sequence[Episode]], list[Column]]
    """Returns for each row of this rank the Jensen-Shannon divergence, in nats, between the distribution of
    each response token and the mean of those that the answers to the same problem have at the same position;
    0 at tokens that aren't trained. Collective."""


def shared_prefixes(answers: Sequence[Trajectory]) -> list[Column]:
    """Returns for each of the N answers to a problem a mask of the answers that begin with the same tokens.

    The mask of an answer with T tokens has the shape [T + 1, N]. Its entry [t, n] is True if answer n begins
    with the first t tokens of this answer. So row 0 is True, and so is the answer's own column. The answers
    must be in one line, that is, without threads.

    Example: of the answers ``ab`` and ``ac`` the first has the mask
    ``[[True, True], [True, True], [True, False]]``.
    """
    import numpy as np

    (tree,) = trees_of(answers)
    # For each answer, its number of first tokens shared with each of the N answers.
    shared_with_all = shared_tokens(tree)
    masks = []
    for index, answer in enumerate(answers):
        length = len(answer.response_ids)
        shared_N = shared_with_all[index]
        shared_N[index] = length  # `shared_tokens` has 0 for an answer and itself
        masks.append(np.array(shared_N) >= np.arange(length + 1)[:, None])
    return masks


@dataclass(frozen=True, kw_only=True)
class OverAnotherCredit(Credit):
    """Credit that changes the advantages of another credit, or which of its tokens are trained."""

    over: Credit = field(default_factory=Group)
    """The credit whose advantages it works on."""

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (Need(Advantages(before_training=True), "it weighs the advantages of tokens"),)

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        # The changed advantages of an answer's tokens differ.
        return tuple(feature for feature in self.over.gives if not isinstance(feature, CentredRewards))

    @property
    @override
    def scores_texts(self) -> bool:
        return self.over.scores_texts

    @property
    @override
    def asks_reference(self) -> bool:
        return self.over.asks_reference

    @property
    @override
    def asks_distributions(self) -> bool:
        return self.over.asks_distributions

    @property
    @override
    def trainer_passes(self) -> int:
        return self.over.trainer_passes

    @property
    @override
    def compares_distributions_with(self) -> Literal["reference", "group"] | None:
        return self.over.compares_distributions_with

    @property
    @override
    def reference(self) -> ModelSource | None:
        return self.over.reference

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

    def weigh_tokens(self, context: RolloutContext, episodes: Sequence[Episode]) -> list[Episode]:
        """Returns the episodes with other advantages, or with fewer trained tokens. Collective."""
        raise NotImplementedError

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        episodes, metrics = self.over.assign(context, trees)
        episodes = self.weigh_tokens(context, episodes)
        # In place of the other credit's metrics of advantages.
        return episodes, metrics | advantage_metrics(context, episodes)
