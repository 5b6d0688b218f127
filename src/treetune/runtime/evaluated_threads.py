"""What an evaluation says of threads: a number of each in a row of answers, means in the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treetune.episode_generators.metrics import mean
from treetune.episode_generators.threads.numbers import NAMES, statistics_of
from treetune.vocabulary import Metrics, TextCodec, Trajectory

MAIN = (
    "total_num_tokens",
    "num_tokens_in_the_longest_thread",
    "with_parallel",
    "acceleration_ratio",
    "format_correct",
    "seconds_critical",
)
"""What becomes a metric of the run; all of it is in the summary."""

RIGHT = "_right"
"""Ends the name of a mean over right answers alone."""


def answers_threads(trajectories: Sequence[Trajectory], codec: TextCodec) -> list[dict[str, float]]:
    """The numbers of each answer (`statistics_of`); none of a problem that was not asked, and none at all
    where the tokenizer has no tags of threads."""
    numbers = statistics_of(trajectories, codec)
    return [own if trajectory.segments else {} for own, trajectory in zip(numbers, trajectories, strict=True)]


def threads_summary(
    trajectories: Sequence[Trajectory], numbers: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """The mean of each number over the answers that have it, and as ``<name>_right`` over right ones."""
    means = {}
    for ending, kept in (("", numbers), (RIGHT, _of_right(trajectories, numbers))):
        for name in NAMES:
            if values := [own[name] for own in kept if name in own]:
                means[name + ending] = mean(values)
    return means


def threads_metrics(label: str, summary: Mapping[str, Any]) -> Metrics:
    """The main ones of a set's summary, as metrics; none where it has no threads."""
    names = [name + ending for name in MAIN for ending in ("", RIGHT)]
    means = summary.get("threads", {})
    return {f"evaluation/{label}/threads/{name}": means[name] for name in names if name in means}


def _of_right(
    trajectories: Sequence[Trajectory], numbers: Sequence[Mapping[str, float]]
) -> list[Mapping[str, float]]:
    return [own for own, trajectory in zip(numbers, trajectories, strict=True) if trajectory.grade.right]
