"""What an experiment's directory holds, read for a report: all there is, and what is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from treetune.rollouts.storage import TOKENS
from treetune.runtime.analysis import read_result
from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.manifest import read_config
from treetune.runtime.stop_after import StopAfter, expected_iterations
from treetune.store.checksums import read_record, verify_once

METHOD = ("task", "rollout", "credit", "selection")
"""Where a configuration says what makes a method; the objective is the trainer's."""


@dataclass(frozen=True)
class Experiment:
    """One experiment as it lies on disk, running or finished.

    `evaluations` maps an evaluation set's name to its summaries by checkpoint (the number of
    finished iterations). `missing` says in words what a finished run would have beside that.
    """

    path: Path
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: Mapping[str, Mapping[int, Mapping[str, Any]]]
    running: bool
    missing: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.config.get("experiment_name") or self.path.resolve().name)

    @property
    def method(self) -> dict[str, str]:
        """The types of what makes a method, by the place where each stands."""
        found = {key: (self.config.get(key) or {}).get("type") for key in METHOD}
        found["objective"] = ((self.config.get("trainer") or {}).get("objective") or {}).get("type")
        return {key: str(name) for key, name in found.items() if name}

    @property
    def trained_on(self) -> str:
        """What its iterations train on, in words."""
        return "demonstrations" if self.method.get("rollout") == "demonstrations" else "sampled answers"

    @property
    def planned_iterations(self) -> int | None:
        return self.config.get("iterations")

    @property
    def expected_iterations(self) -> int | None:
        """How many it has; where a budget ends it, how many that lets expect."""
        most, budget = self.planned_iterations, self.config.get("stop_after")
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
        """Whether a sign of collapse ended the run in its last iteration, and nobody goes on with it."""
        return not self.running and _is_stopped(self.metrics)

    def curve(self, key: str) -> list[tuple[float, float]]:
        """(finished iterations, value) wherever a metric was recorded as a finite number."""
        points = [(row["iteration"] + 1, row[key]) for row in self.metrics if _is_number(row.get(key))]
        return [(float(x), float(y)) for x, y in points]


def read_experiment(path: Path) -> Experiment:
    """Reads an experiment's directory.

    Raises ValueError if `path` is no directory or holds nothing that an experiment writes; what
    single files hold that can't be read counts as missing.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is no directory: give an experiment's, such as experiments/quickstart/sft")
    directory = ExperimentDirectory(path)
    missing: list[str] = []
    config = _told(missing, "config.json", lambda: read_config(path))
    manifest = _told(missing, "manifest.json", lambda: read_record(path / "manifest.json", "put it back"))
    metrics = list(_metrics(directory, missing))
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
        raise ValueError(
            f"{path} is no experiment: it has no configuration, metrics or evaluations"
            f"{damaged or _below(path)}"
        )
    for result in sorted(path.glob("analyses/*/result.json")):
        _told(missing, str(result.relative_to(path)), partial(read_result, result.parent))
    if (path / TOKENS).is_file():
        _told(missing, TOKENS, lambda: verify_once(path / TOKENS, "a run that goes on writes it again"))
    if not evaluations:
        missing.append("no checkpoint has been evaluated yet: run_evaluation does")
    running = directory.is_running()
    found = Experiment(path, config, manifest, metrics, evaluations, running, missing)
    planned = found.expected_iterations
    if isinstance(planned, int) and len(metrics) < planned:
        state = "is still running" if running else "was interrupted, and continues with the same command"
        if not running and _is_stopped(metrics):
            state = "was stopped by a sign of collapse"
        missing.append(f"{len(metrics)} of {planned} iterations are finished: the run {state}")
    return found


def _metrics(directory: ExperimentDirectory, missing: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each iteration, without whole numbers that are larger than any that can be drawn."""
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
            yield {key: value for key, value in row.items() if key not in huge}


def _below(path: Path) -> str:
    """The experiments that somebody may have meant."""
    found = sorted(config.parent for depth in ("*", "*/*") for config in path.glob(f"{depth}/config.json"))
    return f"; below it lie {', '.join(map(str, found))}" if found else ""


def read_summaries(evaluations: Path, name: str) -> dict[int, dict[str, Any]]:
    """The summaries of one evaluation set by checkpoint, the lowest first.

    Raises ValueError for a summary that is not what an evaluation writes.
    """
    found = {}
    for path in sorted(evaluations.glob(f"*/{name}/summary.json")):
        try:
            summary = read_record(path, "delete its folder and evaluate again")
            summary = {**summary, "iteration": int(path.parent.parent.name)}
            float(summary["pass_at_1"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(
                f"{path} is no evaluation's summary ({error!r}): delete it and evaluate again"
            ) from error
        found[summary["iteration"]] = summary
    return dict(sorted(found.items()))


def _told(missing: list[str], name: str, read: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """What is read; nothing, and a word in `missing`, where it can't be."""
    try:
        return read() or {}
    except FileNotFoundError:
        missing.append(f"{name} is not there")
    except (OSError, ValueError) as error:
        missing.append(f"{name} can't be read: {error}")
    return {}


def _is_stopped(metrics: list[dict[str, Any]]) -> bool:
    return bool(metrics) and metrics[-1].get("diagnostics/stop") == 1


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max
