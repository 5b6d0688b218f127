"""One server for many small experiments in one process: starting one costs more than a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from tests.support.small_run import directory_of, weights_of
from treetune.config.build import build
from treetune.config.explain import Explanation
from treetune.config.layers import Config
from treetune.engine.base import Engine, EngineLaunch, Tolerance
from treetune.engine.engine import start_engine
from treetune.engine.settings import Engines, EngineSettings
from treetune.runtime.base import PolicyIteration, Runtime
from treetune.runtime.commands import run_iteration_loop
from treetune.runtime.directory import ExperimentDirectory
from treetune.trainer.ranks import Ranks


def built(config: Config) -> PolicyIteration:
    experiment = build(Runtime, config.data, Explanation(config))
    assert isinstance(experiment, PolicyIteration)
    return experiment


def train_with(
    engine: EngineSettings, experiment: PolicyIteration, config: Config, directory: Path
) -> tuple[PolicyIteration, ExperimentDirectory]:
    """Runs an experiment that was built from the configuration to its end in this process."""
    experiment = replace(experiment, directory=str(directory), engines=Engines(policy=engine))
    run_iteration_loop(experiment, config.data)
    return experiment, directory_of(experiment)


@dataclass(frozen=True, kw_only=True)
class SharedServer(EngineSettings):
    """The first run starts the engine; the next ones load their weights into it."""

    canary_tolerance: float | None = None
    started: list[tuple[EngineSettings, Engine]] = field(default_factory=list)
    settings: EngineSettings | None = None

    def tolerance(self, device: str) -> Tolerance:
        assert self.settings is not None
        return self.settings.tolerance(device)

    def start(self, launch: EngineLaunch) -> Engine:
        assert self.settings is not None
        if not self.started:
            engine = start_engine(self.settings, launch)
            # Whoever closes it is done with it, not with the server.
            engine.end, engine.close = engine.close, lambda: None  # type: ignore[attr-defined,method-assign]
        else:
            settings, engine = self.started[0]
            assert settings == self.settings, "all runs have one engine"
            engine.load(launch.weights, 0)
        self.started.append((self.settings, engine))
        return engine

    def train(self, config: Config, directory: Path) -> tuple[PolicyIteration, ExperimentDirectory]:
        """Runs the experiment to its end with this server."""
        experiment = built(config)
        return train_with(replace(self, settings=experiment.engines.policy), experiment, config, directory)


@contextmanager
def shared_server() -> Iterator[SharedServer]:
    """The server, and an environment in which runs share this process."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("APP_SEED", "APP_DIRECTORY", "APP_EXPERIMENT_NAME"):
            patch.delenv(variable, raising=False)
        # DeepSpeed remembers a process group that was left: several runs in one process share one.
        patch.setattr(Ranks, "leave", lambda self: None)
        shared = SharedServer()
        yield shared
        if shared.started:
            shared.started[0][1].end()  # type: ignore[attr-defined]


def largest_move(experiment: PolicyIteration, done: int) -> float:
    """How far any weight is from where it began. Fails for weights that are no numbers."""
    start: Mapping[str, torch.Tensor] = experiment.model.load_model(
        experiment.seed, experiment.task.alphabet
    ).state_dict()
    trained = load(weights_of(experiment, done))
    assert all(torch.isfinite(tensor).all() for tensor in trained.values())
    return max(float((trained[key] - start[key]).abs().max()) for key in trained if key in start)
