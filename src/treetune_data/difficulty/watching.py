"""The command from the first job to the merged result: starts jobs, watches them, starts them again."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treetune.processes.lifetime import Stopped
from treetune.runtime.claims import Claims
from treetune.runtime.console import Console
from treetune.store.files import write_json
from treetune.tasks.rows import RowsTask
from treetune.tasks.sources import files_matching
from treetune_cluster.jobs import Running
from treetune_data.difficulty.merging import merge
from treetune_data.difficulty.shard import (
    CLAIMS,
    DONE,
    FAILURE,
    PROGRESS,
    input_rows,
    shard_folder,
)
from treetune_data.making_threads import content_hash
from treetune_data.pipelines import EstimateDifficulty
from treetune_data.preparing import alone, file_hashes

USER_ERROR = 2
"""The code of a failure that no other attempt mends."""


def estimate(
    pipeline: EstimateDifficulty, source: Path, output: Path, config: dict[str, Any], command: Sequence[str]
) -> int:
    """The exit code: 0 when every answer is graded. `command` works on the shard that is put behind it.

    Raises ValueError for wrong rows and settings, RuntimeError where a shard can't be finished.
    """
    with alone(output, "estimate_difficulty"):
        rows = _checked(pipeline, source)
        _begin(pipeline, source, output, rows)
        console = Console(output / "logs" / "run.log", visible=True)
        try:
            write_json(output / "config.json", config)
            _Watch(pipeline, output, console, pipeline.jobs.begin(command, output)).until_done()
            return merge(pipeline, source, output, console)
        finally:
            console.close()


def _checked(pipeline: EstimateDifficulty, source: Path) -> int:
    """Returns the number of rows. Raises ValueError, before any job, for one that the task can't take."""
    assert isinstance(pipeline.task, RowsTask)
    if missing := pipeline.task.grader.missing():
        raise ValueError(f"answers can't be graded here: {'; '.join(missing)}")
    rows = 0
    for one in input_rows(source):
        pipeline.task.problem_of(one.row, f"row/{one.index}")
        rows += 1
    if not rows:
        raise ValueError(f"there are no rows in {source}")
    return rows


def identity(pipeline: EstimateDifficulty, source: Path) -> str:
    """Returns a hash of what the answers of a folder have in common."""
    settings = {name: value for name, value in vars(pipeline).items() if name not in _CHANGES_NO_ANSWER}
    policy = pipeline.policy.identity()
    return content_hash([repr(settings), repr(policy), pipeline.shards, file_hashes(files_matching(source))])


_CHANGES_NO_ANSWER = ("policy", "jobs", "column", "grader_workers", "grader_deadline")


