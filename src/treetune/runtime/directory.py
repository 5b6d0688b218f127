"""The experiment directory: a run is what lies in it, and everything enters whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from treetune.exceptions import Damaged
from treetune.store.checksums import SUMS, digest_of, read_record, record_of, sealed, verify_once
from treetune.vocabulary import Metrics

if TYPE_CHECKING:
    from treetune.runtime.base import EvaluationSet, PolicyIteration, StopAfter

LOCK_TRIES, LOCK_TRY_S = 4, 0.05

EVALUATORS_MOST = 1000

EPISODES = "episodes.arrow"
"""In an iteration's folder: the episodes to train on, written when all else of sampling and credit is."""

SAMPLED_TOKENS, VALUE_TOKENS = "rollout/sampled_tokens", "credit/value_tokens"
"""Metrics of how much an iteration sampled; the first counts a token that several answers share once."""

PREDICTION = "plan.json"
"""In the experiment's folder: what a plan said of an iteration when the run started, by names of metrics."""

METRICS_REMEDY = "delete it; its line of metrics.jsonl is lost, and the run goes on"
"""With a damaged record of an iteration that was trained."""

LINE_REMEDY = "the run's own command writes the file again from iterations/*/metrics.json"

ANSWERS, MEASURE_AGAIN = "answers.jsonl", "delete its folder, and it is measured again"
"""In a measured set's folder, and what to do about one that is damaged."""

Lock = Literal["run", "evaluation", "analysis", "notes"]
"""What a process is here for: to change the run, to measure it, to look into it, or to write a note."""

_WHOLE = re.compile(rb'"checksum": "[0-9a-f]+"\}\Z')
_LOCKS: dict[Lock, str] = {"run": ".lock", "analysis": ".analysis.lock", "notes": ".notes.lock"}


