"""From graded answers to the episodes that are trained on: shaping, credit, selection."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treetune.rollouts import unavailable
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import domain_advantages
from treetune.rollouts.shaping import shaped
from treetune.runtime.base import PolicyIteration
from treetune.runtime.columns_of_ranks import episodes_on_first
from treetune.trainers.ranks import Ranks
from treetune.tree import Tree
from treetune.vocabulary import Episode, Metrics


def credited(
    ranks: Ranks, config: PolicyIteration, context: RolloutContext, trees: Sequence[Tree]
) -> tuple[list[Episode], Metrics]:
    """What all ranks made of their `trees`: the episodes that the selection keeps, on the first rank and none
    on the others, and the metrics, on every rank.

    Raises NothingGraded where no problem is left of which enough answers could be graded. Collective.
    """
    metrics: Metrics = {}
    if config.rollout.needs_engine:  # what a teacher wrote is learnt from whatever it is worth
        trees, metrics = unavailable.graded(context, trees, config.credit)
    trees, shaping_metrics = shaped(context, config.shaping, trees)
    episodes, credit_metrics = config.credit.assign(context, trees)
    for episode in episodes:
        if episode.advantages is not None and not np.isfinite(episode.advantages).all():
            raise ValueError(
                f"iteration {context.iteration + 1}: the credit {type(config.credit).__name__} gave the"
                f" answer {episode.trajectory!r} advantages that are no numbers (NaN or infinite), and"
                " nothing was trained on them: look for a division by zero in it"
            )
    count = sum(ranks.exchange("number of episodes", len(episodes)))
    if not count and (metrics or "credit/unvalued" in credit_metrics):
        raise unavailable.NothingGraded(
            f"iteration {context.iteration + 1}: so few answers and continuations could be graded that no"
            " problem is left to learn from. The same command asks for grades again, and samples none again"
        )
    everyones = episodes_on_first(ranks, "episodes", episodes)
    selected: list[Episode] = []
    of_all: Metrics = {}
    if ranks.is_first:
        of_all = domain_advantages(everyones)
        selected, selection_metrics = config.selection.select(context, everyones)
        of_all |= selection_metrics
    of_all = ranks.from_first("selection", of_all)
    return selected, metrics | shaping_metrics | credit_metrics | of_all
