"""Exact variances of the gradient, and languages whose decisive steps are diluted.

These tests promise that exact variances equal those of enumerated and of sampled groups of answers.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treetune.parts  # noqa: F401  (registers them)
from tests.lab.arena import test_arena
from treetune.credit.rloo import Rloo
from treetune.lab.arena import languages
from treetune.lab.arena.diluted import by_luck, dilute
from treetune.lab.arena.exact import exact_variance
from treetune.lab.arena.languages import TrueAdvantages, language_of
from treetune.lab.arena.scores import ScoredMethod, gradients_of
from treetune.rollouts.single_turn import SingleTurn

SMALL = test_arena.SMALL


@pytest.mark.parametrize("name", SMALL)
def test_the_exact_variances_are_those_of_all_pairs_of_answers(name: str) -> None:
    language = SMALL[name]
    exact = exact_variance(language, answers=2)
    assert exact.rloo == pytest.approx(test_arena.exact_variance(language, Rloo(), 2)[0], rel=1e-5)
    enumerated = test_arena.exact_variance(language, TrueAdvantages(), 2)[0]
    assert exact.true_advantages == pytest.approx(enumerated, rel=1e-5)


@pytest.mark.parametrize("name", ["middle", "luck"])
def test_the_exact_variances_are_those_of_sampled_groups_of_eight(name: str) -> None:
    language = SMALL[name]
    context = languages.context_of(language, 2000, seed=3)
    trees, _ = SingleTurn(samples=8, max_tokens=language.length + 1).run(
        context, context.task.problems("train")
    )
    exact = exact_variance(language, answers=8)
    for credit, variance in ((Rloo(), exact.rloo), (TrueAdvantages(), exact.true_advantages)):
        gradients_ND, _ = gradients_of(language, context, ScoredMethod(credit), trees)
        squares_N = np.square(gradients_ND - gradients_ND.mean(0)).sum(1)
        standard_error = squares_N.std() / np.sqrt(len(squares_N))
        assert abs(squares_N.mean() - variance) < 4 * standard_error


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("first of 8", 1 / 8),
        ("luck of 16", 2 / 16),  # the first token and the last
        ("all of 2", (1 + 0.5) / 2),  # the second choice matters where the first was right
        ("repair", 1.0),  # every step may go wrong or repair; it has three tokens
    ],
)
def test_the_share_of_decisive_steps_is_the_expected_one(name: str, share: float) -> None:
    assert exact_variance(language_of(name)).decisive_share == pytest.approx(share)


@pytest.mark.parametrize("name", ["first", "majority", "luck"])
def test_a_diluted_language_has_the_values_of_its_choices(name: str) -> None:
    language = SMALL[name]
    assert dilute(language, 3).values_TS.tolist() == language.values_TS.tolist()
    longer = dilute(language, steps=7, wordings=3, tokens=2)
    assert longer.length == 14 and longer.step == 2
    assert longer.values_TS[0, 0] == pytest.approx(language.values_TS[0, 0])
    # The policy's gradient is that of the choices, wherever they are.
    exact, exact_of_longer = exact_variance(language), exact_variance(longer)
    assert exact_of_longer.decisive_share * 7 == pytest.approx(exact.decisive_share * 3)


@given(
    choices=st.sampled_from(["first of 1", "all of 2", "all of 5", "majority of 3", "luck of 2"]),
    wordings=st.integers(2, 6),
    tokens=st.integers(1, 3),
    answers=st.integers(2, 9),
)
def test_the_gain_is_a_line_in_the_inverse_share(
    choices: str, wordings: int, tokens: int, answers: int
) -> None:
    """Each routine step adds the same variance to RLOO's gradient, and none to that of true advantages."""
    language = language_of(choices)
    inverse_shares, gains = [], []
    for times in (1, 2, 5):
        longer = dilute(language, times * language.length, wordings, tokens)
        exact = exact_variance(longer, answers)
        inverse_shares.append(1 / exact.decisive_share)
        gains.append(exact.gain)
    slope = (gains[1] - gains[0]) / (inverse_shares[1] - inverse_shares[0])
    assert slope > 0
    assert gains[2] == pytest.approx(gains[0] + slope * (inverse_shares[2] - inverse_shares[0]))


def test_where_two_options_are_equally_likely_true_advantages_have_no_variance() -> None:
    exact = exact_variance(languages.decision(1, 0, success=0.5))
    assert exact.true_advantages == 0 and math.isinf(exact.gain)


def test_luck_keeps_the_success_rate_and_the_environment_is_not_trained() -> None:
    language = by_luck(steps=6, choices=2, effect=0.1, right=0.25, success=0.3)
    assert language.values_TS[0, 0] == pytest.approx(0.3)
    exact = exact_variance(language, environment=[6])
    assert exact.decisive_share == pytest.approx(2 / 6)
    # The outcome is drawn after the steps: as a token of the policy's, it would decide nearly all.
    assert exact.true_advantages < 0.1 * exact_variance(language).true_advantages


def test_impossible_languages_are_refused() -> None:
    with pytest.raises(ValueError, match="steps is 2, and the language has 3 choices: add steps"):
        dilute(SMALL["majority"], steps=2)
    with pytest.raises(ValueError, match="choose a smaller effect"):
        by_luck(steps=8, choices=8, effect=0.2)
