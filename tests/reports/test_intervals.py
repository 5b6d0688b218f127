"""Intervals over seeds and problems hold what they say, as far as so few seeds allow."""

from __future__ import annotations

import random

import pytest

from treetune_tables.statistics import (
    of_shares,
    over_seeds,
    over_seeds_and_problems,
    stretch,
)


def measured(seed_effects: list[float], problem_effects: list[float]) -> list[dict[str, float]]:
    return [
        {str(number): 0.5 + seed + problem for number, problem in enumerate(problem_effects)}
        for seed in seed_effects
    ]


def test_one_seeds_interval_is_that_of_its_problems() -> None:
    values = [float(number % 2) for number in range(400)]
    estimate = over_seeds_and_problems([{str(i): value for i, value in enumerate(values)}])
    assert estimate.mean == 0.5
    # The mean of 400 coins has a standard deviation of 0.5 / 20.
    assert estimate.low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.004)
    assert estimate.high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.004)


def test_problems_that_all_seeds_share_do_not_average_out_over_seeds() -> None:
    hard_and_easy = [0.4 if number % 2 else -0.4 for number in range(100)]
    one = over_seeds_and_problems(measured([0.0], hard_and_easy))
    five = over_seeds_and_problems(measured([0.0] * 5, hard_and_easy))
    assert one.low is not None and five.low is not None
    assert five.mean - five.low == pytest.approx(one.mean - one.low, rel=0.05)


def test_many_seeds_have_the_interval_of_their_mean() -> None:
    generator = random.Random(1)
    effects = [generator.gauss(0, 0.1) for _ in range(60)]
    estimate = over_seeds(effects)
    deviation = (sum((e - estimate.mean) ** 2 for e in effects) / 59 / 60) ** 0.5
    assert estimate.low == pytest.approx(estimate.mean - 1.96 * deviation, abs=0.1 * deviation)
    assert estimate.high == pytest.approx(estimate.mean + 1.96 * deviation, abs=0.1 * deviation)


def coverage(kind: str, seeds: int, runs: int = 400) -> float:
    generator = random.Random(7)
    hits = 0
    for _ in range(runs):
        estimate = over_seeds([generator.gauss(0, 1) for _ in range(seeds)], kind)  # type: ignore[arg-type]
        assert estimate.low is not None and estimate.high is not None
        hits += estimate.low <= 0 <= estimate.high
    return hits / runs


def test_student_intervals_of_three_seeds_hold_the_truth_nineteen_times_in_twenty() -> None:
    assert coverage("student", 3) > 0.92


def test_bootstrap_intervals_of_three_seeds_hold_it_less_often_as_is_documented() -> None:
    assert 0.72 < coverage("bootstrap", 3) < 0.90


def test_the_interval_of_a_share_ends_where_shares_do() -> None:
    estimate = over_seeds([0.9, 0.99, 0.8], "student")
    assert estimate.high is not None and estimate.high > 1
    inside = estimate.within(0.0, 1.0)
    assert (inside.mean, inside.low, inside.high) == (estimate.mean, estimate.low, 1.0)


def test_without_seeds_or_problems_to_vary_there_is_no_interval() -> None:
    estimate = over_seeds([0.25])
    assert (estimate.mean, estimate.low, estimate.high) == (0.25, None, None)
    assert not estimate.excludes_zero


def test_seeds_on_different_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="different problems"):
        over_seeds_and_problems([{"a": 1.0}, {"b": 1.0}])


@pytest.mark.parametrize(("seeds", "quantile"), [(2, 12.706), (3, 4.303), (21, 2.086), (10**6, 1.960)])
def test_few_seeds_are_stretched_by_students_quantiles(seeds: int, quantile: float) -> None:
    """97.5 % quantiles, from any printed table."""
    factor = stretch(seeds, "student") / stretch(seeds, "bootstrap")
    assert factor * 1.959964 == pytest.approx(quantile, abs=6e-4)


def test_where_nothing_is_right_a_share_is_not_sure_to_be_zero() -> None:
    nothing = [{str(number): 0.0 for number in range(30)} for _ in range(3)]
    found = of_shares(nothing, "student")
    assert (found.mean, found.low) == (0.0, 0.0)
    assert found.high == pytest.approx(0.1135, abs=1e-4)


def test_one_seeds_share_of_thirty_problems_has_an_interval_that_holds_it() -> None:
    generator, held = random.Random(3), 0
    for _ in range(400):
        found = of_shares([{str(number): float(generator.random() < 0.05) for number in range(30)}])
        assert found.low is not None and found.high is not None
        held += found.low <= 0.05 <= found.high
    assert held / 400 > 0.93


def test_shares_of_several_seeds_that_vary_have_the_interval_of_seeds_and_problems() -> None:
    generator = random.Random(1)
    values = [{str(number): float(generator.random() < 0.5) for number in range(40)} for _ in range(3)]
    assert of_shares(values, "student") == over_seeds_and_problems(values, "student")
