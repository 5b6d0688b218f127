"""The expected gradient of credit for trees, over all trees that could be grown, against the exact one; the
presets of published trees against plain references of what their authors' code computes."""

from __future__ import annotations

import math
from functools import cache
from statistics import mean, stdev
from typing import Any

import pytest
import torch

import treetune.parts  # noqa: F401  (registers them)
from tests.credit import expectations
from tests.credit.expectations import bias_and_cosine
from tests.rollouts import tabular_mdp as mdp
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
from treetune.trainer.preparation import normalise
from treetune.tree import Tree
from treetune.vocabulary import Fork, Grade, Segment, Trajectory

SAMPLES, MAX_TOKENS = 2, 3
"""Few enough to enumerate all trees; cut answers are graded."""

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
    """Its continuations are all that could be sampled."""
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    return mdp.context(engine=mdp.ExactEngine(), sampling=sampling, unfinished_reward=None)


def of_credit(branching: Branching, credit: Credit) -> tuple[float, float]:
    """How far off the expected gradient is, and its cosine."""
    found: mdp.Gradient = {}
    for tree, probability in trees(branching):
        for episode in credit.assign(context(), [tree])[0]:
            mdp.add(found, mdp.gradient_of(episode), probability / SAMPLES)
    return bias_and_cosine(found, mdp.exact_gradient(MAX_TOKENS, lambda answer: answer.count(mdp.A) >= 2))


def _name(part: object) -> str | None:
    if isinstance(part, TreeCredit):
        return f"{part.advantage}-{part.weight}"
    return repr(part) if isinstance(part, Branching) else None


@pytest.mark.parametrize("branching", [TWO_WAYS, TWICE, WIDE], ids=repr)
def test_what_a_branch_is_worth_less_its_siblings_is_unbiased(branching: Branching) -> None:
    assert branching.unbiased
    for prior in (0.0, 2.0):
        assert of_credit(branching, TreeCredit(prior=prior))[0] < 1e-9


def test_every_branching_that_is_registered_is_held_against_the_exact_gradient() -> None:
    known = {type(one) for one in (TWO_WAYS, TWICE, WIDE)}
    says_so = {part for part in Branching.registered().values() if part.unbiased}
    assert says_so == known
    # Resets are in `test_resets_of_wrong_answers`, and states that are drawn in `test_trees_of_turns`.
    biased = {LeastSure, LastStates, RandomStates, ResetsOfWrongAnswers}
    assert set(Branching.registered().values()) == known | biased


def test_without_branches_it_is_the_mean_of_the_others() -> None:
    answers = [mdp.trajectory(mdp.encode(text), sample=i) for i, text in enumerate(["a;a?", "b?", "a;a;a?"])]
    ours, theirs = (mdp.credited(credit, answers)[0] for credit in (TreeCredit(), Rloo()))
    assert [one.advantages.tolist() for one in ours] == [one.advantages.tolist() for one in theirs]
    assert all(one.trained.all() for one in ours)


@pytest.mark.parametrize("branching", [TWO_WAYS, THREE_WAYS, WIDE], ids=repr)
@pytest.mark.parametrize("states", [StepBoundaries(), EVERY_TOKEN], ids=repr)
def test_siblings_value_what_follows_in_a_tree_without_bias(branching: Branching, states: StateRule) -> None:
    assert of_credit(branching, MonteCarlo(values=Siblings(), states=states))[0] < 1e-9


@pytest.mark.parametrize("aware", [False, True])
def test_continuations_value_what_follows_in_a_tree_without_bias(aware: bool) -> None:
    credit = MonteCarlo(
        samples=mdp.EXACT_SAMPLES,
        values=FreshContinuations(count_siblings=aware),
        siblings_count_into_prompt_value=not aware,
    )
    assert of_credit(TWO_WAYS, credit)[0] < 1e-9


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
def test_what_is_biased_is_as_far_off_as_stated(
    branching: Branching, credit: TreeCredit, bias: float, cosine: float
) -> None:
    assert of_credit(branching, credit) == pytest.approx((bias, cosine), abs=1e-4)


REWARDS = {"A/1/x": 1.0, "A/1/y": 0.0, "A/2": 1.0, "B/1": 0.0, "B/2": 0.0, "C": 0.5}
"""By the nodes that an answer goes through. B's branches are as good as each other, A/2 is better than A."""

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
"""Of each node's tokens, when they were sampled."""


def way(answer: str) -> list[str]:
    names = answer.split("/")
    return ["/".join(names[: end + 1]) for end in range(len(names))]


def below(node: str) -> list[str]:
    return [answer for answer in REWARDS if not node or answer == node or answer.startswith(f"{node}/")]


def tree() -> Tree:
    problem = mdp.problems(1)[0]
    parts = {
        name: Segment([3 + number] * len(chances), logprobs=[math.log(p) for p in chances], policy_version=0)
        for number, (name, chances) in enumerate(PROBABILITIES.items())
    }
    grown = Tree(problem, (1,))
    for sample, (name, reward) in enumerate(REWARDS.items()):
        nodes = way(name)
        shared = {other: [one for one in way(other) if one in nodes] for other in list(REWARDS)[:sample]}
        nearest = max(shared, key=lambda other: len(shared[other]), default="")
        fork = None
        if shared.get(nearest):
            tokens = sum(len(PROBABILITIES[node]) for node in shared[nearest])
            fork = Fork(list(REWARDS).index(nearest), tokens)
        segments = tuple(parts[node] for node in nodes)
        length = sum(len(segment.token_ids) for segment in segments)
        grade = Grade(reward, "ok")
        grown.take(Trajectory(problem, sample, (1,), segments, "stop", name, grade, (length,), fork=fork))
    return grown