@dataclass(frozen=True)
class ExperimentDirectory:
    """Paths and atomic writes. `i` counts finished iterations where it names a checkpoint."""

    path: Path

    @staticmethod
    def of(config: PolicyIteration) -> ExperimentDirectory:
        return ExperimentDirectory(Path(config.directory) / config.experiment_name)

    # Where things are

    def iteration(self, i: int) -> Path:
        return self.path / "iterations" / f"{i:04d}"

    def candidate(self, i: int, point: int) -> Path:
        """Returns the folder of a measurement of the weights after so many epochs or steps of iteration `i`,
        where the best is chosen."""
        return self.iteration(i) / "candidates" / f"{point:02d}"

    def checkpoint(self, i: int) -> Path:
        return self.path / "checkpoints" / f"{i:04d}"

    def evaluation(self, i: int, label: str) -> Path:
        return self.path / "evaluations" / f"{i:04d}" / label

    def analysis(self, label: str) -> Path:
        return self.path / "analyses" / label

    @property
    def notes(self) -> Path:
        """Returns the folder of people's notes on answers."""
        return self.path / "notes"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def checkpoints(self) -> list[int]:
        """Returns the complete ones, oldest first: a checkpoint without `state.json` was never finished."""
        found = (self.path / "checkpoints").glob("[0-9][0-9][0-9][0-9]*/state.json")
        return sorted(int(state.parent.name) for state in found if state.parent.name.isdigit())

    def regular_checkpoints(self) -> list[int]:
        """Returns the checkpoints that were due by iterations, oldest first: not those that came by time or
        by a signal, which nobody measures or keeps."""
        return [i for i in self.checkpoints() if self._is_regular(i)]

    def _is_regular(self, i: int) -> bool:
        try:
            return bool(read_record(self.checkpoint(i) / "state.json", "").get("regular", True))
        except (Damaged, FileNotFoundError):  # damaged, or deleted meanwhile: whoever reads it says so
            return True

    def refuse_misplaced_checkpoint(self, i: int) -> None:
        """Raises Damaged where a checkpoint's folder, or a part of it, is another checkpoint's."""
        folder = self.checkpoint(i)
        state = read_record(folder / "state.json", f"delete {folder}")
        refuse_misplaced(state, folder / "state.json", i)
        for part, digest in state.get("parts", {}).items():
            sums = folder / part / SUMS
            if sums.is_file() and digest_of(sums) != digest:
                raise Damaged(
                    f"{folder / part} is not what this checkpoint was written with: put it back, or delete"
                    f" {folder}"
                )

    def resumables(self) -> list[int]:
        """Returns the checkpoints that hold a trainer's state, oldest first."""
        return [i for i in self.checkpoints() if (self.checkpoint(i) / "trainer").is_dir()]

    def resumable(self) -> int | None:
        """Returns the newest checkpoint that holds a trainer's state."""
        return next(reversed(self.resumables()), None)

    def has_work(self) -> bool:
        """Returns whether anything was sampled or trained."""
        places = (self.path / "iterations", self.path / "checkpoints")
        return any(path.is_file() for place in places for path in place.rglob("*"))

    # Metrics

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps(sealed(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self, damaged: list[str] | None = None) -> list[dict[str, Any]]:
        """Returns all whole lines; a line torn by a crash is the last one and is left out.

        One that isn't as it was written raises Damaged or, where there is a list of the `damaged`, is
        described there and left out.
        """
        if not self.metrics.is_file():
            return []
        content = self.metrics.read_bytes()
        rows, lines = [], content.splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(record_of(line))
            except Damaged as error:
                # A torn line has lost its end. One with a flipped bit has a newline, or all before it.
                if number == len(lines) and not content.endswith(b"\n") and not _WHOLE.search(line[:-1]):
                    break
                words = f"line {number} of {self.metrics} is damaged ({error}): {LINE_REMEDY}"
                if damaged is None:
                    raise Damaged(words) from error
                damaged.append(words)
        return rows

    # The locks

    @contextmanager
    def locked(self, lock: Lock = "run", patience_s: float = 0.0) -> Iterator[None]:
        """Holds a lock: one run and one analysis at a time, since two would write the same files.
        `patience_s` is how long one that is ending may take."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / _LOCKS[lock]).open("w") as file:
            if not _locks(file, LOCK_TRIES + round(patience_s / LOCK_TRY_S)):
                raise ValueError(
                    f"another process is at work on the {lock} in {self.path}: wait for it, or give"
                    " this one another name (APP_EXPERIMENT_NAME)"
                )
            yield

    @contextmanager
    def evaluator(self) -> Iterator[int]:
        """Gives this evaluator's number among those that are at work here, from 0.

        They share the work by claims (`runtime.claims`); the number keeps their logs and weights apart.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for number in range(EVALUATORS_MOST):
            with (self.path / f".evaluation-{number}.lock").open("w") as file:
                if _locks(file, tries=1):
                    yield number
                    return
        raise ValueError(f"{EVALUATORS_MOST} processes evaluate {self.path} already")

    def is_running(self) -> bool:
        """Returns whether a process holds the run's lock."""
        try:
            with (self.path / _LOCKS["run"]).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False


def _locks(file: IO[str], tries: int = LOCK_TRIES) -> bool:
    """Takes the lock; returns whether it could be had. Callers of `is_running` hold it for a moment, so one
    try may err."""
    for _ in range(tries):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_TRY_S)
        else:
            return True
    return False


def refuse_misplaced(record: Mapping[str, Any], path: Path, i: int) -> None:
    """Raises Damaged where a record says of itself that it is another iteration's. Those of earlier versions
    don't say it."""
    says = record.get("iteration", i)
    if says != i:
        raise Damaged(
            f"{path} was written as number {says} and lies in the folder of number {i}: put the folders of"
            f" {path.parent.parent} back as they were, or delete {path.parent}"
        )


def metrics_row(iteration: int, wall_time: float, metrics: Metrics) -> dict[str, Any]:
    """Returns a line of `metrics.jsonl`: flat, sorted, with 7 significant digits."""
    rounded = {name: float(f"{value:.7g}") for name, value in sorted(metrics.items())}
    return {"iteration": iteration, "wall_time": round(wall_time, 3), **rounded}


def verify_answers(path: Path) -> None:
    """Raises Damaged where a measured set's answers aren't those that its summary was made of. Reads them
    once, and again only where they have changed."""
    summary = path.with_name("summary.json")
    if summary.is_file() and (digest := read_record(summary, MEASURE_AGAIN).get("answers")):
        verify_once(path, MEASURE_AGAIN, digest)


