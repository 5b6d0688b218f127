"""The experiments of ThreadWeaver have the settings of its code; what is ours instead is named here.

The expected values are a transcription of what was published: not of ours.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import treetune.parts  # noqa: F401  (registers them)
from treetune.config.build import build
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.inference.settings import VllmSettings
from treetune.models.pretrained import PretrainedModel
from treetune.rollouts.credit import Group, NoCredit
from treetune.rollouts.demonstrations import Demonstrations
from treetune.rollouts.selection import All
from treetune.rollouts.shaping import WrongAnswers
from treetune.runtime.base import PolicyIteration, Runtime
from treetune.tasks.multiplication import Multiplication
from treetune.trainers.base import Trainer, Warmup
from treetune.trainers.objectives.mle import MaximumLikelihood
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient
from treetune_threads.format import TAGS, has_threads
from treetune_threads.parallel_threads import ParallelThreads
from treetune_threads.shaping import (
    Acceleration,
    OfDemonstration,
    ReferenceLength,
    Total,
)

FORMS = ("parallel", "sequential")
EVERY = [*FORMS, *(f"sft_{form}" for form in FORMS)]


@cache
def built(name: str) -> PolicyIteration:
    config = load([f"threadweaver/{name}.jsonnet"], environ={})
    experiment = build(Runtime, config.data, Explanation(config))
    assert isinstance(experiment, PolicyIteration)
    return experiment


def trainer_of(experiment: PolicyIteration) -> Trainer:
    return experiment.trainer


def model_of(experiment: PolicyIteration) -> PretrainedModel:
    assert isinstance(experiment.model, PretrainedModel)
    return experiment.model


@pytest.mark.parametrize("name", EVERY)
def test_all_of_them_multiply_and_are_measured_alike(name: str) -> None:
    experiment = built(name)
    assert experiment.experiment_name == f"threadweaver/{name}"
    task = experiment.task
    assert isinstance(task, Multiplication)
    assert (task.factors, task.min_value, task.max_value) == ((5, 8), 0, 1000)
    assert (task.train_size, task.validation_size) == (10_000, 1_000)
    assert task.form == ("tree_digits" if name.endswith("parallel") else "sequential")
    model = model_of(experiment)
    assert (model.dtype, model.added_tokens) == ("bfloat16", TAGS)
    assert model.chat is not None and model.chat.template_arguments == {}, "it thinks"
    held_out = experiment.evaluation.sets[0]
    assert (held_out.split, held_out.problems, held_out.while_training) == ("validation", None, True)
    assert (held_out.samples, held_out.temperature, held_out.top_p) == (8, 1.0, 1.0)
    sampler = experiment.evaluation.rollout or experiment.rollout
    assert isinstance(sampler, ParallelThreads)
    assert sampler.parallel == name.endswith("parallel")
    assert trainer_of(experiment).zero_stage == 3
    assert trainer_of(experiment).offload_optimizer and trainer_of(experiment).offload_parameters
    assert trainer_of(experiment).precision == "bfloat16"
    assert trainer_of(experiment).gradient_checkpointing
    assert isinstance(experiment.engines.policy, VllmSettings)
    assert (
        experiment.engines.policy.tensor_parallel_size,
        experiment.engines.policy.gpu_memory_utilization,
    ) == (1, 0.8)
    assert experiment.engines.policy.servers == "per_rank", "ranks may be on several machines"


@pytest.mark.parametrize("form", FORMS)
def test_reinforcement_learning_is_p_grpo_as_its_code_has_it(form: str) -> None:
    experiment, trainer = built(form), trainer_of(built(form))
    assert model_of(experiment).name_or_path == f"experiments/threadweaver/sft_{form}/checkpoints/last/policy"
    rollout = experiment.rollout
    assert isinstance(rollout, ParallelThreads)
    assert (rollout.samples, rollout.temperature, rollout.top_p, rollout.top_k) == (8, 1.0, 1.0, -1)
    assert (rollout.max_depth, rollout.max_blocks, rollout.thread_tokens) == (1, 16, None)
    assert (rollout.stragglers, rollout.malformed, rollout.conclusion) == ("go_on", "go_on", False)
    assert (experiment.problems_per_iteration, experiment.problem_sampling) == (128, "epochs")
    assert (experiment.iterations, experiment.evaluation.every) == (400, 10)
    assert (experiment.checkpoints.every, experiment.checkpoints.keep_every) == (10, 10)
    assert experiment.credit == Group(std=False) and experiment.selection == All()
    assert trainer.objective == ClippedPolicyGradient(
        clip_low=0.2, clip_high=0.28, dual_clip=3.0, aggregation="token", kl_coef=0.0, entropy_coef=0.0
    )
    assert (trainer.learning_rate, trainer.max_grad_norm, trainer.weight_decay) == (1e-6, 1.0, 1e-2)
    assert {trainer.schedule.factor(step, 400) for step in (0, 1, 399)} == {1.0}
    assert (trainer.epochs, trainer.minibatch_size) == (1, None), "one step an iteration"
    assert (trainer.measure_kl, trainer.advantage_normalisation) == (False, "none")


def test_the_two_forms_differ_in_nothing_but_the_threads() -> None:
    parallel, sequential = built("parallel"), built("sequential")
    assert isinstance(parallel.rollout, ParallelThreads) and isinstance(parallel.task, Multiplication)
    assert replace(
        parallel,
        experiment_name=sequential.experiment_name,
        model=sequential.model,
        task=replace(parallel.task, form="sequential"),
        rollout=replace(parallel.rollout, parallel=False),
    ) == sequential  # fmt: skip
    assert replace(model_of(parallel), name_or_path=model_of(sequential).name_or_path) == sequential.model


@pytest.mark.parametrize("form", FORMS)
def test_a_right_answer_earns_up_to_a_tenth_more_and_a_wrong_one_costs_one(form: str) -> None:
    accelerated, wrong = built(form).shaping
    assert isinstance(accelerated, Acceleration)
    assert (accelerated.form, accelerated.reference, accelerated.opening) == ("saved", Total(), 0.0)
    assert (accelerated.weight, accelerated.clip) == (1.0 * 0.5, 0.2)
    assert wrong == WrongAnswers(penalty=1.0)


@pytest.mark.parametrize(
    ("name", "form", "reference"),
    [
        ("parallel_readme", "ratio", Total()),
        ("parallel_sequential_reference", "saved", OfDemonstration()),
    ],
)
def test_another_reward_is_all_that_differs(name: str, form: str, reference: ReferenceLength) -> None:
    published, other = built("parallel"), built(name)
    (accelerated,) = other.shaping
    assert isinstance(accelerated, Acceleration)
    assert (accelerated.form, accelerated.reference) == (form, reference)
    names = {"experiment_name": published.experiment_name, "shaping": published.shaping}
    assert replace(other, **names) == published  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
def test_fine_tuning_follows_the_recipe(form: str) -> None:
    experiment, trainer = built(f"sft_{form}"), trainer_of(built(f"sft_{form}"))
    assert model_of(experiment).name_or_path == "Qwen/Qwen3-8B"
    assert model_of(experiment).liger
    assert experiment.rollout == Demonstrations(samples=1, too_long="leave_out")
    assert isinstance(experiment.credit, NoCredit)
    assert experiment.context_length == 40_960
    assert trainer.objective == MaximumLikelihood(aggregation="token")
    assert trainer.learning_rate == 1e-5
    assert trainer.schedule == Warmup(ratio=0.05, decay="cosine")
    assert (trainer.adam_betas, trainer.weight_decay) == ((0.9, 0.95), 1e-4)
    assert isinstance(experiment.task, Multiplication) and experiment.problems_per_iteration is not None
    seen = trainer.epochs * experiment.iterations * experiment.problems_per_iteration
    assert (seen, experiment.problem_sampling) == (experiment.task.train_size, "epochs"), "each once"
    assert trainer.minibatch_size == 2 * 8, "two on each of eight GPUs"
    assert experiment.problems_per_iteration % trainer.minibatch_size == 0, "no step is smaller"
    assert (trainer.layout == "tree") == (form == "parallel")
    train = experiment.evaluation.sets[1]
    assert (train.split, train.samples, train.temperature, train.top_p) == ("train", 1, 0.6, 0.95)
    assert not train.while_training


@pytest.mark.parametrize("form", FORMS)
def test_solutions_fit_are_right_and_have_the_threads_that_the_rollout_makes(form: str) -> None:
    supervised, experiment = built(f"sft_{form}"), built(form)
    assert supervised.task == experiment.task
    task = replace(experiment.task, train_size=40, validation_size=1, test_size=1)  # type: ignore[type-var]
    for problem in task.problems("train"):
        solution = task.demonstration(problem, 0)
        assert task.grader.grade(solution, problem).correct
        assert has_threads(solution) == (form == "parallel")
        # A character is a token at most, and a tag is one.
        most = len(problem.prompt) + len(solution) - sum(solution.count(t) * (len(t) - 1) for t in TAGS)
        assert most < experiment.context_length < supervised.context_length
