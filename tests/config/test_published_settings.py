"""Promises of the experiments that are named after a publication:

* each has the settings that `published.ini` quotes from its paper or code; every section has an experiment,
  and every experiment a section;
* variants that should differ in one thing (the threads, the reward, the domain) differ in nothing else;
* prompts, demonstrations and solutions fit the model's alphabet and context;
* fragments for other prompts, rows, scores or judges change what their names say and nothing else.
"""

from __future__ import annotations

import configparser
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.shipped import CONFIGS, experiment_of
from treetune.config.build import build
from treetune.config.jsonnet import load
from treetune.config.layers import find_configuration_files
from treetune.config.registrable import Registrable
from treetune.domains.graders.judge import JudgeGrader
from treetune.domains.graders.math import MathGrader
from treetune.domains.mixture import Mixture
from treetune.domains.routed_rows import RoutedRows
from treetune.models.pretrained import PretrainedModel
from treetune.models.sources import TinyModel
from treetune.rollouts.until_mixed import UntilMixed
from treetune.runtime.base import PolicyIteration
from treetune.tasks.countdown import Countdown, CountdownRows
from treetune.threads.format import TAGS, has_threads

PUBLISHED = configparser.RawConfigParser(delimiters=("=",))
PUBLISHED.optionxform = str  # type: ignore[assignment,method-assign]
PUBLISHED.read(Path(__file__).with_name("published.ini"))

PAPER = [
    f"polIter_{family}Sft2_{method}_{data}"
    for family in ("rho1b", "deepseek")
    for method in ("vineppo", "ppo", "grpo", "rloo", "dpo_positive", "restem")
    for data in ("MATH", "GSM8K")
]
SFT = [f"sft_{model}_{data}" for model in ("rho1b", "deepseek7b") for data in ("MATH", "GSM8K")]
SPO = [
    f"spo/qwen3-4b-thinking_GSM8K_{preset}"
    for preset in (
        "spo_3_1", "spo_3_2", "spo_3_3", "spo_rank_jsd", "spo_entropy_0.1", "dr_grpo",
    )
]  # fmt: skip
FORMS = ("parallel", "sequential")
THREADS = [f"threadweaver/{name}" for form in FORMS for name in (form, f"sft_{form}")]
OTHER_REWARDS = ["threadweaver/parallel_readme", "threadweaver/parallel_sequential_reference"]
COUNTDOWN = [f"countdown/qwen2.5-3b{name}" for name in ("_grpo", "-instruct_grpo", "-instruct_rl2")]
ROWS_OF_DOMAIN = {
    "math": 54400,
    "codegen": 18040,
    "logic": 6301,
    "simulation": 3700,
    "table": 5800,
    "stem": 3600,
}
"""Training rows of each domain in Guru, as the names of its files round them."""
UNPUBLISHED = {"guru/3b_ppo_math"}
"""Experiments of published systems whose settings are not published."""
GURU = [
    "guru/7b_grpo",
    "guru/32b_grpo",
    "guru/32b_ppo",
    *(f"guru/dapo_7b_{domain}" for domain in ROWS_OF_DOMAIN),
]


def values_at(value: Any, key: list[str]) -> Iterator[Any]:
    """Yield the value at a key of a built experiment, or the value of each item where the key has a `*`."""
    if not key or value is None:
        yield value
        return
    name, *names_below = key
    if name == "*":
        for item in value:
            yield from values_at(item, names_below)
    elif name == "type":
        yield next(registered for registered, part in value.parts_by_name().items() if part is type(value))
    elif name.isdecimal():
        yield from values_at(value[int(name)], names_below)
    else:
        yield from values_at(getattr(value, name), names_below)


def agrees_with_published(value: Any, published: Any) -> bool:
    """Say whether a value of a built experiment equals the published one, which is written as in JSON."""
    if isinstance(published, dict) and not isinstance(value, Mapping):
        family = next(base for base in type(value).__mro__ if Registrable in base.__bases__)
        return bool(value == build(family, published))
    if isinstance(published, list):
        return len(value) == len(published) and all(map(agrees_with_published, value, published))
    # `True == 1` in Python, and a configuration that says one doesn't say the other.
    return bool(value == published) and isinstance(value, bool) == isinstance(published, bool)


