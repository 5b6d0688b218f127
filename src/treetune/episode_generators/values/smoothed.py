"""Values that know their neighbours: noisy estimates along an answer, smoothed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from treetune.episode_generators.metrics import mean, pooled
from treetune.episode_generators.values.continuations import FreshContinuations
from treetune.episode_generators.values.valuation import AlongAnswer, Valuation, Value, ValueEstimator

LEAST_STEP_VARIANCE = 1e-4
"""Of a walk that the estimates don't show to move: a hundredth of the range of rewards a step."""


@ValueEstimator.register("smoothed")
@dataclass(frozen=True, kw_only=True)
class Smoothed(ValueEstimator):
    """Takes the values of another estimator for noisy looks at a random walk that ends in the answer's
    reward, and gives the walk's expectation at every state (Kalman's filter, and the pass backwards of Rauch,
    Tung and Striebel, AIAA Journal 3(8), 1965).

    The noise of each is that of a binomial mean; the variance of a step of the walk is estimated from the
    differences of neighbours in the whole iteration. **Biased**: a value knows what came after it, the
    answer's reward too, and jumps are flattened. It lowers the error of few continuations most. On the tests'
    language, three steps long, it halves the expected gradient and turns it little (two continuations: cosine
    0.98; one: 0.89); advantages that are normalised don't see its length."""

    unbiased = False

    over: ValueEstimator = field(default_factory=FreshContinuations)

    @property
    def continues(self) -> bool:
        return self.over.continues

    def values(self, valuation: Valuation) -> list[list[AlongAnswer]]:
        found = self.over.values(valuation)
        rewards = [[leaf.reward for leaf in tree.leaves] for tree in valuation.trees]
        paths = [
            [(*along, Value(reward)) for along, reward in zip(of_tree, of_leaves, strict=True)]
            for of_tree, of_leaves in zip(found, rewards, strict=True)
        ]
        squares = [square for of_tree in paths for path in of_tree for square in _squares(path)]
        everyones = pooled(valuation.context, "value-steps", {"square": squares}).get("square", [])
        step = max(mean(everyones) if everyones else 0.0, LEAST_STEP_VARIANCE)
        return [[smoothed(path, step)[:-1] for path in of_tree] for of_tree in paths]


def _squares(path: Sequence[Value | None]) -> list[float]:
    """Of neighbours: the square of their difference less what their noise has of it, for each step between
    them. Its expectation is the variance of a step."""
    known = [(place, one) for place, one in enumerate(path) if one is not None]
    return [
        ((two.value - one.value) ** 2 - one.variance - two.variance) / (later - place)
        for (place, one), (later, two) in pairwise(known)
    ]


def smoothed(path: Sequence[Value | None], step_variance: float) -> AlongAnswer:
    """The expectation of a random walk at each place where it was looked at, given all of them."""
    known = [(place, one) for place, one in enumerate(path) if one is not None]
    filtered: list[Value] = []
    predicted: list[Value] = []
    for number, (place, seen) in enumerate(known):
        if not number:
            predicted.append(seen)
            filtered.append(seen)
            continue
        before = filtered[-1]
        ahead = Value(before.value, before.variance + step_variance * (place - known[number - 1][0]))
        gain = ahead.variance / (ahead.variance + seen.variance)
        predicted.append(ahead)
        filtered.append(Value(ahead.value + gain * (seen.value - ahead.value), (1 - gain) * ahead.variance))
    for number in reversed(range(len(known) - 1)):
        now, ahead, later = filtered[number], predicted[number + 1], filtered[number + 1]
        back = now.variance / ahead.variance
        filtered[number] = Value(
            now.value + back * (later.value - ahead.value),
            now.variance + back**2 * (later.variance - ahead.variance),
        )
    result: AlongAnswer = [None] * len(path)
    for (place, _), value in zip(known, filtered, strict=True):
        result[place] = value
    return result
