"""Runs whose credit asks the critic: what it is asked, what it learns, and that it survives being killed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.in_process import directory_of, raises_after, small, train
from treetune.config.build import checked
from treetune.config.errors import ConfigError
from treetune.models.policy_files import read_policy
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.storage import read_episodes
from treetune.runtime.base import Checkpoints, PolicyIteration
from treetune.runtime.commands import only_generate_episodes
from treetune.runtime.session import Session
from treetune.trainers.ranks import Ranks
from treetune.vocabulary import joined
from treetune_lab.analyzers.advantage_distribution import AdvantageDistribution
from treetune_lab.analyzers.command import run_analyzers
from treetune_lab.analyzers.credit_bench import CreditBench
from treetune_lab.analyzers.gradient_variance import GradientVariance
from treetune_lab.analyzers.stored import critic_at, state_values
from treetune_lab.analyzers.true_values import ByEngine
from treetune_lab.values.critic import ControlVariate, CriticValues
from treetune_lab.values.over_another import Smoothed
from treetune_threads.parallel_threads import ParallelThreads, ThreadStates

PLAIN = {"type": "policy_iteration", "trainer": {"seed": 1}}
ALONE = MonteCarlo(values=CriticValues())
BESIDE = MonteCarlo(samples=2, values=ControlVariate())


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed remembers a process group that was left: several runs in one process share one."""
    monkeypatch.setattr(Ranks, "leave", lambda self: None)


def run(base: Path, credit: MonteCarlo, **changes: Any) -> PolicyIteration:
    config = small(base, credit=credit, **changes)
    train(config)
    return config


def weights(config: PolicyIteration, what: str) -> dict[str, torch.Tensor]:
    found, _ = read_policy(directory_of(config).checkpoint(config.iterations) / what)
    return found


def test_values_are_those_of_the_critic_before_the_iteration_that_trains_it(tmp_path: Path) -> None:
    config = run(tmp_path, ALONE)
    directory = directory_of(config)
    with Session.open(config, PLAIN, "analysis") as session:
        for iteration in range(config.iterations):
            critic = critic_at(session, iteration)
            for episode in read_episodes(directory.iteration(iteration) / "episodes.arrow"):
                states = [
                    joined([episode.prompt_ids, episode.response_ids[:start]])
                    for start in (0, *episode.step_ends[:-1])
                ]
                expected = state_values(critic, session.ranks.device, states)
                assert episode.step_values == pytest.approx(expected, abs=1e-4)
                assert episode.advantages is not None
                after = [*expected[1:], episode.reward]
                gains = [behind - before for before, behind in zip(expected, after, strict=True)]
                found = [episode.advantages[end - 1] for end in episode.step_ends]
                assert found == pytest.approx(gains, abs=1e-4)


def test_the_critic_learns_what_answers_earn(tmp_path: Path) -> None:
    config = run(tmp_path, BESIDE, iterations=8)
    rows = [json.loads(line) for line in directory_of(config).metrics.read_text().splitlines()]
    assert rows[-1]["critic/mse"] < 0.5 * rows[0]["critic/mse"]
    assert {"credit/critic_weight", "credit/critic_error"} <= rows[0].keys()
    assert 0 <= rows[-1]["credit/critic_weight"] <= 1


@pytest.mark.parametrize("credit", [ALONE, BESIDE], ids=["alone", "beside continuations"])
def test_a_run_that_is_struck_while_it_credits_ends_with_the_same_bits(
    credit: MonteCarlo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = run(tmp_path / "one", credit, iterations=3, checkpoints=Checkpoints(every=3))
    with monkeypatch.context() as patch:
        struck = raises_after(MonteCarlo.assign, 2, KeyboardInterrupt())
        patch.setattr(MonteCarlo, "assign", struck)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "two", credit, iterations=3, checkpoints=Checkpoints(every=3))
    again = run(tmp_path / "two", credit, iterations=3, checkpoints=Checkpoints(every=3))
    for what in ("policy", "critic"):
        one, other = weights(undisturbed, what), weights(again, what)
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_episodes_that_are_generated_beforehand_have_the_critic_of_their_iteration(tmp_path: Path) -> None:
    through = run(tmp_path / "one", BESIDE, iterations=2)
    first = run(tmp_path / "two", BESIDE, iterations=1)
    only_generate_episodes(replace(first, iterations=2), PLAIN)
    episodes = directory_of(first).iteration(1) / "episodes.arrow"
    expected = directory_of(through).iteration(1) / "episodes.arrow"
    assert read_episodes(episodes) == read_episodes(expected)


def test_analyses_lend_the_critic_of_their_point(tmp_path: Path) -> None:
    methods = {"critic": ALONE, "beside": BESIDE}
    analyzers = (
        CreditBench(methods=methods, truth=ByEngine(samples=4), problems=2, checkpoints=(1,)),
        GradientVariance(minibatch_size=2, checkpoints=(1,)),
        AdvantageDistribution(),
    )
    config = run(tmp_path, ALONE)
    names = ("credit_bench", "gradient_variance", "advantage_distribution")
    plain = {**PLAIN, "analyzers": [{"type": name} for name in names]}
    assert run_analyzers(replace(config, analyzers=analyzers), plain) == 0
    folder = directory_of(config).analysis("credit_bench")
    found = json.loads((folder / "result.json").read_text())["numbers"]["by_checkpoint"]["1"]["methods"]
    assert found["critic"]["tokens_per_answer"] == 0 < found["beside"]["tokens_per_answer"]
    assert found["critic"]["bias"]["value"] is not None


@pytest.mark.parametrize(
    "values", [CriticValues(), ControlVariate(), Smoothed(over=CriticValues())], ids=repr
)
@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"restart": "every_iteration"}, "set restart to 'never'"),
        (
            {
                "rollout": ParallelThreads(samples=2, max_tokens=12),
                "credit": MonteCarlo(states=ThreadStates(), values=ControlVariate()),
            },
            "choose values without a critic",
        ),
    ],
    ids=["restart", "threads"],
)
def test_what_a_critic_does_not_go_with_is_told_before_anything_starts(
    values: Any, changes: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    checked(small(tmp_path, credit=MonteCarlo(values=values)))
    with pytest.raises(ConfigError) as refused:
        checked(small(tmp_path, **{"credit": MonteCarlo(values=values), **changes}))
    assert remedy in " ".join(str(refused.value).split())
