"""Value estimators, and what they work on: answers, their states, and continuations on request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Answers, Finding, Need
from treetune.engine.base import SamplingParams
from treetune.rollouts.base import CriticSettings
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean
from treetune.rollouts.values import (
    AnswerPrefix,
    Budget,
    ContinuationPlan,
    EarlyContinuations,
    Estimate,
    FixedBudget,
    StateRule,
)
from treetune.tree import State, Tree, sharing_of
from treetune.vocabulary import Metrics, Problem, Segment, TokenIds

# Estimates of states, each distinct one once, the work shared by the ranks


class ProblemStates(NamedTuple):
    """States of one problem that are to be valued."""

    problem: Problem
    prompt_ids: TokenIds
    paths: Sequence[Sequence[Segment]]
    states: Sequence[tuple[int, int]]
    """The index of a path, and how many of its tokens belong to the state."""

    def prefixes(self) -> Iterator[AnswerPrefix]:
        for path, length in self.states:
            yield AnswerPrefix.of(self.problem, self.prompt_ids, self.paths[path], length)


def estimates(
    context: RolloutContext,
    wanted: Sequence[ProblemStates],
    rule: StateRule,
    plan: ContinuationPlan,
    dealt: bool = True,
) -> tuple[list[list[Estimate]], list[Estimate]]:
    """Returns the estimates of this rank's states, in their order, and those of all ranks' distinct states.

    An estimate does not depend on the rank that makes it. The work is `dealt` out, or else each state stays
    with the first rank that has it, where it was opened. Collective.
    """
    # Nobody needs log-probs to continue a state.
    lean = [
        problem._replace(paths=[[replace(s, logprobs=None) for s in path] for path in problem.paths])
        for problem in wanted
    ]
    gathered = context.ranks.exchange("value-states", lean)
    distinct: dict[bytes, AnswerPrefix] = {}
    ranks: dict[bytes, int] = {}
    of_ranks = [(rank, problem) for rank, of_rank in enumerate(gathered) for problem in of_rank]
    for rank, problem in sorted(of_ranks, key=lambda item: item[1].problem.id):
        # Neighbours in this order share most of their tokens, so that dealing them out like cards gives
        # every rank about the same work.
        for prefix in sorted(problem.prefixes(), key=lambda one: one.token_ids.astype(">i4").tobytes()):
            key = prefix.key
            if key not in distinct:
                distinct[key] = prefix
                ranks[key] = len(ranks) % context.ranks.world_size if dealt else rank
    local = [prefix for key, prefix in distinct.items() if ranks[key] == context.ranks.rank]
    made = context.ranks.exchange("value-estimates", rule.estimate(context, local, plan))
    of_rank = [iter(estimates_of_rank) for estimates_of_rank in made]
    by_key = {key: next(of_rank[rank]) for key, rank in ranks.items()}
    return [[by_key[prefix.key] for prefix in one.prefixes()] for one in wanted], list(by_key.values())


def check_continuations(samples: int, temperature: float, key: str = "temperature") -> Iterator[Finding]:
    """Returns a finding where all continuations of a state would be the same one."""
    if temperature == 0:
        same = f"{samples} continuations are" if samples > 1 else "a continuation is"
        yield Finding(
            f"{same} sampled at temperature 0, so that all of them earn the same",
            key,
            "sample above 0, or choose a credit without continuations, such as 'group'",
        )


# Values along answers


class Value(NamedTuple):
    """The value of a state to one answer."""

    value: float
    """What the steps before the state have brought about."""
    variance: float
    """Of the value as an estimate."""
    samples: int = 1
    """Rewards of which it is the mean."""
    baseline: float | None = None
    """The number that the steps behind the state are compared with, if it is another than the value. It must
    not depend on what the answer did from there on; then its bias is none of the gradient's."""

    @property
    def baseline_or_value(self) -> float:
        return self.value if self.baseline is None else self.baseline


StepValues = list[Value | None]
"""Values before each step of an answer; None where there is no value, and so no boundary: the step and the
one before it are credited as one. Where the first is None, nothing is known of the answer."""


