"""How far the weights went from where they started."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.runtime.analysis import Analyzer, Findings
from treetune_lab.analyzers.points import Chosen, OfCheckpoints

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from treetune.runtime.sampler import Sampler

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@Analyzer.register("weight_distance")
@dataclass(frozen=True, kw_only=True)
class WeightDistance(OfCheckpoints):
    """The L2 norm of the policy's weights less the start weights', absolute and over the norm of the
    start weights, in all and by group: embeddings, every layer, the head, and the rest (norms).
    """

    checkpoints: Chosen = "all"

    def analyse(self, sampler: Sampler, points: Sequence[int], work: Path) -> Findings:
        from treetune.models.export import read_policy

        parameters, _ = sampler.session.model.weights()
        start = {name: weight.detach().cpu() for name, weight in parameters.items()}
        numbers = {}
        for point in points:
            folder = sampler.session.directory.checkpoint(point) / "policy"
            weights = read_policy(folder)[0] if point else start
            numbers[str(point)] = distances(weights, start)
        return Findings({"by_checkpoint": numbers})

    @staticmethod
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
        from treetune_lab.analyzers.figures import COLOURS, MARKS, iteration_axis, legend_below, panels

        figure, (along, groups) = panels(
            ["Distance to the start weights, relative", "… of the last checkpoint, by group"]
        )
        names = list(
            dict.fromkeys(
                name
                for result in results.values()
                for numbers in result["numbers"]["by_checkpoint"].values()
                for name in numbers["groups"]
            )
        )
        for i, (label, result) in enumerate(results.items()):
            style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKS[i % len(MARKS)]}
            by_point = result["numbers"]["by_checkpoint"]
            values = [numbers["all"]["relative"] for numbers in by_point.values()]
            along.plot([int(point) for point in by_point], values, label=label, markersize=4.5, **style)
            last = list(by_point.values())[-1]["groups"]
            places = [names.index(name) for name in last]
            groups.plot(places, [g["relative"] for g in last.values()], linestyle="none", **style)
        iteration_axis(along)
        groups.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
        for axes in (along, groups):
            axes.set_ylim(bottom=0)
        legend_below(figure, along)
        return figure


def group_of(name: str) -> str:
    """The part of the model that a weight belongs to."""
    layer = _LAYER.search(name)
    if layer:
        return f"layer {layer[1]}"
    if "embed" in name or "wte" in name or "wpe" in name:
        return "embeddings"
    return "head" if "head" in name else "rest"


def distances(weights: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Any]:
    """``all`` and ``groups``, each with ``absolute`` and ``relative`` (None for weights that were 0).

    Raises ValueError if the two are not of one model.
    """
    if weights.keys() != start.keys():
        different = sorted(weights.keys() ^ start.keys())
        raise ValueError(f"the checkpoint and the start weights differ in: {', '.join(different[:3])}")
    squares: dict[str, tuple[float, float]] = {}
    for name, unmoved in start.items():  # in the order of the model
        before = unmoved.detach().double()
        moved = float((weights[name].detach().double() - before).square().sum())
        group = group_of(name)
        far, size = squares.get(group, (0.0, 0.0))
        squares[group] = (far + moved, size + float(before.square().sum()))
    whole = (math.fsum(far for far, _ in squares.values()), math.fsum(size for _, size in squares.values()))
    return {"all": _distance(*whole), "groups": {name: _distance(*both) for name, both in squares.items()}}


def _distance(far: float, size: float) -> dict[str, float | None]:
    return {"absolute": math.sqrt(far), "relative": math.sqrt(far / size) if size else None}
