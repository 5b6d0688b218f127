"""Guru's experiments have the published settings, and its evaluation suite the published sets."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import treetune.parts  # noqa: F401  (registers them)
from tests.support.shipped import CONFIGS
from treetune.config.build import build
from treetune.config.explain import Explanation
from treetune.config.jsonnet import configurations, load
from treetune.models.pretrained import PretrainedModel
from treetune.rollouts.credit import CriticSettings, Gae, Group
from treetune.rollouts.shaping import OverlongPenalty
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.until_mixed import UntilMixed
from treetune.runtime.base import PolicyIteration, Runtime
from treetune.trainers.base import Warmup
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient
from treetune_domains.graders.judge import JudgeGrader
from treetune_domains.graders.math import MathGrader
from treetune_domains.mixture import Mixture, Proportional
from treetune_domains.routed_rows import RoutedRows

ROWS = {"math": 54400, "codegen": 18040, "logic": 6301, "simulation": 3700, "table": 5800, "stem": 3600}
"""Training rows of each domain in Guru, as the names of its files round them."""

DAPO = [f"guru/dapo_7b_{domain}" for domain in ROWS]


@cache
def built(*names: str) -> PolicyIteration:
    config = load([f"{name}.jsonnet" for name in names], environ={})
    root = build(Runtime, config.data, Explanation(config))
    assert isinstance(root, PolicyIteration)
    return root


def parts(experiment: PolicyIteration) -> tuple[SingleTurn, ClippedPolicyGradient, str]:
    assert isinstance(experiment.rollout, SingleTurn)
    assert isinstance(experiment.trainer.objective, ClippedPolicyGradient)
    assert isinstance(experiment.model, PretrainedModel)
    return experiment.rollout, experiment.trainer.objective, experiment.model.name_or_path


@pytest.mark.parametrize(
    ("name", "model", "sequence_parallel"),
    [("guru/7b_grpo", "Qwen/Qwen2.5-7B", 1), ("guru/32b_grpo", "Qwen/Qwen2.5-32B", 2)],
)
def test_grpo_has_the_published_settings(name: str, model: str, sequence_parallel: int) -> None:
    experiment = built(name)
    rollout, objective, weights = parts(experiment)
    assert (experiment.experiment_name, weights) == (name, model)
    assert (experiment.problems_per_iteration, rollout.samples) == (128, 64)
    assert (rollout.max_prompt_tokens, rollout.max_tokens) == (1024, 3072)
    assert experiment.trainer.minibatch_size == 128 * 64, "a minibatch of 128 problems"
    assert experiment.credit == Group(std=True)
    assert (objective.kl_coef, objective.kl_placement, objective.kl_estimator) == (1e-3, "loss", "k3")
    assert (objective.clip_low, objective.clip_high, objective.entropy_coef) == (0.2, 0.2, 0.0)
    assert experiment.trainer.learning_rate == 1e-6
    assert experiment.trainer.sequence_parallel_size == sequence_parallel
    assert (experiment.checkpoints.every, experiment.evaluation.every) == (25, 5)
    assert not experiment.shaping


def test_ppo_has_the_published_settings() -> None:
    experiment = built("guru/32b_ppo")
    rollout, objective, weights = parts(experiment)
    assert weights == "Qwen/Qwen2.5-32B"
    assert (experiment.problems_per_iteration, rollout.samples, rollout.max_tokens) == (512, 1, 8192)
    assert experiment.trainer.minibatch_size == 256
    assert isinstance(experiment.credit, Gae)
    assert experiment.credit.critic == CriticSettings(learning_rate=1e-5)
    assert (objective.kl_coef, objective.kl_placement) == (1e-3, "reward")
    assert experiment.trainer.sequence_parallel_size > 1


@pytest.mark.parametrize("name", DAPO)
def test_dapo_has_the_published_settings_without_their_slip(name: str) -> None:
    experiment = built(name)
    rollout, objective, weights = parts(experiment)
    trainer = experiment.trainer
    assert weights == "Qwen/Qwen2.5-7B"
    assert (experiment.problems_per_iteration, rollout.samples) == (512, 16)
    assert trainer.minibatch_size == 32 * 16, "a minibatch of 32 problems"
    assert rollout.max_tokens == 20480
    assert experiment.shaping == (OverlongPenalty(cache=4096, scale=1.0),)
    assert (objective.aggregation, objective.dual_clip, objective.kl_coef) == ("token", 10.0, 0.0)
    assert (trainer.weight_decay, trainer.schedule) == (0.1, Warmup(steps=10))
    assert (trainer.offload_optimizer, trainer.offload_parameters) == (True, True)
    assert (objective.clip_low, objective.clip_high) == (0.2, 0.28)

    quirk = built(name, "compat/guru_clip_not_higher").trainer
    assert isinstance(quirk.objective, ClippedPolicyGradient)
    assert (quirk.objective.clip_low, quirk.objective.clip_high) == (0.2, 0.2)
    assert replace(quirk, objective=replace(quirk.objective, clip_high=0.28)) == trainer


def test_groups_without_spread_can_be_replaced() -> None:
    assert isinstance(built("guru/dapo_7b_math", "rollouts/until_mixed").rollout, UntilMixed)


@pytest.mark.parametrize("name", ["guru/7b_grpo", "guru/32b_grpo", "guru/32b_ppo"])
def test_all_domains_train_together_every_row_as_often_as_any(name: str) -> None:
    task = built(name).task
    assert isinstance(task, Mixture)
    assert set(task.domains) == set(ROWS)
    assert task.weighting == Proportional()


@pytest.mark.parametrize("domain", ROWS)
def test_a_domain_alone_is_trained_as_in_the_mixture_for_ten_passes(domain: str) -> None:
    alone, together = built(f"guru/dapo_7b_{domain}"), built("guru/7b_grpo").task
    assert isinstance(alone.task, RoutedRows) and isinstance(together, Mixture)
    assert alone.task == together.domains[domain].task
    passes = alone.iterations * 512 / ROWS[domain]
    assert 10 <= passes < 10 + 512 / ROWS[domain]
    assert all(route.startswith(domain) for route in alone.task.routes)


def test_the_suite_is_the_published_one() -> None:
    sets = {one.label: one for one in built("guru/7b_grpo").evaluation.sets}
    assert list(sets) == [
        "aime24", "math500", "humaneval", "mbpp", "livecodebench", "gpqa_diamond", "supergpqa", "arcagi1",
        "zebra_puzzle", "codeio", "cruxeval_i", "cruxeval_o", "finqa", "hitab", "multihier",
        "livebench_reasoning", "livebench_language", "livebench_data_analysis", "ifeval",
    ]  # fmt: skip
    assert {(one.temperature, one.top_p) for one in sets.values()} == {(1.0, 0.7)}
    longest = {name: one.max_tokens for name, one in sets.items()}
    assert longest.pop("arcagi1") == 16 * 1024
    assert set(longest.values()) == {28 * 1024}
    assert sets["aime24"].samples == 32
    assert {sets[name].samples for name in ("livecodebench", "gpqa_diamond", "hitab", "zebra_puzzle")} == {4}
    assert (sets["finqa"].samples, sets["finqa"].problems, sets["finqa"].choose) == (1, 1000, "random")


def test_every_file_that_is_read_has_a_configuration_that_makes_it() -> None:
    experiment = built("guru/7b_grpo")
    assert isinstance(experiment.task, Mixture)
    tasks = [domain.task for domain in experiment.task.domains.values()]
    tasks += [one.task for one in experiment.evaluation.sets if one.task is not None]
    for task in tasks:
        assert isinstance(task, RoutedRows)
        for file in map(Path, (*task.train, *task.test)):
            made_by = load([f"data/{file.parent.name}.jsonnet"], environ={}).data
            source = made_by["data_source"]
            assert source == file.parent.name
            assert any(source.startswith(route) for route in task.routes)


def test_a_set_of_each_domain_is_measured_while_training() -> None:
    measured = [one.task for one in built("guru/7b_grpo").evaluation.sets if one.while_training]
    domains = {route.partition("__")[0] for task in measured for route in task.routes}
    assert domains == set(ROWS)


@pytest.mark.parametrize("name", ["guru/7b_grpo", "guru/dapo_7b_stem"])
def test_science_can_be_judged_by_a_model_where_the_rule_rejects(name: str) -> None:
    files = [f"{name}.jsonnet", "guru/stem_judged.jsonnet"]
    config = load(files, environ={"APP_JUDGE_URL": "http://127.0.0.1:8000/v1"})
    root = build(Runtime, config.data, Explanation(config))
    assert isinstance(root, PolicyIteration)
    task = root.task.domains["stem"].task if isinstance(root.task, Mixture) else root.task
    assert isinstance(task, RoutedRows)
    judge = task.routes["stem__web"]
    assert isinstance(judge, JudgeGrader)
    assert (judge.rule, judge.when, judge.deadline) == (MathGrader(), "rule_rejects", 60.0)
    assert judge.reward("They are alike.\nFinal Decision: Yes") == 1.0
    assert judge.reward("Final Decision: **No**") == 0.0


def test_there_are_nine_of_them() -> None:
    there = {f"guru/{path.stem}" for path in configurations(CONFIGS / "guru")} - {"guru/stem_judged"}
    assert there == {*DAPO, "guru/7b_grpo", "guru/32b_grpo", "guru/32b_ppo"}
