"""An estimator decides how often a state is gone on from, and asks again when answers are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.columns import plain
from tests.rollouts import tabular_mdp as mdp
from treetune.inference.base import SamplingParams
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.states import StepBoundaries
from treetune.rollouts.valuation import ProblemStates, estimates
from treetune.rollouts.values import Budget, ContinuationPlan, Estimate, FixedBudget


class UntilBothAreSeen(Budget):
    """Two continuations, and two more as long as all earned the same, four times at most."""

    def ask(self, turn: int, rewards: Callable[[], Sequence[float]]) -> int:
        return 2 if turn == 0 or (turn < 4 and len(set(rewards())) == 1) else 0


def valued(context: RolloutContext, estimator: Budget) -> tuple[list[Estimate], list[Estimate]]:
    answers = mdp.all_trajectories()
    own = answers[context.ranks.rank :: context.ranks.world_size]
    wanted = [
        ProblemStates(
            one.problem, one.prompt_ids, [one.segments], [(0, start) for start in (0, *one.step_ends[:-1])]
        )
        for one in own
    ]
    sampling = SamplingParams(mdp.LONGEST)
    found, everyones = estimates(context, wanted, StepBoundaries(), ContinuationPlan(estimator, sampling))
    return [estimate for of_answer in found for estimate in of_answer], everyones


def test_a_state_is_gone_on_from_until_the_estimator_has_enough() -> None:
    engine = mdp.TabularEngine()
    _, everyones = valued(mdp.context(engine=engine), UntilBothAreSeen())
    for estimate in everyones:
        turns = [estimate.rewards[start : start + 2] for start in range(0, len(estimate.rewards), 2)]
        # Every turn but the last left it undecided, or there was none left.
        assert all(len(set(sum(turns[:n], ()))) == 1 for n in range(1, len(turns)))
        assert len(set(estimate.rewards)) > 1 or len(turns) == 4
    assert len({len(estimate.rewards) for estimate in everyones}) > 1
    assert len({request.seed for request in engine.requests}) == len(engine.requests)


def test_the_first_turn_is_what_a_fixed_number_samples() -> None:
    fixed, adaptive = mdp.TabularEngine(), mdp.TabularEngine()
    _, few = valued(mdp.context(engine=fixed), FixedBudget(2))
    _, more = valued(mdp.context(engine=adaptive), UntilBothAreSeen())
    assert [one.rewards for one in few] == [one.rewards[:2] for one in more]
    asked = {(plain(request.prompt_ids), request.seed) for request in adaptive.requests}
    assert {(plain(request.prompt_ids), request.seed) for request in fixed.requests} <= asked


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_work_and_know_the_same(world_size: int) -> None:
    ((_, alone),) = mdp.on_ranks(1, lambda c: valued(c, UntilBothAreSeen()), engine=mdp.TabularEngine)
    by_rank = mdp.on_ranks(world_size, lambda c: valued(c, UntilBothAreSeen()), engine=mdp.TabularEngine)
    assert all(everyones == alone for _, everyones in by_rank)
