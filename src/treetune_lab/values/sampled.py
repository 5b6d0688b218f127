"""Values from the other answers to a problem, and from as many continuations as a state needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from treetune.contracts import Answers, Need, OneLine
from treetune.rollouts.base import THREADS_REMEDY
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.valuation import (
    AlongAnswer,
    Place,
    Valuation,
    ValueEstimator,
    mean_of,
    rewards_of_others,
    values_with,
)
from treetune.rollouts.values import Budget, FixedBudget
from treetune.tree import State


@ValueEstimator.register("siblings")
@dataclass(frozen=True, kw_only=True)
class Siblings(ValueEstimator):
    """The mean reward of the other answers below a state, without the answer's own (TEMPO, arXiv:2509.18314;
    RTMC, arXiv:2604.11037). Nothing is sampled.

    Behind the last state that an answer shares with another there are no values: what follows is one step,
    which earned the answer's reward. With no shared state but the prompt this is RLOO. Unbiased: where others
    went on from a state, they are samples of its value, and where none did, the reward is one.

    In a sampled tree (rollout ``tree``) each other branch at a state is one sample."""

    unbiased = True

    needs = (
        Need(Answers(2), "it compares each answer with the others to its problem"),
        Need(OneLine(turns=True), "it looks for equal beginnings", THREADS_REMEDY),
    )

    @property
    def continues(self) -> bool:
        return False

    def values(self, valuation: Valuation) -> list[list[AlongAnswer]]:
        return [
            [[mean_of(rewards) for rewards in of_answer] for of_answer in of_tree]
            for of_tree in rewards_of_others(valuation)
        ]


@ValueEstimator.register("topped_up")
@dataclass(frozen=True, kw_only=True)
class ToppedUp(ValueEstimator):
    """The mean reward of the other answers through a state and, where these are fewer than the credit's
    `samples`, of as many fresh continuations as are missing.

    The prompt, whose continuations are the longest, usually costs nothing: the group has gone on from it.
    Unbiased: how many others went through a state says nothing of what they earned behind it."""

    unbiased = True

    needs = (Need(Answers(2), "it counts the other answers"),)

    def values(self, valuation: Valuation) -> list[list[AlongAnswer]]:
        others = rewards_of_others(valuation)
        missing = [
            _missing(of_tree, ways, valuation.samples)
            for of_tree, ways in zip(others, valuation.ways, strict=True)
        ]
        for count in _counts(missing, valuation.context):
            wanted = [
                [place for way in ways for place in way if of_states[place[0]] == count]
                for of_states, ways in zip(missing, valuation.ways, strict=True)
            ]
            valuation.go_on(wanted, FixedBudget(count))
        return values_with(others, valuation)


def _missing(
    of_tree: list[list[list[float]]], ways: list[list[tuple[State, Place]]], samples: int
) -> dict[State, int]:
    """How many each state is short of; the most where answers that share it count others differently."""
    short: dict[State, int] = {}
    for of_answer, way in zip(of_tree, ways, strict=True):
        for rewards, (state, _) in zip(of_answer, way, strict=True):
            short[state] = max(short.get(state, 0), samples - len(rewards))
    return short


def _counts(missing: list[dict[State, int]], context: RolloutContext) -> list[int]:
    """All there are, on whatever rank: going on is collective."""
    own = sorted({count for of_states in missing for count in of_states.values() if count})
    return sorted({one for of_rank in context.ranks.exchange("value-missing", own) for one in of_rank})


@dataclass(frozen=True)
class UntilSure(Budget):
    """`first` continuations, and as many again until the standard error is `error` or less, or there are
    `most`.

    With a `pilot`, the first ones only decide how many are asked for in one more turn, and don't count.
    """

    first: int
    error: float
    most: int
    pilot: bool = False

    @property
    def bounds(self) -> tuple[int, int]:
        if self.pilot:
            return self.first + 1, self.first + self.most
        return self.first, max(self.first, self.most)

    def ask(self, turn: int, rewards: Callable[[], Sequence[float]]) -> int:
        if turn == 0:
            return self.first
        known = rewards()
        found = mean_of(known)
        if self.pilot:
            if turn > 1:
                return 0
            needed = self.most if found is None else found.variance * len(known) / self.error**2
            return min(max(math.ceil(needed), 1), self.most)
        if found is not None and math.sqrt(found.variance) <= self.error:
            return 0
        return min(self.first, self.most - turn * self.first) if self.most > turn * self.first else 0

    def counted(self, rewards: Sequence[float]) -> Sequence[float]:
        return rewards[self.first :] if self.pilot else rewards


@ValueEstimator.register("sequential")
@dataclass(frozen=True, kw_only=True)
class Sequential(ValueEstimator):
    """Goes on from a state until its value is known to a standard `error` (of rewards between 0 and 1), or
    from `most` continuations. It begins with the credit's `samples`, and asks for as many again.

    **Biased** as it stands: a state that looks decided early stays so, which draws values to 0 and 1 (on the
    tests' language by 0.03; the expected gradient is 5 % too long, its direction right to a cosine of
    0.9997). With `pilot`, the first continuations decide how many more there are and are thrown away:
    unbiased, at their price."""

    error: Annotated[float, Gt(0)] = 0.15
    most: Annotated[int, Gt(0)] = 32
    pilot: bool = False

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.pilot

    def budget(self, samples: int) -> Budget:
        return UntilSure(samples, self.error, max(self.most, samples), self.pilot)

    def first_states(self, states: int) -> Sequence[int]:
        return range(states)

    def values(self, valuation: Valuation) -> list[list[AlongAnswer]]:
        valuation.begin(self)
        return [[[valuation.value(state) for state, _ in way] for way in ways] for ways in valuation.ways]


@ValueEstimator.register("bisect")
@dataclass(frozen=True, kw_only=True)
class Bisect(ValueEstimator):
    """Goes on from the prompt, and then from the middle of each part of the answer whose ends differ in value
    by more than `threshold` (at the end of the answer stands its reward), until no part does or each is a
    step. The search is OmegaPRM's (Luo et al., arXiv:2406.06592, section 3.2), for every answer, right or
    wrong.

    Steps between two values are credited as one. **Biased**: whether a state is valued depends on what came
    after it. A value that falls and rises again within a part is not seen. On the tests' language the
    expected gradient is off by 16 % of its length with two continuations (cosine 0.992).

    `most_tokens` bounds the continuations of an answer: no part is halved once they hold so many tokens.
    Those of a state that it shares with others count for each."""

    unbiased = False

    threshold: Annotated[float, Gt(0)] = 0.25
    """Of a difference of values, to be looked into. Below the noise of two means, noise is halved."""
    most_tokens: Annotated[int, Gt(0)] | None = None

    def first_states(self, states: int) -> Sequence[int]:
        return (0,)

    def values(self, valuation: Valuation) -> list[list[AlongAnswer]]:
        searches = [
            [_Search(self, valuation, way, leaf.reward) for way, leaf in zip(ways, tree.leaves, strict=True)]
            for tree, ways in zip(valuation.trees, valuation.ways, strict=True)
        ]
        valuation.begin(self)
        wanted = [[one for search in of_tree for one in search.next()] for of_tree in searches]
        while valuation.anywhere(any(wanted)):
            valuation.go_on(wanted)
            wanted = [[one for search in of_tree for one in search.next()] for of_tree in searches]
        return [[search.values() for search in of_tree] for of_tree in searches]


class _Search:
    """Of one answer. Places count its states, from the prompt at 0 to its end; `valued` are those with a
    value, `parts` lie between two such and may have to be halved, `wave` is what to go on from next."""

    def __init__(
        self, settings: Bisect, valuation: Valuation, way: list[tuple[State, Place]], reward: float
    ) -> None:
        self.settings, self.valuation, self.way, self.reward = settings, valuation, way, reward
        self.valued: list[int] = []
        self.parts: list[tuple[int, int]] = []
        self.middles = [0]

    @property
    def wave(self) -> list[tuple[State, Place]]:
        return [self.way[place] for place in self.middles]

    def next(self) -> list[tuple[State, Place]]:
        """The wave after the one whose continuations are there now."""
        if not self.middles:
            return []
        if not self.valued:
            halves = [(0, len(self.way))]
        else:
            halves = [
                half
                for (start, end), middle in zip(self.parts, self.middles, strict=True)
                for half in ((start, middle), (middle, end))
            ]
        self.valued += self.middles
        self.parts = [half for half in halves if self._is_to_be_halved(*half)] if self._may_ask() else []
        self.middles = [(start + end) // 2 for start, end in self.parts]
        return self.wave

    def _is_to_be_halved(self, start: int, end: int) -> bool:
        before, after = self._value(start), self._value(end)
        if end - start == 1 or before is None or after is None:
            return False
        return abs(after - before) > self.settings.threshold

    def _value(self, place: int) -> float | None:
        if place == len(self.way):
            return self.reward
        return self.valuation.found[self.way[place][0]].value

    def _may_ask(self) -> bool:
        spent = sum(self.valuation.found[self.way[place][0]].tokens for place in self.valued)
        return self.settings.most_tokens is None or spent < self.settings.most_tokens

    def values(self) -> AlongAnswer:
        valued = set(self.valued)
        return [
            self.valuation.value(state) if place in valued else None
            for place, (state, _) in enumerate(self.way)
        ]
