"""The report's section on collapse signs: what was looked for, what was found, and when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from pydantic import TypeAdapter, ValidationError

from treetune.reports.experiment import Experiment
from treetune.reports.sections.base import ReportSection
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

PREFIX = "diagnostics/"

WORDS: Mapping[Sign, str] = {
    "entropy_low": "entropy has collapsed",
    "answers_short": "answers have collapsed to a few tokens",
    "answers_at_limit": "answers are as long as they may be",
    "truncated": "answers are cut off",
    "no_spread": "answers to a problem earn all the same",
    "gradient_noise": "the gradient norm does not settle",
}


HEADS = ("sign", "seen", "iterations", "what was seen, and what may help", "last value, thresholds")


class DiagnosticsSection(ReportSection):
    title = "Signs of collapse"

    def applies(self, experiment: Experiment) -> bool:
        """Runs may look for no sign at all."""
        return any(experiment.curve(f"{PREFIX}{sign}") for sign in SIGNS)

    def html(self, experiment: Experiment) -> str:
        return _table(experiment)


def _table(one: Experiment) -> str:
    """A row for each sign that was looked for."""
    settings = _settings(one.config)
    rows = [_row(one, settings, sign) for sign in SIGNS if one.curve(f"{PREFIX}{sign}")]
    head = "".join(f"<th>{name}</th>" for name in HEADS)
    return (
        f'{_end(one, settings)}<div class="scroll"><table class="results signs">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(one: Experiment, settings: Diagnostics | None, sign: Sign) -> str:
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
        kind, verdict = "right", "no"
    metrics = [_metric(one, sign, name) for name in METRICS[sign]]
    thresholds = settings.thresholds(sign) if settings is not None else {}
    cells = [
        f"{escape(WORDS[sign])} <code>{sign}</code>",
        f'<span class="verdict {kind}">{escape(verdict)}</span>',
        escape(", ".join(_ranges(seen)) or "–"),
        "<br>".join(escape(words) for words in (found.words, REMEDIES[sign] if seen else "") if words) or "–",
        "<br>".join(
            [
                *(words for words in metrics if words),
                *(f"<code>{key}</code>: {value:g}" for key, value in thresholds.items()),
            ]
        )
        or "–",
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _metric(one: Experiment, sign: Sign, name: str) -> str:
    points = one.curve(name)
    if not points:
        return ""
    # The threshold of this sign is not about the metric's value, but about how much it varies.
    value = "" if sign == "gradient_noise" else f": {points[-1][1]:.3g}"
    return f"<code>{escape(name)}</code>{value}"


def _end(one: Experiment, settings: Diagnostics | None) -> str:
    """Where a sign ended the run: that it did, and which weights are from before."""
    if not one.stopped:
        return ""
    words = "The run was stopped for it, as <code>diagnostics.on_collapse</code> says"
    done = int(one.metrics[-1]["iteration"]) + 1
    good = None if settings is None else last_good(settings, _diagnosed(one, settings, done), done - 1)
    if good is not None:
        directory = ExperimentDirectory(one.path)
        paths = {number: directory.checkpoint(number) for number in directory.checkpoints()}
        words += f": {escape(good_weights(good, paths))}"
    return f'<p class="missing">{words}.</p>'


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
