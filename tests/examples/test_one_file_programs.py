"""The programs of examples/one_file end with the same weights as treetune's methods, to the last bit."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import treetune.parts  # noqa: F401  (registers them)
from treetune.config.build import build
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.runtime.base import PolicyIteration, Runtime
from treetune.runtime.commands import run_iteration_loop
from treetune.runtime.directory import ExperimentDirectory
from treetune.trainer.ranks import Ranks

FOLDER = Path(__file__).parents[2] / "examples" / "one_file"
METHODS = ("sft", "grpo", "vineppo", "ppo", "restem", "dpo_positive")

# Two iterations take seconds. Answers that are cut off earn the reward: the start model has learnt next to
# nothing, and so every method has right and wrong answers to learn from.
SMALL = """{
  directory: '%(directory)s',
  experiment_name: 'composed',
  iterations: 2,
  trainer+: { schedule+: { may_outlast_training: true }, tokens_per_micro_batch: 512 },
}"""
SAMPLED = """{
  problems_per_iteration: 12,
  rollout+: { samples: 4, max_tokens: 40, unfinished_reward: 1.0 },
}"""
MINIBATCHES = "{ trainer+: { minibatch_size: 16 } }"
SMALLER = {"sft": ("{ problems_per_iteration: 640 }",), "vineppo": (SAMPLED,)}
SETTINGS = {
    "SEED": "seed",
    "NUMBERS_PER_PROBLEM": "task.count",
    "TEST_SIZE": "task.test_size",
    "VALIDATION_SIZE": "task.validation_size",
    "TRAIN_SIZE": "task.train_size",
    "SLIP_PROBABILITY": "task.demonstration_noise",
    "LAYERS": "model.layers",
    "HIDDEN_SIZE": "model.hidden_size",
    "HEADS": "model.heads",
    "INTERMEDIATE_SIZE": "model.intermediate_size",
    "CONTEXT_LENGTH": "model.context_length",
    "ITERATIONS": "iterations",
    "PROBLEMS_PER_ITERATION": "problems_per_iteration",
    "MINIBATCH_SIZE": "trainer.minibatch_size",
    "LEARNING_RATE": "trainer.learning_rate",
    "WARMUP_STEPS": "trainer.schedule.steps",
    "MAX_GRAD_NORM": "trainer.max_grad_norm",
    "ANSWERS_PER_PROBLEM": "rollout.samples",
    "MAX_TOKENS": "rollout.max_tokens",
    "UNFINISHED_REWARD": "rollout.unfinished_reward",
    "EPOCHS": "trainer.epochs",
    "CLIP": "trainer.objective.clip_high",
    "KL_COEF": "trainer.objective.kl_coef",
    "CONTINUATIONS": "credit.samples",
    "GAMMA": "credit.gamma",
    "LAMBDA": "credit.lam",
    "CRITIC_LEARNING_RATE": "credit.critic.learning_rate",
    "MAX_PER_PROBLEM": "selection.max_per_problem",
    "MAX_PAIRS_PER_PROBLEM": "selection.max_pairs_per_problem",
    "BETA": "trainer.objective.beta",
    "PENALTY": "trainer.objective.positive_penalty",
    "BAND": "trainer.objective.penalty_band",
    "STD_EPS": "credit.eps",
    "TOKENS_PER_MICRO_BATCH": "trainer.tokens_per_micro_batch",
}
"""The configuration's key of each constant of a program."""
WITHOUT_KEY = {"ALPHABET", "PAD", "END", "FOLDER", "START"}


@pytest.fixture(scope="module", autouse=True)
def one_thread_and_one_process_group() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "leave", lambda self: None)
        yield
    torch.set_num_threads(threads)


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"one_file_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def experiment(name: str, *overrides: str) -> tuple[PolicyIteration, Any]:
    config = load([str(FOLDER / f"{name}.jsonnet")], overrides, environ={})
    built = build(Runtime, config.data, Explanation(config))
    assert isinstance(built, PolicyIteration)
    return built, config.data


def settings(module: ModuleType, config: Any) -> dict[str, Any]:
    """Reads the values of the program's constants from the configuration."""
    values = {}
    constants = [name for name in vars(module) if name.isupper() and name not in WITHOUT_KEY]
    for name in constants:
        value = config
        for part in SETTINGS[name].split("."):
            value = getattr(value, part)
        values[name] = value
    return values


@pytest.mark.parametrize("name", METHODS)
def test_a_program_and_its_configuration_have_the_same_settings(name: str) -> None:
    module = program(name)
    config, _ = experiment(name)
    expected = settings(module, config)
    assert {constant: getattr(module, constant) for constant in expected} == expected


def train_composed(name: str, folder: Path, *overrides: str) -> Path:
    """Trains the composed method for two iterations, and returns the folder of its weights."""
    config, plain = experiment(name, SMALL % {"directory": folder}, *overrides)
    run_iteration_loop(config, plain)
    return ExperimentDirectory(folder / "composed").checkpoint_folder(2) / "policy"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_composed("sft", tmp_path_factory.mktemp("sft"), *SMALLER["sft"])


@pytest.mark.parametrize("name", METHODS)
def test_a_program_ends_with_the_weights_of_the_composed_method(
    name: str, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = f"{{ model: {{ type: 'pretrained', name_or_path: '{start}' }} }}"
    overrides = (
        SMALL % {"directory": tmp_path},
        *SMALLER.get(name, (SAMPLED, MINIBATCHES)),
        *([begin] if name != "sft" else []),
    )
    config, _ = experiment(name, *overrides)
    module = program(name)
    monkeypatch.setattr(module, "START", start, raising=False)
    for constant, value in settings(module, config).items():
        monkeypatch.setattr(module, constant, value)
    trained = dict(module.main().named_parameters())
    weights = start if name == "sft" else train_composed(name, tmp_path, *overrides[1:])
    expected = load_file(weights / "model.safetensors")
    assert trained.keys() == expected.keys()
    differences = {}
    for key, weight in expected.items():
        differences[key] = float((trained[key].detach() - weight).abs().max())
    assert not any(differences.values()), differences
