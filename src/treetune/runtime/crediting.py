"""From graded answers to the episodes that are trained on: shaping, credit, selection."""

from __future__ import annotations

from collections.abc import Sequence

from treetune.episode_generators import unavailable
from treetune.episode_generators.base import GenerationContext
from treetune.episode_generators.domains import domain_advantages
from treetune.episode_generators.shaping.applied import shaped
from treetune.runtime.base import PolicyIteration
from treetune.runtime.columns_of_ranks import episodes_everywhere
from treetune.trainers.ranks import Ranks
from treetune.tree import Tree
from treetune.vocabulary import Episode, Metrics


def credited(
    ranks: Ranks, config: PolicyIteration, context: GenerationContext, trees: Sequence[Tree]
) -> tuple[list[Episode], Metrics]:
    """All ranks' episodes that the selection keeps of this rank's trees, and the metrics of what was done.

    Raises NothingGraded where no problem is left of which enough answers could be graded. Collective.
    """
    metrics: Metrics = {}
    if config.rollout.needs_engine:  # what a teacher wrote is learnt from whatever it is worth
        trees, metrics = unavailable.graded(context, trees, config.credit)
    trees, shaping_metrics = shaped(context, config.shaping, trees)
    episodes, credit_metrics = config.credit.assign(context, trees)
    everyones = episodes_everywhere(ranks, "episodes", episodes)
    if not everyones and (metrics or "credit/unvalued" in credit_metrics):
        raise unavailable.NothingGraded(
            f"iteration {context.iteration + 1}: so few answers and continuations could be graded that no"
            " problem is left to learn from. The same command asks for grades again, and samples none again"
        )
    credit_metrics |= domain_advantages(everyones)
    selected, selection_metrics = config.selection.select(context, everyones)
    return selected, metrics | shaping_metrics | credit_metrics | selection_metrics
