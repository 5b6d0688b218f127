"""What an experiment recorded of its answers' named numbers, a group of charts for each group of numbers."""

from __future__ import annotations

from html import escape

from treetune.episode_generators.numbers import LARGEST, OF_CORRECT, NumberGroup, registered
from treetune.reports.charts import Series, line_chart
from treetune.reports.experiment import Experiment


def number_curves_html(one: Experiment, colour: str) -> str:
    """Empty where nothing was recorded."""
    return "".join(_group(group, one, colour) for group in registered().values())


def _group(group: NumberGroup, one: Experiment, colour: str) -> str:
    prefix = f"{group.name}/"
    recorded = {key.removeprefix(prefix) for row in one.metrics for key in row if key.startswith(prefix)}
    if not recorded:
        return ""
    means = {name.removesuffix(LARGEST).removesuffix(OF_CORRECT) for name in recorded}
    charts, always_0 = [], []
    for name in (*group.numbers, *sorted(means - set(group.numbers))):
        series = [
            Series(name, one.curve(f"{prefix}{name}"), colour),
            Series(f"{name} of correct answers", one.curve(f"{prefix}{name}{OF_CORRECT}"), "c5"),
        ]
        known = group.numbers.get(name)
        title = f"{name.replace('_', ' ')}, per answer" if known is None else known.title
        if any(y for each in series for _, y in each.points):
            charts.append(line_chart(title, series))
        elif any(each.points for each in series):
            always_0.append(title)
    note = "Means over answers; in grey those over correct ones."
    if always_0:
        note += f" Always 0: {'; '.join(always_0)}."
    return (
        f'<h3>{escape(group.name.capitalize())}</h3><p class="note">{escape(note)}</p>'
        f'<div class="charts">{"".join(charts)}</div>'
    )