@pytest.mark.parametrize("name", [*PAPER, *SFT, *SPO, *THREADS, *OTHER_REWARDS, *COUNTDOWN, *GURU])
def test_an_experiment_has_the_published_settings(name: str) -> None:
    experiment = experiment_of(name)
    assert experiment.experiment_name == name
    sections = [section for section in PUBLISHED.sections() if re.fullmatch(section, name)]
    assert sections
    settings = [setting for section in sections for setting in PUBLISHED[section].items()]
    for key, text in settings:
        values = list(values_at(experiment, key.split(".")))
        published = json.loads(text)
        if "*" not in key:
            value = values[0]
            assert agrees_with_published(value, published), f"{key} is {value}, and should be {published}"
        else:
            # A single published value holds for every item.
            of_items = published if isinstance(published, list) else [published] * len(values)
            assert agrees_with_published(values, of_items), f"{key} are {values}, and should be {of_items}"


def test_no_section_and_no_experiment_is_left_out() -> None:
    names = [*PAPER, *SFT, *SPO, *THREADS, *OTHER_REWARDS, *COUNTDOWN, *GURU]
    for section in PUBLISHED.sections():
        assert any(re.fullmatch(section, name) for name in names), section
    assert {path.stem for path in CONFIGS.glob("*.jsonnet")} == {*PAPER, *SFT}
    for folder in ("spo", "guru"):
        shipped = {f"{folder}/{path.stem}" for path in find_configuration_files(CONFIGS / folder)}
        assert shipped - UNPUBLISHED == {name for name in names if name.startswith(folder)}


# The paper's


@pytest.mark.parametrize("name", PAPER)
def test_the_smoke_overlay_keeps_the_method_and_takes_its_size(name: str) -> None:
    full, small = experiment_of(name), experiment_of(f"{name},overlays/smoke")
    assert small.experiment_name == f"{name}_smoke"
    assert isinstance(small.model, TinyModel)
    assert (small.iterations, small.problems_per_iteration) == (2, 8)

    def method(experiment: PolicyIteration) -> list[Any]:
        """List the settings that make the method, without those of its size."""
        trainer, task = experiment.trainer, experiment.task
        return [
            type(experiment.credit), experiment.selection, experiment.restart, experiment.choose_checkpoint,
            trainer.objective, trainer.schedule, trainer.epochs,
            type(task), task.grader, task.steps,  # type: ignore[attr-defined]
            [evaluation_set.label for evaluation_set in experiment.evaluation.sets],
        ]  # fmt: skip

    assert method(small) == method(full)


@pytest.mark.parametrize("data", ["MATH", "GSM8K"])
@pytest.mark.parametrize("method", ["polIter_rho1bSft2_vineppo", "sft_rho1b"])
def test_the_smoke_problems_are_there_and_within_the_tiny_models_alphabet(method: str, data: str) -> None:
    config = experiment_of(f"{method}_{data},overlays/smoke")
    assert isinstance(config.model, TinyModel) and config.model.alphabet is not None
    alphabet = set(config.model.alphabet)
    tasks_of_sets = [each_set.task for each_set in config.evaluation.sets if each_set.task is not None]
    for task in (config.task, *tasks_of_sets):
        assert all(set(problem.prompt) <= alphabet for problem in task.problems("test"))
    for problem in config.task.problems("train"):
        answer = config.task.demonstration(problem, 0)
        assert set(answer) <= alphabet
        assert len(problem.prompt) + len(answer) < config.context_length
        assert config.task.grader.grade(answer, problem).reward == 1.0


def test_fragments_on_the_right_restore_where_the_code_of_spo_departs_from_its_paper() -> None:
    fragments = "compat/spo_moving_target,compat/spo_mask_above,compat/grader_gsm8k_lenient"
    experiment = experiment_of(f"{SPO[2]},{fragments}")
    objective: Any = experiment.trainer.objective
    assert (objective.target, objective.mask, objective.detach_target) == ("fixed", "above", False)
    assert type(experiment.task.grader).__name__ != "Numeric"


# Threads


def test_the_two_forms_differ_in_nothing_but_the_threads() -> None:
    parallel, sequential = (experiment_of(f"threadweaver/{form}") for form in FORMS)
    assert isinstance(parallel.model, PretrainedModel) and isinstance(sequential.model, PretrainedModel)
    assert sequential == replace(
        parallel,
        experiment_name=sequential.experiment_name,
        model=replace(parallel.model, name_or_path=sequential.model.name_or_path),
        task=replace(parallel.task, form="sequential"),  # type: ignore[type-var]
        rollout=replace(parallel.rollout, parallel=False),  # type: ignore[type-var]
    )


@pytest.mark.parametrize("name", OTHER_REWARDS)
def test_another_reward_is_all_that_differs(name: str) -> None:
    published = experiment_of("threadweaver/parallel")
    name_and_reward: dict[str, Any] = {
        "experiment_name": published.experiment_name,
        "shaping": published.shaping,
    }
    assert replace(experiment_of(name), **name_and_reward) == published


