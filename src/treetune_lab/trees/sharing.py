"""What the answers of a tree share: which of them trains it, and how much it counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from treetune.tree import ROOT, Tree
from treetune.vocabulary import Column, Episode


@dataclass(frozen=True)
class Sharing:
    """Of a tree whose answers may have grown out of each other. Nodes without an answer below, of which none
    could be graded, don't count."""

    paths: list[list[int]]
    """Of each answer the numbers of its nodes."""
    lengths: list[int]
    """Tokens of each node."""
    children: dict[int, list[int]]
    """Of the prompt (`ROOT`) and of each node those that follow it."""
    below: dict[int, list[int]]
    """The places of the answers that went through each node."""
    reach: dict[int, float]
    """What each node counts where a branch counts as much as all that branched off with it together: 1 over
    the number of branches at every branching before it but the prompt's.

    Then the sum over all nodes, of what each is worth and counts, is on average that over as many independent
    answers as there are from the prompt, whatever is worth something (if branchings are fair).
    """

    @staticmethod
    def of(tree: Tree) -> Sharing:
        paths = tree.paths
        below: dict[int, list[int]] = {}
        for place, path in enumerate(paths):
            for node in path:
                below.setdefault(node, []).append(place)
        children: dict[int, list[int]] = {}
        for node in sorted(below):
            children.setdefault(tree.nodes[node].parent, []).append(node)
        reach: dict[int, float] = {}
        for node in sorted(below):
            parent = tree.nodes[node].parent
            reach[node] = 1.0 if parent == ROOT else reach[parent] / len(children[parent])
        lengths = [len(node.segment.token_ids) for node in tree.nodes]
        return Sharing(paths, lengths, children, below, reach)

    def branch_at(self, place: int, length: int) -> int:
        """The node that the answer goes through behind its first `length` tokens: answers with the same one
        have the same token there, sampled once."""
        for node in self.paths[place]:
            length -= self.lengths[node]
            if length < 0:
                return node
        raise AssertionError("the answer is longer")

    def own_tokens(self, place: int) -> int:
        """How many of an answer's last tokens are trained in it: those that no earlier answer has."""
        return sum(self.lengths[node] for node in self.paths[place] if self.below[node][0] == place)

    def trained_once(self, place: int, episode: Episode, scales: Sequence[float] | None = None) -> Episode:
        """The answer's row, in which nothing is trained that an earlier answer trains. The advantages of its
        nodes are multiplied by `scales`, in their order; by what each reaches where left out."""
        import numpy as np

        assert episode.advantages is not None
        path = self.paths[place]
        if scales is None:
            scales = [self.reach[node] for node in path]
        trained = episode.trained.copy()
        trained[: len(trained) - self.own_tokens(place)] = False
        scales_T: Column = np.repeat(np.array(scales, np.float64), [self.lengths[node] for node in path])
        return replace(episode, trained=trained, advantages=episode.advantages * scales_T)


@lru_cache(maxsize=1)
def sharing_of(tree: Tree) -> Sharing:
    """Of a tree to which no answer is added any more; kept for those who ask answer by answer."""
    return Sharing.of(tree)
