"""The named numbers of answers: charts of what iterations recorded, and columns of the table of results."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from treetune.rollouts.numbers import LARGEST, OF_CORRECT, NumberGroup, declared, registered
from treetune_view.report.charts import Series, line_chart
from treetune_view.report.directions import better_of
from treetune_view.report.experiment import Experiment
from treetune_view.report.sections.base import ReportSection


class NumbersSection(ReportSection):
    title = "What was counted in answers"

    def applies(self, experiment: Experiment) -> bool:
        return any(_recorded(group, experiment) for group in registered().values())

    def html(self, experiment: Experiment) -> str:
        return "".join(_group(group, experiment) for group in registered().values())

    def columns(self, summary: Mapping[str, Any]) -> Mapping[str, str]:
        cells = {}
        for full, number in declared().items():
            group, _, name = full.partition("/")
            own = summary.get(group)  # somebody else's by that name may be anything
            value = own.get(name) if isinstance(own, Mapping) else None
            if number.label is not None and value is not None:
                cells[number.label] = f"{value:.3f}" if number.share else f"{value:.1f}"
        return cells


def _recorded(group: NumberGroup, one: Experiment) -> set[str]:
    prefix = f"{group.name}/"
    return {key.removeprefix(prefix) for row in one.metrics for key in row if key.startswith(prefix)}


def _group(group: NumberGroup, one: Experiment) -> str:
    """Empty where nothing was recorded. What was always 0 has no chart."""
    recorded = _recorded(group, one)
    if not recorded:
        return ""
    means = {name.removesuffix(LARGEST).removesuffix(OF_CORRECT) for name in recorded}
    charts, always_0 = [], []
    for name in (*group.numbers, *sorted(means - set(group.numbers))):
        series = [
            Series(name, one.curve(f"{group.name}/{name}"), "own"),
            Series(f"{name} of correct answers", one.curve(f"{group.name}/{name}{OF_CORRECT}"), "soft"),
        ]
        known = group.numbers.get(name)
        title = f"{name.replace('_', ' ')}, per answer" if known is None else known.title
        if any(y for each in series for _, y in each.points):
            charts.append(line_chart(title, series, better_of(f"{group.name}/{name}")))
        elif any(each.points for each in series):
            always_0.append(title)
    note = f"{group.name.capitalize()}: means over answers; in grey over those that are correct."
    if always_0:
        note += f" Always 0: {'; '.join(always_0)}."
    return f'<p class="note">{escape(note)}</p><div class="charts">{"".join(charts)}</div>'
