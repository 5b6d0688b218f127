"""Runs whose continuations are sampled among answers: the same bits, each token in its phase, once."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.columns import plain
from tests.runtime.in_process import FakeSettings, directory_of, raises_after, small, train
from treetune.inference.base import EngineError
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.storage import read_episodes
from treetune.runtime import generation
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import ExperimentDirectory
from treetune.store.timeline import SUFFIX, read_timeline

PIPELINED = MonteCarlo(samples=3)
WAVES = replace(PIPELINED, pipelined=False)
STORED: dict[str, Any] = {"credit": {"type": "monte_carlo", "samples": 3}}
STORED_WAVES: dict[str, Any] = {"credit": {**STORED["credit"], "pipelined": False}}


def experiment(base: Path, credit: MonteCarlo, fail_after: int | None = None) -> PolicyIteration:
    return small(base, engine=FakeSettings(fail_after=fail_after), credit=credit, iterations=1)


def made(directory: ExperimentDirectory) -> tuple[Any, ...]:
    """What no clock decides."""
    folder = directory.iteration(0)
    metrics = [
        {name: value for name, value in row.items() if "second" not in name and "time" not in name}
        for row in directory.read_metrics()
    ]
    weights = (directory.checkpoint(1) / "policy" / "model.safetensors").read_bytes()
    return weights, read_episodes(folder / "episodes.arrow"), metrics


def counted(directory: ExperimentDirectory) -> dict[str, dict[str, Any]]:
    folder = directory.iteration(0)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("rollout", "credit")}


def sampled(config: PolicyIteration) -> Counter[Any]:
    """Samples that its engine was asked for, over all that ran in this process."""
    assert isinstance(config.engines.policy, FakeSettings)
    requests = [one for engine in config.engines.policy.engines for one in engine.asked]
    return Counter((plain(one.prompt_ids), one.seed + i) for one in requests for i in range(one.n))


def test_the_run_is_the_same_and_each_phase_has_its_own_tokens_and_seconds(tmp_path: Path) -> None:
    one, other = experiment(tmp_path / "one", PIPELINED), experiment(tmp_path / "two", WAVES)
    pipelined, waves = train(one, **STORED), train(other, **STORED_WAVES)
    assert made(pipelined) == made(waves)
    assert sampled(one) == sampled(other)
    mine, theirs = counted(pipelined), counted(waves)
    for phase in ("rollout", "credit"):
        assert mine[phase]["tokens"] == theirs[phase]["tokens"] > 0
        assert mine[phase]["seconds"] > 0
    assert "credit/value_overlap_seconds" in mine["rollout"]["metrics"]
    (row,) = pipelined.read_metrics()
    assert row["seconds/other"] > 0
    assert mine["credit"]["seconds"] == pytest.approx(row["seconds/credit"])


def test_the_timeline_has_a_bar_for_credit_among_answers(tmp_path: Path) -> None:
    directory = train(experiment(tmp_path / "run", PIPELINED), **STORED)
    [process] = read_timeline(directory.logs / f"run{SUFFIX}")

    def seconds(lane: str, name: str) -> list[float]:
        return [
            one.end - one.start for one in process.spans if (one.lane, one.name) == (lane, name) and one.end
        ]

    given = counted(directory)["rollout"]["credit"]["seconds"]
    *among, _ = seconds("phases", "credit")  # the last is credit's own phase
    assert len(among) == 1 and sum(among) == pytest.approx(given, abs=1e-4)
    (row,) = directory.read_metrics()
    beside = sum(seconds("phases beside generation", "credit"))
    assert beside == pytest.approx(row["credit/value_overlap_seconds"], abs=1e-4)


@pytest.mark.parametrize("answered", [3, 12])
def test_a_run_that_fails_among_both_goes_on_to_the_same_bits_and_samples_nothing_twice(
    answered: int, tmp_path: Path
) -> None:
    whole = experiment(tmp_path / "whole", PIPELINED)
    expected = made(train(whole, **STORED))
    failing = experiment(tmp_path / "failing", PIPELINED, fail_after=answered)
    with pytest.raises(EngineError):
        train(failing, **STORED)
    again = experiment(tmp_path / "failing", PIPELINED)
    assert made(train(again, **STORED)) == expected
    assert sampled(failing) + sampled(again) == sampled(whole)


def test_killed_before_credit_it_may_go_on_with_two_waves_and_finds_what_was_asked_for_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(experiment(tmp_path / "whole", PIPELINED), **STORED)
    killed = experiment(tmp_path / "killed", PIPELINED)
    with monkeypatch.context() as patch:
        patch.setattr(generation, "credited", raises_after(generation.credited, 0, RuntimeError("struck")))
        with pytest.raises(RuntimeError, match="struck"):
            train(killed, **STORED)
    again = experiment(tmp_path / "killed", WAVES)
    assert made(train(again, **STORED_WAVES)) == made(whole)
    assert not sampled(again)
    expected, found = counted(whole), counted(directory_of(again))
    assert [found[phase]["tokens"] for phase in found] == [expected[phase]["tokens"] for phase in expected]
