"""Advantages of steps and values of their states, along the answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev, quantiles
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Advantages, Need
from treetune.credit.vineppo import step_advantages
from treetune.lab.analyzers.figures import COLOURS, legend_below, panels
from treetune.lab.analyzers.points import OfIterations, evenly
from treetune.runtime.analysis import Analyzer, Findings
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import ExperimentDirectory
from treetune.vocabulary import Episode, joined

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from treetune.runtime.sampler import Sampler
    from treetune.runtime.session import Session

QUANTILES = (5, 25, 50, 75, 95)

Row = Mapping[str, Any]


@Analyzer.register("advantage_distribution")
@dataclass(frozen=True, kw_only=True)
class AdvantageDistribution(OfIterations):
    """Advantages of the stored episodes' steps, as the credit gave them (before normalisation), and
    values of the states before them where the credit makes values, by relative step.

    Step i of n lies at i / n; `bins` parts that range. With a critic, values are those of the
    checkpoint whose weights sampled the iteration, and a step is worth the difference of its ends'
    values (and at the end the reward). What has no value or no advantage is counted and left out.
    """

    bins: Annotated[int, Gt(0)] = 5
    histogram_bins: Annotated[int, Gt(1)] = 40
    """Bars of the figure's histogram of advantages."""

    file = "episodes.arrow"

    needs = (
        Need(Advantages(), "it shows them", "leave the analysis out, or choose a credit such as 'group'"),
    )

    @override
    def analyse(self, sampler: Sampler, points: Sequence[int], work: Path) -> Findings:
        from treetune.rollouts.storage import read_episodes

        session, rows = sampler.session, list[Row]()
        counts = {"episodes": 0, "episodes_without_advantages": 0, "episodes_without_values": 0}
        for point in points:
            episodes = read_episodes(session.directory.iteration(point) / self.file)
            values = self._values(session, point, episodes)
            for episode, of_states in zip(episodes, values, strict=True):
                advantages = steps_advantages(
                    episode, of_states if _leaves_values_to_trainer(session.config) else None
                )
                counts["episodes"] += 1
                counts["episodes_without_advantages"] += advantages is None
                counts["episodes_without_values"] += of_states is None
                rows += self._rows(point, episode, advantages, of_states)
        if counts["episodes"] == counts["episodes_without_advantages"]:
            raise ValueError(
                f"none of the {counts['episodes']} episodes in {session.directory.path} has advantages:"
                f" the credit gives none ({type(session.config.credit).__name__})"
            )
        return Findings({**counts, **self.summarise(rows)}, rows)

    @override
    def points(self, config: PolicyIteration, directory: ExperimentDirectory) -> list[int]:
        if not _leaves_values_to_trainer(config) or self.iterations != "all":
            return super().points(config, directory)
        # Without its critic an iteration says nothing, and the critic of the start has learnt nothing.
        critics = [n for n in directory.checkpoints() if (directory.checkpoint(n) / "critic").is_dir()]
        return evenly([i for i in self.kept(directory) if i in critics] or [0], self.at_most)

    @staticmethod
    def _values(session: Session, point: int, episodes: Sequence[Episode]) -> list[tuple[float, ...] | None]:
        """Values of the states before each episode's steps; None for an episode without any."""
        critic_is_there = point == 0 or (session.directory.checkpoint(point) / "critic").is_dir()
        if not _leaves_values_to_trainer(session.config) or not critic_is_there:
            return [episode.step_values for episode in episodes]
        from treetune.lab.analyzers.stored import critic_at, state_values

        starts = [(0, *episode.step_ends[:-1]) for episode in episodes]
        states = [
            joined([e.prompt_ids, e.response_ids[:start]])
            for e, own in zip(episodes, starts)
            for start in own
        ]
        values = iter(state_values(critic_at(session, point), session.ranks.device, states))
        return [tuple(itertools.islice(values, len(own))) for own in starts]

    @staticmethod
    def _rows(
        point: int,
        episode: Episode,
        advantages: Sequence[float | None] | None,
        values: Sequence[float] | None,
    ) -> list[Row]:
        count = len(episode.step_ends)
        return [
            {
                "iteration": point,
                "answer": episode.trajectory,
                "step": i,
                "steps": count,
                "reward": episode.reward,
                "advantage": None if advantages is None else advantages[i],
                "value": None if values is None or i >= len(values) else values[i],
            }
            for i in range(count)
        ]

    @override
    def summarise(self, rows: Sequence[Row]) -> dict[str, Any]:
        edges = [i / self.bins for i in range(self.bins + 1)]
        parts: list[list[Row]] = [[] for _ in range(self.bins)]
        for row in rows:
            parts[row["step"] * self.bins // row["steps"]].append(row)
        numbers: dict[str, Any] = {"bins": edges}
        for what in ("advantage", "value"):
            numbers[what] = {
                "all": describe([row[what] for row in rows]),
                "by_position": [describe([row[what] for row in part]) for part in parts],
                "histogram": self._histogram([row[what] for row in rows if row[what] is not None]),
            }
        return numbers

    def _histogram(self, values: Sequence[float]) -> dict[str, list[float]] | None:
        import numpy as np

        if not values:
            return None
        counts, edges = np.histogram(values, bins=self.histogram_bins)
        return {"edges": edges.tolist(), "shares": (counts / len(values)).tolist()}

    @staticmethod
    @override
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
        figure, (shares, along, values) = panels(
            ["Advantages of steps", "… by relative step: median and 5 – 95 %", "Values by relative step"]
        )
        for i, (label, result) in enumerate(results.items()):
            numbers, colour = result["numbers"], COLOURS[i % len(COLOURS)]
            histogram = numbers["advantage"]["histogram"]
            shares.stairs(histogram["shares"], histogram["edges"], color=colour, label=label)
            for axes, what in ((along, "advantage"), (values, "value")):
                centres = [(a + b) / 2 for a, b in itertools.pairwise(numbers["bins"])]
                known = [(x, d) for x, d in zip(centres, numbers[what]["by_position"]) if d["count"]]
                xs = [x for x, _ in known]
                axes.plot(
                    xs, [d["quantiles"]["50"] for _, d in known], color=colour, marker="o", markersize=4
                )
                low, high = ([d["quantiles"][q] for _, d in known] for q in ("5", "95"))
                axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
        shares.set_yscale("log")
        shares.set_ylabel("share of steps", fontsize=8)
        shares.set_xlabel("advantage", fontsize=8)
        for axes in (along, values):
            axes.set_xlim(0, 1)
            axes.set_xlabel("relative step", fontsize=8)
        legend_below(figure, shares)
        return figure


def _leaves_values_to_trainer(config: PolicyIteration) -> bool:
    """Returns whether the episodes lack values and advantages, which the critic gave while training."""
    return config.credit.needs_critic and not config.credit.asks_critic


def steps_advantages(
    episode: Episode, critic_values: Sequence[float] | None
) -> Sequence[float | None] | None:
    """Returns one advantage for each step; None for a step without a trained token, and for an episode whose
    credit gives none."""
    if episode.advantages is None:
        return None if critic_values is None else step_advantages(critic_values, episode.reward)
    advantages: list[float | None] = []
    for start, end in itertools.pairwise((0, *episode.step_ends)):
        trained = episode.advantages[start:end][episode.trained[start:end]]
        advantages.append(float(trained[-1]) if len(trained) else None)
    return advantages


def describe(values: Sequence[float | None]) -> dict[str, Any]:
    """Count, missing ones, mean, standard deviation, quantiles and the share of zeros."""
    known = [value for value in values if value is not None]
    if not known:
        return {"count": 0, "missing": len(values)}
    cuts = quantiles(known, n=100, method="inclusive") if len(known) > 1 else known * 99
    return {
        "count": len(known),
        "missing": len(values) - len(known),
        "mean": fmean(known),
        "deviation": pstdev(known),
        "zero": math.fsum(value == 0.0 for value in known) / len(known),
        "quantiles": {str(q): cuts[q - 1] for q in QUANTILES},
    }
