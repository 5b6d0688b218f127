"""Values by continuations: which states are continued, how often, and by which rank.

These tests promise:

* The advantages of an answer sum to its reward minus the value of the prompt.
* Each distinct prefix is continued once, by one rank, with seeds of its own.
* A continuation is sampled, cut and graded as the answer itself would be.
* Adaptive sampling goes on until the budget has enough, and begins with what a fixed number would sample.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.support import tabular_mdp as mdp
from tests.support.columns import plain
from treetune.config.build import build
from treetune.credit.base import Credit
from treetune.credit.states.base import Budget, ContinuationPlan, Estimate, FixedBudget
from treetune.credit.states.one_line import StepBoundaries
from treetune.credit.values.estimates import ProblemStates, estimate_states
from treetune.credit.vineppo import MonteCarlo, step_advantages
from treetune.engine.requests import Request, SamplingParams
from treetune.exceptions import ConfigError
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.single_turn import SingleTurn
from treetune.vocabulary import Episode, Metrics

THREE_SAMPLES = MonteCarlo(samples=3)


def rollout_then_credit(context: RolloutContext) -> tuple[list[Episode], tuple[Metrics, Metrics]]:
    trees, metrics = SingleTurn(samples=4, max_tokens=mdp.LONGEST).run(context, mdp.problems(5))
    episodes, credit_metrics = THREE_SAMPLES.assign(context, trees)
    return episodes, (metrics, credit_metrics)


def test_advantages_of_an_answer_sum_to_its_reward_minus_the_value_of_the_prompt() -> None:
    assert step_advantages([0.5, 0.25, 0.75], 1.0) == [-0.25, 0.5, 0.25]
    for episode in mdp.assign_credit(THREE_SAMPLES)[0]:
        step_advantage_list = [episode.advantages[end - 1] for end in episode.step_ends]
        assert sum(step_advantage_list) == pytest.approx(episode.reward - episode.step_values[0])


def test_lambda_mixes_the_next_value_with_the_later_ones_and_the_reward() -> None:
    """Sutton and Barto's λ-return, and C3's comparison with the answer's own reward for λ = 1."""
    values, reward = [0.5, 0.25, 0.75], 1.0
    assert step_advantages(values, reward, lam=1.0) == [0.5, 0.75, 0.25]
    after_second = 0.6 * 0.75 + 0.4 * 1.0
    after_first = 0.6 * 0.25 + 0.4 * after_second
    expected = [after_first - 0.5, after_second - 0.25, 1.0 - 0.75]
    assert step_advantages(values, reward, lam=0.4) == pytest.approx(expected)
    # The steps on both sides of a state without a value count as one step.
    joined = step_advantages([0.5, None, 0.75], reward, lam=0.4)
    assert joined == pytest.approx([after_second - 0.5, after_second - 0.5, 0.25])


def test_lambda_uses_values_for_later_steps_and_baselines_for_earlier_ones() -> None:
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

    def new_engine() -> mdp.TabularEngine:
        engines.append(mdp.TabularEngine())
        return engines[-1]

    by_rank = mdp.on_ranks(world_size, rollout_then_credit, engine=new_engine)
    expected_states = set()
    for episodes, _ in by_rank:
        for episode in episodes:
            prompt_ids, response_ids = plain(episode.prompt_ids), plain(episode.response_ids)
            for start in (0, *episode.step_ends[:-1]):
                expected_states.add(prompt_ids + response_ids[:start])
    states_by_rank = []
    for engine in engines:
        states_by_rank.append([plain(request.prompt_ids) for request in engine.requests if request.n == 3])
    assert Counter(itertools.chain.from_iterable(states_by_rank)) == Counter(expected_states)
    assert max(map(len, states_by_rank)) - min(map(len, states_by_rank)) <= 1
    if world_size == 1:
        assert states_by_rank[0] == sorted(states_by_rank[0]), (
            "an order that processes with other hash seeds share"
        )


def test_equal_prefixes_of_two_problems_are_two_states() -> None:
    answer = next(iter(mdp.answers()))
    answers = [mdp.trajectory(answer, problem) for problem in mdp.problems(2)]
    requests = mdp.sampled_requests(THREE_SAMPLES, answers)
    assert len({request.seed for request in requests}) == len(requests) == 2 * len(mdp.step_ends(answer))


def test_seeds_of_continuations_differ_by_iteration_and_run() -> None:
    requests: list[Request] = []
    for changed in ({}, {"iteration": 4}, {"seed": 2}):
        requests += mdp.sampled_requests(THREE_SAMPLES, **changed)
    assert len({request.seed for request in requests}) == len(requests)


def test_continuations_are_sampled_as_the_rollout_within_the_remaining_tokens() -> None:
    sampling = SamplingParams(max_tokens=9, temperature=0.6, top_p=0.9, top_k=5, stop=("!",))
    own_settings = {"temperature": 0.35, "top_k": -1}
    for changed in ({}, own_settings):
        for request in mdp.sampled_requests(MonteCarlo(samples=2, **changed), sampling=sampling):
            tokens_left = 9 - len(mdp.response_part(request.prompt_ids))
            assert request.sampling == replace(sampling, max_tokens=tokens_left, **changed)
            assert (request.n, request.reads_logprobs) == (2, False), "no log-prob of a continuation is read"


def test_the_grader_sees_prefix_and_continuation_as_one_answer() -> None:
    pool = mdp.InlinePool()
    mdp.assign_credit(MonteCarlo(samples=4), grader=pool)
    assert {response for _, response in pool.submitted} <= {mdp.decode(answer) for answer in mdp.answers()}
    assert len(pool.submitted) == 4 * 7


