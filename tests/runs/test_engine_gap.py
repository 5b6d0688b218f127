"""Promises: a run that samples from another model than it trains ends with a message, or says so where it is
set to; runs whose weights differ by design, and rounding in the precision at hand, raise no alarm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.small_run import FakeSettings, log_of, small, train
from treetune.engine.settings import InProcessSettings, VllmSettings
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.runtime.training import GAP_METRIC, describe_gap_problem, gap_limit, stops_at_gap
from treetune.trainer.base import Trainer
from treetune.vocabulary import Episode


def session(
    engine: Any = None,
    *,
    device: str = "cpu",
    temperature: float = 1.0,
    restart: str = "never",
    objective: ClippedPolicyGradient | None = None,
    **settings: Any,
) -> Any:
    trainer = Trainer(objective=objective or ClippedPolicyGradient(), learning_rate=1e-3, **settings)
    return SimpleNamespace(
        config=SimpleNamespace(
            trainer=trainer,
            engines=SimpleNamespace(policy=engine or InProcessSettings()),
            rollout=SimpleNamespace(sampling=SimpleNamespace(temperature=temperature)),
            restart=restart,
        ),
        ranks=SimpleNamespace(device=SimpleNamespace(type=device)),
    )


def sampled_by(version: int) -> list[Episode]:
    return [SimpleNamespace(policy_version=version)]  # type: ignore[list-item]


def test_another_model_is_told_with_iteration_numbers_and_causes() -> None:
    problem = describe_gap_problem(session(), 2, sampled_by(2), {GAP_METRIC: 0.43})
    assert problem is not None
    for words in ("iteration 3", "0.43", "0.001", "sliding windows"):
        assert words in problem


@pytest.mark.parametrize("gap", [float("nan"), float("inf")])
def test_what_is_no_number_is_too_large(gap: float) -> None:
    assert describe_gap_problem(session(), 0, sampled_by(0), {GAP_METRIC: gap}) is not None


@pytest.mark.parametrize(
    ("more", "version", "metrics"),
    [
        ({}, 2, {GAP_METRIC: 1e-5}),
        ({}, 2, {}),  # nothing was sampled
        ({}, 1, {GAP_METRIC: 0.5}),  # sampled beside the training before
        ({"temperature": 0.0}, 2, {GAP_METRIC: 0.5}),
        ({"restart": "every_iteration"}, 2, {GAP_METRIC: 0.5}),
        ({"logprob_gap_limit": 0.6}, 2, {GAP_METRIC: 0.5}),
        ({"engine": VllmSettings(), "device": "cuda"}, 2, {GAP_METRIC: 0.05}),
        ({"engine": VllmSettings(canary_tolerance=0.2)}, 2, {GAP_METRIC: 0.5}),
        ({"precision": "bfloat16", "zero_stage": 1}, 2, {GAP_METRIC: 0.1}),
    ],
)
def test_ordinary_runs_raise_no_alarm(more: dict[str, Any], version: int, metrics: dict[str, float]) -> None:
    assert describe_gap_problem(session(**more), 2, sampled_by(version), metrics) is None


def test_limits_follow_what_engine_and_trainer_compute_in() -> None:
    quantised = VllmSettings(extra_arguments=("--quantization=fp8",))
    cache = VllmSettings(extra_arguments=("--kv_cache_dtype", "fp8_e5m2"))
    plain = VllmSettings(extra_arguments=("--kv-cache-dtype", "auto"))
    limits = [
        gap_limit(session(VllmSettings())),
        gap_limit(session(VllmSettings(), device="cuda")),
        gap_limit(session(VllmSettings(dtype="float32"), device="cuda")),
        gap_limit(session(quantised)),
        gap_limit(session(cache)),
        gap_limit(session(plain)),
    ]
    assert limits == [1e-3, 0.15, 5e-3, 0.5, 0.5, 1e-3]


def test_a_correction_or_a_setting_lets_the_run_go_on() -> None:
    assert stops_at_gap(session())
    assert not stops_at_gap(session(on_logprob_gap="warn"))
    assert not stops_at_gap(session(objective=ClippedPolicyGradient(importance_cap=2.0)))
    assert not stops_at_gap(session(objective=ClippedPolicyGradient(importance_band=(0.5, 5.0))))


def test_a_run_ends_before_such_an_iteration_is_recorded(tmp_path: Path) -> None:
    """Its engine gives all tokens alike, whatever the weights."""
    config = small(tmp_path)
    trainer = Trainer(objective=ClippedPolicyGradient(), learning_rate=1e-3, logprob_gap_limit=1e-6)
    with pytest.raises(RuntimeError, match=r"iteration 1: the trainer's log-probs .*\.on_logprob_gap"):
        train(replace(config, trainer=trainer))
    assert isinstance(config.engines.policy, FakeSettings)
    assert not list(tmp_path.rglob("checkpoints/0001/state.json"))


def test_a_run_that_only_warns_says_it_at_each_iteration(tmp_path: Path) -> None:
    trainer = Trainer(
        objective=ClippedPolicyGradient(),
        learning_rate=1e-3,
        logprob_gap_limit=1e-6,
        on_logprob_gap="warn",
    )
    config = replace(small(tmp_path), trainer=trainer, iterations=2)
    train(config)
    assert log_of(config).count("did not sample from the model that is trained") == 2
