"""The small experiment in this process, with an engine that needs no server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.fake_engine import FakeEngine
from treetune.inference.base import Engine, EngineLaunch, Tolerance
from treetune.inference.engine import start_engine
from treetune.inference.settings import Engines, EngineSettings
from treetune.models.sources import TinyModel
from treetune.models.tokenizer import character_tokenizer
from treetune.rollouts.credit import Group
from treetune.rollouts.selection import All
from treetune.rollouts.single_turn import SingleTurn
from treetune.runtime.base import Checkpoints, PolicyIteration
from treetune.runtime.commands import run_iteration_loop
from treetune.runtime.directory import ExperimentDirectory
from treetune.tasks.arithmetic import AdditionChain
from treetune.trainers.base import Trainer
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient

TASK = AdditionChain(count=3, digits=2, train_size=60, validation_size=10, test_size=10)


@dataclass(frozen=True, kw_only=True)
class FakeSettings(EngineSettings):
    """Engines whose tokens are all equally likely. `engines` are those that were started."""

    canary_tolerance: float | None = 1e9
    fail_after: int | None = None
    engines: list[FakeEngine] = field(default_factory=list)

    def tolerance(self, device: str) -> Tolerance:
        return Tolerance(1e9, 1e9)  # it samples from no model, so the trainer's log-probs are others

    def start(self, launch: EngineLaunch) -> Engine:
        tokenizer = character_tokenizer(TASK.alphabet(), 64)
        uniform = [1 / len(tokenizer)] * len(tokenizer)
        engine = FakeEngine(lambda ids, version: uniform, tokenizer.eos_token_id, fail_after=self.fail_after)
        self.engines.append(engine)
        return engine


@start_engine.register
def start_fake(settings: FakeSettings, launch: EngineLaunch) -> Engine:
    return settings.start(launch)


def small(base: Path, engine: EngineSettings | None = None, **changes: Any) -> PolicyIteration:
    """Two iterations of 4 problems x 2 answers; what is cut off earns the reward."""
    config = PolicyIteration(
        task=TASK,
        model=TinyModel(layers=1, hidden_size=64, heads=2, intermediate_size=96, context_length=64),
        engines=Engines(policy=engine or FakeSettings()),
        rollout=SingleTurn(samples=2, max_tokens=12, unfinished_reward=1.0),
        credit=Group(std=False),
        selection=All(),
        trainer=Trainer(objective=ClippedPolicyGradient(), learning_rate=1e-3),
        iterations=2,
        problems_per_iteration=4,
        context_length=64,
        experiment_name="small",
        directory=str(base),
        seed=1,
        checkpoints=Checkpoints(every=1, keep_every=1),
    )
    return replace(config, **changes)


def directory_of(config: PolicyIteration) -> ExperimentDirectory:
    return ExperimentDirectory(Path(config.directory) / config.experiment_name)


def train(config: PolicyIteration, **plain: Any) -> ExperimentDirectory:
    """Runs it; `plain` stands for the configuration as it would be compared and stored."""
    run_iteration_loop(config, {"type": "policy_iteration", "trainer": {"seed": 1}, **plain})
    return directory_of(config)


def sampled_requests(config: PolicyIteration) -> int:
    """How many requests its engines were asked for, over all its runs."""
    assert isinstance(config.engines.policy, FakeSettings)
    return sum(len(engine.asked) for engine in config.engines.policy.engines)


def raises_after(function: Callable[..., Any], calls: int, error: Exception) -> Callable[..., Any]:
    """The function, until it was called that often; then the error."""
    left = [calls]

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if left[0] == 0:
            raise error
        left[0] -= 1
        return function(*arguments, **named)

    return wrapped
