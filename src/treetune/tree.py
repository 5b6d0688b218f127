"""The tree of a problem: what was sampled and injected for it, from its prompt to graded answers.

Rollouts grow it, credit gives its states values and its answers advantages, rows for training are cut from
it. It is also the problem's group: its leaves are what answers are compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from treetune.vocabulary import (
    Branch,
    Column,
    Episode,
    Fork,
    Problem,
    Segment,
    TokenIds,
    Trajectory,
    joined,
    sees,
    token_array,
)

if TYPE_CHECKING:
    from treetune.prefix_tree import GrowingTree

ROOT = -1
"""The number of the node that is the prompt."""


class Node(NamedTuple):
    """A segment, and the number of the node that it follows in the joined order of the answer."""

    segment: Segment
    parent: int


class State(NamedTuple):
    """The first `offset` tokens of a node, and all before it; the prompt alone is ``(ROOT, 0)``.

    Equal prefixes are one state, whichever answers went through them: the node is the one that came first.
    """

    problem: str
    node: int
    offset: int


@dataclass(eq=False)
class Tree:
    """Nodes in the order in which they came, and the answers, which are the leaves."""

    problem: Problem
    prompt_ids: TokenIds
    nodes: list[Node] = field(default_factory=list)
    leaves: list[Trajectory] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)
    """The last node of each leaf."""
    _prefixes: GrowingTree | None = None
    """The answers by what they begin with alike."""
    _marks: dict[tuple[Branch, str], int] = field(default_factory=dict)

    def take(self, trajectory: Trajectory) -> None:
        """Adds an answer, segment by segment. Where the answer that it grew out of is there, it goes through
        that one's nodes up to their fork."""
        shared = self._shared_nodes(trajectory.fork)
        node = shared[-1] if shared else ROOT
        for segment in trajectory.segments[len(shared) :]:
            self.nodes.append(Node(segment, node))
            node = len(self.nodes) - 1
        self.leaves.append(trajectory)
        self._ends.append(node)

    def _shared_nodes(self, fork: Fork | None) -> list[int]:
        """Returns the nodes before a fork; none where the answer with it isn't there."""
        origin = [
            end
            for leaf, end in zip(self.leaves, self._ends, strict=True)
            if fork is not None and leaf.sample == fork.sample
        ]
        if fork is None or not origin:
            return []
        path, tokens = list[int](), 0
        for number in self.path(origin[0]):
            if tokens == fork.tokens:
                break
            path.append(number)
            tokens += len(self.nodes[number].segment.token_ids)
        assert tokens == fork.tokens, (
            f"{self.problem.id}: no segment of answer {fork.sample} ends at its fork"
        )
        return path

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled, each node once, however many answers go through it."""
        return sum(len(segment.token_ids) for segment, _ in self.nodes if segment.origin == "sampled")

    @property
    def paths(self) -> list[list[int]]:
        """The numbers of each answer's nodes, from the prompt on."""
        return [self.path(end) for end in self._ends]

    @property
    def forked(self) -> bool:
        """True where answers grew out of each other, so that they share tokens that were sampled once."""
        return any(leaf.fork is not None for leaf in self.leaves)

    def keeping(self, leaves: Sequence[int]) -> Tree:
        """Returns the tree with some of its answers alone, given their indices. All nodes stay."""
        return replace(
            self,
            leaves=[self.leaves[leaf] for leaf in leaves],
            _ends=[self._ends[leaf] for leaf in leaves],
            _prefixes=None,
        )

    def path(self, node: int) -> list[int]:
        """Returns the numbers of the nodes from the prompt to this one."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.nodes[node].parent
        return path[::-1]

    def state(self, leaf: int, length: int) -> State:
        """Returns the state of an answer after so many of its tokens, given its index among `leaves`."""
        path = self.path(self._ends[self._index().first(leaf, length)])
        offset = length
        for number in path:
            count = len(self.nodes[number].segment.token_ids)
            if 0 < offset <= count:
                return State(self.problem.id, number, offset)
            offset -= count
        assert length == 0, f"{self.problem.id}: its answer {leaf} has fewer than {length} tokens"
        return State(self.problem.id, ROOT, 0)

    def _index(self) -> GrowingTree:
        """Returns the answers as rows of a prefix tree. Tokens on different branches, or of which one was
        sampled and the other injected, are not alike: a mark above the 32 bits of the id sets them apart."""
        import numpy as np

        from treetune.prefix_tree import GrowingTree

        if self._prefixes is None:
            self._prefixes = GrowingTree()
        for end in self._ends[self._prefixes.count :]:
            keys: list[Column] = []
            for number in self.path(end):
                segment = self.nodes[number].segment
                mark = self._marks.setdefault((segment.branch, segment.origin), len(self._marks))
                keys.append(segment.token_ids.astype(np.int64) + (mark << 32))
            self._prefixes.add(joined(keys) if keys else token_array(()).astype(np.int64))
        return self._prefixes


def trees_of(trajectories: Iterable[Trajectory]) -> list[Tree]:
    """Returns the trees of the answers' problems, in the order in which these appear."""
    trees: dict[str, Tree] = {}
    for answer in trajectories:
        trees.setdefault(answer.problem.id, Tree(answer.problem, answer.prompt_ids)).take(answer)
    return list(trees.values())


