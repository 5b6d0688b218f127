"""Prefix trees of training rows.

These tests promise that a tree holds each prefix of its rows exactly once, and that its mask lets each
token see exactly its prefix.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_trainer import dense_mask
from treetune.prefix_tree import GrowingTree, PrefixTree
from treetune.trainer.batches import micro_batch
from treetune.trainer.tokens import Sequences
from treetune.vocabulary import Episode, SegmentSpan

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=12)
"""Rows of few kinds of tokens, so that many begin alike, and some are prefixes of others."""


def make_tree(rows: list[list[int]]) -> PrefixTree:
    return PrefixTree.of([np.array(row, np.int64) for row in rows])


def ancestors(tree: PrefixTree, node: int) -> list[int]:
    """Returns the nodes from the root to this one."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(tree.parents_T[node])
    return path[::-1]


@given(ROWS)
def test_every_row_is_a_path_from_the_root(rows):
    tree = make_tree(rows)
    for row, path in zip(rows, tree.paths, strict=True):
        assert [int(tree.token_ids_T[node]) for node in path] == row
        if row:
            assert ancestors(tree, int(path[-1])) == path.tolist()


@given(ROWS)
def test_each_prefix_is_there_once_and_nothing_else_is(rows):
    tree = make_tree(rows)
    beginnings = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    prefixes = [
        tuple(int(tree.token_ids_T[path_node]) for path_node in ancestors(tree, node))
        for node in range(len(tree.token_ids_T))
    ]
    assert len(prefixes) == len(beginnings)
    assert set(prefixes) == beginnings
    assert [len(beginning) - 1 for beginning in prefixes] == tree.depths_T.tolist()


@given(ROWS)
def test_the_mask_is_the_relation_of_ancestors(rows):
    tree = make_tree(rows)
    count = len(tree.token_ids_T)
    mask = dense_mask(torch.from_numpy(tree.subtree_last_T))
    assert [mask[node].nonzero().squeeze(-1).tolist() for node in range(count)] == [
        ancestors(tree, node) for node in range(count)
    ]


@given(ROWS)
def test_a_growing_tree_knows_its_size_at_any_time(rows):
    growing = GrowingTree()
    for number, row in enumerate(rows):
        growing.add(np.array(row, np.int64))
        assert growing.size == len(make_tree(rows[: number + 1]).token_ids_T)


def test_branches_stand_in_the_order_in_which_they_came():
    tree = make_tree([[5, 1], [5, 0, 7], [5, 1, 4], [3]])
    assert tree.token_ids_T.tolist() == [5, 1, 4, 0, 7, 3]
    assert tree.parents_T.tolist() == [-1, 0, 1, 0, 3, -1]
    assert tree.subtree_last_T.tolist() == [4, 2, 2, 4, 4, 5]
    assert tree.depths_T.tolist() == [0, 1, 2, 1, 2, 0]


def test_a_joined_answer_and_its_threads():
    """This is the worked example of ThreadWeaver's packing, with 27 nodes.

    The second thread is there once after its sibling, in the joined answer, and once without it, where it is
    trained as it was sampled.
    """
    joined = ["Q", "A", "<P>", "\n", "<O>", "</O>", "\n", "<T>", "\n", "1:", "a1", "a2", "</T>"]
    joined += ["<T>", "\n", "2:", "b1", "b2", "</T>", "\n", "</P>", "post", "EOS"]
    names = sorted(set(joined))
    ids = [names.index(name) for name in joined]
    ends = {
        5: ((), True),
        6: ((), False),
        9: (((0, 0),), False),
        12: (((0, 0),), True),
        15: (((0, 1),), False),
        18: (((0, 1),), True),
        19: ((), False),
        22: ((), True),
    }
    trained: list[bool] = []
    for end, (_, sampled) in ends.items():
        trained += [sampled] * (end - len(trained))
    episode = Episode(
        prompt_ids=tuple(ids[:1]),
        response_ids=tuple(ids[1:]),
        trained=tuple(trained),
        reward=1.0,
        group="p",
        trajectory="p#0",
        policy_version=0,
        stretches=tuple(SegmentSpan(end, branch) for end, (branch, _) in ends.items()),
    )
    sequences = Sequences.of([episode])
    batch = micro_batch(sequences, sequences.rows_of((0,)), "tree", torch.device("cpu"))
    assert batch.inputs.input_ids_BT.shape == (1, 27)
    assert batch.computed_tokens == 27
    assert batch.inputs.input_ids_BT[0, :23].tolist() == ids
    assert [names[i] for i in batch.inputs.input_ids_BT[0, 23:]] == ["2:", "b1", "b2", "</T>"]
    assert batch.inputs.position_ids_BT[0].tolist() == [*range(23), 9, 10, 11, 12]
    mask = dense_mask(batch.inputs.subtree_last_1T[0])
    for offset in range(4):
        assert mask[23 + offset].nonzero().squeeze(-1).tolist() == [*range(9), *range(23, 24 + offset)]
    for node in range(23):
        assert mask[node].nonzero().squeeze(-1).tolist() == list(range(node + 1))
    assert [names[i] for i in batch.inputs.labels_N] == [
        *joined[1:6],  # what was sampled, part after part
        *("a1", "a2", "</T>"),
        *("b1", "b2", "</T>"),
        *("</P>", "post", "EOS"),
    ]
    assert batch.inputs.positions_N.tolist() == [*range(5), 9, 10, 11, 23, 24, 25, 19, 20, 21]
