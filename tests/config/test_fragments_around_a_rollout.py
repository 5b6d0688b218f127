"""Fragments that go around a rollout, or ask models that think, on the right of an experiment."""

from __future__ import annotations

from dataclasses import replace

import treetune.parts  # noqa: F401  (registers them)
from treetune.config.build import build
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.findings import notes
from treetune.models.pretrained import PretrainedModel
from treetune.rollouts.selection import MixedGroups
from treetune.rollouts.shaping import LengthPenalty, OverlongPenalty
from treetune.rollouts.until_mixed import UntilMixed
from treetune.runtime.base import PolicyIteration, Runtime
from treetune.tasks.rows import Gsm8k
from treetune.vocabulary import Problem


def grpo(data: str, *right: str) -> PolicyIteration:
    names = [f"polIter_rho1bSft2_grpo_{data}", *right]
    config = load([f"{name}.jsonnet" for name in names], environ={})
    root = build(Runtime, config.data, Explanation(config))
    assert isinstance(root, PolicyIteration)
    return root


def test_a_thinking_model_is_graded_on_what_stands_behind_its_thought() -> None:
    right = ["tasks/gsm8k_thinking", "models/qwen3-4b-thinking-2507"]
    config = grpo("GSM8K", *right)
    assert isinstance(config.model, PretrainedModel) and config.model.chat is not None
    assert (config.rollout.sampling.max_tokens, config.context_length) == (8192, 8576)  # type: ignore[union-attr]
    assert {one.max_tokens for one in config.evaluation.sets} == {8192}
    assert isinstance(config.task, Gsm8k)
    assert config.task.prompt.startswith("{problem}") and "####" in config.task.prompt
    problem = Problem(id="train/0", prompt="?", gold="so\n#### 18")
    for grader in (config.task.grader, grpo("GSM8K", right[1]).task.grader):
        assert grader.grade("#### 18\n</think>\n#### 19", problem).reward == 0.0
        assert grader.grade("#### 19\n</think>\n#### 18", problem).reward == 1.0
        assert grader.grade("#### 18", problem).outcome == "no_answer"
    lenient = grpo("GSM8K", *right, "compat/grader_gsm8k_lenient")
    assert lenient.task.grader.grade("#### 118", problem).reward == 1.0


def test_until_mixed_goes_around_whatever_the_rollout_is() -> None:
    plain = grpo("MATH", "models/qwen3-4b")
    for right in (
        ["models/qwen3-4b", "rollouts/until_mixed"],
        ["rollouts/until_mixed", "models/qwen3-4b"],
    ):
        config = grpo("MATH", *right)
        assert config.rollout == UntilMixed(rollout=plain.rollout, groups=64)
        assert config.selection == MixedGroups(at_most=64)


def test_the_overlong_penalty_takes_a_fifth_of_the_budget_also_within_until_mixed() -> None:
    for right in ([], ["rollouts/until_mixed"]):
        config = grpo("GSM8K", *right, "shaping/overlong_penalty", "shaping/length_penalty")
        assert config.shaping == (OverlongPenalty(cache=1024 // 5, scale=0.5), LengthPenalty())


def test_the_smoke_overlay_makes_the_wrapped_rollout_small() -> None:
    config = grpo("GSM8K", "rollouts/until_mixed", "shaping/overlong_penalty", "overlays/smoke")
    assert isinstance(config.rollout, UntilMixed)
    assert (config.rollout.groups, config.rollout.samples, config.problems_per_iteration) == (8, 4, 8)
    assert config.shaping == (OverlongPenalty(cache=24 // 5, scale=0.5),)


def test_a_correction_by_the_engines_probabilities_is_noted_where_sampling_cuts_these() -> None:
    (note,) = notes(grpo("MATH", "objectives/importance_cap_2"))
    assert "top_p 0.9" in note and "Sample with top_p 1" in note
    assert notes(grpo("MATH")) == []
    whole = grpo("MATH", "objectives/importance_cap_2")
    assert notes(replace(whole, rollout=replace(whole.rollout, top_p=1.0))) == []
    (note,) = notes(replace(whole, rollout=replace(whole.rollout, top_p=1.0, top_k=20)))
    assert "top_k 20" in note
