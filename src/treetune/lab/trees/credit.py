"""Credit for answers that grow out of each other: what a branch earned, compared with its siblings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Literal

from annotated_types import Ge
from typing_extensions import override

from treetune.contracts import Advantages, Answers, CreditForRewards, CreditForTrees, Need, OneLine
from treetune.rollouts.base import THREADS_REMEDY, Credit
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit import advantage_metrics, episode_of
from treetune.rollouts.metrics import mean
from treetune.tree import ROOT, Sharing, Tree
from treetune.vocabulary import Episode, Metrics

Advantage = Literal["leave_one_out", "local", "global_and_local", "subgroups"]
Weight = Literal["reach", "once", "each"]

SAME = 1e-8
"""Nodes whose values differ by less are as good as each other: TreeRL's."""


@Credit.register("tree")
@dataclass(frozen=True, kw_only=True)
class TreeCredit(Credit):
    """Each node of a tree, a stretch of tokens from one branching to the next, has an advantage, from the
    rewards of answers below nodes. V(n) is the mean of what the branches at the end of n are worth, and at
    the end of an answer its reward.

    `advantage` of a node n that follows p:

    * ``leave_one_out``: V(n) less a baseline b(n), the mean of V over the other nodes that follow p, among
      which b(p) counts as `prior` of them. RLOO where nothing branches.
    * ``local``: V(n) − V(p), where V(p) has n in it: SPO-tree's (Guo et al., arXiv:2505.23564, section 4.2).
    * ``global_and_local``: g(n) + (g(n) − g(p)), where g(n) is the mean, over the l(n) answers below n, of
      their rewards less the mean reward of all other answers, divided by √l(n), and g(prompt) is 0; a node
      that is no better than p takes the difference of p. TreeRL's (Hou et al., arXiv:2506.11902), as its
      public code has it; section 3.2 has no mean of others and divides g(n) − g(p) as a whole.
    * ``subgroups``: of an answer the mean, over the prompt and all nodes of its path but the last, of its
      reward less the mean reward below (TreePO, Li et al., arXiv:2508.17445, section 3.3).

    `weight` is what a node's tokens count:

    * ``reach``: 1 where an answer begins, divided by the number of branches at each branching since; every
      token is trained once, in the first answer that has it;
    * ``once``: 1, likewise. What lies deep in trees counts more than the policy goes there (SPO-tree);
    * ``each``: 1 in each answer that has them, so that they are trained as often as there are answers below
      (TreeRL, TreePO).

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

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        episodes = [episode for tree in trees for episode in self._episodes(context, tree)]
        return episodes, advantage_metrics(context, episodes)

    def __post_init__(self) -> None:
        if self.advantage == "subgroups" and self.weight != "each":
            raise ValueError(
                f"advantage is 'subgroups', which differs between answers that share tokens, and weight is"
                f" {self.weight!r}, which trains these once: set weight to 'each'"
            )

    def _episodes(self, context: RolloutContext, tree: Tree) -> list[Episode]:
        sharing = Sharing.of(tree)
        rewards = [leaf.reward for leaf in tree.leaves]
        values, advantages = self._values_and_advantages(sharing, rewards)
        episodes = []
        for index, (leaf, path) in enumerate(zip(tree.leaves, sharing.paths, strict=True)):
            ends = tuple(accumulate(sharing.lengths[node] for node in path))
            before = [values[node] for node in (ROOT, *path[:-1])]
            cut_at_nodes = replace(leaf, step_ends=ends)
            episode = episode_of(context, cut_at_nodes, advantages[index], before)
            if self.weight != "each":
                scales = [1.0] * len(path) if self.weight == "once" else None
                episode = sharing.trained_once(index, episode, scales)
            episodes.append(episode)
        return episodes

    def _values_and_advantages(
        self, sharing: Sharing, rewards: Sequence[float]
    ) -> tuple[dict[int, float], list[list[float]]]:
        """Returns the values by node, and for each answer the advantages of its nodes."""
        if self.advantage == "subgroups":
            values = leaf_values(sharing, rewards)
            advantages = []
            for reward, path in zip(rewards, sharing.paths, strict=True):
                # The groups that the answer is in: all answers, and those below each node that it shares.
                baselines = [values[group] for group in (ROOT, *path[:-1])]
                advantage = mean([reward - baseline for baseline in baselines])
                advantages.append([advantage] * len(path))  # the same at all its nodes
            return values, advantages
        if self.advantage == "leave_one_out":
            values, advantage_of_node = _leave_one_out(sharing, rewards, self.prior)
        elif self.advantage == "local":
            values = branch_values(sharing, rewards)
            advantage_of_node = {
                node: values[node] - values[parent]
                for parent, siblings in sharing.children.items()
                for node in siblings
            }
        else:
            values = leaf_values(sharing, rewards)
            advantage_of_node = _global_and_local(sharing, values)
        return values, [[advantage_of_node[node] for node in path] for path in sharing.paths]


def _mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Returns the mean, exactly theirs where all are equal, so that equal rewards give advantages of 0."""
    return values[0] if len(set(values)) == 1 else mean(values, weights)


def branch_values(sharing: Sharing, rewards: Sequence[float]) -> dict[int, float]:
    """Returns V of the prompt and of each node: the mean over what follows it, or the reward."""
    values: dict[int, float] = {}
    for node in (*sorted(sharing.below, reverse=True), ROOT):
        children = sharing.children.get(node)
        if children is None:
            answer = sharing.below[node][0]  # a node without children is the end of one answer
            values[node] = rewards[answer]
        else:
            values[node] = _mean([values[child] for child in children])
    return values


def leaf_values(sharing: Sharing, rewards: Sequence[float]) -> dict[int, float]:
    """Returns the mean reward of all answers below the prompt and each node."""
    values = {node: _mean([rewards[answer] for answer in answers]) for node, answers in sharing.below.items()}
    return values | {ROOT: _mean(rewards)}


def _leave_one_out(
    sharing: Sharing, rewards: Sequence[float], prior: float
) -> tuple[dict[int, float], dict[int, float]]:
    values = branch_values(sharing, rewards)
    baselines: dict[int, float] = {}
    for parent in (ROOT, *sorted(sharing.below)):
        siblings = sharing.children.get(parent, ())
        for node in siblings:
            others = [values[sibling] for sibling in siblings if sibling != node]
            weights = [1.0] * len(others)
            if parent in baselines and (prior or not others):
                # The parent's baseline counts as `prior` siblings, or alone where there are none.
                others.append(baselines[parent])
                weights.append(prior or 1.0)
            if not others:
                # The prompt's only child: it has nothing to be compared with, and an advantage of 0.
                others, weights = [values[node]], [1.0]
            baselines[node] = _mean(others, weights)
    return values, {node: values[node] - baseline for node, baseline in baselines.items()}


def _global_and_local(sharing: Sharing, values: dict[int, float]) -> dict[int, float]:
    count = len(sharing.paths)
    above = {ROOT: 0.0}
    local: dict[int, float] = {}
    for parent in (ROOT, *sorted(sharing.below)):
        for node in sharing.children.get(parent, ()):
            # An answer's reward less the mean of the others' is so many times that less the mean of all.
            alone = (values[node] - values[ROOT]) * count / max(1, count - 1)
            above[node] = alone / math.sqrt(len(sharing.below[node]))
            local[node] = above[node] - above[parent]
            if abs(local[node]) < SAME and parent != ROOT:
                local[node] = local[parent]
    return {node: above[node] + local[node] for node in local}
