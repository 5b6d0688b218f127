"""From what graders said to what answers earn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from treetune.rollouts.base import Shaping
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean, pooled
from treetune.tree import Tree, answers_of, with_answers
from treetune.vocabulary import Metrics


def shaped(
    context: RolloutContext, shapings: Sequence[Shaping], trees: Sequence[Tree]
) -> tuple[list[Tree], Metrics]:
    """This rank's trees, each answer with the sum of all bonuses, and the metrics of all ranks.

    ``shaping/<label>`` is a part's mean bonus, ``<label>/…`` what else it tells; ``episodes/reward`` becomes
    the mean of what credit is given for, while ``episodes/score`` stays what graders said. Collective.
    """
    if not shapings:
        return list(trees), {}
    trajectories = answers_of(trees)
    assessed = {shaping.label: shaping.assess(context, trajectories) for shaping in shapings}
    bonuses = {label: of_label for label, (of_label, _) in assessed.items()}
    earned = [
        replace(trajectory, bonus=math.fsum(of_trajectory))
        for trajectory, *of_trajectory in zip(trajectories, *bonuses.values(), strict=True)
    ]
    columns: dict[str, Sequence[float]] = {f"shaping/{label}": bonuses[label] for label in bonuses}
    for label, (_, measured) in assessed.items():
        columns |= {f"{label}/{name}": values for name, values in measured.items()}
    columns["episodes/reward"] = [trajectory.reward for trajectory in earned]
    everyones = pooled(context, "shaping-metrics", columns)
    return with_answers(trees, earned), {name: mean(values) for name, values in everyones.items() if values}
