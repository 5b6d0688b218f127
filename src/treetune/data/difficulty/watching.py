"""Estimates difficulty from the first job to the merged result: starts jobs, watches them, restarts them.

this command                              a job for each shard, perhaps on another machine
starts the jobs ────────────────────────▶ claims its shard (claims), so that no other job works on it
looks at the shard's folder ◀──────────── writes answers, grades, and progress.json as a sign of life
ends a job that shows no sign of life     done.json, or failure.json with why
restarts shards whose job is gone
merges, when all shards are done
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treetune.cluster.jobs import RunningJobs
from treetune.data.difficulty.merging import merge
from treetune.data.difficulty.shard import (
    CLAIM_FILE,
    DONE_FILE,
    FAILURE_FILE,
    PROGRESS_FILE,
    input_rows,
    shard_folder,
)
from treetune.data.making_threads import content_hash
from treetune.data.pipelines import EstimateDifficulty
from treetune.data.preparing import file_hashes, locked_folder
from treetune.exceptions import Stopped
from treetune.findings import missing_requirements
from treetune.runtime.claims import Claims
from treetune.runtime.console import Console
from treetune.store.files import write_json
from treetune.tasks.rows import RowsTask
from treetune.tasks.sources import files_matching

JOBS_UNKNOWN_S = 1800.0
"""If a cluster doesn't say which jobs run, it is asked again for this many seconds."""

USER_ERROR = 2
"""The code of a failure that another attempt would only repeat, such as a wrong setting."""

CHANGES_NO_ANSWER = ("policy", "jobs", "column", "grader_workers", "grader_deadline")
"""Settings on which no answer depends. Of a policy's settings, `Policy.identity` has those that matter."""


def run_jobs(
    pipeline: EstimateDifficulty, source: Path, output: Path, config: dict[str, Any], command: Sequence[str]
) -> int:
    """Starts the jobs of all shards, waits for them, and merges their results.

    Returns the exit code: 0 if every answer is graded, otherwise 1.

    Args:
        command: The command of a job. The number of the job's shard is appended to the command.

    Raises:
        ValueError: The rows or settings are wrong. Most mistakes are found before any job starts.
        RuntimeError: A shard can't be finished.
    """
    with locked_folder(output, "estimate_difficulty"):
        assert isinstance(pipeline.task, RowsTask)
        if absent := missing_requirements(pipeline.task.grader.parts()):
            raise ValueError(f"answers can't be graded here: {'; '.join(absent)}")
        row_count = 0
        for input_row in input_rows(source):
            # Raises ValueError for a row that can't be asked.
            pipeline.task.problem_of(input_row.row, f"row/{input_row.index}")
            row_count += 1
        if not row_count:
            raise ValueError(f"there are no rows in {source}")
        record = output / "estimate.json"  # says with which rows and settings the folder was begun
        if record.is_file():
            refuse_other_estimate(pipeline, source, output)
        else:
            write_json(
                record,
                {"identity": _identity(pipeline, source), "rows": row_count, "shards": pipeline.shards},
            )
        console = Console(output / "logs" / "run.log", visible=True)
        try:
            write_json(output / "config.json", config)
            jobs = pipeline.jobs.begin(command, output)
            answer_count = row_count * pipeline.answers.samples
            _Watch(pipeline, output, console, jobs, answer_count).wait_until_done()
            return merge(pipeline, source, output, console)
        finally:
            console.close()


def _identity(pipeline: EstimateDifficulty, source: Path) -> str:
    """Returns a hash of everything on which the answers in a folder depend."""
    settings = {name: value for name, value in vars(pipeline).items() if name not in CHANGES_NO_ANSWER}
    policy = pipeline.policy.identity()
    return content_hash([repr(settings), repr(policy), pipeline.shards, file_hashes(files_matching(source))])


