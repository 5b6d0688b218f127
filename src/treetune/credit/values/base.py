"""The base class of value estimators, and their input: the states of all answers, and their continuations.

A value estimator estimates the value of each state of each answer. Credit (`vineppo`) makes advantages of the
differences between neighbouring values:

    trees ── Valuation: the states of all answers ── ValueEstimator.values ──> a Value for each state

Example: an answer of three steps has three states, the prompt first. Its `StepValues` may be
``[Value(0.4, ...), None, Value(0.7, ...)]``: the second state has no value, so the first two steps are
credited as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from treetune.config.registrable import Registrable
from treetune.credit.base import CriticSettings
from treetune.credit.states.base import Budget, ContinuationPlan, Estimate, FixedBudget, StateRule
from treetune.credit.values.estimates import ProblemStates, StateOfPath, estimate_states
from treetune.engine.requests import SamplingParams
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean
from treetune.tree import State, Tree, sharing_of
from treetune.vocabulary import Metrics, Trajectory

T = TypeVar("T")

# Values along answers


class Value(NamedTuple):
    """The value of a state, as it is used in one answer.

    Example: nine continuations, six of which earned 1, give ``Value(0.67, variance=0.026, samples=9)``.
    """

    value: float
    """The estimated value: the expected reward after the steps before the state."""
    variance: float
    """The variance of the estimate `value`."""
    samples: int = 1
    """The number of rewards whose mean `value` is."""
    baseline: float | None = None
    """The number with which the step after the state is compared, if it isn't `value`. It must not depend on
    the answer's tokens after the state: then the gradient stays unbiased even if the baseline is biased."""

    @property
    def baseline_or_value(self) -> float:
        return self.value if self.baseline is None else self.baseline


StepValues = list[Value | None]
"""The value before each step of an answer. None where the state before a step has no value: the step and the
one before it are then credited as one. If the first entry is None, the answer can't be credited at all."""


def value_of_rewards(rewards: Sequence[float], low: float = 0.0, high: float = 1.0) -> Value | None:
    """Returns the mean of rewards with its variance; None without rewards.

    The variance is computed as if each reward were either `low` or `high`. The probability of `high` is
    estimated as if there were one more reward of each kind (Laplace). So the variance is above 0 even if all
    rewards are equal: a few equal rewards don't show that there is no noise.
    """
    if not rewards:
        return None
    width = high - low
    successes = sum((reward - low) / width for reward in rewards)
    share = (successes + 1) / (len(rewards) + 2)
    share = min(max(share, 0.0), 1.0)  # rewards may lie beyond `low` and `high`
    variance = share * (1 - share) * width**2 / len(rewards)
    return Value(mean(rewards), variance, len(rewards))


# Answers and their states


class AnswerState(NamedTuple):
    """A state of one answer: everything before one of its steps.

    Example: the state before the second step of the third answer of the iteration's first tree. It consists
    of nine response tokens, which lie in the tree's node 4::

        AnswerState(tree=0, leaf=2, length=9, state=State(problem='train/17', node=4, offset=9))
    """

    tree: int
    """Index of the tree in `Valuation.trees`."""
    leaf: int
    """Index of the answer among the leaves of its tree."""
    length: int
    """The number of response tokens in the state."""
    state: State
    """The state without the answer: equal for all answers that begin with the same tokens."""


class ValuedAnswer(NamedTuple):
    """An answer whose states get values, and these states: one before each of its steps, the prompt first.

    If `Valuation.max_states` is set, only its first states are here.
    """

    tree: Tree
    leaf: int
    """Index of the answer among the leaves of its tree."""
    states: Sequence[AnswerState]

    @property
    def trajectory(self) -> Trajectory:
        return self.tree.leaves[self.leaf]

    @property
    def reward(self) -> float:
        return self.tree.leaves[self.leaf].reward


