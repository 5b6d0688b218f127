"""Measures the errors of Monte-Carlo values and of the critic's values against nearly exact values."""

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
    FIGURE_COLOURS,
    MARKERS,
    Bootstrap,
    correlation,
    draw_legend_below,
    draw_points_with_bars,
    label_iteration_axis,
    make_panels,
    mean_of,
    share_on_right_side,
)
from treetune.lab.analyzers.points import OfCheckpoints
from treetune.lab.analyzers.true_values import (
    ESTIMATE_PURPOSE,
    TRUTH_PURPOSE,
    ChosenState,
    choose_states,
    continue_prefixes,
)
from treetune.rollouts.context import RolloutContext
from treetune.runtime.analysis import ONE_LINE_REMEDY, Analyzer, Findings
from treetune.vocabulary import TokenIds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from treetune.runtime.resources import RunResources

LINE_STYLES = ("-", "--", ":", "-.")


def draw_values(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draws the errors of all estimators of several experiments, whose results are given by name. Colours
    differ by estimator; line styles and marks differ by experiment."""
    titles = [
        "Mean absolute error of values",
        "… by position in the answer",
        "Share on the correct side of 0.5, by position",
    ]
    if any(len(result["numbers"]["by_checkpoint"]) > 1 for result in results.values()):
        titles.append("Error along training")
    # The panels are in the order of the titles, so `training_panels` is empty or has the fourth.
    figure, (errors_panel, position_panel, sides_panel, *training_panels) = make_panels(titles)
    estimator_names: set[str] = set()
    for result in results.values():
        estimator_names |= result["numbers"]["all"]["estimators"].keys()
    estimators = sorted(estimator_names, key=order_of_estimator)

    for index, (name, result) in enumerate(results.items()):
        numbers = result["numbers"]["all"]
        bin_centres = [(low + high) / 2 for low, high in itertools.pairwise(numbers["bins"])]
        # Experiments are drawn next to each other at each position of the x axis. Estimators are 1 apart on
        # this axis. Positions in the answer go from 0 to 1, so experiments are shifted by less there.
        shift = (index - (len(results) - 1) / 2) * 0.16
        positions = [centre + shift * 0.1 for centre in bin_centres]
        for estimator, errors_of_estimator in numbers["estimators"].items():
            column = estimators.index(estimator)
            style = {
                "color": FIGURE_COLOURS[column % len(FIGURE_COLOURS)],
                "marker": MARKERS[index % len(MARKERS)],
                "linestyle": LINE_STYLES[index % len(LINE_STYLES)],
                "label": f"{name}: {label_of_estimator(estimator)}",
            }
            mean_error = errors_of_estimator["within"]["mean_absolute_error"]
            draw_points_with_bars(errors_panel, [column + shift], [mean_error], **style)
            bins = errors_of_estimator["by_position"]
            mean_errors = [of_bin["mean_absolute_error"] for of_bin in bins]
            draw_points_with_bars(position_panel, positions, mean_errors, **style)
            accuracies = [of_bin["accuracy"] for of_bin in bins]
            draw_points_with_bars(sides_panel, positions, accuracies, **style)
            for panel in training_panels:
                error_by_checkpoint = _error_by_checkpoint(result["numbers"]["by_checkpoint"], estimator)
                checkpoints = list(error_by_checkpoint)
                draw_points_with_bars(panel, checkpoints, list(error_by_checkpoint.values()), **style)

    for panel in training_panels:
        panel.set_ylim(bottom=0)
        label_iteration_axis(panel)
    estimator_labels = [label_of_estimator(estimator) for estimator in estimators]
    errors_panel.set_xticks(range(len(estimators)), estimator_labels)
    errors_panel.set_xlim(-0.6, len(estimators) - 0.4)
    errors_panel.set_ylim(bottom=0)
    position_panel.set_ylim(bottom=0)
    for panel in (position_panel, sides_panel):
        panel.set_xlim(0, 1)
        panel.set_xlabel("share of the answer's tokens before the state", fontsize=8)
    rollouts = sorted({str(result["numbers"]["rollouts"]) for result in results.values()})
    errors_panel.set_ylabel(f"against {' and '.join(rollouts)} rollouts a state", fontsize=8)
    draw_legend_below(figure, [position_panel])
    return figure


def _error_by_checkpoint(by_checkpoint: Mapping[str, Any], estimator: str) -> dict[int, Any]:
    """Returns the mean absolute error of an estimator at each checkpoint, by the checkpoint's number."""
    error_by_checkpoint = {}
    for checkpoint, numbers in by_checkpoint.items():
        errors = numbers["estimators"][estimator]["within"]  # the states within answers, without the prompts
        error_by_checkpoint[int(checkpoint)] = errors["mean_absolute_error"]
    return error_by_checkpoint


def label_of_estimator(estimator: str) -> str:
    """Returns ``MC, K = 9`` for ``monte_carlo_9``, and other names as they are."""
    return f"MC, K = {estimator.removeprefix('monte_carlo_')}" if "_" in estimator else estimator


def order_of_estimator(estimator: str) -> tuple[bool, int]:
    """Returns a key that sorts Monte Carlo by K, and then the critic."""
    k = estimator.removeprefix("monte_carlo_")
    return (not k.isdigit(), int(k) if k.isdigit() else 0)


CRITIC = "critic"

CriticFunction = Callable[[Sequence[TokenIds]], list[float]]
"""A function that returns the critic's values of states. A state is given as all tokens up to it, the prompt
included."""
ValuedState = Mapping[str, Any]
"""A state with its true value and its estimates, as `ValueAccuracy.measure` makes it."""


@Analyzer.register("value_accuracy")
@dataclass(frozen=True, kw_only=True)
class ValueAccuracy(OfCheckpoints):
    """Compares values of states that the policy reaches with the mean reward of `rollouts` continuations
    (Kazemnejad et al., arXiv:2410.01679, section 7 and figures 7 and 8).

    The states are drawn from answers that the checkpoint's own weights sampled. The values that are compared
    are the mean rewards of K fresh continuations, for each K of `samples`, and the critic's values where the
    experiment has a critic.
    """

    rollouts: Annotated[int, Gt(1)] = 256
    """The number of continuations of a state whose mean reward counts as the state's true value."""
    samples: Annotated[tuple[Annotated[int, Gt(0)], ...], MinLen(1)] = (1, 3, 9)
    """The values of K: means of K continuations are compared with the true values."""
    repeats: Annotated[int, Gt(0)] = 4
    """The number of means of K continuations for each K and state."""
    states: Annotated[int, Gt(0)] = 128
    """The largest number of states between the steps of answers at a checkpoint."""
    prompts: Annotated[int, Ge(0)] = 32
    """The largest number of prompts at a checkpoint. Their errors are reported apart from those of the states
    between steps."""
    bins: Annotated[int, Gt(0)] = 5
    """The number of equal parts of an answer's tokens, for the errors by position."""
    problems: Annotated[int, Gt(0)] = 64
    """The number of problems that are answered where the run kept no answers by the checkpoint's weights."""

    needs_engine = True
    judges_critic = True
    needs = (Need(OneLine(), "it continues answers from their beginnings", ONE_LINE_REMEDY),)

    @override
    def analyse(self, resources: RunResources, points: Sequence[int], work: Path) -> Findings:
        from treetune.lab.analyzers.stored import answers_and_critic_at, context_at

        rows: list[ValuedState] = []
        origins = {}  # by point: whether the run had stored the answers, or they were sampled now
        for point in points:
            trajectories, origins[str(point)], critic = answers_and_critic_at(
                resources, point, work, self.seed, self.problems
            )
            # At most `self.states` states between steps are measured, and at most `self.prompts` prompts.
            chosen_states = choose_states(trajectories, self.states, self.seed, point)
            chosen_states += choose_states(trajectories, self.prompts, self.seed, point, prompts=True)
            with resources.phase(f"values after iteration {point}", "continuations") as show:
                context = context_at(resources, point, work, self.seed, "values", show)
                rows += self.measure(context, chosen_states, critic)
        return Findings({**self.summarise(rows), "answers": origins}, rows)

    def measure(
        self, context: RolloutContext, states: Sequence[ChosenState], critic: CriticFunction | None
    ) -> list[ValuedState]:
        """Returns a row for each state, with its true value and all estimates of this value."""
        prefixes = [(state.trajectory, state.prefix_ids) for state in states]
        # Different purposes derive different seeds: an estimate shares no continuation with the true value.
        truths = continue_prefixes(context, prefixes, self.rollouts, TRUTH_PURPOSE)
        # For each K of `samples`, the estimates are `repeats` means of K rewards.
        rewards_per_state = sum(self.samples) * self.repeats
        fresh_samples = continue_prefixes(context, prefixes, rewards_per_state, ESTIMATE_PURPOSE)
        critic_values = critic([state.token_ids for state in states]) if critic else [None] * len(states)
        rows: list[ValuedState] = []
        for state, truth, fresh, critic_value in zip(
            states, truths, fresh_samples, critic_values, strict=True
        ):
            deviation = pstdev(truth.rewards)
            estimates = self._mean_rewards_by_k(fresh.rewards)
            if critic_value is not None:
                estimates[CRITIC] = [critic_value]
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

    def _mean_rewards_by_k(self, rewards: Sequence[float]) -> dict[str, list[float]]:
        """Returns `repeats` means of K rewards for each K. No reward is in two means."""
        unused_rewards = iter(rewards)
        means = {}
        for k in self.samples:
            means[f"monte_carlo_{k}"] = [
                math.fsum(itertools.islice(unused_rewards, k)) / k for _ in range(self.repeats)
            ]
        return means

    @override
    def summarise(self, rows: Sequence[ValuedState]) -> dict[str, Any]:
        """Returns the errors of every estimator, at every checkpoint and over all checkpoints together."""
        by_checkpoint = {}
        for point in sorted({row["checkpoint"] for row in rows}):
            rows_of_checkpoint = [row for row in rows if row["checkpoint"] == point]
            by_checkpoint[str(point)] = self._measure_estimators(rows_of_checkpoint)
        return {
            "rollouts": self.rollouts,
            "all": self._measure_estimators(rows),
            "by_checkpoint": by_checkpoint,
        }

    def _measure_estimators(self, rows: Sequence[ValuedState]) -> dict[str, Any]:
        """Returns the errors of every estimator in these rows."""
        # The state before the first step (0) is only the prompt.
        rows_within = [row for row in rows if row["step"] > 0]
        prompts = [row for row in rows if row["step"] == 0]
        names: dict[str, None] = {}  # a dictionary as an ordered set
        for row in rows:
            names |= dict.fromkeys(row["estimates"])
        edges = [number / self.bins for number in range(self.bins + 1)]
        rows_by_bin = []
        for low, high in itertools.pairwise(edges):
            rows_by_bin.append([row for row in rows_within if low <= row["position"] < high])
        estimators = {}
        for name in names:
            estimators[name] = {
                "within": measure_errors(rows_within, name, self.seed),
                "prompts": measure_errors(prompts, name, self.seed),
                "by_position": [measure_errors(rows_of_bin, name, self.seed) for rows_of_bin in rows_by_bin],
            }
        return {
            "states": {"within": _describe_states(rows_within), "prompts": _describe_states(prompts)},
            "bins": edges,
            "estimators": estimators,
        }

    @staticmethod
    @override
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
        return draw_values(results)


def measure_errors(rows: Sequence[ValuedState], name: str, seed: int) -> dict[str, Any]:
    """Returns the errors of one estimator on these states, with 95 % intervals over problems.

    The errors are ``mean_absolute_error``; ``mean_squared_error``; ``bias``, the mean of estimate − true
    value; ``correlation`` (Pearson's); and ``accuracy``, the share of estimates on the same side of 0.5 as
    the true value, where 0.5 itself counts half. True values are means of samples: their own error
    (``truth_error``) is part of all these errors.
    """
    import numpy as np

    rows = [row for row in rows if name in row["estimates"]]
    bootstrap = Bootstrap([row["problem"] for row in rows], seed)
    if not rows:
        no_interval = bootstrap(mean_of([]))
        return {"states": 0} | dict.fromkeys(ERROR_MEASURES, no_interval)
    # S states, R repeats.
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
        "accuracy": bootstrap(mean_of(share_on_right_side(estimates_SR, truths_SR).mean(1))),
    }


ERROR_MEASURES = ("mean_absolute_error", "mean_squared_error", "bias", "correlation", "accuracy")


def _describe_states(rows: Sequence[ValuedState]) -> dict[str, Any]:
    """Returns the number of states and of their problems, the mean true value, and its mean standard
    error."""
    if not rows:
        return {"count": 0, "problems": 0, "mean_truth": None, "truth_error": None}
    return {
        "count": len(rows),
        "problems": len({row["problem"] for row in rows}),
        "mean_truth": math.fsum(row["truth"] for row in rows) / len(rows),
        "truth_error": math.fsum(row["truth_error"] for row in rows) / len(rows),
    }
