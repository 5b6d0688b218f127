"""Value estimators, and what they work on: answers, their states, and continuations on request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from treetune.config.registrable import Registrable
from treetune.contracts import Answers, Finding, Need
from treetune.inference.base import SamplingParams
from treetune.rollouts.base import CriticSettings
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean
from treetune.rollouts.values import Beginning, Budget, EarlyContinuations, Estimate, FixedBudget, StateRule
from treetune.tree import State, Tree, sharing_of
from treetune.vocabulary import Metrics, Problem, Segment, TokenIds


class Wanted(NamedTuple):
    """The states of one problem that are to be valued: each the place of a path, and how many of its tokens
    belong to the state."""

    problem: Problem
    prompt_ids: TokenIds
    paths: Sequence[Sequence[Segment]]
    states: Sequence[tuple[int, int]]


def estimates(
    context: RolloutContext,
    wanted: Sequence[Wanted],
    rule: StateRule,
    budget: Budget,
    sampling: SamplingParams,
    purpose: str = "value",
    dealt: bool = True,
) -> tuple[list[list[Estimate]], list[Estimate]]:
    """The estimates of what this rank wants, in its order, and those of all ranks' distinct states.

    An estimate does not depend on the rank that makes it, and those for two purposes share no
    continuation. The work is `dealt` out, or else each state stays with the first rank that wants it, which
    has begun with it. Collective.
    """
    everyones = context.ranks.exchange("value-states", [_lean(one) for one in wanted])
    distinct: dict[bytes, Beginning] = {}
    ranks: dict[bytes, int] = {}
    of_ranks = [(rank, one) for rank, of_rank in enumerate(everyones) for one in of_rank]
    for rank, problem in sorted(of_ranks, key=lambda one: one[1].problem.id):
        # Neighbours in this order share most of their tokens, so that dealing them out like cards gives
        # every rank about the same work.
        beginnings = sorted(_beginnings(problem), key=lambda one: one.token_ids.astype(">i4").tobytes())
        for beginning in beginnings:
            key = beginning.key
            if key not in distinct:
                distinct[key] = beginning
                ranks[key] = len(ranks) % context.ranks.world_size if dealt else rank
    hand = [beginning for key, beginning in distinct.items() if ranks[key] == context.ranks.rank]
    made = context.ranks.exchange("value-estimates", rule.estimate(context, hand, budget, sampling, purpose))
    of_rank = [iter(one) for one in made]
    found = {key: next(of_rank[rank]) for key, rank in ranks.items()}
    own = [[found[beginning.key] for beginning in _beginnings(one)] for one in wanted]
    return own, list(found.values())


def check_continuations(samples: int, temperature: float, key: str = "temperature") -> Iterator[Finding]:
    """What is wrong where all continuations of a state would be the same one."""
    if temperature == 0:
        same = f"{samples} continuations are" if samples > 1 else "a continuation is"
        yield Finding(
            f"{same} sampled at temperature 0, so that all of them earn the same",
            key,
            "sample above 0, or choose a credit without continuations, such as 'group'",
        )


def _lean(one: Wanted) -> Wanted:
    """Without what nobody needs to go on from there."""
    return one._replace(paths=[[replace(s, logprobs=None) for s in path] for path in one.paths])


def _beginnings(wanted: Wanted) -> Iterator[Beginning]:
    for path, length in wanted.states:
        yield Beginning.of(wanted.problem, wanted.prompt_ids, wanted.paths[path], length)


class Value(NamedTuple):
    """What a state is worth to one answer, the variance of that as an estimate, and of how many rewards it is
    the mean.

    The value is what the steps before the state have brought about. What follows is held against `baseline`,
    where there is one: any number that doesn't depend on what the answer did from there on, so that its bias
    is none of the gradient's."""

    value: float
    variance: float
    samples: int = 1
    baseline: float | None = None

    @property
    def held_against(self) -> float:
        return self.value if self.baseline is None else self.baseline