@dataclass
class Valuation:
    """The answers of this rank's trees, whose states get values, and the continuations of these states so
    far.

    An estimator asks for continuations with `sample` or `sample_first`, and reads them with `values`.
    """

    context: RolloutContext
    trees: Sequence[Tree]
    rule: StateRule
    """The rule that says where the states lie, and that continues them."""
    sampling: SamplingParams
    """The sampling parameters of continuations."""
    samples: int
    """The usual number of continuations of a state."""
    max_states: int | None = None
    """The largest number of states of an answer; None: there is no bound."""
    answers: list[ValuedAnswer] = field(init=False)
    """The answers of all trees, tree after tree. Methods that return values return one `StepValues` for each
    of them, in this order."""
    estimates: dict[State, Estimate] = field(default_factory=dict)
    """The estimates of those states of this rank's trees that were continued."""
    all_estimates: list[Estimate] = field(default_factory=list)
    """The estimates of all states that were continued on any rank."""
    metrics: Metrics = field(default_factory=dict)
    """Metrics over the states of all ranks. Estimators add them."""

    def __post_init__(self) -> None:
        self.answers = []
        for tree_index, tree in enumerate(self.trees):
            for leaf, answer in enumerate(tree.leaves):
                starts = self.rule.step_starts(answer)[: self.max_states]
                states = [AnswerState(tree_index, leaf, start, tree.state(leaf, start)) for start in starts]
                self.answers.append(ValuedAnswer(tree, leaf, states))

    @property
    def states(self) -> Iterator[AnswerState]:
        """Yields the states of all answers, answer after answer."""
        for answer in self.answers:
            yield from answer.states

    def by_tree(self, items_of_answers: Sequence[T]) -> list[Sequence[T]]:
        """Splits a sequence with one item for each answer into one sequence for each tree."""
        items_by_tree = []
        start = 0
        for tree in self.trees:
            items_by_tree.append(items_of_answers[start : start + len(tree.leaves)])
            start += len(tree.leaves)
        return items_by_tree

    def sample(
        self, answer_states: Iterable[AnswerState], budget: Budget | None = None, balanced: bool = True
    ) -> None:
        """Samples continuations of the given states, except for states that have continuations already.
        Collective.

        Args:
            answer_states: States of this rank's answers. Equal states are continued once.
            budget: Decides how many continuations a state gets; None: `samples` for each state.
            balanced: True: the states are distributed evenly over the ranks. False: each state is continued
                on this rank.
        """
        # For each tree, the distinct states to continue, each with one of the answers that go through it.
        new_states_by_tree: list[dict[State, AnswerState]] = [{} for _ in self.trees]
        for answer_state in answer_states:
            if answer_state.state not in self.estimates:
                new_states_by_tree[answer_state.tree].setdefault(answer_state.state, answer_state)
        problems = []
        for tree, new_states in zip(self.trees, new_states_by_tree, strict=True):
            paths = [leaf.segments for leaf in tree.leaves]
            states = []
            for answer_state in new_states.values():
                # `leaf` is the answer's index, in the tree's leaves and so in `paths`.
                states.append(StateOfPath(answer_state.leaf, answer_state.length))
            problems.append(ProblemStates(tree.problem, tree.prompt_ids, paths, states))
        plan = ContinuationPlan(budget or FixedBudget(self.samples), self.sampling)
        estimates_by_tree, estimates_of_all_ranks = estimate_states(
            self.context, problems, self.rule, plan, balanced
        )
        for new_states, tree_estimates in zip(new_states_by_tree, estimates_by_tree, strict=True):
            self.estimates.update(zip(new_states, tree_estimates, strict=True))
        self.all_estimates += estimates_of_all_ranks

    def sample_first(self, estimator: ValueEstimator) -> None:
        """Samples continuations of the states that the estimator continues whatever the other answers are
        (`first_states`).

        A run may have begun these continuations during the rollout, as soon as their answer was graded
        (`EarlyContinuations`). Such continuations are not sampled again. Collective.
        """
        first_states: list[AnswerState] = []
        for answer in self.answers:
            first_states += [answer.states[index] for index in estimator.first_states(len(answer.states))]
        # Early continuations are on the rank of their answer. So if the run has begun any, no state may move
        # to another rank.
        nothing_is_early = self.context.early_continuations is None
        self.sample(first_states, estimator.budget(self.samples), balanced=nothing_is_early)

    def is_true_on_any_rank(self, condition: bool) -> bool:
        """Returns whether the condition holds on any rank. Collective."""
        return any(self.context.ranks.exchange("value-waves", condition))

    def value(self, state: State) -> Value | None:
        """Returns the mean reward of the state's continuations; None where there are none."""
        estimate = self.estimates.get(state)
        return None if estimate is None else value_of_rewards(estimate.rewards)

    def values(self) -> list[StepValues]:
        """Returns `value` of every state, answer by answer."""
        values: list[StepValues] = []
        for answer in self.answers:
            values.append([self.value(answer_state.state) for answer_state in answer.states])
        return values

    def sibling_rewards(self) -> dict[AnswerState, list[float]]:
        """Returns, for each state of each answer, the rewards of the other answers that went through it."""
        shared_by_tree = [shared_tokens(tree) for tree in self.trees]
        rewards = {}
        for answer_state in self.states:
            tree_index = answer_state.tree
            tree, shared_counts = self.trees[tree_index], shared_by_tree[tree_index]
            rewards_of_others = rewards_below(tree, shared_counts, answer_state.leaf, answer_state.length)
            rewards[answer_state] = list(rewards_of_others)
        return rewards

    def values_with(self, others: Mapping[AnswerState, Sequence[float]]) -> list[StepValues]:
        """Returns the value of each state, answer by answer: the mean over the rewards of the state's
        continuations and its rewards in `others`. It is None if there are neither."""
        values: list[StepValues] = []
        for answer in self.answers:
            step_values: StepValues = []
            for answer_state in answer.states:
                estimate = self.estimates.get(answer_state.state)
                rewards_of_continuations = () if estimate is None else estimate.rewards
                step_values.append(value_of_rewards([*rewards_of_continuations, *others[answer_state]]))
            values.append(step_values)
        return values


