"""Countdown's experiments have the settings of the recipes that they are named after."""

from __future__ import annotations

import pytest

import treetune.parts  # noqa: F401  (registers them)
from treetune.config.build import build
from treetune.config.errors import ConfigError
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.models.pretrained import PretrainedModel
from treetune.rollouts.credit import Group
from treetune.rollouts.demonstrations import Demonstrations
from treetune.rollouts.selection import All, MixedGroups
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.until_mixed import UntilMixed
from treetune.runtime.base import PolicyIteration, Runtime
from treetune.tasks.countdown import Countdown, CountdownRows
from treetune.tasks.graders.countdown import CountdownScores
from treetune.trainers.base import Trainer, Warmup
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient

SINGLE_FILE = {
    "countdown/qwen2.5-3b_grpo": "Qwen/Qwen2.5-3B",
    "countdown/qwen2.5-3b-instruct_grpo": "Qwen/Qwen2.5-3B-Instruct",
}
RL2 = "countdown/qwen2.5-3b-instruct_rl2"
COHLEM = CountdownScores(no_answer=0.01, malformed=0.01, wrong=0.02, correct=1.01)


def built(*names: str) -> PolicyIteration:
    config = load([f"{name}.jsonnet" for name in names], environ={})
    root = build(Runtime, config.data, Explanation(config))
    assert isinstance(root, PolicyIteration)
    return root


def parts(config: PolicyIteration) -> tuple[SingleTurn, Trainer, ClippedPolicyGradient]:
    rollout, trainer = config.rollout, config.trainer
    assert isinstance(rollout, SingleTurn)
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
    assert rollout.unfinished_reward is None, "cut-off answers are graded like any other"

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
    assert (trainer.learning_rate, trainer.schedule) == (1e-6, Warmup()), "its scheduler is constant"
    assert (trainer.minibatch_size, trainer.weight_decay, trainer.offload_optimizer) == (None, 0.01, True)
    task = config.task
    assert isinstance(task, Countdown)
    # The rollout's stop string ends the answer, and the grader doesn't see it.
    assert (task.grader.unclosed, task.grader.equation) == (True, "refused")
    assert task.grader.scores == CountdownScores(no_answer=0.0, malformed=0.1, wrong=0.1, correct=1.0)


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


@pytest.mark.parametrize(
    "fragment",
    ["countdown/asked_in_chat", "tasks/countdown_scores_tinyzero_rl2", "tasks/countdown_open_think"],
)
def test_public_rows_and_their_test_problems_are_asked_and_graded_alike_in_any_order(fragment: str) -> None:
    left, public = "countdown/qwen2.5-3b-instruct_grpo", "tasks/countdown_public"
    asked = built(left, fragment).task
    assert isinstance(asked, Countdown)
    for names in ([fragment, public], [public, fragment]):
        config = built(left, *names)
        (test,) = [one.task for one in config.evaluation.sets if one.split == "test"]
        assert isinstance(config.task, CountdownRows)
        assert (config.task.prompt, config.task.grader) == (asked.prompt, asked.grader)
        assert test == asked


COHLEM_ON_THE_RIGHT = "tasks/countdown_scores_cohlem"


def test_the_single_file_grpos_scores_go_around_a_rollout_within_another() -> None:
    config = built("countdown/tiny_grpo", "rollouts/until_mixed", COHLEM_ON_THE_RIGHT)
    assert isinstance(config.rollout, UntilMixed) and isinstance(config.task, Countdown)
    assert config.evaluation.rollout is not None
    rollouts = (config.rollout.rollout, config.evaluation.rollout)
    assert [rollout.unfinished_reward for rollout in rollouts] == [None, None]
    assert config.task.grader.scores == COHLEM


def test_the_single_file_grpos_scores_leave_demonstrations_alone() -> None:
    config = built("countdown/tiny_sft", COHLEM_ON_THE_RIGHT)
    assert config.rollout == Demonstrations()
    assert isinstance(config.task, Countdown) and config.task.grader.scores == COHLEM


def refusal(*names: str, override: str) -> str:
    config = load([f"{name}.jsonnet" for name in names], overrides=[override], environ={})
    with pytest.raises(ConfigError) as refused:
        build(Runtime, config.data, Explanation(config))
    return " ".join(str(refused.value).split())


def test_demonstrations_of_products_are_refused_before_anything_starts() -> None:
    text = refusal("countdown/tiny_sft", override="{task+: {operators: ['+', '*']}}")
    assert "demonstrations for sums and differences alone" in text and "['+', '*']" in text
    assert "set task.operators to ['+', '-'] or ['+']" in text
    # Sampling needs no teacher.
    config = load(["countdown/tiny_grpo.jsonnet"], overrides=["{task+: {operators: ['*']}}"], environ={})
    build(Runtime, config.data, Explanation(config))


def test_a_task_without_a_teacher_is_refused_before_anything_starts() -> None:
    text = refusal(
        "countdown/tiny_sft",
        "tasks/countdown_public",
        override="{model: {type: 'pretrained', name_or_path: 'x'}}",
    )
    assert "CountdownRows has no demonstrations" in text


def test_a_prompt_without_its_placeholders_names_the_prompt_alone() -> None:
    text = refusal("countdown/tiny_grpo", override="{task+: {prompt: 'solve it'}}")
    assert "prompt needs {numbers} and {target} exactly once" in text
    assert "change task.prompt, e.g." in text and "task.numbers" not in text


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
