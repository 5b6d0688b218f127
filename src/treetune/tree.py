"""A problem's tree: what was sampled and injected for it, from its prompt to graded answers.

Rollouts grow it, credit gives its states values and its answers advantages, rows for training are cut from
it. It is also the problem's group: its leaves are what answers are compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from treetune.vocabulary import (
    Branch,
    Column,
    Episode,
    FinishReason,
    Fork,
    Grade,
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

    Equal prefixes are one state, whoever went through them: the node is the one that came first.
    """

    problem: str
    node: int
    offset: int


@dataclass(eq=False)
class Tree:
    """`nodes` are in the order in which they came, `leaves` are the answers; `values` of states are filled
    in by credit that values them."""

    problem: Problem
    prompt_ids: TokenIds
    nodes: list[Node] = field(default_factory=list)
    leaves: list[Trajectory] = field(default_factory=list)
    values: dict[State, float] = field(default_factory=dict)
    _ends: list[int] = field(default_factory=list)
    """Of each leaf its last node."""
    _index: _Prefixes | None = None

    def add(self, segment: Segment, parent: int = ROOT) -> int:
        """The number of the new node."""
        self.nodes.append(Node(segment, parent))
        return len(self.nodes) - 1

    def end(
        self,
        node: int,
        *,
        finish_reason: FinishReason,
        text: str,
        grade: Grade,
        step_ends: Sequence[int],
        numbers: Mapping[str, float] | None = None,
    ) -> Trajectory:
        """The path to the node becomes the next answer to the problem."""
        trajectory = Trajectory(
            problem=self.problem,
            sample=len(self.leaves),
            prompt_ids=self.prompt_ids,
            segments=tuple(self.nodes[number].segment for number in self.path(node)),
            finish_reason=finish_reason,
            text=text,
            grade=grade,
            step_ends=tuple(step_ends),
            numbers=numbers or {},
        )
        self.leaves.append(trajectory)
        self._ends.append(node)
        return trajectory

    def take(self, trajectory: Trajectory) -> None:
        """Adds an answer that was made elsewhere, segment by segment. Where the answer that it grew out of is
        there, it goes through that one's nodes up to their fork."""
        shared = self._shared(trajectory.fork)
        node = shared[-1] if shared else ROOT
        for segment in trajectory.segments[len(shared) :]:
            node = self.add(segment, node)
        self.leaves.append(trajectory)
        self._ends.append(node)

    @property
    def sampled_tokens(self) -> int:
        """What the policy sampled for it, each node once, however many answers go through it."""
        return sum(len(segment.token_ids) for segment, _ in self.nodes if segment.origin == "sampled")

    def _shared(self, fork: Fork | None) -> list[int]:
        """The nodes that lie before a fork; none where the answer with it isn't there."""
        origin = [] if fork is None else [end for leaf, end in self._answers() if leaf.sample == fork.sample]
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

    def _answers(self) -> Iterator[tuple[Trajectory, int]]:
        """Each answer and its last node."""
        return zip(self.leaves, self._ends, strict=True)

    @property
    def paths(self) -> list[list[int]]:
        """Of each answer the numbers of its nodes, from the prompt on."""
        return [self.path(end) for end in self._ends]

    @property
    def forked(self) -> bool:
        """Whether answers grew out of each other, so that they share tokens that were sampled once."""
        return any(leaf.fork is not None for leaf in self.leaves)

    def keeping(self, leaves: Sequence[int]) -> Tree:
        """The tree with some of its answers alone, given their places. All nodes stay as they are."""
        return replace(
            self,
            leaves=[self.leaves[place] for place in leaves],
            _ends=[self._ends[place] for place in leaves],
            _index=None,
        )

    def path(self, node: int) -> list[int]:
        """The numbers of the nodes from the prompt to this one."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.nodes[node].parent
        return path[::-1]

    def state(self, leaf: int, length: int) -> State:
        """The state of an answer after so many of its tokens, given the answer's place among `leaves`."""
        if self._index is None:
            self._index = _Prefixes()
        for end in self._ends[len(self._index) :]:
            self._index.add([self.nodes[number].segment for number in self.path(end)])
        offset = length
        path = self.path(self._ends[self._index.first(leaf, length)])
        for number in path:
            own = len(self.nodes[number].segment.token_ids)
            if 0 < offset <= own:
                return State(self.problem.id, number, offset)
            offset -= own
        assert length == 0, f"{self.problem.id}: its answer {leaf} has fewer than {length} tokens"
        return State(self.problem.id, ROOT, 0)

    def way(self, state: State) -> list[Segment]:
        """The segments up to a state, of the last one what belongs to it."""
        if state.node == ROOT:
            return []
        *before, last = (self.nodes[number].segment for number in self.path(state.node))
        logprobs = None if last.logprobs is None else last.logprobs[: state.offset]
        return [*before, replace(last, token_ids=last.token_ids[: state.offset], logprobs=logprobs)]

    def prefix_ids(self, state: State) -> TokenIds:
        """The state's response tokens, without the prompt's."""
        return joined([segment.token_ids for segment in self.way(state)])

    def leaves_below(self, state: State) -> list[Trajectory]:
        """The answers that went through a state."""
        length = len(self.prefix_ids(state))
        return [
            leaf
            for place, leaf in enumerate(self.leaves)
            if len(leaf.response_ids) >= length and self.state(place, length) == state
        ]

    def rows(self, leaf: int) -> list[tuple[TokenIds, Column]]:
        """The training rows of an answer; see `training_rows`."""
        import numpy as np

        segments = self.leaves[leaf].segments
        parts = [(s.branch, s.token_ids, np.full(len(s.token_ids), s.origin == "sampled")) for s in segments]
        return list(training_rows(self.prompt_ids, parts))


