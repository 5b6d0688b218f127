"""The errors of Monte-Carlo values and of the critic's against true values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import pstdev
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt, MinLen
from typing_extensions import override

from treetune.contracts import Need, OneLine
from treetune.lab.analyzers.figures import (
    COLOURS,
    MARKS,
    Bootstrap,
    correlation,
    iteration_axis,
    legend_below,
    mean_of,
    panels,
    points_with_bars,
    right_side,
)
from treetune.lab.analyzers.points import OfCheckpoints
from treetune.lab.analyzers.true_values import ESTIMATE, TRUTH, ChosenState, choose_states, continued
from treetune.rollouts.context import RolloutContext
from treetune.runtime.analysis import ONE_LINE_REMEDY, Analyzer, Findings
from treetune.vocabulary import TokenIds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from treetune.runtime.sampler import Sampler

LINES = ("-", "--", ":", "-.")


def draw_values(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Colours tell estimators apart, strokes and marks experiments."""
    titles = [
        "Mean absolute error of values",
        "… by position in the answer",
        "Share on the right side of 0.5, by position",
    ]
    several = any(len(result["numbers"]["by_checkpoint"]) > 1 for result in results.values())
    figure, (errors, along, sides, *training) = panels(
        [*titles, *(["Error along training"] if several else [])]
    )
    numbers = {name: result["numbers"]["all"] for name, result in results.items()}
    estimators = sorted(
        {estimator for one in numbers.values() for estimator in one["estimators"]}, key=order_of
    )
    for i, (name, one) in enumerate(numbers.items()):
        centres = [(low + high) / 2 for low, high in zip(one["bins"], one["bins"][1:], strict=False)]
        shift = (i - (len(numbers) - 1) / 2) * 0.16
        for estimator, found in one["estimators"].items():
            number = estimators.index(estimator)
            style = {
                "color": COLOURS[number % len(COLOURS)],
                "marker": MARKS[i % len(MARKS)],
                "linestyle": LINES[i % len(LINES)],
                "label": f"{name}: {words_of(estimator)}",
            }
            points_with_bars(errors, [number + shift], [found["within"]["mean_absolute_error"]], **style)
            moved = [centre + shift * 0.1 for centre in centres]
            for axes, measure in ((along, "mean_absolute_error"), (sides, "accuracy")):
                points_with_bars(axes, moved, [part[measure] for part in found["by_position"]], **style)
            for axes in training:
                by_point = results[name]["numbers"]["by_checkpoint"]
                found_at = {int(point): one["estimators"] for point, one in by_point.items()}
                of_point = [found_at[point][estimator]["within"]["mean_absolute_error"] for point in found_at]
                points_with_bars(axes, list(found_at), of_point, **style)
    for axes in training:
        axes.set_ylim(bottom=0)
        iteration_axis(axes)
    errors.set_xticks(range(len(estimators)), [words_of(estimator) for estimator in estimators])
    errors.set_xlim(-0.6, len(estimators) - 0.4)
    errors.set_ylim(bottom=0)
    along.set_ylim(bottom=0)
    for axes in (along, sides):
        axes.set_xlim(0, 1)
        axes.set_xlabel("share of the answer's tokens behind the state", fontsize=8)
    rollouts = sorted({str(result["numbers"]["rollouts"]) for result in results.values()})
    errors.set_ylabel(f"against {' and '.join(rollouts)} rollouts a state", fontsize=8)
    legend_below(figure, along)
    return figure


def words_of(estimator: str) -> str:
    return f"MC, K = {estimator.removeprefix('monte_carlo_')}" if "_" in estimator else estimator


def order_of(estimator: str) -> tuple[bool, int]:
    """Monte Carlo by K, then the critic."""
    k = estimator.removeprefix("monte_carlo_")
    return (not k.isdigit(), int(k) if k.isdigit() else 0)


CRITIC = "critic"

CriticValues = Callable[[Sequence[TokenIds]], list[float]]
Row = Mapping[str, Any]


