"""Every value estimator's expected gradient, over all answers and all that could be sampled of them, against
the exact policy gradient: equal where it says unbiased, and as far off as stated where it doesn't."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest

from tests.columns import plain
from tests.episode_generators import tabular_mdp as mdp
from treetune.episode_generators.credit.monte_carlo import MonteCarlo
from treetune.episode_generators.values.base import StateRule
from treetune.episode_generators.values.bisect import Bisect
from treetune.episode_generators.values.continuations import FreshContinuations
from treetune.episode_generators.values.every_n_tokens import EveryNTokens
from treetune.episode_generators.values.sequential import Sequential
from treetune.episode_generators.values.siblings import Siblings
from treetune.episode_generators.values.smoothed import Smoothed
from treetune.episode_generators.values.step_boundaries import StepBoundaries
from treetune.episode_generators.values.valuation import ValueEstimator
from treetune.inference.base import Completion, Request
from treetune.tree import trees_of


class Choices:
    """Goes through everything that could be drawn, one way after the other, with its probability."""

    def __init__(self) -> None:
        self._way: list[tuple[int, int]] = []

    def draw(self, probabilities: Sequence[float]) -> int:
        if self._drawn == len(self._way):
            self._way.append((0, len(probabilities)))
        choice, _ = self._way[self._drawn]
        self._drawn += 1
        self.probability *= probabilities[choice]
        return choice

    def ways(self) -> Iterator[None]:
        while True:
            self._drawn, self.probability = 0, 1.0
            yield
            assert self._drawn == len(self._way), "the same draws lead to the same questions"
            while self._way and self._way[-1][0] == self._way[-1][1] - 1:
                self._way.pop()
            if not self._way:
                return
            choice, of = self._way.pop()
            self._way.append((choice + 1, of))


class ChoosingEngine(mdp.TabularEngine):
    """Its continuations are drawn: one that earns 1 or one that earns 0, by what the state is worth."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self._choices = choices

    def _completion(self, request: Request, rng: object, sample: int) -> Completion:
        prefix = mdp.response_part(request.prompt_ids)
        of_reward = {mdp.reward(answer): answer for answer in mdp.answers(prefix, mdp.budget(request))}
        chance = mdp.value(prefix, mdp.budget(request))
        drawn = self._choices.draw([chance, 1 - chance]) if len(of_reward) == 2 else None
        answer = of_reward[1.0 - drawn] if drawn is not None else next(iter(of_reward.values()))
        return mdp.completion(answer[len(prefix) :])


def expected_gradient(credit: MonteCarlo, group_size: int) -> mdp.Gradient:
    total: mdp.Gradient = {}
    for group in itertools.product(mdp.answers().items(), repeat=group_size):
        probability = math.prod(p for _, p in group) / group_size
        answers = [mdp.trajectory(answer, sample=i) for i, (answer, _) in enumerate(group)]
        choices = Choices()
        for _ in choices.ways():
            episodes, _ = credit.assign(mdp.context(engine=ChoosingEngine(choices)), trees_of(answers))
            for episode in episodes:
                assert episode.advantages is not None
                term = mdp.score_gradient(plain(episode.response_ids), episode.advantages.tolist())
                mdp.add(total, term, probability * choices.probability)
    return total


def bias_and_cosine(credit: MonteCarlo, group_size: int) -> tuple[float, float]:
    """The length of the difference from the exact gradient as a share of the exact one's, and the cosine."""
    found, exact = expected_gradient(credit, group_size), mdp.exact_gradient()
    assert found.keys() <= exact.keys()
    length = math.hypot(*exact.values())
    off = math.hypot(*(found.get(key, 0.0) - slope for key, slope in exact.items()))
    along = sum(found.get(key, 0.0) * slope for key, slope in exact.items())
    return off / length, along / (length * math.hypot(*found.values()))


def credit(values: ValueEstimator, samples: int = 1, states: StateRule | None = None) -> MonteCarlo:
    return MonteCarlo(samples=samples, values=values, states=states or StepBoundaries())


UNBIASED: list[tuple[MonteCarlo, int]] = [
    (credit(FreshContinuations()), 1),
    (credit(FreshContinuations(), samples=2), 1),
    (credit(FreshContinuations(), states=EveryNTokens(tokens=3)), 1),
    (credit(FreshContinuations(count_siblings=True)), 2),
    (credit(Siblings()), 2),
    (credit(Siblings()), 3),
    (credit(Siblings(), states=EveryNTokens(tokens=1)), 2),
    (credit(Sequential(error=0.2, most=2, pilot=True)), 1),
]

BIASED: list[tuple[MonteCarlo, int, float, float]] = [
    (credit(Sequential(error=0.31, most=3)), 1, 0.0526, 0.9997),
    (credit(Bisect(threshold=0.5)), 1, 0.2100, 0.9833),
    (credit(Bisect(threshold=0.5), samples=2), 1, 0.1637, 0.9923),
    (credit(Smoothed()), 1, 0.5190, 0.9863),
    (credit(Smoothed(), samples=2), 1, 0.5275, 0.9768),
    (credit(Smoothed(over=Siblings())), 2, 0.4966, 0.9998),
]


def _name(part: object) -> str | None:
    if not isinstance(part, MonteCarlo):
        return None
    return f"{type(part.values).__name__}-{type(part.states).__name__}-{part.samples}"


@pytest.mark.parametrize(("part", "group_size"), UNBIASED, ids=_name)
def test_what_says_unbiased_is(part: MonteCarlo, group_size: int) -> None:
    assert part.values.unbiased
    assert bias_and_cosine(part, group_size)[0] < 1e-9


@pytest.mark.parametrize(("part", "group_size", "bias", "cosine"), BIASED, ids=_name)
def test_what_is_biased_is_as_far_off_as_stated(
    part: MonteCarlo, group_size: int, bias: float, cosine: float
) -> None:
    assert not part.values.unbiased
    assert bias_and_cosine(part, group_size) == pytest.approx((bias, cosine), abs=1e-4)


def test_every_estimator_is_in_one_of_the_lists() -> None:
    known = {type(part.values) for part, *_ in [*UNBIASED, *BIASED]}
    assert set(ValueEstimator.registered().values()) <= known
