"""Report sections from recorded metrics: training, domains, numbers, signs of collapse, and times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import override

from treetune.rollouts.metrics import DOMAIN_PREFIX, split_domain
from treetune.rollouts.numbers import CORRECT_SUFFIX, LARGEST_SUFFIX, declared_numbers, registered_groups
from treetune.runtime.diagnostics import (
    METRICS_OF_SIGN,
    REMEDY_OF_SIGN,
    SIGNS,
    CollapseSign,
    Diagnostics,
    Sign,
    WatchedRun,
    describe_good_weights,
    diagnose,
    find_last_good,
)
from treetune.view.charts import Chart, Series, average_neighbours, better_direction_of, line_chart
from treetune.view.curves import (
    DESCRIPTION_BY_PHASE,
    Bunch,
    compare_with_plan,
    phase_seconds,
    phase_totals,
    usual_charts,
)
from treetune.view.experiment import StoredExperiment
from treetune.view.report.sections import ReportSection
from treetune.view.templates import colour_of, render

TRAINING_NOTE = "Metrics of each iteration. Hover over a point for its value."

DOMAIN_CURVES: Mapping[str, str] = {
    "reward": "reward of the {trained_on}",
    "correct": "share of correct answers",
    "mixed": "share of problems whose answers differ in score",
    "learnable": "learnability: mean of p (1 − p) over problems",
    "advantage_std": "spread of the advantages (standard deviation)",
    "advantage_zero": "share of trained tokens whose advantage is 0",
    "response_tokens": "response length (tokens)",
    "unfinished": "share unfinished",
    "unavailable": "share that could not be graded",
    "weight": "share of problems by the domain's weight",
    "problems": "problems in the iteration",
}
"""The titles of charts by metric. "{trained_on}" stands for "sampled answers" or "demonstrations".

A metric that is 0 in all domains has no chart. `weight` and `problems` have no chart either if the weights of
all domains are constant.
"""

# The metrics whose charts have a y axis that includes 0.
METRICS_FROM_ZERO = frozenset({"mixed", "advantage_zero", "unfinished", "unavailable", "weight", "problems"})

SIGN_PREFIX = "diagnostics/"
"""The prefix of the metrics of signs of collapse."""

SIGN_NAMES: Mapping[Sign, str] = {
    "entropy_low": "entropy has collapsed",
    "answers_short": "answers have collapsed to a few tokens",
    "answers_at_limit": "answers reach the token limit",
    "truncated": "many answers are cut off",
    "no_spread": "all answers to a problem have the same reward",
    "gradient_noise": "the gradient norm does not settle",
}


def _note_and_charts(note: str, charts: Sequence[str]) -> str:
    """Returns HTML with a note, which is escaped, and charts, which are HTML already."""
    return f'<p class="note">{escape(note)}</p><div class="charts">{"".join(charts)}</div>'


class TrainingSection(ReportSection):
    title = "Training"

    @override
    def html(self, experiment: StoredExperiment) -> str:
        if not experiment.metrics:
            return ""
        charts = []
        for chart in usual_charts([Bunch(experiment.name, 0, [experiment])]):
            # "own" is the colour that the experiment has in this report.
            series = [replace(line, colour="own") for line in chart.series]
            charts.append(line_chart(replace(chart, series=series)))
        return _note_and_charts(TRAINING_NOTE, charts) if charts else ""


# Domains


class DomainsSection(ReportSection):
    title = "By domain"

    @override
    def html(self, experiment: StoredExperiment) -> str:
        """Shows a chart with all domains for each metric, and the results of each set's newest evaluation."""
        domains: set[str] = set()
        for metric in experiment.recorded:
            domain_and_name = split_domain(metric)
            if domain_and_name is not None:
                domains.add(domain_and_name[0])
        for summaries in experiment.evaluations.values():
            for summary in summaries.values():
                domains |= set(domains_of(summary))
        names = sorted(domains)
        if len(names) < 2:  # charts of a single domain would repeat those of the experiment
            return ""
        colours = {name: colour_of(number) for number, name in enumerate(names)}
        rows, charts = [], []
        for label, summaries in experiment.evaluations.items():
            newest = summaries[max(summaries)]
            for name, summary in domains_of(newest).items():
                rows.append({"set": label, "domain": name, "colour": colours[name], "summary": summary})
            series = []
            for name, colour in colours.items():
                series.append(domain_series(title=name, summaries=summaries, domain=name, colour=colour))
            charts += accuracy_charts(f"pass@1 on {label}", series)
        weights = [experiment.curve(f"{DOMAIN_PREFIX}{name}/weight") for name in names]
        # The charts of `weight` and `problems` are shown only if the weight of a domain changes in the run.
        weights_move = any(len({y for _, y in points}) > 1 for points in weights)
        for metric, title in DOMAIN_CURVES.items():
            if metric in ("weight", "problems") and not weights_move:
                continue
            series = [
                Series(name, experiment.curve(f"{DOMAIN_PREFIX}{name}/{metric}"), colour)
                for name, colour in colours.items()
            ]
            if _has_values(series):
                heading = title.format(trained_on=experiment.trained_on)
                chart = Chart(heading, series, better_direction_of(f"episodes/{metric}"), x_name="iteration")
                charts.append(line_chart(replace(chart, from_zero=metric in METRICS_FROM_ZERO)))
        return render("domains.html", colours=colours, measured=rows, charts=charts)