@pytest.mark.parametrize("unfinished_reward", [0.0, -1.0])
def test_a_cut_continuation_earns_the_unfinished_reward_though_it_is_right(unfinished_reward: float) -> None:
    cut = mdp.answers((), 4)
    answers = [
        mdp.trajectory(answer, sample=i, unfinished_reward=unfinished_reward) for i, answer in enumerate(cut)
    ]
    episodes, metrics = mdp.assign_credit(
        MonteCarlo(samples=mdp.EXACT_SAMPLES),
        answers,
        engine=mdp.ExactEngine(),
        sampling=SamplingParams(max_tokens=4),
        unfinished_reward=unfinished_reward,
    )
    exact = sum(p * mdp.reward(answer, unfinished_reward) for answer, p in cut.items())
    assert [answer.step_values[0] for answer in episodes] == pytest.approx([exact] * len(cut))
    assert metrics["credit/value_unfinished"] > 0.2


def test_states_after_max_states_have_the_observed_reward_as_their_value() -> None:
    engine = mdp.TabularEngine()
    episodes, _ = mdp.assign_credit(
        MonteCarlo(samples=3, max_states=2, behind_max_states="no_advantage"), engine=engine
    )
    assert {len(mdp.response_part(request.prompt_ids)) for request in engine.requests} == {0, 2}
    for episode in episodes:
        assert episode.step_values[2:] == (episode.reward,) * (len(episode.step_ends) - 2)
        assert set(episode.advantages[4:]) <= {0.0}


def test_siblings_count_into_the_prompt_value_of_the_others_only() -> None:
    answers = [mdp.trajectory((*mdp.encode(text), mdp.EOS), sample=i) for i, text in enumerate(["a;a", "b"])]
    (uncounted, _), (right, wrong) = (
        mdp.assign_credit(MonteCarlo(samples=3, siblings_count_into_prompt_value=count), answers)[0]
        for count in (False, True)
    )
    prompt_value, *later = uncounted.step_values
    assert right.step_values == (pytest.approx(3 * prompt_value / 4), *later)
    assert wrong.step_values == (pytest.approx((3 * prompt_value + 1) / 4),)
    with pytest.raises(ValueError, match=r"siblings_count_into_prompt_value.*temperature"):
        MonteCarlo(siblings_count_into_prompt_value=True, temperature=0.5)


def test_a_rollout_that_samples_nothing_has_nothing_to_continue() -> None:
    with pytest.raises(ValueError, match="this rollout samples nothing"):
        mdp.assign_credit(MonteCarlo(), sampling=None)


def test_metrics_count_the_states_and_their_cost() -> None:
    _, metrics = mdp.assign_credit(THREE_SAMPLES)
    assert metrics["credit/value_states"] == len(mdp.sampled_requests(THREE_SAMPLES)) == 7
    assert metrics["credit/value_samples"] == 21 <= metrics["credit/value_tokens"]
    assert 0 < metrics["credit/value_mean"] < 1
    assert 0 <= metrics["credit/value_decided"] <= 1
    assert metrics["credit/advantage_std"] > 0


class UntilBothAreSeen(Budget):
    """Asks for two continuations, and two more while all earned the same, four times at most."""

    def ask(self, turn: int, rewards: Callable[[], Sequence[float]]) -> int:
        return 2 if turn == 0 or (turn < 4 and len(set(rewards())) == 1) else 0


def estimate_on_rank(context: RolloutContext, budget: Budget) -> tuple[list[Estimate], list[Estimate]]:
    """Returns the estimates of this rank's answers, and those of all ranks."""
    own_answers = mdp.all_trajectories()[context.ranks.rank :: context.ranks.world_size]
    problem_states = []
    for answer in own_answers:
        starts = [(0, start) for start in (0, *answer.step_ends[:-1])]
        problem_states.append(ProblemStates(answer.problem, answer.prompt_ids, [answer.segments], starts))
    plan = ContinuationPlan(budget, SamplingParams(mdp.LONGEST))
    own_estimates, all_estimates = estimate_states(context, problem_states, StepBoundaries(), plan)
    return list(itertools.chain.from_iterable(own_estimates)), all_estimates


def test_a_state_is_continued_until_the_budget_has_enough() -> None:
    engine = mdp.TabularEngine()
    _, all_estimates = estimate_on_rank(mdp.context(engine=engine), UntilBothAreSeen())
    for estimate in all_estimates:
        turns = [estimate.rewards[start : start + 2] for start in range(0, len(estimate.rewards), 2)]
        # Every turn but the last one left the state undecided.
        assert all(len(set(sum(turns[:n], ()))) == 1 for n in range(1, len(turns)))
        assert len(set(estimate.rewards)) > 1 or len(turns) == 4
    assert len({len(estimate.rewards) for estimate in all_estimates}) > 1
    assert len({request.seed for request in engine.requests}) == len(engine.requests)


def test_the_first_turn_of_an_adaptive_budget_samples_as_a_fixed_number_does() -> None:
    fixed, adaptive = mdp.TabularEngine(), mdp.TabularEngine()
    _, fixed_estimates = estimate_on_rank(mdp.context(engine=fixed), FixedBudget(2))
    _, adaptive_estimates = estimate_on_rank(mdp.context(engine=adaptive), UntilBothAreSeen())
    assert [estimate.rewards for estimate in fixed_estimates] == [
        estimate.rewards[:2] for estimate in adaptive_estimates
    ]
    adaptive_samples = {(plain(request.prompt_ids), request.seed) for request in adaptive.requests}
    assert {(plain(request.prompt_ids), request.seed) for request in fixed.requests} <= adaptive_samples


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_work_and_agree_on_all_estimates(world_size: int) -> None:
    mdp.assert_ranks_agree(
        world_size,
        lambda context: ([], estimate_on_rank(context, UntilBothAreSeen())[1]),
        engine=mdp.TabularEngine,
    )
