"""An evaluation as it lies on disk, to be written in another form: summary, and answers one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treetune.runtime.directory import ExperimentDirectory, verify_answers
from treetune_view.report.experiment import Experiment, read_experiment

EVALUATE = "run_evaluation measures it"


@dataclass(frozen=True)
class Evaluation:
    """One set, measured after `iteration` finished iterations of an experiment."""

    experiment: Experiment
    label: str
    iteration: int

    @property
    def summary(self) -> Mapping[str, Any]:
        return self.experiment.evaluations[self.label][self.iteration]

    @property
    def answers(self) -> Path:
        directory = ExperimentDirectory(self.experiment.path)
        return directory.evaluation(self.iteration, self.label) / "answers.jsonl"

    @property
    def measured_at(self) -> float:
        """In seconds since 1970: when its summary was written."""
        return self.answers.with_name("summary.json").stat().st_mtime

    def rows(self) -> Iterator[dict[str, Any]]:
        """The answers in their order, without being held all at once. Raises ValueError for what is none."""
        verify_answers(self.answers)
        with self.answers.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                    row["problem"], row["sample"]
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"{self.answers}:{number} is no answer ({error!r}): delete its folder and evaluate"
                        " again"
                    ) from error
                yield row


def chosen_evaluation(path: Path, label: str | None, iteration: int | None) -> Evaluation:
    """The newest one of the only set, or what is named. Raises ValueError with what there is."""
    experiment = read_experiment(path)
    measured = experiment.evaluations
    if not measured:
        raise ValueError(f"{path} has no evaluation: {EVALUATE}")
    if label is None:
        if len(measured) > 1:
            raise ValueError(f"{path} has evaluations of {', '.join(measured)}: choose one with --set")
        label = next(iter(measured))
    if label not in measured:
        raise ValueError(f"{path} has no evaluation of {label!r}; there are {', '.join(measured)}")
    iteration = max(measured[label]) if iteration is None else iteration
    if iteration not in measured[label]:
        there = ", ".join(map(str, measured[label]))
        raise ValueError(
            f"{label} was not measured after {iteration} iterations of {path}; it was after {there}"
        )
    found = Evaluation(experiment, label, iteration)
    if not found.answers.is_file():
        raise ValueError(f"{found.answers} is not there: delete its folder, and {EVALUATE} again")
    return found


def task_of_set(config: Mapping[str, Any], label: str) -> Mapping[str, Any]:
    """The configuration of the task that a set's problems are of: its own, or the experiment's."""
    sets = (config.get("evaluation") or {}).get("sets") or ()
    own = [one.get("task") for one in sets if (one.get("name") or one.get("split")) == label]
    return next((task for task in own if task), None) or config.get("task") or {}


def writable(text: str) -> str:
    """A text that UTF-8 can hold: halves of characters, which models write, become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
