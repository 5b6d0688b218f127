"""Every value estimator's expected values and gradient, over all answers and all that could be sampled of
them, against the exact ones: equal where it says unbiased, and as far off as stated where it doesn't."""

from __future__ import annotations

import pytest

from tests.episode_generators import tabular_mdp as mdp
from tests.episode_generators.expectations import (
    Expectation,
    critic_of,
    expectation,
    knows_length_alone,
)
from treetune.episode_generators.credit.monte_carlo import MonteCarlo
from treetune.episode_generators.values.base import StateRule
from treetune.episode_generators.values.bisect import Bisect
from treetune.episode_generators.values.continuations import FreshContinuations
from treetune.episode_generators.values.control_variate import ControlVariate
from treetune.episode_generators.values.critic import CriticValues
from treetune.episode_generators.values.every_n_tokens import EveryNTokens
from treetune.episode_generators.values.low_probability import LowProbability
from treetune.episode_generators.values.sequential import Sequential
from treetune.episode_generators.values.siblings import Siblings
from treetune.episode_generators.values.smoothed import Smoothed
from treetune.episode_generators.values.step_boundaries import StepBoundaries
from treetune.episode_generators.values.valuation import ValueEstimator
from treetune.vocabulary import Trajectory

A, B, NEXT, EOS = mdp.A, mdp.B, mdp.END_OF_STEP, mdp.EOS

CRITIC = critic_of(knows_length_alone)
"""Off at most states."""


def credit(values: ValueEstimator, samples: int = 1, states: StateRule | None = None) -> MonteCarlo:
    return MonteCarlo(samples=samples, values=values, states=states or StepBoundaries())


def others(*written: mdp.Ids) -> list[Trajectory]:
    """Answers to another problem."""
    return [mdp.trajectory(answer, mdp.problems(2)[1], i) for i, answer in enumerate(written)]


OTHERS = [
    others((A, NEXT, B, NEXT, A, EOS), (B, NEXT, B, NEXT, A, EOS)),
    others((A, EOS), (B, NEXT, A, NEXT, A, EOS), (A, NEXT, A, NEXT, B, EOS)),
]
"""What a control variate learns its coefficient from."""

UNBIASED: list[tuple[MonteCarlo, int]] = [
    (credit(FreshContinuations()), 1),
    (credit(FreshContinuations(), samples=2), 1),
    (credit(FreshContinuations(), states=EveryNTokens(tokens=3)), 1),
    (credit(FreshContinuations(), states=LowProbability(below=0.6, every=1)), 1),
    (credit(FreshContinuations(count_siblings=True)), 2),
    (credit(Siblings()), 2),
    (credit(Siblings()), 3),
    (credit(Siblings(), states=EveryNTokens(tokens=1)), 2),
    (credit(Sequential(error=0.2, most=2, pilot=True)), 1),
    (credit(ControlVariate()), 1),
    (credit(ControlVariate(), samples=2), 1),
    (credit(ControlVariate(over=Siblings())), 2),
]

BIASED: list[tuple[MonteCarlo, int, float, float, float]] = [
    (credit(Sequential(error=0.31, most=3)), 1, 0.0526, 0.9997, 0.0278),
    (credit(Bisect(threshold=0.5)), 1, 0.2100, 0.9833, 0.0),
    (credit(Bisect(threshold=0.5), samples=2), 1, 0.1637, 0.9923, 0.0),
    (credit(Smoothed()), 1, 0.5190, 0.9863, 0.0508),
    (credit(Smoothed(), samples=2), 1, 0.5275, 0.9768, 0.0591),
    (credit(Smoothed(over=Siblings())), 2, 0.4966, 0.9998, 1.9e-5),
    (credit(CriticValues()), 1, 0.8369, 0.5511, 0.2588),
]


def _name(part: object) -> str | None:
    if not isinstance(part, MonteCarlo):
        return None
    return f"{type(part.values).__name__}-{type(part.states).__name__}-{part.samples}"


def expected(part: MonteCarlo, group_size: int, of_others: list[Trajectory]) -> Expectation:
    likely = isinstance(part.states, LowProbability)
    return expectation(part, group_size, CRITIC, of_others, logprobs=likely)


@pytest.mark.parametrize(("part", "group_size"), UNBIASED, ids=_name)
def test_what_says_unbiased_is(part: MonteCarlo, group_size: int) -> None:
    assert part.values.unbiased
    for of_others in OTHERS if isinstance(part.values, ControlVariate) else [[]]:
        found = expected(part, group_size, of_others)
        assert found.bias_and_cosine[0] < 1e-9
        assert found.value_bias < 1e-9


@pytest.mark.parametrize(("part", "group_size", "bias", "cosine", "of_values"), BIASED, ids=_name)
def test_what_is_biased_is_as_far_off_as_stated(
    part: MonteCarlo, group_size: int, bias: float, cosine: float, of_values: float
) -> None:
    assert not part.values.unbiased
    found = expected(part, group_size, [])
    assert (*found.bias_and_cosine, found.value_bias) == pytest.approx((bias, cosine, of_values), abs=5e-5)


def test_every_estimator_is_in_one_of_the_lists() -> None:
    known = {type(part.values) for part, *_ in [*UNBIASED, *BIASED]}
    assert set(ValueEstimator.registered().values()) <= known
