"""Names and lists the files of an experiment, and reads from them what a run still has to do.

A run that is started again reads its progress from these files alone. Each file is written whole or not at
all, except for files that grow by lines, such as ``metrics.jsonl``. All packages find the files through
`ExperimentDirectory`, so that only this module knows where they are.
"""

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

from treetune.exceptions import Damaged, FolderRefused
from treetune.models.policy_files import CHECKPOINTS, STATE_FILE, complete_checkpoints
from treetune.store.checksums import (
    CHECKSUMS_FILE,
    digest_of,
    read_record,
    seal_record,
    unseal_record,
    verify_once,
)
from treetune.vocabulary import Metrics

if TYPE_CHECKING:
    from treetune.runtime.base import EvaluationSet, PolicyIteration, StopAfter

LOCK_TRIES, LOCK_TRY_S = 4, 0.05
"""The tries to take a lock, and the seconds between two of them."""

MAX_EVALUATORS = 1000
"""The most processes that evaluate an experiment at a time."""

CONFIG, MANIFEST, METRICS = "config.json", "manifest.json", "metrics.jsonl"
"""Files in the experiment's folder."""

ITERATIONS, EVALUATIONS, ANALYSES = "iterations", "evaluations", "analyses"
LOGS, NOTES = "logs", "notes"
"""Folders in the experiment's folder, besides `CHECKPOINTS`."""

TRAJECTORIES = "trajectories.arrow"
"""In an iteration's folder: the sampled answers with their grades."""
EPISODES = "episodes.arrow"
"""In an iteration's folder: the episodes to train on. Written last, so it says that sampling and credit are
finished."""
ROLLOUT_METRICS, CREDIT_METRICS, ITERATION_METRICS = "rollout.json", "credit.json", "metrics.json"
"""In an iteration's folder: the metrics of the rollout, of the credit, and of the whole iteration. The last
is written when the iteration is finished, and its row is then appended to `METRICS`."""
JOURNALS = "journal"
"""In the folder of an iteration or of a measured set: the folder of the journals, a file for each rank."""

SAMPLED_TOKENS, VALUE_TOKENS = "rollout/sampled_tokens", "credit/value_tokens"
"""The names of two metrics: how many tokens an iteration sampled for answers, and how many for continuations.
A token that several answers share counts once."""

PREDICTION = "plan.json"
"""In the experiment's folder: the metrics of an iteration as `plan` estimated them at the start."""

METRICS_REMEDY = "delete it; its line of metrics.jsonl is lost, and the run continues"
"""The remedy for a damaged ``metrics.json`` of an iteration."""

LINE_REMEDY = "the run's own command writes the file again from iterations/*/metrics.json"
"""The remedy for a damaged line of ``metrics.jsonl``."""

ANSWERS, SUMMARY = "answers.jsonl", "summary.json"
"""In the folder of an evaluation set: its answers, and the summary. The summary is written last, so it says
that the set is measured."""
MEASURE_AGAIN_REMEDY = "delete its folder, and it is measured again"
"""The remedy for a damaged folder of a measured evaluation set."""

RESULT = "result.json"
"""In the folder of an analysis: its numbers with its settings. Written last, so it says that the analysis is
finished."""

LockPurpose = Literal["run", "evaluation", "analysis", "notes"]
"""The purpose for which a process locks the experiment: to run it, to evaluate it, to analyse it, or to write
a note. ``evaluation`` is not in `_LOCK_FILES`, since several processes may evaluate at a time: each has its
own lock file (`ExperimentDirectory.hold_evaluator_number`)."""

_END_OF_WHOLE_LINE = re.compile(rb'"checksum": "[0-9a-f]+"\}\Z')
"""The end of a line of metrics that was not cut short: ``"checksum": "5be1…"}``."""
_NUMBERED_NAME = re.compile(r"\d{4,}")

_LOCK_FILES: dict[LockPurpose, str] = {"run": ".lock", "analysis": ".analysis.lock", "notes": ".notes.lock"}


