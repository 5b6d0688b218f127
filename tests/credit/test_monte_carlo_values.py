"""Which states are estimated, how often, by whom and under which rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.columns import plain
from tests.rollouts import tabular_mdp as mdp
from treetune.config.build import build
from treetune.credit.base import Credit
from treetune.credit.states.base import Budget, ContinuationPlan, Estimate, FixedBudget
from treetune.credit.states.one_line import StepBoundaries
from treetune.credit.values.estimates import ProblemStates, estimate_states
from treetune.credit.vineppo import MonteCarlo, step_advantages
from treetune.engine.requests import SamplingParams
from treetune.exceptions import ConfigError
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.single_turn import SingleTurn
from treetune.vocabulary import Episode, Metrics

THREE = MonteCarlo(samples=3)


def rollout_then_credit(context: RolloutContext) -> tuple[list[Episode], tuple[Metrics, Metrics]]:
    trees, metrics = SingleTurn(samples=4, max_tokens=mdp.LONGEST).run(context, mdp.problems(5))
    episodes, of_credit = THREE.assign(context, trees)
    return episodes, (metrics, of_credit)


def test_advantages_of_an_answer_sum_to_its_reward_minus_the_value_of_the_prompt() -> None:
    assert step_advantages([0.5, 0.25, 0.75], 1.0) == [-0.25, 0.5, 0.25]
    for episode in mdp.credited(THREE)[0]:
        of_steps = [episode.advantages[end - 1] for end in episode.step_ends]
        assert sum(of_steps) == pytest.approx(episode.reward - episode.step_values[0])


def test_with_lambda_a_step_is_worth_what_the_answer_itself_came_to() -> None:
    """Sutton and Barto's λ-return, and C3's comparison with the answer's own reward for λ = 1."""
    values, reward = [0.5, 0.25, 0.75], 1.0
    assert step_advantages(values, reward, lam=1.0) == [0.5, 0.75, 0.25]
    after_second = 0.6 * 0.75 + 0.4 * 1.0
    after_first = 0.6 * 0.25 + 0.4 * after_second
    expected = [after_first - 0.5, after_second - 0.25, 1.0 - 0.75]
    assert step_advantages(values, reward, lam=0.4) == pytest.approx(expected)
    # Without a value the steps on both sides are one.
    joined = step_advantages([0.5, None, 0.75], reward, lam=0.4)
    assert joined == pytest.approx([after_second - 0.5, after_second - 0.5, 0.25])


def test_lambda_takes_values_for_what_follows_and_baselines_for_what_came_before() -> None:
    advantages = step_advantages([0.5, 0.25], 1.0, baselines=[0.4, 0.3], lam=0.5)
    assert advantages == pytest.approx([0.5 * 0.25 + 0.5 * 1.0 - 0.4, 1.0 - 0.3])


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_the_number_of_ranks_changes_no_episode_and_no_metric(world_size: int) -> None:
    episodes, _ = mdp.assert_ranks_agree(world_size, rollout_then_credit, engine=mdp.TabularEngine)
    assert len({plain(episode.advantages) for episode in episodes}) > 3


def test_no_continuation_at_all_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"samples.*greater than 0"):
        build(Credit, {"type": "monte_carlo", "samples": 0})


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_distinct_prefix_is_continued_once_across_all_ranks(world_size: int) -> None:
    engines: list[mdp.TabularEngine] = []

    def engine() -> mdp.TabularEngine:
        engines.append(mdp.TabularEngine())
        return engines[-1]

    by_rank = mdp.on_ranks(world_size, rollout_then_credit, engine=engine)
    wanted = {
        plain(episode.prompt_ids) + plain(episode.response_ids[:start])
        for episodes, _ in by_rank
        for episode in episodes
        for start in (0, *episode.step_ends[:-1])
    }
    dealt = [[plain(one.prompt_ids) for one in engine.requests if one.n == 3] for engine in engines]
    assert Counter(state for share in dealt for state in share) == Counter(wanted)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    if world_size == 1:
        assert dealt[0] == sorted(dealt[0]), "an order that processes with other hash seeds share"


def test_equal_prefixes_of_two_problems_are_two_states() -> None:
    answer = next(iter(mdp.answers()))
    asked = mdp.asked_for(THREE, [mdp.trajectory(answer, problem) for problem in mdp.problems(2)])
    assert len({request.seed for request in asked}) == len(asked) == 2 * len(mdp.step_ends(answer))


def test_seeds_of_continuations_differ_by_iteration_and_run() -> None:
    asked = [mdp.asked_for(THREE, **place) for place in ({}, {"iteration": 4}, {"seed": 2})]
    assert len({one.seed for requests in asked for one in requests}) == sum(map(len, asked))


