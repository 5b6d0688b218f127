"""Baselines for turn rewards.

These tests promise that the closed forms of the expected gradients equal sums over all groups of answers.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from treetune.lab.arena.turns import Baseline, TurnLanguage, by_index, by_return, padded

CHANCE = st.floats(0.05, 0.95)
LANGUAGES = st.builds(
    TurnLanguage, goes_on=st.tuples(CHANCE, CHANCE), earns=st.tuples(CHANCE, CHANCE, CHANCE)
)


def enumerated_gradient(language: TurnLanguage, baseline: Baseline, answers: int) -> NDArray[np.float64]:
    """Returns the expected gradient with a baseline, over all groups of so many answers.

    Only the gradient of each group's first answer is computed: in expectation, all answers have the same.
    """
    gradient = np.zeros(language.turns - 1)
    for first, *others in itertools.product(language.answers(), repeat=answers):
        probability = math.prod(answer.probability for answer in (first, *others))
        # After the last turn that an answer can have, there is nothing to choose.
        for turn in range(min(len(first.rewards), language.turns - 1)):
            advantage = sum(first.rewards[turn:]) - baseline(first, others, turn)
            went_on = len(first.rewards) > turn + 1
            # c is the probability of going on after this turn. The derivative of the log-probability of the
            # choice by its logit is 1 − c if the answer went on, and −c if it ended.
            gradient[turn] += probability * advantage * (went_on - language.goes_on[turn])
    return gradient


@given(LANGUAGES)
def test_probabilities_of_all_answers_add_up_to_one(language: TurnLanguage) -> None:
    assert sum(answer.probability for answer in language.answers()) == pytest.approx(1)


@given(LANGUAGES)
def test_the_true_gradient_is_the_derivative_of_the_expected_reward(language: TurnLanguage) -> None:
    def expected_reward(goes_on: tuple[float, ...]) -> float:
        answers = TurnLanguage(goes_on=goes_on, earns=language.earns).answers()
        return sum(answer.probability * sum(answer.rewards) for answer in answers)

    for choice, chance in enumerate(language.goes_on):
        logit = np.log(chance / (1 - chance))
        rewards = []
        for step in (-1e-5, 1e-5):
            moved = list(language.goes_on)
            moved[choice] = float(1 / (1 + np.exp(-(logit + step))))
            rewards.append(expected_reward(tuple(moved)))
        slope = (rewards[1] - rewards[0]) / 2e-5
        assert language.true_gradient()[choice] == pytest.approx(slope, abs=1e-6)


@settings(max_examples=10)
@given(language=LANGUAGES, answers=st.integers(2, 3))
def test_the_baseline_by_index_has_the_bias_of_the_closed_form(language: TurnLanguage, answers: int) -> None:
    enumerated = enumerated_gradient(language, by_index, answers)
    assert enumerated == pytest.approx(language.gradient_by_index(answers))


@settings(max_examples=10)
@given(language=LANGUAGES, answers=st.integers(2, 3))
def test_padded_baselines_and_baselines_by_return_are_unbiased(language: TurnLanguage, answers: int) -> None:
    for baseline in (padded, by_return):
        assert enumerated_gradient(language, baseline, answers) == pytest.approx(language.true_gradient())


def test_large_groups_learn_nothing_about_going_on() -> None:
    language = TurnLanguage(goes_on=(0.5, 0.5), earns=(0.5, 0.5, 0.5))
    assert language.true_gradient() == pytest.approx([0.1875, 0.0625])
    assert (language.gradient_by_index(64) < 1e-4).all()