def mean_of(rewards: Sequence[float], low: float = 0.0, high: float = 1.0) -> Value | None:
    """Returns their mean, with the variance of a mean of so many binomial rewards between `low` and `high`.

    The share in it is shrunk towards one half, as if one more had earned `high` and one more `low` (Laplace):
    equal rewards don't say that there is no noise.
    """
    if not rewards:
        return None
    width = high - low
    share = (sum((reward - low) / width for reward in rewards) + 1) / (len(rewards) + 2)
    share = min(max(share, 0.0), 1.0)
    variance = share * (1 - share) * width**2 / len(rewards)
    return Value(mean(rewards), variance, len(rewards))


class Position(NamedTuple):
    """The position of a state in an answer."""

    leaf: int
    """Index of the answer among the leaves of its tree."""
    length: int
    """Tokens of the answer that belong to the state."""


@dataclass
class Valuation:
    """The answers that credit values: this rank's trees, and the continuations of their states so far."""

    context: RolloutContext
    trees: Sequence[Tree]
    rule: StateRule
    sampling: SamplingParams
    samples: int
    """Continuations that a state usually has."""
    max_states: int | None = None
    """Bounds the states of an answer."""
    estimates: dict[State, Estimate] = field(default_factory=dict)
    """By the states of these trees that were continued."""
    all_estimates: list[Estimate] = field(default_factory=list)
    """All ranks' estimates."""
    metrics: Metrics = field(default_factory=dict)
    """Metrics of all ranks' states, from estimators."""

    def __post_init__(self) -> None:
        self.states = [
            [
                [
                    (tree.state(leaf, start), Position(leaf, start))
                    for start in self.rule.step_starts(answer)[: self.max_states]
                ]
                for leaf, answer in enumerate(tree.leaves)
            ]
            for tree in self.trees
        ]
        """By tree and answer, the states before the answer's steps."""

    def sample(
        self,
        wanted: Sequence[Iterable[tuple[State, Position]]],
        budget: Budget | None = None,
        dealt: bool = True,
    ) -> None:
        """Samples continuations of states, given tree by tree, that have none yet: `samples` of each, or what
        the budget says. The work is `dealt` out over the ranks, or else stays where it is. Collective.
        """
        missing: list[dict[State, Position]] = []
        for of_tree in wanted:
            first: dict[State, Position] = {}
            missing.append(first)
            for state, position in of_tree:
                if state not in self.estimates:
                    first.setdefault(state, position)
        local, of_all = estimates(
            self.context,
            [
                ProblemStates(
                    tree.problem,
                    tree.prompt_ids,
                    [leaf.segments for leaf in tree.leaves],
                    list(first.values()),
                )
                for tree, first in zip(self.trees, missing, strict=True)
            ],
            self.rule,
            ContinuationPlan(budget or FixedBudget(self.samples), self.sampling),
            dealt,
        )
        for first, of_tree_estimates in zip(missing, local, strict=True):
            self.estimates.update(zip(first, of_tree_estimates, strict=True))
        self.all_estimates += of_all

    def sample_first(self, estimator: ValueEstimator) -> None:
        """Samples the continuations that the estimator wants of each answer whatever the others are. Where
        credit is pipelined, they were requested when the answer came. Collective.
        """
        first = [
            [states[index] for states in of_tree for index in estimator.first_states(len(states))]
            for of_tree in self.states
        ]
        not_opened = self.context.find(EarlyContinuations) is None
        self.sample(first, estimator.budget(self.samples), dealt=not_opened)

    def on_any_rank(self, condition: bool) -> bool:
        """Returns whether it is true on any rank. Collective."""
        return any(one for (one,) in self.context.ranks.exchange("value-waves", [condition]))

    def value(self, state: State) -> Value | None:
        """Returns the mean reward of the state's continuations; None where there are none."""
        estimate = self.estimates.get(state)
        return None if estimate is None else mean_of(estimate.rewards)

    def values(self) -> list[list[StepValues]]:
        """Returns `value` of every state."""
        return [[[self.value(state) for state, _ in answer] for answer in tree] for tree in self.states]

    def sibling_rewards(self) -> list[list[list[list[float]]]]:
        """Returns, by tree, answer and state, what the other answers earned that went through the state."""
        rewards = []
        for tree, of_tree in zip(self.trees, self.states, strict=True):
            shared = shared_tokens(tree)
            rewards.append([[[*rewards_below(tree, shared, at)] for _, at in answer] for answer in of_tree])
        return rewards

    def values_with(self, others: list[list[list[list[float]]]]) -> list[list[StepValues]]:
        """Returns the means of what a state's continuations and `others` earned."""

        def value(rewards: list[float], state: State) -> Value | None:
            estimate = self.estimates.get(state)
            return mean_of([*(estimate.rewards if estimate else ()), *rewards])

        return [
            [
                [value(rewards, state) for rewards, (state, _) in zip(of_answer, states, strict=True)]
                for of_answer, states in zip(of_tree, states_of_tree, strict=True)
            ]
            for of_tree, states_of_tree in zip(others, self.states, strict=True)
        ]


