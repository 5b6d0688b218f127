"""VinePPO's estimator: every state is gone on from equally often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treetune.contracts import Answers, Need
from treetune.rollouts.values.valuation import (
    AlongAnswer,
    Valuation,
    Value,
    ValueEstimator,
    mean_of,
)
from treetune.tree import State
from treetune_lab.values.siblings import rewards_of_others


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
