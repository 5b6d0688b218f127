"""Whole runs of answers of several turns: what is trained, what is counted, and that a killed one goes on."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.fake_engine import FakeEngine
from tests.runtime.in_process import FakeSettings, directory_of, small
from tests.support.unruly_environment import Unruly
from treetune.inference.base import Engine, EngineError, EngineLaunch
from treetune.inference.settings import Engines
from treetune.models.tokenizer import character_tokenizer
from treetune.rollouts.credit import Gae, Group
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.storage import read_episodes, read_trajectories
from treetune.runtime.base import Evaluation, EvaluationSet, PolicyIteration
from treetune.runtime.commands import run_iteration_loop
from treetune_domains.environments.base import EnvironmentTask
from treetune_domains.multi_turn import MultiTurn, TurnStates

MOODS = ("calm", "calm", "hangs", "calm", "dies", "says a megabyte", "is closed", "calm")


@dataclass(frozen=True, kw_only=True)
class Uniform(FakeSettings):
    """Engines that write any character of the game, each as likely."""

    fail_after: int | None = None
    engines: list[FakeEngine] = field(default_factory=list)

    def start(self, launch: EngineLaunch) -> Engine:
        tokenizer = character_tokenizer(Unruly().alphabet(), 64)
        chances = [0.0, 0.0] + [1 / (len(tokenizer) - 2)] * (len(tokenizer) - 2)
        engine = FakeEngine(lambda ids, version: chances, tokenizer.eos_token_id, fail_after=self.fail_after)
        self.engines.append(engine)
        return engine


ROLLOUT = MultiTurn(samples=2, max_tokens=24, max_turns=4, turn_tokens=1, observation_characters=6)


def experiment(folder: Path, **changes: Any) -> PolicyIteration:
    settings = {
        "task": EnvironmentTask(environment=Unruly(moods=MOODS), train_size=16),
        "rollout": ROLLOUT,
        "problems_per_iteration": 16,
    }
    return small(folder, Uniform(), **{**settings, **changes})


def weights(config: PolicyIteration) -> bytes:
    return (directory_of(config).checkpoint(2) / "policy" / "model.safetensors").read_bytes()


def test_every_sampled_token_of_every_known_answer_is_trained_once_and_no_other(tmp_path: Path) -> None:
    config = experiment(tmp_path)
    run_iteration_loop(config, {})
    outcomes: dict[str, set[str]] = {mood: set() for mood in MOODS}
    for folder in sorted(directory_of(config).path.glob("iterations/*")):
        answers = {one.id: one for one in read_trajectories(folder / "trajectories.arrow")}
        rows = {one.trajectory: one for one in read_episodes(folder / "episodes.arrow")}
        for name, answer in answers.items():
            outcomes[answer.problem.gold].add(answer.grade.outcome)
            assert len(answer.response_ids) <= 24
            assert (name in rows) == answer.grade.is_known
            if not answer.grade.is_known:
                continue
            row, start = rows[name], 0
            for segment in answer.segments:
                span = slice(start, start := start + len(segment.token_ids))
                assert (row.trained[span] == (segment.origin == "sampled")).all()
                if segment.logprobs is not None:
                    assert (row.behaviour_logprobs[span] == segment.logprobs).all()
            assert start == len(row.response_ids)
            assert row.reward == answer.reward == pytest.approx(sum(answer.step_rewards) or answer.reward)
    assert outcomes == {
        "calm": {"ok"},
        "hangs": {"timeout"},
        "dies": {"error"},
        "says a megabyte": {"ok"},
        "is closed": {"unavailable"},
    }
    for row in directory_of(config).read_metrics():
        assert row["episodes/unavailable"] == row["episodes/timeout"] == row["episodes/error"] == 1 / 8
        assert row["turns/observations_cut"] > 0


LIVELY = EnvironmentTask(
    environment=Unruly(moods=("calm", "says a megabyte", "dies", "is closed")), train_size=4
)


@pytest.mark.slow
@pytest.mark.parametrize("killed_after", [12, 50])
def test_a_run_that_ended_anywhere_goes_on_to_the_same_weights_and_samples_nothing_twice(
    killed_after: int, tmp_path: Path
) -> None:
    settings = {
        "task": LIVELY,
        "credit": MonteCarlo(samples=1, states=TurnStates()),
        "problems_per_iteration": 4,
    }
    whole = experiment(tmp_path / "whole", **settings)
    run_iteration_loop(whole, {})
    asked = len(engines(whole)[0].asked)
    assert asked > killed_after
    broken = experiment(tmp_path / "broken", **settings)
    failing = Engines(policy=replace(broken.engines.policy, fail_after=killed_after))
    with pytest.raises(EngineError):
        run_iteration_loop(replace(broken, engines=failing), {})
    run_iteration_loop(broken, {})
    assert weights(broken) == weights(whole)
    assert sum(len(engine.asked) for engine in engines(broken)) == asked


def engines(config: PolicyIteration) -> list[FakeEngine]:
    assert isinstance(config.engines.policy, Uniform)
    return config.engines.policy.engines


@pytest.mark.parametrize("credit", [Group(), Gae()], ids=str)
def test_turns_are_trained_and_measured_with_every_credit(credit: Group | Gae, tmp_path: Path) -> None:
    sets = (EvaluationSet(split="validation", problems=4, while_training=True),)
    evaluation = Evaluation(sets=sets, every=1)
    config = experiment(
        tmp_path,
        task=EnvironmentTask(environment=Unruly(moods=("calm",)), train_size=4),
        rollout=replace(ROLLOUT, samples=4),
        credit=credit,
        evaluation=evaluation,
        problems_per_iteration=4,
    )
    run_iteration_loop(config, {})
    first, last = directory_of(config).read_metrics()
    for row in (first, last):
        assert row["train/grad_norm"] > 0 and row["evaluation/validation/turns/count"] >= 2
    episodes = list(
        itertools.chain.from_iterable(
            read_episodes(file) for file in directory_of(config).path.glob("iterations/*/episodes.arrow")
        )
    )
    assert any(one.step_rewards for one in episodes)
