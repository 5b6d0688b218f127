"""Which states are estimated, how often, by whom and under which rules."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.columns import plain
from tests.rollouts import tabular_mdp as mdp
from tests.trees import answered
from treetune.config.build import build
from treetune.config.errors import ConfigError
from treetune.inference.base import SamplingParams
from treetune.rollouts.base import Credit
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.monte_carlo import MonteCarlo, step_advantages
from treetune.rollouts.single_turn import SingleTurn
from treetune.tree import trees_of
from treetune.vocabulary import Episode, Metrics


def rollout_then_credit(context: RolloutContext) -> tuple[list[Episode], Metrics, Metrics]:
    rollout = SingleTurn(samples=4, max_tokens=mdp.LONGEST)
    trajectories, rollout_metrics = answered(rollout.run(context, mdp.problems(5)))
    episodes, credit_metrics = MonteCarlo(samples=3).assign(context, trees_of(trajectories))
    return episodes, rollout_metrics, credit_metrics


def test_advantages_of_an_answer_sum_to_its_reward_minus_the_value_of_the_prompt() -> None:
    assert step_advantages([0.5, 0.25, 0.75], 1.0) == [-0.25, 0.5, 0.25]
    episodes, _ = MonteCarlo(samples=3).assign(mdp.context(), trees_of(mdp.all_trajectories()))
    for episode in episodes:
        assert episode.advantages is not None
        assert episode.step_values is not None
        of_steps = [episode.advantages[end - 1] for end in episode.step_ends]
        assert sum(of_steps) == pytest.approx(episode.reward - episode.step_values[0])


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_the_number_of_ranks_changes_no_episode_and_no_metric(world_size: int) -> None:
    ((alone, rollout, credit),) = mdp.on_ranks(1, rollout_then_credit, engine=mdp.TabularEngine)
    by_rank = mdp.on_ranks(world_size, rollout_then_credit, engine=mdp.TabularEngine)
    assert [episode for episodes, _, _ in by_rank for episode in episodes] == alone
    assert len({plain(episode.advantages) for episode in alone}) > 3
    for _, rollout_of_rank, credit_of_rank in by_rank:
        assert rollout_of_rank == rollout
        assert credit_of_rank == credit


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
        for episodes, _, _ in by_rank
        for episode in episodes
        for start in (0, *episode.step_ends[:-1])
    }
    continued = Counter(
        plain(request.prompt_ids) for engine in engines for request in engine.requests if request.n == 3
    )
    assert continued == Counter(wanted)
    shares = [sum(request.n == 3 for request in engine.requests) for engine in engines]
    assert max(shares) - min(shares) <= 1


def test_states_are_dealt_in_an_order_that_processes_with_other_hash_seeds_share() -> None:
    engine = mdp.TabularEngine()
    rollout_then_credit(mdp.context(engine=engine))
    dealt = [plain(request.prompt_ids) for request in engine.requests if request.n == 3]
    assert len(dealt) > 10
    assert dealt == sorted(dealt)


def test_equal_prefixes_of_two_problems_are_two_states() -> None:
    answer = next(iter(mdp.answers()))
    engine = mdp.TabularEngine()
    MonteCarlo(samples=2).assign(
        mdp.context(engine=engine), trees_of([mdp.trajectory(answer, problem) for problem in mdp.problems(2)])
    )
    assert len(engine.requests) == 2 * len(mdp.step_ends(answer))
    assert len({request.seed for request in engine.requests}) == len(engine.requests)


def test_seeds_of_continuations_differ_by_iteration_and_run() -> None:
    seeds = set()
    for place in ({}, {"iteration": 4}, {"seed": 2}):
        engine = mdp.TabularEngine()
        MonteCarlo(samples=2).assign(mdp.context(engine=engine, **place), trees_of(mdp.all_trajectories()))
        seeds |= {request.seed for request in engine.requests}
    assert len(seeds) == 3 * len(engine.requests)


def test_continuations_are_sampled_as_the_rollout_within_the_tokens_that_the_prefix_left() -> None:
    sampling = SamplingParams(max_tokens=9, temperature=0.6, top_p=0.9, top_k=5, stop=("!",))
    engine = mdp.TabularEngine()
    credit = MonteCarlo(samples=2)
    credit.assign(mdp.context(engine=engine, sampling=sampling), trees_of(mdp.all_trajectories()))
    for request in engine.requests:
        left = 9 - len(mdp.response_part(request.prompt_ids))
        assert request.sampling == replace(sampling, max_tokens=left)
        assert request.n == 2


def test_given_sampling_parameters_replace_those_of_the_rollout() -> None:
    engine = mdp.TabularEngine()
    credit = MonteCarlo(samples=2, temperature=0.35, top_k=-1)
    sampling = SamplingParams(max_tokens=mdp.LONGEST, temperature=0.6, top_p=0.9, top_k=5)
    credit.assign(mdp.context(engine=engine, sampling=sampling), trees_of(mdp.all_trajectories()))
    assert {(r.sampling.temperature, r.sampling.top_p, r.sampling.top_k) for r in engine.requests} == {
        (0.35, 0.9, -1)
    }


def test_the_grader_sees_prefix_and_continuation_as_one_answer() -> None:
    pool = mdp.InlinePool()
    MonteCarlo(samples=4).assign(mdp.context(grader=pool), trees_of(mdp.all_trajectories()))
    whole = {mdp.decode(answer) for answer in mdp.answers()}
    assert {response for _, response in pool.submitted} <= whole
    assert len(pool.submitted) == 4 * 7


@pytest.mark.parametrize("unfinished_reward", [0.0, -1.0])
def test_a_cut_continuation_earns_the_unfinished_reward_even_when_it_is_right(
    unfinished_reward: float,
) -> None:
    cut = 4
    context = mdp.context(
        engine=mdp.ExactEngine(),
        sampling=SamplingParams(max_tokens=cut),
        unfinished_reward=unfinished_reward,
    )
    trajectories = [
        mdp.trajectory(answer, sample=i, unfinished_reward=unfinished_reward)
        for i, answer in enumerate(mdp.answers((), cut))
    ]
    episodes, metrics = MonteCarlo(samples=mdp.EXACT_SAMPLES).assign(context, trees_of(trajectories))
    exact = sum(p * mdp.reward(a, unfinished_reward) for a, p in mdp.answers((), cut).items())
    for episode in episodes:
        assert episode.step_values is not None
        assert episode.step_values[0] == pytest.approx(exact)
    assert metrics["credit/value_unfinished"] > 0.2


def test_states_behind_the_cap_are_worth_what_was_observed() -> None:
    engine = mdp.TabularEngine()
    credit = MonteCarlo(samples=3, max_states=2)
    episodes, _ = credit.assign(mdp.context(engine=engine), trees_of(mdp.all_trajectories()))
    assert {len(mdp.response_part(request.prompt_ids)) for request in engine.requests} == {0, 2}
    for episode in episodes:
        assert episode.step_values is not None
        assert episode.advantages is not None
        assert episode.step_values[2:] == (episode.reward,) * (len(episode.step_ends) - 2)
        assert set(episode.advantages[4:]) <= {0.0}


def test_siblings_count_into_the_prompt_value_of_the_others_only() -> None:
    right, wrong = mdp.encode("a;a") + (mdp.EOS,), mdp.encode("b") + (mdp.EOS,)
    trajectories = [mdp.trajectory(right, sample=0), mdp.trajectory(wrong, sample=1)]
    plain, _ = MonteCarlo(samples=3).assign(mdp.context(), trees_of(trajectories))
    pooled, _ = MonteCarlo(samples=3, siblings_count_into_prompt_value=True).assign(
        mdp.context(), trees_of(trajectories)
    )
    assert plain[0].step_values is not None
    prompt_value, *later = plain[0].step_values
    assert pooled[0].step_values == (pytest.approx(3 * prompt_value / 4), *later)
    assert pooled[1].step_values == (pytest.approx((3 * prompt_value + 1) / 4),)


def test_siblings_sampled_otherwise_are_refused() -> None:
    with pytest.raises(ValueError, match=r"siblings_count_into_prompt_value.*temperature"):
        MonteCarlo(siblings_count_into_prompt_value=True, temperature=0.5)


def test_a_rollout_that_samples_nothing_has_nothing_to_continue() -> None:
    with pytest.raises(ValueError, match="this rollout samples nothing"):
        MonteCarlo().assign(mdp.context(sampling=None), trees_of(mdp.all_trajectories()))


def test_metrics_count_the_states_and_what_they_cost() -> None:
    engine = mdp.TabularEngine()
    _, metrics = MonteCarlo(samples=3).assign(mdp.context(engine=engine), trees_of(mdp.all_trajectories()))
    assert metrics["credit/value_states"] == len(engine.requests) == 7
    assert metrics["credit/value_samples"] == 21
    assert 0 < metrics["credit/value_mean"] < 1
    assert 0 <= metrics["credit/value_decided"] <= 1
    assert metrics["credit/value_tokens"] >= 21
    assert metrics["credit/advantage_std"] > 0