@pytest.mark.parametrize("form", FORMS)
def test_fine_tuning_reads_each_solution_once_and_its_solutions_have_the_threads_of_the_rollout(
    form: str,
) -> None:
    supervised, experiment = experiment_of(f"threadweaver/sft_{form}"), experiment_of(f"threadweaver/{form}")
    trainer, size = supervised.trainer, supervised.problems_per_iteration
    assert supervised.task == experiment.task and trainer.minibatch_size is not None and size is not None
    assert trainer.epochs * supervised.iterations * size == experiment.task.size("train")
    assert size % trainer.minibatch_size == 0, "no step is smaller"
    for model in (supervised.model, experiment.model):
        assert isinstance(model, PretrainedModel) and model.added_tokens == TAGS
    task = replace(experiment.task, train_size=40, validation_size=1, test_size=1)  # type: ignore[type-var]
    for problem in task.problems("train"):
        solution = task.demonstration(problem, 0)
        assert task.grader.grade(solution, problem).correct
        assert has_threads(solution) == (form == "parallel")
        # A character is at most one token, and a tag is exactly one.
        characters = len(problem.prompt) + len(solution)
        saved_by_tags = sum(solution.count(tag) * (len(tag) - 1) for tag in TAGS)
        most_tokens = characters - saved_by_tags
        assert most_tokens < experiment.context_length < supervised.context_length


# Countdown

SCORES = "tasks/countdown_scores_cohlem"


@pytest.mark.parametrize("name", COUNTDOWN)
def test_public_rows_and_a_chat_template_go_on_the_right(name: str) -> None:
    generated = experiment_of(name)
    public = experiment_of(f"{name},tasks/countdown_public")
    in_chat = experiment_of(f"{name},tasks/countdown_asked_in_chat")
    assert isinstance(generated.task, Countdown) and isinstance(in_chat.task, Countdown)
    prompt = generated.task.prompt
    if "rl2" not in name:
        assert prompt.startswith("<|im_start|>system") and prompt.endswith("<think>")
    assert isinstance(public.task, CountdownRows)
    assert (public.task.prompt, public.task.grader) == (prompt, generated.task.grader)
    test_tasks = [each_set.task for each_set in public.evaluation.sets if each_set.split == "test"]
    assert test_tasks == [generated.task], "the public rows have no test split"
    assert isinstance(in_chat.model, PretrainedModel) and in_chat.model.chat is not None
    assert "<|im_start|>" not in in_chat.task.prompt
    assert in_chat.experiment_name == name + "_in_chat"


@pytest.mark.parametrize(
    "fragment",
    ["tasks/countdown_asked_in_chat", "tasks/countdown_scores_tinyzero_rl2", "tasks/countdown_open_think"],
)
def test_public_rows_and_their_test_problems_are_asked_and_graded_alike_in_any_order(fragment: str) -> None:
    base, public = "countdown/qwen2.5-3b-instruct_grpo", "tasks/countdown_public"
    generated = experiment_of(f"{base},{fragment}").task
    assert isinstance(generated, Countdown)
    for both_fragments in (f"{fragment},{public}", f"{public},{fragment}"):
        config = experiment_of(f"{base},{both_fragments}")
        assert isinstance(config.task, CountdownRows)
        assert (config.task.prompt, config.task.grader) == (generated.prompt, generated.grader)
        test_tasks = [each_set.task for each_set in config.evaluation.sets if each_set.split == "test"]
        assert test_tasks == [generated]


def test_scores_of_the_single_file_grpo_reach_a_wrapped_rollout_and_leave_demonstrations_unchanged() -> None:
    expected: Any = experiment_of(COUNTDOWN[0]).task.grader
    wrapped = experiment_of(f"countdown/tiny_grpo,rollouts/until_mixed,{SCORES}")
    assert isinstance(wrapped.rollout, UntilMixed)
    for rollout in (wrapped.rollout.rollout, wrapped.evaluation.rollout):
        assert rollout is not None and rollout.unfinished_reward is None  # type: ignore[attr-defined]
    supervised = experiment_of(f"countdown/tiny_sft,{SCORES}")
    assert supervised.rollout == experiment_of("countdown/tiny_sft").rollout
    for experiment in (wrapped, supervised):
        assert experiment.task.grader.scores == expected.scores  # type: ignore[attr-defined]


LONGEST_ANSWER = 96
"""Tokens of an answer in the experiments of the tiny Countdown model; a character is a token."""


