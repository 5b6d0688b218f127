"""Every sign of collapse is seen where it is, counts after its patience, and is silent where it isn't."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treetune.runtime.diagnostics import (
    SIGNS,
    Diagnostics,
    Row,
    Sign,
    Watched,
    diagnose,
    last_good,
    verdict,
)

SAMPLED = Watched(sampled=True, max_tokens=64)


def healthy(iteration: int, **more: float) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "train/entropy": 0.3,
        "train/grad_norm": 0.5 + 0.1 * (iteration % 3),
        "episodes/response_tokens": 40.0,
        "episodes/unfinished": 0.02,
        "episodes/mixed": 0.6,
        "episodes/reward": 0.4,
        "episodes/count": 512.0,
        "episodes/problems": 64.0,
    } | more


def history(*changes: dict[str, float]) -> list[dict[str, Any]]:
    """Ten healthy iterations, then one for each of the changes."""
    rows = [healthy(i) for i in range(10)]
    return rows + [healthy(10 + i, **change) for i, change in enumerate(changes)]


def counting(settings: Diagnostics, rows: Sequence[Row], watched: Watched = SAMPLED) -> set[Sign]:
    return {sign for sign, one in diagnose(settings, watched, rows).items() if one.counts}


SHOWN: dict[Sign, dict[str, float]] = {
    "entropy_low": {"train/entropy": 0.014},
    "answers_short": {"episodes/response_tokens": 9.9},
    "answers_at_limit": {"episodes/response_tokens": 61.0},
    "truncated": {"episodes/unfinished": 0.51},
    "no_spread": {"episodes/mixed": 0.09},
}
NOT_SHOWN: dict[Sign, dict[str, float]] = {
    "entropy_low": {"train/entropy": 0.016},
    "answers_short": {"episodes/response_tokens": 10.1},
    "answers_at_limit": {"episodes/response_tokens": 60.0},
    "truncated": {"episodes/unfinished": 0.5},
    "no_spread": {"episodes/mixed": 0.1},
}


def test_a_healthy_run_shows_none_and_all_were_looked_for() -> None:
    found = diagnose(Diagnostics(), SAMPLED, history())
    assert set(found) == set(SIGNS)
    assert all(one.since is None and not one.counts for one in found.values())


@pytest.mark.parametrize("sign", SHOWN)
def test_a_sign_counts_once_it_was_seen_often_enough_in_a_row(sign: Sign) -> None:
    settings = Diagnostics(patience=3)
    shown, not_shown = SHOWN[sign], NOT_SHOWN[sign]
    assert counting(settings, history(shown, shown)) == set()
    assert counting(settings, history(shown, shown, shown)) == {sign}
    assert counting(settings, history(shown, shown, not_shown, shown)) == set()
    assert counting(settings, history(shown, shown, shown, not_shown)) == set()
    found = diagnose(settings, SAMPLED, history(not_shown, shown, shown))[sign]
    assert (found.since, found.counts) == (11, False)
    assert counting(Diagnostics(patience=1), history(not_shown)) == set()
    assert counting(Diagnostics(patience=1), history(shown)) == {sign}


OFF: dict[Sign, dict[str, Any]] = {
    "entropy_low": {"entropy_floor": None, "entropy_share": None},
    "answers_short": {"length_floor": None, "length_share": None},
    "answers_at_limit": {"limit_share": None},
    "truncated": {"unfinished_ceiling": None},
    "no_spread": {"mixed_floor": None},
    "gradient_noise": {"gradient_variation_ceiling": None},
}


@pytest.mark.parametrize("sign", SIGNS)
def test_a_sign_without_a_threshold_is_not_looked_for(sign: Sign) -> None:
    found = diagnose(Diagnostics(patience=1, **OFF[sign]), SAMPLED, history(SHOWN.get(sign, {})))
    assert set(found) == set(SIGNS) - {sign}


def test_floors_hold_from_the_first_iteration_and_shares_after_the_beginning() -> None:
    settings = Diagnostics(patience=1, beginning=3, length_floor=5, length_share=0.5)
    low = [healthy(0, **{"train/entropy": 0.001, "episodes/response_tokens": 4.0})]
    assert counting(settings, low) == {"entropy_low", "answers_short"}
    falling = [healthy(i, **{"episodes/response_tokens": tokens}) for i, tokens in enumerate((40, 10, 10))]
    assert counting(settings, falling) == set(), "these are the beginning"
    falling.append(healthy(3, **{"episodes/response_tokens": 9.9}))
    assert counting(settings, falling) == {"answers_short"}, "less than half of 20"


def test_gradient_norms_that_do_not_settle_are_noise_and_those_that_fall_are_not() -> None:
    def norms(*values: float) -> list[dict[str, Any]]:
        return [healthy(i, **{"train/grad_norm": value}) for i, value in enumerate(values)]

    settings = Diagnostics(patience=1, window=6, gradient_variation_ceiling=1.0)
    wild = (0.1, 5.0, 0.1, 0.1, 0.1, 0.1)  # a standard deviation of 2.0 at a mean of 0.92
    assert counting(settings, norms(*wild)) == {"gradient_noise"}
    assert counting(settings, norms(*wild[:-1])) == set(), "the window is not full"
    assert counting(settings, norms(*wild, 0.5, 0.5)) == set(), "the spike has left the window"
    assert counting(settings, norms(2.2, 1.6, 1.1, 0.9, 0.7, 0.6)) == set()
    assert counting(settings, norms(*[0.0] * 6)) == set()
    # Two values, x in five of six iterations: the coefficient of variation is known in closed form.
    found = diagnose(settings, SAMPLED, norms(*wild))["gradient_noise"]
    assert f"{(4.9 / 6**0.5) / ((5 + 0.5) / 6):.3g} of its mean" in found.words


def test_what_a_run_lacks_is_not_looked_for() -> None:
    shown = {name: value for change in SHOWN.values() for name, value in change.items()}
    collapsed = history(*[shown] * 3)
    assert set(diagnose(Diagnostics(), Watched(sampled=False), collapsed)) == {"gradient_noise"}
    assert "answers_at_limit" not in diagnose(Diagnostics(), Watched(sampled=True), collapsed)
    alone = history(*[shown | {"episodes/problems": 512.0}] * 3)  # one answer to a problem
    assert "no_spread" not in counting(Diagnostics(), alone)
    bare = [{"iteration": i, "episodes/reward": 0.5} for i in range(5)]
    assert diagnose(Diagnostics(), SAMPLED, bare) == {}
    assert diagnose(Diagnostics(), SAMPLED, []) == {}


def test_rewards_that_are_levelled_teach_nothing_though_scores_differ() -> None:
    settings = Diagnostics(patience=2)
    levelled = {"credit/advantage_zero": 1.0}
    assert counting(settings, history(levelled, levelled)) == {"no_spread"}
    assert counting(settings, history(levelled, {"credit/advantage_zero": 0.999})) == set()
    words = diagnose(settings, SAMPLED, history(levelled))["no_spread"].words
    assert words == "every advantage is 0, though answers differ in score for 0.6 of the problems"
    assert counting(settings, history(levelled | SHOWN["no_spread"], levelled)) == {"no_spread"}
    alone = levelled | {"episodes/problems": 512.0, "episodes/mixed": 0.0}  # one answer to a problem
    assert counting(settings, history(alone, alone)) == {"no_spread"}
    assert diagnose(settings, SAMPLED, history(alone))["no_spread"].words == "every advantage is 0"


def test_before_its_window_or_beginning_is_over_it_is_too_early_for_a_sign() -> None:
    def early(n: int, **changes: Any) -> set[Sign]:
        found = diagnose(
            Diagnostics(window=5, beginning=2, **changes), SAMPLED, [healthy(i) for i in range(n)]
        )
        return {sign for sign, one in found.items() if one.early}

    assert early(2) == {"entropy_low", "answers_short", "gradient_noise"}
    assert early(2, entropy_share=None) == {"answers_short", "gradient_noise"}, "a floor needs no beginning"
    assert early(4) == {"gradient_noise"}
    assert early(5) == set()


def test_an_iteration_that_trained_nothing_neither_ends_a_sign_nor_adds_to_it() -> None:
    shown = SHOWN["entropy_low"]
    rows = history(shown, shown, shown)
    del rows[11]["train/entropy"]
    assert counting(Diagnostics(patience=3), rows) == set()
    rows.append(healthy(13, **shown))
    assert counting(Diagnostics(patience=3), rows) == {"entropy_low"}


def test_what_stops_is_what_may_and_the_good_weights_are_from_before_it_began() -> None:
    stop = Diagnostics(on_collapse="stop", stopping=("entropy_low", "truncated"), patience=2)
    low, cut, spread = (SHOWN[sign] for sign in ("entropy_low", "truncated", "no_spread"))

    def judged(settings: Diagnostics, *changes: dict[str, float]) -> tuple[list[str], int | None]:
        rows = history(*changes)
        found = diagnose(settings, SAMPLED, rows)
        return [one.sign for one in verdict(settings, found)], last_good(settings, found, len(rows) - 1)

    assert judged(Diagnostics(patience=2), low, low) == ([], None)
    assert judged(stop, spread, spread) == ([], 11), "it may not stop the run"
    # Iteration 10 (from 0) samples with the weights after 10: they show it, those after 9 did not.
    assert judged(stop, low) == ([], 9)
    assert judged(stop, low, low) == (["entropy_low"], 9)
    assert judged(stop, low, low | cut) == (["entropy_low"], 9)
    assert judged(stop, low, cut) == ([], 10)


def test_a_stop_that_nothing_can_cause_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="none of the signs that may stop"):
        Diagnostics(on_collapse="stop", stopping=("truncated",), unfinished_ceiling=None)
    with pytest.raises(ValueError, match="none of the signs that may stop"):
        Diagnostics(on_collapse="stop", stopping=())


@given(st.lists(st.sampled_from([0.3, 0.01]), min_size=1, max_size=12), st.integers(1, 4))
def test_patience_counts_iterations_in_a_row(entropies: list[float], patience: int) -> None:
    settings = Diagnostics(entropy_floor=0.1, entropy_share=None, patience=patience)
    rows = [healthy(i, **{"train/entropy": value}) for i, value in enumerate(entropies)]
    expected = entropies[-patience:] == [0.01] * patience
    assert ("entropy_low" in counting(settings, rows)) == expected
