"""Trains on problems that are neither too easy nor too hard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treetune.episode_generators.base import GenerationContext, Selection
from treetune.episode_generators.selection.all import selection_metrics
from treetune.vocabulary import Episode, Metrics


@Selection.register("mixed_groups")
@dataclass(frozen=True, kw_only=True)
class MixedGroups(Selection):
    """Drops groups in which every answer scored the same: relative to them, nothing was better.

    The filter of DAPO's dynamic sampling (Yu et al., arXiv:2503.14476, section 3.2), without its
    sampling anew.
    """

    def select(
        self, context: GenerationContext, episodes: Sequence[Episode]
    ) -> tuple[list[Episode], Metrics]:
        scores: dict[str, set[float]] = {}
        for episode in episodes:
            scores.setdefault(episode.group, set()).add(episode.score)
        kept = [episode for episode in episodes if len(scores[episode.group]) > 1]
        return kept, selection_metrics(episodes, kept)
