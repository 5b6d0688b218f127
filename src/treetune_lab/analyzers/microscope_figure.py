"""The picture of answers under the microscope: values and advantages along their steps, method by method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treetune_lab.analyzers.figures import COLOURS, MARKS, legend_below, panels, points_with_bars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPREAD = 0.6
"""How far, of the distance between two steps, the methods' points stand apart."""
WORDS = {"values": "value before the step", "advantages": "advantage of the step"}


def draw_microscope(answers: Mapping[str, Mapping[str, Any]]) -> Figure:
    """A column for each answer, by its title: values above, advantages below."""
    titles = [f"{title} ({'right' if one['correct'] else 'wrong'})" for title, one in answers.items()]
    figure, axes = panels(titles * 2, rows=2)
    methods = list(dict.fromkeys(name for one in answers.values() for name in one["credit"]))
    for number, (kind, words) in enumerate(WORDS.items()):
        for panel, one in zip(axes[number * len(answers) :], answers.values()):
            for place, name in enumerate(methods):
                if name not in one["credit"]:
                    continue
                shift = SPREAD * (place / max(len(methods) - 1, 1) - 0.5)
                shown = [(step + shift, n) for step, n in enumerate(one["credit"][name][kind], 1) if n]
                style = {
                    "color": COLOURS[place % len(COLOURS)],
                    "marker": MARKS[(place // len(COLOURS) + place) % len(MARKS)],
                    "linestyle": "none",
                    "label": name,
                }
                points_with_bars(panel, [x for x, _ in shown], [n for _, n in shown], **style)
            panel.set_xticks(range(1, len(one["steps"]) + 1))
            panel.set_xlabel("step", fontsize=8)
            panel.set_ylabel(words, fontsize=8)
            if kind == "advantages":
                panel.axhline(0, color="#999999", linewidth=0.8)
    legend_below(figure, axes[len(answers)], columns=6)
    return figure
