"""Each method of the paper, made small by the smoke overlay, goes through the whole loop.

One server serves them all, each run beginning with its own start weights loaded into it, since starting
one costs more than a run. scripts/smoke_all.sh starts one for every experiment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_tensors

import treetune.parts  # noqa: F401  (registers them)
from tests.runtime.in_process import directory_of
from treetune.config.build import build
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.inference.base import Engine
from treetune.inference.settings import EngineSettings
from treetune.runtime.base import PolicyIteration, Runtime
from treetune.runtime.commands import run_iteration_loop
from treetune.trainers.ranks import Ranks

pytestmark = [pytest.mark.server, pytest.mark.slow]

RUNS = {
    # The experiment, and a metric that only its method has and that says that it was at work.
    "sft_rho1b_GSM8K": "episodes/count",
    "polIter_rho1bSft2_vineppo_MATH": "credit/value_states",
    "polIter_deepseekSft2_ppo_MATH": "critic/grad_norm",
    "polIter_deepseekSft2_grpo_GSM8K": "credit/advantage_std",
    "polIter_rho1bSft2_rloo_GSM8K": "credit/advantage_std",
    "polIter_rho1bSft2_dpo_positive_GSM8K": "selection/pairs",
    "polIter_rho1bSft2_restem_MATH": "selection/kept",
}


@dataclass(frozen=True, kw_only=True)
class SharedServer(EngineSettings):
    """The first run starts the engine; the next ones load their weights into it."""

    canary_tolerance: float | None = None
    started: list[tuple[EngineSettings, Engine]] = field(default_factory=list)
    settings: EngineSettings | None = None

    def tolerance(self, device: str) -> float:
        assert self.settings is not None
        return self.settings.tolerance(device)

    def start(self, model_directory: Path, log_directory: Path, **rest: Any) -> Engine:
        assert self.settings is not None
        if not self.started:
            engine = self.settings.start(model_directory, log_directory, **rest)
            self.started.append((self.settings, engine))
            # Whoever closes it is done with it, not with the server.
            engine.end, engine.close = engine.close, lambda: None  # type: ignore[attr-defined,method-assign]
        settings, engine = self.started[0]
        assert settings == self.settings, "all smoke runs have one engine"
        if engine.version != 0 or len(self.started) > 1:
            engine.load(model_directory, 0)
        self.started.append((settings, engine))
        return engine


@pytest.fixture(scope="module")
def server() -> Iterator[SharedServer]:
    shared = SharedServer()
    yield shared
    if shared.started:
        shared.started[0][1].end()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("APP_SEED", "APP_DIRECTORY", "APP_EXPERIMENT_NAME"):
        monkeypatch.delenv(variable, raising=False)
    # DeepSpeed remembers a process group that was left: several runs in one process share one.
    monkeypatch.setattr(Ranks, "leave", lambda self: None)


@pytest.mark.parametrize("name", RUNS)
def test_a_method_trains_for_two_small_iterations(name: str, server: SharedServer, tmp_path: Path) -> None:
    config = load([f"{name}.jsonnet", "overlays/smoke.jsonnet"])
    experiment = build(Runtime, config.data, Explanation(config))
    assert isinstance(experiment, PolicyIteration)
    experiment = replace(
        experiment, directory=str(tmp_path), engine=replace(server, settings=experiment.engine)
    )
    run_iteration_loop(experiment, config.data)

    directory = directory_of(experiment)
    rows = directory.read_metrics()
    assert [row["iteration"] for row in rows] == [0, 1]
    for row in rows:
        assert row["train/steps"] >= 1
        assert row[RUNS[name]] > 0
    for one in experiment.evaluation.sets:
        summary = json.loads((directory.evaluation(2, one.label) / "summary.json").read_text())
        assert (summary["n_problems"], summary["samples"]) == (2, 2)

    start = experiment.model.load_model(experiment.seed, experiment.task.alphabet).state_dict()
    trained = load_tensors((directory.checkpoint(2) / "policy" / "model.safetensors").read_bytes())
    moved = max(float((trained[key] - start[key]).abs().max()) for key in trained if key in start)
    if experiment.choose_checkpoint is None:  # else it may have chosen the weights that it began with
        assert moved > 1e-5, "the weights are as they were"
    assert all(torch.isfinite(tensor).all() for tensor in trained.values())
