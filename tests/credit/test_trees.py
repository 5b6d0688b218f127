"""Credit for trees.

These tests promise:

* The expected gradient over all trees that could be grown is the exact one, for each credit and branching
  that is declared unbiased. For the others it is as far off as stated.
* The presets of published trees train what plain references of their authors' code train.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from statistics import mean, stdev
from typing import Any

import pytest
import torch

import treetune.parts  # noqa: F401  (registers them)
from tests.credit import expectations
from tests.credit.expectations import bias_and_cosine
from tests.support import tabular_mdp as mdp
from treetune.config.build import build
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.credit.base import Credit
from treetune.credit.rloo import Rloo
from treetune.credit.states.base import StateRule
from treetune.credit.states.by_tokens import EveryNTokens
from treetune.credit.states.one_line import StepBoundaries
from treetune.credit.trees import TreeCredit
from treetune.credit.values.continuations import FreshContinuations
from treetune.credit.values.siblings import Siblings
from treetune.credit.vineppo import MonteCarlo
from treetune.engine.requests import SamplingParams
from treetune.lab.trees.branching import (
    AtStates,
    Branching,
    LastStates,
    LeastSure,
    RandomStates,
    ResetsOfWrongAnswers,
    UpToWidth,
)
from treetune.lab.trees.rollout import TreeRollout
from treetune.rollouts.context import RolloutContext
from treetune.runtime.base import PolicyIteration, Runtime
from treetune.trainer.preparation import normalise_advantages
from treetune.tree import Tree
from treetune.vocabulary import Fork, Grade, Segment, Trajectory

SAMPLES, MAX_TOKENS = 2, 3
"""Few enough to enumerate all trees. The grader also grades answers that were cut at the limit."""

EVERY_TOKEN = EveryNTokens(tokens=1)
TWO_WAYS = AtStates(states=StepBoundaries(), ways=(2,))
THREE_WAYS = AtStates(states=StepBoundaries(), ways=(3,))
WIDE = UpToWidth(states=EVERY_TOKEN, width=3)
TWICE = UpToWidth(states=EVERY_TOKEN, width=5)
UNSURE = LeastSure(positions=1, ways=1)
IN_TAIL = LastStates(states=EVERY_TOKEN)


@cache
def trees(branching: Branching) -> list[tuple[Tree, float]]:
    rollout = TreeRollout(samples=SAMPLES, max_tokens=MAX_TOKENS, branching=branching, unfinished_reward=None)
    return list(expectations.trees(rollout))


def context() -> RolloutContext:
    """Returns a context whose engine returns all continuations, each as often as it is likely."""
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    return mdp.context(engine=mdp.ExactEngine(), sampling=sampling, unfinished_reward=None)


def measure_credit(branching: Branching, credit: Credit) -> tuple[float, float]:
    """Returns the bias of the expected gradient, and its cosine."""
    gradient: mdp.Gradient = {}
    for make_tree, probability in trees(branching):
        for episode in credit.assign(context(), [make_tree])[0]:
            mdp.add(gradient, mdp.gradient_of(episode), probability / SAMPLES)
    return bias_and_cosine(gradient, mdp.exact_gradient(MAX_TOKENS, lambda answer: answer.count(mdp.A) >= 2))


def _name(part: object) -> str | None:
    if isinstance(part, TreeCredit):
        return f"{part.advantage}-{part.weight}"
    return repr(part) if isinstance(part, Branching) else None


@pytest.mark.parametrize("branching", [TWO_WAYS, TWICE, WIDE], ids=repr)
def test_the_value_of_a_branch_minus_that_of_its_siblings_is_unbiased(branching: Branching) -> None:
    assert branching.unbiased
    for prior in (0.0, 2.0):
        assert measure_credit(branching, TreeCredit(prior=prior))[0] < 1e-9


def test_every_registered_branching_is_compared_with_the_exact_gradient() -> None:
    unbiased = {type(branching) for branching in (TWO_WAYS, TWICE, WIDE)}
    declared_unbiased = {part for part in Branching.parts_by_name().values() if part.unbiased}
    assert declared_unbiased == unbiased
    # Resets are tested in `test_resets`, and random states in `test_turn_trees`.
    biased = {LeastSure, LastStates, RandomStates, ResetsOfWrongAnswers}
    assert set(Branching.parts_by_name().values()) == unbiased | biased


def test_without_branches_tree_credit_is_rloo() -> None:
    answers = [mdp.trajectory(mdp.encode(text), sample=i) for i, text in enumerate(["a;a?", "b?", "a;a;a?"])]
    tree_episodes, rloo_episodes = (
        mdp.assign_credit(credit, answers)[0] for credit in (TreeCredit(), Rloo())
    )
    assert [episode.advantages.tolist() for episode in tree_episodes] == [
        episode.advantages.tolist() for episode in rloo_episodes
    ]
    assert all(episode.trained.all() for episode in tree_episodes)


@pytest.mark.parametrize("branching", [TWO_WAYS, THREE_WAYS, WIDE], ids=repr)
@pytest.mark.parametrize("states", [StepBoundaries(), EVERY_TOKEN], ids=repr)
def test_values_from_siblings_in_a_tree_are_unbiased(branching: Branching, states: StateRule) -> None:
    assert measure_credit(branching, MonteCarlo(values=Siblings(), states=states))[0] < 1e-9


@pytest.mark.parametrize("aware", [False, True])
def test_values_from_continuations_in_a_tree_are_unbiased(aware: bool) -> None:
    credit = MonteCarlo(
        samples=mdp.EXACT_SAMPLES,
        values=FreshContinuations(count_siblings=aware),
        siblings_count_into_prompt_value=not aware,
    )
    assert measure_credit(TWO_WAYS, credit)[0] < 1e-9


@pytest.mark.parametrize(
    ("branching", "credit", "bias", "cosine"),
    [
        (TWO_WAYS, TreeCredit(advantage="local"), 0.5, 1.0),
        (THREE_WAYS, TreeCredit(advantage="local"), 0.4843, 0.9949),
        (TWO_WAYS, TreeCredit(weight="once", prior=0), 0.3333, 0.9623),
        (TWO_WAYS, TreeCredit(advantage="local", weight="once"), 0.4714, 0.9623),
        (TWO_WAYS, TreeCredit(advantage="global_and_local", weight="each"), 1.0661, 0.9518),
        (TWO_WAYS, TreeCredit(advantage="subgroups", weight="each"), 0.5359, 0.9059),
        (TWO_WAYS, TreeCredit(advantage="intra_and_inter", weight="each"), 1.0697, 0.8984),
        (IN_TAIL, TreeCredit(), 0.2469, 0.9920),
        (UNSURE, TreeCredit(prior=0), 0.1103, 0.9977),
        (UNSURE, TreeCredit(advantage="global_and_local", weight="each"), 2.1182, 0.9605),
    ],
    ids=_name,
)
def test_the_bias_of_each_other_credit_is_as_stated(
    branching: Branching, credit: TreeCredit, bias: float, cosine: float
) -> None:
    assert measure_credit(branching, credit) == pytest.approx((bias, cosine), abs=1e-4)


REWARDS = {"A/1/x": 1.0, "A/1/y": 0.0, "A/2": 1.0, "B/1": 0.0, "B/2": 0.0, "C": 0.5}
"""The rewards of answers, each named by the nodes that it goes through. B/1 and B/2 are equally good; A/2 is
better than A."""

PROBABILITIES = {
    "A": (0.5, 0.95, 0.2),
    "A/1": (0.91, 0.3),
    "A/1/x": (0.1,),
    "A/1/y": (0.89, 0.9, 0.99),
    "A/2": (0.4, 0.4),
    "B": (0.6,),
    "B/1": (0.2, 0.3),
    "B/2": (0.7,),
    "C": (0.5, 0.5, 0.93, 0.5),
}
"""The probabilities of each node's tokens, when they were sampled."""


