"""Parts that would train what answers share twice, or not at all, are refused beside a tree."""

from __future__ import annotations

import re

import pytest

import treetune.parts  # noqa: F401  (registers them)
from treetune.config.build import build
from treetune.config.errors import ConfigError
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.rollouts.single_turn import SingleTurn
from treetune.runtime.base import PolicyIteration, Runtime

TREE = "quickstart/tree.jsonnet"
UNPAIRED = "trainer+: {objective: {type: 'dpo'}}"


def built(*changes: str, right: tuple[str, ...] = ()) -> PolicyIteration:
    config = load([TREE, *right], list(changes), environ={})
    root = build(Runtime, config.data, Explanation(config))
    assert isinstance(root, PolicyIteration)
    return root


@pytest.mark.parametrize(
    ("changes", "right", "message"),
    [
        ([], ("credit/rloo.jsonnet",), "share tokens.*choose the credit 'tree', or 'monte_carlo'"),
        (["{credit: {type: 'gae'}}"], (), "share tokens, which are trained once"),
        (["{selection: {type: 'correct_only'}}"], (), "leaves out some of a problem's answers"),
        ([], ("objectives/sequence_mean.jsonnet",), "only what it doesn't share"),
        (["{trainer+: {objective: {type: 'gspo'}}}"], (), "looks at whole answers"),
        (["{rollout+: {samples: 1}}"], (), "branches are compared"),
        (["{rollout+: {most_tokens: 192}}"], (), "4 answers of max_tokens = 48 may take 192"),
        (["{rollout+: {branching+: {ways: []}}}"], (), "length at least 1"),
        (["{rollout+: {branching+: {states: {type: 'turns'}}}}"], (), "values the turns of answers"),
        (["{rollout+: {temperature: 0}}"], (), "temperature"),
    ],
)
def test_what_cannot_go_with_trees_says_what_can(
    changes: list[str], right: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        built(*changes, right=right)
    assert re.search(message, " ".join(str(caught.value).split()))


@pytest.mark.parametrize("preset", ["treerl", "spo_tree", "treepo"])
def test_published_trees_go_on_the_right_of_an_experiment(preset: str) -> None:
    config = load(["quickstart/grpo.jsonnet", f"presets/{preset}.jsonnet"], [], environ={})
    root = build(Runtime, config.data, Explanation(config))
    assert isinstance(root, PolicyIteration)
    assert type(root.rollout).__name__ == "TreeRollout"


def test_trees_go_with_monte_carlo_values_and_with_sampling_until_groups_are_mixed() -> None:
    built("{credit: {type: 'monte_carlo', values: {type: 'siblings'}}}")
    built("{credit: {type: 'monte_carlo', samples: 3}}")
    built(right=("rollouts/until_mixed.jsonnet",))


def test_an_evaluation_samples_answers_that_have_nothing_to_do_with_each_other() -> None:
    root = built()
    for chosen in root.evaluation.sets:
        assert isinstance(chosen.rollout(root), SingleTurn)
