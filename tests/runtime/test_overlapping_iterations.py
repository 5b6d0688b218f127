"""Runs that sample an iteration while they train the one before: what samples what, and the same bits."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.columns import plain
from tests.runtime.in_process import FakeSettings, directory_of, raises_after, small, train
from treetune.inference.base import EngineError
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.storage import read_episodes, read_trajectories
from treetune.runtime import loop
from treetune.runtime.base import PolicyIteration, StopAfter
from treetune.runtime.directory import ExperimentDirectory
from treetune.trainers.base import Trainer
from treetune.trainers.core import PolicyTrainer
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient
from treetune.vocabulary import Trajectory
from treetune_lab.partial import PartialAnswers

ITERATIONS = 4
STORED: dict[str, Any] = {"overlap": "one_step"}


def overlapping(base: Path, *, fail_after: int | None = None, **changes: Any) -> PolicyIteration:
    objective = ClippedPolicyGradient(importance_cap=2.0)
    return small(
        base,
        engine=FakeSettings(fail_after=fail_after),
        **{
            "overlap": "one_step",
            "credit": MonteCarlo(samples=2),
            "trainer": Trainer(objective=objective, learning_rate=1e-3),
            "iterations": ITERATIONS,
            **changes,
        },
    )


def made(directory: ExperimentDirectory) -> tuple[Any, ...]:
    """What neither a clock decides nor how often the engine was given weights."""
    decided = ("second", "time", "engine/canary", "engine/sync", "engine/restarts")
    metrics = [
        {name: value for name, value in row.items() if not any(word in name for word in decided)}
        for row in directory.read_metrics()
    ]
    weights = (directory.checkpoint(ITERATIONS) / "policy" / "model.safetensors").read_bytes()
    return (
        weights,
        [read_episodes(directory.iteration(i) / "episodes.arrow") for i in range(ITERATIONS)],
        metrics,
    )


def answers(base: Path) -> list[list[Trajectory]]:
    paths = sorted(base.glob("small/iterations/*/trajectories.arrow"))
    return [read_trajectories(path) for path in paths]


def sampled(config: PolicyIteration) -> Counter[Any]:
    """Samples that its engine was asked for, over all that ran in this process."""
    assert isinstance(config.engines.policy, FakeSettings)
    requests = [one for engine in config.engines.policy.engines for one in engine.asked]
    return Counter((plain(one.prompt_ids), one.seed + i) for one in requests for i in range(one.n))


def test_every_iteration_but_the_first_is_sampled_from_the_version_before_its_own(tmp_path: Path) -> None:
    directory = train(overlapping(tmp_path), **STORED)
    for iteration, version in enumerate([0, 0, 1, 2]):
        folder = directory.iteration(iteration)
        segments = [s for one in read_trajectories(folder / "trajectories.arrow") for s in one.segments]
        assert {segment.policy_version for segment in segments} == {version}
        assert {one.policy_version for one in read_episodes(folder / "episodes.arrow")} == {version}
    rows = directory.read_metrics()
    assert [row["overlap/staleness"] for row in rows] == [0, 1, 1, 1]
    assert all(row["overlap/generation_seconds"] > 0 for row in rows)


def test_an_iteration_is_sampled_while_the_one_before_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training waits here until the next iteration's answers are there: it would wait for ever, were they
    sampled afterwards."""
    config = overlapping(tmp_path)
    seen: list[str] = []

    def waits(train: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(sampler: Any, trainer: Any, iteration: int, *rest: Any) -> Any:
            following = directory_of(config).iteration(iteration + 1) / "episodes.arrow"
            pause = threading.Event()
            for _ in range(6000):
                if following.is_file() or iteration + 1 == ITERATIONS:
                    break
                pause.wait(0.01)
            seen.append(f"{iteration} {following.is_file()}")
            return train(sampler, trainer, iteration, *rest)

        return waiting

    monkeypatch.setattr(loop, "train", waits(loop.train))
    train(config, **STORED)
    assert seen == ["0 True", "1 True", "2 True", "3 False"]


@pytest.mark.parametrize("answered", [5, 55])
def test_an_engine_that_fails_beside_training_ends_the_run_which_goes_on_to_the_same_bits(
    answered: int, tmp_path: Path
) -> None:
    whole = overlapping(tmp_path / "whole")
    expected = made(train(whole, **STORED))
    failing = overlapping(tmp_path / "failing", fail_after=answered)
    with pytest.raises(EngineError):
        train(failing, **STORED)
    again = overlapping(tmp_path / "failing")
    assert made(train(again, **STORED)) == expected
    assert sampled(failing) + sampled(again) == sampled(whole)


@pytest.mark.parametrize(("trained", "every"), [(1, 1), (2, 3), (3, 1)])
def test_a_run_that_ends_in_training_goes_on_to_the_same_bits(
    trained: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping = {"checkpoints": replace(small(tmp_path).checkpoints, every=every)}
    expected = made(train(overlapping(tmp_path / "whole", **keeping), **STORED))
    killed = overlapping(tmp_path / "killed", **keeping)
    with monkeypatch.context() as patch:
        patch.setattr(
            PolicyTrainer,
            "train",
            raises_after(PolicyTrainer.train, trained, RuntimeError("struck")),
        )
        with pytest.raises(RuntimeError, match="struck"):
            train(killed, **STORED)
    assert not [one for one in threading.enumerate() if one.name == "lookahead"]
    again = overlapping(tmp_path / "killed", **keeping)
    assert made(train(again, **STORED)) == expected


@pytest.mark.parametrize("overlap", ["none", "one_step"])
def test_answers_that_take_several_iterations_go_on_to_the_same_bits(
    overlap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = {
        "rollout": PartialAnswers(rollout=SingleTurn(samples=2, max_tokens=12), tokens_per_iteration=4)
    }
    given, stored = partial | {"overlap": overlap}, {"overlap": overlap}
    expected = made(train(overlapping(tmp_path / "whole", **given), **stored))
    segments = [len(one.segments) for part in answers(tmp_path / "whole") for one in part]
    assert set(segments) == {1, 2, 3}
    killed = overlapping(tmp_path / "killed", **given)
    with monkeypatch.context() as patch:
        patch.setattr(PolicyTrainer, "train", raises_after(PolicyTrainer.train, 2, RuntimeError("struck")))
        with pytest.raises(RuntimeError, match="struck"):
            train(killed, **stored)
    again = overlapping(tmp_path / "killed", **given)
    assert made(train(again, **stored)) == expected


def test_a_budget_of_tokens_ends_an_overlapping_run_with_nothing_sampled_in_vain(tmp_path: Path) -> None:
    config = overlapping(tmp_path, iterations=50, stop_after=StopAfter(sampled_tokens=700))
    directory = train(config, **STORED)
    done = len(directory.read_metrics())
    assert 2 < done < 50
    assert directory.checkpoints()[-1] == done
    assert not directory.iteration(done).exists(), "no iteration was begun that is not trained on"


def test_a_run_that_is_made_longer_says_that_it_begins_with_the_newest_weights(tmp_path: Path) -> None:
    train(overlapping(tmp_path, iterations=2), **STORED)
    directory = train(overlapping(tmp_path), **STORED)
    assert [row["overlap/staleness"] for row in directory.read_metrics()] == [0, 1, 0, 1]
    assert "iteration 3 was not sampled while" in (directory.logs / "run.log").read_text()
