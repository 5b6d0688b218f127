"""Values from the other answers to a problem, and from as many continuations as a state needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Answers, Need, OneLine
from treetune.rollouts.base import THREADS_REMEDY
from treetune.rollouts.valuation import Position, StepValues, Valuation, ValueEstimator, mean_of
from treetune.rollouts.values import Budget, FixedBudget
from treetune.tree import State


@ValueEstimator.register("siblings")
@dataclass(frozen=True, kw_only=True)
class Siblings(ValueEstimator):
    """V(s) = the mean reward of the other answers that went through s, without the answer's own reward
    (TEMPO, arXiv:2509.18314; RTMC, arXiv:2604.11037). Nothing is sampled.

    After the last state that an answer shares with another there are no values: the rest of the answer is one
    step, which earned the answer's reward. Where answers share only the prompt, this is RLOO. Unbiased: the
    rewards of other answers through a state are samples of its value, and so is the answer's own reward after
    the last shared state.

    In a sampled tree (rollout ``tree``) each other branch at a state is one sample."""

    unbiased = True

    needs = (
        Need(Answers(2), "it compares each answer with the others to its problem"),
        Need(OneLine(turns=True), "it looks for equal beginnings", THREADS_REMEDY),
    )

    @property
    @override
    def continues(self) -> bool:
        return False

    @override
    def values(self, valuation: Valuation) -> list[list[StepValues]]:
        values_by_tree: list[list[StepValues]] = []
        for rewards_of_tree in valuation.sibling_rewards():
            values_of_tree: list[StepValues] = []
            for rewards_of_answer in rewards_of_tree:
                values_of_tree.append([mean_of(rewards) for rewards in rewards_of_answer])
            values_by_tree.append(values_of_tree)
        return values_by_tree


@ValueEstimator.register("topped_up")
@dataclass(frozen=True, kw_only=True)
class ToppedUp(ValueEstimator):
    """The mean reward of the other answers through a state and, where these are fewer than the credit's
    `samples`, of as many fresh continuations as are missing.

    The prompt's continuations would be the longest, and usually none is missing: the group's answers are
    continuations of the prompt. Unbiased: how many others went through a state says nothing about their
    rewards."""

    unbiased = True

    needs = (Need(Answers(2), "it counts the other answers"),)

    @override
    def values(self, valuation: Valuation) -> list[list[StepValues]]:
        rewards_by_tree = valuation.sibling_rewards()
        missing_by_tree = [
            _missing_samples(rewards_of_tree, states_of_tree, valuation.samples)
            for rewards_of_tree, states_of_tree in zip(rewards_by_tree, valuation.states, strict=True)
        ]
        # States that miss equally many samples are continued in one call. A call is collective, so each rank
        # goes through the counts of all ranks in the same order, also through those of which it has no state.
        local_counts = sorted({count for missing in missing_by_tree for count in missing.values() if count})
        counts_by_rank = valuation.context.ranks.exchange("value-missing", local_counts)
        for count in sorted(set(itertools.chain.from_iterable(counts_by_rank))):
            wanted_by_tree = []
            for missing, states_of_tree in zip(missing_by_tree, valuation.states, strict=True):
                states_and_positions = itertools.chain.from_iterable(states_of_tree)
                wanted_by_tree.append(
                    [(state, position) for state, position in states_and_positions if missing[state] == count]
                )
            valuation.sample(wanted_by_tree, FixedBudget(count))
        return valuation.values_with(rewards_by_tree)


def _missing_samples(
    rewards_of_tree: Sequence[Sequence[Sequence[float]]],
    states_of_tree: Sequence[Sequence[tuple[State, Position]]],
    samples: int,
) -> dict[State, int]:
    """Returns how many continuations each state of a tree needs, to have `samples` rewards with those of the
    other answers; 0 for a state with enough.

    Several answers go through one state, and each leaves its own reward out. In a sampled tree they may count
    differently many others, and the state gets as many as the answer with the fewest needs.
    """
    missing: dict[State, int] = {}
    for rewards_of_answer, states in zip(rewards_of_tree, states_of_tree, strict=True):
        for rewards, (state, _) in zip(rewards_of_answer, states, strict=True):
            missing[state] = max(missing.get(state, 0), samples - len(rewards))
    return missing


@dataclass(frozen=True)
class UntilSure(Budget):
    """Requests `first` continuations, and as many again until the standard error is `error` or less, or there
    are `most`.

    With a `pilot`, the first ones only decide how many are requested in one more turn. They don't count
    towards the value, which would else be biased by the decision to stop.
    """

    first: int
    error: float
    most: int
    pilot: bool = False

    @property
    @override
    def bounds(self) -> tuple[int, int]:
        if self.pilot:
            return self.first + 1, self.first + self.most
        return self.first, max(self.first, self.most)

    @override
    def ask(self, turn: int, rewards: Callable[[], Sequence[float]]) -> int:
        if turn == 0:
            return self.first
        rewards_so_far = rewards()
        value = mean_of(rewards_so_far)  # None where no continuation could be graded
        if self.pilot:
            if turn > 1:
                return 0
            if value is None:
                return self.most
            # `value.variance` is that of a mean of n rewards; one reward's is n times as large, and a mean
            # of N rewards has the standard error `error` where N = variance of one / error².
            variance_of_one_reward = value.variance * len(rewards_so_far)
            needed = math.ceil(variance_of_one_reward / self.error**2)
            return min(max(needed, 1), self.most)
        if value is not None and math.sqrt(value.variance) <= self.error:
            return 0
        requested = turn * self.first
        return max(0, min(self.first, self.most - requested))

    @override
    def counted(self, rewards: Sequence[float]) -> Sequence[float]:
        return rewards[self.first :] if self.pilot else rewards


@ValueEstimator.register("sequential")
@dataclass(frozen=True, kw_only=True)
class Sequential(ValueEstimator):
    """Continues a state until the standard error of its value is small enough (for rewards between 0 and 1).
    It begins with the credit's `samples`, and requests as many again.

    **Biased** without a `pilot`: a state whose first rewards agree gets no more, which draws values to 0 and
    1 (on the tests' language by 0.03; the expected gradient is 5 % too long, with a cosine of 0.9997).
    Unbiased with a `pilot`."""

    error: Annotated[float, Gt(0)] = 0.15
    """Standard error at which a state gets no more continuations."""
    most: Annotated[int, Gt(0)] = 32
    """The most continuations of a state."""
    pilot: bool = False
    """Whether the first continuations only decide how many more are sampled and are then thrown away:
    unbiased, at the price of their tokens."""

    @property
    @override
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.pilot

    @override
    def budget(self, samples: int) -> Budget:
        return UntilSure(samples, self.error, max(self.most, samples), self.pilot)

    @override
    def first_states(self, states: int) -> Sequence[int]:
        return range(states)

    @override
    def values(self, valuation: Valuation) -> list[list[StepValues]]:
        valuation.sample_first(self)
        return valuation.values()


@ValueEstimator.register("bisect")
@dataclass(frozen=True, kw_only=True)
class Bisect(ValueEstimator):
    """Searches each answer for the steps at which the value changes: continues the prompt, then the middle
    state of every part whose ends differ in value by more than `threshold`, until no part does or each is one
    step. The value at the end of an answer is its reward. The search is OmegaPRM's (Luo et al.,
    arXiv:2406.06592, section 3.2), for every answer, right or wrong.

    Steps between two valued states are credited as one. **Biased**: whether a state is valued depends on what
    came after it. A value that falls and rises again within a part is overlooked. On the tests' language the
    expected gradient is off by 16 % of its length with two continuations (cosine 0.992)."""

    unbiased = False

    threshold: Annotated[float, Gt(0)] = 0.25
    """The least difference of values for which a part is halved. If it is below the standard error of a
    difference of two means, parts are halved because of noise."""
    most_tokens: Annotated[int, Gt(0)] | None = None
    """Bounds the continuations of an answer: no part is halved once they have so many tokens. Those of a
    state that several answers share count for each of them. Null: there is no bound."""

    @override
    def first_states(self, states: int) -> Sequence[int]:
        return (0,)

    @override
    def values(self, valuation: Valuation) -> list[list[StepValues]]:
        searches_by_tree: list[list[_Search]] = []
        for tree, states_of_tree in zip(valuation.trees, valuation.states, strict=True):
            searches_by_tree.append(
                [
                    _Search(self, valuation, states, leaf.reward)
                    for states, leaf in zip(states_of_tree, tree.leaves, strict=True)
                ]
            )
        valuation.sample_first(self)  # the prompts
        # All answers are searched side by side: a round continues the middles of all parts to be halved.
        while True:
            wanted_by_tree: list[list[tuple[State, Position]]] = []
            for searches in searches_by_tree:
                wanted_by_tree.append([state for search in searches for state in search.next_states()])
            # Sampling is collective: a rank whose searches are over takes part until all ranks' are.
            if not valuation.on_any_rank(any(wanted_by_tree)):
                break
            valuation.sample(wanted_by_tree)
        return [[search.values() for search in searches] for searches in searches_by_tree]


class _Search:
    """The search in one answer with n states. A state's number is its index; the prompt's is 0, and n is the
    number of the answer's end, whose value is the reward."""

    def __init__(
        self, settings: Bisect, valuation: Valuation, states: list[tuple[State, Position]], reward: float
    ) -> None:
        self.settings, self.valuation, self.states, self.reward = settings, valuation, states, reward
        self.valued: list[int] = []
        """Numbers of the states whose continuations are there."""
        self.parts: list[tuple[int, int]] = []
        """Parts, from one valued state to the next, that are being halved at `middles`."""
        self.middles = [0]
        """Numbers of the states that were requested last; the prompt's at first, which halves nothing."""

    def next_states(self) -> list[tuple[State, Position]]:
        """Returns the states to continue next, once the continuations of the last ones are there."""
        if not self.middles:
            return []
        if not self.valued:
            halves = [(0, len(self.states))]  # the whole answer, now that the prompt has a value
        else:
            halves = []
            for (start, end), middle in zip(self.parts, self.middles, strict=True):
                halves += [(start, middle), (middle, end)]
        self.valued += self.middles
        tokens = sum(self.valuation.estimates[self.states[number][0]].tokens for number in self.valued)
        if self.settings.most_tokens is not None and tokens >= self.settings.most_tokens:
            halves = []
        self.parts = [(start, end) for start, end in halves if self._should_halve(start, end)]
        self.middles = [(start + end) // 2 for start, end in self.parts]
        return [self.states[number] for number in self.middles]

    def _should_halve(self, start: int, end: int) -> bool:
        """Returns whether a part has more than one step, and ends that differ in value by enough."""
        value_at_start, value_at_end = self._value_at(start), self._value_at(end)
        if end - start == 1 or value_at_start is None or value_at_end is None:
            return False
        return abs(value_at_end - value_at_start) > self.settings.threshold

    def _value_at(self, number: int) -> float | None:
        """Returns the value of a state, or the reward at the answer's end; None where none could be had."""
        if number == len(self.states):
            return self.reward
        state, _ = self.states[number]
        return self.valuation.estimates[state].value

    def values(self) -> StepValues:
        """Returns the values of all states; None for those that were never continued."""
        valued = set(self.valued)
        return [
            self.valuation.value(state) if number in valued else None
            for number, (state, _) in enumerate(self.states)
        ]
