"""Credit for sampled trees: the rewards of the answers below a branch, compared with those of its siblings.

SPO-tree (Guo et al., arXiv:2505.23564), TreeRL (Hou et al., arXiv:2506.11902), TreePO (Li et al.,
arXiv:2508.17445), Tree-GRPO (Ji et al., arXiv:2509.21240), and this package's own `leave_one_out`. In a tree,
answers that branched off from each other share their first nodes. Each node gets an advantage from the
rewards of the answers below it. Example, with ``leave_one_out`` and ``prior: 0``::

    prompt ──┬── node 0 ──┬── node 1    reward 1        V(0) = 0.5   A(0) = V(0) − V(3) = 0.5
             │            └── node 2    reward 0        A(1) = 1     A(2) = −1
             └── node 3                 reward 0        V(3) = 0     A(3) = −0.5
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge
from typing_extensions import override

from treetune.contracts import Advantages, Answers, CreditForRewards, CreditForTrees, Need, OneLine
from treetune.credit.base import THREADS_REMEDY, Credit
from treetune.credit.episodes import advantage_metrics, make_episode
from treetune.credit.grpo import group_advantages
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean
from treetune.tree import ROOT, Sharing, Tree
from treetune.vocabulary import Episode, Metrics, Trajectory

Advantage = Literal["leave_one_out", "local", "global_and_local", "subgroups", "intra_and_inter"]
StateWeight = Literal["reach", "once", "each"]

EQUAL_VALUES_TOLERANCE = 1e-8
"""For ``global_and_local``: g(n) and g(p) count as equal if they differ by less than this, as in TreeRL's
code."""

EPS = 1e-6
"""Added to the standard deviations of ``intra_and_inter``, as in Tree-GRPO's code."""