@Analyzer.register("value_accuracy")
@dataclass(frozen=True, kw_only=True)
class ValueAccuracy(OfCheckpoints):
    """Values of states that the policy comes to, held against the mean of `rollouts` continuations
    (Kazemnejad et al., arXiv:2410.01679, section 7 and figures 7 and 8).

    The states are drawn from the answers that the checkpoint's own weights gave. The means of `samples`
    fresh continuations are judged, and the critic where the experiment has one.
    """

    rollouts: Annotated[int, Gt(1)] = 256
    """Continuations of a state whose mean is its truth."""
    samples: Annotated[tuple[Annotated[int, Gt(0)], ...], MinLen(1)] = (1, 3, 9)
    """Numbers of continuations to judge."""
    repeats: Annotated[int, Gt(0)] = 4
    """Times that each is tried."""
    states: Annotated[int, Gt(0)] = 128
    """States between the steps of answers."""
    prompts: Annotated[int, Ge(0)] = 32
    """Prompts, which are kept apart in the numbers."""
    bins: Annotated[int, Gt(0)] = 5
    """Equal shares of an answer's tokens."""
    problems: Annotated[int, Gt(0)] = 64
    """Problems that are answered where the run kept no answers of these weights."""

    needs_engine = True
    judges_critic = True
    needs = (Need(OneLine(), "it continues answers from their beginnings", ONE_LINE_REMEDY),)

    @override
    def analyse(self, sampler: Sampler, points: Sequence[int], work: Path) -> Findings:
        from treetune.lab.analyzers.stored import context_at, judged_at

        rows: list[Row] = []
        origins = {}
        for point in points:
            trajectories, origins[str(point)], critic = judged_at(
                sampler, point, work, self.seed, self.problems
            )
            chosen = choose_states(trajectories, self.states, self.seed, point)
            chosen += choose_states(trajectories, self.prompts, self.seed, point, prompts=True)
            with sampler.phase(f"values after iteration {point}", "continuations") as show:
                context = context_at(sampler, point, work, self.seed, "values", show)
                rows += self.measure(context, chosen, critic)
        return Findings({**self.summarise(rows), "answers": origins}, rows)

    def measure(
        self, context: RolloutContext, states: Sequence[ChosenState], critic: CriticValues | None
    ) -> list[Row]:
        """Returns one row for each state: the truth, and every estimate of it."""
        nodes = [(state.trajectory, state.prefix_ids) for state in states]
        truths = continued(context, nodes, self.rollouts, TRUTH)
        tried = continued(context, nodes, sum(self.samples) * self.repeats, ESTIMATE)
        values = critic([state.token_ids for state in states]) if critic else [None] * len(states)
        rows: list[Row] = []
        for state, truth, estimate, value in zip(states, truths, tried, values, strict=True):
            deviation = pstdev(truth.rewards)
            estimates = self._means(estimate.rewards)
            if value is not None:
                estimates[CRITIC] = [value]
            rows.append(
                {
                    "checkpoint": context.iteration,
                    "problem": state.trajectory.problem.id,
                    "answer": state.trajectory.id,
                    "step": state.step,
                    "position": state.position,
                    "text": context.codec.decode(state.prefix_ids),
                    "truth": math.fsum(truth.rewards) / len(truth.rewards),
                    "truth_error": deviation / math.sqrt(len(truth.rewards)),
                    "estimates": estimates,
                }
            )
        return rows

    def _means(self, rewards: Sequence[float]) -> dict[str, list[float]]:
        """The rewards dealt to the estimators, each getting its own: none shares one with another."""
        left = iter(rewards)
        return {
            f"monte_carlo_{k}": [math.fsum(itertools.islice(left, k)) / k for _ in range(self.repeats)]
            for k in self.samples
        }

    @override
    def summarise(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Errors of every estimator, at every checkpoint and over all of them together."""
        points = sorted({row["checkpoint"] for row in rows})
        return {
            "rollouts": self.rollouts,
            "all": self._numbers(rows),
            "by_checkpoint": {
                str(point): self._numbers([row for row in rows if row["checkpoint"] == point])
                for point in points
            },
        }

    def _numbers(self, rows: Sequence[Row]) -> dict[str, Any]:
        within = [row for row in rows if row["step"] > 0]
        prompts = [row for row in rows if row["step"] == 0]
        names = list(dict.fromkeys(name for row in rows for name in row["estimates"]))
        edges = [i / self.bins for i in range(self.bins + 1)]
        parts = [
            [row for row in within if low <= row["position"] < high]
            for low, high in itertools.pairwise(edges)
        ]
        return {
            "states": {"within": _describe(within), "prompts": _describe(prompts)},
            "bins": edges,
            "estimators": {
                name: {
                    "within": errors(within, name, self.seed),
                    "prompts": errors(prompts, name, self.seed),
                    "by_position": [errors(part, name, self.seed) for part in parts],
                }
                for name in names
            },
        }

    @staticmethod
    @override
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:

        return draw_values(results)


def errors(rows: Sequence[Row], name: str, seed: int) -> dict[str, Any]:
    """Returns the errors of one estimator on these states, with 95 % intervals over problems.

    ``mean_absolute_error``; ``mean_squared_error``; ``bias``, the mean of estimate − truth;
    ``correlation`` (Pearson); ``accuracy``, the share on the truth's side of 0.5, on it counting half.
    The errors hold what the truth itself is off by (see ``truth_error``).
    """
    import numpy as np

    rows = [row for row in rows if name in row["estimates"]]
    bootstrap = Bootstrap([row["problem"] for row in rows], seed)
    if not rows:
        nothing = bootstrap(mean_of([]))
        return {"states": 0} | dict.fromkeys(MEASURES, nothing)
    truths_S1 = np.array([[row["truth"]] for row in rows])
    estimates_SR = np.array([row["estimates"][name] for row in rows], dtype=float)
    differences_SR = estimates_SR - truths_S1
    truths_SR = np.broadcast_to(truths_S1, estimates_SR.shape)
    return {
        "states": len(rows),
        "mean_absolute_error": bootstrap(mean_of(np.abs(differences_SR).mean(1))),
        "mean_squared_error": bootstrap(mean_of(np.square(differences_SR).mean(1))),
        "bias": bootstrap(mean_of(differences_SR.mean(1))),
        "correlation": bootstrap(lambda chosen: correlation(estimates_SR[chosen], truths_SR[chosen])),
        "accuracy": bootstrap(mean_of(right_side(estimates_SR, truths_SR).mean(1))),
    }


MEASURES = ("mean_absolute_error", "mean_squared_error", "bias", "correlation", "accuracy")


def _describe(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the number of states, their mean value, and how sure that is."""
    if not rows:
        return {"count": 0, "problems": 0, "mean_truth": None, "truth_error": None}
    return {
        "count": len(rows),
        "problems": len({row["problem"] for row in rows}),
        "mean_truth": math.fsum(row["truth"] for row in rows) / len(rows),
        "truth_error": math.fsum(row["truth_error"] for row in rows) / len(rows),
    }