@dataclass(frozen=True)
class ExperimentDirectory:
    """The paths of an experiment.

    Iterations count from 0. Checkpoints and evaluations are numbered by finished iterations: iteration 3 ends
    with checkpoint 4.
    """

    path: Path

    @staticmethod
    def of(config: PolicyIteration) -> ExperimentDirectory:
        return ExperimentDirectory(Path(config.directory) / config.experiment_name)

    # Files and folders of the experiment

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG

    @property
    def manifest_file(self) -> Path:
        return self.path / MANIFEST

    @property
    def metrics_file(self) -> Path:
        return self.path / METRICS

    @property
    def notes_folder(self) -> Path:
        """The folder of people's notes on answers."""
        return self.path / NOTES

    @property
    def logs_folder(self) -> Path:
        return self.path / LOGS

    @property
    def run_log(self) -> Path:
        """The file with the messages of `treetune run`."""
        return self.logs_folder / "run.log"

    # Iterations

    def iteration_folder(self, i: int) -> Path:
        return self.path / ITERATIONS / f"{i:04d}"

    def iterations(self) -> list[int]:
        """Returns the numbers of the iterations that have a folder, in ascending order."""
        return _numbers_in(self.path / ITERATIONS)

    def iterations_with(self, file: str) -> list[int]:
        """Returns the numbers of the iterations that have a file of this name, in ascending order."""
        return [i for i in self.iterations() if (self.iteration_folder(i) / file).is_file()]

    def journal_folder(self, i: int) -> Path:
        """Returns the folder of the iteration's journals."""
        return self.iteration_folder(i) / JOURNALS

    def candidate_folder(self, i: int, point: int) -> Path:
        """Returns the folder where `choose_checkpoint` measures a candidate: the weights after `point` epochs
        or steps of iteration `i`."""
        return self.iteration_folder(i) / "candidates" / f"{point:02d}"

    # Evaluations and analyses

    def evaluation_folder(self, i: int, label: str) -> Path:
        return self.path / EVALUATIONS / f"{i:04d}" / label

    def evaluations(self) -> list[tuple[int, str]]:
        """Returns the number and the label of each evaluation that has a folder, in ascending order.

        Some of them may not be measured yet.
        """
        numbers_and_labels = []
        for number in _numbers_in(self.path / EVALUATIONS):
            for label in _names_in(self.path / EVALUATIONS / f"{number:04d}"):
                numbers_and_labels.append((number, label))
        return numbers_and_labels

    def read_summaries(self, label: str) -> dict[int, dict[str, Any]]:
        """Returns the summaries of an evaluation set by checkpoint, the lowest first.

        Raises:
            ValueError: A summary is not what an evaluation writes.
        """
        summaries = {}
        for i in _numbers_in(self.path / EVALUATIONS):
            path = self.evaluation_folder(i, label) / SUMMARY
            if not path.is_file():
                continue
            try:
                summary = {**read_record(path, MEASURE_AGAIN_REMEDY), "iteration": i}
                float(summary["pass_at_1"])  # raises if it is missing, or no number
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise ValueError(
                    f"{path} is not an evaluation's summary ({error!r}): {MEASURE_AGAIN_REMEDY}"
                ) from error
            summaries[i] = summary
        return summaries

    def analysis_folder(self, label: str) -> Path:
        return self.path / ANALYSES / label

    def analyses(self) -> list[str]:
        """Returns the labels of the finished analyses, in alphabetical order."""
        return [label for label in _names_in(self.path / ANALYSES) if self.is_analysed(label)]

    def is_analysed(self, label: str) -> bool:
        """Returns whether the analysis is finished."""
        return (self.analysis_folder(label) / RESULT).is_file()

    # Checkpoints

    def checkpoint_folder(self, i: int) -> Path:
        return self.path / CHECKPOINTS / f"{i:04d}"

    def checkpoints(self) -> list[int]:
        """Returns the numbers of complete checkpoints, oldest first.

        A checkpoint without `state.json` was never finished.
        """
        return [int(folder.name) for folder in complete_checkpoints(self.path / CHECKPOINTS)]

    def regular_checkpoints(self) -> list[int]:
        """Returns the checkpoints that were due by iterations, oldest first.

        Those written by time or because of a signal are left out: they are neither measured nor kept.
        """
        return [i for i in self.checkpoints() if self._is_regular(i)]

    def _is_regular(self, i: int) -> bool:
        """Returns whether a checkpoint was due by its number of iterations. Others were written by time, or
        because of a signal."""
        try:
            state = read_record(self.checkpoint_folder(i) / STATE_FILE, remedy="")  # its error is not shown
            # Checkpoints of earlier versions have no such entry. All of them were due.
            return bool(state.get("regular", True))
        except (Damaged, FileNotFoundError):
            # Damaged, or deleted meanwhile. The function that reads the checkpoint reports it.
            return True

    def refuse_misplaced_checkpoint(self, i: int) -> None:
        """Raises Damaged if a checkpoint's folder, or a part of it, belongs to another checkpoint."""
        folder = self.checkpoint_folder(i)
        state = read_record(folder / STATE_FILE, remedy=f"delete {folder}")
        refuse_misplaced(state, folder / STATE_FILE, i)
        for part, digest in state.get("parts", {}).items():
            sums = folder / part / CHECKSUMS_FILE
            # A part without a file of checksums was deleted: a run deletes the trainer's state of its older
            # checkpoints.
            if sums.is_file() and digest_of(sums) != digest:
                raise Damaged(
                    f"{folder / part} is not what this checkpoint was written with: put it back, or delete"
                    f" {folder}"
                )

    def resumable_checkpoints(self) -> list[int]:
        """Returns the checkpoints that hold a trainer's state, oldest first."""
        return [i for i in self.checkpoints() if (self.checkpoint_folder(i) / "trainer").is_dir()]

    def newest_resumable(self) -> int | None:
        """Returns the newest checkpoint that holds a trainer's state; None if there is none."""
        return next(reversed(self.resumable_checkpoints()), None)

    def has_work(self) -> bool:
        """Returns whether anything was sampled or trained."""
        for folder in (self.path / ITERATIONS, self.path / CHECKPOINTS):
            if any(path.is_file() for path in folder.rglob("*")):
                return True
        return False

    # Metrics

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Appends a row to ``metrics.jsonl`` with its checksum, and returns when it is on the disk."""
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(seal_record(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self, damaged: list[str] | None = None) -> list[dict[str, Any]]:
        """Returns the rows of all whole lines. A last line that a crash cut short is left out.

        Args:
            damaged: A list to which a message is added for each damaged line. The line is then left out.

        Raises:
            Damaged: A line is damaged, and `damaged` is None.
        """
        if not self.metrics_file.is_file():
            return []
        content = self.metrics_file.read_bytes()
        lines = content.splitlines()
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(unseal_record(line))
            except Damaged as error:
                # A crash cuts only the last line short, which then has neither a newline nor a checksum.
                is_last_line = number == len(lines)
                has_newline = content.endswith(b"\n")
                # If a bit of the newline is flipped, the line has one more byte after its checksum.
                has_checksum = _END_OF_WHOLE_LINE.search(line[:-1]) is not None
                was_cut_short = is_last_line and not has_newline and not has_checksum
                if was_cut_short:
                    break
                message = f"line {number} of {self.metrics_file} is damaged ({error}): {LINE_REMEDY}"
                if damaged is None:
                    raise Damaged(message) from error
                damaged.append(message)
        return rows

    # The locks

    @contextmanager
    def locked(self, purpose: LockPurpose = "run", patience_s: float = 0.0) -> Iterator[None]:
        """Holds a lock for a block, so that no second process writes the same files.

        Args:
            patience_s: The seconds to wait for a process that is just ending.

        Raises:
            FolderRefused: Another process has the lock.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / _LOCK_FILES[purpose]).open("w") as file:
            if not _try_lock(file, LOCK_TRIES + round(patience_s / LOCK_TRY_S)):
                raise FolderRefused(
                    f"another process holds the lock of the {purpose} in {self.path}: wait for it, or give"
                    " this experiment another name (APP_EXPERIMENT_NAME)"
                )
            yield  # closing the file releases the lock, and so does the end of the process

    @contextmanager
    def hold_evaluator_number(self) -> Iterator[int]:
        """Yields the lowest number, from 0, that no other running evaluator of this experiment has.

        The number is locked until the block ends. It keeps the logs and weights of evaluators apart.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for number in range(MAX_EVALUATORS):
            with (self.path / f".evaluation-{number}.lock").open("w") as file:
                # One try is enough: if the file is locked, another evaluator has this number.
                if _try_lock(file, tries=1):
                    yield number
                    return
        raise FolderRefused(f"{MAX_EVALUATORS} processes evaluate {self.path} already")

    def is_running(self) -> bool:
        """Returns whether a process holds the run's lock."""
        try:
            # A shared lock, so that several processes may look at once. Closing the file releases it.
            with (self.path / _LOCK_FILES["run"]).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False


