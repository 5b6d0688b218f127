"""The paper's experiments have the paper's settings; what goes on their right goes there.

The expected values are a transcription of the published configurations, evaluated: not of ours.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import treetune.parts  # noqa: F401  (registers them)
from tests.support.shipped import whole_configurations
from treetune.config import lexer
from treetune.config.build import build
from treetune.config.explain import Explanation
from treetune.config.jsonnet import CONFIGS, configurations, load, text_of
from treetune.inference.settings import VllmSettings
from treetune.models.pretrained import PretrainedModel
from treetune.models.sources import TinyModel
from treetune.rollouts.credit import CriticSettings, Gae, Group, NoCredit, Rloo
from treetune.rollouts.demonstrations import Demonstrations
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.selection import All, CorrectOnly, PreferencePairs
from treetune.rollouts.single_turn import SingleTurn
from treetune.runtime.base import ChooseCheckpoint, PolicyIteration, Runtime
from treetune.tasks.rows import Gsm8k
from treetune.trainers.base import Trainer, Warmup
from treetune.trainers.objectives.mle import MaximumLikelihood
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient
from treetune.trainers.objectives.preference import DpoPositive
from treetune_domains.math_tasks import CollegeMath, Math, OlympiadBench

FAMILIES, DATA = ("rho1b", "deepseek"), ("MATH", "GSM8K")
POLICY_GRADIENT = ("vineppo", "ppo", "grpo", "rloo")
METHODS = (*POLICY_GRADIENT, "dpo_positive", "restem")
EXPERIMENTS = [
    pytest.param(family, method, data, id=f"{family}-{method}-{data}")
    for family in FAMILIES
    for method in METHODS
    for data in DATA
]
SFT = [f"sft_{model}_{data}" for model in ("rho1b", "deepseek7b") for data in DATA]
FRAGMENTS_FOR_THE_RIGHT = ["rollouts/until_mixed"] + sorted(
    f"{folder}/{path.stem}"
    for folder in ("models", "compat", "overlays", "shaping", "selections")
    for path in configurations(CONFIGS / folder)
    # The ones for the embedded tasks read no other characters; those of SPO and Guru are for their own
    # experiments, and those that read a variable of the environment for somebody who has set it.
    if not path.stem.startswith(("tiny", "spo_", "guru_")) and "extVar" not in text_of(path)
)
SEED = 2746318213


@cache  # each file that is imported costs Jsonnet some 20 ms
def built(*configs: str) -> PolicyIteration:
    config = load([f"{name}.jsonnet" for name in configs], environ={})
    root = build(Runtime, config.data, Explanation(config))
    assert isinstance(root, PolicyIteration)
    return root


def experiment(family: str, method: str, data: str, *right: str) -> PolicyIteration:
    return built(f"polIter_{family}Sft2_{method}_{data}", *right)


def trainer_of(config: PolicyIteration) -> Trainer:
    return config.trainer


def test_there_are_twenty_four_of_them_and_four_that_make_their_start_models() -> None:
    there = {path.stem for path in CONFIGS.glob("*.jsonnet")}
    assert there == {f"polIter_{f}Sft2_{m}_{d}" for f in FAMILIES for m in METHODS for d in DATA} | set(SFT)


@pytest.mark.parametrize(("family", "method", "data"), EXPERIMENTS)
def test_an_experiment_has_what_all_of_them_share(family: str, method: str, data: str) -> None:
    config, trainer = (one := experiment(family, method, data)), trainer_of(one)
    assert config.experiment_name == f"polIter_{family}Sft2_{method}_{data}"
    assert config.seed == SEED

    assert trainer.learning_rate == 1e-6
    assert (trainer.adam_betas, trainer.adam_eps, trainer.weight_decay) == ((0.9, 0.999), 1e-8, 0.0)
    assert trainer.max_grad_norm == 1.0
    assert trainer.schedule == Warmup(ratio=0.03, decay="linear")
    assert trainer.minibatch_size == 64
    assert (trainer.precision, trainer.gradient_checkpointing) == ("bfloat16", True)
    # The paper's Rho-1B has stage 0, which adds micro-batches up in bfloat16; 1 is the least that doesn't.
    assert trainer.zero_stage == {"rho1b": 1, "deepseek": 2}[family]
    assert trainer.offload_optimizer == ((family, method) == ("deepseek", "ppo"))

    rollout = config.rollout
    assert isinstance(rollout, SingleTurn)
    assert (rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_tokens) == (0.6, 0.9, -1, 1024)
    assert rollout.stop == ("\n\n\nProblem:",)
    assert rollout.max_prompt_tokens == 1512
    assert rollout.unfinished_reward == 0.0
    assert rollout.samples == (64 if method == "dpo_positive" else 8)

    model = config.model
    assert isinstance(model, PretrainedModel)
    assert (
        model.name_or_path
        == "realtreetune/"
        + {
            ("rho1b", "MATH"): "rho-1b-sft-MATH",
            ("rho1b", "GSM8K"): "rho-1b-sft-GSM8K",
            ("deepseek", "MATH"): "deepseekmath-7b-sft-MATH-v2",
            ("deepseek", "GSM8K"): "deepseekmath-7b-sft-GSM8K",
        }[family, data]
    )
    assert (model.dtype, model.attention) == ("bfloat16", "sdpa")
    assert (model.begin_of_text, model.chat) == (True, None)
    assert config.context_length == {"rho1b": 2048, "deepseek": 2499}[family]

    task = config.task
    assert isinstance(task, Math if data == "MATH" else Gsm8k)
    assert task.prompt == "[MATH_TASK] Problem:\n{problem}\n\nSolution:"

    engine = config.engines.policy
    assert isinstance(engine, VllmSettings)
    assert (engine.servers, engine.sleep, engine.dtype) == ("per_rank", True, "bfloat16")
    assert engine.max_num_seqs == {"rho1b": 512, "deepseek": 256}[family]


@pytest.mark.parametrize(("family", "method", "data"), EXPERIMENTS)
def test_an_experiment_is_evaluated_on_the_papers_sets(family: str, method: str, data: str) -> None:
    evaluation = experiment(family, method, data).evaluation
    sets = {one.label: one for one in evaluation.sets}
    for one in sets.values():
        assert (one.samples, one.temperature, one.top_p, one.max_tokens) == (16, 0.35, 0.9, 1024)
    assert evaluation.seed == SEED
    expected: dict[str, tuple[str, int | None, type | None]] = {
        "MATH": {
            "math_test": ("test", None, None),
            "math_validation": ("validation", None, None),
            "math_train": ("train", 500, None),
            "collegeMath_test": ("test", 500, CollegeMath),
            "olympiadbench_test": ("test", None, OlympiadBench),
        },
        "GSM8K": {
            "gsm8k_test": ("test", None, None),
            "gsm8k_validation": ("validation", None, None),
            "gsm8k_train": ("train", 373, None),
        },
    }[data]
    assert sets.keys() == expected.keys()
    for label, (split, problems, task) in expected.items():
        assert (sets[label].split, sets[label].problems) == (split, problems)
        assert sets[label].choose == ("random" if problems else "first")
        assert sets[label].task is None if task is None else isinstance(sets[label].task, task)


@pytest.mark.parametrize("method", POLICY_GRADIENT)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_gradient_has_the_papers_budget_and_loss(family: str, method: str, data: str) -> None:
    config, trainer = (one := experiment(family, method, data)), trainer_of(one)
    assert config.iterations == {"MATH": 1000, "GSM8K": 650}[data]
    assert config.problems_per_iteration == 64
    assert config.problem_sampling == "between_iterations"
    assert config.selection == All()
    assert config.restart == "never"
    assert trainer.epochs == 2
    assert trainer.advantage_normalisation == "whiten"

    objective = trainer.objective
    assert isinstance(objective, ClippedPolicyGradient)
    assert (objective.clip_low, objective.clip_high) == (0.2, 0.2)
    assert (objective.kl_coef, objective.kl_placement, objective.kl_estimator) == (1e-4, "loss", "k3")
    assert (objective.kl_clamp, objective.kl_reduction) == ((0.0, 10.0), "sequence_sum")
    assert objective.ratio_threshold == 10
    assert (objective.aggregation, objective.entropy_coef) == ("token", 0.0)
    assert objective.importance_cap is None

    # 512 episodes, 16 steps an iteration: 16,000 and 10,400 in all, of which 480 and 312 warm up.
    assert trainer.minibatch_size is not None
    assert isinstance(config.rollout, SingleTurn)
    steps = (
        config.iterations
        * trainer.epochs
        * config.problems_per_iteration
        * config.rollout.samples
        // trainer.minibatch_size
    )
    warmup = {"MATH": 480, "GSM8K": 312}[data]
    assert steps == {"MATH": 16_000, "GSM8K": 10_400}[data]
    assert trainer.schedule.factor(warmup - 2, steps) < 1.0 == trainer.schedule.factor(warmup, steps)
    assert trainer.schedule.factor(steps, steps) == 0.0

    save, keep = {
        ("rho1b", True): (40, 40),
        ("deepseek", True): (30, 60),
        ("rho1b", False): (10, 40),
        ("deepseek", False): (10, 60),
    }[family, method == "ppo"]
    assert (config.checkpoints.every, config.checkpoints.keep_every) == (save, keep)

    credit = config.credit
    if method == "vineppo":
        assert isinstance(credit, MonteCarlo)
        assert (credit.samples, credit.max_states) == (9, {"MATH": None, "GSM8K": 26}[data])
        assert (credit.temperature, credit.top_p, credit.top_k) == (None, None, None), "the rollout's own"
        assert not credit.siblings_count_into_prompt_value
    elif method == "ppo":
        critic = CriticSettings(learning_rate=None, value_clip=0.2)
        assert credit == Gae(gamma=1.0, lam=1.0, critic=critic)
    else:
        assert credit == {"grpo": Group(std=True), "rloo": Rloo()}[method]


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("family", FAMILIES)
def test_dpo_positive_has_the_papers_pairs_and_loss(family: str, data: str) -> None:
    config, trainer = (one := experiment(family, "dpo_positive", data)), trainer_of(one)
    assert (config.iterations, config.problems_per_iteration) == (1, None)
    assert config.credit == NoCredit()
    assert config.selection == PreferencePairs(max_pairs_per_problem=64)
    assert trainer.epochs == 3
    objective = trainer.objective
    assert isinstance(objective, DpoPositive)
    assert objective.beta == {"MATH": 0.1, "GSM8K": 0.3}[data]
    assert (objective.positive_penalty, objective.label_smoothing) == (50.0, 0.0)
    validation = {"MATH": "math_validation", "GSM8K": "gsm8k_validation"}[data]
    every = {"rho1b": 500, "deepseek": 450}[family]
    assert config.choose_checkpoint == ChooseCheckpoint(set=validation, rule="best", every=every)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("family", FAMILIES)
def test_restem_has_the_papers_filter_restart_and_choice(family: str, data: str) -> None:
    config, trainer = (one := experiment(family, "restem", data)), trainer_of(one)
    assert (config.iterations, config.problems_per_iteration) == (10, None)
    assert config.credit == NoCredit()
    assert config.selection == CorrectOnly(max_per_problem=10)
    assert trainer.objective == MaximumLikelihood(aggregation="sequence")
    assert trainer.epochs == 8
    assert config.restart == "every_iteration"
    validation = {"MATH": "math_validation", "GSM8K": "gsm8k_validation"}[data]
    assert config.choose_checkpoint == ChooseCheckpoint(set=validation, rule="first_maximum", every=500)


@pytest.mark.parametrize("name", SFT)
def test_fine_tuning_has_the_papers_settings(name: str) -> None:
    config, trainer = (one := built(name)), trainer_of(one)
    assert config.experiment_name == name
    assert isinstance(config.rollout, Demonstrations)
    assert config.rollout.samples == 1
    assert (config.iterations, config.problems_per_iteration, trainer.epochs) == (2, None, 1), "two epochs"
    assert config.problem_sampling == "epochs"
    assert trainer.objective == MaximumLikelihood(aggregation="sequence")
    assert trainer.learning_rate == (1e-5 if "rho1b" in name else 5e-5)
    assert (trainer.schedule, trainer.minibatch_size) == (Warmup(ratio=0.03, decay="linear"), 64)
    model = config.model
    assert isinstance(model, PretrainedModel)
    assert model.name_or_path == (
        "microsoft/rho-math-1b-v0.1" if "rho1b" in name else "deepseek-ai/deepseek-math-7b-base"
    )
    sampler = config.evaluation.rollout
    assert isinstance(sampler, SingleTurn)
    assert sampler.stop == ("\n\n\nProblem:",)


def test_the_fragment_for_a_single_gpu_bounds_the_micro_batch_alone() -> None:
    name = "polIter_deepseekSft2_vineppo_MATH.jsonnet"
    whole = load([name], environ={}).data
    cut = load([name, "trainers/devBz16.jsonnet"], environ={}).data
    assert cut["trainer"].pop("sequences_per_micro_batch") == 16
    whole["trainer"].pop("sequences_per_micro_batch")
    assert cut == whole


@pytest.mark.parametrize("fragment", FRAGMENTS_FOR_THE_RIGHT)
def test_a_fragment_goes_on_the_right_of_an_experiment(fragment: str) -> None:
    data = "GSM8K" if "gsm8k" in fragment.lower() else "MATH"
    there = built(f"polIter_rho1bSft2_grpo_{data}")
    assert built(f"polIter_rho1bSft2_grpo_{data}", fragment) != there


def test_every_fragment_that_no_experiment_imports_evaluates() -> None:
    """Those that one imports are evaluated with it."""
    used: set[Path] = set()
    waiting = [CONFIGS.parent / name for name in whole_configurations()]
    while waiting:
        path = waiting.pop().resolve()
        if path not in used:
            used.add(path)
            waiting += [path.parent / name for name in lexer.imports(text_of(path))]
    for path in sorted({path.resolve() for path in configurations(CONFIGS)} - used):
        name = str(path.relative_to(CONFIGS.resolve()))
        # Guru's read what stands on their left: test_guru_experiments.py puts something there.
        if name.removesuffix(".jsonnet") not in FRAGMENTS_FOR_THE_RIGHT and "guru" not in name:
            json.dumps(load([name], environ={"APP_SEQUENTIAL_ANSWERS": "answers.jsonl"}).data)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(
    ("model", "chats"),
    [
        ("qwen2.5-1.5b", False),
        ("qwen2.5-1.5b-instruct", True),
        ("qwen3-1.7b", True),
        ("qwen3-1.7b-base", False),
        ("qwen3-4b", True),
        ("qwen3-8b", True),
        ("qwen3-4b-base", False),
        ("qwen3-4b-thinking-2507", True),
        ("llama-3.2-1b", False),
        ("llama-3.2-1b-instruct", True),
    ],
)
def test_current_models_take_the_experiment_over_with_their_own_prompts(
    model: str, chats: bool, data: str
) -> None:
    config = experiment("rho1b", "vineppo", data, f"models/{model}")
    assert isinstance(config.model, PretrainedModel)
    assert model.split("-")[0].replace(".", "") in config.model.name_or_path.lower().replace(".", "")
    assert (config.model.chat is not None) == chats
    assert config.experiment_name == f"polIter_rho1bSft2_vineppo_{data}_{model}"
    assert isinstance(config.rollout, SingleTurn)
    assert (config.rollout.stop == ()) == chats
    tasks: list[Any] = [config.task, *(one.task for one in config.evaluation.sets if one.task is not None)]
    assert len(tasks) == (3 if data == "MATH" else 1)
    for task in tasks:
        if chats:
            assert ("####" if data == "GSM8K" else "\\boxed{}") in task.prompt
        else:
            assert task.prompt.startswith("[MATH_TASK]")


@pytest.mark.parametrize(("family", "method", "data"), EXPERIMENTS)
def test_the_smoke_overlay_keeps_the_method_and_takes_its_size(family: str, method: str, data: str) -> None:
    whole, small = experiment(family, method, data), experiment(family, method, data, "overlays/smoke")
    assert small.experiment_name == whole.experiment_name + "_smoke"
    assert isinstance(small.model, TinyModel)
    assert (small.iterations, small.problems_per_iteration) == (2, 8)
    assert type(small.credit) is type(whole.credit)
    assert small.selection == whole.selection
    assert (small.restart, small.choose_checkpoint) == (whole.restart, whole.choose_checkpoint)
    assert trainer_of(small).objective == trainer_of(whole).objective
    assert trainer_of(small).schedule == trainer_of(whole).schedule
    assert trainer_of(small).epochs == trainer_of(whole).epochs
    assert type(small.task) is type(whole.task)
    assert small.task.grader == whole.task.grader
    assert small.task.steps == whole.task.steps  # type: ignore[attr-defined]
    assert [one.label for one in small.evaluation.sets] == [one.label for one in whole.evaluation.sets]


def test_the_smoke_problems_are_there_and_within_the_tiny_models_alphabet() -> None:
    for data in DATA:
        for config in (
            experiment("rho1b", "vineppo", data, "overlays/smoke"),
            built(f"sft_rho1b_{data}", "overlays/smoke"),
        ):
            assert isinstance(config.model, TinyModel) and config.model.alphabet is not None
            tasks = [config.task, *(one.task for one in config.evaluation.sets if one.task is not None)]
            for task in tasks:
                for problem in task.problems("test"):
                    assert set(problem.prompt) <= set(config.model.alphabet)
            for problem in config.task.problems("train"):
                answer = config.task.demonstration(problem, 0)
                assert set(answer) <= set(config.model.alphabet)
                assert len(problem.prompt) + len(answer) < config.context_length
                assert config.task.grader.grade(answer, problem).reward == 1.0


@pytest.mark.parametrize("method", METHODS)
def test_a_methods_analyses_are_the_papers(method: str) -> None:
    labels = [one.label for one in experiment("deepseek", method, "GSM8K").analyzers]
    values = ["value_accuracy", "gradient_variance"]
    assert labels == {
        "vineppo": [*values, "advantage_distribution", "action_ranking"],
        "ppo": [*values, "action_ranking"],
        "restem": ["kl_to_reference"],
    }.get(method, [])
