"""The distribution of the steps' advantages and values, along the answer."""

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
from treetune.lab.analyzers.figures import FIGURE_COLOURS, draw_legend_below, make_panels
from treetune.lab.analyzers.points import OfIterations, spread_evenly
from treetune.runtime.analysis import Analyzer, Findings
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import EPISODES, ExperimentDirectory
from treetune.vocabulary import Episode, concatenate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from treetune.runtime.resources import RunResources
    from treetune.runtime.session import Session

PERCENTS_OF_QUANTILES = (5, 25, 50, 75, 95)

AdvantageRow = Mapping[str, Any]


@Analyzer.register("advantage_distribution")
@dataclass(frozen=True, kw_only=True)
class AdvantageDistribution(OfIterations):
    """Shows, by relative step, the advantages of the steps of stored episodes before normalisation. Where
    credit estimates values, it also shows the values of the states before the steps.

    Step i of n is at i / n. With a critic, values are those of the checkpoint whose weights sampled the
    iteration, and a step's advantage is the difference of the values after and before it, where the reward is
    the value at the end. Episodes without values or advantages are counted and left out.
    """

    bins: Annotated[int, Gt(0)] = 5
    """The number of equal parts of the range of relative steps, which is from 0 to 1."""
    histogram_bins: Annotated[int, Gt(1)] = 40
    """The number of bars in the figure's histogram of advantages."""

    file = EPISODES

    needs = (
        Need(Advantages(), "it shows them", "leave the analysis out, or choose a credit such as 'group'"),
    )

    @override
    def analyse(self, resources: RunResources, points: Sequence[int], work: Path) -> Findings:
        from treetune.rollouts.storage import read_episodes

        session = resources.session
        rows: list[AdvantageRow] = []
        counts = {"episodes": 0, "episodes_without_advantages": 0, "episodes_without_values": 0}
        for point in points:
            episodes = read_episodes(session.directory.iteration_folder(point) / self.file)
            values = self._values(session, point, episodes)
            for episode, state_values in zip(episodes, values, strict=True):
                # If credit leaves values to the trainer's critic, the episodes have no advantages. These are
                # then computed from the state values, which `_values` has taken from the critic.
                critic_values = state_values if _leaves_values_to_trainer(session.config) else None
                advantages = advantages_of_episode(episode, critic_values)
                counts["episodes"] += 1
                counts["episodes_without_advantages"] += advantages is None
                counts["episodes_without_values"] += state_values is None
                rows += self._rows(point, episode, advantages, state_values)
        if counts["episodes"] == counts["episodes_without_advantages"]:
            raise ValueError(
                f"none of the {counts['episodes']} episodes in {session.directory.path} has advantages:"
                f" the credit gives none ({type(session.config.credit).__name__})"
            )
        return Findings({**counts, **self.summarise(rows)}, rows)

    @override
    def points(self, config: PolicyIteration, directory: ExperimentDirectory) -> list[int]:
        # Without a critic, every stored iteration will do. With a critic, a choice of the user's is followed.
        if not _leaves_values_to_trainer(config) or self.iterations != "all":
            return super().points(config, directory)
        # An iteration needs the critic of its checkpoint. The critic of the start (0) has learnt nothing, so
        # iteration 0 is taken only where no other iteration has a critic.
        points_with_critic = []
        complete_checkpoints = directory.checkpoints()  # an incomplete one may have a critic, too
        for point in self.stored_iterations(directory):
            if point in complete_checkpoints and (directory.checkpoint_folder(point) / "critic").is_dir():
                points_with_critic.append(point)
        return spread_evenly(points_with_critic or [0], self.at_most)

    @staticmethod
    def _values(session: Session, point: int, episodes: Sequence[Episode]) -> list[tuple[float, ...] | None]:
        """Returns for each episode the values of the states before its steps, or None if it has no values.

        Args:
            point: The number of the iteration that sampled the episodes, from 0. Its weights are those of the
                checkpoint with this number.
        """
        stored_values = [episode.step_values for episode in episodes]
        if not _leaves_values_to_trainer(session.config):
            return stored_values
        # The values must be computed with the critic. Checkpoint 0 isn't written: the critic at the start is
        # made anew from the start model and the seed.
        if point and not (session.directory.checkpoint_folder(point) / "critic").is_dir():
            return stored_values
        from treetune.lab.analyzers.stored import critic_at, state_values
        from treetune.trainer.tokens import EpisodesOfCritic

        states = []
        for episode in EpisodesOfCritic(episodes):  # with the critic's prompt, where it has its own
            for start in (0, *episode.step_ends[:-1]):
                states.append(concatenate([episode.prompt_ids, episode.response_ids[:start]]))
        values = iter(state_values(critic_at(session, point), session.ranks.device, states))
        return [tuple(itertools.islice(values, len(episode.step_ends))) for episode in episodes]

    @staticmethod
    def _rows(
        point: int,
        episode: Episode,
        advantages: Sequence[float | None] | None,
        values: Sequence[float] | None,
    ) -> list[AdvantageRow]:
        """Returns a row for each step of an episode. Steps after the last of `values` have the value None."""
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
    def summarise(self, rows: Sequence[AdvantageRow]) -> dict[str, Any]:
        # Edges of the bins of relative steps: the first of n steps is at 0, and the last at (n − 1) / n.
        edges = [i / self.bins for i in range(self.bins + 1)]
        rows_by_bin: list[list[AdvantageRow]] = [[] for _ in range(self.bins)]
        for row in rows:
            rows_by_bin[row["step"] * self.bins // row["steps"]].append(row)
        numbers: dict[str, Any] = {"bins": edges}
        for kind in ("advantage", "value"):
            by_position = []
            for rows_of_bin in rows_by_bin:
                by_position.append(describe([row[kind] for row in rows_of_bin]))
            numbers[kind] = {
                "all": describe([row[kind] for row in rows]),
                "by_position": by_position,
                "histogram": self._make_histogram([row[kind] for row in rows if row[kind] is not None]),
            }
        return numbers

    def _make_histogram(self, values: Sequence[float]) -> dict[str, list[float]] | None:
        import numpy as np

        if not values:
            return None
        counts, edges = np.histogram(values, bins=self.histogram_bins)
        return {"edges": edges.tolist(), "shares": (counts / len(values)).tolist()}

    @staticmethod
    @override
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
        figure, (histogram_panel, advantage_panel, value_panel) = make_panels(
            ["Advantages of steps", "… by relative step: median and 5 – 95 %", "Values by relative step"]
        )
        for i, (label, result) in enumerate(results.items()):
            numbers, colour = result["numbers"], FIGURE_COLOURS[i % len(FIGURE_COLOURS)]
            histogram = numbers["advantage"]["histogram"]
            if histogram is not None:  # None: no step has an advantage
                histogram_panel.stairs(histogram["shares"], histogram["edges"], color=colour, label=label)
            for panel, kind in ((advantage_panel, "advantage"), (value_panel, "value")):
                xs, low, median, high = [], [], [], []
                edges = itertools.pairwise(numbers["bins"])
                for (left, right), of_bin in zip(edges, numbers[kind]["by_position"]):
                    if of_bin["count"]:
                        xs.append((left + right) / 2)
                        low.append(of_bin["quantiles"]["5"])
                        median.append(of_bin["quantiles"]["50"])
                        high.append(of_bin["quantiles"]["95"])
                panel.plot(xs, median, color=colour, marker="o", markersize=4, label=label)
                panel.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
        histogram_panel.set_yscale("log")
        histogram_panel.set_ylabel("share of steps", fontsize=8)
        histogram_panel.set_xlabel("advantage", fontsize=8)
        for panel in (advantage_panel, value_panel):
            panel.set_xlim(0, 1)
            panel.set_xlabel("relative step", fontsize=8)
        draw_legend_below(figure, [histogram_panel, advantage_panel, value_panel])
        return figure


def _leaves_values_to_trainer(config: PolicyIteration) -> bool:
    """Returns whether episodes have no values and advantages, because the trainer's critic computes them."""
    return config.credit.needs_critic and not config.credit.asks_critic


def advantages_of_episode(
    episode: Episode, critic_values: Sequence[float] | None
) -> Sequence[float | None] | None:
    """Returns the advantage of each step of an episode; None for a step without a trained token.

    Credit usually gives all tokens of a step the same advantage. Where the advantages of a step's tokens
    differ, the last trained token's is taken. For an episode without advantages, those of the steps are
    computed from `critic_values`. Returns None if there are no `critic_values` either.
    """
    if episode.advantages is None:
        return None if critic_values is None else step_advantages(critic_values, episode.reward)
    advantages: list[float | None] = []
    for start, end in itertools.pairwise((0, *episode.step_ends)):
        trained = episode.advantages[start:end][episode.trained[start:end]]
        advantages.append(float(trained[-1]) if len(trained) else None)
    return advantages


def describe(values: Sequence[float | None]) -> dict[str, Any]:
    """Returns the number of values, the number of missing values (None), and the mean, the standard
    deviation, the share of zeros and the quantiles of the values."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return {"count": 0, "missing": len(values)}
    # `quantiles` returns the 99 cuts between hundredths, but refuses a single value, which is every quantile.
    cuts = quantiles(numbers, n=100, method="inclusive") if len(numbers) > 1 else numbers * 99
    return {
        "count": len(numbers),
        "missing": len(values) - len(numbers),
        "mean": fmean(numbers),
        "deviation": pstdev(numbers),
        "zero": math.fsum(value == 0.0 for value in numbers) / len(numbers),
        "quantiles": {str(percent): cuts[percent - 1] for percent in PERCENTS_OF_QUANTILES},
    }
