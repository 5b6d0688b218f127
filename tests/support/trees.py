"""Turn the trees of a rollout into a list of answers."""

from __future__ import annotations

from collections.abc import Sequence

from treetune.tree import Tree, answers_of
from treetune.vocabulary import Metrics, Trajectory


def answered(rolled_out: tuple[Sequence[Tree], Metrics]) -> tuple[list[Trajectory], Metrics]:
    """Return the answers and the metrics of a rollout's result."""
    trees, metrics = rolled_out
    return answers_of(trees), metrics
