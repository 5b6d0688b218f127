"""What was recorded and measured of each domain, all domains in one chart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treetune.rollouts.metrics import PREFIX, name_in
from treetune_view.report.charts import Series, accuracy_chart, line_chart
from treetune_view.report.directions import better_of
from treetune_view.report.experiment import Experiment
from treetune_view.report.pages import colour_of, render
from treetune_view.report.sections.base import ReportSection

CURVES: Mapping[str, str] = {
    "reward": "reward of the {trained_on}",
    "correct": "share of correct answers",
    "mixed": "share of problems whose answers differ in score",
    "learnable": "what is to be learnt: mean p (1 − p) over problems",
    "advantage_std": "spread of the advantages (standard deviation)",
    "advantage_zero": "share of trained tokens whose advantage is 0",
    "response_tokens": "response length (tokens)",
    "unfinished": "share unfinished",
    "unavailable": "share that nobody could grade",
    "weight": "share of problems that the weights ask for",
    "problems": "problems of the iteration",
}
"""Title by number. What is 0 in all domains has no chart, and where all weights stay as they are, the last
two say nothing."""

FROM_ZERO = frozenset({"mixed", "advantage_zero", "unfinished", "unavailable", "weight", "problems"})


class DomainsSection(ReportSection):
    title = "By domain"

    def applies(self, experiment: Experiment) -> bool:
        return len(_names(experiment)) > 1

    def html(self, experiment: Experiment) -> str:
        colours = {name: colour_of(place) for place, name in enumerate(_names(experiment))}
        return render(
            "domains.html",
            colours=colours,
            measured=[*_measured(experiment, colours)],
            charts=[*_evaluation_charts(experiment, colours), *_recorded_charts(experiment, colours)],
        )


def _names(one: Experiment) -> list[str]:
    recorded = {of[0] for row in one.metrics for key in row if (of := name_in(key)) is not None}
    summaries = [summary for points in one.evaluations.values() for summary in points.values()]
    return sorted(recorded.union(*(domains_of(summary) for summary in summaries)))


def domains_of(summary: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """An evaluation's summaries by domain; empty where its problems had none."""
    found = summary.get("domains")
    return found if isinstance(found, Mapping) else {}


def _measured(one: Experiment, colours: Mapping[str, str]) -> list[dict[str, Any]]:
    """The last measured checkpoint, a row for each domain of each set."""
    return [
        {"set": label, "domain": name, "colour": colours[name], "summary": summary}
        for label, points in one.evaluations.items()
        for name, summary in domains_of(points[max(points)]).items()
    ]


def _evaluation_charts(one: Experiment, colours: Mapping[str, str]) -> list[str]:
    charts = []
    for label, points in one.evaluations.items():
        series = [series_of(name, points, name, colour) for name, colour in colours.items()]
        if any(len(each.points) > 1 for each in series):
            charts.append(accuracy_chart(f"pass@1 on {label}", series))
    return charts


def series_of(title: str, points: Mapping[int, Mapping[str, Any]], domain: str, colour: str) -> Series:
    """A domain's pass@1 at each measured checkpoint."""
    own = {
        float(done): domains_of(summary)[domain]
        for done, summary in points.items()
        if domain in domains_of(summary)
    }
    return Series(
        title,
        [(done, float(summary["pass_at_1"])) for done, summary in own.items()],
        colour,
        {done: (float(summary["ci_low"]), float(summary["ci_high"])) for done, summary in own.items()},
        is_level=len(own) == 1,
    )


def _recorded_charts(one: Experiment, colours: Mapping[str, str]) -> list[str]:
    charts = []
    weights = [one.curve(f"{PREFIX}{name}/weight") for name in colours]
    moved = any(len({y for _, y in points}) > 1 for points in weights)
    for number, title in CURVES.items():
        series = [
            Series(name, one.curve(f"{PREFIX}{name}/{number}"), colour) for name, colour in colours.items()
        ]
        said = moved or number not in ("weight", "problems")
        if said and any(y for each in series for _, y in each.points):
            better = better_of(f"episodes/{number}")
            charts.append(
                line_chart(
                    title.format(trained_on=one.trained_on), series, better, from_zero=number in FROM_ZERO
                )
            )
    return charts
