"""An experiment's directory, read for whoever shows it: all there is, what is missing, and how it stands."""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from treetune.rollouts.storage import TOKENS
from treetune.runtime.analysis import read_result
from treetune.runtime.base import StopAfter
from treetune.runtime.directory import PREDICTION, ExperimentDirectory, expected_iterations
from treetune.runtime.manifest import read_config
from treetune.store.checksums import read_record, verify_once

METHOD = ("task", "rollout", "credit", "selection")
"""Keys of a configuration that make a method; the objective is the trainer's."""

LOG_BYTES = 32_768
"""The end of a log that says why a run stopped."""

RECENT = 5
"""Iterations over which the time that is left is estimated."""

_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [A-Z]+ (.*)")


@dataclass(frozen=True)
class StoredExperiment:
    """An experiment as it lies on disk, running or finished.

    `evaluations` maps an evaluation set's name to its summaries by checkpoint (the number of
    finished iterations). `missing` describes what a finished run would have beside that.
    """

    path: Path
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: Mapping[str, Mapping[int, Mapping[str, Any]]]
    running: bool
    missing: list[str] = field(default_factory=list)
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """Plan of an iteration when the run started, by names of metrics."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What was read once for whoever asks again."""

    @property
    def name(self) -> str:
        return str(self.config.get("experiment_name") or self.path.resolve().name)

    @property
    def method(self) -> dict[str, str]:
        """The types of the parts that make a method, by their keys."""
        types = {key: (self.config.get(key) or {}).get("type") for key in METHOD}
        types["objective"] = ((self.config.get("trainer") or {}).get("objective") or {}).get("type")
        return {key: str(name) for key, name in types.items() if name}

    @property
    def trained_on(self) -> str:
        """The kind of data that its iterations train on."""
        return "demonstrations" if self.method.get("rollout") == "demonstrations" else "sampled answers"

    @property
    def expected_iterations(self) -> int | None:
        """The number of its iterations; where a budget ends it, the number that the budget lets expect."""
        most, budget = self.config.get("iterations"), self.config.get("stop_after")
        if not isinstance(most, int) or not isinstance(budget, Mapping):
            return most
        try:
            return expected_iterations(
                most, StopAfter(**budget), ExperimentDirectory(self.path), len(self.metrics)
            )
        except (TypeError, ValueError):  # of another version: the bound is what is known
            return most

    @property
    def stopped(self) -> bool:
        """True where a sign of collapse ended the run in its last iteration, and nobody goes on with it."""
        return not self.running and bool(self.metrics) and self.metrics[-1].get("diagnostics/stop") == 1

    @property
    def bits_rest_on(self) -> Mapping[str, Any]:
        """The manifest's versions and machine; runs of earlier versions have them at its top."""
        return self.manifest.get("bits_rest_on") or self.manifest

    @property
    def command(self) -> Mapping[str, Any] | None:
        """The newest command that set the configuration which is there now."""
        entries = [self.manifest, *self.manifest.get("continued", ())]
        return next((one["command"] for one in reversed(entries) if "command" in one), None)

    @functools.cached_property
    def recorded(self) -> set[str]:
        """The keys of all iterations."""
        return set().union(*self.metrics)

    def curve(self, key: str) -> list[tuple[float, float]]:
        """Returns (finished iterations, value) wherever a metric was recorded as a finite number."""
        if key not in self.kept:
            points = [(row["iteration"] + 1, row[key]) for row in self.metrics if _is_number(row.get(key))]
            self.kept[key] = [(float(x), float(y)) for x, y in points]
        return self.kept[key]


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def read_experiment(path: Path) -> StoredExperiment:
    """Reads an experiment's directory.

    Raises ValueError if `path` is no directory or holds nothing that an experiment writes; what
    single files hold that can't be read counts as missing.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is no directory: give an experiment's, such as experiments/quickstart/sft")
    directory = ExperimentDirectory(path)
    missing: list[str] = []

    def read(name: str, reader: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
        try:
            return reader() or {}
        except FileNotFoundError:
            missing.append(f"{name} is not there")
        except (OSError, ValueError) as error:
            missing.append(f"{name} can't be read: {error}")
        return {}

    config = read("config.json", lambda: read_config(path))
    manifest = read("manifest.json", lambda: read_record(path / "manifest.json", "put it back"))
    metrics = _read_metrics(directory, missing)
    if not metrics:
        missing.append("no iteration is finished yet (metrics.jsonl is empty or not there)")
    evaluations: dict[str, dict[int, dict[str, Any]]] = {}
    for name in sorted({summary.parent.name for summary in path.glob("evaluations/*/*/summary.json")}):
        try:
            evaluations[name] = read_summaries(path / "evaluations", name)
        except ValueError as error:
            missing.append(str(error))
    if not config and not metrics and not evaluations:
        damaged = "".join(f"; {words}" for words in missing if "damaged" in words)
        configs = (config for depth in ("*", "*/*") for config in path.glob(f"{depth}/config.json"))
        below = ", ".join(sorted(str(config.parent) for config in configs))
        raise ValueError(
            f"{path} is no experiment: it has no configuration, metrics or evaluations"
            f"{damaged or (f'; below it lie {below}' if below else '')}"
        )
    for result in sorted(path.glob("analyses/*/result.json")):
        read(str(result.relative_to(path)), functools.partial(read_result, result.parent))
    if (path / TOKENS).is_file():
        read(TOKENS, lambda: verify_once(path / TOKENS, "a run that goes on writes it again"))
    predicted: dict[str, Any] = {}
    if (path / PREDICTION).is_file():
        predicted = read(PREDICTION, lambda: read_record(path / PREDICTION, "the next start writes it again"))
    if not evaluations:
        missing.append("no checkpoint has been evaluated yet: run_evaluation does")
    running = directory.is_running()
    experiment = StoredExperiment(path, config, manifest, metrics, evaluations, running, missing, predicted)
    planned = experiment.expected_iterations
    if isinstance(planned, int) and len(metrics) < planned:
        state = "is still running" if running else "was interrupted, and continues with the same command"
        if experiment.stopped:
            state = "was stopped by a sign of collapse"
        missing.append(f"{len(metrics)} of {planned} iterations are finished: the run {state}")
    return experiment


def _read_metrics(directory: ExperimentDirectory, missing: list[str]) -> list[dict[str, Any]]:
    """Returns a row for each iteration, without whole numbers that are larger than any that can be drawn."""
    rows = []
    for row in directory.read_metrics(missing):
        huge = {
            key for key, value in row.items() if isinstance(value, int) and abs(value) > sys.float_info.max
        }
        for key in sorted(huge):
            missing.append(
                f"{key} of a line of {directory.metrics} is a whole number of {len(str(abs(row[key])))}"
                " digits, and is left out"
            )
        if _is_number(row.get("iteration")) and "iteration" not in huge:
            rows.append({key: value for key, value in row.items() if key not in huge})
    return rows


def read_summaries(evaluations: Path, name: str) -> dict[int, dict[str, Any]]:
    """Returns the summaries of one evaluation set by checkpoint, the lowest first.

    Raises ValueError for a summary that is not what an evaluation writes.
    """
    summaries = {}
    for path in sorted(evaluations.glob(f"*/{name}/summary.json")):
        try:
            summary = read_record(path, "delete its folder and evaluate again")
            summary = {**summary, "iteration": int(path.parent.parent.name)}
            float(summary["pass_at_1"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(
                f"{path} is no evaluation's summary ({error!r}): delete it and evaluate again"
            ) from error
        summaries[summary["iteration"]] = summary
    return dict(sorted(summaries.items()))


# How an experiment stands


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
class RunProgress:
    """`done` of `planned` iterations; `seconds_left` where it runs and has done one; `wall_time` of the
    newest record, in seconds since 1970; `why`: what ended it, or what it is at."""

    state: Literal["running", "waiting", "stopped", "finished"]
    why: str
    done: int
    planned: int | None
    seconds_left: float | None
    wall_time: float | None
    method: str
    parts: Mapping[str, str]
    accuracies: tuple[Accuracy, ...]
    seed: int | None


def status_of(one: StoredExperiment) -> RunProgress:
    directory = ExperimentDirectory(one.path)
    done, planned, parts = len(one.metrics), one.expected_iterations, one.method
    log = _end_of(directory.logs / "run.log")
    messages = [match[1] for line in log if (match := _LINE.match(line))]
    state: Literal["running", "waiting", "stopped", "finished"]
    if one.running:
        state, why = "running", messages[-1] if messages else ""
    elif planned is not None and done >= planned:
        state, why = "finished", ""
    elif not directory.has_work():
        state, why = "waiting", "nothing was sampled or trained yet"
    else:
        state, why = "stopped", _why_stopped(one, log, messages)
    recent = [row["seconds/total"] for row in one.metrics[-RECENT:] if "seconds/total" in row]
    seconds_left = None
    if one.running and planned is not None and done < planned and recent:
        each = sum(recent) / len(recent)
        gone = max(0.0, time.time() - one.metrics[-1].get("wall_time", time.time()))
        seconds_left = max(0.0, (planned - done) * each - min(gone, each))
    newest = {label: summaries[max(summaries)] for label, summaries in one.evaluations.items()}
    return RunProgress(
        state=state,
        why=why,
        done=done,
        planned=planned,
        seconds_left=seconds_left,
        wall_time=one.metrics[-1].get("wall_time") if one.metrics else None,
        method=" · ".join(parts[key] for key in ("credit", "objective") if key in parts),
        parts=parts,
        accuracies=tuple(
            Accuracy(
                label,
                float(last["pass_at_1"]),
                last.get("ci_low"),
                last.get("ci_high"),
                last["iteration"],
                last.get("n_problems"),
            )
            for label, last in newest.items()
        ),
        seed=one.config.get("seed"),
    )


def _why_stopped(one: StoredExperiment, log: list[str], messages: list[str]) -> str:
    """Returns what ended a run that isn't finished, from its last metrics and the end of its log."""
    if one.stopped:
        signs = [
            key.removeprefix("diagnostics/")
            for key, value in one.metrics[-1].items()
            if key.startswith("diagnostics/") and key != "diagnostics/stop" and value
        ]
        return f"signs of collapse: {', '.join(signs)}"
    logged = [i for i, line in enumerate(log) if _LINE.match(line)]
    after = log[logged[-1] + 1 :] if logged else log
    if any(line.startswith("Traceback") for line in after):
        return next(line for line in reversed(after) if line.strip())
    if messages:
        return f"interrupted; the last that it said: {messages[-1]}"
    return "interrupted before it said anything"


def _end_of(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