def answers_of(trees: Iterable[Tree]) -> list[Trajectory]:
    """Returns all answers, tree after tree."""
    return [leaf for tree in trees for leaf in tree.leaves]


def with_answers(trees: Sequence[Tree], answers: Sequence[Trajectory]) -> list[Tree]:
    """Returns the same trees, with these answers in place of theirs, one for one."""
    left = iter(answers)
    return [replace(tree, leaves=[next(left) for _ in tree.leaves]) for tree in trees]


def training_rows(
    prompt_ids: TokenIds, parts: Sequence[tuple[Branch, TokenIds, Column]]
) -> Iterator[tuple[TokenIds, Column]]:
    """Yields the rows that a model runs over to train an answer, given its parts: branch, token ids, and
    which of these are trained. A part with trained tokens has a row of the prompt, the earlier parts that it
    saw, and itself; beside the row are the positions in it whose next token is trained.
    """
    import numpy as np

    for number, (branch, token_ids, trained) in enumerate(parts):
        if not trained.any():
            continue
        context = [prompt_ids]
        context += [earlier_ids for earlier, earlier_ids, _ in parts[:number] if sees(branch, earlier)]
        before = sum(map(len, context))
        yield joined([*context, token_ids]), np.flatnonzero(trained) + (before - 1)


@dataclass(frozen=True)
class Sharing:
    """The nodes that answers of a tree share. Nodes without an answer below, of which none could be graded,
    don't count."""

    paths: list[list[int]]
    """The numbers of each answer's nodes."""
    lengths: list[int]
    """Tokens of each node."""
    children: dict[int, list[int]]
    """By the prompt (`ROOT`) and each node, the nodes that follow it."""
    below: dict[int, list[int]]
    """The indices of the answers that went through each node."""
    reach: dict[int, float]
    """The weight of each node where a branch counts as much as all that branched off with it together: 1 over
    the number of branches at every branching before it but the prompt's.

    Then the sum over all nodes, of what each is worth and counts, is on average that over as many independent
    answers as there are from the prompt, whatever is worth something (if branchings are fair).
    """

    @staticmethod
    def of(tree: Tree) -> Sharing:
        paths = tree.paths
        below: dict[int, list[int]] = {}
        for leaf, path in enumerate(paths):
            for node in path:
                below.setdefault(node, []).append(leaf)
        children: dict[int, list[int]] = {}
        for node in sorted(below):
            children.setdefault(tree.nodes[node].parent, []).append(node)
        reach: dict[int, float] = {}
        for node in sorted(below):
            parent = tree.nodes[node].parent
            reach[node] = 1.0 if parent == ROOT else reach[parent] / len(children[parent])
        lengths = [len(node.segment.token_ids) for node in tree.nodes]
        return Sharing(paths, lengths, children, below, reach)

    def branch_at(self, leaf: int, length: int) -> int:
        """Returns the node that the answer goes through behind its first `length` tokens: answers with the
        same one have the same token there, sampled once."""
        for node in self.paths[leaf]:
            length -= self.lengths[node]
            if length < 0:
                return node
        raise AssertionError("the answer is longer")

    def trained_once(self, leaf: int, episode: Episode, scales: Sequence[float] | None = None) -> Episode:
        """Returns the answer's row, in which nothing is trained that an earlier answer trains. The advantages
        of its nodes are multiplied by `scales`, in their order; by what each reaches where left out."""
        import numpy as np

        assert episode.advantages is not None
        path = self.paths[leaf]
        if scales is None:
            scales = [self.reach[node] for node in path]
        shared = sum(self.lengths[node] for node in path if self.below[node][0] != leaf)
        trained = episode.trained.copy()
        trained[:shared] = False
        scales_T: Column = np.repeat(np.array(scales, np.float64), [self.lengths[node] for node in path])
        return replace(episode, trained=trained, advantages=episode.advantages * scales_T)


@lru_cache(maxsize=1)
def sharing_of(tree: Tree) -> Sharing:
    """Returns the sharing of a tree to which no answer is added any more; cached for credit that asks for
    it answer by answer."""
    return Sharing.of(tree)