def _numbers_in(folder: Path) -> list[int]:
    """Returns the folder's entries whose names are numbers of four or more digits, as ascending numbers."""
    return sorted(int(name) for name in _names_in(folder) if _NUMBERED_NAME.fullmatch(name))


def _names_in(folder: Path) -> list[str]:
    """Returns the names in a folder in alphabetical order, without hidden ones, which are unfinished."""
    try:
        names = os.listdir(folder)
    except OSError:  # it isn't there, or may not be read
        return []
    return sorted(name for name in names if not name.startswith("."))


def _try_lock(file: IO[str], tries: int = LOCK_TRIES) -> bool:
    """Tries to lock the file, and returns whether it succeeded.

    Several tries are needed because `is_running`, in other processes, takes the lock for a moment.
    """
    for _ in range(tries):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_TRY_S)
        else:
            return True
    return False


def refuse_misplaced(record: Mapping[str, Any], path: Path, i: int) -> None:
    """Raises Damaged if a record was written for another iteration than `i`.

    Records of earlier versions have no iteration, and pass.
    """
    written_as = record.get("iteration", i)
    if written_as != i:
        raise Damaged(
            f"{path} was written for number {written_as}, but is in the folder of number {i}: put the folders"
            f" of {path.parent.parent} back as they were, or delete {path.parent}"
        )


