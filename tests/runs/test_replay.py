"""A stored iteration, trained once more: as it was to the bit, signals of single tokens too, and as another
credit would have had it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.small_run import TRAINER, sampled_requests, small, train
from treetune.credit.grpo import Group
from treetune.credit.no_credit import NoCredit
from treetune.credit.vineppo import MonteCarlo
from treetune.lab.analyzers.replay import describe_result, replay
from treetune.models.lora import Lora
from treetune.objectives.mle import MaximumLikelihood
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.rollouts.selection import CorrectOnly
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.storage import SIGNALS, read_episodes, read_token_signals
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import ExperimentDirectory
from treetune.store.checksums import read_record, write_record
from treetune.store.timeline import read_timeline
from treetune.trainer.base import Trainer

PLAIN = {"type": "policy_iteration", "trainer": {"seed": 1}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[PolicyIteration, ExperimentDirectory]:
    """Two iterations, each a single step on all of its answers; what is cut off earns a half."""
    config = small(
        tmp_path_factory.mktemp("replayed"),
        seed=3,
        rollout=SingleTurn(samples=4, max_tokens=12, unfinished_reward=0.5),
        credit=MonteCarlo(samples=1),
    )
    return config, train(config)


def replayed(
    run: tuple[PolicyIteration, ExperimentDirectory], iteration: int, exact: bool = False, **other: Any
) -> dict[str, Any]:
    config, directory = run
    variant = replace(config, **other) if other else None
    return replay(directory.path, iteration, config, PLAIN, variant, exact)


@pytest.mark.parametrize("iteration", [1, 2])
def test_an_iteration_with_its_own_settings_gives_its_gradient(
    run: tuple[PolicyIteration, ExperimentDirectory], iteration: int
) -> None:
    _, directory = run
    first, again = (replayed(run, iteration)["own"] for _ in range(2))
    assert first == again
    recorded = json.loads((directory.iteration_folder(iteration - 1) / "metrics.json").read_text())
    assert first["metrics"]["train/grad_norm"] == pytest.approx(recorded["train/grad_norm"], rel=1e-6)
    assert first["gradient_norm"] == pytest.approx(recorded["train/grad_norm"], rel=1e-5)
    assert first["same_as_run"] is True
    assert first["unlike_record"] == []


def test_an_exact_replay_makes_the_optimisers_state_again_and_gives_the_runs_weights(
    run: tuple[PolicyIteration, ExperimentDirectory], tmp_path: Path
) -> None:
    config, directory = run
    shutil.copytree(directory.path, tmp_path / directory.path.name)
    run = replace(config, directory=str(tmp_path)), ExperimentDirectory(tmp_path / directory.path.name)
    shutil.rmtree(run[1].checkpoint_folder(1) / "trainer")
    assert replayed(run, 2)["own"]["same_as_run"] is None
    found = replayed(run, 2, exact=True, credit=Group(std=False))
    assert found["own"]["same_as_run"] is True
    assert found["own"]["unlike_record"] == []
    assert found["other"]["same_as_run"] is False
    assert any("equal those that the run recorded" in line for line in describe_result(found))
    assert sorted(path.name for path in Path(found["folder"]).iterdir()) == [
        "advantages.jsonl",
        "result.json",
    ]


def test_numbers_that_the_run_recorded_otherwise_are_named(
    run: tuple[PolicyIteration, ExperimentDirectory], tmp_path: Path
) -> None:
    config, directory = run
    shutil.copytree(directory.path, tmp_path / directory.path.name)
    copy = ExperimentDirectory(tmp_path / directory.path.name)
    path = copy.iteration_folder(0) / "metrics.json"
    write_record(path, read_record(path, "") | {"train/grad_norm": 7.0})
    found = replay(copy.path, 1, replace(config, directory=str(tmp_path)), PLAIN, None)
    assert found["own"]["unlike_record"] == ["train/grad_norm"]
    assert any("recorded: train/grad_norm" in line for line in describe_result(found))


def test_another_credit_is_held_against_the_own_one_answer_by_answer(
    run: tuple[PolicyIteration, ExperimentDirectory],
) -> None:
    found = replayed(run, 1, credit=Group(std=False))
    assert found["other"]["sampled_tokens"] == 0
    assert -1 <= found["cosine_of_gradients"] < 1
    assert found["own"]["episodes"] == found["other"]["episodes"]
    rows = [json.loads(line) for line in (Path(found["folder"]) / "advantages.jsonl").open()]
    assert len(rows) == found["own"]["episodes"]
    for row in rows:
        own, other = row["advantages"]["own"], row["advantages"]["other"]
        assert len(own) == len(other) == len(row["step_ends"])
        assert len(set(other)) == 1
        assert row["values"]["other"] is None is not row["values"]["own"]
    assert any("cosine of the gradients" in line for line in describe_result(found))


def test_what_another_credit_needs_beyond_what_is_stored_is_sampled_once(
    run: tuple[PolicyIteration, ExperimentDirectory],
) -> None:
    more = MonteCarlo(samples=2)
    first = replayed(run, 1, credit=more)
    assert first["other"]["sampled_tokens"] > 0
    before = sampled_requests(run[0])
    again = replayed(run, 1, credit=more)
    assert again["other"]["sampled_tokens"] == 0
    assert sampled_requests(run[0]) == before
    assert first["other"]["metrics"] == again["other"]["metrics"]
    assert first["cosine_of_gradients"] == again["cosine_of_gradients"]


def test_the_same_credit_written_again_samples_nothing_and_is_the_same(
    run: tuple[PolicyIteration, ExperimentDirectory],
) -> None:
    config, _ = run
    found = replayed(run, 1, trainer=replace(config.trainer, learning_rate=config.trainer.learning_rate))
    assert found["cosine_of_gradients"] == pytest.approx(1.0)
    assert found["own"]["gradient_norm"] == found["other"]["gradient_norm"]
    assert found["other"]["sampled_tokens"] == 0


def test_another_objective_trains_on_the_stored_episodes(
    run: tuple[PolicyIteration, ExperimentDirectory],
) -> None:
    config, _ = run
    entropic = replace(config.trainer, objective=ClippedPolicyGradient(entropy_coef=0.1))
    found = replayed(run, 1, trainer=entropic)
    assert found["correlation_of_advantages"] == pytest.approx(1.0)
    assert found["cosine_of_gradients"] < 0.9999


def test_what_cannot_be_replayed_is_told(run: tuple[PolicyIteration, ExperimentDirectory]) -> None:
    with pytest.raises(ValueError, match=r"needs an iteration .counted from 1. that sampled and trained"):
        replayed(run, 3)
    with pytest.raises(ValueError, match=r"CorrectOnly\) keeps no episode"):
        replayed(run, 1, selection=CorrectOnly())


@pytest.mark.parametrize("is_state_deleted", [False, True])
def test_an_iteration_that_restarts_has_the_metrics_of_the_policy_that_sampled_it(
    is_state_deleted: bool, tmp_path: Path
) -> None:
    trainer = Trainer(objective=MaximumLikelihood(), learning_rate=1e-2)
    config = small(tmp_path, restart="every_iteration", credit=NoCredit(), trainer=trainer)
    directory = train(config)
    if is_state_deleted:
        shutil.rmtree(directory.checkpoint_folder(1) / "trainer")
    recorded = read_record(directory.iteration_folder(1) / "metrics.json", "")
    result = replayed((config, directory), 2)["own"]
    assert result["metrics"]["train/kl"] == pytest.approx(recorded["train/kl"], rel=1e-5)
    assert recorded["train/kl"] > 0
    assert (result["same_as_run"], result["unlike_record"]) == (True, [])


def test_adapters_whose_training_state_was_deleted_are_replayed_only_exactly(tmp_path: Path) -> None:
    config = small(tmp_path, trainer=replace(TRAINER, lora=Lora(rank=2)))
    directory = train(config)
    shutil.rmtree(directory.checkpoint_folder(1) / "trainer")
    with pytest.raises(ValueError, match=r"after iteration 1 was deleted.*merged.*--exact"):
        replayed((config, directory), 2)
    assert replayed((config, directory), 2, exact=True)["own"]["same_as_run"] is True


def test_signals_lie_beside_the_episodes_and_come_out_the_same_when_trained_again(tmp_path: Path) -> None:
    directory = train(small(tmp_path))
    files = [directory.iteration_folder(i) / SIGNALS for i in range(2)]
    before = [path.read_bytes() for path in files]
    for i, path in enumerate(files):
        signals, episodes = read_token_signals(path), read_episodes(path.with_name("episodes.arrow"))
        assert [one.trajectory for one in signals] == [one.trajectory for one in episodes]
        assert [len(one.entropies) for one in signals] == [int(one.trained.sum()) for one in episodes]
        row = read_record(directory.iteration_folder(i) / "metrics.json", "")
        gaps = np.abs(np.concatenate([one.gaps for one in signals if one.gaps is not None]))
        assert row["engine/logprob_gap_max"] == pytest.approx(float(gaps.max()), rel=1e-5)
    # Killed after one iteration and in the midst of the next: no checkpoint, and what it had begun to write.
    shutil.rmtree(directory.path / "checkpoints")
    files[0].unlink()
    files[1].write_bytes(b"of another try")
    train(small(tmp_path))
    assert [path.read_bytes() for path in files] == before

    first, second = read_timeline(directory.logs_folder / "run.timeline.jsonl")
    assert first.closed and second.closed
    phases = [[one for one in process.spans if one.lane == "phases"] for process in (first, second)]
    assert [one.name for one in phases[0] if one.about["iteration"] == 1] == [
        "generation", "credit", "training", "evaluation", "commit"
    ], "the last iteration's weights are sampled from by nobody"  # fmt: skip
    assert "generation" not in {one.name for one in phases[1]}, "what was sampled is read back"
    assert {"iteration 1: training", "iteration 1: checkpoint"} <= {one.name for one in second.spans}
