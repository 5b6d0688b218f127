"""Sections on what iterations recorded: training, domains, numbers of answers, signs of collapse, time by
phase."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import groupby
from typing import Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import override

from treetune.rollouts.metrics import PREFIX, name_in
from treetune.rollouts.numbers import LARGEST, OF_CORRECT, declared, registered
from treetune.runtime.diagnostics import (
    METRICS,
    REMEDIES,
    SIGNS,
    CollapseSign,
    Diagnostics,
    Sign,
    Watched,
    diagnose,
    good_weights,
    last_good,
)
from treetune.runtime.directory import ExperimentDirectory
from treetune.view.charts import Chart, Series, better_of, line_chart, thinned
from treetune.view.curves import PHASES, Bunch, phase_seconds, phase_totals, plan_beside, usual_charts
from treetune.view.experiment import StoredExperiment
from treetune.view.report.sections import ReportSection
from treetune.view.templates import colour_of, render

TRAINING_NOTE = (
    "What each iteration recorded: it samples answers or takes demonstrations, gives them credit and trains"
    " on them. A point says its number when the pointer rests on it."
)

DOMAIN_CURVES: Mapping[str, str] = {
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

SIGN = "diagnostics/"
"""Begins the metrics of signs of collapse."""

SIGN_NAMES: Mapping[Sign, str] = {
    "entropy_low": "entropy has collapsed",
    "answers_short": "answers have collapsed to a few tokens",
    "answers_at_limit": "answers are as long as they may be",
    "truncated": "answers are cut off",
    "no_spread": "answers to a problem earn all the same",
    "gradient_noise": "the gradient norm does not settle",
}


def _note_and_charts(note: str, charts: Sequence[str]) -> str:
    return f'<p class="note">{escape(note)}</p><div class="charts">{"".join(charts)}</div>'


class TrainingSection(ReportSection):
    title = "Training"

    @override
    def html(self, experiment: StoredExperiment) -> str:
        if not experiment.metrics:
            return ""
        usual = usual_charts([Bunch(experiment.name, 0, [experiment])])
        charts = [
            line_chart(replace(chart, series=[replace(one, colour="own") for one in chart.series]))
            for chart in usual
        ]
        return _note_and_charts(TRAINING_NOTE, charts) if charts else ""


# Domains


class DomainsSection(ReportSection):
    title = "By domain"

    @override
    def html(self, experiment: StoredExperiment) -> str:
        """All domains in one chart of each number, and the last measured checkpoint of each set."""
        recorded = {of[0] for row in experiment.metrics for key in row if (of := name_in(key)) is not None}
        summaries = [one for points in experiment.evaluations.values() for one in points.values()]
        names = sorted(recorded.union(*(domains_of(summary) for summary in summaries)))
        if len(names) < 2:
            return ""
        colours = {name: colour_of(number) for number, name in enumerate(names)}
        measured = [
            {"set": label, "domain": name, "colour": colours[name], "summary": summary}
            for label, points in experiment.evaluations.items()
            for name, summary in domains_of(points[max(points)]).items()
        ]
        charts = []
        for label, points in experiment.evaluations.items():
            series = [domain_series(name, points, name, colour) for name, colour in colours.items()]
            charts += accuracy_charts(f"pass@1 on {label}", series)
        weights = [experiment.curve(f"{PREFIX}{name}/weight") for name in names]
        weights_move = any(len({y for _, y in points}) > 1 for points in weights)
        for number, title in DOMAIN_CURVES.items():
            series = [
                Series(name, experiment.curve(f"{PREFIX}{name}/{number}"), colour)
                for name, colour in colours.items()
            ]
            says_something = weights_move or number not in ("weight", "problems")
            if says_something and any(y for each in series for _, y in each.points):
                heading = title.format(trained_on=experiment.trained_on)
                chart = Chart(heading, series, better_of(f"episodes/{number}"), x_name="iteration")
                charts.append(line_chart(replace(chart, from_zero=number in FROM_ZERO)))
        return render("domains.html", colours=colours, measured=measured, charts=charts)


def domains_of(summary: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Returns an evaluation's summaries by domain; empty where its problems had none."""
    domains = summary.get("domains")
    return domains if isinstance(domains, Mapping) else {}


def domain_series(title: str, points: Mapping[int, Mapping[str, Any]], domain: str, colour: str) -> Series:
    """Returns a domain's pass@1 at each measured checkpoint."""
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


def accuracy_charts(title: str, series: Sequence[Series]) -> list[str]:
    """Returns a chart of pass@1 of checkpoints, with its interval, where one was measured more than once."""
    if not any(len(one.points) > 1 for one in series):
        return []
    return [line_chart(Chart(title, series, "up", "95 % interval over problems"))]


# Named numbers of answers


