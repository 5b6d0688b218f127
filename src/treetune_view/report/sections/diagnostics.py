"""The report's section on collapse signs: what was looked for, what was found, and when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from treetune.runtime.diagnostics import (
    METRICS,
    REMEDIES,
    SIGNS,
    Diagnostics,
    Finding,
    Sign,
    Watched,
    diagnose,
    good_weights,
    last_good,
)
from treetune.runtime.directory import ExperimentDirectory
from treetune_view.report.experiment import Experiment
from treetune_view.report.pages import render
from treetune_view.report.sections.base import ReportSection

PREFIX = "diagnostics/"

WORDS: Mapping[Sign, str] = {
    "entropy_low": "entropy has collapsed",
    "answers_short": "answers have collapsed to a few tokens",
    "answers_at_limit": "answers are as long as they may be",
    "truncated": "answers are cut off",
    "no_spread": "answers to a problem earn all the same",
    "gradient_noise": "the gradient norm does not settle",
}


class DiagnosticsSection(ReportSection):
    title = "Signs of collapse"

    def applies(self, experiment: Experiment) -> bool:
        """Runs may look for no sign at all."""
        return any(experiment.curve(f"{PREFIX}{sign}") for sign in SIGNS)

    def html(self, experiment: Experiment) -> str:
        """A row for each sign that was looked for."""
        settings = _settings(experiment.config)
        return render(
            "diagnostics.html",
            rows=[_row(experiment, settings, sign) for sign in SIGNS if experiment.curve(f"{PREFIX}{sign}")],
            stopped=experiment.stopped,
            good_weights=_good_weights(experiment, settings) if experiment.stopped else None,
        )


def _row(one: Experiment, settings: Diagnostics | None, sign: Sign) -> dict[str, Any]:
    looked = one.curve(f"{PREFIX}{sign}")
    seen = [int(iteration) for iteration, counts in looked if counts]
    # What a sign said last, in the words of the log: where it isn't seen now, when it last was.
    upto = seen[-1] if seen else int(looked[-1][0])
    found = _diagnosed(one, settings, upto).get(sign, Finding(sign))
    if seen:
        kind, verdict = "wrong", "at the end" if looked[-1][1] else "before"
    elif found.early:
        kind, verdict = "", "too early"
    elif found.words and settings is not None:
        kind, verdict = "", f"for fewer than {settings.patience} iterations"
    else:
        kind, verdict = "correct", "no"
    values = {name: _last(one, sign, name) for name in METRICS[sign] if one.curve(name)}
    thresholds = settings.thresholds(sign) if settings is not None else {}
    return {
        "sign": sign,
        "words": WORDS[sign],
        "kind": kind,
        "verdict": verdict,
        "iterations": ", ".join(_ranges(seen)),
        "found": [words for words in (found.words, REMEDIES[sign] if seen else "") if words],
        "measured": values | {key: f"{value:g}" for key, value in thresholds.items()},
    }


def _last(one: Experiment, sign: Sign, name: str) -> str | None:
    """The metric's last value; none where the threshold is about how much it varies."""
    return None if sign == "gradient_noise" else f"{one.curve(name)[-1][1]:.3g}"


def _good_weights(one: Experiment, settings: Diagnostics | None) -> str | None:
    """Which weights are from before the sign that ended the run."""
    done = int(one.metrics[-1]["iteration"]) + 1
    good = None if settings is None else last_good(settings, _diagnosed(one, settings, done), done - 1)
    if good is None:
        return None
    directory = ExperimentDirectory(one.path)
    return good_weights(good, {number: directory.checkpoint(number) for number in directory.checkpoints()})


def _settings(config: Mapping[str, Any]) -> Diagnostics | None:
    """The run's own thresholds; None where its configuration is not there, or is of another time."""
    if not config:
        return None
    try:
        return TypeAdapter(Diagnostics).validate_python(config.get("diagnostics") or {})
    except ValidationError:
        return None


def _diagnosed(one: Experiment, settings: Diagnostics | None, done: int) -> Mapping[Sign, Finding]:
    """What the first `done` iterations showed, as the run itself saw it."""
    if settings is None:
        return {}
    rows = [row for row in one.metrics if row["iteration"] < done]
    # Signs in answers are looked for where some are sampled, and were recorded if they were.
    return diagnose(settings, Watched(sampled=True, max_tokens=_max_tokens(one.config)), rows)


def _max_tokens(config: Mapping[str, Any]) -> int | None:
    """The answers' limit: the rollout's, or that of the rollout which it wraps."""
    rollout = config.get("rollout")
    while isinstance(rollout, Mapping):
        sampling = rollout.get("sampling")
        if isinstance(sampling, Mapping):
            limit = sampling.get("max_tokens")
            return limit if isinstance(limit, int) else None
        rollout = rollout.get("rollout")
    return None


def _ranges(numbers: Iterable[int]) -> Iterator[str]:
    """3–5, 9: rising whole numbers, neighbours together."""
    run: list[int] = []
    for number in numbers:
        if run and number != run[-1] + 1:
            yield _range(run)
            run = []
        run.append(number)
    if run:
        yield _range(run)


def _range(run: list[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}"
