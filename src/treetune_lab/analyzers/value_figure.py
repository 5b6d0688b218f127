"""The figure of `value_accuracy`: what is wrong, where in the answer, and which side it is on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treetune_lab.analyzers.figures import (
    COLOURS,
    MARKS,
    iteration_axis,
    legend_below,
    panels,
    points_with_bars,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
