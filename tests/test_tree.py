"""Whatever answers a problem's tree was grown from, it says what they went through and what they saw."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.columns import plain
from treetune.tree import ROOT, State, Tree, answers_of, training_rows, trees_of, with_answers
from treetune.vocabulary import Fork, Grade, Problem, Segment, Trajectory, joined, sees

PROBLEM = Problem("train/0", "?", "")

# Few tokens and branches, so that answers have much in common.
segments = st.builds(
    Segment,
    token_ids=st.lists(st.integers(0, 1), max_size=3),
    origin=st.sampled_from(["sampled", "injected"]),
    branch=st.sampled_from([(), ((0, 0),), ((0, 1),)]),
)
answers = st.lists(st.lists(segments, max_size=4).map(tuple), min_size=1, max_size=6)


def answer(sample: int, path: tuple[Segment, ...], fork: Fork | None = None) -> Trajectory:
    return Trajectory(PROBLEM, sample, (9,), path, "stop", "", Grade(0.0, "ok"), (), fork=fork)  # type: ignore[arg-type]


def prefix(tree: Tree, state: State) -> tuple[Segment, ...]:
    """The segments up to a state."""
    if state.node == ROOT:
        return ()
    *before, last = (tree.nodes[number].segment for number in tree.path(state.node))
    return (*before, replace(last, token_ids=last.token_ids[: state.offset]))


def tree_of(paths: list[tuple[Segment, ...]]) -> Tree:
    (tree,) = trees_of(answer(sample, path) for sample, path in enumerate(paths))
    return tree


def marked(path: tuple[Segment, ...]) -> list[tuple[object, ...]]:
    """Each token with all by which it differs from others."""
    return [(token, one.origin, one.branch) for one in path for token in plain(one.token_ids)]


@given(answers)
def test_equal_prefixes_are_one_state_and_others_are_not(paths: list[tuple[Segment, ...]]) -> None:
    tree = tree_of(paths)
    prefixes = [
        (tree.state(leaf, length), marked(path)[:length])
        for leaf, path in enumerate(paths)
        for length in range(len(marked(path)) + 1)
    ]
    for state, prefix in prefixes:
        for other_state, other_prefix in prefixes:
            assert (state == other_state) == (prefix == other_prefix)


@given(answers)
def test_a_state_is_the_way_to_it_and_is_called_after_whoever_came_first(
    paths: list[tuple[Segment, ...]],
) -> None:
    tree = tree_of(paths)
    for leaf, path in enumerate(paths):
        assert tree.state(leaf, 0) == (PROBLEM.id, ROOT, 0)
        for length in range(len(marked(path)) + 1):
            state = tree.state(leaf, length)
            assert marked(prefix(tree, state)) == marked(path)[:length]
            first = next(
                i for i, other in enumerate(paths) if marked(other)[:length] == marked(path)[:length]
            )
            assert state == tree.state(first, length)


@given(answers)
def test_rows_train_what_was_sampled_once_behind_what_it_saw(paths: list[tuple[Segment, ...]]) -> None:
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
    trunk = Segment([1, 2])  # type: ignore[arg-type]
    for sample, last in enumerate(([3], [4, 5], [3, 6])):
        end = Segment(last)  # type: ignore[arg-type]
        tree.take(answer(sample, (trunk, end), Fork(0, 2) if sample else None))
    assert len(tree.nodes) == 4
    assert [plain(one.response_ids) for one in tree.leaves] == [(1, 2, 3), (1, 2, 4, 5), (1, 2, 3, 6)]
    assert tree.state(0, 2) == tree.state(1, 2) == tree.state(2, 2) == (PROBLEM.id, 0, 2)
    assert tree.state(0, 3) == tree.state(2, 3) != tree.state(1, 3)
    tree.take(answer(3, (trunk, Segment([7])), Fork(0, 2)))  # type: ignore[arg-type]
    assert tree.state(3, 2) == (PROBLEM.id, 0, 2)
    assert len(tree.nodes) == 5


@given(answers)
def test_other_answers_in_a_trees_place_leave_its_states_as_they_are(
    paths: list[tuple[Segment, ...]],
) -> None:
    tree = tree_of(paths)
    (other,) = with_answers([tree], answers_of([tree])[::-1])
    assert [one.sample for one in other.leaves] == list(range(len(paths)))[::-1]
    lengths = [sum(lengths) for lengths in ([len(s.token_ids) for s in path] for path in paths)]
    assert [other.state(i, n) for i, n in enumerate(lengths)] == [
        tree.state(i, n) for i, n in enumerate(lengths)
    ]


@given(answers)
def test_a_path_has_each_segment_behind_the_one_before(paths: list[tuple[Segment, ...]]) -> None:
    tree = tree_of(paths)
    ends = [0, *accumulate(len(path) for path in paths)]
    for begin, end in pairwise(ends):
        for number in range(begin, end):
            assert tree.nodes[number].parent == (number - 1 if number > begin else ROOT)
            assert tree.path(number) == list(range(begin, number + 1))
