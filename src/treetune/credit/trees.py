"""Credit for sampled trees: what a branch earned, compared with its siblings.

SPO-tree (Guo et al., arXiv:2505.23564), TreeRL (Hou et al., arXiv:2506.11902), TreePO (Li et al.,
arXiv:2508.17445), and this package's own `leave_one_out`. The answers of a tree share their first nodes. Each
node gets an advantage from the rewards of the answers below it. Example, with ``leave_one_out`` and ``prior:
0``::

    prompt ──┬── node 0 ──┬── node 1    reward 1        V(0) = 0.5   A(0) = V(0) − V(3) = 0.5
             │            └── node 2    reward 0        A(1) = 1     A(2) = −1
             └── node 3                 reward 0        V(3) = 0     A(3) = −0.5
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Literal

from annotated_types import Ge
from typing_extensions import override

from treetune.contracts import Advantages, Answers, CreditForRewards, CreditForTrees, Need, OneLine
from treetune.credit.base import THREADS_REMEDY, Credit
from treetune.credit.episodes import advantage_metrics, make_episode
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean
from treetune.tree import ROOT, Sharing, Tree
from treetune.vocabulary import Episode, Metrics

Advantage = Literal["leave_one_out", "local", "global_and_local", "subgroups"]
Weight = Literal["reach", "once", "each"]

SAME = 1e-8
"""Nodes whose values differ by less count as equal, as in TreeRL's code."""


@Credit.register("tree")
@dataclass(frozen=True, kw_only=True)
class TreeCredit(Credit):
    """Trees of answers (SPO-tree arXiv:2505.23564, TreeRL arXiv:2506.11902, TreePO): A(n) = V(n) − baseline
    for each node n, where V(n) is the mean reward of the answers below n.

    A node is a stretch of tokens from one branching to the next. V(n) is the mean of V over the nodes that
    follow n, and at the end of an answer its reward.

    `advantage` of a node n that follows p:

    * ``leave_one_out``: V(n) minus a baseline b(n), the mean of V over the other nodes that follow p, among
      which b(p) counts as `prior` of them. RLOO where nothing branches.
    * ``local``: V(n) − V(p), where V(p) includes n: SPO-tree's (Guo et al., arXiv:2505.23564, section 4.2).
    * ``global_and_local``: g(n) + (g(n) − g(p)), where g(n) is the mean, over the l(n) answers below n, of
      their rewards minus the mean reward of all other answers, divided by √l(n), and g(prompt) is 0; a node
      with the same g as p takes the difference of p. TreeRL's (Hou et al., arXiv:2506.11902), as its
      public code has it; section 3.2 has no mean of others and divides g(n) − g(p) as a whole.
    * ``subgroups``: of an answer the mean, over the prompt and all nodes of its path but the last, of its
      reward minus the mean reward below (TreePO, Li et al., arXiv:2508.17445, section 3.3).

    `weight` says how much a node's tokens count:

    * ``reach``: 1 where an answer begins, divided by the number of branches at each branching since; every
      token is trained once, in the first answer that has it;
    * ``once``: 1, and every token is trained once. Deep nodes then count more than the policy visits them
      (SPO-tree);
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
    """How many siblings the parent's baseline b(p) counts as. A baseline of few siblings is noisy, and b(p),
    from the rest of the tree, says something of the value of p, too."""

    gives = (Advantages(before_training=True), CreditForRewards(), CreditForTrees())
    needs = (
        Need(Answers(2), "it compares branches with each other"),
        Need(OneLine(), "it looks for equal beginnings", THREADS_REMEDY),
    )

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        episodes: list[Episode] = []
        for tree in trees:
            episodes += self._episodes(context, tree)
        return episodes, advantage_metrics(context, episodes)

    def __post_init__(self) -> None:
        if self.advantage == "subgroups" and self.weight != "each":
            raise ValueError(
                f"advantage is 'subgroups', which differs between answers that share tokens, and weight is"
                f" {self.weight!r}, which trains these once: set weight to 'each'"
            )

    def _episodes(self, context: RolloutContext, tree: Tree) -> list[Episode]:
        """Returns the training rows of a tree's answers, whose steps are the nodes."""
        sharing = Sharing.of(tree)
        rewards = [leaf.reward for leaf in tree.leaves]
        values, advantages = self._values_and_advantages(sharing, rewards)
        episodes = []
        for index, (leaf, path) in enumerate(zip(tree.leaves, sharing.paths, strict=True)):
            ends = tuple(accumulate(sharing.lengths[node] for node in path))
            values_before_nodes = [values[parent] for parent in (ROOT, *path[:-1])]
            cut_at_nodes = replace(leaf, step_ends=ends)
            episode = make_episode(context, cut_at_nodes, advantages[index], values_before_nodes)
            # With "each", every answer trains all of its nodes. Otherwise a shared node is trained only in
            # the first answer that has it, and its advantages are multiplied by its scale.
            if self.weight != "each":
                scales = [1.0] * len(path) if self.weight == "once" else None  # None: by `Sharing.reach`
                episode = sharing.trained_once(index, episode, scales)
            episodes.append(episode)
        return episodes

    def _values_and_advantages(
        self, sharing: Sharing, rewards: Sequence[float]
    ) -> tuple[dict[int, float], list[list[float]]]:
        """Returns the values by node, and for each answer the advantages of its nodes."""
        # `leaf_values` are means over all answers below a node, `branch_values` means over its children.
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
        else:  # "global_and_local"
            values = leaf_values(sharing, rewards)
            advantage_of_node = _global_and_local(sharing, values)
        return values, [[advantage_of_node[node] for node in path] for path in sharing.paths]