@Credit.register("tree")
@dataclass(frozen=True, kw_only=True)
class TreeCredit(Credit):
    """Trees of answers (SPO-tree arXiv:2505.23564, TreeRL arXiv:2506.11902, TreePO, Tree-GRPO
    arXiv:2509.21240): the advantage of a node comes from the rewards of the answers below it, compared with
    those of other branches.

    A node is a stretch of tokens from one branching to the next. In answers of several turns it may consist
    of several turns, which have the same advantage. Below, p is the node before n, or the prompt. V(n) is the
    mean of V over the nodes that follow n; for the last node of an answer it is the answer's reward.

    `advantage` chooses the formula of a node's advantage. The first three formulas differ from node to node:

    * ``leave_one_out``: V(n) − b(n). The baseline b(n) is the mean of V over the other nodes that follow p,
      and of b(p), which counts as much as `prior` nodes. If answers branch only at the prompt, this is RLOO.
    * ``local``: V(n) − V(p), where V(p) includes n: SPO-tree's (Guo et al., arXiv:2505.23564, section 4.2).
    * ``global_and_local``: g(n) + (g(n) − g(p)). For an answer, take its reward minus the mean reward of all
      other answers. g(n) is the mean of this difference over the l(n) answers below n, divided by √l(n); g of
      the prompt is 0. If g(n) = g(p), then g(n) − g(p) is replaced by the same term of p. This is TreeRL's
      formula (Hou et al., arXiv:2506.11902), as in its public code. In section 3.2 of the paper, the mean of
      the other answers isn't subtracted, and g(n) − g(p) is divided as a whole.

    The last two give the same advantage to all nodes of an answer:

    * ``subgroups``: the mean of (the answer's reward − the mean reward of a group) over the groups that the
      answer is in. One group is all answers to the problem. Each node of the answer's path but the last gives
      another group: the answers below this node (TreePO, Li et al., arXiv:2508.17445, section 3.3).
    * ``intra_and_inter``: the sum of two advantages as GRPO's, (reward − mean) / (standard deviation + 1e-6).
      The first compares the answers that grew from the same answer that was sampled from the prompt, the
      second all answers to the problem. This is Tree-GRPO's formula (Ji et al., arXiv:2509.21240), as in its
      public code. If no other answer grew from an answer, its first advantage is 0; in the public code it is
      the reward.

    `weight` chooses how much a node's tokens count:

    * ``reach``: a token is trained once, in the first answer that has it. Its weight is 1 in the first node
      of an answer, and each branching divides the weight by the number of its branches;
    * ``once``: a token is trained once, with the weight 1. Deep nodes then count more than in proportion to
      how often the policy visits them (SPO-tree);
    * ``each``: a token is trained in each answer that has it, each time with the weight 1 (TreeRL, TreePO,
      Tree-GRPO).

    ``leave_one_out`` with ``reach`` is unbiased if the tree's branching is, whatever `prior` is: the expected
    gradient is that of `samples` independent answers. The other combinations are as published, and
    **biased**. The baseline of ``local`` includes the branch itself: with n branches everywhere, the expected
    gradient is 1 − 1/n of the true one. Weights other than ``reach`` count deep states as often as they were
    sampled.
    """

    advantage: Advantage = "leave_one_out"
    """The formula of a node's advantage, see above."""
    weight: StateWeight = "reach"
    """The rule that says how much a node's tokens count, see above."""
    prior: Annotated[float, Ge(0)] = 2.0
    """The number of siblings that the parent's baseline b(p) counts as, for ``leave_one_out``. It makes the
    baseline of a node with few siblings less noisy, since b(p) comes from further answers, and also estimates
    the value of p."""

    gives = (Advantages(before_training=True), CreditForRewards(), CreditForTrees())
    needs = (
        Need(Answers(2), "it compares branches with each other"),
        Need(OneLine(turns=True), "it looks for equal beginnings", THREADS_REMEDY),
    )

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        episodes: list[Episode] = []
        for tree in trees:
            episodes += self._make_training_rows(context, tree)
        return episodes, advantage_metrics(context, episodes)

    def __post_init__(self) -> None:
        if self.advantage in ("subgroups", "intra_and_inter") and self.weight != "each":
            raise ValueError(
                f"advantage is {self.advantage!r}, which differs between answers that share tokens, and"
                f" weight is {self.weight!r}, which trains these once: set weight to 'each'"
            )

    def _make_training_rows(self, context: RolloutContext, tree: Tree) -> list[Episode]:
        """Returns the training rows of a tree's answers.

        A node holds the tokens from one branching to the next. A step of a row is a node, or a turn within a
        node.
        """
        sharing = Sharing.of(tree)
        values, advantages = self._compute_values_and_advantages(sharing, tree.leaves)
        episodes = []
        for index, (leaf, path) in enumerate(zip(tree.leaves, sharing.paths, strict=True)):
            steps = _steps_of_nodes(leaf, [sharing.lengths[node] for node in path])
            step_advantages = [advantages[index][step.node_index] for step in steps]
            values_before_steps = []
            for step in steps:
                # `values` has the value of the state after each node, and under `ROOT` that of the prompt.
                node = path[step.node_index]
                previous_node = path[step.node_index - 1] if step.node_index > 0 else ROOT
                if step.begins_node:
                    values_before_steps.append(values[previous_node])
                else:
                    # Within a node nothing branches, so its value is the best estimate for the states in it.
                    values_before_steps.append(values[node])
            cut_into_steps = replace(leaf, step_ends=tuple(step.end for step in steps))
            episode = make_episode(context, cut_into_steps, step_advantages, values_before_steps)
            # With "each", every answer trains all of its nodes. Otherwise a shared node is trained only in
            # the first answer that has it.
            if self.weight == "once":
                episode = sharing.train_tokens_once(index, episode, scales=[1.0] * len(path))
            elif self.weight == "reach":
                # Without `scales`, the advantages of each node are multiplied by its `Sharing.reach_weights`.
                episode = sharing.train_tokens_once(index, episode)
            episodes.append(episode)
        return episodes

    def _compute_values_and_advantages(
        self, sharing: Sharing, answers: Sequence[Trajectory]
    ) -> tuple[dict[int, float], list[list[float]]]:
        """Returns the values by node, and for each answer the advantages of its nodes."""
        rewards = [answer.reward for answer in answers]
        # Each kind of advantage has its own values V: `leaf_values` are means over all answers below a node,
        # `branch_values` are means over the V of the nodes that follow it.
        if self.advantage == "intra_and_inter":
            advantages_of_answers = _intra_and_inter(sharing, answers)
            advantages = []
            for advantage, path in zip(advantages_of_answers, sharing.paths, strict=True):
                advantages.append([advantage] * len(path))  # the same at all its nodes
            return leaf_values(sharing, rewards), advantages
        if self.advantage == "subgroups":
            values = leaf_values(sharing, rewards)
            advantages = []
            for reward, path in zip(rewards, sharing.paths, strict=True):
                # The answer is compared within several groups: all answers, and the answers below each node
                # that it shares with others. The last node of a path is never shared. An earlier node isn't
                # shared either if the other answers below it could not be graded.
                shared_nodes = [node for node in path[:-1] if len(sharing.leaves_below[node]) > 1]
                baselines = [values[group] for group in (ROOT, *shared_nodes)]
                advantage = mean([reward - baseline for baseline in baselines])
                advantages.append([advantage] * len(path))  # the same at all its nodes
            return values, advantages
        if self.advantage == "leave_one_out":
            values, advantage_of_node = _leave_one_out(sharing, rewards, self.prior)
        elif self.advantage == "local":
            values = branch_values(sharing, rewards)
            advantage_of_node = {}
            for parent, siblings in sharing.children.items():
                for node in siblings:
                    advantage_of_node[node] = values[node] - values[parent]
        else:  # "global_and_local"
            values = leaf_values(sharing, rewards)
            advantage_of_node = _global_and_local(sharing, values)
        advantages = []
        for path in sharing.paths:
            advantages.append([advantage_of_node[node] for node in path])
        return values, advantages