def refuse_another(pipeline: EstimateDifficulty, source: Path, output: Path) -> None:
    """Raises ValueError where the folder was begun with other rows or settings, or not at all."""
    try:
        begun = json.loads((output / "estimate.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{output} holds no estimate that a job could work on ({error}): the command without --shard"
            " begins one"
        ) from error
    if begun["identity"] != identity(pipeline, source):
        raise ValueError(
            f"{output} was begun with other rows, another policy, other answers, or {begun['shards']} shards:"
            " name another output, or delete it"
        )


def _begin(pipeline: EstimateDifficulty, source: Path, output: Path, rows: int) -> None:
    if (output / "estimate.json").is_file():
        refuse_another(pipeline, source, output)
        return
    begun = {"identity": identity(pipeline, source), "rows": rows, "shards": pipeline.shards}
    write_json(output / "estimate.json", begun)


class _Watch:
    def __init__(
        self, pipeline: EstimateDifficulty, output: Path, console: Console, running: Running
    ) -> None:
        self._pipeline, self._output, self._console, self._running = pipeline, output, console, running
        self._claims = Claims()
        self._starts: Counter[int] = Counter()
        self._gone_since: dict[int, float] = {}
        self._seen: dict[int, tuple[int, float]] = {}
        self._failed: dict[int, str] = {}

    def until_done(self) -> None:
        open_shards = [shard for shard in range(self._pipeline.shards) if not self._done(shard)]
        if not open_shards:
            return
        # What couldn't be graded before is tried again.
        for shard in open_shards:
            (shard_folder(self._output, shard) / DONE).unlink(missing_ok=True)
            (shard_folder(self._output, shard) / FAILURE).unlink(missing_ok=True)
        alive = self._running.alive()
        if alive:
            self._console.say(f"{len(alive)} jobs of an earlier command go on")
        self._start([shard for shard in open_shards if shard not in alive])
        try:
            with self._console.phase("answering", "answers", self._news) as show:
                while self._look():
                    answered, total = self._progress()
                    show(answered, total)
                    time.sleep(self._pipeline.jobs.poll)
        except (Stopped, KeyboardInterrupt):
            self._console.say(f"stopped: {self._running.leave()}")
            raise
        except BaseException:
            self._running.leave()
            raise
        if self._failed:
            shard, why = next(iter(self._failed.items()))
            raise RuntimeError(
                f"{len(self._failed)} of {self._pipeline.shards} shards could not be finished, {shard} the"
                f" first: {why}. What was answered is kept: the same command goes on"
            )

    def _look(self) -> bool:
        """Returns whether there is something left to wait for."""
        left = [
            shard
            for shard in range(self._pipeline.shards)
            if shard not in self._failed and not self._finished(shard)
        ]
        if not left:
            return False
        try:
            alive = self._running.alive()
        except OSError as error:  # a controller that is busy for a moment says nothing about the jobs
            self._console.say(f"nobody can tell how the jobs are: {error}; asked again")
            return True
        again = []
        for shard in left:
            if shard in alive:
                self._gone_since.pop(shard, None)
                self._end_if_silent(shard)
            elif self._finished(shard):  # between the two looks
                continue
            elif self._really_gone(shard):
                again += self._died(shard)
        self._start(again)
        return True

    def _start(self, shards: Sequence[int]) -> None:
        for shard in shards:
            shard_folder(self._output, shard).mkdir(parents=True, exist_ok=True)
            self._starts[shard] += 1
            self._gone_since.pop(shard, None)
            self._seen.pop(shard, None)
        self._running.start(shards)

    def _died(self, shard: int) -> list[int]:
        """The shard, if another job should try."""
        why = self._running.why(shard)
        failure = self._failure(shard)
        if failure is not None:
            why = failure["message"]
            if failure["code"] == USER_ERROR:
                raise ValueError(why)
        if self._starts[shard] > self._pipeline.jobs.restarts:
            self._failed[shard] = why
            self._console.say(f"shard {shard} died {self._starts[shard]} times and is left: {why}")
            return []
        self._console.say(f"shard {shard} died ({why}): another job goes on")
        (shard_folder(self._output, shard) / FAILURE).unlink(missing_ok=True)
        return [shard]

    def _really_gone(self, shard: int) -> bool:
        """Returns whether a job is gone, and not only between two looks at a slow file system; and nobody,
        such as a job of an earlier command on its way out, has the shard still in hand."""
        if self._claims.held(shard_folder(self._output, shard) / CLAIMS):
            return False
        if self._failure(shard) is not None:
            return True
        since = self._gone_since.setdefault(shard, time.monotonic())
        return time.monotonic() - since >= self._pipeline.jobs.settle

    def _end_if_silent(self, shard: int) -> None:
        if shard not in self._running.running():
            return
        try:
            beat = (shard_folder(self._output, shard) / PROGRESS).stat().st_mtime_ns
        except OSError:
            beat = 0
        last, since = self._seen.get(shard, (-1, time.monotonic()))
        if beat != last:
            since = time.monotonic()
        self._seen[shard] = beat, since
        silent = time.monotonic() - since
        if silent > self._pipeline.jobs.silence:
            self._console.say(f"shard {shard} has shown nothing for {silent:.0f} s: its job is ended")
            self._running.stop(shard)
            self._seen.pop(shard)

    def _done(self, shard: int) -> bool:
        """Finished, with every answer graded."""
        done = _json(shard_folder(self._output, shard) / DONE)
        return done is not None and not done["unavailable"]

    def _finished(self, shard: int) -> bool:
        return (shard_folder(self._output, shard) / DONE).is_file()

    def _failure(self, shard: int) -> dict[str, Any] | None:
        return _json(shard_folder(self._output, shard) / FAILURE)

    def _progress(self) -> tuple[int, int]:
        found = [_json(shard_folder(self._output, s) / PROGRESS) for s in range(self._pipeline.shards)]
        begun = json.loads((self._output / "estimate.json").read_text())
        total = begun["rows"] * self._pipeline.answers.samples
        return sum(one["graded"] for one in found if one is not None), total

    def _news(self) -> str:
        finished = sum(self._finished(shard) for shard in range(self._pipeline.shards))
        return f"{finished} of {self._pipeline.shards} shards are done"


def _json(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
