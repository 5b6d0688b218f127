"""Holds all answers to a problem as a tree, from the prompt to the graded answers.

Rollouts grow the tree, credit gives values to its states and advantages to its answers, and training rows
are cut from it. The tree is also the problem's group: an answer is compared with the other leaves.

Example: three answers, of which the second branched off from the first after node 0::

    prompt (ROOT) ──┬── node 0 ──┬── node 1    leaf 0   path [0, 1]
                    │            └── node 2    leaf 1   path [0, 2], fork = Fork(sample=0, tokens=…)
                    └── node 3                 leaf 2   path [3]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
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
    concatenate,
    sees,
    token_array,
)

if TYPE_CHECKING:
    from treetune.prefix_tree import GrowingTree

ROOT = -1
"""The number of the node that is the prompt."""


class Node(NamedTuple):
    """A segment of an answer, and the number of the node before it.

    Example: ``Node(segment, parent=0)`` follows node 0, ``Node(segment, parent=ROOT)`` the prompt.
    """

    segment: Segment
    parent: int


class State(NamedTuple):
    """A prefix of an answer: everything before a node, and the first `offset` tokens of the node.

    Equal prefixes are the same state, even if several answers sampled them: `node` is then the node of the
    first of these answers.

    Example: ``State("train/17", node=0, offset=4)`` is the prompt and the first 4 tokens of node 0.
    ``State("train/17", ROOT, 0)`` is only the prompt.
    """

    problem: str
    """The problem's id."""
    node: int
    offset: int


