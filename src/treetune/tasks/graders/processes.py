"""Worker processes at work: answers handed out in batches, and whoever hangs or crashes replaced."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable

from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.process import Work, WorkerProcess, WorkerStartError
from treetune.vocabulary import Grade, GradeOutcome

log = logging.getLogger(__name__)

_BATCH_SECONDS = 0.02
"""What a batch should take: long beside the 0.1 ms that handing it over costs, short enough that
the last batches of a wave keep all workers busy."""

_BATCH_MOST = 64

_MEAN_STEP = 0.1
"""Weight of the newest grade in the running mean of seconds per grade."""

_CLOSE_SECONDS = 60.0


class GraderProcesses:
    """So many processes, which know the graders that they were taught. They start with the first answer, and
    end with this object or with this process, however it ends.

    `settle` is given each grade, `fail` what went wrong where there are to be no more, from a thread of this
    object. An answer on which a grader hangs is a ``timeout``, one on which it crashes an ``error``.
    """

    def __init__(
        self,
        workers: int,
        memory_bytes: int | None,
        settle: Callable[[Work, Grade], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._worker_count, self._memory_bytes = workers, memory_bytes
        self._settle, self._fail = settle, fail
        self._lock = threading.Lock()
        self._graders: dict[int, bytes] = {}
        self._queue: deque[Work] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = -1, -1
        self._mean_seconds = _BATCH_SECONDS

    def teach(self, number: int, grader: Grader) -> None:
        """From here on, work may name this grader. Raises ValueError for one that can't be sent."""
        if number not in self._graders:
            self._graders[number] = _pickled(grader)

    def add(self, work: Work) -> None:
        with self._lock:
            self._queue.append(work)
            if self._thread is None:
                self._wake_read, self._wake_write = os.pipe()
                os.set_blocking(self._wake_read, False)
                self._thread = threading.Thread(target=self._serve, name="graders", daemon=True)
                self._thread.start()
            elif len(self._queue) == 1:
                os.write(self._wake_write, b"x")

    def close(self) -> None:
        """Ends the workers. Safe to call twice."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
            if thread is not None:
                os.write(self._wake_write, b"x")
        if thread is not None:
            thread.join(timeout=_CLOSE_SECONDS)
            if thread.is_alive():
                raise RuntimeError(f"grader processes did not end in {_CLOSE_SECONDS:g} s after being killed")
            os.close(self._wake_read)
            os.close(self._wake_write)

    # What follows runs in the thread that owns the workers. The kernel kills them when the thread
    # that started them ends, so no other thread may start one.

    def _serve(self) -> None:
        workers: list[WorkerProcess] = []
        failure: BaseException | None = None
        try:
            workers.extend(self._start() for _ in range(self._worker_count))
            while not self._closed:
                self._hand_out(workers)
                self._wait(workers)
                for place, worker in enumerate(workers):
                    if not self._attend(worker):
                        workers[place] = self._start()
        except BaseException as error:  # handed on to everyone who waits for a grade
            failure = error
        finally:
            for worker in workers:
                worker.kill()
            if failure is not None:
                self._fail(failure)

    def _start(self) -> WorkerProcess:
        return WorkerProcess(self._graders, self._memory_bytes)

    def _hand_out(self, workers: list[WorkerProcess]) -> None:
        for worker in workers:
            if not worker.idle:
                continue
            with self._lock:
                if not self._queue:
                    return
                fair = -(-len(self._queue) // len(workers))
                quick = int(_BATCH_SECONDS / max(self._mean_seconds, _BATCH_SECONDS / _BATCH_MOST))
                batch = [self._queue.popleft() for _ in range(max(1, min(fair, quick)))]
            worker.give(batch)

    def _wait(self, workers: list[WorkerProcess]) -> None:
        """Until a worker has something to say, can be sent more, is overdue, or work has come."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            for worker in workers:
                selector.register(worker.results, selectors.EVENT_READ)
                if worker.sending:
                    selector.register(worker.requests, selectors.EVENT_WRITE)
            due = [at for worker in workers if (at := worker.overdue_at()) is not None]
            selector.select(max(0.0, min(due) - time.monotonic()) if due else None)
        with contextlib.suppress(BlockingIOError):  # when it was a worker that ended the wait
            os.read(self._wake_read, 4096)

    def _attend(self, worker: WorkerProcess) -> bool:
        """Takes what the worker has to say; False if it had to be given up and must be replaced."""
        outcome: GradeOutcome
        now = time.monotonic()
        grades, alive = worker.receive()
        for work, grade in grades:
            self._done(work, grade)
        if not alive:
            outcome, message = "error", f"the grader process {worker.ending()}"
        elif (due := worker.overdue_at()) is not None and due <= now:
            outcome, message = "timeout", "it took too long"
        else:
            worker.send()
            return True
        worker.kill()
        if not worker.ready:
            raise WorkerStartError(f"a worker process did not start: {message}")
        if worker.batch:
            work = worker.batch.popleft()
            if outcome == "timeout":
                message = f"no grade within {work.deadline:g} s"
            log.warning("%s on an answer to problem %s: %s", outcome, work.problem.id, message)
            seconds = max(0.0, now - worker.since)
            self._done(work, Grade(reward=0.0, outcome=outcome, seconds=seconds, message=message))
            with self._lock:
                self._queue.extendleft(reversed(worker.batch))
        return False

    def _done(self, work: Work, grade: Grade) -> None:
        self._mean_seconds += _MEAN_STEP * (grade.seconds - self._mean_seconds)
        self._settle(work, grade)


def _pickled(grader: Grader) -> bytes:
    try:
        return pickle.dumps(grader)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{type(grader).__name__} cannot be sent to a worker process ({error}): define it at the top "
            "level of a module, with fields that can be pickled"
        ) from error