def metrics_row(iteration: int, wall_time: float, metrics: Metrics) -> dict[str, Any]:
    """Returns the content of a line of `metrics.jsonl`: the iteration, the time, and then all metrics, sorted
    by name and rounded to 7 significant digits."""
    rounded = {name: float(f"{value:.7g}") for name, value in sorted(metrics.items())}
    return {"iteration": iteration, "wall_time": round(wall_time, 3), **rounded}


def verify_answers(path: Path) -> None:
    """Raises Damaged if the answers of a measured set are not those of its summary.

    Reads them once, and again only if the file has changed.
    """
    summary = path.with_name(SUMMARY)
    if not summary.is_file():
        return  # the set is not measured yet
    digest = read_record(summary, MEASURE_AGAIN_REMEDY).get("answers")
    if digest:  # summaries of earlier versions have none
        verify_once(path, MEASURE_AGAIN_REMEDY, digest)


def is_over_after(config: PolicyIteration, directory: ExperimentDirectory, iteration_count: int) -> bool:
    """Returns whether the run ends after this number of iterations: there are no more, or the token budget is
    spent.

    With a token budget, the tokens of these iterations are counted. So they must have been sampled, but they
    need not be trained yet.
    """
    return iteration_count >= iterations_of(config, directory, iteration_count)


def iterations_of(config: PolicyIteration, directory: ExperimentDirectory, iteration_count: int) -> int:
    """Returns the run's number of iterations; with a token budget, an estimate from the tokens of the first
    `iteration_count`."""
    return expected_iterations(config.iterations, config.stop_after, directory, iteration_count)


def is_generated(directory: ExperimentDirectory, iteration: int) -> bool:
    """Returns whether the iteration's episodes are on disk. They are written last, so rollout and credit are
    then finished."""
    return (directory.iteration_folder(iteration) / EPISODES).is_file()


def is_measured(
    directory: ExperimentDirectory, finished_iterations: int, evaluation_set: EvaluationSet
) -> bool:
    """Returns whether the set has a summary for the weights after `finished_iterations`."""
    return (directory.evaluation_folder(finished_iterations, evaluation_set.label) / SUMMARY).is_file()