def is_last(config: PolicyIteration, directory: ExperimentDirectory, done: int) -> bool:
    """Returns whether the run is over after `done` iterations: it has all of them, or its budget is spent.

    The last of them may be generated and not yet trained on.
    """
    return done >= iterations_of(config, directory, done)


def iterations_of(config: PolicyIteration, directory: ExperimentDirectory, done: int) -> int:
    """Returns how many the run has; where a budget ends it, as far as the first `done` of them let expect."""
    return expected_iterations(config.iterations, config.stop_after, directory, done)


def is_generated(directory: ExperimentDirectory, iteration: int) -> bool:
    """Returns whether the iteration's episodes lie on disk, whole."""
    return (directory.iteration(iteration) / EPISODES).is_file()


def is_measured(directory: ExperimentDirectory, done: int, chosen: EvaluationSet) -> bool:
    """Returns whether the summary of the set after `done` iterations is there."""
    return (directory.evaluation(done, chosen.label) / "summary.json").is_file()


def missing_sets(config: PolicyIteration, directory: ExperimentDirectory, done: int) -> list[EvaluationSet]:
    """Returns the evaluation sets that are due after `done` iterations and not yet measured."""
    evaluation = config.evaluation
    last = is_last(config, directory, done)
    while_training = bool(evaluation.every) and done % (evaluation.every or 1) == 0
    due = [s for s in evaluation.sets if last or (while_training and s.while_training)]
    return [s for s in due if not is_measured(directory, done, s)]


def samples_in(config: PolicyIteration, directory: ExperimentDirectory, iteration: int) -> bool:
    """Returns whether the iteration's rollout samples, which it need not where an interrupted run left
    episodes."""
    return (
        config.rollout.needs_engine
        and not is_last(config, directory, iteration)
        and not is_generated(directory, iteration)
    )


def version_that_samples(config: PolicyIteration, iteration: int) -> int:
    """Returns the policy version that an iteration's answers and continuations are sampled from: that which
    it begins with, or the one before where iterations overlap."""
    return max(0, iteration - 1) if config.overlap == "one_step" else iteration


def samples_after(config: PolicyIteration, directory: ExperimentDirectory, done: int) -> bool:
    """Returns whether a rollout that is still to come or an evaluation samples from the weights after `done`
    (one or more) iterations."""
    following = done + (config.overlap == "one_step")
    rollout = not is_last(config, directory, done) and samples_in(config, directory, following)
    return rollout or bool(missing_sets(config, directory, done))


def expected_iterations(
    most: int, budget: StopAfter | None, directory: ExperimentDirectory, done: int
) -> int:
    """Returns how many iterations a run has, of at most `most`, that has `done`: `done` itself where it is
    over."""
    if budget is None or done >= most:
        return most
    further = budget.further_iterations(tokens_sampled(directory, done))
    return most if further is None else min(most, done + further)


def tokens_sampled(directory: ExperimentDirectory, done: int) -> list[int]:
    """Returns the tokens sampled in each of the first `done` iterations, which rollout and credit wrote when
    they were done.

    Raises ValueError where that is gone, or from before tokens were counted.
    """

    def metrics_of(path: Path) -> Metrics:
        remedy = f"delete {path.parent} but for its journal/, and give the command again"
        try:
            return read_record(path, remedy)["metrics"]
        except FileNotFoundError as error:
            raise ValueError(
                f"{path} is gone, which says how many tokens were sampled there: put it back, or leave"
                " stop_after out"
            ) from error

    tokens = []
    for folder in map(directory.iteration, range(done)):
        answers = metrics_of(folder / "rollout.json")
        if SAMPLED_TOKENS not in answers:
            raise ValueError(
                f"{folder} was sampled by a version that did not count its tokens: leave stop_after out, or"
                " begin again under another experiment_name"
            )
        continuations = metrics_of(folder / "credit.json").get(VALUE_TOKENS, 0.0)
        tokens.append(round(answers[SAMPLED_TOKENS] + continuations))
    return tokens
