"""Graders at work: worker processes with a deadline that each can be killed at."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import selectors
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Self

from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.process import Work, WorkerProcess, WorkerStartError
from treetune.tasks.graders.worker import graded
from treetune.vocabulary import Grade, GradeOutcome, Problem

log = logging.getLogger(__name__)

Key = tuple[str, str, bytes]

_BATCH_SECONDS = 0.02
"""What a batch should take: long beside the 0.1 ms that handing it over costs, short enough that
the last batches of a wave keep all workers busy."""

_BATCH_MOST = 64

_MEAN_STEP = 0.1
"""Weight of the newest grade in the running mean of seconds per grade."""

_CLOSE_SECONDS = 60.0


class GraderPool:
    """Grades answers in `workers` processes, each answer within `deadline` seconds.

    An answer on which the grader hangs gets the outcome ``timeout``, one on which it crashes or
    runs out of `memory_gib` gets ``error``; the worker is replaced and the others go on. Equal
    answers to a problem are graded once: the last `memo_size` grades are kept. A grader that is
    not `isolated` runs in this process, without memo: there is nothing to guard against, and comparing
    two strings is far cheaper than sending them away or looking them up.

    Safe to use from several threads. Workers start with the first answer, and end with the pool or
    with this process, however it ends. Close it, or use it in a `with` statement.
    """

    def __init__(
        self,
        grader: Grader,
        *,
        workers: int | None = None,
        deadline: float = 10.0,
        memory_gib: float | None = 4.0,
        memo_size: int = 100_000,
    ) -> None:
        """`workers` is by default 2, or 1 where there is but one core: the engine needs the others."""
        if workers is None:
            workers = min(2, os.cpu_count() or 1)
        if workers < 1 or deadline <= 0 or memo_size < 0:
            raise ValueError(
                f"a grader pool needs workers >= 1, a deadline > 0 and memo_size >= 0, not {workers}, "
                f"{deadline} and {memo_size}"
            )
        self.grader = grader
        self.deadline = deadline
        self._worker_count = workers
        self._memory_bytes = None if memory_gib is None else int(memory_gib * 2**30)
        self._memo: OrderedDict[Key, Grade] = OrderedDict()
        self._memo_size = memo_size
        self._lock = threading.Lock()
        self._waiting: dict[Key, list[Future[Grade]]] = {}
        self._queue: deque[Work] = deque()
        self._closed = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = -1, -1
        self._numbers = 0
        self._mean_seconds = _BATCH_SECONDS
        self._pickled = _pickled(grader) if grader.isolated else b""

    def submit(self, response: str, problem: Problem) -> Future[Grade]:
        """The grade, as soon as it is there. Does not block, nor raise for what the answer is.

        The future raises WorkerStartError if no worker can load the grader; so does `submit` from
        then on. Raises ValueError if the pool is closed.
        """
        future: Future[Grade] = Future()
        if not self.grader.isolated:
            future.set_result(graded(self.grader, response, problem))
            return future
        key = _key(response, problem)
        with self._lock:
            if self._closed:
                raise self._failure or ValueError("the grader pool is closed")
            known = self._memo.get(key)
            if known is None:
                self._enqueue(key, future, Work(self._numbers, response, problem))
                return future
            self._memo.move_to_end(key)
        future.set_result(known)
        return future

    def grade_many(self, pairs: Iterable[tuple[str, Problem]]) -> list[Grade]:
        """The grades of (response, problem) pairs, in their order."""
        if not self.grader.isolated:
            return [graded(self.grader, response, problem) for response, problem in pairs]
        futures = [self.submit(response, problem) for response, problem in pairs]
        return [future.result() for future in futures]

    def close(self) -> None:
        """Ends the workers; grades that are still missing are cancelled. Safe to call twice."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _enqueue(self, key: Key, future: Future[Grade], work: Work) -> None:
        """With the lock held."""
        same = self._waiting.get(key)
        if same is not None:
            same.append(future)
            return
        self._waiting[key] = [future]
        self._numbers += 1
        self._queue.append(work)
        if self._thread is None:
            self._wake_read, self._wake_write = os.pipe()
            os.set_blocking(self._wake_read, False)
            self._thread = threading.Thread(target=self._serve, name="graders", daemon=True)
            self._thread.start()
        elif len(self._queue) == 1:
            os.write(self._wake_write, b"x")

    def _remember(self, key: Key, grade: Grade) -> None:
        self._memo[key] = grade
        if len(self._memo) > self._memo_size:
            self._memo.popitem(last=False)

    # What follows runs in the thread that owns the workers. The kernel kills them when the thread
    # that started them ends, so no other thread may start one.

    def _serve(self) -> None:
        workers: list[WorkerProcess] = []
        try:
            workers.extend(self._start() for _ in range(self._worker_count))
            while not self._closed:
                self._hand_out(workers)
                self._wait(workers)
                for place, worker in enumerate(workers):
                    if not self._attend(worker):
                        workers[place] = self._start()
        except BaseException as error:  # handed on to everyone who waits for a grade
            self._failure = error
        finally:
            for worker in workers:
                worker.kill()
            with self._lock:
                self._closed = True
                futures = [future for same in self._waiting.values() for future in same]
                self._waiting.clear()
            closed = CancelledError("the grader pool was closed before this answer was graded")
            for future in futures:
                if future.set_running_or_notify_cancel():
                    future.set_exception(self._failure or closed)

    def _start(self) -> WorkerProcess:
        return WorkerProcess(self._pickled, self._memory_bytes)

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
            due = [at for worker in workers if (at := worker.overdue_at(self.deadline)) is not None]
            selector.select(max(0.0, min(due) - time.monotonic()) if due else None)
        with contextlib.suppress(BlockingIOError):  # when it was a worker that ended the wait
            os.read(self._wake_read, 4096)

    def _attend(self, worker: WorkerProcess) -> bool:
        """Takes what the worker has to say; False if it had to be given up and must be replaced."""
        outcome: GradeOutcome
        now = time.monotonic()
        grades, alive = worker.receive()
        for work, grade in grades:
            self._settle(work, grade)
        if not alive:
            outcome, message = "error", f"the grader process {worker.ending()}"
        elif (due := worker.overdue_at(self.deadline)) is not None and due <= now:
            outcome, message = "timeout", f"no grade within {self.deadline:g} s"
        else:
            worker.send()
            return True
        worker.kill()
        if not worker.ready:
            raise WorkerStartError(f"a worker process did not start: {message}")
        if worker.batch:
            work = worker.batch.popleft()
            log.warning("%s on an answer to problem %s: %s", outcome, work.problem.id, message)
            seconds = max(0.0, now - worker.since)
            self._settle(work, Grade(reward=0.0, outcome=outcome, seconds=seconds, message=message))
            with self._lock:
                self._queue.extendleft(reversed(worker.batch))
        return False

    def _settle(self, work: Work, grade: Grade) -> None:
        self._mean_seconds += _MEAN_STEP * (grade.seconds - self._mean_seconds)
        key = _key(work.response, work.problem)
        with self._lock:
            self._remember(key, grade)
            futures = self._waiting.pop(key)
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_result(grade)


def _pickled(grader: Grader) -> bytes:
    try:
        return pickle.dumps(grader)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{type(grader).__name__} cannot be sent to a worker process ({error}): define it at the top "
            "level of a module, with fields that can be pickled"
        ) from error


def _key(response: str, problem: Problem) -> Key:
    # A digest, because answers can be long and the memo keeps many.
    digest = hashlib.blake2b(response.encode(errors="surrogatepass"), digest_size=16).digest()
    return (problem.id, problem.gold, digest)