def refuse_other_estimate(pipeline: EstimateDifficulty, source: Path, output: Path) -> None:
    """Raises ValueError if the folder was begun with other rows or settings, or was not begun at all."""
    try:
        record = json.loads((output / "estimate.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{output} holds no estimate that a job could work on ({error}): the command without --shard"
            " begins one"
        ) from error
    if record["identity"] != _identity(pipeline, source):
        raise ValueError(
            f"{output} was begun with other rows, another policy, other answers, or {record['shards']}"
            " shards: name another output, or delete it"
        )


class _Watch:
    """Starts the jobs of all shards, watches the jobs, and starts another job for one that died."""

    def __init__(
        self,
        pipeline: EstimateDifficulty,
        output: Path,
        console: Console,
        jobs: RunningJobs,
        answer_count: int,
    ) -> None:
        self._settings, self._shards = pipeline.jobs, range(pipeline.shards)
        self._output, self._console, self._jobs, self._answer_count = output, console, jobs, answer_count
        self._claims = Claims()
        # The keys of the following five are the numbers of shards.
        self._starts: Counter[int] = Counter()
        """The number of jobs that were started for the shard."""
        self._gone_since: dict[int, float] = {}
        """The time at which the shard's job was first missing."""
        self._held_since: dict[int, float] = {}
        """Shards whose job is gone while a process still works on them: the time at which this was first
        noticed."""
        self._last_sign: dict[int, tuple[int, float]] = {}
        """The last change of the shard's progress.json: the file's time, and the time at which the change was
        noticed."""
        self._failed: dict[int, str] = {}
        """The reason why the shard is given up."""
        self._unknown_since: float | None = None
        """The time since which the cluster doesn't say which jobs run; None if its last answer said it."""
        self._shown_reasons: set[str] = set()
        """Reasons for which jobs wait that the console has shown."""

    def _path_of_file(self, shard: int, name: str) -> Path:
        return shard_folder(self._output, shard) / name

    def _read_file(self, shard: int, name: str) -> dict[str, Any] | None:
        """Returns the content of a shard's file; None if the file isn't there or can't be read."""
        try:
            content: dict[str, Any] = json.loads(self._path_of_file(shard, name).read_text())
        except (OSError, ValueError):
            return None
        return content

    def _is_finished(self, shard: int) -> bool:
        return self._path_of_file(shard, DONE_FILE).is_file()

    def wait_until_done(self) -> None:
        """Returns when all shards are done. Raises RuntimeError if some of them could not be finished."""
        to_do = []
        for shard in self._shards:
            done = self._read_file(shard, DONE_FILE)
            # Answers that couldn't be graded are graded again.
            if done is None or done["unavailable"]:
                to_do.append(shard)
                self._path_of_file(shard, DONE_FILE).unlink(missing_ok=True)
                self._path_of_file(shard, FAILURE_FILE).unlink(missing_ok=True)
        if not to_do:
            return
        shards_with_job = self._jobs_of_earlier_command()
        if shards_with_job:
            self._console.say(f"{len(shards_with_job)} jobs of an earlier command are still running")
        self._start([shard for shard in to_do if shard not in shards_with_job])

        def news() -> str:
            return f"{sum(map(self._is_finished, self._shards))} of {len(self._shards)} shards are done"

        try:
            with self._console.phase("answering", "answers", news) as show:
                while self._check_jobs():
                    progress = [self._read_file(shard, PROGRESS_FILE) for shard in self._shards]
                    graded = sum(
                        shard_progress["graded"] for shard_progress in progress if shard_progress is not None
                    )
                    show(graded, self._answer_count)
                    time.sleep(self._settings.poll)
        except (Stopped, KeyboardInterrupt):
            # `leave` ends the jobs or leaves them running, and returns a message that says which. Nothing
            # else tells the user.
            self._console.say(f"stopped: {self._jobs.leave()}")
            raise
        except BaseException:
            self._jobs.leave()
            raise
        if self._failed:
            shard, reason = next(iter(self._failed.items()))
            raise RuntimeError(
                f"{len(self._failed)} of {len(self._shards)} shards could not be finished, {shard} the"
                f" first: {reason}. All answers so far are kept: the same command continues"
            )

    def _jobs_of_earlier_command(self) -> set[int]:
        """Returns the shards whose jobs still run from an earlier command.

        Raises RuntimeError if the cluster doesn't answer within `JOBS_UNKNOWN_S` seconds. Without the answer,
        no job is started: two jobs could then work on one shard.
        """
        end = time.monotonic() + JOBS_UNKNOWN_S
        while True:
            try:
                return self._jobs.alive()
            except OSError as error:
                if time.monotonic() > end:
                    raise RuntimeError(f"it isn't known whether jobs are running: {error}") from error
                self._console.say(f"it isn't known whether jobs are running: {error}; trying again")
                time.sleep(self._settings.poll)

    def _check_jobs(self) -> bool:
        """Ends silent jobs, restarts dead ones, and returns whether there is something left to wait for.

        Raises RuntimeError if the cluster hasn't said for `JOBS_UNKNOWN_S` seconds which jobs run.
        """
        unfinished_shards = [
            shard for shard in self._shards if shard not in self._failed and not self._is_finished(shard)
        ]
        if not unfinished_shards:
            return False
        try:
            shards_with_job = self._jobs.alive()
        except OSError as error:  # a controller that is busy for a moment says nothing about the jobs
            if self._unknown_since is None:
                self._unknown_since = time.monotonic()
            unknown_s = time.monotonic() - self._unknown_since
            if unknown_s > JOBS_UNKNOWN_S:
                raise RuntimeError(
                    f"the state of the jobs hasn't been known for {unknown_s / 60:.0f} minutes: {error}. The"
                    " same command continues, and finds jobs that still run"
                ) from error
            self._console.say(f"the state of the jobs isn't known: {error}; trying again")
            return True
        self._unknown_since = None
        for reason, message in self._jobs.describe_waits().items():
            if reason not in self._shown_reasons:
                self._shown_reasons.add(reason)
                self._console.say(message)
        to_restart = []
        for shard in unfinished_shards:
            if shard in shards_with_job:
                self._gone_since.pop(shard, None)
                self._end_if_silent(shard)
            elif self._is_finished(shard):  # it finished after `unfinished_shards` was made
                continue
            elif self._is_gone(shard) and self._may_restart(shard):
                to_restart.append(shard)
        self._start(to_restart)
        return True

    def _start(self, shards: Sequence[int]) -> None:
        """Starts the jobs of these shards. Forgets the last signs of life of their earlier jobs, and when
        these jobs were first missing."""
        for shard in shards:
            shard_folder(self._output, shard).mkdir(parents=True, exist_ok=True)
            self._starts[shard] += 1
            self._gone_since.pop(shard, None)
            self._last_sign.pop(shard, None)
        self._jobs.start(shards)

    def _may_restart(self, shard: int) -> bool:
        """Returns whether to start another job for a shard whose job died. Raises ValueError if it died of a
        user's mistake."""
        reason = self._jobs.describe_end(shard)
        failure = self._read_file(shard, FAILURE_FILE)
        if failure is not None:
            reason = failure["message"]
            if failure["code"] == USER_ERROR:
                raise ValueError(reason)
        if self._jobs.was_taken_away(shard):  # by the cluster: such a start doesn't count
            self._starts[shard] -= 1
        starts = self._starts[shard]
        if starts > self._settings.restarts:
            self._failed[shard] = reason
            self._console.say(
                f"the job of shard {shard} died {starts} times; the shard is given up: {reason}"
            )
            return False
        self._console.say(f"the job of shard {shard} died ({reason}): another job continues")
        self._path_of_file(shard, FAILURE_FILE).unlink(missing_ok=True)
        return True

    def _is_gone(self, shard: int) -> bool:
        """Returns whether a shard's job has ended for sure.

        A job that isn't listed may still run, such as a job of an earlier command that is ending. Such a job
        holds the claim of its shard: a file that keeps other jobs off the shard. A job may also have
        finished, while a slow file system doesn't show done.json yet. That file gets `settle` seconds to
        appear."""
        claim = self._path_of_file(shard, CLAIM_FILE)
        if self._claims.is_held(claim):
            self._wait_for_holder(shard, self._claims.holder(claim))
            return False
        self._held_since.pop(shard, None)
        if self._read_file(shard, FAILURE_FILE) is not None:
            return True  # a job writes this file when it ends, and then no done.json
        gone_since = self._gone_since.setdefault(shard, time.monotonic())
        return time.monotonic() - gone_since >= self._settings.settle

    def _wait_for_holder(self, shard: int, holder: str) -> None:
        """Tells the user which process still works on a shard whose job is gone. Gives the shard up after
        `silence` seconds: this command can't end a process that isn't its job, and no other job may start
        meanwhile."""
        now = time.monotonic()
        if shard not in self._held_since:
            self._held_since[shard] = now
            self._console.say(f"the job of shard {shard} is gone; {holder} still works on it: waiting for it")
        if now - self._held_since[shard] > self._settings.silence:
            self._failed[shard] = f"{holder} still works on it and is none of the jobs: end it"

    def _end_if_silent(self, shard: int) -> None:
        """Ends a job whose progress.json hasn't changed for `silence` seconds."""
        if shard not in self._jobs.running_shards():  # it waits in the cluster's queue
            return
        try:
            file_time = self._path_of_file(shard, PROGRESS_FILE).stat().st_mtime_ns
        except OSError:
            file_time = 0
        # The file's time may come from another machine's clock, so it isn't compared with this machine's
        # time. A change of the file's time counts as progress at the moment at which it is noticed here.
        last_file_time, noticed = self._last_sign.get(shard, (-1, time.monotonic()))
        if file_time != last_file_time:
            noticed = time.monotonic()
        self._last_sign[shard] = file_time, noticed
        silent_s = time.monotonic() - noticed
        if silent_s > self._settings.silence:
            self._console.say(f"shard {shard} has made no progress for {silent_s:.0f} s: its job is ended")
            self._jobs.stop(shard)
            self._last_sign.pop(shard)