class _Step(NamedTuple):
    """A step of an answer of a tree.

    Example: an answer has two nodes of 4 and 6 tokens, of which the second consists of two turns that end
    after 7 and 10 tokens: ``_Step(4, 0), _Step(7, 1), _Step(10, 1, begins_node=False)``.
    """

    end: int
    """The number of response tokens up to the end of the step."""
    node_index: int
    """The index of the step's node among the answer's nodes."""
    begins_node: bool = True
    """Whether this is the first step of its node."""


def _steps_of_nodes(answer: Trajectory, lengths: Sequence[int]) -> list[_Step]:
    """Returns the steps of an answer's row: each node, or each turn of a node that has several turns.

    Args:
        answer: The answer. If it has turns, each of its steps is a turn with the reply to it.
        lengths: The number of tokens of each node.
    """
    # Without turns, each node is one segment: the tokens between two branchings. If there are more segments
    # than nodes, the answer has turns, and its `step_ends` are their ends.
    has_turns = len(answer.segments) > len(lengths)
    steps: list[_Step] = []
    start = 0
    for node_index, end in enumerate(accumulate(lengths)):
        ends_within_node: list[int] = []
        if has_turns:
            ends_within_node = [turn_end for turn_end in answer.step_ends if start < turn_end < end]
        begins_node = True
        for step_end in [*ends_within_node, end]:
            steps.append(_Step(step_end, node_index, begins_node))
            begins_node = False
        start = end
    return steps