def _mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Returns the mean; where all values are equal, exactly that value, so that equal rewards give advantages
    of 0."""
    return values[0] if len(set(values)) == 1 else mean(values, weights)


def branch_values(sharing: Sharing, rewards: Sequence[float]) -> dict[int, float]:
    """Returns V of the prompt and of each node: the mean over the nodes that follow it, or the reward."""
    values: dict[int, float] = {}
    # A node has a larger number than its parent, so that the nodes after it come first here.
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
    """Returns by node the value V, and the advantage V − b, where the baseline b comes from the siblings.

    Args:
        sharing: The nodes of the tree.
        rewards: The reward of each answer.
        prior: How many siblings the parent's baseline counts as. With 0, the parent's baseline only counts
            where a node has no siblings.
    """
    values = branch_values(sharing, rewards)
    baselines: dict[int, float] = {}
    # In the order of their numbers, parents come before their children, which use the parent's baseline.
    for parent in (ROOT, *sorted(sharing.below)):
        siblings = sharing.children.get(parent, ())
        for node in siblings:
            others = [values[sibling] for sibling in siblings if sibling != node]
            weights = [1.0] * len(others)
            # The prompt has no baseline: only nodes below other nodes have a parent's.
            if parent in baselines and (prior or not others):
                # The parent's baseline counts as `prior` siblings, or alone where there are none.
                others.append(baselines[parent])
                weights.append(prior or 1.0)
            if not others:
                # The prompt's only child can't be compared with anything: its advantage is 0.
                others, weights = [values[node]], [1.0]
            baselines[node] = _mean(others, weights)
    return values, {node: values[node] - baseline for node, baseline in baselines.items()}


def _global_and_local(sharing: Sharing, values: dict[int, float]) -> dict[int, float]:
    """Returns g(n) + (g(n) − g(p)) of each node n that follows p: TreeRL's, from the mean rewards below
    nodes."""
    answers = len(sharing.paths)
    global_advantage = {ROOT: 0.0}  # g
    local_advantage: dict[int, float] = {}  # g(n) − g(p)
    for parent in (ROOT, *sorted(sharing.below)):  # parents before their children
        for node in sharing.children.get(parent, ()):
            # Of k answers, a reward minus the mean of the k − 1 others is k / (k − 1) times the reward minus
            # the mean of all k. With a single answer, the difference is 0, and the factor doesn't matter.
            above_others = (values[node] - values[ROOT]) * answers / max(1, answers - 1)
            global_advantage[node] = above_others / math.sqrt(len(sharing.below[node]))
            local_advantage[node] = global_advantage[node] - global_advantage[parent]
            # As in TreeRL's code, a node with the same g as its parent takes the parent's difference. The
            # prompt has no difference, since nothing precedes it.
            if abs(local_advantage[node]) < SAME and parent != ROOT:
                local_advantage[node] = local_advantage[parent]
    return {node: global_advantage[node] + local_advantage[node] for node in local_advantage}