def missing_sets(
    config: PolicyIteration, directory: ExperimentDirectory, finished_iterations: int
) -> list[EvaluationSet]:
    """Returns the evaluation sets that are due after `finished_iterations` and not yet measured."""
    evaluation = config.evaluation
    is_end = is_over_after(config, directory, finished_iterations)
    is_due_while_training = evaluation.every is not None and finished_iterations % evaluation.every == 0
    missing = []
    for evaluation_set in evaluation.sets:
        is_due = is_end or (is_due_while_training and evaluation_set.while_training)
        if is_due and not is_measured(directory, finished_iterations, evaluation_set):
            missing.append(evaluation_set)
    return missing


def needs_sampling(config: PolicyIteration, directory: ExperimentDirectory, iteration: int) -> bool:
    """Returns whether an engine still has to sample the iteration.

    It doesn't if the rollout samples nothing, the run is over before this iteration, or the iteration's
    episodes are on disk.
    """
    return (
        config.rollout.needs_engine
        and not is_over_after(config, directory, iteration)
        and not is_generated(directory, iteration)
    )


def sampling_version(config: PolicyIteration, iteration: int) -> int:
    """Returns the policy version that samples an iteration: the newest one when the iteration begins, or with
    the overlap ``one_step`` the version before it."""
    return max(0, iteration - 1) if config.overlap == "one_step" else iteration


def will_sample_from(
    config: PolicyIteration, directory: ExperimentDirectory, finished_iterations: int
) -> bool:
    """Returns whether a later rollout or an evaluation samples from the weights after `finished_iterations`.

    They are one or more. With an overlap, the start weights sample both of the first two iterations, and only
    one iteration is checked here.
    """
    # These weights sample the iteration that begins with them or, with an overlap, the next iteration.
    sampled_iteration = finished_iterations + 1 if config.overlap == "one_step" else finished_iterations
    is_over = is_over_after(config, directory, finished_iterations)
    a_rollout_samples = not is_over and needs_sampling(config, directory, sampled_iteration)
    return a_rollout_samples or bool(missing_sets(config, directory, finished_iterations))


def expected_iterations(
    max_iterations: int, budget: StopAfter | None, directory: ExperimentDirectory, iteration_count: int
) -> int:
    """Estimates the number of iterations of a run that a budget of sampled tokens may end.

    The estimate uses the tokens that the first `iteration_count` iterations have sampled.

    Args:
        max_iterations: The number of iterations if the budget doesn't end the run earlier.
    """
    if budget is None or iteration_count >= max_iterations:
        return max_iterations
    further = budget.further_iterations(tokens_sampled(directory, iteration_count))
    # `further` is None before the first iteration.
    return max_iterations if further is None else min(max_iterations, iteration_count + further)


def tokens_sampled(directory: ExperimentDirectory, iteration_count: int) -> list[int]:
    """Returns the number of tokens that each of the first `iteration_count` iterations sampled.

    Raises:
        ValueError: The metrics of one of them are gone, or an earlier version wrote them without tokens.
    """

    def metrics_of(path: Path) -> Metrics:
        """Returns the metrics in a file of an iteration's folder.

        Raises:
            ValueError: The file is gone. The number of sampled tokens, which is counted against the budget
                `stop_after`, is lost with it.
        """
        # The journal stays, since it has the answered requests, which are then not sampled again.
        remedy = f"delete {path.parent} but for its journal/, and give the command again"
        try:
            return read_record(path, remedy)["metrics"]
        except FileNotFoundError as error:
            raise ValueError(
                f"{path} is gone, which says how many tokens were sampled there: put it back, or leave"
                " stop_after out"
            ) from error

    tokens = []
    for folder in map(directory.iteration_folder, range(iteration_count)):
        rollout_metrics = metrics_of(folder / ROLLOUT_METRICS)
        if SAMPLED_TOKENS not in rollout_metrics:
            raise ValueError(
                f"{folder} was sampled by a version that did not count its tokens: leave stop_after out, or"
                " begin again under another experiment_name"
            )
        # Credit without continuations samples no tokens, and has no such metric.
        tokens_of_continuations = metrics_of(folder / CREDIT_METRICS).get(VALUE_TOKENS, 0.0)
        tokens.append(round(rollout_metrics[SAMPLED_TOKENS] + tokens_of_continuations))
    return tokens
