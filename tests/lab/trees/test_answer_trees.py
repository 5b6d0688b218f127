"""Trees of answers: answers that grow out of each other.

These tests promise:

* A tree holds each sampled token once, and trains it once with its log-prob.
* A tree does not depend on the order in which answers arrive, and comes back from disk as it was.
* Each branching branches at the states that its name says.
* A state of a tree stands for exactly one prefix, and a training row sees what its segment saw.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import tabular_mdp as mdp
from tests.support.columns import plain
from tests.support.fake_engine import FakeEngine
from treetune.credit.states.by_tokens import EveryNTokens, LowProbability
from treetune.credit.states.one_line import StepBoundaries
from treetune.credit.trees import TreeCredit
from treetune.engine.journal import JournaledEngine
from treetune.exceptions import EngineError
from treetune.lab.trees.branching import AtStates, Branching, LastStates, LeastSure, UpToWidth
from treetune.lab.trees.rollout import TreeRollout
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.storage import trajectories_from_bytes, trajectories_to_bytes
from treetune.tree import ROOT, State, Tree, answers_of, training_rows, trees_of, with_answers
from treetune.vocabulary import Episode, Fork, Grade, Metrics, Problem, Segment, Trajectory, concatenate, sees


def make_engine(order_seed: int | None = None, fail_after: int | None = None) -> FakeEngine:
    """Returns an engine of the enumerable language. It has few prefixes, so that answers meet by chance."""

    def order(count: int) -> Sequence[int]:
        return range(count) if order_seed is None else random.Random(order_seed).sample(range(count), count)

    return FakeEngine(mdp.chances, mdp.EOS, fail_after=fail_after, order=order)


STATE_RULES = [
    StepBoundaries(),
    EveryNTokens(tokens=1),
    EveryNTokens(tokens=3),
    LowProbability(below=0.6, every=2),
]
rules = st.sampled_from(STATE_RULES)
branchings: st.SearchStrategy[Branching] = st.one_of(
    st.builds(AtStates, states=rules, ways=st.lists(st.integers(2, 3), min_size=1, max_size=3).map(tuple)),
    st.builds(UpToWidth, states=rules, width=st.integers(2, 12), most_ways=st.integers(2, 4)),
    st.builds(LastStates, states=rules, count=st.integers(1, 2), ways=st.integers(2, 3)),
    st.builds(LeastSure, positions=st.integers(1, 3), ways=st.integers(1, 2), rounds=st.integers(1, 3)),
)
rollouts = st.builds(
    TreeRollout,
    samples=st.integers(2, 4),
    branching=branchings,
    max_tokens=st.integers(3, mdp.LONGEST),
    most_tokens=st.none() | st.integers(25, 60),
)
AT_STATES = TreeRollout(
    samples=2, branching=AtStates(states=StepBoundaries(), ways=(2, 3)), max_tokens=mdp.LONGEST
)

SEED = 1
"""With this seed the first answer branches."""


def grow_trees(rollout: TreeRollout, seed: int = 1, count: int = 3, **changed: object) -> list[Tree]:
    context = mdp.context(**{"engine": make_engine(), "seed": seed} | changed)
    return rollout.run(context, mdp.problems(count))[0]


def credit_rows(tree: Tree, **settings: str) -> list[Episode]:
    return TreeCredit(**settings).assign(mdp.context(), [tree])[0]


@settings(max_examples=40, deadline=None)
@given(rollouts, st.integers(0, 1 << 20))
def test_every_sampled_token_is_trained_once_with_its_log_prob(rollout: TreeRollout, seed: int) -> None:
    sampling = make_engine()
    trees = grow_trees(rollout, seed, engine=sampling)
    trained = [episode.trained for tree in trees for episode in credit_rows(tree)]
    assert sum(int(mask.sum()) for mask in trained) == sampling.tokens
    assert all(mask.any() for mask in trained)
    for tree in trees:
        prompt = plain(tree.prompt_ids)
        for episode in credit_rows(tree):
            ids = plain(episode.response_ids)
            for position, logprob in enumerate(episode.behaviour_logprobs.tolist()):
                chance = mdp.chances((*prompt, *ids[:position]), 0)[ids[position]]
                assert logprob == pytest.approx(math.log(chance), abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(rollouts, st.integers(0, 1 << 20))
def test_nodes_hold_the_sampled_tokens_and_answers_are_their_paths(rollout: TreeRollout, seed: int) -> None:
    sampling = make_engine()
    for tree in grow_trees(rollout, seed, engine=sampling, count=1):
        assert sum(len(node.segment.token_ids) for node in tree.nodes) == sampling.tokens
        assert sum(node.parent == ROOT for node in tree.nodes) == rollout.samples
        for leaf, path in zip(tree.leaves, tree.paths, strict=True):
            path_tokens = [token for number in path for token in plain(tree.nodes[number].segment.token_ids)]
            assert tuple(path_tokens) == plain(leaf.response_ids)
            assert len(leaf.response_ids) <= rollout.max_tokens
        if rollout.most_tokens is not None:
            assert sampling.tokens <= rollout.most_tokens
        assert len(tree.leaves) <= rollout.most_answers(1)


@settings(max_examples=15, deadline=None)
@given(rollouts, st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_a_tree_is_the_same_in_any_order_of_its_answers(rollout: TreeRollout, seed: int, order: int) -> None:
    assert answers_of(grow_trees(rollout, seed)) == answers_of(
        grow_trees(rollout, seed, engine=make_engine(order))
    )


@settings(max_examples=15, deadline=None)
@given(rollouts, st.integers(0, 1 << 20))
def test_trees_come_back_from_disk_with_their_nodes(rollout: TreeRollout, seed: int) -> None:
    trees = grow_trees(rollout, seed)
    read_trees = trees_of(trajectories_from_bytes(trajectories_to_bytes(answers_of(trees))))
    assert answers_of(read_trees) == answers_of(trees)
    for tree, read_tree in zip(trees, read_trees, strict=True):
        assert (tree.nodes, tree.paths) == (read_tree.nodes, read_tree.paths)


def test_without_branches_the_answers_are_those_of_single_turn() -> None:
    branching = UpToWidth(states=StepBoundaries(), width=2)
    unbranched, single_turn = (
        mdp.roll_out(rollout, 3, engine=make_engine())[0]
        for rollout in (
            TreeRollout(samples=2, branching=branching, max_tokens=mdp.LONGEST),
            SingleTurn(samples=2, max_tokens=mdp.LONGEST),
        )
    )
    assert unbranched == single_turn


def test_a_killed_rollout_goes_on_to_the_same_tree_and_samples_nothing_twice(tmp_path: Path) -> None:
    undisturbed = make_engine()
    expected = answers_of(grow_trees(AT_STATES, engine=undisturbed))
    for fail_after in range(1, len(undisturbed.asked)):
        journal = tmp_path / f"{fail_after}.jsonl"
        first, second = make_engine(3, fail_after), make_engine(4)
        with pytest.raises(EngineError):
            grow_trees(AT_STATES, engine=JournaledEngine(first, journal))
        assert answers_of(grow_trees(AT_STATES, engine=JournaledEngine(second, journal))) == expected
        keys = Counter((plain(request.prompt_ids), request.seed) for request in [*first.asked, *second.asked])
        assert set(keys.values()) == {1}
        assert len(keys) == len(undisturbed.asked)


def test_two_ranks_grow_the_trees_of_one_and_report_the_same_metrics() -> None:
    def grow_on_rank(context: RolloutContext) -> tuple[list[list[Trajectory]], Metrics]:
        trees, metrics = AT_STATES.run(context, mdp.problems(5))
        return [tree.leaves for tree in trees], metrics

    mdp.assert_ranks_agree(2, grow_on_rank, engine=make_engine)


def test_metrics_count_the_shared_tokens() -> None:
    sampling = make_engine()
    answers, metrics = mdp.roll_out(AT_STATES, 4, engine=sampling)
    assert metrics["tree/answers"] == len(answers) / 4
    assert metrics["tree/tokens"] == sampling.tokens / 4
    assert metrics["tree/tokens_of_chains"] == sum(len(answer.response_ids) for answer in answers) / 4
    assert metrics["tree/shared"] == 1 - metrics["tree/tokens"] / metrics["tree/tokens_of_chains"] > 0
    assert 0 < metrics["tree/depth"] <= 2


def test_tokens_shared_with_an_ungraded_answer_are_trained_with_the_next_answer() -> None:
    (tree,) = grow_trees(AT_STATES, count=1, seed=SEED)
    (first,) = [answer for answer in tree.leaves if answer.sample == 0]
    heirs = [answer for answer in tree.leaves if answer.fork is not None and answer.fork.sample == 0]
    assert heirs, "this seed makes the first answer branch"
    remaining = tree.select_leaves(
        [number for number, answer in enumerate(tree.leaves) if answer is not first]
    )
    trained = sum(int(episode.trained.sum()) for episode in credit_rows(remaining))
    nodes_on_paths = {number for path in remaining.paths for number in path}
    assert trained == sum(len(tree.nodes[number].segment.token_ids) for number in nodes_on_paths)
    assert credit_rows(remaining)[remaining.leaves.index(heirs[0])].trained.all()


def test_the_weight_decides_whether_shared_tokens_are_trained_once_or_in_each_answer() -> None:
    (tree,) = grow_trees(AT_STATES, count=1, seed=SEED)
    tree = replace(tree, leaves=[replace(answer, bonus=float(answer.sample**2)) for answer in tree.leaves])
    node_uses = Counter(number for path in tree.paths for number in path)
    for row, row_with_shared in zip(
        credit_rows(tree, weight="once"), credit_rows(tree, weight="each"), strict=True
    ):
        assert row.advantages.tolist() == row_with_shared.advantages.tolist()
        assert row_with_shared.trained.all()
    trained_tokens = sum(int(row.trained.sum()) for row in credit_rows(tree, weight="each"))
    assert trained_tokens == sum(
        node_uses[n] * len(node.segment.token_ids) for n, node in enumerate(tree.nodes)
    )


def test_every_answer_that_reaches_a_state_branches_in_the_configured_number_of_ways() -> None:
    for tree in grow_trees(AT_STATES, count=8):
        for path in tree.paths:
            for depth, number in enumerate(path):
                children = sum(node.parent == number for node in tree.nodes)
                is_last = number == path[-1]
                assert children == (0 if is_last else (2, 3)[depth])
        for leaf, path in zip(tree.leaves, tree.paths, strict=True):
            assert len(path) == min(len(leaf.step_ends), 3)


def test_least_sure_branches_before_the_least_likely_tokens() -> None:
    branching = LeastSure(positions=2, ways=3)
    for tree in grow_trees(TreeRollout(samples=3, branching=branching, max_tokens=mdp.LONGEST), count=4):
        for answer in tree.leaves[:3]:
            leaves_of_answer = [
                leaf for leaf in tree.leaves if leaf.fork and leaf.fork.sample == answer.sample
            ]
            forks = [leaf.fork.tokens for leaf in leaves_of_answer]
            logprobs = np.concatenate([segment.logprobs for segment in answer.segments]).tolist()
            positions = sorted(range(1, len(logprobs)), key=lambda position: (logprobs[position], position))
            assert sorted(forks) == sorted([*positions[:2]] * 3)


def test_the_last_states_of_each_answer_from_the_prompt_branch() -> None:
    branching = LastStates(states=StepBoundaries(), count=2, ways=3)
    step_counts = set()
    for tree in grow_trees(TreeRollout(samples=3, branching=branching, max_tokens=mdp.LONGEST), count=8):
        assert len(tree.leaves) <= branching.most_answers(3)
        for answer in tree.leaves[:3]:
            leaves_of_answer = [
                leaf for leaf in tree.leaves if leaf.fork and leaf.fork.sample == answer.sample
            ]
            forks = [leaf.fork.tokens for leaf in leaves_of_answer]
            last_states = answer.step_ends[:-1][-2:]
            assert sorted(forks) == sorted([*last_states, *last_states])
            step_counts.add(len(answer.step_ends))
    assert {1, 3} <= step_counts


def test_a_tree_widens_until_it_has_the_configured_number_of_answers() -> None:
    branching = UpToWidth(states=EveryNTokens(tokens=1), width=7)
    rollout = TreeRollout(samples=2, branching=branching, max_tokens=mdp.LONGEST)
    for tree in grow_trees(rollout, count=8):
        longest = max(len(leaf.response_ids) for leaf in tree.leaves)
        assert len(tree.leaves) == 7 or longest == 2, "all answers ended at their first state"


PROBLEM = Problem("train/0", "?", "")

# Few tokens and branches, so that answers have much in common.
segments = st.builds(
    Segment,
    token_ids=st.lists(st.integers(0, 1), max_size=3),
    origin=st.sampled_from(["sampled", "injected"]),
    branch=st.sampled_from([(), ((0, 0),), ((0, 1),)]),
)
Paths = list[tuple[Segment, ...]]
answers = st.lists(st.lists(segments, max_size=4).map(tuple), min_size=1, max_size=6)


def make_answer(sample: int, path: tuple[Segment, ...], fork: Fork | None = None) -> Trajectory:
    return Trajectory(PROBLEM, sample, (9,), path, "stop", "", Grade(0.0, "ok"), (), fork=fork)


def prefix(tree: Tree, state: State) -> tuple[Segment, ...]:
    """Returns the segments up to a state."""
    if state.node == ROOT:
        return ()
    *before, last = (tree.nodes[number].segment for number in tree.path(state.node))
    return (*before, replace(last, token_ids=last.token_ids[: state.offset]))


def make_tree(paths: Paths) -> Tree:
    (tree,) = trees_of(make_answer(sample, path) for sample, path in enumerate(paths))
    return tree


def distinct_tokens(path: tuple[Segment, ...]) -> list[tuple[object, ...]]:
    """Returns each token with everything by which it can differ from others."""
    tokens: list[tuple[object, ...]] = []
    for segment in path:
        tokens += [(token, segment.origin, segment.branch) for token in plain(segment.token_ids)]
    return tokens


@given(answers)
def test_equal_prefixes_are_one_state_and_other_prefixes_are_others(paths: Paths) -> None:
    tree = make_tree(paths)
    prefixes = []
    for leaf, path in enumerate(paths):
        tokens = distinct_tokens(path)
        for length in range(len(tokens) + 1):
            prefixes.append((tree.state(leaf, length), tokens[:length]))
    for state, expected in prefixes:
        assert distinct_tokens(prefix(tree, state)) == expected
        assert (state == (PROBLEM.id, ROOT, 0)) == (not expected)
        for other_state, other_prefix in prefixes:
            assert (state == other_state) == (expected == other_prefix)


@given(answers)
def test_rows_train_each_sampled_segment_once_after_the_segments_that_it_saw(paths: Paths) -> None:
    tree = make_tree(paths)
    for path in paths:
        expected = []
        for position, segment in enumerate(path):
            if segment.origin == "sampled" and len(segment.token_ids):
                seen_ids = [
                    other.token_ids for other in path[:position] if sees(segment.branch, other.branch)
                ]
                context = concatenate([tree.prompt_ids, *seen_ids])
                expected.append((plain(concatenate([context, segment.token_ids])), plain(segment.token_ids)))
        parts = [(s.branch, s.token_ids, np.full(len(s.token_ids), s.origin == "sampled")) for s in path]
        rows = list(training_rows(tree.prompt_ids, parts))
        assert [plain(ids) for ids, _ in rows] == [ids for ids, _ in expected]
        assert [plain(ids[predicting + 1]) for ids, predicting in rows] == [ids for _, ids in expected]


def test_answers_that_share_a_prefix_can_be_added_one_by_one() -> None:
    tree = Tree(PROBLEM, concatenate([]))
    trunk = Segment([1, 2])
    for sample, last in enumerate(([3], [4, 5], [3, 6])):
        end = Segment(last)
        tree.add_answer(make_answer(sample, (trunk, end), Fork(0, 2) if sample else None))
    assert len(tree.nodes) == 4
    assert [plain(leaf.response_ids) for leaf in tree.leaves] == [(1, 2, 3), (1, 2, 4, 5), (1, 2, 3, 6)]
    assert tree.state(0, 2) == tree.state(1, 2) == tree.state(2, 2) == (PROBLEM.id, 0, 2)
    assert tree.state(0, 3) == tree.state(2, 3) != tree.state(1, 3)
    tree.add_answer(make_answer(3, (trunk, Segment([7])), Fork(0, 2)))
    assert tree.state(3, 2) == (PROBLEM.id, 0, 2)
    assert len(tree.nodes) == 5


@given(answers)
def test_answers_in_another_order_leave_the_states_of_a_tree_as_they_are(paths: Paths) -> None:
    tree = make_tree(paths)
    (reversed_tree,) = with_answers([tree], answers_of([tree])[::-1])
    assert [leaf.sample for leaf in reversed_tree.leaves] == list(range(len(paths)))[::-1]
    lengths = [len(distinct_tokens(path)) for path in paths]
    assert all(reversed_tree.state(i, n) == tree.state(i, n) for i, n in enumerate(lengths))