@pytest.mark.parametrize("name", ["tiny_sft", "tiny_grpo"])
def test_the_tiny_models_prompts_and_demonstrations_fit_its_context(name: str) -> None:
    config = experiment_of(f"countdown/{name}")
    task = config.task
    assert isinstance(task, Countdown)
    for problem in task.problems("validation"):
        demonstration = task.demonstration(problem, 1)
        assert set(problem.prompt + demonstration) <= set(task.alphabet())
        assert len(problem.prompt) + LONGEST_ANSWER <= config.context_length
        assert len(demonstration) < LONGEST_ANSWER


# Guru


@pytest.mark.parametrize("domain", ROWS_OF_DOMAIN)
def test_a_domain_alone_is_trained_as_in_the_mixture_for_ten_passes(domain: str) -> None:
    alone, mixture = experiment_of(f"guru/dapo_7b_{domain}"), experiment_of("guru/7b_grpo").task
    assert isinstance(alone.task, RoutedRows) and isinstance(mixture, Mixture)
    assert set(mixture.domains) == set(ROWS_OF_DOMAIN)
    assert alone.task == mixture.domains[domain].task
    problems_per_iteration, rows = 512, ROWS_OF_DOMAIN[domain]
    passes = alone.iterations * problems_per_iteration / rows
    assert 10 <= passes < 10 + problems_per_iteration / rows
    assert all(route.startswith(domain) for route in alone.task.routes)
    # Guru's code clips below and above alike, and DAPO's paper clips higher above: that alone differs.
    clipped_alike = experiment_of(f"guru/dapo_7b_{domain},compat/guru_clip_not_higher").trainer
    objective: Any = clipped_alike.objective
    assert (objective.clip_low, objective.clip_high) == (0.2, 0.2)
    assert replace(clipped_alike, objective=replace(objective, clip_high=0.28)) == alone.trainer


def test_groups_without_spread_can_be_replaced() -> None:
    assert isinstance(experiment_of("guru/dapo_7b_math,rollouts/until_mixed").rollout, UntilMixed)


def test_the_suite_of_guru_is_the_published_one_with_a_set_of_each_domain_while_training() -> None:
    sets = {each_set.label: each_set for each_set in experiment_of("guru/7b_grpo").evaluation.sets}
    assert list(sets) == [
        "aime24", "math500", "humaneval", "mbpp", "livecodebench", "gpqa_diamond", "supergpqa", "arcagi1",
        "zebra_puzzle", "codeio", "cruxeval_i", "cruxeval_o", "finqa", "hitab", "multihier",
        "livebench_reasoning", "livebench_language", "livebench_data_analysis", "ifeval",
    ]  # fmt: skip
    assert {(each_set.temperature, each_set.top_p) for each_set in sets.values()} == {(1.0, 0.7)}
    for name, each_set in sets.items():
        assert each_set.max_tokens == (16 if name == "arcagi1" else 28) * 1024, name
    assert sets["aime24"].samples == 32
    assert {sets[name].samples for name in ("livecodebench", "gpqa_diamond", "hitab", "zebra_puzzle")} == {4}
    assert (sets["finqa"].samples, sets["finqa"].problems, sets["finqa"].choose) == (1, 1000, "random")
    measured_tasks: list[Any] = [each_set.task for each_set in sets.values() if each_set.while_training]
    routes = [route for task in measured_tasks for route in task.routes]
    assert {route.partition("__")[0] for route in routes} == set(ROWS_OF_DOMAIN)


def test_every_file_that_is_read_has_a_configuration_that_makes_it() -> None:
    experiment = experiment_of("guru/7b_grpo")
    assert isinstance(experiment.task, Mixture)
    tasks = [domain.task for domain in experiment.task.domains.values()]
    tasks += [each_set.task for each_set in experiment.evaluation.sets if each_set.task is not None]
    for task in tasks:
        assert isinstance(task, RoutedRows)
        for file in map(Path, (*task.train, *task.test)):
            source = load([f"data/{file.parent.name}.jsonnet"], environ={}).data["data_source"]
            assert source == file.parent.name
            assert any(source.startswith(route) for route in task.routes)


@pytest.mark.parametrize("name", ["guru/7b_grpo", "guru/dapo_7b_stem"])
def test_science_can_be_judged_by_a_model_where_the_rule_rejects(name: str) -> None:
    root = experiment_of(f"{name},tasks/guru_stem_judged", APP_JUDGE_URL="http://127.0.0.1:8000/v1")
    task = root.task.domains["stem"].task if isinstance(root.task, Mixture) else root.task
    assert isinstance(task, RoutedRows)
    judge = task.routes["stem__web"]
    assert isinstance(judge, JudgeGrader)
    assert (judge.rule, judge.when, judge.deadline) == (MathGrader(), "rule_rejects", 60.0)
    assert judge.reward("They are alike.\nFinal Decision: Yes") == 1.0
    assert judge.reward("Final Decision: **No**") == 0.0