def test_continuations_are_sampled_as_the_rollout_within_the_tokens_that_the_prefix_left() -> None:
    sampling = SamplingParams(max_tokens=9, temperature=0.6, top_p=0.9, top_k=5, stop=("!",))
    given = {"temperature": 0.35, "top_k": -1}
    for changed in ({}, given):
        for request in mdp.asked_for(MonteCarlo(samples=2, **changed), sampling=sampling):
            left = 9 - len(mdp.response_part(request.prompt_ids))
            assert request.sampling == replace(sampling, max_tokens=left, **changed)
            assert (request.n, request.reads_logprobs) == (2, False), "nobody reads a graded one's log-probs"


def test_the_grader_sees_prefix_and_continuation_as_one_answer() -> None:
    pool = mdp.InlinePool()
    mdp.credited(MonteCarlo(samples=4), grader=pool)
    assert {response for _, response in pool.submitted} <= {mdp.decode(answer) for answer in mdp.answers()}
    assert len(pool.submitted) == 4 * 7


@pytest.mark.parametrize("unfinished_reward", [0.0, -1.0])
def test_a_cut_continuation_earns_the_unfinished_reward_though_it_is_right(unfinished_reward: float) -> None:
    cut = mdp.answers((), 4)
    answers = [
        mdp.trajectory(one, sample=i, unfinished_reward=unfinished_reward) for i, one in enumerate(cut)
    ]
    episodes, metrics = mdp.credited(
        MonteCarlo(samples=mdp.EXACT_SAMPLES),
        answers,
        engine=mdp.ExactEngine(),
        sampling=SamplingParams(max_tokens=4),
        unfinished_reward=unfinished_reward,
    )
    exact = sum(p * mdp.reward(answer, unfinished_reward) for answer, p in cut.items())
    assert [one.step_values[0] for one in episodes] == pytest.approx([exact] * len(cut))
    assert metrics["credit/value_unfinished"] > 0.2


def test_states_behind_the_cap_are_worth_what_was_observed() -> None:
    engine = mdp.TabularEngine()
    episodes, _ = mdp.credited(MonteCarlo(samples=3, max_states=2), engine=engine)
    assert {len(mdp.response_part(request.prompt_ids)) for request in engine.requests} == {0, 2}
    for episode in episodes:
        assert episode.step_values[2:] == (episode.reward,) * (len(episode.step_ends) - 2)
        assert set(episode.advantages[4:]) <= {0.0}


def test_siblings_count_into_the_prompt_value_of_the_others_only() -> None:
    answers = [mdp.trajectory((*mdp.encode(text), mdp.EOS), sample=i) for i, text in enumerate(["a;a", "b"])]
    (alone, _), (right, wrong) = (
        mdp.credited(MonteCarlo(samples=3, siblings_count_into_prompt_value=counted), answers)[0]
        for counted in (False, True)
    )
    prompt_value, *later = alone.step_values
    assert right.step_values == (pytest.approx(3 * prompt_value / 4), *later)
    assert wrong.step_values == (pytest.approx((3 * prompt_value + 1) / 4),)
    with pytest.raises(ValueError, match=r"siblings_count_into_prompt_value.*temperature"):
        MonteCarlo(siblings_count_into_prompt_value=True, temperature=0.5)


def test_a_rollout_that_samples_nothing_has_nothing_to_continue() -> None:
    with pytest.raises(ValueError, match="this rollout samples nothing"):
        mdp.credited(MonteCarlo(), sampling=None)


def test_metrics_count_the_states_and_what_they_cost() -> None:
    _, metrics = mdp.credited(THREE)
    assert metrics["credit/value_states"] == len(mdp.asked_for(THREE)) == 7
    assert metrics["credit/value_samples"] == 21 <= metrics["credit/value_tokens"]
    assert 0 < metrics["credit/value_mean"] < 1
    assert 0 <= metrics["credit/value_decided"] <= 1
    assert metrics["credit/advantage_std"] > 0


class UntilBothAreSeen(Budget):
    """Two continuations, and two more as long as all earned the same, four times at most."""

    def ask(self, turn: int, rewards: Callable[[], Sequence[float]]) -> int:
        return 2 if turn == 0 or (turn < 4 and len(set(rewards())) == 1) else 0


def valued(context: RolloutContext, budget: Budget) -> tuple[list[Estimate], list[Estimate]]:
    """Those of a rank's answers, and everyone's."""
    own = mdp.all_trajectories()[context.ranks.rank :: context.ranks.world_size]
    wanted = [
        ProblemStates(
            one.problem, one.prompt_ids, [one.segments], [(0, start) for start in (0, *one.step_ends[:-1])]
        )
        for one in own
    ]
    plan = ContinuationPlan(budget, SamplingParams(mdp.LONGEST))
    found, everyones = estimate_states(context, wanted, StepBoundaries(), plan)
    return [estimate for of_answer in found for estimate in of_answer], everyones


def test_a_state_is_gone_on_from_until_the_budget_has_enough() -> None:
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
    mdp.assert_ranks_agree(
        world_size, lambda here: ([], valued(here, UntilBothAreSeen())[1]), engine=mdp.TabularEngine
    )