def path_of(answer: str) -> list[str]:
    """Returns the nodes that an answer goes through: ``A/1/x`` gives ``A``, ``A/1`` and ``A/1/x``."""
    parts = answer.split("/")
    return ["/".join(parts[: end + 1]) for end in range(len(parts))]


def answers_below(node: str) -> list[str]:
    return [answer for answer in REWARDS if not node or answer == node or answer.startswith(f"{node}/")]


def make_tree() -> Tree:
    problem = mdp.problems(1)[0]
    segment_by_node = {}
    for number, (name, chances) in enumerate(PROBABILITIES.items()):
        # Each node has a token id of its own, so that different nodes never look like one.
        logprobs = [math.log(p) for p in chances]
        segment_by_node[name] = Segment([3 + number] * len(chances), logprobs=logprobs, policy_version=0)
    grown = Tree(problem, (1,))
    for sample, (name, reward) in enumerate(REWARDS.items()):
        nodes = path_of(name)
        shared = {}
        for other in list(REWARDS)[:sample]:
            shared[other] = [node for node in path_of(other) if node in nodes]
        nearest = max(shared, key=lambda other: len(shared[other]), default="")
        fork = None
        if shared.get(nearest):
            tokens = sum(len(PROBABILITIES[node]) for node in shared[nearest])
            fork = Fork(list(REWARDS).index(nearest), tokens)
        segments = tuple(segment_by_node[node] for node in nodes)
        length = sum(len(segment.token_ids) for segment in segments)
        grade = Grade(reward, "ok")
        grown.add_answer(
            Trajectory(problem, sample, (1,), segments, "stop", name, grade, (length,), fork=fork)
        )
    return grown


