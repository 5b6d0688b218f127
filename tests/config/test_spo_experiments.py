"""The experiments of "Exploring Paths" have the settings of its code."""

from __future__ import annotations

import pytest

import treetune.parts  # noqa: F401  (registers them)
from treetune.config.build import build
from treetune.config.explain import Explanation
from treetune.config.jsonnet import CONFIGS, configurations, load
from treetune.rollouts.credit import Group
from treetune.rollouts.selection import MixedGroups
from treetune.rollouts.single_turn import SingleTurn
from treetune.runtime.base import PolicyIteration, Runtime
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient
from treetune.trainers.objectives.spo import CorrectPaths

SHARED = "qwen3-4b-thinking_GSM8K"
NAMES = sorted(path.stem for path in configurations(CONFIGS / "spo") if path.stem != SHARED)
BASELINE = "qwen3-4b-thinking_GSM8K_dr_grpo"


def built(*files: str) -> PolicyIteration:
    config = load([f"{name}.jsonnet" for name in files], environ={})
    experiment = build(Runtime, config.data, Explanation(config))
    assert isinstance(experiment, PolicyIteration)
    return experiment


@pytest.mark.parametrize("name", NAMES)
def test_each_has_the_published_settings(name: str) -> None:
    experiment = built(f"spo/{name}")
    rollout, trainer = experiment.rollout, experiment.trainer
    assert isinstance(rollout, SingleTurn)
    assert rollout.samples * experiment.problems_per_iteration == 512
    assert (rollout.temperature, rollout.max_tokens, rollout.top_p) == (1.0, 8192, 1.0)
    assert (trainer.learning_rate, trainer.weight_decay, trainer.max_grad_norm) == (1e-6, 1e-2, 1.0)
    assert {trainer.schedule.factor(step, 1000) for step in (0, 1, 999)} == {1.0}
    assert (trainer.epochs, trainer.minibatch_size) == (1, None), "one update per rollout"
    (test,) = experiment.evaluation.sets
    assert (test.split, test.temperature, test.while_training, experiment.evaluation.every) == (
        "test",
        0,
        True,
        5,
    )
    assert experiment.checkpoints.keep_every == 20
    assert experiment.task.validation_size is None


def test_correct_paths_learn_from_one_answer_to_each_problem() -> None:
    for name in NAMES:
        experiment = built(f"spo/{name}")
        objective = experiment.trainer.objective
        if name == BASELINE:
            assert isinstance(objective, ClippedPolicyGradient)
            assert (objective.aggregation, objective.importance_cap) == ("token", 2.0)
            assert experiment.credit == Group(std=False)
            assert isinstance(experiment.selection, MixedGroups)
            assert (experiment.rollout.samples, experiment.iterations) == (4, 8700)
        else:
            assert isinstance(objective, CorrectPaths)
            assert objective.detach_target
            assert (experiment.rollout.samples, experiment.iterations) == (1, 2100)


def test_what_the_reference_did_otherwise_goes_on_the_right() -> None:
    right = ("compat/spo_moving_target", "compat/spo_mask_above", "compat/grader_gsm8k_lenient")
    experiment = built("spo/qwen3-4b-thinking_GSM8K_spo_3_3", *right)
    objective = experiment.trainer.objective
    assert isinstance(objective, CorrectPaths)
    assert (objective.target, objective.mask, objective.detach_target) == ("fixed", "above", False)
    assert type(experiment.task.grader).__name__ != "Numeric"
