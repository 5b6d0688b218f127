"""Countdown's experiments have the settings of the recipes that they are named after."""

from __future__ import annotations

import pytest

import treetune.parts  # noqa: F401  (registers them)
from treetune.config.build import build
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.episode_generators.credit.group import Group
from treetune.episode_generators.rollout.single_turn import SingleTurn
from treetune.episode_generators.selection.all import All
from treetune.episode_generators.selection.mixed_groups import MixedGroups
from treetune.models.sources import PretrainedModel
from treetune.runtime.base import PolicyIteration, Runtime
from treetune.tasks.countdown import Countdown
from treetune.tasks.countdown_rows import CountdownRows
from treetune.tasks.graders.countdown import CountdownScores
from treetune.trainers.base import DeepSpeedTrainer
from treetune.trainers.objectives.ppo import ClippedPolicyGradient
from treetune.trainers.schedule import Warmup

SINGLE_FILE = {
    "countdown/qwen2.5-3b_grpo": "Qwen/Qwen2.5-3B",
    "countdown/qwen2.5-3b-instruct_grpo": "Qwen/Qwen2.5-3B-Instruct",
}
RL2 = "countdown/qwen2.5-3b-instruct_rl2"
COHLEM = CountdownScores(no_answer=0.01, malformed=0.01, wrong=0.02, right=1.01)


def built(*names: str) -> PolicyIteration:
    config = load([f"{name}.jsonnet" for name in names], environ={})
    root = build(Runtime, config.data, Explanation(config))
    assert isinstance(root, PolicyIteration)
    return root


def parts(config: PolicyIteration) -> tuple[SingleTurn, DeepSpeedTrainer, ClippedPolicyGradient]:
    rollout, trainer = config.rollout, config.trainer
    assert isinstance(rollout, SingleTurn) and isinstance(trainer, DeepSpeedTrainer)
    assert isinstance(trainer.objective, ClippedPolicyGradient)
    return rollout, trainer, trainer.objective


@pytest.mark.parametrize("name", SINGLE_FILE)
def test_the_single_file_grpo_has_its_settings(name: str) -> None:
    config = built(name)
    rollout, trainer, objective = parts(config)
    assert config.experiment_name == name
    assert isinstance(config.model, PretrainedModel)
    assert (config.model.name_or_path, config.model.chat) == (SINGLE_FILE[name], None)

    assert (rollout.samples, config.problems_per_iteration) == (8, 8)
    assert (rollout.max_tokens, rollout.temperature, rollout.top_p) == (896, 1.0, 1.0)
    assert rollout.stop == ()
    assert rollout.unfinished_reward == COHLEM.no_answer

    assert config.credit == Group(std=True, eps=1.1920929e-07)
    assert config.selection == All()
    assert (objective.clip_low, objective.clip_high, objective.aggregation) == (0.2, 0.2, "sequence")
    assert (objective.entropy_coef, objective.kl_coef) == (0.001, 0.0)
    assert trainer.minibatch_size is not None and 8 * 8 // trainer.minibatch_size == 4, "updates per rollout"
    assert (trainer.epochs, trainer.advantage_normalisation) == (1, "none")
    assert (trainer.learning_rate, trainer.schedule, trainer.max_grad_norm) == (1e-6, Warmup(), 1.0)
    assert (trainer.adam_betas, trainer.adam_eps, trainer.weight_decay) == ((0.9, 0.999), 1e-8, 0.01)
    assert (config.checkpoints.every, trainer.precision) == (20, "bfloat16")

    task = config.task
    assert isinstance(task, Countdown)
    assert task.grader.scores == COHLEM
    assert (task.grader.equation, task.grader.unclosed, task.grader.require_all) == ("left", False, True)
    assert task.prompt.startswith("<|im_start|>system") and task.prompt.endswith("<think>")


def test_rl2s_example_has_its_settings() -> None:
    config = built(RL2)
    rollout, trainer, objective = parts(config)
    assert (rollout.samples, config.problems_per_iteration, config.iterations) == (4, 128, 512)
    assert (rollout.max_tokens, rollout.temperature, rollout.stop) == (1024, 1.0, ("</answer>",))
    assert config.credit == Group(std=False)
    assert config.selection == MixedGroups()
    assert (objective.clip_low, objective.clip_high, objective.aggregation) == (0.2, 0.2, "token")
    assert (objective.entropy_coef, objective.kl_coef) == (0.0, 0.0)
    assert (trainer.learning_rate, trainer.schedule) == (1e-6, Warmup(ratio=0.1))
    assert (trainer.minibatch_size, trainer.weight_decay, trainer.offload_optimizer) == (None, 0.01, True)
    task = config.task
    assert isinstance(task, Countdown)
    # The rollout's stop string ends the answer, and the grader doesn't see it.
    assert (task.grader.unclosed, task.grader.equation) == (True, "refused")
    assert task.grader.scores == CountdownScores(no_answer=0.0, malformed=0.1, wrong=0.1, right=1.0)


@pytest.mark.parametrize("name", [*SINGLE_FILE, RL2])
def test_public_rows_and_a_chat_template_go_on_the_right(name: str) -> None:
    made, public = built(name), built(name, "tasks/countdown_public")
    assert isinstance(made.task, Countdown) and isinstance(public.task, CountdownRows)
    assert (public.task.prompt, public.task.grader) == (made.task.prompt, made.task.grader)
    tests = [one.task for one in public.evaluation.sets if one.split == "test"]
    assert tests == [made.task], "the public rows have no test split"

    asked = built(name, "countdown/asked_in_chat")
    assert isinstance(asked.model, PretrainedModel) and asked.model.chat is not None
    assert isinstance(asked.task, Countdown)
    assert "<|im_start|>" not in asked.task.prompt
    assert asked.experiment_name == name + "_in_chat"


@pytest.mark.parametrize("name", ["tiny_sft", "tiny_grpo"])
def test_the_tiny_models_prompts_and_demonstrations_fit_its_context(name: str) -> None:
    config = built(f"countdown/{name}")
    task = config.task
    assert isinstance(task, Countdown)
    for problem in task.problems("validation"):
        demonstration = task.demonstration(problem, 1)
        assert set(problem.prompt + demonstration) <= set(task.alphabet())
        assert len(problem.prompt) + 96 <= config.context_length
        assert len(demonstration) < 96