def _mean_or_equal_value(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Returns the mean. If all values are equal, it is exactly their value, without a rounding error: equal
    rewards then give advantages of exactly 0."""
    return values[0] if len(set(values)) == 1 else mean(values, weights)


def branch_values(sharing: Sharing, rewards: Sequence[float]) -> dict[int, float]:
    """Returns V of the prompt and of each node: the mean of V over the nodes that follow it. For a node that
    ends an answer, V is the answer's reward."""
    values: dict[int, float] = {}
    answers_below = sharing.leaves_below  # for each node, the indices of the answers below it
    # A node has a larger number than its parent, so from the largest number down, children come first.
    for node in (*sorted(answers_below, reverse=True), ROOT):
        children = sharing.children.get(node)
        if children is None:
            answer = answers_below[node][0]  # a node without children is the end of one answer
            values[node] = rewards[answer]
        else:
            values[node] = _mean_or_equal_value([values[child] for child in children])
    return values


def leaf_values(sharing: Sharing, rewards: Sequence[float]) -> dict[int, float]:
    """Returns the mean reward of all answers below the prompt and each node."""
    values: dict[int, float] = {}
    for node, answers in sharing.leaves_below.items():
        values[node] = _mean_or_equal_value([rewards[answer] for answer in answers])
    values[ROOT] = _mean_or_equal_value(rewards)
    return values


def _leave_one_out(
    sharing: Sharing, rewards: Sequence[float], prior: float
) -> tuple[dict[int, float], dict[int, float]]:
    """Returns two dictionaries by node: the values V, and the advantages V − b. The baseline b of a node is
    computed from its siblings and its parent.

    Args:
        sharing: The nodes of the tree.
        rewards: The reward of each answer.
        prior: The number of siblings that the parent's baseline counts as. With 0, the parent's baseline only
            counts where a node has no siblings.
    """
    values = branch_values(sharing, rewards)
    baselines: dict[int, float] = {}
    # Children use their parent's baseline. In the order of their numbers, parents come before their children,
    # and the prompt (`ROOT`, −1) comes first.
    for parent, siblings in sorted(sharing.children.items()):
        for node in siblings:
            others = [values[sibling] for sibling in siblings if sibling != node]
            # The prompt has no baseline, so the nodes that follow it are compared only with their siblings.
            if others:
                weights = [1.0] * len(others)
                if prior and parent in baselines:  # the parent's baseline counts as `prior` siblings
                    others.append(baselines[parent])
                    weights.append(prior)
                baselines[node] = _mean_or_equal_value(others, weights)
            elif parent in baselines:
                baselines[node] = baselines[parent]
            else:
                # The prompt's only child can't be compared with anything. Its own value as the baseline gives
                # it the advantage 0.
                baselines[node] = values[node]
    return values, {node: values[node] - baseline for node, baseline in baselines.items()}


def _intra_and_inter(sharing: Sharing, answers: Sequence[Trajectory]) -> list[float]:
    """Returns the advantage of each answer: GRPO's within the answer's tree, plus GRPO's among all answers.

    In this function, a tree is an answer that was sampled from the prompt, with all answers that grew from
    it. The tree has the number (`sample`) of the answer that was sampled from the prompt. Even an answer that
    branched off at the prompt itself belongs to the tree, though it shares no response token with the others.
    """
    tree_of_answer: dict[int, int] = {}
    tree_of_first_node: dict[int, int] = {}
    for answer, path in zip(answers, sharing.paths, strict=True):
        if answer.fork is None:  # the answer was sampled from the prompt
            tree = answer.sample
        else:
            # An answer that could not be graded is missing in `answers`. If the answer from which this one
            # branched off is missing, its number serves as the tree's number.
            earlier_answer = answer.fork.sample
            tree = tree_of_answer.get(earlier_answer, earlier_answer)
        # Answers with the same first node are in one tree, even if the answer that connects them is missing.
        tree_of_answer[answer.sample] = tree_of_first_node.setdefault(path[0], tree)
    indices_by_tree: dict[int, list[int]] = {}  # of the answers in `answers`
    for index, answer in enumerate(answers):
        indices_by_tree.setdefault(tree_of_answer[answer.sample], []).append(index)
    rewards = [answer.reward for answer in answers]
    inter_advantages = group_advantages(rewards, std=True, eps=EPS)
    advantages = [0.0] * len(answers)
    for indices in indices_by_tree.values():
        rewards_of_tree = [rewards[index] for index in indices]
        intra_advantages = group_advantages(rewards_of_tree, std=True, eps=EPS)
        for index, intra_advantage in zip(indices, intra_advantages, strict=True):
            advantages[index] = intra_advantage + inter_advantages[index]
    return advantages


def _global_and_local(sharing: Sharing, values: dict[int, float]) -> dict[int, float]:
    """Returns TreeRL's advantage of each node n: g(n) + (g(n) − g(p)), where p is the node before n.

    For an answer, take its reward minus the mean reward of all other answers. g(n) is the mean of this
    difference over the l(n) answers below n, divided by √l(n). g of the prompt is 0.

    Args:
        sharing: The nodes of the tree.
        values: The mean reward of all answers below the prompt and each node.
    """
    answer_count = len(sharing.paths)
    global_advantage = {ROOT: 0.0}  # g
    local_advantage: dict[int, float] = {}  # g(n) − g(p)
    # Parents come before their children, and the prompt (`ROOT`, −1) comes first.
    for parent, children in sorted(sharing.children.items()):
        for node in children:
            # Of k answers, a reward minus the mean of the k − 1 others equals k / (k − 1) times the
            # difference of the reward and the mean of all k. The same holds if such differences are averaged
            # over several answers. With a single answer the difference is 0, whatever the factor is.
            above_others = (values[node] - values[ROOT]) * answer_count / max(1, answer_count - 1)
            answers_below = sharing.leaves_below[node]
            global_advantage[node] = above_others / math.sqrt(len(answers_below))
            local_advantage[node] = global_advantage[node] - global_advantage[parent]
            # As in TreeRL's code, a node with the same g as its parent takes the parent's g(n) − g(p). The
            # prompt has none, since nothing precedes it.
            if abs(local_advantage[node]) < EQUAL_VALUES_TOLERANCE and parent != ROOT:
                local_advantage[node] = local_advantage[parent]
    return {node: global_advantage[node] + local_advantage[node] for node in local_advantage}
