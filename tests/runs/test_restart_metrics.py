"""Promises: where each iteration begins with the start weights again, the distances to reference and engine
are those of the policy that sampled the answers, also under objectives that keep a reference of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_run import TRAINER, directory_of, small, train
from treetune.credit.no_credit import NoCredit
from treetune.objectives.preference import DpoPositive
from treetune.rollouts.selection import PreferencePairs
from treetune.rollouts.single_turn import SingleTurn
from treetune.trainer.core import PolicyTrainer


def test_the_kl_is_that_of_the_policy_that_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics_of_restarts: list[dict[str, float]] = []
    restart = PolicyTrainer.restart

    def recorded_restart(self: PolicyTrainer, *args: Any) -> dict[str, float]:
        metrics_of_restarts.append(restart(self, *args))
        return metrics_of_restarts[-1]

    monkeypatch.setattr(PolicyTrainer, "restart", recorded_restart)
    config = small(
        tmp_path,
        rollout=SingleTurn(samples=6, max_tokens=12, unfinished_reward=1.0),
        credit=NoCredit(),
        selection=PreferencePairs(max_pairs_per_problem=4),
        trainer=replace(TRAINER, objective=DpoPositive(), learning_rate=1e-2, epochs=2, minibatch_size=4),
        restart="every_iteration",
    )
    train(config)
    first, second = directory_of(config).read_metrics()
    assert first["train/kl"] == pytest.approx(0.0, abs=1e-6), "the start weights sampled these answers"
    assert second["train/kl"] > 1e-4, "the weights that the first iteration trained sampled these"
    [metrics_of_restart] = metrics_of_restarts
    assert {"train/kl", "engine/logprob_gap_mean"} <= metrics_of_restart.keys()
    recorded = {name: second[name] for name in metrics_of_restart}
    assert recorded == pytest.approx(metrics_of_restart, rel=1e-6), "records are rounded"