def trees_of(trajectories: Iterable[Trajectory]) -> list[Tree]:
    """Answers as the trees of their problems, in the order in which these appear."""
    trees: dict[str, Tree] = {}
    for one in trajectories:
        trees.setdefault(one.problem.id, Tree(one.problem, one.prompt_ids)).take(one)
    return list(trees.values())


def answers_of(trees: Iterable[Tree]) -> list[Trajectory]:
    """All answers, tree after tree."""
    return [leaf for tree in trees for leaf in tree.leaves]


def with_answers(trees: Sequence[Tree], answers: Sequence[Trajectory]) -> list[Tree]:
    """The same trees, with these answers in place of theirs, one for one."""
    left = iter(answers)
    return [replace(tree, leaves=[next(left) for _ in tree.leaves]) for tree in trees]


def training_rows(
    prompt_ids: TokenIds, parts: Sequence[tuple[Branch, TokenIds, Column]]
) -> Iterator[tuple[TokenIds, Column]]:
    """What a model runs over to train the parts of an answer (their branch, token ids, and which of these are
    trained): for each with trained tokens the prompt, the earlier parts that it saw, and itself; and the
    positions in that row whose next token is trained.
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


class _Prefixes:
    """The answers of a tree by what they begin with alike. Tokens on different branches, or of which one
    was sampled and the other injected, are not alike."""

    def __init__(self) -> None:
        from treetune.prefix_tree import GrowingTree

        self._tree: GrowingTree = GrowingTree()
        self._marks: dict[tuple[Branch, str], int] = {}

    def __len__(self) -> int:
        return self._tree.count

    def add(self, segments: Sequence[Segment]) -> None:
        import numpy as np

        keys: list[Column] = []
        for segment in segments:
            mark = self._marks.setdefault((segment.branch, segment.origin), len(self._marks))
            keys.append(segment.token_ids.astype(np.int64) + (mark << 32))
        self._tree.add(joined(keys) if keys else token_array(()).astype(np.int64))

    def first(self, answer: int, length: int) -> int:
        """The first answer with the same `length` tokens."""
        return self._tree.first(answer, length)