def _has_values(series: Sequence[Series]) -> bool:
    """Returns whether at least one point of the series is not 0."""
    return any(y != 0 for line in series for _, y in line.points)


def domains_of(summary: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Returns an evaluation's summary for each domain. It is empty if the problems had no domains."""
    domains = summary.get("domains")
    return domains if isinstance(domains, Mapping) else {}


def domain_series(title: str, summaries: Mapping[int, Mapping[str, Any]], domain: str, colour: str) -> Series:
    """Returns the curve of a domain's pass@1 over evaluated checkpoints, with intervals.

    `summaries` has the summaries of an evaluation set by finished iterations. A single point is drawn
    as a horizontal line across the chart.
    """
    accuracies, intervals = [], {}
    for iterations, summary in summaries.items():
        if domain in domains_of(summary):
            of_domain = domains_of(summary)[domain]
            accuracies.append((float(iterations), float(of_domain["pass_at_1"])))
            intervals[float(iterations)] = float(of_domain["ci_low"]), float(of_domain["ci_high"])
    return Series(title, accuracies, colour, intervals, is_level=len(accuracies) == 1)


def accuracy_charts(title: str, series: Sequence[Series]) -> list[str]:
    """Returns [a chart of pass@1 over checkpoints], or an empty list if no series has two points."""
    if not any(len(line.points) > 1 for line in series):
        return []
    return [line_chart(Chart(title, series, "up", "95 % interval over problems"))]


# Named numbers of answers


class NumbersSection(ReportSection):
    title = "Numbers of answers"

    @override
    def html(self, experiment: StoredExperiment) -> str:
        """Shows the charts of each group of numbers. A number that was always 0 has no chart."""
        groups = []
        for group in registered_groups().values():
            prefix = f"{group.name}/"
            recorded: set[str] = set()
            for row in experiment.metrics:
                recorded |= {key.removeprefix(prefix) for key in row if key.startswith(prefix)}
            if not recorded:
                continue
            # A number's mean is recorded under its name. With the suffix LARGEST it is the largest value, and
            # with CORRECT_SUFFIX the mean over correct answers.
            means = {name.removesuffix(LARGEST_SUFFIX).removesuffix(CORRECT_SUFFIX) for name in recorded}
            charts, always_0 = [], []
            # The numbers that the group declares come first, in their order. Others may be recorded as well.
            for name in (*group.numbers, *sorted(means - set(group.numbers))):
                metric = f"{group.name}/{name}"
                # "own" is the colour that the experiment has in this report, and "soft" is grey.
                series = [
                    Series(name, experiment.curve(metric), "own"),
                    Series(f"{name} of correct answers", experiment.curve(metric + CORRECT_SUFFIX), "soft"),
                ]
                declaration = group.numbers.get(name)
                if declaration is None:
                    title = f"{name.replace('_', ' ')}, per answer"
                else:
                    title = declaration.title
                if _has_values(series):
                    charts.append(
                        line_chart(Chart(title, series, better_direction_of(metric), x_name="iteration"))
                    )
                elif any(line.points for line in series):
                    always_0.append(title)
            note = f"{group.name.capitalize()}: means over answers; in grey over those that are correct."
            if always_0:
                note += f" Always 0: {'; '.join(always_0)}."
            groups.append(_note_and_charts(note, charts))
        return "".join(groups)

    @override
    def columns(self, summary: Mapping[str, Any]) -> Mapping[str, str]:
        cells = {}
        for full_name, number in declared_numbers().items():
            group, _, name = full_name.partition("/")
            numbers = summary.get(group)  # of any type: another program may have written a key of this name
            value = numbers.get(name) if isinstance(numbers, Mapping) else None
            if number.label is not None and value is not None:
                cells[number.label] = f"{value:.3f}" if number.share else f"{value:.1f}"
        return cells


# Signs of collapse


class DiagnosticsSection(ReportSection):
    title = "Signs of collapse"

    @override
    def html(self, experiment: StoredExperiment) -> str:
        """Shows a row for each sign that the run checked."""
        checked_signs = [sign for sign in SIGNS if experiment.curve(f"{SIGN_PREFIX}{sign}")]
        if not checked_signs:
            return ""
        settings: Diagnostics | None = None  # the thresholds of the run's configuration, if they can be read
        if experiment.config:
            try:
                values = experiment.config.get("diagnostics") or {}
                settings = TypeAdapter(Diagnostics).validate_python(values)
            except ValidationError:  # settings of another version
                pass
        weights = None
        if experiment.stopped and settings is not None:
            # Looks for the last weights before the sign that ended the run. Iterations count from 0, so the
            # last one is `finished_iterations - 1`.
            finished_iterations = int(experiment.metrics[-1]["iteration"]) + 1
            signs = _find_signs_at(experiment, settings, finished_iterations)
            last_good = find_last_good(settings, signs, finished_iterations - 1)
            if last_good is not None:
                directory = experiment.directory
                checkpoints = {
                    number: directory.checkpoint_folder(number) for number in directory.checkpoints()
                }
                weights = describe_good_weights(last_good, checkpoints)
        return render(
            "diagnostics.html",
            rows=[_sign_row(experiment, settings, sign) for sign in checked_signs],
            stopped=experiment.stopped,
            good_weights=weights,
        )


def _sign_row(experiment: StoredExperiment, settings: Diagnostics | None, sign: Sign) -> dict[str, Any]:
    """Returns the values of a sign's row in the template.

    They say whether and in which iterations the sign was seen, and what was measured. If `settings` are
    known, they also have the thresholds.
    """
    curve = experiment.curve(f"{SIGN_PREFIX}{sign}")  # 1 in iterations with the sign, else 0
    iterations_with_sign = [int(iteration) for iteration, value in curve if value]
    # The diagnosis is made again as the run made it after the last iteration that showed the sign, so its
    # description is the one that the run logged. Without such an iteration, the last one of all is taken.
    diagnosed_iteration = iterations_with_sign[-1] if iterations_with_sign else int(curve[-1][0])
    finding = _find_signs_at(experiment, settings, diagnosed_iteration).get(sign, CollapseSign(sign))
    # `kind` is the CSS class that gives the verdict its colour.
    if iterations_with_sign:
        kind = "wrong"
        verdict = "at the end" if curve[-1][1] else "before"
    elif finding.is_too_early:
        kind, verdict = "", "too early"
    elif finding.description and settings is not None:
        kind, verdict = "", f"for fewer than {settings.patience} iterations"
    else:
        kind, verdict = "correct", "no"
    messages = [finding.description] if finding.description else []
    if iterations_with_sign and REMEDY_OF_SIGN[sign]:
        messages.append(REMEDY_OF_SIGN[sign])
    measured: dict[str, str | None] = {}
    for name in METRICS_OF_SIGN[sign]:
        if points := experiment.curve(name):
            # The threshold of `gradient_noise` is for the variation of a metric over iterations, and a single
            # value can't be compared with it. With None, the row has only the metric's name.
            measured[name] = None if sign == "gradient_noise" else f"{points[-1][1]:.3g}"
    thresholds = settings.thresholds(sign) if settings is not None else {}
    return {
        "sign": sign,
        "name": SIGN_NAMES[sign],
        "kind": kind,
        "verdict": verdict,
        "iterations": _format_ranges(iterations_with_sign),
        "messages": messages,
        "measured": measured | {key: f"{value:g}" for key, value in thresholds.items()},
    }


def _find_signs_at(
    experiment: StoredExperiment, settings: Diagnostics | None, n_finished: int
) -> Mapping[Sign, CollapseSign]:
    """Returns the signs of collapse that the run itself found after its first `n_finished` iterations.

    The result is empty if the run's settings aren't known.
    """
    if settings is None:
        return {}
    # The token limit of answers: that of the rollout or, if the rollout wraps another, of the inner one.
    max_tokens = None
    rollout = experiment.config.get("rollout")
    while isinstance(rollout, Mapping):
        sampling = rollout.get("sampling")
        if isinstance(sampling, Mapping):
            limit = sampling.get("max_tokens")
            max_tokens = limit if isinstance(limit, int) else None
            break
        rollout = rollout.get("rollout")
    rows = [row for row in experiment.metrics if row["iteration"] < n_finished]
    # `sampled=True` is right for all runs: a run that samples no answers recorded no metrics of answers.
    return diagnose(settings, WatchedRun(sampled=True, max_tokens=max_tokens), rows)


def _format_ranges(numbers: Iterable[int]) -> str:
    """Formats rising integers, of which consecutive ones become ranges: "3–5, 9"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in ranges)


# Time


class TimesSection(ReportSection):
    title = "Time by phase"

    @override
    def html(self, experiment: StoredExperiment) -> str:
        """Shows each phase's share of the time, and a bar for each iteration, or for several in a long
        run."""
        bars = phase_seconds(experiment)
        totals = phase_totals(bars)
        if not totals:
            return ""
        return render(
            "times.html",
            totals=totals,
            meanings=DESCRIPTION_BY_PHASE,
            whole=math.fsum(totals.values()),
            iterations=len(bars),
            bars=average_neighbours(bars),
            plan=compare_with_plan(experiment),
        )
