"""Which problems an iteration gets."""

from __future__ import annotations

import itertools
from collections import Counter
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treetune.tasks.sampling import Replacement, sample_problems

SIZES = st.integers(1, 40).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))
MODES = st.sampled_from(["between_iterations", "epochs"])


@given(SIZES, st.integers(), st.integers(0, 100), MODES)
def test_no_problem_comes_twice_in_an_iteration(
    sizes: tuple[int, int], seed: int, iteration: int, mode: Replacement
) -> None:
    size, count = sizes
    chosen = sample_problems(range(size), count, seed, iteration, mode)
    assert len(chosen) == len(set(chosen)) == count
    assert set(chosen) <= set(range(size))


@given(SIZES, st.integers(), MODES)
def test_the_choice_depends_on_seed_and_iteration_alone(
    sizes: tuple[int, int], seed: int, mode: Replacement
) -> None:
    size, count = sizes
    first = [sample_problems(range(size), count, seed, i, mode) for i in range(5)]
    again = [sample_problems(range(size), count, seed, i, mode) for i in reversed(range(5))]
    assert first == again[::-1]


@given(SIZES, st.integers())
@settings(max_examples=40)
def test_in_epochs_every_problem_comes_once_before_any_comes_again(sizes: tuple[int, int], seed: int) -> None:
    size, count = sizes
    iterations = range(min(3 * size, 30))
    stream = [one for i in iterations for one in sample_problems(range(size), count, seed, i, "epochs")]
    for start in range(0, len(stream) - size + 1, size):
        assert sorted(stream[start : start + size]) == list(range(size))


@pytest.mark.parametrize("mode", ["between_iterations", "epochs"])
def test_iterations_and_seeds_choose_differently(mode: Replacement) -> None:
    seeds_and_iterations = itertools.product(range(3), range(3))
    choices = {tuple(sample_problems(range(1000), 64, *place, mode)) for place in seeds_and_iterations}
    assert len(choices) == 9


def test_between_iterations_all_problems_are_as_likely() -> None:
    drawn = Counter(chain.from_iterable(sample_problems(range(10), 5, 0, i) for i in range(2000)))
    assert all(abs(times - 1000) < 5 * 22.4 for times in drawn.values())  # 5 standard deviations


def test_a_count_that_the_split_cannot_give_is_refused() -> None:
    for count in (0, -1, 11):
        with pytest.raises(ValueError, match="between 1 and 10"):
            sample_problems(range(10), count, 0, 0)
    with pytest.raises(ValueError, match="no problems"):
        sample_problems([], 1, 0, 0)