AlongAnswer = list[Value | None]
"""Values before each step of an answer; None where there is no value, and so no boundary: the step and the
one before it are credited as one. Where the first is None, nothing is known of the answer."""


def mean_of(rewards: Sequence[float], low: float = 0.0, high: float = 1.0) -> Value | None:
    """Their mean, with the variance of a mean of so many binomial rewards between `low` and `high`.

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


class Place(NamedTuple):
    """A state on the way of an answer: the answer's place among the leaves of its tree, and how many of its
    tokens belong to the state."""

    leaf: int
    length: int


@dataclass
class Valuation:
    """This rank's trees. `samples` is how many continuations a state usually has; `max_states` bounds the
    states of an answer.

    `found` are the states of these trees that were gone on from; `everyones` the estimates of all ranks'.
    """

    context: RolloutContext
    trees: Sequence[Tree]
    rule: StateRule
    sampling: SamplingParams
    samples: int
    max_states: int | None = None
    found: dict[State, Estimate] = field(default_factory=dict)
    everyones: list[Estimate] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)
    """What estimators have to say of all ranks' states."""

    def __post_init__(self) -> None:
        self.ways = [
            [self._way(tree, leaf, max_states=self.max_states) for leaf in range(len(tree.leaves))]
            for tree in self.trees
        ]

    def _way(self, tree: Tree, leaf: int, max_states: int | None) -> list[tuple[State, Place]]:
        starts = self.rule.step_starts(tree.leaves[leaf])[:max_states]
        return [(tree.state(leaf, start), Place(leaf, start)) for start in starts]

    def go_on(
        self,
        wanted: Sequence[Iterable[tuple[State, Place]]],
        budget: Budget | None = None,
        dealt: bool = True,
    ) -> None:
        """Samples continuations of states, given tree by tree, that weren't gone on from before: `samples` of
        each, or what the budget says. The work is `dealt` out over the ranks, or else stays where it is.
        Collective.
        """
        asked: list[dict[State, Place]] = []
        for of_tree in wanted:
            first: dict[State, Place] = {}
            for state, place in of_tree:
                if state not in self.found:
                    first.setdefault(state, place)
            asked.append(first)
        own, everyones = estimates(
            self.context,
            [
                Wanted(
                    tree.problem,
                    tree.prompt_ids,
                    [leaf.segments for leaf in tree.leaves],
                    list(first.values()),
                )
                for tree, first in zip(self.trees, asked, strict=True)
            ],
            self.rule,
            budget or FixedBudget(self.samples),
            self.sampling,
            dealt=dealt,
        )
        for first, found in zip(asked, own, strict=True):
            self.found.update(zip(first, found, strict=True))
        self.everyones += everyones

    def begin(self, estimator: ValueEstimator) -> None:
        """Samples the continuations that the estimator says it wants of each answer whatever the others are;
        where credit is pipelined, they were asked for when the answer came. Collective.
        """
        first = [
            [way[place] for way in ways for place in estimator.first_states(len(way))] for ways in self.ways
        ]
        self.go_on(first, estimator.budget(self.samples), dealt=self.context.find(EarlyContinuations) is None)

    def anywhere(self, own: bool) -> bool:
        """Whether it is so on any rank. Collective."""
        return any(one for (one,) in self.context.ranks.exchange("value-waves", [own]))

    def value(self, state: State) -> Value | None:
        """The mean of what its continuations earned; None where there are none."""
        estimate = self.found.get(state)
        return None if estimate is None else mean_of(estimate.rewards)


