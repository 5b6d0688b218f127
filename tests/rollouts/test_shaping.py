"""What shaping adds to the grader's verdict, and that it changes nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollouts import tabular_mdp as mdp
from tests.trees import answered
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.shaping import LengthPenalty, OverlongPenalty, length_bonuses, overlong_bonus, shaped
from treetune.rollouts.single_turn import SingleTurn
from treetune.tree import trees_of
from treetune.vocabulary import Metrics, Trajectory

SINGLE_TURN = SingleTurn(samples=4, max_tokens=mdp.LONGEST)
BOTH = (OverlongPenalty(cache=4, scale=0.5), LengthPenalty(weight=0.25))


@pytest.mark.parametrize(
    ("length", "bonus"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0), (99999, -1.0)],
)
def test_the_overlong_penalty_is_dapos_with_its_lengths(length: int, bonus: float) -> None:
    assert overlong_bonus(length, longest=20480, cache=4096) == pytest.approx(bonus, abs=1e-12)


def test_a_cache_as_long_as_the_budget_punishes_from_the_first_token() -> None:
    assert [overlong_bonus(length, 10, 10) for length in (0, 5, 10)] == [0.0, -0.5, -1.0]


def test_the_length_penalty_is_kimis() -> None:
    lengths, right = [100, 200, 300, 100, 300], [True, True, True, False, False]
    assert length_bonuses(lengths, right) == [0.5, 0.0, -0.5, 0.0, -0.5]


groups = st.lists(st.tuples(st.integers(1, 10**6), st.booleans()), min_size=1, max_size=12)


@given(groups)
def test_a_length_penalty_never_rewards_what_is_wrong_nor_prefers_longer_answers(
    group: list[tuple[int, bool]],
) -> None:
    lengths, right = [length for length, _ in group], [ok for _, ok in group]
    bonuses = length_bonuses(lengths, right)
    assert all(-0.5 <= bonus <= 0.5 for bonus in bonuses)
    assert all(ok or bonus <= 0.0 for bonus, ok in zip(bonuses, right, strict=True))
    for kind in (True, False):
        of_kind = sorted((length, -bonus) for length, bonus, ok in zip(lengths, bonuses, right) if ok is kind)
        costs = [cost for _, cost in of_kind]
        assert costs == sorted(costs)
    if len(set(lengths)) == 1:
        assert set(bonuses) == {0.0}


def rolled_out(context: RolloutContext) -> tuple[list[Trajectory], Metrics]:
    trajectories, metrics = answered(SINGLE_TURN.run(context, mdp.problems(5)))
    earned, changed = answered(shaped(context, BOTH, trees_of(trajectories)))
    return earned, metrics | changed


def test_bonuses_add_up_and_the_score_stays() -> None:
    trajectories, _ = answered(SINGLE_TURN.run(mdp.context(), mdp.problems(5)))
    earned, metrics = rolled_out(mdp.context())
    parts = [shaping.bonuses(mdp.context(), trajectories) for shaping in BOTH]
    for before, after, overlong, length in zip(trajectories, earned, *parts, strict=True):
        assert after == replace(before, bonus=overlong + length)
        assert after.score == before.reward
        assert after.reward == pytest.approx(before.reward + overlong + length)
    assert len({t.bonus for t in earned}) > 3
    assert metrics["shaping/overlong_penalty"] == pytest.approx(sum(parts[0]) / 20)
    assert metrics["shaping/length_penalty"] == pytest.approx(sum(parts[1]) / 20)
    assert metrics["episodes/score"] == sum(t.score for t in trajectories) / 20
    assert metrics["episodes/reward"] == pytest.approx(sum(t.reward for t in earned) / 20)


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_shaping_is_the_same_for_any_number_of_ranks(world_size: int) -> None:
    ((alone, metrics),) = mdp.on_ranks(1, rolled_out, engine=mdp.TabularEngine)
    by_rank = mdp.on_ranks(world_size, rolled_out, engine=mdp.TabularEngine)
    assert [t for trajectories, _ in by_rank for t in trajectories] == alone
    assert all(metrics_of_rank == metrics for _, metrics_of_rank in by_rank)


def test_a_length_penalty_can_set_in_later() -> None:
    trajectories, _ = answered(SINGLE_TURN.run(mdp.context(), mdp.problems(5)))
    later = LengthPenalty(from_iteration=4)
    assert set(later.bonuses(mdp.context(iteration=3), trajectories)) == {0.0}
    assert set(later.bonuses(mdp.context(iteration=4), trajectories)) != {0.0}


def test_without_shaping_nothing_is_touched_and_no_rank_waits() -> None:
    def never(name: str, own: list[object]) -> list[list[object]]:
        raise AssertionError("nothing is exchanged")

    trajectories, _ = answered(SINGLE_TURN.run(mdp.context(), mdp.problems(2)))
    assert answered(shaped(mdp.context(ranks=None), (), trees_of(trajectories))) == (trajectories, {})
