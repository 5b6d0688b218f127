"""Values from the other answers to a problem, and from as many continuations as a state needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Answers, Need, OneLine
from treetune.rollouts.base import THREADS_REMEDY
from treetune.rollouts.valuation import AnswerState, StepValues, Valuation, ValueEstimator, mean_of
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
    @override
    def continues(self) -> bool:
        return False

    @override
    def values(self, valuation: Valuation) -> list[StepValues]:
        others = valuation.sibling_rewards()
        return [[mean_of(others[at]) for at in answer.states] for answer in valuation.answers]


@ValueEstimator.register("topped_up")
@dataclass(frozen=True, kw_only=True)
class ToppedUp(ValueEstimator):
    """The mean reward of the other answers through a state and, where these are fewer than the credit's
    `samples`, of as many fresh continuations as are missing.

    The prompt, whose continuations are the longest, usually costs nothing: the group has continued it.
    Unbiased: how many others went through a state says nothing of what they earned behind it."""

    unbiased = True

    needs = (Need(Answers(2), "it counts the other answers"),)

    @override
    def values(self, valuation: Valuation) -> list[StepValues]:
        others = valuation.sibling_rewards()
        # Where answers through a state count others differently, the most that one lacks.
        missing: dict[State, int] = {}
        for at, rewards in others.items():
            missing[at.state] = max(missing.get(at.state, 0), valuation.samples - len(rewards))
        counts = sorted({count for count in missing.values() if count})
        of_ranks = valuation.context.ranks.exchange("value-missing", counts)
        # Sampling is collective, so that each rank goes through all ranks' counts.
        for count in sorted({count for of_rank in of_ranks for count in of_rank}):
            wanted = [at for at in valuation.states if missing[at.state] == count]
            valuation.sample(wanted, FixedBudget(count))
        return valuation.values_with(others)


@dataclass(frozen=True)
class UntilSure(Budget):
    """`first` continuations, and as many again until the standard error is `error` or less, or there are
    `most`.

    With a `pilot`, the first ones only decide how many are requested in one more turn, and don't count.
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
        known = rewards()
        value = mean_of(known)
        if self.pilot:
            if turn > 1:
                return 0
            needed = self.most if value is None else value.variance * len(known) / self.error**2
            return min(max(math.ceil(needed), 1), self.most)
        if value is not None and math.sqrt(value.variance) <= self.error:
            return 0
        return max(0, min(self.first, self.most - turn * self.first))

    @override
    def counted(self, rewards: Sequence[float]) -> Sequence[float]:
        return rewards[self.first :] if self.pilot else rewards


@ValueEstimator.register("sequential")
@dataclass(frozen=True, kw_only=True)
class Sequential(ValueEstimator):
    """Continues a state until its value is known to a standard error (of rewards between 0 and 1). It begins
    with the credit's `samples`, and requests as many again.

    **Biased** as it stands: a state that looks decided early stays so, which draws values to 0 and 1 (on the
    tests' language by 0.03; the expected gradient is 5 % too long, its direction right to a cosine of
    0.9997). Unbiased with a `pilot`."""

    error: Annotated[float, Gt(0)] = 0.15
    """Standard error of a value that is known well enough."""
    most: Annotated[int, Gt(0)] = 32
    """Continuations of a state at most."""
    pilot: bool = False
    """Whether the first continuations only decide how many more there are and are thrown away: unbiased, at
    their price."""

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
    def values(self, valuation: Valuation) -> list[StepValues]:
        valuation.sample_first(self)
        return valuation.values()


@ValueEstimator.register("bisect")
@dataclass(frozen=True, kw_only=True)
class Bisect(ValueEstimator):
    """Continues the prompt, and then the middle of each part of the answer whose ends differ in value by more
    than `threshold` (at the end of the answer stands its reward), until no part does or each is a step. The
    search is OmegaPRM's (Luo et al., arXiv:2406.06592, section 3.2), for every answer, right or wrong.

    Steps between two values are credited as one. **Biased**: whether a state is valued depends on what came
    after it. A value that falls and rises again within a part is not seen. On the tests' language the
    expected gradient is off by 16 % of its length with two continuations (cosine 0.992)."""

    unbiased = False

    threshold: Annotated[float, Gt(0)] = 0.25
    """Difference of values that is looked into. Below the noise of two means, noise is halved."""
    most_tokens: Annotated[int, Gt(0)] | None = None
    """Bounds the continuations of an answer: no part is halved once they have so many tokens. Those of a
    state that it shares with others count for each. None: there is no bound."""

    @override
    def first_states(self, states: int) -> Sequence[int]:
        return (0,)

    @override
    def values(self, valuation: Valuation) -> list[StepValues]:
        searches = [_Search(self, valuation, answer.states, answer.reward) for answer in valuation.answers]
        valuation.sample_first(self)
        while True:
            wanted = [at for search in searches for at in search.next_wave()]
            if not valuation.on_any_rank(bool(wanted)):
                return [search.values() for search in searches]
            valuation.sample(wanted)


class _Search:
    """The search in one answer. Its states are numbered from the prompt at 0 to the answer's end."""

    def __init__(
        self, settings: Bisect, valuation: Valuation, states: Sequence[AnswerState], reward: float
    ) -> None:
        self.settings, self.valuation, self.states, self.reward = settings, valuation, states, reward
        self.valued: list[int] = []
        self.parts: list[tuple[int, int]] = []
        """Parts between two valued states that are being halved at `middles`."""
        self.middles = [0]

    def next_wave(self) -> list[AnswerState]:
        """Returns the states to continue after those whose continuations are there now."""
        if not self.middles:
            return []
        if not self.valued:
            halves = [(0, len(self.states))]
        else:
            halves = [
                half
                for (start, end), middle in zip(self.parts, self.middles, strict=True)
                for half in ((start, middle), (middle, end))
            ]
        self.valued += self.middles
        spent = sum(self.valuation.estimates[self.states[number].state].tokens for number in self.valued)
        if self.settings.most_tokens is not None and spent >= self.settings.most_tokens:
            halves = []
        self.parts = [half for half in halves if self._differs(*half)]
        self.middles = [(start + end) // 2 for start, end in self.parts]
        return [self.states[number] for number in self.middles]

    def _differs(self, start: int, end: int) -> bool:
        before, after = (
            self.reward
            if number == len(self.states)
            else self.valuation.estimates[self.states[number].state].value
            for number in (start, end)
        )
        if end - start == 1 or before is None or after is None:
            return False
        return abs(after - before) > self.settings.threshold

    def values(self) -> StepValues:
        valued = set(self.valued)
        return [
            self.valuation.value(at.state) if number in valued else None
            for number, at in enumerate(self.states)
        ]