def rewards_below(
    tree: Tree, shared_counts: Sequence[Sequence[int]], leaf: int, length: int
) -> Iterator[float]:
    """Yields the rewards of the other answers that begin with the first `length` tokens of an answer.

    In a forked tree, answers branched off from each other. Answers on this answer's own branch share its next
    tokens, too. So their rewards depend on what this answer did in the state, and they are left out. Each
    other branch yields one number: the weighted mean reward of its answers. The weight of an answer is that
    of its last node (`Sharing.reach_weights`), which shrinks with each branching on the way to this node.

    Args:
        tree: The tree of the answers.
        shared_counts: `shared_tokens` of the tree.
        leaf: The index of the answer.
        length: The length of the state in response tokens.
    """
    others = [other for other in range(len(tree.leaves)) if other != leaf]
    same_beginning = [other for other in others if shared_counts[leaf][other] >= length]
    if not tree.has_forks:
        yield from (tree.leaves[other].reward for other in same_beginning)
        return
    sharing = sharing_of(tree)
    # An answer's branch is the node of the tree that holds the answer's next token after the state, the token
    # at index `length`. `stretch_at` returns this node.
    leaves_by_branch: dict[int, list[int]] = {}
    for other in same_beginning:
        leaves_by_branch.setdefault(sharing.stretch_at(other, length), []).append(other)
    own_branch = sharing.stretch_at(leaf, length)
    leaves_by_branch.pop(own_branch, None)  # None: no other answer is on this branch
    for leaves in leaves_by_branch.values():
        reach_of_leaves = [sharing.reach_weights[sharing.paths[other][-1]] for other in leaves]
        yield mean([tree.leaves[other].reward for other in leaves], reach_of_leaves)


def shared_tokens(tree: Tree) -> list[list[int]]:
    """Returns how many tokens each pair of a tree's answers have in common at their beginning.

    The entry of an answer with itself is 0. The answers must have no parallel threads.

    Example: of the answers ``aab``, ``aac`` and ``ab`` it is ``[[0, 2, 1], [2, 0, 1], [1, 1, 0]]``.
    """
    import numpy as np

    ids = [leaf.response_ids for leaf in tree.leaves]
    shared_counts = [[0] * len(ids) for _ in ids]
    for first in range(len(ids)):
        for second in range(first + 1, len(ids)):
            length = min(len(ids[first]), len(ids[second]))
            differences = np.flatnonzero(ids[first][:length] != ids[second][:length])
            count = int(differences[0]) if len(differences) else length
            shared_counts[first][second] = shared_counts[second][first] = count
    return shared_counts


# Estimators


class ValueEstimator(Registrable):
    """Estimates the values of states. Override `values`, and declare `unbiased`."""

    to_declare = ("unbiased",)

    unbiased: bool
    """Whether the expectation of an estimate, over everything that is sampled, is the state's value. Then the
    expectation of the gradient is the policy gradient."""

    learns_from_others: bool = False
    """Whether the values of a problem's states depend on answers or continuations of other problems."""

    @property
    def continues(self) -> bool:
        """True where it samples continuations."""
        return True

    @property
    def asks_reference(self) -> bool:
        """True where it asks the trainer's reference model for the log-probs of given texts."""
        return False

    @property
    def critic_settings(self) -> CriticSettings | None:
        """Settings of the critic whose values it reads; None where it reads none."""
        return None

    def budget(self, samples: int) -> Budget:
        """Returns the budget with which each state is continued, given the usual number of continuations."""
        return FixedBudget(samples)

    def first_states(self, states: int) -> Sequence[int]:
        """Returns the states of an answer that this estimator continues in any case: whatever the other
        answers are, and whatever continuations earn.

        So a run may sample these continuations as soon as the answer is graded, while other answers are still
        sampled. If the run hasn't, `Valuation.sample_first` samples them. By default there are no such
        states: some estimators have to see all answers first, or sample nothing.

        Args:
            states: How many states the answer has.

        Returns:
            The indices of states, 0 for the prompt.
        """
        return ()

    def values(self, valuation: Valuation) -> list[StepValues]:
        """Returns, for each of `Valuation.answers`, the values of its states. Collective."""
        raise NotImplementedError