@dataclass(eq=False)
class Tree:
    """A problem's answers (`leaves`), and the nodes of their segments in the order in which they were added.

    Example: the tree of the drawing above has ``paths == [[0, 1], [0, 2], [3]]``.
    """

    problem: Problem
    prompt_ids: TokenIds
    nodes: list[Node] = field(default_factory=list)
    leaves: list[Trajectory] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)
    """The last node of each leaf."""
    _prefixes: GrowingTree | None = None
    """A prefix tree of the answers' tokens, which finds the answers with an equal beginning. `_index` makes
    it when it is first needed."""
    _marks: dict[tuple[Branch, str], int] = field(default_factory=dict)
    """A number for each (branch, origin) of a segment. It keeps equal token ids of different kinds apart in
    `_prefixes`."""

    def add_answer(self, trajectory: Trajectory) -> None:
        """Adds an answer, one node for each of its segments.

        An answer that branched off from an answer of the tree shares the nodes before their fork.
        """
        shared_nodes = self._shared_nodes(trajectory.fork)  # one for each of the answer's first segments
        node = shared_nodes[-1] if shared_nodes else ROOT
        for segment in trajectory.segments[len(shared_nodes) :]:
            self.nodes.append(Node(segment, node))
            node = len(self.nodes) - 1
        self.leaves.append(trajectory)
        self._ends.append(node)

    def _shared_nodes(self, fork: Fork | None) -> list[int]:
        """Returns the nodes before a fork, the point at which an answer branched off from an earlier answer.

        Returns an empty list if there is no fork, or if the earlier answer is not in the tree.
        """
        if fork is None:
            return []
        samples = [leaf.sample for leaf in self.leaves]
        if fork.sample not in samples:
            return []  # `trees_of` was given only some of the problem's answers, without the earlier one
        path_of_origin = self.path(self._ends[samples.index(fork.sample)])
        shared: list[int] = []
        tokens = 0
        for node in path_of_origin:
            if tokens == fork.tokens:
                break
            shared.append(node)
            tokens += len(self.nodes[node].segment.token_ids)
        assert tokens == fork.tokens, (
            f"{self.problem.id}: no segment of answer {fork.sample} ends at its fork"
        )
        return shared

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled. A node that several answers share counts once."""
        return sum(len(segment.token_ids) for segment, _ in self.nodes if segment.origin == "sampled")

    @property
    def paths(self) -> list[list[int]]:
        """For each answer, the numbers of its nodes, from the first node after the prompt to the last one."""
        return [self.path(end) for end in self._ends]

    @property
    def has_forks(self) -> bool:
        """True if any answer branched off from another one. The two then share tokens that were sampled
        once."""
        return any(leaf.fork is not None for leaf in self.leaves)

    def select_leaves(self, leaves: Sequence[int]) -> Tree:
        """Returns the tree with only the leaves of these indices.

        All nodes stay, so that the numbers of nodes keep their meaning. The prefix tree is dropped, since its
        rows are numbered as the leaves are; `_index` makes a new one. If the answer that another answer
        branched off from is left out, the other answer gets the fork that `_fork_from_kept` returns.
        """
        kept_samples = {self.leaves[leaf].sample for leaf in leaves}
        kept_leaves = []
        for leaf in leaves:
            answer = self.leaves[leaf]
            fork = self._fork_from_kept(answer.fork, kept_samples)
            kept_leaves.append(answer if fork == answer.fork else replace(answer, fork=fork))
        return replace(
            self,
            leaves=kept_leaves,
            _ends=[self._ends[leaf] for leaf in leaves],
            _prefixes=None,
        )

    def _fork_from_kept(self, fork: Fork | None, kept_samples: Collection[int]) -> Fork | None:
        """Returns an answer's fork from its nearest ancestor that is kept.

        The ancestors are the answer that it branched off from, the answer that its ancestor branched off
        from, and so on. If none is kept, returns the fork from the farthest ancestor. So two kept answers
        that branched off from the same missing answer still have its `sample` in common.

        Example: answer 7 shares 10 tokens with answer 5, and answer 5 shares 4 with answer 0. Without answer
        5, answer 7 has ``Fork(sample=0, tokens=4)``, even if answer 0 is missing as well.
        """
        forks_by_sample = {leaf.sample: leaf.fork for leaf in self.leaves}
        while fork is not None and fork.sample not in kept_samples:
            fork_of_origin = forks_by_sample.get(fork.sample)
            if fork_of_origin is None:  # the origin begins at the prompt, or is not in this tree
                break
            # The answer shares with its origin's origin only what all three have in common.
            fork = Fork(fork_of_origin.sample, min(fork.tokens, fork_of_origin.tokens))
        return fork

    def path(self, node: int) -> list[int]:
        """Returns the numbers of the nodes from the prompt (exclusive) to this node (inclusive)."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.nodes[node].parent
        return path[::-1]

    def state(self, leaf: int, length: int) -> State:
        """Returns the state of answer `leaf` (its index) after its first `length` response tokens."""
        if length == 0:
            return State(self.problem.id, ROOT, 0)  # the prompt, which is no node
        # Answers with the same prefix are in the same state. A node of the first answer with this prefix
        # names the state.
        first_leaf = self._index().first_equal_row(leaf, length)
        offset = length
        for node in self.path(self._ends[first_leaf]):
            count = len(self.nodes[node].segment.token_ids)
            if offset <= count:  # a state between two nodes is the end of the first one
                return State(self.problem.id, node, offset)
            offset -= count
        raise AssertionError(f"{self.problem.id}: its answer {leaf} has fewer than {length} tokens")

    def _index(self) -> GrowingTree:
        """Adds the new answers to the prefix tree of all answers, and returns the prefix tree.

        Two equal token ids count as different tokens if they belong to different threads (`branch`), or if
        one was sampled and the other injected. The prefix tree therefore holds ``id + mark * 2**32``: an id
        has 32 bits, and each (branch, origin) has a mark of its own.
        """
        import numpy as np

        from treetune.prefix_tree import GrowingTree

        if self._prefixes is None:
            self._prefixes = GrowingTree()
        for end in self._ends[self._prefixes.count :]:  # the answers that the prefix tree doesn't have yet
            keys: list[Column] = []
            for node in self.path(end):
                segment = self.nodes[node].segment
                mark = self._marks.setdefault((segment.branch, segment.origin), len(self._marks))
                keys.append(segment.token_ids.astype(np.int64) + (mark << 32))
            self._prefixes.add(concatenate(keys) if keys else token_array(()).astype(np.int64))
        return self._prefixes


