"""Trains on some tokens of each answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Gt, Le

from treetune.contracts import Advantages, Need, SampledAnswers
from treetune.rollouts.base import Selection
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.selection.all import selection_metrics
from treetune.vocabulary import Episode, Metrics


@Selection.register("tokens")
@dataclass(frozen=True, kw_only=True)
class SomeTokens(Selection):
    """Every answer, and of its tokens those that were sampled with a probability `below` this and have an
    advantage other than 0; answers of which none is left are left out. The others are context: nothing is
    learnt from them, and no mean or normalisation over tokens counts them.

    SPO's (Guo et al., arXiv:2505.23564, and its public code, which masks what was sampled with 0.9 or more
    and drops segments without advantage). ``selection/tokens`` is the share of tokens that is kept.
    """

    below: Annotated[float, Gt(0), Le(1)] = 0.9

    needs = (
        Need(Advantages(before_training=True), "it leaves out tokens whose advantage is 0"),
        Need(SampledAnswers(), "it looks at the probabilities that tokens were sampled with"),
    )

    def select(self, context: RolloutContext, episodes: Sequence[Episode]) -> tuple[list[Episode], Metrics]:
        kept = []
        for episode in episodes:
            assert episode.advantages is not None and episode.behaviour_logprobs is not None
            open_T = (episode.behaviour_logprobs < math.log(self.below)) & (episode.advantages != 0)
            trained = episode.trained & open_T
            if trained.any():
                kept.append(replace(episode, trained=trained))
        metrics = selection_metrics(episodes, kept)
        if before := sum(int(episode.trained.sum()) for episode in episodes):
            metrics["selection/tokens"] = sum(int(episode.trained.sum()) for episode in kept) / before
        return kept, metrics
