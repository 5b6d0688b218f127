"""Baselines for turn rewards.

These tests promise that the closed forms of the expected gradients equal sums over all groups of answers.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treetune.lab.arena.turns import TurnLanguage, by_index, by_return, padded

CHANCE = st.floats(0.05, 0.95)
LANGUAGES = st.builds(
    TurnLanguage, goes_on=st.tuples(CHANCE, CHANCE), earns=st.tuples(CHANCE, CHANCE, CHANCE)
)


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
    enumerated = language.enumerated_gradient(by_index, answers)
    assert enumerated == pytest.approx(language.gradient_by_index(answers))


@settings(max_examples=10)
@given(language=LANGUAGES, answers=st.integers(2, 3))
def test_padded_baselines_and_baselines_by_return_are_unbiased(language: TurnLanguage, answers: int) -> None:
    for baseline in (padded, by_return):
        assert language.enumerated_gradient(baseline, answers) == pytest.approx(language.true_gradient())


def test_large_groups_learn_nothing_about_going_on() -> None:
    language = TurnLanguage(goes_on=(0.5, 0.5), earns=(0.5, 0.5, 0.5))
    assert language.true_gradient() == pytest.approx([0.1875, 0.0625])
    assert (language.gradient_by_index(64) < 1e-4).all()