def trees_of(trajectories: Iterable[Trajectory]) -> list[Tree]:
    """Returns a tree for each problem that has answers, in the order in which the problems first appear."""
    trees: dict[str, Tree] = {}
    for answer in trajectories:
        tree = trees.setdefault(answer.problem.id, Tree(answer.problem, answer.prompt_ids))
        tree.add_answer(answer)
    return list(trees.values())


def answers_of(trees: Iterable[Tree]) -> list[Trajectory]:
    """Returns all answers, tree after tree."""
    answers: list[Trajectory] = []
    for tree in trees:
        answers += tree.leaves
    return answers


def with_answers(trees: Sequence[Tree], answers: Sequence[Trajectory]) -> list[Tree]:
    """Returns the trees with their leaves replaced by `answers`, which are in the order of `answers_of`."""
    changed_trees = []
    start = 0
    for tree in trees:
        end = start + len(tree.leaves)
        changed_trees.append(replace(tree, leaves=list(answers[start:end])))
        start = end
    assert start == len(answers), "each leaf has one answer"
    return changed_trees


def training_rows(
    prompt_ids: TokenIds, parts: Sequence[tuple[Branch, TokenIds, Column]]
) -> Iterator[tuple[TokenIds, Column]]:
    """Yields the rows that the model computes to train an answer with threads.

    Each part with a trained token has a row: the prompt, the earlier parts that were in the context when this
    part was sampled (`sees`), and the part itself. A thread doesn't see the threads beside it, for example.

    Args:
        prompt_ids: The token ids of the prompt, with which each row begins.
        parts: For each part of the answer its branch (the thread that the part belongs to), its token ids and
            the mask of its trained tokens.

    Yields:
        Each row's token ids, and the positions in the row whose *next* token is trained: the log-prob of the
        token at position i comes from the logits at i - 1.
    """
    import numpy as np

    for number, (branch, token_ids, trained_mask) in enumerate(parts):
        if not trained_mask.any():
            continue
        context = [prompt_ids]
        for earlier_branch, earlier_ids, _ in parts[:number]:
            if sees(branch, earlier_branch):
                context.append(earlier_ids)
        context_length = sum(map(len, context))
        row = concatenate([*context, token_ids])
        trained_positions = context_length + np.flatnonzero(trained_mask)
        yield row, trained_positions - 1