def rewards_below(tree: Tree, shared: list[list[int]], at: Position) -> Iterator[float]:
    """Yields what the other answers earned that begin as an answer does up to a position.

    Where answers grew out of each other, those that also share what follows the position depend on what the
    answer did there, and are left out; of every other branch it is the mean, weighted by what its answers
    reach.
    """
    alike = [leaf for leaf in range(len(tree.leaves)) if shared[at.leaf][leaf] >= at.length]
    if not tree.forked:
        yield from (tree.leaves[leaf].reward for leaf in alike if leaf != at.leaf)
        return
    sharing = sharing_of(tree)
    branches: dict[int, list[int]] = {}
    for leaf in alike:
        branches.setdefault(sharing.branch_at(leaf, at.length), []).append(leaf)
    branches.pop(sharing.branch_at(at.leaf, at.length), None)
    for leaves in branches.values():
        reached = [sharing.reach[sharing.paths[leaf][-1]] for leaf in leaves]
        yield mean([tree.leaves[leaf].reward for leaf in leaves], reached)


def shared_tokens(tree: Tree) -> list[list[int]]:
    """Returns how many tokens each pair of a tree's answers begins with alike. Answers in one line."""
    import numpy as np

    ids = [leaf.response_ids for leaf in tree.leaves]
    shared = [[0] * len(ids) for _ in ids]
    for one in range(len(ids)):
        for other in range(one + 1, len(ids)):
            length = min(len(ids[one]), len(ids[other]))
            differ = np.flatnonzero(ids[one][:length] != ids[other][:length])
            shared[one][other] = shared[other][one] = int(differ[0]) if len(differ) else length
    return shared


# Estimators


class ValueEstimator(Registrable):
    """Finds the values of states."""

    to_declare = ("unbiased",)

    unbiased: bool
    """Whether the mean of an estimate over all that could have been sampled is the state's value, and the
    expectation of the gradient so the policy gradient."""

    learns_from_others: bool = False
    """Whether values of one problem depend on what was sampled of others."""

    @property
    def continues(self) -> bool:
        """True where it samples continuations."""
        return True

    @property
    def critic_settings(self) -> CriticSettings | None:
        """Settings of the critic that it asks; None where it asks none."""
        return None

    def budget(self, samples: int) -> Budget:
        """Returns how often a state is continued, which usually has so many continuations."""
        return FixedBudget(samples)

    def first_states(self, states: int) -> Sequence[int]:
        """Returns which of an answer's so many states, numbered from the prompt on, it continues with that
        budget whatever the other answers are and whatever continuations earned.

        `Valuation.sample_first` samples these, and a run may do so as soon as the answer is graded, while
        others are still sampled. None by default: for estimators that have to see all answers first, or
        sample nothing.
        """
        return ()

    def values(self, valuation: Valuation) -> list[list[StepValues]]:
        """Returns the values by tree and answer, one for each of its `Valuation.states`. Collective."""
        raise NotImplementedError


@ValueEstimator.register("continuations")
@dataclass(frozen=True, kw_only=True)
class FreshContinuations(ValueEstimator):
    """The mean reward of `samples` fresh continuations (Kazemnejad et al., arXiv:2410.01679, section 4).

    With `count_siblings`, the other answers to the problem that went through a state count as continuations
    of it, which they are: they cost nothing. An answer's own reward stays out, so that its values don't
    depend on what it did next. Unbiased with and without."""

    unbiased = True

    count_siblings: bool = False

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        more = Need(Answers(2), "count_siblings counts the other answers", "set it to false")
        return (more,) if self.count_siblings else ()

    @override
    def first_states(self, states: int) -> Sequence[int]:
        return range(states)

    @override
    def values(self, valuation: Valuation) -> list[list[StepValues]]:
        valuation.sample_first(self)
        if not self.count_siblings:
            return valuation.values()
        return valuation.values_with(valuation.sibling_rewards())
