"""Credit for answers that grow out of each other: what a branch earned, held against its siblings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Literal

from annotated_types import Ge

from treetune.contracts import Advantages, Answers, CreditForRewards, CreditForTrees, Need, OneLine
from treetune.episode_generators.base import THREADS_REMEDY, Credit, GenerationContext
from treetune.episode_generators.credit.episodes import advantage_metrics, episode_of
from treetune.episode_generators.metrics import mean
from treetune.episode_generators.trees.sharing import Sharing
from treetune.tree import ROOT, Tree
from treetune.vocabulary import Episode, Metrics

Advantage = Literal["leave_one_out", "local", "global_and_local", "subgroups"]
Weight = Literal["reach", "once", "sqrt_leaves", "leaves"]


@Credit.register("tree")
@dataclass(frozen=True, kw_only=True)
class TreeCredit(Credit):
    """Each node of a tree, a stretch of tokens from one branching to the next, has an advantage, from the
    rewards of answers below nodes. V(n) is the mean of what the branches at the end of n are worth, and at
    the end of an answer its reward. Every token is trained once, in the first answer that has it.

    `advantage` of a node n that follows p:

    * ``leave_one_out``: V(n) less a baseline b(n), the mean of V over the other nodes that follow p, among
      which b(p) counts as `prior` of them. RLOO where nothing branches.
    * ``local``: V(n) − V(p), where V(p) has n in it: SPO-tree's (Guo et al., arXiv:2505.23564, section 4.2).
    * ``global_and_local``: (V(n) − V(prompt)) + (V(n) − V(p)), with V the mean over all answers below:
      TreeRL's (Hou et al., arXiv:2506.11902, section 3.2).
    * ``subgroups``: of an answer the mean, over the prompt and all nodes of its way but the last, of its
      reward less the mean reward below; of a node the mean over answers below (TreePO, Li et al.,
      arXiv:2508.17445, section 3.3).

    `weight` is what a node's tokens count:

    * ``reach``: 1 where an answer begins, divided by the number of branches at each branching since;
    * ``once``: 1. What lies deep in trees counts more than the policy goes there (SPO-tree);
    * ``leaves``: the number of answers below, as where each is trained whole (TreePO);
    * ``sqrt_leaves``: its root (TreeRL, which divides the advantage of whole answers' tokens by it).

    ``leave_one_out`` with ``reach`` is unbiased where the tree's branching is, whatever `prior` is: the
    expected gradient is that of `samples` independent answers. The others are as published and **biased**:
    ``local`` takes a branch for its own baseline (with n branches everywhere it has 1 − 1/n of the
    gradient), and other weights than ``reach`` count deep states as often as they were sampled.
    """

    advantage: Advantage = "leave_one_out"
    weight: Weight = "reach"
    prior: Annotated[float, Ge(0)] = 2.0
    """Few siblings are a noisy baseline, and what lies outside of p knows something of p, too."""

    gives = (Advantages(before_training=True), CreditForRewards(), CreditForTrees())
    needs = (
        Need(Answers(2), "it compares branches with each other"),
        Need(OneLine(), "it looks at what answers begin with alike", THREADS_REMEDY),
    )

    def assign(self, context: GenerationContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        episodes = [episode for tree in trees for episode in self._episodes(context, tree)]
        return episodes, advantage_metrics(context, episodes)

    def _episodes(self, context: GenerationContext, tree: Tree) -> list[Episode]:
        sharing = Sharing.of(tree)
        rewards = [leaf.reward for leaf in tree.leaves]
        values, advantages = self._found(sharing, rewards)
        weight = _WEIGHTS[self.weight]
        episodes = []
        for place, (leaf, path) in enumerate(zip(tree.leaves, sharing.paths, strict=True)):
            ends = tuple(accumulate(sharing.lengths[node] for node in path))
            before = [values[node] for node in (ROOT, *path[:-1])]
            cut_at_nodes = replace(leaf, step_ends=ends)
            episode = episode_of(context, cut_at_nodes, [advantages[node] for node in path], before)
            scales = [weight(sharing, node) for node in path]
            episodes.append(sharing.trained_once(place, episode, scales))
        return episodes

    def _found(self, sharing: Sharing, rewards: Sequence[float]) -> Found:
        if self.advantage == "leave_one_out":
            return _leave_one_out(sharing, rewards, self.prior)
        return _PUBLISHED[self.advantage](sharing, rewards)


Found = tuple[dict[int, float], dict[int, float]]
"""Values and advantages by node."""


def _mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Exactly theirs where all are equal, so that equal rewards give advantages of 0."""
    return values[0] if len(set(values)) == 1 else mean(values, weights)


def branch_values(sharing: Sharing, rewards: Sequence[float]) -> dict[int, float]:
    """V of the prompt and of each node: the mean over what follows it, or the reward."""
    values: dict[int, float] = {}
    for node in (*sorted(sharing.below, reverse=True), ROOT):
        following = sharing.children.get(node)
        values[node] = (
            rewards[sharing.below[node][0]]
            if following is None
            else _mean([values[one] for one in following])
        )
    return values


def leaf_values(sharing: Sharing, rewards: Sequence[float]) -> dict[int, float]:
    """The mean reward of all answers below the prompt and each node."""
    values = {node: _mean([rewards[one] for one in places]) for node, places in sharing.below.items()}
    return values | {ROOT: _mean(rewards)}


def _leave_one_out(sharing: Sharing, rewards: Sequence[float], prior: float) -> Found:
    values = branch_values(sharing, rewards)
    baselines: dict[int, float] = {}
    for parent in (ROOT, *sorted(sharing.below)):
        siblings = sharing.children.get(parent, ())
        for node in siblings:
            known = [values[other] for other in siblings if other != node]
            weights = [1.0] * len(known)
            if parent in baselines and (prior or not known):
                known.append(baselines[parent])
                weights.append(prior or 1.0)
            baselines[node] = _mean(known or [values[node]], weights or [1.0])
    return values, {node: values[node] - baseline for node, baseline in baselines.items()}


def _local(sharing: Sharing, rewards: Sequence[float]) -> Found:
    values = branch_values(sharing, rewards)
    return values, _differences(sharing, lambda node, parent: values[node] - values[parent])


def _global_and_local(sharing: Sharing, rewards: Sequence[float]) -> Found:
    values = leaf_values(sharing, rewards)
    return values, _differences(
        sharing, lambda node, parent: (values[node] - values[ROOT]) + (values[node] - values[parent])
    )


def _subgroups(sharing: Sharing, rewards: Sequence[float]) -> Found:
    values = leaf_values(sharing, rewards)
    of_answers = [
        mean([reward - values[group] for group in (ROOT, *path[:-1])])
        for reward, path in zip(rewards, sharing.paths, strict=True)
    ]
    return values, {
        node: mean([of_answers[place] for place in places]) for node, places in sharing.below.items()
    }


def _differences(sharing: Sharing, of: Callable[[int, int], float]) -> dict[int, float]:
    """Of each node, given it and what it follows."""
    return {node: of(node, parent) for parent, siblings in sharing.children.items() for node in siblings}


_PUBLISHED: dict[Advantage, Callable[[Sharing, Sequence[float]], Found]] = {
    "local": _local,
    "global_and_local": _global_and_local,
    "subgroups": _subgroups,
}
_WEIGHTS: dict[Weight, Callable[[Sharing, int], float]] = {
    "reach": lambda sharing, node: sharing.reach[node],
    "once": lambda sharing, node: 1.0,
    "leaves": lambda sharing, node: float(len(sharing.below[node])),
    "sqrt_leaves": lambda sharing, node: math.sqrt(len(sharing.below[node])),
}
