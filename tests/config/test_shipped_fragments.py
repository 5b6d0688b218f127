"""Promises of the fragments under configs/:

* each goes on the right of an experiment and changes it, and fragments that meet go in any order;
* a model's fragment gives its prompts to an experiment, and a penalty or a filter its bounds, also where
  another fragment wraps the rollout;
* no stack that the documents name has a file that changes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.shipped import CONFIGS, experiment_of, loaded, whole_configurations
from treetune.config import lexer
from treetune.config.explain import describe_overridden_files
from treetune.config.jsonnet import load
from treetune.config.layers import find_configuration_files, read_as_jsonnet
from treetune.models.pretrained import PretrainedModel
from treetune.rollouts.selection import MixedGroups
from treetune.rollouts.shaping import LengthPenalty, OverlongPenalty
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.until_mixed import UntilMixed
from treetune.tasks.rows import Gsm8k
from treetune.vocabulary import Problem

GRPO = {data: f"polIter_rho1bSft2_grpo_{data}" for data in ("MATH", "GSM8K")}
FRAGMENTS = ["presets/dppo", "rollouts/until_mixed"] + sorted(
    f"{folder}/{path.stem}"
    for folder in ("models", "compat", "overlays", "shaping", "selections", "hardware")
    for path in find_configuration_files(CONFIGS / folder)
    # Fragments for the embedded tasks read no other characters. Those of SPO, Guru, signposts and the tables
    # at equal cost are for their own experiments, and those that read a variable of the environment are for
    # somebody who has set it.
    if not path.stem.startswith(("tiny", "spo_", "guru_", "equal_cost_", "signposts_"))
    and "extVar" not in read_as_jsonnet(path)
)


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_a_fragment_goes_on_the_right_of_an_experiment_and_changes_it(fragment: str) -> None:
    base = GRPO["GSM8K" if "gsm8k" in fragment.lower() else "MATH"]
    assert experiment_of(f"{base},{fragment}") != experiment_of(base)


def test_every_fragment_that_no_experiment_imports_can_be_evaluated() -> None:
    """Imported fragments are evaluated with the experiments that import them."""
    imported: set[Path] = set()
    waiting = [CONFIGS.parent / name for name in whole_configurations()]
    while waiting:
        path = waiting.pop().resolve()
        if path not in imported:
            imported.add(path)
            waiting += [path.parent / name for name in lexer.imported_names(read_as_jsonnet(path))]
    for path in sorted({path.resolve() for path in find_configuration_files(CONFIGS)} - imported):
        name = str(path.relative_to(CONFIGS.resolve()))
        # Guru's read what stands on their left: test_published_settings.py puts something there.
        if name.removesuffix(".jsonnet") not in FRAGMENTS and "guru" not in name:
            json.dumps(load([name], environ={"APP_SEQUENTIAL_ANSWERS": "answers.jsonl"}).data)


def test_no_documented_stack_of_presets_and_hardware_has_a_file_that_changes_nothing() -> None:
    for preset in find_configuration_files(CONFIGS / "presets"):
        stack = f"quickstart/vineppo,presets/{preset.stem},hardware/lora,shaping/overlong_penalty"
        assert list(describe_overridden_files(loaded(stack))) == [], stack


def test_the_fragment_for_a_single_gpu_bounds_the_micro_batch_alone() -> None:
    published = loaded("polIter_deepseekSft2_vineppo_MATH").data
    on_a_single_gpu = loaded("polIter_deepseekSft2_vineppo_MATH,trainers/devBz16").data
    assert on_a_single_gpu == published | {
        "trainer": published["trainer"] | {"sequences_per_micro_batch": 16}
    }


@pytest.mark.parametrize("data", ["MATH", "GSM8K"])
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
        ("smollm2-135m-instruct", True),
    ],
)
def test_current_models_take_an_experiment_over_with_their_own_prompts(
    model: str, chats: bool, data: str
) -> None:
    config = experiment_of(f"polIter_rho1bSft2_vineppo_{data},models/{model}")
    assert isinstance(config.model, PretrainedModel) and isinstance(config.rollout, SingleTurn)
    assert model.split("-")[0].replace(".", "") in config.model.name_or_path.lower().replace(".", "")
    assert (config.model.chat is not None) == chats == (config.rollout.stop == ())
    assert config.experiment_name == f"polIter_rho1bSft2_vineppo_{data}_{model}"
    tasks_of_sets = [each_set.task for each_set in config.evaluation.sets if each_set.task is not None]
    tasks: list[Any] = [config.task, *tasks_of_sets]
    assert len(tasks) == (3 if data == "MATH" else 1)  # MATH is also measured on two other test sets
    asks_for = {"GSM8K": "####", "MATH": "\\boxed{}"}[data]
    for task in tasks:
        assert asks_for in task.prompt if chats else task.prompt.startswith("[MATH_TASK]")


def test_a_thinking_model_is_graded_on_what_stands_behind_its_thought() -> None:
    model = f"{GRPO['GSM8K']},models/qwen3-4b-thinking-2507"
    thinking_prompt = "tasks/gsm8k_thinking"
    config = experiment_of(f"{GRPO['GSM8K']},{thinking_prompt},models/qwen3-4b-thinking-2507")
    assert isinstance(config.model, PretrainedModel) and config.model.chat is not None
    assert (config.rollout.sampling.max_tokens, config.context_length) == (8192, 8576)  # type: ignore[union-attr]
    assert {each_set.max_tokens for each_set in config.evaluation.sets} == {8192}
    assert isinstance(config.task, Gsm8k)
    assert config.task.prompt.startswith("{problem}") and "####" in config.task.prompt
    problem = Problem(id="train/0", prompt="?", gold="so\n#### 18")
    for grader in (config.task.grader, experiment_of(model).task.grader):
        assert grader.grade("#### 18\n</think>\n#### 19", problem).reward == 0.0
        assert grader.grade("#### 19\n</think>\n#### 18", problem).reward == 1.0
        assert grader.grade("#### 18", problem).outcome == "no_answer"
    lenient = experiment_of(
        f"{GRPO['GSM8K']},{thinking_prompt},models/qwen3-4b-thinking-2507,compat/grader_gsm8k_lenient"
    )
    assert lenient.task.grader.grade("#### 118", problem).reward == 1.0


def test_until_mixed_goes_around_whatever_the_rollout_is() -> None:
    plain = experiment_of(f"{GRPO['MATH']},models/qwen3-4b")
    for fragments in ("models/qwen3-4b,rollouts/until_mixed", "rollouts/until_mixed,models/qwen3-4b"):
        config = experiment_of(f"{GRPO['MATH']},{fragments}")
        assert config.rollout == UntilMixed(rollout=plain.rollout, groups=64)
        assert config.selection == MixedGroups(at_most=64)


def test_the_overlong_penalty_takes_a_fifth_of_the_budget_also_within_until_mixed() -> None:
    for base in (GRPO["GSM8K"], f"{GRPO['GSM8K']},rollouts/until_mixed"):
        config = experiment_of(f"{base},shaping/overlong_penalty,shaping/length_penalty")
        assert config.shaping == (OverlongPenalty(cache=1024 // 5, scale=0.5), LengthPenalty())


def test_the_smoke_overlay_makes_the_wrapped_rollout_small() -> None:
    config = experiment_of(f"{GRPO['GSM8K']},rollouts/until_mixed,shaping/overlong_penalty,overlays/smoke")
    assert isinstance(config.rollout, UntilMixed)
    assert (config.rollout.groups, config.rollout.samples, config.problems_per_iteration) == (8, 4, 8)
    assert config.shaping == (OverlongPenalty(cache=24 // 5, scale=0.5),)


def test_icepop_replaces_the_cap_on_importance_weights() -> None:
    config = experiment_of(f"{GRPO['MATH']},objectives/importance_cap_2,objectives/icepop")
    objective: Any = config.trainer.objective
    assert (objective.importance_cap, objective.importance_band) == (None, (0.5, 5.0))