def train_with_preset(preset: str) -> list[list[tuple[str, float]]]:
    """Returns the node and the advantage of each trained token, for each answer that the preset trains on."""
    config = load(["quickstart/grpo.jsonnet", f"presets/{preset}.jsonnet"], [], environ={})
    root = build(Runtime, config.data, Explanation(config))
    assert isinstance(root, PolicyIteration)
    context = mdp.context()
    all_episodes, _ = root.credit.assign(context, [make_tree()])
    episodes, _ = root.selection.select(context, all_episodes)
    trained_nodes = []
    advantages: list[float] = []
    for episode in episodes:
        nodes = nodes_of_tokens(episode.text)
        trained_nodes.append([node for node, is_trained in zip(nodes, episode.trained) if is_trained])
        advantages += episode.advantages[episode.trained].tolist()
    normalised = iter(
        normalise_advantages(torch.tensor(advantages), root.trainer.advantage_normalisation).tolist()
    )
    return [[(node, next(normalised)) for node in nodes] for nodes in trained_nodes]


def nodes_of_tokens(answer: str) -> list[str]:
    """Returns the node of each token of the answer."""
    nodes: list[str] = []
    for node in path_of(answer):
        nodes += [node] * len(PROBABILITIES[node])
    return nodes


def rows_of_all_tokens(advantages: dict[str, dict[str, float]]) -> list[list[tuple[str, float]]]:
    """Returns the node and the advantage of each token of each answer, by the advantages of its nodes."""
    return [[(node, advantages[answer][node]) for node in nodes_of_tokens(answer)] for answer in REWARDS]


def whiten(rows: list[list[tuple[str, float]]]) -> list[list[tuple[str, float]]]:
    values = [value for _, value in itertools.chain.from_iterable(rows)]
    centre, deviation = mean(values), math.sqrt(stdev(values) ** 2 + 1e-8)
    return [[(node, (value - centre) / deviation) for node, value in row] for row in rows]


def assert_same_rows(rows: Any, expected_rows: Any) -> None:
    nodes, expected_nodes = ([[node for node, _ in row] for row in side] for side in (rows, expected_rows))
    assert nodes == expected_nodes
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert [value for _, value in row] == pytest.approx([value for _, value in expected_row], abs=1e-5)


def test_treerl_compares_an_answer_with_the_others_and_divides_each_value_by_its_root() -> None:
    leave_one_out = {}
    for answer, reward in REWARDS.items():
        leave_one_out[answer] = reward - mean(other for name, other in REWARDS.items() if name != answer)

    def state_value(node: str) -> float:
        return mean(leave_one_out[answer] for answer in answers_below(node)) / math.sqrt(
            len(answers_below(node))
        )

    advantages: dict[str, dict[str, float]] = {}
    for answer in REWARDS:
        advantages_of_answer = advantages[answer] = {}
        parent, last_gain = "", 0.0
        for node in path_of(answer):
            gain = state_value(node) - state_value(parent)
            if parent and abs(gain) < 1e-8:
                gain = last_gain
            advantages_of_answer[node] = gain + state_value(node)
            parent, last_gain = node, gain
    assert_same_rows(train_with_preset("treerl"), rows_of_all_tokens(advantages))


def test_treepo_averages_over_the_groups_of_all_prefixes_and_whitens_over_all_tokens() -> None:
    advantages = {}
    for answer, reward in REWARDS.items():
        groups = [answers_below(node) for node in ("", *path_of(answer))]
        gaps = [reward - mean(REWARDS[name] for name in group) for group in groups if len(group) > 1]
        advantages[answer] = dict.fromkeys(path_of(answer), mean(gaps))
    assert_same_rows(train_with_preset("treepo"), whiten(rows_of_all_tokens(advantages)))


def test_tree_grpo_adds_grpo_within_each_tree_to_grpo_over_all_answers() -> None:
    def standardise(answer: str, group: list[str]) -> float:
        rewards = [REWARDS[other] for other in group]
        if len(rewards) == 1:
            return 0.0
        return (REWARDS[answer] - mean(rewards)) / (stdev(rewards) + 1e-6)

    advantages = {}
    for answer in REWARDS:
        tree_of_answer = answers_below(answer[0])  # A, B or C: the answers that grew from the same answer
        total = standardise(answer, list(REWARDS)) + standardise(answer, tree_of_answer)
        advantages[answer] = dict.fromkeys(path_of(answer), total)
    assert_same_rows(train_with_preset("tree_grpo"), rows_of_all_tokens(advantages))


def test_spo_tree_leaves_out_segments_without_advantage_and_likely_tokens() -> None:
    def value(node: str) -> float:
        if node in REWARDS:
            return REWARDS[node]
        depth = node.count("/") + 2 if node else 1
        following = [
            child for child in PROBABILITIES if child.startswith(node) and child.count("/") + 1 == depth
        ]
        return mean(value(child) for child in following)

    rows, trained_before = [], set()
    for answer in REWARDS:
        row = []
        for node in path_of(answer):
            advantage = value(node) - value(node.rpartition("/")[0])
            if node not in trained_before and advantage != 0:
                row += [(node, advantage) for probability in PROBABILITIES[node] if probability < 0.9]
            trained_before.add(node)
        if row:
            rows.append(row)
    trained_nodes = {node for node, _ in itertools.chain.from_iterable(rows)}
    assert trained_nodes == PROBABILITIES.keys() - {"B/1", "B/2"}
    assert_same_rows(train_with_preset("spo_tree"), whiten(rows))
