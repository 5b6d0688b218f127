"""Continuations among answers, scores of the reference meanwhile, the next iteration beside training: what
runs beside what, and that it changes nothing. (test_interrupted_runs strikes all of them.)"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from tests.support import forked_runs
from tests.support.experiment_runs import Experiment
from tests.support.fork_server import run_forked_ranks
from tests.support.small_run import (
    TRAINER,
    answers_of,
    computed,
    directory_of,
    episodes_of,
    log_of,
    raises_after,
    sampled_requests,
    samples_of,
    small,
    train,
    weights_of,
)
from treetune.credit.vineppo import MonteCarlo
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.rollouts.partial import PartialAnswers
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.storage import read_trajectories
from treetune.runtime import generation, loop
from treetune.runtime.base import PolicyIteration, StopAfter
from treetune.store.checksums import read_record, write_record
from treetune.store.timeline import TIMELINE_SUFFIX, read_timeline
from treetune.trainer.scoring import SHARE_AHEAD_METRIC, WAITING_SECONDS_METRIC, Scorer

# Continuations among answers

STORED: dict[str, Any] = {"credit": {"type": "monte_carlo", "samples": 3}}
STORED_WAVES: dict[str, Any] = {"credit": {**STORED["credit"], "pipelined": False}}


def credited(base: Path, pipelined: bool = True) -> PolicyIteration:
    return small(base, credit=MonteCarlo(samples=3, pipelined=pipelined), iterations=1)


def records(config: PolicyIteration) -> dict[str, Any]:
    folder = directory_of(config).iteration_folder(0)
    return {name: read_record(folder / f"{name}.json", "") for name in ("rollout", "credit")}


def test_continuations_among_answers_leave_the_run_as_it_is_and_each_phase_its_tokens_and_seconds(
    tmp_path: Path,
) -> None:
    pipelined, waves = credited(tmp_path / "one"), credited(tmp_path / "two", pipelined=False)
    train(pipelined, **STORED)
    train(waves, **STORED_WAVES)
    assert computed(pipelined) == computed(waves)
    assert samples_of(pipelined) == samples_of(waves)
    mine, theirs = records(pipelined), records(waves)
    for phase in ("rollout", "credit"):
        assert mine[phase]["tokens"] == theirs[phase]["tokens"] > 0
        assert mine[phase]["seconds"] > 0
    (row,) = directory_of(pipelined).read_metrics()
    assert row["seconds/other"] > 0
    assert mine["credit"]["seconds"] == pytest.approx(row["seconds/credit"])

    [process] = read_timeline(directory_of(pipelined).logs_folder / f"run{TIMELINE_SUFFIX}")

    def bars(lane: str) -> list[float]:
        found = (one for one in process.spans if (one.lane, one.name) == (lane, "credit"))
        return [one.end - one.start for one in found if one.end]

    among, _ = bars("phases")  # the last is credit's own phase
    assert among == pytest.approx(mine["rollout"]["credit"]["seconds"], abs=1e-4)
    beside = mine["rollout"]["metrics"]["credit/value_overlap_seconds"]
    assert sum(bars("phases during generation")) == pytest.approx(beside, abs=1e-4)
    assert row["credit/value_overlap_seconds"] == pytest.approx(beside, abs=1e-6)


def test_killed_before_credit_it_may_go_on_with_two_waves_and_finds_what_was_asked_for_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = credited(tmp_path / "whole"), credited(tmp_path / "killed")
    train(whole, **STORED)
    with monkeypatch.context() as patch:
        patch.setattr(
            generation, "assign_credit", raises_after(generation.assign_credit, 0, RuntimeError("struck"))
        )
        with pytest.raises(RuntimeError, match="struck"):
            train(killed, **STORED)
    again = credited(tmp_path / "killed", pipelined=False)
    train(again, **STORED_WAVES)
    assert computed(again) == computed(whole)
    assert sampled_requests(again) == 0
    expected, found = records(whole), records(again)
    assert [found[phase]["tokens"] for phase in found] == [expected[phase]["tokens"] for phase in expected]


# Scores of the reference while others are sampled


def scoring(base: Path) -> PolicyIteration:
    objective = ClippedPolicyGradient(kl_coef=0.1)
    return small(
        base,
        trainer=replace(TRAINER, objective=objective, minibatch_size=4, reference_scores="while_sampling"),
    )


def test_the_reference_scores_all_answers_meanwhile_or_where_they_are_there_before_training(
    tmp_path: Path,
) -> None:
    config = scoring(tmp_path)
    directory = train(config)
    rows = directory.read_metrics()
    assert [row[SHARE_AHEAD_METRIC] for row in rows] == [1.0, 1.0]
    assert all(row[WAITING_SECONDS_METRIC] > 0 for row in rows)
    expected = load(weights_of(config))
    shutil.rmtree(directory.path / "checkpoints")
    for iteration in range(2):
        (directory.iteration_folder(iteration) / "metrics.json").unlink()
    assert [row[SHARE_AHEAD_METRIC] for row in train(config).read_metrics()] == [0.0, 0.0]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load(weights_of(config)).items())


def test_what_goes_wrong_in_scoring_ends_the_run_with_a_message_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = MemoryError("no room for the logits")
    monkeypatch.setattr(Scorer, "row_logprobs", raises_after(Scorer.row_logprobs, 0, error))
    config = scoring(tmp_path)
    with pytest.raises(
        RuntimeError, match=r"\(trainer.reference_scores\): MemoryError: no room for the logits"
    ):
        train(config)
    assert directory_of(config).newest_resumable() is None


# The next iteration beside training

ITERATIONS = 4


def ahead(base: Path, **changes: Any) -> PolicyIteration:
    trainer = replace(TRAINER, objective=ClippedPolicyGradient(importance_cap=2.0))
    given = {"credit": MonteCarlo(samples=2), "trainer": trainer, "iterations": ITERATIONS}
    return small(base, **{**given, "overlap": "one_step", **changes})


def test_an_iteration_is_sampled_while_the_one_before_is_trained_from_the_version_before_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training waits here until the next iteration's answers are there: it would wait for ever, were they
    sampled afterwards."""
    config = ahead(tmp_path)
    seen: list[bool] = []

    def waits(train: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(resources: Any, trainer: Any, iteration: int, *rest: Any) -> Any:
            following = directory_of(config).iteration_folder(iteration + 1) / "episodes.arrow"
            pause = threading.Event()
            for _ in range(6000):
                if following.is_file() or iteration + 1 == ITERATIONS:
                    break
                pause.wait(0.01)
            seen.append(following.is_file())
            return train(resources, trainer, iteration, *rest)

        return waiting

    monkeypatch.setattr(loop, "train", waits(loop.train))
    rows = train(config, overlap="one_step").read_metrics()
    assert seen == [True, True, True, False]
    for iteration, version in enumerate([0, 0, 1, 2]):
        segments = [part for one in answers_of(config, iteration) for part in one.segments]
        assert {part.policy_version for part in segments} == {version}
        assert {one.policy_version for one in episodes_of(config, iteration)} == {version}
    assert [row["overlap/staleness"] for row in rows] == [0, 1, 1, 1]
    assert all(row["overlap/generation_seconds"] > 0 for row in rows)


def test_answers_may_take_several_iterations(tmp_path: Path) -> None:
    partial = PartialAnswers(rollout=SingleTurn(samples=2, max_tokens=12), tokens_per_iteration=4)
    config = ahead(tmp_path, rollout=partial, overlap="none")
    train(config)
    answers = [one for iteration in range(ITERATIONS) for one in answers_of(config, iteration)]
    assert {len(one.segments) for one in answers} == {1, 2, 3}


def test_a_budget_of_tokens_ends_an_overlapping_run_with_nothing_sampled_in_vain(tmp_path: Path) -> None:
    directory = train(
        ahead(tmp_path, iterations=50, stop_after=StopAfter(sampled_tokens=700)), overlap="one_step"
    )
    done = len(directory.read_metrics())
    assert 2 < done < 50
    assert directory.checkpoints()[-1] == done
    assert not directory.iteration_folder(done).exists(), "no iteration was begun that is not trained on"


def test_a_run_that_is_made_longer_says_that_it_begins_with_the_newest_weights(tmp_path: Path) -> None:
    train(ahead(tmp_path, iterations=2), overlap="one_step")
    config = ahead(tmp_path)
    rows = train(config, overlap="one_step").read_metrics()
    assert [row["overlap/staleness"] for row in rows] == [0, 1, 0, 1]
    assert "iteration 3 was not sampled while" in log_of(config)


def test_a_restart_counts_the_seconds_of_what_an_earlier_process_sampled_within_the_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(ahead(tmp_path, iterations=2), overlap="one_step")
    config = ahead(tmp_path)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(loop, "train", raises_after(loop.train, 0, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            train(config, overlap="one_step")
    sampled_within, sampled_ahead = 2, 3
    record = directory_of(config).iteration_folder(sampled_within) / "rollout.json"
    write_record(record, read_record(record, "") | {"seconds": 1000.0})
    rows = train(config, overlap="one_step").read_metrics()
    # What this process adds may be less than the seven digits that a row keeps show.
    assert 1000 <= rows[sampled_within]["seconds/generation"] < rows[sampled_within]["seconds/total"]
    assert rows[sampled_ahead]["overlap/staleness"] == 1
    assert rows[sampled_ahead]["seconds/total"] < 1000


OVERLAPPING = """{
  overlap: 'one_step',
  iterations: 3,
  problems_per_iteration: 5,
  checkpoints: { every: 3 },
  trainer+: { epochs: 1, objective+: { importance_cap: 2 } },
}"""


@pytest.mark.slow
def test_two_ranks_overlap_and_both_have_their_part_of_every_iteration(tmp_path: Path) -> None:
    run_forked_ranks(Path(forked_runs.__file__), [str(tmp_path), OVERLAPPING], 2, tmp_path)
    directory = Experiment(tmp_path).directory
    assert [row["overlap/staleness"] for row in directory.read_metrics()] == [0, 1, 1]
    for iteration, version in enumerate([0, 0, 1]):
        folder = directory.iteration_folder(iteration)
        answers = read_trajectories(folder / "trajectories.arrow")
        assert len(answers) == 10
        assert {part.policy_version for one in answers for part in one.segments} == {version}
        assert {path.name for path in (folder / "journal").glob("rollout-*.jsonl")} == {
            "rollout-0.jsonl",
            "rollout-1.jsonl",
        }
