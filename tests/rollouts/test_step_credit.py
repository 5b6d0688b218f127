"""What an episode says of an answer's steps, whatever steps its credit saw."""

from __future__ import annotations

import math

import pytest

from treetune_lab.analyzers.step_credit import QUANTILE, Shown, step_credit


def test_values_and_advantages_have_intervals_from_the_errors_of_values() -> None:
    found = step_credit([1, 3], 1.0, [0.25, 0.25, 0.25], [1, 3], (0.5, 0.75), (0.03, 0.04))
    assert found.values[0] == Shown(
        0.5, pytest.approx(0.5 - 0.03 * QUANTILE), pytest.approx(0.5 + 0.03 * QUANTILE)
    )  # type: ignore[arg-type]
    first, last = found.advantages
    assert first.high == pytest.approx(0.25 + 0.05 * QUANTILE), "of a difference of two values"
    assert last.high == pytest.approx(0.25 + 0.04 * QUANTILE), "the reward is known"


def test_an_interval_of_a_value_ends_where_rewards_do() -> None:
    found = step_credit([1], -2.0, [0.0], [1], (0.9,), (5.0,))
    assert found.values[0] == Shown(0.9, -2.0, 1.0)


def test_steps_that_are_credited_as_one_have_one_value_and_its_interval_between_them() -> None:
    found = step_credit([1, 2, 3], 0.0, [-0.5] * 3, [1, 2, 3], (0.5, 0.5, 0.5), (0.1, math.inf, math.inf))
    assert [value is None for value in found.values] == [False, True, True]
    assert [one.high for one in found.advantages] == pytest.approx([-0.5 + 0.1 * QUANTILE] * 3)


def test_credit_with_steps_of_its_own_is_laid_over_the_answers() -> None:
    # It cut at 2 and 4 where the answer's steps end at 3 and 4.
    found = step_credit([3, 4], 1.0, [0.3, 0.3, 0.6, 0.9], [2, 4], (0.1, 0.4), (0.1, 0.1))
    assert found.advantages[0] == Shown(pytest.approx(0.4))  # type: ignore[arg-type]
    assert found.values[1] is None
    assert found.advantages[1].low is not None


def test_whole_answers_have_neither_values_nor_intervals() -> None:
    found = step_credit([1, 2], 1.0, [1.5, 1.5])
    assert found.values == (None, None)
    assert found.advantages == (Shown(1.5), Shown(1.5))
