"""Answers that grow out of each other: a tree says what they went through and saw, and each sampled token is
in it once and trained once."""

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

from tests.columns import plain
from tests.fake_engine import FakeEngine
from tests.rollouts import tabular_mdp as mdp
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
from treetune.vocabulary import Episode, Fork, Grade, Metrics, Problem, Segment, Trajectory, joined, sees


def engine(order_seed: int | None = None, fail_after: int | None = None) -> FakeEngine:
    """Of the enumerable language, which has few beginnings: answers meet by chance."""

    def order(count: int) -> Sequence[int]:
        return range(count) if order_seed is None else random.Random(order_seed).sample(range(count), count)

    return FakeEngine(mdp.chances, mdp.EOS, fail_after=fail_after, order=order)


RULES = [StepBoundaries(), EveryNTokens(tokens=1), EveryNTokens(tokens=3), LowProbability(below=0.6, every=2)]
rules = st.sampled_from(RULES)
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
"""With it the first answer branches."""


def grown(rollout: TreeRollout, seed: int = 1, count: int = 3, **given: object) -> list[Tree]:
    context = mdp.context(**{"engine": engine(), "seed": seed} | given)
    return rollout.run(context, mdp.problems(count))[0]


def rows(tree: Tree, **settings: str) -> list[Episode]:
    return TreeCredit(**settings).assign(mdp.context(), [tree])[0]


