"""Trains on everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from treetune.contracts import Experiment, Finding, WholeBatch
from treetune.rollouts.base import Selection
from treetune.rollouts.context import RolloutContext
from treetune.vocabulary import Episode, Metrics


def selection_metrics(episodes: Sequence[Episode], kept: Sequence[Episode]) -> Metrics:
    """How many episodes and groups were there, and how many are trained on."""
    return {
        "selection/episodes": float(len(episodes)),
        "selection/kept": float(len(kept)),
        "selection/groups": float(len({episode.group for episode in episodes})),
        "selection/groups_kept": float(len({episode.group for episode in kept})),
    }


def unreachable(threshold: float, experiment: Experiment) -> Iterator[Finding]:
    """What is wrong where no answer can earn what is asked for."""
    best = experiment.task.grader.best
    if threshold > best:
        yield Finding(
            f"reward_threshold is {threshold:g}, and the best answer scores {best:g}: nothing would be left",
            "reward_threshold",
            f"lower it to {best:g} or less",
        )


@Selection.register("all")
@dataclass(frozen=True, kw_only=True)
class All(Selection):
    """Every episode."""

    gives = (WholeBatch(),)

    def select(self, context: RolloutContext, episodes: Sequence[Episode]) -> tuple[list[Episode], Metrics]:
        return list(episodes), selection_metrics(episodes, episodes)
