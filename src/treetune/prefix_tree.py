"""Packs rows of tokens into a prefix tree, in which equal beginnings of rows are stored once.

The nodes are tokens, numbered by a depth-first walk. The descendants of a token then have consecutive
numbers, so comparing numbers is enough to tell whether a token is an ancestor of another (an Euler tour;
ThreadWeaver packs its demonstrations in this way). The trainer's tree attention lets a token see exactly
its ancestors.

Example: the rows ``5 6 7`` and ``5 6 8 9``::

    node           0    1    2    3    4
    token_ids_T    5    6    7    8    9          5 ── 6 ──┬── 7
    depths_T       0    1    2    2    3                   └── 8 ── 9
    parents_T     -1    0    1    1    3
    subtree_last_T 4    4    2    4    4          paths: [0 1 2], [0 1 3 4]

While a tree is built, it consists of runs: consecutive tokens without a fork. NumPy compares and copies a run
as a whole, so the time that is spent in Python grows with the number of forks, not with that of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

Ids: TypeAlias = np.ndarray
"""Whole numbers, int64."""


@dataclass(frozen=True)
class PrefixTree:
    """The T nodes in the order of a depth-first walk, which takes branches in the order of the rows.

    Node j is node i or an ancestor of it if and only if ``j <= i <= subtree_last_T[j]``.
    """

    token_ids_T: Ids
    depths_T: Ids
    """The number of tokens before each node in its row. It is the node's position id for the model."""
    parents_T: Ids
    """The parent of each node; -1 for the first token of a row."""
    subtree_last_T: Ids
    """The last node among the descendants of each node; the node itself if it has none."""
    paths: list[Ids]
    """For each row, the nodes of its tokens."""

    @staticmethod
    def of(rows: Sequence[Ids]) -> PrefixTree:
        growing = GrowingTree()
        for row in rows:
            growing.add(row)
        return growing.lay_out()


@dataclass(eq=False, slots=True)
class _Run:
    """Consecutive tokens without a fork. `_walk` fills in the last four fields."""

    token_ids: Ids
    row: int
    """The first row through the run."""
    children: dict[int, _Run] = field(default_factory=dict)
    """The runs that follow, by their first token, in the order of the rows that added them."""
    start: int = 0
    """The node of the first token."""
    depth: int = 0
    """The depth of the first token."""
    parent: int = -1
    """The node before the first token."""
    last: int = -1
    """The last node among the descendants."""

    def split(self, length: int) -> None:
        """Keeps the first `length` tokens, and moves the others into a child."""
        # The children of the run are children of its second half now. The first row through the run is also
        # the first row through both halves.
        second_half = _Run(self.token_ids[length:], self.row, self.children)
        self.token_ids = self.token_ids[:length]
        self.children = {int(second_half.token_ids[0]): second_half}


class GrowingTree:
    """A prefix tree under construction; `size` is the number of its nodes."""

    def __init__(self) -> None:
        self._root = _Run(np.empty(0, np.int64), 0)
        self._rows: list[Ids] = []
        self.size = 0

    @property
    def count(self) -> int:
        """The number of rows that were added."""
        return len(self._rows)

    def first_equal_row(self, number: int, length: int) -> int:
        """Returns the number of the first row with the same first `length` tokens as row `number`."""
        row = self._rows[number]
        run = self._root
        offset = 0
        while offset < length:
            run = run.children[int(row[offset])]
            offset += len(run.token_ids)
        # `run` has the last of the first `length` tokens, and `run.row` is the first row through `run`. If
        # `length` is 0, `run` is the root, whose row is 0.
        return run.row

    def add(self, row: Ids) -> None:
        """Adds a row: follows it down the tree as long as it agrees with an earlier row, and adds its other
        tokens."""
        self._rows.append(row)
        run = self._root
        offset = 0
        while offset < len(row):
            child = run.children.get(int(row[offset]))
            if child is None:  # no earlier row has this token here; this row has the number count - 1
                run.children[int(row[offset])] = _Run(row[offset:], self.count - 1)
                self.size += len(row) - offset
                return
            common = _count_common_tokens(child.token_ids, row[offset:])
            offset += common
            # A row that ends within a run leaves the run whole, since it adds no fork.
            if offset < len(row) and common < len(child.token_ids):
                child.split(common)
            run = child

    def lay_out(self) -> PrefixTree:
        """Returns the finished tree, with the numbers of its nodes.

        The numbers are computed from the runs, since the tokens of a run have consecutive numbers.
        """
        runs = self._walk()
        ids = [run.token_ids for run in runs]
        lengths = [len(run.token_ids) for run in runs]
        # Within a run, each token's parent is the token before it.
        parents_T = np.arange(-1, self.size - 1)
        parents_T[[run.start for run in runs]] = [run.parent for run in runs]
        # A run's token at offset i is the node `start + i`, and has the depth `depth + i`. So the difference
        # of node and depth is the same for all tokens of a run.
        node_minus_depth_of_runs = [run.start - run.depth for run in runs]
        nodes_T = np.arange(self.size)
        depths_T = nodes_T - np.repeat(node_minus_depth_of_runs, lengths)
        return PrefixTree(
            token_ids_T=np.concatenate(ids) if ids else np.empty(0, np.int64),
            depths_T=depths_T,
            parents_T=parents_T,
            # All tokens of a run have the same last descendant.
            subtree_last_T=np.repeat([run.last for run in runs], lengths),
            paths=[self._path(row) for row in self._rows],
        )

    def _walk(self) -> list[_Run]:
        """Numbers the nodes, and returns all runs in depth-first order."""
        runs: list[_Run] = []
        next_start = 0
        # The next run is at the end of the stack, so children are put on it in reverse order.
        stack = list(reversed(self._root.children.values()))
        while stack:
            run = stack.pop()
            runs.append(run)
            run.start = next_start
            next_start += len(run.token_ids)
            for child in run.children.values():
                child.parent = next_start - 1
                child.depth = run.depth + len(run.token_ids)
            stack += reversed(run.children.values())
        for run in reversed(runs):  # children before their parents
            run.last = run.start + len(run.token_ids) - 1
            for child in run.children.values():
                run.last = max(run.last, child.last)
        return runs

    def _path(self, row: Ids) -> Ids:
        """Returns the nodes of a row's tokens.

        The row goes through runs: consecutive tokens without a fork, whose nodes have consecutive numbers.
        """
        path_T: Ids = np.empty(len(row), np.int64)
        run = self._root
        offset = 0
        while offset < len(row):
            run = run.children[int(row[offset])]
            length = min(len(run.token_ids), len(row) - offset)
            path_T[offset : offset + length] = np.arange(run.start, run.start + length)
            offset += length
        return path_T


def _count_common_tokens(first: Ids, second: Ids) -> int:
    """Returns the length of the longest common prefix of two rows, neither of which is empty."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    index = int(differs.argmax())  # the first difference, or 0 if there is none
    return index if differs[index] else length