def trained(preset: str) -> list[list[tuple[str, float]]]:
    """Of each answer that is trained on, each trained token's node and advantage, as the preset trains it."""
    config = load(["quickstart/grpo.jsonnet", f"presets/{preset}.jsonnet"], [], environ={})
    root = build(Runtime, config.data, Explanation(config))
    assert isinstance(root, PolicyIteration)
    context = mdp.context()
    episodes, _ = root.selection.select(context, root.credit.assign(context, [tree()])[0])
    found, advantages = [], []
    for episode in episodes:
        nodes = [node for node in way(episode.text) for _ in PROBABILITIES[node]]
        found.append([node for node, is_trained in zip(nodes, episode.trained, strict=True) if is_trained])
        advantages += episode.advantages[episode.trained].tolist()
    left = iter(normalise(torch.tensor(advantages), root.trainer.advantage_normalisation).tolist())
    return [[(node, next(left)) for node in nodes] for nodes in found]


def whole(of_nodes: dict[str, dict[str, float]]) -> list[list[tuple[str, float]]]:
    """Of each answer all tokens, with the advantages of its nodes."""
    return [
        [(node, of_nodes[answer][node]) for node in way(answer) for _ in PROBABILITIES[node]]
        for answer in REWARDS
    ]


def whitened(rows: list[list[tuple[str, float]]]) -> list[list[tuple[str, float]]]:
    values = [value for row in rows for _, value in row]
    centre, deviation = mean(values), math.sqrt(stdev(values) ** 2 + 1e-8)
    return [[(node, (value - centre) / deviation) for node, value in row] for row in rows]


def assert_same(ours: Any, theirs: Any) -> None:
    assert [[node for node, _ in row] for row in ours] == [[node for node, _ in row] for row in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert [value for _, value in mine] == pytest.approx([value for _, value in other], abs=1e-5)


def test_treerl_holds_an_answer_against_the_others_and_divides_each_value_by_its_own_root() -> None:
    alone = {
        answer: reward - mean(other for name, other in REWARDS.items() if name != answer)
        for answer, reward in REWARDS.items()
    }

    def state(node: str) -> float:
        return mean(alone[answer] for answer in below(node)) / math.sqrt(len(below(node)))

    advantages: dict[str, dict[str, float]] = {}
    for answer in REWARDS:
        own = advantages[answer] = {}
        before, last = "", 0.0
        for node in way(answer):
            gained = state(node) - state(before)
            if before and abs(gained) < 1e-8:
                gained = last
            own[node] = gained + state(node)
            before, last = node, gained
    assert_same(trained("treerl"), whole(advantages))


def test_treepo_averages_over_the_groups_of_all_beginnings_and_whitens_over_all_tokens() -> None:
    advantages = {}
    for answer, reward in REWARDS.items():
        groups = [below(node) for node in ("", *way(answer))]
        gaps = [reward - mean(REWARDS[one] for one in group) for group in groups if len(group) > 1]
        advantages[answer] = dict.fromkeys(way(answer), mean(gaps))
    assert_same(trained("treepo"), whitened(whole(advantages)))


def test_tree_grpo_adds_grpo_within_each_tree_to_grpo_over_all_answers() -> None:
    def standardised(answer: str, group: list[str]) -> float:
        rewards = [REWARDS[other] for other in group]
        if len(rewards) == 1:
            return 0.0
        return (REWARDS[answer] - mean(rewards)) / (stdev(rewards) + 1e-6)

    advantages = {}
    for answer in REWARDS:
        tree_of_answer = below(answer[0])  # A, B or C: the answers that grew from the same answer
        total = standardised(answer, list(REWARDS)) + standardised(answer, tree_of_answer)
        advantages[answer] = dict.fromkeys(way(answer), total)
    assert_same(trained("tree_grpo"), whole(advantages))


def test_spo_tree_leaves_out_segments_without_advantage_and_likely_tokens() -> None:
    def value(node: str) -> float:
        if node in REWARDS:
            return REWARDS[node]
        depth = node.count("/") + 2 if node else 1
        following = [one for one in PROBABILITIES if one.startswith(node) and one.count("/") + 1 == depth]
        return mean(value(one) for one in following)

    rows, seen = [], set()
    for answer in REWARDS:
        row = []
        for node in way(answer):
            advantage = value(node) - value(node.rpartition("/")[0])
            if node not in seen and advantage != 0:
                row += [(node, advantage) for probability in PROBABILITIES[node] if probability < 0.9]
            seen.add(node)
        if row:
            rows.append(row)
    assert {node for row in rows for node, _ in row} == PROBABILITIES.keys() - {"B/1", "B/2"}
    assert_same(trained("spo_tree"), whitened(rows))
