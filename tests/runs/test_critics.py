"""Runs whose credit asks the critic: what it is asked, and what it learns. (`test_interrupted_runs` kills
them.)"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.small_run import directory_of, episodes_of, small, train, trained
from treetune.credit.base import CriticSettings
from treetune.credit.critic_losses import HlGauss
from treetune.credit.literature.forking_tokens import ForkingTokens
from treetune.credit.literature.optimal_token_baseline import OptimalTokenBaseline
from treetune.credit.literature.weighted_by import WeightedBy, softmax_weights
from treetune.credit.rloo import Rloo
from treetune.credit.values.critic import ControlVariate, CriticEstimator
from treetune.credit.vineppo import MonteCarlo
from treetune.lab.analyzers.advantage_distribution import AdvantageDistribution
from treetune.lab.analyzers.command import run_analyzers
from treetune.lab.analyzers.credit_bench import CreditBench
from treetune.lab.analyzers.stored import critic_at, distributions_at, policy_at, state_values
from treetune.lab.analyzers.true_values import ByEngine
from treetune.runtime.analysis import read_result
from treetune.runtime.commands import only_generate_episodes
from treetune.runtime.session import Session
from treetune.trainer.tokens import EpisodesOfCritic
from treetune.vocabulary import concatenate

PLAIN = {"type": "policy_iteration", "trainer": {"seed": 1}}
ALONE = MonteCarlo(values=CriticEstimator())
BESIDE = MonteCarlo(samples=2, values=ControlVariate())


def test_values_are_those_of_the_critic_before_the_iteration_that_trains_it(tmp_path: Path) -> None:
    config = trained(small(tmp_path, credit=ALONE))
    with Session.open(config, PLAIN, "analysis") as session:
        for iteration in range(config.iterations):
            critic = critic_at(session, iteration)
            for episode in episodes_of(config, iteration):
                states = [
                    concatenate([episode.prompt_ids, episode.response_ids[:start]])
                    for start in (0, *episode.step_ends[:-1])
                ]
                expected = state_values(critic, session.ranks.device, states)
                assert episode.step_values == pytest.approx(expected, abs=1e-4)
                assert episode.advantages is not None
                after = [*expected[1:], episode.reward]
                gains = [behind - before for before, behind in zip(expected, after, strict=True)]
                found = [episode.advantages[end - 1] for end in episode.step_ends]
                assert found == pytest.approx(gains, abs=1e-4)


def test_a_privileged_critic_with_hl_gauss_values_and_learns_after_a_prompt_of_its_own(
    tmp_path: Path,
) -> None:
    critic = CriticSettings(template="{prompt}{gold}", loss=HlGauss())
    config = trained(small(tmp_path, credit=MonteCarlo(values=CriticEstimator(critic=critic)), iterations=2))
    assert directory_of(config).read_metrics()[-1]["critic/without_own_prompt"] == 0
    with Session.open(config, PLAIN, "analysis") as session:
        for iteration in range(config.iterations):
            critic_then = critic_at(session, iteration)
            for episode in EpisodesOfCritic(episodes_of(config, iteration)):
                states = [
                    concatenate([episode.prompt_ids, episode.response_ids[:start]])
                    for start in (0, *episode.step_ends[:-1])
                ]
                expected = state_values(critic_then, session.ranks.device, states)
                assert episode.step_values == pytest.approx(expected, abs=1e-4)


def test_the_critic_learns_what_answers_earn(tmp_path: Path) -> None:
    rows = train(small(tmp_path, credit=BESIDE, iterations=8)).read_metrics()
    assert rows[-1]["critic/mse"] < 0.5 * rows[0]["critic/mse"]
    assert "credit/critic_error" in rows[0]
    assert all(0 <= row["credit/critic_weight"] <= 1 for row in rows)


def test_episodes_that_are_generated_beforehand_have_the_critic_of_their_iteration(tmp_path: Path) -> None:
    through = trained(small(tmp_path / "one", credit=BESIDE))
    first = trained(small(tmp_path / "two", credit=BESIDE, iterations=1))
    only_generate_episodes(replace(first, iterations=2), PLAIN)
    assert episodes_of(first, 1) == episodes_of(through, 1)


def test_the_distributions_that_analyses_lend_are_the_policys(tmp_path: Path) -> None:
    config = trained(small(tmp_path, iterations=1))
    episodes = episodes_of(config, 0)[:3]
    with Session.open(config, PLAIN, "analysis") as session:
        found = distributions_at(session, 1).along(episodes)
        policy = policy_at(session, 1)
        for episode, (squares, entropy) in zip(episodes, found, strict=True):
            ids = torch.from_numpy(concatenate([episode.prompt_ids, episode.response_ids]).astype("int64"))
            with torch.no_grad():
                chances = policy(ids[None]).logits[0, len(episode.prompt_ids) - 1 : -1].double().softmax(-1)
            assert squares == pytest.approx(chances.square().sum(-1).numpy(), abs=1e-5)
            assert entropy == pytest.approx(-(chances * chances.log()).sum(-1).numpy(), abs=1e-5)


def test_the_entropies_of_a_run_are_the_policys_before_the_iteration(tmp_path: Path) -> None:
    """The trainer computes them for the credit; analyses compute them with the stored weights."""
    credit = WeightedBy(over=Rloo(), weights="softmax")
    config = trained(small(tmp_path, credit=credit))
    with Session.open(config, PLAIN, "analysis") as session:
        for iteration in range(config.iterations):
            episodes = episodes_of(config, iteration)
            found = distributions_at(session, iteration).along(episodes)
            weights_differ = False
            for episode, (_, entropies_T) in zip(episodes, found, strict=True):
                weights_T = softmax_weights(entropies_T, episode.trained, credit.temperature)
                advantage = episode.advantages.mean()  # the weights' mean is 1
                assert episode.advantages == pytest.approx(advantage * weights_T, abs=1e-5)
                weights_differ = weights_differ or np.ptp(episode.advantages) > 1e-3
            assert weights_differ


def test_deviations_of_a_run_begin_at_0_and_grow(tmp_path: Path) -> None:
    credit = WeightedBy(over=Rloo(), signal="deviation", weights="softmax", temperature=1e-3)
    config = trained(small(tmp_path, credit=credit, iterations=2))
    first, second = (episodes_of(config, iteration) for iteration in range(2))
    assert all(np.ptp(episode.advantages) < 1e-3 for episode in first)
    assert any(np.ptp(episode.advantages) > 1e-2 for episode in second)


def test_episodes_that_are_generated_beforehand_are_weighted_as_in_the_run(tmp_path: Path) -> None:
    through = trained(small(tmp_path / "one", credit=ForkingTokens(over=Rloo())))
    first = trained(small(tmp_path / "two", credit=ForkingTokens(over=Rloo()), iterations=1))
    only_generate_episodes(replace(first, iterations=2), PLAIN)
    assert episodes_of(first, 1) == episodes_of(through, 1)


def test_analyses_lend_the_critic_of_their_point(tmp_path: Path) -> None:
    exact = OptimalTokenBaseline(squared_norms="exact")
    methods = {"critic": ALONE, "beside": BESIDE, "forking": ForkingTokens(), "exact": exact}
    analyzers = (
        CreditBench(methods=methods, truth=ByEngine(samples=4), problems=2, checkpoints=(1,)),
        AdvantageDistribution(),
    )
    config = trained(small(tmp_path, credit=ALONE))
    names = ("credit_bench", "advantage_distribution")
    plain = {**PLAIN, "analyzers": [{"type": name} for name in names]}
    assert run_analyzers(replace(config, analyzers=analyzers), plain) == 0
    numbers = read_result(directory_of(config).analysis_folder("credit_bench"))["numbers"]
    found = numbers["by_checkpoint"]["1"]["methods"]
    assert found["critic"]["tokens_per_answer"] == 0 < found["beside"]["tokens_per_answer"]
    assert found["critic"]["value_bias"]["value"] is not None
