"""Runs that score answers under the reference while others are sampled: every answer is heard of, and a run
that fails among them goes on to the same bits."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.runtime.in_process import FakeSettings, directory_of, small, train
from treetune.inference.base import EngineError
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import ExperimentDirectory
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient
from treetune.trainers.scoring import SECONDS, SHARE, Scorer


def experiment(base: Path, fail_after: int | None = None) -> PolicyIteration:
    config = small(base, engine=FakeSettings(fail_after=fail_after))
    trainer = replace(
        config.trainer,
        objective=ClippedPolicyGradient(kl_coef=0.1),
        minibatch_size=4,
        reference_scores="while_sampling",
    )
    return replace(config, trainer=trainer)


def weights(directory: ExperimentDirectory) -> Path:
    return directory.checkpoint(2) / "policy" / "model.safetensors"


def without_seconds(row: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in row.items() if "second" not in n and "time" not in n and n != SHARE}


def test_a_run_scores_all_its_answers_meanwhile_and_one_that_failed_ends_with_its_bits(
    tmp_path: Path,
) -> None:
    whole = train(experiment(tmp_path / "whole"))
    rows = whole.read_metrics()
    assert [row[SHARE] for row in rows] == [1.0, 1.0]
    assert all(row[SECONDS] > 0 for row in rows)
    with pytest.raises(EngineError):
        train(experiment(tmp_path / "failing", fail_after=6))  # in the middle of the second iteration's
    again = train(experiment(tmp_path / "failing"))
    assert weights(again).read_bytes() == weights(whole).read_bytes()
    assert list(map(without_seconds, again.read_metrics())) == list(map(without_seconds, rows))


def test_iterations_trained_again_from_their_episodes_score_everything_then_to_the_same_bits(
    tmp_path: Path,
) -> None:
    config = experiment(tmp_path)
    directory = train(config)
    expected = load_file(weights(directory))
    shutil.rmtree(directory.path / "checkpoints")
    for iteration in range(2):
        (directory.iteration(iteration) / "metrics.json").unlink()
    again = train(config)
    assert [row[SHARE] for row in again.read_metrics()] == [0.0, 0.0]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_file(weights(again)).items())


def test_what_goes_wrong_in_scoring_ends_the_run_with_a_message_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> Any:
        raise MemoryError("no room for the logits")

    monkeypatch.setattr(Scorer, "row_logprobs", fails)
    config = experiment(tmp_path)
    with pytest.raises(
        RuntimeError, match=r"\(trainer.reference_scores\): MemoryError: no room for the logits"
    ):
        train(config)
    assert directory_of(config).resumable() is None