@dataclass(frozen=True)
class Sharing:
    """The stretches of tokens that answers of a tree share.

    A stretch reaches from one branching to the next. It is one node of the tree, or several nodes one after
    the other: an answer of several turns has a node for each turn and each observation. A stretch has the
    number of its first node. Only `lengths` has the stretches that none of the tree's answers goes through:
    the answers through them could not be graded, and `Tree.select_leaves` has dropped these answers.

    Example: of the tree of the drawing above, in which each stretch is one node::

        Sharing(
            paths=[[0, 1], [0, 2], [3]],
            lengths=[40, 12, 9, 55],
            children={ROOT: [0, 3], 0: [1, 2]},
            leaves_below={0: [0, 1], 1: [0], 2: [1], 3: [2]},
            reach_weights={0: 1.0, 1: 0.5, 2: 0.5, 3: 1.0},
        )
    """

    paths: list[list[int]]
    """For each answer, the numbers of its stretches, from the prompt on."""
    lengths: dict[int, int]
    """The number of tokens of each stretch."""
    children: dict[int, list[int]]
    """The stretches that follow each stretch, and those that follow the prompt (`ROOT`)."""
    leaves_below: dict[int, list[int]]
    """The indices of the answers through each stretch, in rising order."""
    reach_weights: dict[int, float]
    """The weight of each stretch: the product of 1 / (number of branches) over the branchings before it. All
    branches of a branching together then count as much as a single answer. The branching at the prompt is
    left out, since its branches are independent answers.

    Suppose that all branches of a branching are sampled from the same distribution. The weighted sum over all
    stretches then has the same expectation as the plain sum over independent answers, one for each branch at
    the prompt.
    """

    @staticmethod
    def of(tree: Tree) -> Sharing:
        """Returns the stretches of a tree: chains of nodes without a branching.

        A stretch has the number of its first node, so `tree.nodes[stretch]` is this node.
        """
        stretch_of_node = _number_stretches(tree)
        paths: list[list[int]] = []
        lengths: dict[int, int] = {}
        children: dict[int, list[int]] = {}
        leaves_below: dict[int, list[int]] = {}
        for leaf, path in enumerate(tree.paths):
            # The stretches of the answer's nodes, each once, from the prompt on.
            stretches = list(dict.fromkeys(stretch_of_node[node] for node in path))
            paths.append(stretches)
            for stretch in stretches:
                leaves_below.setdefault(stretch, []).append(leaf)
        for node, (segment, _) in enumerate(tree.nodes):
            stretch = stretch_of_node[node]
            lengths[stretch] = lengths.get(stretch, 0) + len(segment.token_ids)
        parents: dict[int, int] = {}
        for stretch in sorted(leaves_below):
            parent_node = tree.nodes[stretch].parent
            parents[stretch] = ROOT if parent_node == ROOT else stretch_of_node[parent_node]
            children.setdefault(parents[stretch], []).append(stretch)
        # The branches after a stretch share its weight equally. The branches at the prompt don't share a
        # weight, since they are independent answers.
        reach_weights: dict[int, float] = {}
        for stretch in sorted(leaves_below):  # a parent's number is smaller than those of its children
            parent = parents[stretch]
            reach_weights[stretch] = 1.0 if parent == ROOT else reach_weights[parent] / len(children[parent])
        return Sharing(paths, lengths, children, leaves_below, reach_weights)

    def stretch_at(self, leaf: int, token_index: int) -> int:
        """Returns the stretch that has the answer's token at `token_index`.

        A stretch is a part of the tree without a branching. Two answers for which this method returns the
        same stretch share the token: it was sampled once.
        """
        end = 0
        for stretch in self.paths[leaf]:
            end += self.lengths[stretch]
            if token_index < end:
                return stretch
        raise AssertionError(f"answer {leaf} has no token at index {token_index}")

    def train_tokens_once(
        self, leaf: int, episode: Episode, scales: Sequence[float] | None = None
    ) -> Episode:
        """Returns the answer's row, without training the tokens that an earlier answer's row trains already.

        Args:
            leaf: The index of the answer.
            episode: The answer's row, with advantages.
            scales: A factor on the advantages of each stretch of the answer. If it is left out, the factors
                are `reach_weights`.
        """
        import numpy as np

        assert episode.advantages is not None
        path = self.paths[leaf]
        if scales is None:
            scales = [self.reach_weights[stretch] for stretch in path]
        # A stretch is a part of the tree without a branching, and `leaves_below` has the answers through it.
        # A shared stretch is trained with the first answer through it. The stretches that an earlier answer
        # goes through come before all others of the path, so their tokens are the first ones of the row.
        shared_stretches = [stretch for stretch in path if self.leaves_below[stretch][0] != leaf]
        shared_tokens = sum(self.lengths[stretch] for stretch in shared_stretches)
        trained = episode.trained.copy()
        trained[:shared_tokens] = False
        lengths = [self.lengths[stretch] for stretch in path]
        scales_T: Column = np.repeat(np.array(scales, np.float64), lengths)
        return replace(episode, trained=trained, advantages=episode.advantages * scales_T)


def _number_stretches(tree: Tree) -> list[int]:
    """Returns the number of each node's stretch, which is the number of the stretch's first node.

    A stretch is a chain of nodes through which the same answers go. A node begins a stretch in three cases:
    it follows the prompt, its parent has other children, or an answer ends with its parent.
    """
    children = Counter(node.parent for node in tree.nodes)
    ends = set(tree._ends)
    stretch_of_node: list[int] = []
    for number, (_, parent) in enumerate(tree.nodes):
        begins_stretch = parent == ROOT or children[parent] > 1 or parent in ends
        stretch_of_node.append(number if begins_stretch else stretch_of_node[parent])
    return stretch_of_node


@lru_cache(maxsize=1)
def sharing_of(tree: Tree) -> Sharing:
    """Returns the stretches that the answers of a tree share: chains of nodes without a branching.

    Some credit calls this function once for each answer of a tree. So the last result is cached, and the tree
    must have all its answers already: the cached result lacks answers that are added later.
    """
    return Sharing.of(tree)