class NumbersSection(ReportSection):
    title = "What was counted in answers"

    @override
    def html(self, experiment: StoredExperiment) -> str:
        """A group for each kind of numbers. What was always 0 has no chart."""
        groups = []
        for group in registered().values():
            prefix = f"{group.name}/"
            keys = {key for row in experiment.metrics for key in row if key.startswith(prefix)}
            recorded = {key.removeprefix(prefix) for key in keys}
            if not recorded:
                continue
            means = {name.removesuffix(LARGEST).removesuffix(OF_CORRECT) for name in recorded}
            charts, always_0 = [], []
            for name in (*group.numbers, *sorted(means - set(group.numbers))):
                metric = f"{group.name}/{name}"
                series = [
                    Series(name, experiment.curve(metric), "own"),
                    Series(f"{name} of correct answers", experiment.curve(f"{metric}{OF_CORRECT}"), "soft"),
                ]
                known = group.numbers.get(name)
                title = f"{name.replace('_', ' ')}, per answer" if known is None else known.title
                if any(y for each in series for _, y in each.points):
                    charts.append(line_chart(Chart(title, series, better_of(metric), x_name="iteration")))
                elif any(each.points for each in series):
                    always_0.append(title)
            note = f"{group.name.capitalize()}: means over answers; in grey over those that are correct."
            if always_0:
                note += f" Always 0: {'; '.join(always_0)}."
            groups.append(_note_and_charts(note, charts))
        return "".join(groups)

    @override
    def columns(self, summary: Mapping[str, Any]) -> Mapping[str, str]:
        cells = {}
        for full, number in declared().items():
            group, _, name = full.partition("/")
            own = summary.get(group)  # somebody else's by that name may be anything
            value = own.get(name) if isinstance(own, Mapping) else None
            if number.label is not None and value is not None:
                cells[number.label] = f"{value:.3f}" if number.share else f"{value:.1f}"
        return cells


# Signs of collapse


class DiagnosticsSection(ReportSection):
    title = "Signs of collapse"

    @override
    def html(self, experiment: StoredExperiment) -> str:
        """A row for each sign that was looked for."""
        looked_for = [sign for sign in SIGNS if experiment.curve(f"{SIGN}{sign}")]
        if not looked_for:
            return ""
        settings: Diagnostics | None = None  # the run's own thresholds, where its configuration has them
        if experiment.config:
            try:
                given = experiment.config.get("diagnostics") or {}
                settings = TypeAdapter(Diagnostics).validate_python(given)
            except ValidationError:  # of another time
                pass
        weights = None
        if experiment.stopped and settings is not None:
            # Which weights are from before the sign that ended the run.
            done = int(experiment.metrics[-1]["iteration"]) + 1
            good = last_good(settings, _diagnosed(experiment, settings, done), done - 1)
            if good is not None:
                directory = ExperimentDirectory(experiment.path)
                checkpoints = {number: directory.checkpoint(number) for number in directory.checkpoints()}
                weights = good_weights(good, checkpoints)
        return render(
            "diagnostics.html",
            rows=[_sign_row(experiment, settings, sign) for sign in looked_for],
            stopped=experiment.stopped,
            good_weights=weights,
        )


def _sign_row(one: StoredExperiment, settings: Diagnostics | None, sign: Sign) -> dict[str, Any]:
    looked = one.curve(f"{SIGN}{sign}")
    seen = [int(iteration) for iteration, counts in looked if counts]
    # The sign's last message in the words of the log: where it isn't seen now, of when it last was.
    upto = seen[-1] if seen else int(looked[-1][0])
    finding = _diagnosed(one, settings, upto).get(sign, CollapseSign(sign))
    if seen:
        kind, verdict = "wrong", "at the end" if looked[-1][1] else "before"
    elif finding.early:
        kind, verdict = "", "too early"
    elif finding.words and settings is not None:
        kind, verdict = "", f"for fewer than {settings.patience} iterations"
    else:
        kind, verdict = "correct", "no"
    measured: dict[str, str | None] = {}
    for name in METRICS[sign]:
        if points := one.curve(name):
            # None where the threshold is about how much it varies.
            measured[name] = None if sign == "gradient_noise" else f"{points[-1][1]:.3g}"
    thresholds = settings.thresholds(sign) if settings is not None else {}
    return {
        "sign": sign,
        "words": SIGN_NAMES[sign],
        "kind": kind,
        "verdict": verdict,
        "iterations": _ranges(seen),
        "messages": [words for words in (finding.words, REMEDIES[sign] if seen else "") if words],
        "measured": measured | {key: f"{value:g}" for key, value in thresholds.items()},
    }


def _diagnosed(one: StoredExperiment, settings: Diagnostics | None, done: int) -> Mapping[Sign, CollapseSign]:
    """Returns the signs of the first `done` iterations, as the run itself saw them."""
    if settings is None:
        return {}
    max_tokens = None  # the answers' limit: the rollout's, or that of the rollout which it wraps
    rollout = one.config.get("rollout")
    while isinstance(rollout, Mapping):
        sampling = rollout.get("sampling")
        if isinstance(sampling, Mapping):
            limit = sampling.get("max_tokens")
            max_tokens = limit if isinstance(limit, int) else None
            break
        rollout = rollout.get("rollout")
    rows = [row for row in one.metrics if row["iteration"] < done]
    # Signs in answers are looked for where some are sampled, and were recorded if they were.
    return diagnose(settings, Watched(sampled=True, max_tokens=max_tokens), rows)


def _ranges(numbers: Iterable[int]) -> str:
    """Writes rising whole numbers, neighbours together: 3–5, 9."""
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        own = [number for _, number in run]
        runs.append(str(own[0]) if len(own) == 1 else f"{own[0]}–{own[-1]}")
    return ", ".join(runs)


# Time


class TimesSection(ReportSection):
    title = "Time by phase"

    @override
    def html(self, experiment: StoredExperiment) -> str:
        """Shares of the whole run, and a bar per iteration."""
        rows = phase_seconds(experiment)
        totals = phase_totals(rows)
        if not totals:
            return ""
        return render(
            "times.html",
            totals=totals,
            words=PHASES,
            whole=math.fsum(totals.values()),
            iterations=len(rows),
            bars=thinned(rows),
            plan=plan_beside(experiment),
        )