@settings(max_examples=40, deadline=None)
@given(rollouts, st.integers(0, 1 << 20))
def test_every_sampled_token_is_trained_once_with_its_log_prob(rollout: TreeRollout, seed: int) -> None:
    sampling = engine()
    trees = grown(rollout, seed, engine=sampling)
    trained = [episode.trained for tree in trees for episode in rows(tree)]
    assert sum(int(mask.sum()) for mask in trained) == sampling.tokens
    assert all(mask.any() for mask in trained)
    for tree in trees:
        prompt = plain(tree.prompt_ids)
        for episode in rows(tree):
            ids = plain(episode.response_ids)
            for at, logprob in enumerate(episode.behaviour_logprobs.tolist()):
                chance = mdp.chances((*prompt, *ids[:at]), 0)[ids[at]]
                assert logprob == pytest.approx(math.log(chance), abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(rollouts, st.integers(0, 1 << 20))
def test_nodes_are_what_was_sampled_and_answers_are_their_ways(rollout: TreeRollout, seed: int) -> None:
    sampling = engine()
    for tree in grown(rollout, seed, engine=sampling, count=1):
        assert sum(len(node.segment.token_ids) for node in tree.nodes) == sampling.tokens
        assert sum(node.parent == ROOT for node in tree.nodes) == rollout.samples
        for leaf, path in zip(tree.leaves, tree.paths, strict=True):
            on_the_way = [token for number in path for token in plain(tree.nodes[number].segment.token_ids)]
            assert tuple(on_the_way) == plain(leaf.response_ids)
            assert len(leaf.response_ids) <= rollout.max_tokens
        if rollout.most_tokens is not None:
            assert sampling.tokens <= rollout.most_tokens
        assert len(tree.leaves) <= rollout.most_answers(1)


@settings(max_examples=15, deadline=None)
@given(rollouts, st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_a_tree_is_the_same_in_any_order_of_its_answers(rollout: TreeRollout, seed: int, order: int) -> None:
    assert answers_of(grown(rollout, seed)) == answers_of(grown(rollout, seed, engine=engine(order)))


@settings(max_examples=15, deadline=None)
@given(rollouts, st.integers(0, 1 << 20))
def test_trees_come_back_from_disk_with_their_nodes(rollout: TreeRollout, seed: int) -> None:
    trees = grown(rollout, seed)
    again = trees_of(trajectories_from_bytes(trajectories_to_bytes(answers_of(trees))))
    assert answers_of(again) == answers_of(trees)
    for one, other in zip(trees, again, strict=True):
        assert (one.nodes, one.paths) == (other.nodes, other.paths)


def test_without_branches_the_answers_are_those_of_single_turn() -> None:
    branching = UpToWidth(states=StepBoundaries(), width=2)
    alone, plainly = (
        mdp.rolled_out(rollout, 3, engine=engine())[0]
        for rollout in (
            TreeRollout(samples=2, branching=branching, max_tokens=mdp.LONGEST),
            SingleTurn(samples=2, max_tokens=mdp.LONGEST),
        )
    )
    assert alone == plainly


def test_a_killed_rollout_goes_on_to_the_same_tree_and_samples_nothing_twice(tmp_path: Path) -> None:
    undisturbed = engine()
    expected = answers_of(grown(AT_STATES, engine=undisturbed))
    for fail_after in range(1, len(undisturbed.asked)):
        journal = tmp_path / f"{fail_after}.jsonl"
        first, second = engine(3, fail_after), engine(4)
        with pytest.raises(EngineError):
            grown(AT_STATES, engine=JournaledEngine(first, journal))
        assert answers_of(grown(AT_STATES, engine=JournaledEngine(second, journal))) == expected
        keys = Counter((plain(one.prompt_ids), one.seed) for one in [*first.asked, *second.asked])
        assert set(keys.values()) == {1}
        assert len(keys) == len(undisturbed.asked)


def test_ranks_grow_the_trees_that_one_alone_would_and_tell_the_same_metrics() -> None:
    def run(context: RolloutContext) -> tuple[list[list[Trajectory]], Metrics]:
        trees, metrics = AT_STATES.run(context, mdp.problems(5))
        return [tree.leaves for tree in trees], metrics

    mdp.assert_ranks_agree(2, run, engine=engine)


def test_metrics_say_what_was_shared() -> None:
    sampling = engine()
    answers, metrics = mdp.rolled_out(AT_STATES, 4, engine=sampling)
    assert metrics["tree/answers"] == len(answers) / 4
    assert metrics["tree/tokens"] == sampling.tokens / 4
    assert metrics["tree/tokens_of_chains"] == sum(len(one.response_ids) for one in answers) / 4
    assert metrics["tree/shared"] == 1 - metrics["tree/tokens"] / metrics["tree/tokens_of_chains"] > 0
    assert 0 < metrics["tree/depth"] <= 2


def test_what_an_answer_shares_is_trained_by_the_next_where_nobody_could_grade_it() -> None:
    (tree,) = grown(AT_STATES, count=1, seed=SEED)
    (first,) = [one for one in tree.leaves if one.sample == 0]
    heirs = [one for one in tree.leaves if one.fork is not None and one.fork.sample == 0]
    assert heirs, "this seed makes the first answer branch"
    left = tree.keeping([place for place, one in enumerate(tree.leaves) if one is not first])
    trained = sum(int(episode.trained.sum()) for episode in rows(left))
    below = {number for path in left.paths for number in path}
    assert trained == sum(len(tree.nodes[number].segment.token_ids) for number in below)
    assert rows(left)[left.leaves.index(heirs[0])].trained.all()


def test_weights_say_how_often_a_token_counts() -> None:
    (tree,) = grown(AT_STATES, count=1, seed=SEED)
    tree = replace(tree, leaves=[replace(one, bonus=float(one.sample**2)) for one in tree.leaves])
    below = Counter(number for path in tree.paths for number in path)
    for row, each in zip(rows(tree, weight="once"), rows(tree, weight="each"), strict=True):
        assert row.advantages.tolist() == each.advantages.tolist()
        assert each.trained.all()
    times = sum(int(row.trained.sum()) for row in rows(tree, weight="each"))
    assert times == sum(below[n] * len(node.segment.token_ids) for n, node in enumerate(tree.nodes))


def test_at_states_every_answer_that_gets_there_goes_on_in_so_many_ways() -> None:
    for tree in grown(AT_STATES, count=8):
        for path in tree.paths:
            for depth, number in enumerate(path):
                following = sum(node.parent == number for node in tree.nodes)
                ends = number == path[-1]
                assert following == (0 if ends else (2, 3)[depth])
        for leaf, path in zip(tree.leaves, tree.paths, strict=True):
            assert len(path) == min(len(leaf.step_ends), 3)


def test_where_the_policy_was_least_sure_is_where_its_tokens_were_least_likely() -> None:
    branching = LeastSure(positions=2, ways=3)
    for tree in grown(TreeRollout(samples=3, branching=branching, max_tokens=mdp.LONGEST), count=4):
        for answer in tree.leaves[:3]:
            forks = [one.fork.tokens for one in tree.leaves if one.fork and one.fork.sample == answer.sample]
            logprobs = [value for one in answer.segments for value in one.logprobs.tolist()]
            likely = sorted(range(1, len(logprobs)), key=lambda at: (logprobs[at], at))
            assert sorted(forks) == sorted(at for at in likely[:2] for _ in range(3))


def test_in_the_tail_the_last_states_of_each_answer_from_the_prompt_branch() -> None:
    branching = LastStates(states=StepBoundaries(), count=2, ways=3)
    steps_seen = set()
    for tree in grown(TreeRollout(samples=3, branching=branching, max_tokens=mdp.LONGEST), count=8):
        assert len(tree.leaves) <= branching.most_answers(3)
        for answer in tree.leaves[:3]:
            forks = [one.fork.tokens for one in tree.leaves if one.fork and one.fork.sample == answer.sample]
            last_states = answer.step_ends[:-1][-2:]
            assert sorted(forks) == sorted([*last_states, *last_states])
            steps_seen.add(len(answer.step_ends))
    assert {1, 3} <= steps_seen


def test_a_tree_widens_until_it_has_so_many_answers() -> None:
    branching = UpToWidth(states=EveryNTokens(tokens=1), width=7)
    rollout = TreeRollout(samples=2, branching=branching, max_tokens=mdp.LONGEST)
    for tree in grown(rollout, count=8):
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


def answer(sample: int, path: tuple[Segment, ...], fork: Fork | None = None) -> Trajectory:
    return Trajectory(PROBLEM, sample, (9,), path, "stop", "", Grade(0.0, "ok"), (), fork=fork)


def prefix(tree: Tree, state: State) -> tuple[Segment, ...]:
    """The segments up to a state."""
    if state.node == ROOT:
        return ()
    *before, last = (tree.nodes[number].segment for number in tree.path(state.node))
    return (*before, replace(last, token_ids=last.token_ids[: state.offset]))


def tree_of(paths: Paths) -> Tree:
    (tree,) = trees_of(answer(sample, path) for sample, path in enumerate(paths))
    return tree


def marked(path: tuple[Segment, ...]) -> list[tuple[object, ...]]:
    """Each token with all by which it differs from others."""
    return [(token, one.origin, one.branch) for one in path for token in plain(one.token_ids)]


@given(answers)
def test_equal_prefixes_are_one_state_which_is_the_way_to_it(paths: Paths) -> None:
    tree = tree_of(paths)
    prefixes = [
        (tree.state(leaf, length), marked(path)[:length])
        for leaf, path in enumerate(paths)
        for length in range(len(marked(path)) + 1)
    ]
    for state, expected in prefixes:
        assert marked(prefix(tree, state)) == expected
        assert (state == (PROBLEM.id, ROOT, 0)) == (not expected)
        for other, of_other in prefixes:
            assert (state == other) == (expected == of_other)


@given(answers)
def test_rows_train_what_was_sampled_once_behind_what_it_saw(paths: Paths) -> None:
    tree = tree_of(paths)
    for path in paths:
        expected = []
        for place, own in enumerate(path):
            if own.origin == "sampled" and len(own.token_ids):
                seen = [one.token_ids for one in path[:place] if sees(own.branch, one.branch)]
                context = joined([tree.prompt_ids, *seen])
                expected.append((plain(joined([context, own.token_ids])), plain(own.token_ids)))
        parts = [(s.branch, s.token_ids, np.full(len(s.token_ids), s.origin == "sampled")) for s in path]
        rows = list(training_rows(tree.prompt_ids, parts))
        assert [plain(ids) for ids, _ in rows] == [ids for ids, _ in expected]
        assert [plain(ids[predicting + 1]) for ids, predicting in rows] == [own for _, own in expected]


def test_answers_may_share_their_beginning_and_grow_one_by_one() -> None:
    tree = Tree(PROBLEM, joined([]))
    trunk = Segment([1, 2])
    for sample, last in enumerate(([3], [4, 5], [3, 6])):
        end = Segment(last)
        tree.take(answer(sample, (trunk, end), Fork(0, 2) if sample else None))
    assert len(tree.nodes) == 4
    assert [plain(one.response_ids) for one in tree.leaves] == [(1, 2, 3), (1, 2, 4, 5), (1, 2, 3, 6)]
    assert tree.state(0, 2) == tree.state(1, 2) == tree.state(2, 2) == (PROBLEM.id, 0, 2)
    assert tree.state(0, 3) == tree.state(2, 3) != tree.state(1, 3)
    tree.take(answer(3, (trunk, Segment([7])), Fork(0, 2)))
    assert tree.state(3, 2) == (PROBLEM.id, 0, 2)
    assert len(tree.nodes) == 5


@given(answers)
def test_other_answers_in_a_trees_place_leave_its_states_as_they_are(paths: Paths) -> None:
    tree = tree_of(paths)
    (other,) = with_answers([tree], answers_of([tree])[::-1])
    assert [one.sample for one in other.leaves] == list(range(len(paths)))[::-1]
    lengths = [len(marked(path)) for path in paths]
    assert all(other.state(i, n) == tree.state(i, n) for i, n in enumerate(lengths))
