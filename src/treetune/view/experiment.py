"""Reads an experiment's directory for the viewer, reports and tables, and computes its status."""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from treetune.rollouts.storage import TOKENS
from treetune.runtime.analysis import read_result
from treetune.runtime.base import StopAfter
from treetune.runtime.directory import (
    CONFIG,
    MANIFEST,
    PREDICTION,
    RESULT,
    ExperimentDirectory,
    expected_iterations,
)
from treetune.runtime.manifest import read_config
from treetune.store.checksums import read_record, verify_once

CREDITED_LOG = "credited_log"
"""The `type` in the configuration of an experiment that `treetune credit` has made from another program's
log."""

LOG_ROWS, LOG_CREDITED = "log/rows", "log/credited"
"""Metrics of a credited log: the number of rows of a file, and the number of those that have credit."""

METHOD_KEYS = ("task", "rollout", "credit", "selection")
"""The keys of a configuration that define a method, together with the trainer's objective."""

SEARCHED_LOG_BYTES = 32_768
"""The number of bytes at a log's end that are searched for the reason why a run stopped."""

RECENT_ITERATIONS = 5
"""The number of last iterations from whose mean time the time left is estimated."""

# A message in a run's log, after its time and level: "2026-05-01 12:00:00,123 INFO iteration 3 …".
_LOG_MESSAGE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [A-Z]+ (.*)")


def name_of_task(task: Mapping[str, Any]) -> str:
    """Returns the name that a task's configuration gives, or its type if it gives none."""
    return str(task.get("name") or task.get("type") or "")


@dataclass(frozen=True)
class StoredExperiment:
    """An experiment on disk, running or finished."""

    path: Path
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    metrics: list[dict[str, Any]]
    """A row for each iteration: [{"iteration": 0, "episodes/reward": 0.41, …}, …]."""
    evaluations: Mapping[str, Mapping[int, Mapping[str, Any]]]
    """Summaries by evaluation set and finished iterations: {"test": {50: {"pass_at_1": 0.48, …}}}."""
    running: bool
    missing: list[str] = field(default_factory=list)
    """Messages on what is missing: files that aren't there or can't be read, iterations and evaluations."""
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """The plan of an iteration that was made when the run started, by metric: {"seconds/training": 40.0,
    …}."""
    cache: dict[str, Any] = field(default_factory=dict)
    """Values that were computed from the fields above, each under a name, for the next request."""

    @property
    def name(self) -> str:
        return str(self.config.get("experiment_name") or self.path.resolve().name)

    @property
    def directory(self) -> ExperimentDirectory:
        return ExperimentDirectory(self.path)

    @property
    def method(self) -> dict[str, str]:
        """The type of each part of the method: {"task": "math", "credit": "monte_carlo", …}.

        The key "task" has the task's name if the configuration gives one.
        """
        types = {key: (self.config.get(key) or {}).get("type") for key in METHOD_KEYS}
        types["task"] = name_of_task(self.config.get("task") or {})
        types["objective"] = ((self.config.get("trainer") or {}).get("objective") or {}).get("type")
        return {key: str(name) for key, name in types.items() if name}

    @property
    def trained_on(self) -> str:
        """The kind of data that the iterations train on."""
        return "demonstrations" if self.method.get("rollout") == "demonstrations" else "sampled answers"

    @property
    def expected_iterations(self) -> int | None:
        """The number of iterations in all; None if the configuration has none.

        If a budget (`stop_after`) may end the run, the number is estimated from the finished iterations.
        """
        most, budget = self.config.get("iterations"), self.config.get("stop_after")
        if not isinstance(most, int) or not isinstance(budget, Mapping):
            return most
        try:
            return expected_iterations(most, StopAfter(**budget), self.directory, len(self.metrics))
        except (TypeError, ValueError):  # a budget of another version
            return most

    @property
    def stopped(self) -> bool:
        """Whether a sign of collapse ended the run in its last iteration, and nothing has resumed it
        since."""
        return not self.running and bool(self.metrics) and self.metrics[-1].get("diagnostics/stop") == 1

    @property
    def environment(self) -> Mapping[str, Any]:
        """The versions and the machine that the manifest records, in ``bits_rest_on``. Manifests of earlier
        versions of treetune have them at their top level."""
        return self.manifest.get("bits_rest_on") or self.manifest

    @property
    def command(self) -> Mapping[str, Any] | None:
        """The newest command that set the run's present configuration: it started the run, or resumed it with
        changes. None if no command is recorded."""
        entries = [self.manifest, *self.manifest.get("continued", ())]
        commands = [entry["command"] for entry in entries if "command" in entry]
        return commands[-1] if commands else None

    @property
    def forked(self) -> Mapping[str, Any] | None:
        """The run that this one was forked from, how many of its iterations were finished, and the hash of
        its configuration: {"run": "experiments/vineppo", "after": 8, "config": "9f2c…"}. None if the run was
        not forked."""
        return self.manifest.get("forked")

    @functools.cached_property
    def recorded(self) -> set[str]:
        """The names of all metrics that at least one iteration recorded."""
        return set().union(*self.metrics)

    def curve(self, key: str) -> list[tuple[float, float]]:
        """Returns the points (finished iterations, value) of a metric.

        Iterations in which the metric isn't a finite number are left out.
        """
        if key not in self.cache:
            points = [(row["iteration"] + 1, row[key]) for row in self.metrics if _is_number(row.get(key))]
            self.cache[key] = [(float(x), float(y)) for x, y in points]
        return self.cache[key]


