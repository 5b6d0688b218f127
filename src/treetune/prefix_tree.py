"""Rows of tokens as a tree in which what they begin with alike stands once.

Its nodes are tokens, laid out by a depth-first walk; a token's subtree is then a stretch of them, and
one node is in sight of another if it lies in its subtree: an Euler tour's test for ancestors
(ThreadWeaver packs its demonstrations so). Held by runs of tokens without a fork, which numpy compares
and copies whole: Python's part grows with the number of forks, and not with that of tokens.
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
    """The T nodes in the order of the walk, which takes branches in the order in which rows came.

    Node j is in sight of node i if ``j <= i <= subtree_last_T[j]``.
    """

    token_ids_T: Ids
    depths_T: Ids
    """Tokens before each node: its position."""
    parents_T: Ids
    """Each node's parent; -1 of a first token."""
    subtree_last_T: Ids
    """The last node of each node's subtree."""
    paths: list[Ids]
    """For each row, the nodes of its tokens."""

    @staticmethod
    def of(rows: Sequence[Ids]) -> PrefixTree:
        growing = GrowingTree()
        for row in rows:
            growing.add(row)
        return growing.laid_out()


@dataclass(eq=False, slots=True)
class _Run:
    """Tokens that follow each other without a fork."""

    token_ids: Ids
    row: int
    """The first row that came through."""
    children: dict[int, _Run] = field(default_factory=dict)
    """By their first token, in the order in which they came."""
    start: int = 0
    depth: int = 0
    parent: int = -1
    last: int = -1

    def split(self, length: int) -> None:
        """Keeps its first `length` tokens; the others become its child."""
        rest = _Run(self.token_ids[length:], self.row, self.children)
        self.token_ids, self.children = self.token_ids[:length], {int(rest.token_ids[0]): rest}


class GrowingTree:
    """A tree that rows are added to; `size` is the number of its nodes."""

    def __init__(self) -> None:
        self._root = _Run(np.empty(0, np.int64), 0)
        self._rows: list[Ids] = []
        self.size = 0

    @property
    def count(self) -> int:
        """The number of rows that were added."""
        return len(self._rows)

    def first(self, number: int, length: int) -> int:
        """Returns the number of the first row that begins with the same `length` tokens as this one."""
        row, run, done = self._rows[number], self._root, 0
        while done < length:
            run = run.children[int(row[done])]
            done += len(run.token_ids)
        return run.row

    def add(self, row: Ids) -> None:
        self._rows.append(row)
        run, done = self._root, 0
        while done < len(row):
            child = run.children.get(int(row[done]))
            if child is None:
                run.children[int(row[done])] = _Run(row[done:], self.count - 1)
                self.size += len(row) - done
                return
            common = _common_prefix(child.token_ids, row[done:])
            done += common
            if done < len(row) and common < len(child.token_ids):
                child.split(common)
            run = child

    def laid_out(self) -> PrefixTree:
        runs = self._walk()
        ids = [run.token_ids for run in runs]
        lengths = [len(run.token_ids) for run in runs]
        parents_T = np.arange(-1, self.size - 1)
        parents_T[[run.start for run in runs]] = [run.parent for run in runs]
        return PrefixTree(
            token_ids_T=np.concatenate(ids) if ids else np.empty(0, np.int64),
            depths_T=np.arange(self.size) - np.repeat([run.start - run.depth for run in runs], lengths),
            parents_T=parents_T,
            subtree_last_T=np.repeat([run.last for run in runs], lengths),
            paths=[self._path(row) for row in self._rows],
        )

    def _walk(self) -> list[_Run]:
        """Returns all runs, depth first, with their positions."""
        runs: list[_Run] = []
        start = 0
        waiting = list(reversed(self._root.children.values()))
        while waiting:
            run = waiting.pop()
            runs.append(run)
            run.start = start
            start += len(run.token_ids)
            for child in run.children.values():
                child.parent, child.depth = start - 1, run.depth + len(run.token_ids)
            waiting += reversed(run.children.values())
        for run in reversed(runs):  # children before their parents
            run.last = run.start + len(run.token_ids) - 1
            for child in run.children.values():
                run.last = max(run.last, child.last)
        return runs

    def _path(self, row: Ids) -> Ids:
        path_T: Ids = np.empty(len(row), np.int64)
        run, done = self._root, 0
        while done < len(row):
            run = run.children[int(row[done])]
            length = min(len(run.token_ids), len(row) - done)
            path_T[done : done + length] = np.arange(run.start, run.start + length)
            done += length
        return path_T


def _common_prefix(first: Ids, second: Ids) -> int:
    """Returns how many tokens both begin with."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    index = int(differs.argmax())
    return index if differs[index] else length
