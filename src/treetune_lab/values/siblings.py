"""Values for nothing: what the other answers earned that went through the same state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from treetune.contracts import Answers, Need, OneLine
from treetune.rollouts.base import THREADS_REMEDY
from treetune.rollouts.metrics import mean
from treetune.rollouts.values.valuation import (
    AlongAnswer,
    Place,
    Valuation,
    ValueEstimator,
    mean_of,
)
from treetune.tree import Tree
from treetune_lab.trees.sharing import sharing_of


@ValueEstimator.register("siblings")
@dataclass(frozen=True, kw_only=True)
class Siblings(ValueEstimator):
    """The mean reward of the other answers below a state, without the answer's own (TEMPO, arXiv:2509.18314;
    RTMC, arXiv:2604.11037). Nothing is sampled.

    Behind the last state that an answer shares with another there are no values: what follows is one step,
    which earned the answer's reward. With no shared state but the prompt this is RLOO. Unbiased: where others
    went on from a state, they are samples of its value, and where none did, the reward is one.

    In a sampled tree (rollout ``tree``) each other branch at a state is one sample."""

    unbiased = True

    needs = (
        Need(Answers(2), "it compares each answer with the others to its problem"),
        Need(OneLine(turns=True), "it looks for equal beginnings", THREADS_REMEDY),
    )

    @property
    def continues(self) -> bool:
        return False

    def values(self, valuation: Valuation) -> list[list[AlongAnswer]]:
        return [
            [[mean_of(rewards) for rewards in of_answer] for of_answer in of_tree]
            for of_tree in rewards_of_others(valuation)
        ]


def rewards_of_others(valuation: Valuation) -> list[list[list[list[float]]]]:
    """Of each tree, answer and state of its way: what the other answers earned that went through it."""
    found: list[list[list[list[float]]]] = []
    for tree, ways in zip(valuation.trees, valuation.ways, strict=True):
        shared = shared_tokens(tree)
        found.append([[list(rewards_below(tree, shared, at)) for _, at in way] for way in ways])
    return found


def rewards_below(tree: Tree, shared: list[list[int]], at: Place) -> Iterator[float]:
    """What the other answers earned that begin as an answer does up to a place on its way.

    Where answers grew out of each other, those that also share what follows the place depend on what the
    answer did there, and are left out; of every other branch it is the mean, weighted by what its answers
    reach.
    """
    alike = [place for place in range(len(tree.leaves)) if shared[at.leaf][place] >= at.length]
    if not tree.forked:
        yield from (tree.leaves[place].reward for place in alike if place != at.leaf)
        return
    sharing = sharing_of(tree)
    branches: dict[int, list[int]] = {}
    for place in alike:
        branches.setdefault(sharing.branch_at(place, at.length), []).append(place)
    branches.pop(sharing.branch_at(at.leaf, at.length), None)
    for places in branches.values():
        reached = [sharing.reach[sharing.paths[place][-1]] for place in places]
        yield mean([tree.leaves[place].reward for place in places], reached)


def shared_tokens(tree: Tree) -> list[list[int]]:
    """How many tokens each pair of a tree's answers begins with alike. Answers in one line."""
    import numpy as np

    ids = [leaf.response_ids for leaf in tree.leaves]
    shared = [[0] * len(ids) for _ in ids]
    for one in range(len(ids)):
        for other in range(one + 1, len(ids)):
            length = min(len(ids[one]), len(ids[other]))
            differ = np.flatnonzero(ids[one][:length] != ids[other][:length])
            shared[one][other] = shared[other][one] = int(differ[0]) if len(differ) else length
    return shared