def _is_number(value: object) -> bool:
    """Returns whether a value is a finite number that a float can hold. True and False are no numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # false for NaN as well


def read_experiment(path: Path) -> StoredExperiment:
    """Reads an experiment's directory.

    Raises ValueError if `path` is not a directory, or if no configuration, metric or evaluation can be read
    in it. Files that can't be read are otherwise named in `missing` of the result.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory: give an experiment's, e.g. experiments/quickstart/sft")
    directory = ExperimentDirectory(path)
    missing_facts: list[str] = []

    def read(name: str, reader: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
        """Returns what `reader` reads. If it can't, adds a message to `missing_facts` and returns {}."""
        try:
            return reader() or {}
        except FileNotFoundError:
            missing_facts.append(f"{name} is not there")
        except (OSError, ValueError) as error:
            missing_facts.append(f"{name} can't be read: {error}")
        return {}

    config = read(CONFIG, lambda: read_config(path))
    manifest = read(MANIFEST, lambda: read_record(directory.manifest_file, "restore it"))
    metrics = _read_metrics(directory, missing_facts)
    if not metrics:
        missing_facts.append("no iteration is finished yet (metrics.jsonl is empty or not there)")
    evaluations = _read_evaluations(directory, missing_facts)
    if not config and not metrics and not evaluations:
        raise ValueError(
            f"{path} is not an experiment: it has no configuration, metrics or evaluations"
            + _describe_other_folder(path, missing_facts)
        )
    # Results of analyses are read here only to name damaged ones in `missing_facts`.
    for label in directory.analyses():
        folder = directory.analysis_folder(label)
        read(str((folder / RESULT).relative_to(path)), functools.partial(read_result, folder))
    if (path / TOKENS).is_file():
        read(TOKENS, lambda: verify_once(path / TOKENS, "a resumed run writes it again"))
    predicted: dict[str, Any] = {}
    if (path / PREDICTION).is_file():
        predicted = read(PREDICTION, lambda: read_record(path / PREDICTION, "the next start writes it again"))
    is_run = config.get("type") != CREDITED_LOG  # and not answers of another program that were credited
    if not evaluations and is_run:
        missing_facts.append("no checkpoint has been evaluated yet: run `treetune evaluate`")
    if not is_run and (uncredited := _count_uncredited(metrics)):
        rows = f"{uncredited:,} rows of the log have" if uncredited > 1 else "1 row of the log has"
        missing_facts.append(f"{rows} no credit: the outcome of its answer says why")
    running = directory.is_running()
    experiment = StoredExperiment(
        path, config, manifest, metrics, evaluations, running, missing_facts, predicted
    )
    if remark := _describe_unfinished(experiment, is_run=is_run):
        missing_facts.append(remark)
    return experiment


def _read_evaluations(
    directory: ExperimentDirectory, missing_facts: list[str]
) -> dict[str, dict[int, dict[str, Any]]]:
    """Returns the summaries of each evaluation set, by checkpoint.

    Adds a message to `missing_facts` for a set that can't be read.
    """
    evaluations: dict[str, dict[int, dict[str, Any]]] = {}
    for label in sorted({label for _, label in directory.evaluations()}):
        try:
            summaries = directory.read_summaries(label)
        except ValueError as error:
            missing_facts.append(str(error))
            continue
        if summaries:  # without a summary, the set is still being measured for the first time
            evaluations[label] = summaries
    return evaluations


def _describe_other_folder(path: Path, missing_facts: Sequence[str]) -> str:
    """Returns the end of the message on a folder that is no experiment: its damaged files, or else the
    experiments below it."""
    damaged = [message for message in missing_facts if "damaged" in message]
    if damaged:
        return "".join(f"; {message}" for message in damaged)
    configs = [*path.glob(f"*/{CONFIG}"), *path.glob(f"*/*/{CONFIG}")]
    if not configs:
        return ""
    below = ", ".join(sorted(str(config.parent) for config in configs))
    return f"; experiments below it: {below}"


def _describe_unfinished(experiment: StoredExperiment, *, is_run: bool) -> str:
    """Returns how many of the planned iterations are finished; "" if all are, or if no number is planned.

    Args:
        is_run: Whether it is a run, and not the answers of another program that were credited.
    """
    finished, planned = len(experiment.metrics), experiment.expected_iterations
    if not isinstance(planned, int) or finished >= planned:
        return ""
    if experiment.stopped:
        state = "was stopped by a sign of collapse"
    elif experiment.running:
        state = "is still running"
    else:
        state = "was interrupted; the same command continues it"
    if is_run:
        return f"{finished} of {planned} iterations are finished: the run {state}"
    return f"{finished} of {planned} files are credited: the command {state}"


def _count_uncredited(metrics: Iterable[Mapping[str, Any]]) -> int:
    """Returns the number of rows of a log that `treetune credit` could not credit."""
    return round(sum(row.get(LOG_ROWS, 0.0) - row.get(LOG_CREDITED, 0.0) for row in metrics))


def _read_metrics(directory: ExperimentDirectory, missing_facts: list[str]) -> list[dict[str, Any]]:
    """Returns the metrics of each iteration, without integers that are too large for a float.

    Adds a message to `missing_facts` for each number that is left out, and for each line that can't be read.
    """
    rows = []
    for row in directory.read_metrics(missing_facts):
        huge = {
            key for key, value in row.items() if isinstance(value, int) and abs(value) > sys.float_info.max
        }
        for key in sorted(huge):
            missing_facts.append(
                f"{key} of a line of {directory.metrics_file} is a whole number of {len(str(abs(row[key])))}"
                " digits, and is left out"
            )
        if _is_number(row.get("iteration")) and "iteration" not in huge:
            rows.append({key: value for key, value in row.items() if key not in huge})
    return rows


# The status of an experiment


@dataclass(frozen=True)
class Accuracy:
    """pass@1 on an evaluation set after some iterations, with its 95 % interval."""

    label: str
    value: float
    low: float | None
    high: float | None
    iteration: int
    """The number of finished iterations at the evaluation."""
    problems: int | None
    """The number of problems of the set, if it is known."""


@dataclass(frozen=True)
class RunProgress:
    """The status of an experiment."""

    state: Literal["running", "waiting", "stopped", "finished"]
    why: str
    """The reason why the run stopped or waits, or the last message in the log of a running one; empty if it
    is finished."""
    finished_iterations: int
    """The number of finished iterations."""
    planned_iterations: int | None
    """The number of iterations in all; None if it is unknown."""
    seconds_left: float | None
    """The estimated seconds until the last iteration is finished; None if the run isn't running, or has no
    finished iteration to estimate from."""
    wall_time: float | None
    """The time of the newest finished iteration, in seconds since 1970."""
    method: str
    """The types of credit and objective, such as ``monte_carlo · ppo``."""
    parts: Mapping[str, str]
    """The types of the method's components: {"credit": "monte_carlo", …}."""
    accuracies: tuple[Accuracy, ...]
    """The newest accuracy on each evaluation set."""
    seed: int | None


def status_of(experiment: StoredExperiment) -> RunProgress:
    """Returns an experiment's status, computed from the experiment as it was read and the end of its log."""
    finished_iterations, planned_iterations = len(experiment.metrics), experiment.expected_iterations
    parts = experiment.method
    log = _read_end_of_log(experiment.directory.run_log)
    # Parts of a progress message are separated by two spaces, which a page shows as one.
    messages = [match[1].replace("  ", " · ") for line in log if (match := _LOG_MESSAGE.match(line))]
    state: Literal["running", "waiting", "stopped", "finished"]
    if experiment.running:
        state = "running"
        why = messages[-1] if messages else ""
    elif planned_iterations is not None and finished_iterations >= planned_iterations:
        state, why = "finished", ""
    elif not experiment.directory.has_work():
        state, why = "waiting", "nothing was sampled or trained yet"
    else:
        state, why = "stopped", _why_stopped(experiment, log, messages)
    accuracies = []
    for label, summaries in experiment.evaluations.items():
        newest = summaries[max(summaries)]
        accuracies.append(
            Accuracy(
                label,
                float(newest["pass_at_1"]),
                newest.get("ci_low"),
                newest.get("ci_high"),
                newest["iteration"],
                newest.get("n_problems"),
            )
        )
    return RunProgress(
        state=state,
        why=why,
        finished_iterations=finished_iterations,
        planned_iterations=planned_iterations,
        seconds_left=_seconds_left(experiment),
        wall_time=experiment.metrics[-1].get("wall_time") if experiment.metrics else None,
        method=" · ".join(parts[key] for key in ("credit", "objective") if key in parts),
        parts=parts,
        accuracies=tuple(accuracies),
        seed=experiment.config.get("seed"),
    )


def _seconds_left(experiment: StoredExperiment) -> float | None:
    """Returns the estimated seconds until a running experiment has finished; None if they can't be
    estimated."""
    finished_iterations, planned_iterations = len(experiment.metrics), experiment.expected_iterations
    recent = [
        row["seconds/total"] for row in experiment.metrics[-RECENT_ITERATIONS:] if "seconds/total" in row
    ]
    if not experiment.running or planned_iterations is None or not recent:
        return None
    iterations_left = planned_iterations - finished_iterations
    if iterations_left <= 0:
        return None
    seconds_each = sum(recent) / len(recent)
    # The time since the last iteration ended was spent on the present iteration, so it is subtracted, but not
    # more of it than an iteration takes.
    seconds_since_last = max(0.0, time.time() - experiment.metrics[-1].get("wall_time", time.time()))
    return max(0.0, iterations_left * seconds_each - min(seconds_since_last, seconds_each))


def _why_stopped(experiment: StoredExperiment, log: list[str], messages: list[str]) -> str:
    """Returns the reason why an unfinished run stopped, from its last metrics and the end of its log."""
    if experiment.stopped:
        # The last row says for each sign whether it was found. "diagnostics/stop" is not a sign: it says
        # whether signs ended the run.
        signs = [
            key.removeprefix("diagnostics/")
            for key, value in experiment.metrics[-1].items()
            if key.startswith("diagnostics/") and key != "diagnostics/stop" and value
        ]
        return f"signs of collapse: {', '.join(signs)}"
    message_lines = [i for i, line in enumerate(log) if _LOG_MESSAGE.match(line)]
    after_last_message = log[message_lines[-1] + 1 :] if message_lines else log
    if any(line.startswith("Traceback") for line in after_last_message):
        # The last line of a traceback is the error.
        return next(line for line in reversed(after_last_message) if line.strip())
    if messages:
        return f"interrupted; its last message: {messages[-1]}"
    return "interrupted before its first message"


def _read_end_of_log(log: Path) -> list[str]:
    """Returns the lines in the last `SEARCHED_LOG_BYTES` of a log; an empty list if the log can't be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - SEARCHED_LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
