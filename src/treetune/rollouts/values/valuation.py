"""What a value estimator works on: answers, their states, and continuations for the asking."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from treetune.config.registrable import Registrable
from treetune.inference.base import SamplingParams
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.critic import CriticSettings
from treetune.rollouts.metrics import mean
from treetune.rollouts.values.base import Budget, Estimate, FixedBudget, StateRule
from treetune.rollouts.values.early import EarlyContinuations
from treetune.rollouts.values.estimation import Wanted, estimates
from treetune.tree import State, Tree
from treetune.vocabulary import Metrics


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
