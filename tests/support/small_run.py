"""The small experiment in this process, with an engine that needs no server, and what it left behind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.columns import plain
from tests.support.fake_engine import FakeEngine
from treetune.credit.grpo import Group
from treetune.engine.base import Engine, EngineLaunch, Tolerance
from treetune.engine.settings import Engines, EngineSettings
from treetune.models.sources import TinyModel
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.rollouts.selection import All
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.storage import read_episodes, read_trajectories
from treetune.runtime.base import Checkpoints, PolicyIteration
from treetune.runtime.commands import run_iteration_loop
from treetune.runtime.directory import ExperimentDirectory
from treetune.store.checksums import read_record
from treetune.tasks.arithmetic import AdditionChain
from treetune.trainer.base import Trainer
from treetune.vocabulary import Episode, Trajectory

TASK = AdditionChain(count=3, digits=2, train_size=60, validation_size=10, test_size=10)
MODEL = TinyModel(layers=1, hidden_size=64, heads=2, intermediate_size=96, context_length=64)
TRAINER = Trainer(objective=ClippedPolicyGradient(), learning_rate=1e-3)


@dataclass(frozen=True, kw_only=True)
class FakeSettings(EngineSettings):
    """Engines whose tokens are all equally likely but for those that have `odds` of their own. `engines` are
    those that were started."""

    canary_tolerance: float | None = 1e9
    fail_after: int | None = None
    odds: Mapping[str, float] = field(default_factory=dict)
    model: TinyModel = MODEL
    alphabet: str = TASK.alphabet()
    engines: list[FakeEngine] = field(default_factory=list)

    def tolerance(self, device: str) -> Tolerance:
        return Tolerance(1e9, 1e9)  # it samples from no model, so the trainer's log-probs are others

    def start(self, launch: EngineLaunch) -> Engine:
        tokenizer = self.model.load_tokenizer(lambda: self.alphabet)
        odds = [1.0] * len(tokenizer)
        for token, chance in self.odds.items():
            odds[tokenizer.convert_tokens_to_ids(token)] = chance
        chances = [one / sum(odds) for one in odds]
        engine = FakeEngine(lambda ids, version: chances, tokenizer.eos_token_id, fail_after=self.fail_after)
        self.engines.append(engine)
        return engine


def small(base: Path, engine: EngineSettings | None = None, **changes: Any) -> PolicyIteration:
    """Two iterations of 4 problems x 2 answers; what is cut off earns the reward."""
    config = PolicyIteration(
        task=TASK,
        model=MODEL,
        engines=Engines(policy=engine or FakeSettings()),
        rollout=SingleTurn(samples=2, max_tokens=12, unfinished_reward=1.0),
        credit=Group(std=False),
        selection=All(),
        trainer=TRAINER,
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


def train(config: PolicyIteration, **stored: Any) -> ExperimentDirectory:
    """Runs it; `stored` stands for the configuration as it would be compared and stored."""
    run_iteration_loop(config, {"type": "policy_iteration", "trainer": {"seed": 1}, **stored})
    return directory_of(config)


def trained(config: PolicyIteration) -> PolicyIteration:
    train(config)
    return config


def engines_of(config: PolicyIteration) -> list[FakeEngine]:
    """All that were started for it in this process."""
    assert isinstance(config.engines.policy, FakeSettings)
    return config.engines.policy.engines


def sampled_requests(config: PolicyIteration) -> int:
    """How many requests its engines were asked for, over all its runs."""
    return sum(len(engine.asked) for engine in engines_of(config))


def samples_of(*configs: PolicyIteration) -> Counter[Any]:
    """The samples that all their engines were asked for: of which prompt, with which seed."""
    asked = [one for config in configs for engine in engines_of(config) for one in engine.asked]
    return Counter((plain(one.prompt_ids), one.seed + i) for one in asked for i in range(one.n))


def raises_after(function: Callable[..., Any], calls: int, error: BaseException) -> Callable[..., Any]:
    """The function, until it was called that often; then the error."""
    left = [calls]

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if left[0] == 0:
            raise error
        left[0] -= 1
        return function(*arguments, **named)

    return wrapped


# What a run left behind


def weights_of(config: PolicyIteration, number: int | None = None) -> bytes:
    """The policy of a checkpoint, the newest one's if no number is given."""
    directory = directory_of(config)
    chosen = directory.checkpoints()[-1] if number is None else number
    return (directory.checkpoint_folder(chosen) / "policy" / "model.safetensors").read_bytes()


def answers_of(config: PolicyIteration, iteration: int) -> list[Trajectory]:
    return read_trajectories(directory_of(config).iteration_folder(iteration) / "trajectories.arrow")


def episodes_of(config: PolicyIteration, iteration: int) -> list[Episode]:
    return read_episodes(directory_of(config).iteration_folder(iteration) / "episodes.arrow")


def log_of(config: PolicyIteration) -> str:
    return (directory_of(config).logs_folder / "run.log").read_text()


def evaluated(config: PolicyIteration, number: int, label: str) -> tuple[dict[str, Any], list[Any]]:
    """The summary of a set, and its answers."""
    folder = directory_of(config).evaluation_folder(number, label)
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    return json.loads((folder / "summary.json").read_text()), rows


def computed(config: PolicyIteration, *without: str) -> dict[str, Any]:
    """All that a run made, but for what clocks and restarts decide, and metrics with `without` in their
    names."""
    folder = directory_of(config).path
    by_chance = ("second", "time", "memory/", "engine/canary", "engine/sync", "engine/restarts", *without)
    return {
        "weights": {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.glob("checkpoints/*/*/model.safetensors"))
        },
        "episodes": [read_episodes(path) for path in sorted(folder.glob("iterations/*/episodes.arrow"))],
        "remembered": [
            read_record(path, "")
            for name in ("memory", "pass_rates")
            for path in sorted(folder.glob(f"iterations/*/{name}.json"))
        ],
        "metrics": [
            {name: value for name, value in row.items() if not any(part in name for part in by_chance)}
            for row in directory_of(config).read_metrics()
        ],
    }