class ValueEstimator(Registrable):
    """How values of states are found."""

    to_declare = ("unbiased",)

    unbiased: bool
    """Whether the mean of an estimate over all that could have been sampled is the state's value, and the
    expectation of the gradient so the policy gradient."""

    learns_from_others: bool = False
    """Whether values of one problem depend on what was sampled of others."""

    @property
    def continues(self) -> bool:
        """Whether it samples continuations."""
        return True

    @property
    def critic_settings(self) -> CriticSettings | None:
        """How the critic is trained that it asks; None where it asks none."""
        return None

    def budget(self, samples: int) -> Budget:
        """How often a state is gone on from, which usually has so many continuations."""
        return FixedBudget(samples)

    def first_states(self, states: int) -> Sequence[int]:
        """Which of an answer's so many states, numbered from the prompt on, it goes on from with that budget
        whatever the other answers are and whatever continuations earned.

        `Valuation.begin` asks for these, and a run may do so as soon as the answer is graded, while others
        are still sampled. None by default: for those that have to see all answers first, or sample nothing.
        """
        return ()

    def values(self, valuation: Valuation) -> list[list[AlongAnswer]]:
        """Of each answer of each tree, one for each state of its way. Collective."""
        raise NotImplementedError


def rewards_of_others(valuation: Valuation) -> list[list[list[list[float]]]]:
    """Of each tree, answer and state of its way: what the other answers earned that went through it."""
    found: list[list[list[list[float]]]] = []
    for tree, ways in zip(valuation.trees, valuation.ways, strict=True):
        shared = shared_tokens(tree)
        found.append([[list(rewards_below(tree, shared, at)) for _, at in way] for way in ways])
    return found


def rewards_below(tree: Tree, shared: list[list[int]], at: Place) -> Iterator[float]:
    """What the other answers earned that begin as an answer does up to a place on its way.

    Where answers grew out of each other, those that also share what follows the place depend on what the
    answer did there, and are left out; of every other branch it is the mean, weighted by what its answers
    reach.
    """
    alike = [place for place in range(len(tree.leaves)) if shared[at.leaf][place] >= at.length]
    if not tree.forked:
        yield from (tree.leaves[place].reward for place in alike if place != at.leaf)
        return
    sharing = sharing_of(tree)
    branches: dict[int, list[int]] = {}
    for place in alike:
        branches.setdefault(sharing.branch_at(place, at.length), []).append(place)
    branches.pop(sharing.branch_at(at.leaf, at.length), None)
    for places in branches.values():
        reached = [sharing.reach[sharing.paths[place][-1]] for place in places]
        yield mean([tree.leaves[place].reward for place in places], reached)


def shared_tokens(tree: Tree) -> list[list[int]]:
    """How many tokens each pair of a tree's answers begins with alike. Answers in one line."""
    import numpy as np

    ids = [leaf.response_ids for leaf in tree.leaves]
    shared = [[0] * len(ids) for _ in ids]
    for one in range(len(ids)):
        for other in range(one + 1, len(ids)):
            length = min(len(ids[one]), len(ids[other]))
            differ = np.flatnonzero(ids[one][:length] != ids[other][:length])
            shared[one][other] = shared[other][one] = int(differ[0]) if len(differ) else length
    return shared


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
    def needs(self) -> tuple[Need, ...]:
        more = Need(Answers(2), "count_siblings counts the other answers", "set it to false")
        return (more,) if self.count_siblings else ()

    def first_states(self, states: int) -> Sequence[int]:
        return range(states)

    def values(self, valuation: Valuation) -> list[list[AlongAnswer]]:
        valuation.begin(self)
        if not self.count_siblings:
            return [[[valuation.value(state) for state, _ in way] for way in ways] for ways in valuation.ways]
        return values_with(rewards_of_others(valuation), valuation)


def values_with(others: list[list[list[list[float]]]], valuation: Valuation) -> list[list[AlongAnswer]]:
    """The mean of what a state's continuations earned and what the other answers did."""

    def value(rewards: list[float], state: State) -> Value | None:
        estimate = valuation.found.get(state)
        return mean_of([*(estimate.rewards if estimate else ()), *rewards])

    return [
        [
            [value(rewards, state) for rewards, (state, _) in zip(of_answer, way, strict=True)]
            for of_answer, way in zip(of_tree, ways, strict=True)
        ]
        for of_tree, ways in zip(others, valuation.ways, strict=True)
    ]
