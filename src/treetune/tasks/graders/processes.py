"""Worker processes at work: handed out in batches, and whoever hangs or crashes replaced."""

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
from typing import Any

from treetune.tasks.graders.process import Work, WorkerProcess, WorkerStartError
from treetune.tasks.graders.worker import Servant
from treetune.vocabulary import GradeOutcome

log = logging.getLogger(__name__)

_BATCH_SECONDS = 0.02
"""What a batch should take: long beside the 0.1 ms that handing it over costs, short enough that
the last batches of a wave keep all workers busy."""

_BATCH_MOST = 64

_MEAN_STEP = 0.1
"""Weight of the newest result in the running mean of seconds for one."""

_CLOSE_SECONDS = 60.0


class WorkerProcesses:
    """So many processes, which know the servants that they were taught. They start with the first work, and
    end with this object or with this process, however it ends.

    `settle` is given each result (which has the `seconds` that it took), `fail` what went wrong where there
    are to be no more, from a thread of this object. `lost` makes the result of work on which a servant hung
    (``timeout``) or its process died (``error``), from the outcome, words and seconds.
    """

    def __init__(
        self,
        workers: int,
        memory_bytes: int | None,
        settle: Callable[[Work, Any], None],
        lost: Callable[[GradeOutcome, str, float], Any],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._worker_count, self._memory_bytes = workers, memory_bytes
        self._settle, self._lost, self._fail = settle, lost, fail
        self._lock = threading.Lock()
        self._servants: dict[int, bytes] = {}
        self._queue: deque[Work] = deque()
        self._own_queues: list[deque[Work]] = [deque() for _ in range(workers)]
        self._closed = False
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = -1, -1
        self._mean_seconds = _BATCH_SECONDS

    def teach(self, number: int, servant: Servant, name: str) -> None:
        """From here on, work may name this servant. Raises ValueError, with its name, for one that can't be
        sent."""
        if number not in self._servants:
            self._servants[number] = _pickled(servant, name)

    def add(self, work: Work) -> None:
        with self._lock:
            queue = self._queue if work.worker is None else self._own_queues[work.worker]
            queue.append(work)
            if self._thread is None:
                self._wake_read, self._wake_write = os.pipe()
                os.set_blocking(self._wake_read, False)
                self._thread = threading.Thread(target=self._serve, name="workers", daemon=True)
                self._thread.start()
            elif len(queue) == 1:
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
                raise RuntimeError(f"worker processes did not end in {_CLOSE_SECONDS:g} s after being killed")
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
        except BaseException as error:  # handed on to everyone who waits for a result
            failure = error
        finally:
            for worker in workers:
                worker.kill()
            if failure is not None:
                self._fail(failure)

    def _start(self) -> WorkerProcess:
        return WorkerProcess(self._servants, self._memory_bytes)

    def _hand_out(self, workers: list[WorkerProcess]) -> None:
        for worker, own_queue in zip(workers, self._own_queues, strict=True):
            if not worker.idle:
                continue
            with self._lock:
                queue = own_queue or self._queue
                if not queue:
                    continue
                fair = len(queue) if queue is own_queue else -(-len(queue) // len(workers))
                quick = int(_BATCH_SECONDS / max(self._mean_seconds, _BATCH_SECONDS / _BATCH_MOST))
                batch = [queue.popleft() for _ in range(max(1, min(fair, quick)))]
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
        results, alive = worker.receive()
        for work, result in results:
            self._done(work, result)
        if not alive:
            outcome, message = "error", f"the worker process {worker.ending()}"
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
                message = work.too_long
            log.warning("%s on an answer to problem %s: %s", outcome, work.about, message)
            self._done(work, self._lost(outcome, message, max(0.0, now - worker.since)))
            with self._lock:
                for left in reversed(worker.batch):
                    (self._queue if left.worker is None else self._own_queues[left.worker]).appendleft(left)
        return False

    def _done(self, work: Work, result: Any) -> None:
        self._mean_seconds += _MEAN_STEP * (result.seconds - self._mean_seconds)
        self._settle(work, result)


def _pickled(servant: Servant, name: str) -> bytes:
    try:
        return pickle.dumps(servant)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{name} cannot be sent to a worker process ({error}): define it at the top level of a module,"
            " with fields that can be pickled"
        ) from error
