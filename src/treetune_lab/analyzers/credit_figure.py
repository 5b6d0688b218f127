"""The picture of credit methods: how good against how dear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treetune_lab.analyzers.figures import COLOURS, MARKS, legend_below, panels, points_with_bars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FREE = 0.5
"""Where methods stand on the logarithmic axis that sample nothing."""


ALONE_INCHES = (7.2, 5.4)
"""Of a single panel, with room for its legend."""


def draw_credit(by_panel: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Figure:
    """A panel for each task or checkpoint, with a point for each method: the correlation of its advantages
    with the true ones over the tokens that it sampled for an answer."""
    figure, axes = panels(list(by_panel), rows=-(-len(by_panel) // 3))
    methods = list(dict.fromkeys(name for found in by_panel.values() for name in found))
    for one, found in zip(axes, by_panel.values(), strict=True):
        for name, numbers in found.items():
            place = methods.index(name)
            style = {
                "color": COLOURS[place % len(COLOURS)],
                "marker": MARKS[(place // len(COLOURS) + place) % len(MARKS)],
                "linestyle": "none",
                "label": name,
            }
            points_with_bars(
                one, [max(numbers["tokens_per_answer"], FREE)], [numbers["correlation"]], **style
            )
        one.set_xscale("log")
        one.axvline(FREE * 1.4, color="#bbbbbb", linewidth=0.8, linestyle=":")
        one.set_xlabel("tokens sampled for the credit of an answer (left of the line: none)", fontsize=8)
        one.set_ylabel("correlation with true advantages (up is better)", fontsize=8)
    if len(by_panel) == 1:
        figure.set_size_inches(*ALONE_INCHES)
    legend_below(figure, axes[0], columns={1: 3, 2: 4}.get(len(by_panel), 5))
    return figure
