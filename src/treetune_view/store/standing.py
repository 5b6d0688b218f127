"""How an experiment stands: running, waiting, stopped and why, finished; what it measured; the time left."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from treetune_view.report.experiment import Experiment
from treetune_view.store.catalogue import Run, Store

State = Literal["running", "waiting", "stopped", "finished"]

LOG_BYTES = 32_768
"""Of the end of a log, for why a run stopped."""

RECENT = 5
"""Iterations over which the time that is left is estimated."""

_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [A-Z]+ (.*)")


@dataclass(frozen=True)
class Accuracy:
    """pass@1 on an evaluation set after so many iterations, with the bounds of its 95 % interval."""

    label: str
    value: float
    low: float | None
    high: float | None
    iteration: int
    problems: int | None


@dataclass(frozen=True)
class Standing:
    """`done` of `planned` iterations; `seconds_left` where it runs and has done one; `wall_time` of the
    newest record, in seconds since 1970; `why`: what ended it, or what it is at."""

    state: State
    why: str
    done: int
    planned: int | None
    seconds_left: float | None
    wall_time: float | None
    method: str
    parts: Mapping[str, str]
    accuracies: tuple[Accuracy, ...]
    seed: int | None


def standing(store: Store, run: Run) -> Standing:
    """Raises ValueError for a folder that holds nothing to read."""
    return store.known("standing", run, lambda: _standing(store.experiment(run), run))


def _standing(one: Experiment, run: Run) -> Standing:
    done = len(one.metrics)
    planned = one.expected_iterations
    log = run.directory.logs / "run.log"
    state: State
    if one.running:
        state, why = "running", last_words(log)
    elif planned is not None and done >= planned:
        state, why = "finished", ""
    elif not run.directory.has_work():
        state, why = "waiting", "nothing was sampled or trained yet"
    else:
        state, why = "stopped", why_stopped(one, log)
    parts = one.method
    return Standing(
        state=state,
        why=why,
        done=done,
        planned=planned,
        seconds_left=_seconds_left(one, done, planned),
        wall_time=one.metrics[-1].get("wall_time") if one.metrics else None,
        method=" · ".join(parts[key] for key in ("credit", "objective") if key in parts),
        parts=parts,
        accuracies=tuple(_accuracies(one)),
        seed=one.config.get("seed"),
    )


def _seconds_left(one: Experiment, done: int, planned: int | None) -> float | None:
    recent = [row["seconds/total"] for row in one.metrics[-RECENT:] if "seconds/total" in row]
    if not one.running or planned is None or done >= planned or not recent:
        return None
    each = sum(recent) / len(recent)
    gone = max(0.0, time.time() - one.metrics[-1].get("wall_time", time.time()))
    return max(0.0, (planned - done) * each - min(gone, each))


def why_stopped(one: Experiment, log: Path) -> str:
    """What ended a run that isn't finished, from its last metrics and the end of its log."""
    if one.stopped:
        signs = [key.partition("/")[2] for key, value in one.metrics[-1].items() if _is_sign(key) and value]
        return f"signs of collapse: {', '.join(signs)}"
    lines = _end_of(log)
    said = [i for i, line in enumerate(lines) if _LINE.match(line)]
    after = lines[said[-1] + 1 :] if said else lines
    if any(line.startswith("Traceback") for line in after):
        return next(line for line in reversed(after) if line.strip())
    last = last_words(log)
    return f"interrupted; the last that it said: {last}" if last else "interrupted before it said anything"


def last_words(log: Path) -> str:
    """The last line that a run said of itself."""
    said = [match[1] for line in _end_of(log) if (match := _LINE.match(line))]
    return said[-1] if said else ""


def _is_sign(key: str) -> bool:
    return key.startswith("diagnostics/") and key != "diagnostics/stop"


def _end_of(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _accuracies(one: Experiment) -> list[Accuracy]:
    """Of each evaluation set the newest."""
    found = []
    for label, summaries in one.evaluations.items():
        last = summaries[max(summaries)]
        low, high = last.get("ci_low"), last.get("ci_high")
        problems = last.get("n_problems")
        found.append(Accuracy(label, float(last["pass_at_1"]), low, high, max(summaries), problems))
    return found
