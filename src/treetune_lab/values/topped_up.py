"""Siblings where there are enough of them, continuations where there are too few."""

from __future__ import annotations

from dataclasses import dataclass

from treetune.contracts import Answers, Need
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.values.base import FixedBudget
from treetune.rollouts.values.continuations import values_with
from treetune.rollouts.values.valuation import AlongAnswer, Place, Valuation, ValueEstimator
from treetune.tree import State
from treetune_lab.values.siblings import rewards_of_others


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
