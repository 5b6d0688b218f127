"""Trees as tests look at them: their answers, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from treetune.tree import Tree, answers_of
from treetune.vocabulary import Metrics, Trajectory


def answered(rolled_out: tuple[Sequence[Tree], Metrics]) -> tuple[list[Trajectory], Metrics]:
    """What a rollout returned, as answers and metrics."""
    trees, metrics = rolled_out
    return answers_of(trees), metrics
