"""The parent's side of worker processes and service threads: a pool that gives calls up at their deadlines.

A call in a process is killed with its process, a call in a thread is left to itself. Graders and environments
stand on this; the child's side of a worker process is `worker`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import treetune
from treetune.config import folders
from treetune.exceptions import WorkerStartError
from treetune.inherited import without_secrets
from treetune.processes.worker import LENGTH, Servant, frame

log = logging.getLogger(__name__)

Lost = Callable[[Literal["timeout", "error", "unavailable"], str, float], Any]
"""Makes the result of a call that was given up, from the outcome, a message and seconds."""

START_SECONDS = 120.0
"""How long a worker may take to import its servant. Symbolic algebra on a busy disk takes a while."""

_ENDING_SECONDS = 10.0
"""How long the kernel may take to end a process that was killed or has closed its pipes."""

_CLOSE_SECONDS = 60.0
_READ_BYTES = 1 << 16

_BATCH_SECONDS = 0.02
"""The time that a batch should take: long beside the 0.1 ms that handing it over costs, short enough that
the last batches of a wave keep all workers busy."""

_BATCH_MOST = 64

_MEAN_STEP = 0.1
"""Weight of the newest result in the running mean of seconds for one."""

_LOST_AT_MOST = 4
"""So many times the threads may be lost in calls that don't return; then nothing is asked any more until
some have."""


_STANDS_AT_MOST_S = 3600.0
"""How long a service call may wait for its turn, which no deadline of its own counts."""


@dataclass(frozen=True)
class ServantCall:
    """A call of the servant with this number, to be answered within `deadline` seconds.

    `number` is its name between parent and worker, `about` its name in a log.
    """

    number: int
    servant: int
    arguments: tuple[Any, ...]
    deadline: float
    about: str = ""

    @property
    def too_long(self) -> str:
        return f"no result within {self.deadline:g} s"


class Pool:
    """Answers calls in `workers` processes or in threads, as each servant was registered.

    A call on which a servant hangs has the result that `lost` makes of ``timeout``, one on which its process
    dies twice or runs out of `memory_gib` that of ``error``; the worker is replaced and the others go on. A
    call in a thread that takes longer than its deadline is ``unavailable``.

    Workers start with the first call, and end with the pool or with this process, however it ends. `name`
    is what messages call the pool. Safe to use from several threads.
    """

    def __init__(self, name: str, workers: int, memory_gib: float | None, lost: Lost) -> None:
        self._name, self._worker_count, self._lost = name, workers, lost
        self._memory_bytes = None if memory_gib is None else int(memory_gib * 2**30)
        self._lock = threading.Lock()
        self._servants: dict[int, bytes] = {}
        self._services: dict[int, tuple[Servant, ServiceThreads]] = {}
        self._registered = self._works = 0
        self._waiting: dict[int, Future[Any]] = {}
        self._failure: BaseException | None = None
        self._queue: deque[ServantCall] = deque()
        self._struck = set[int | None]()
        """Works at which a worker died, None for its start: once may be the machine's doing."""
        self._closed = False
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = -1, -1
        self._mean_seconds = _BATCH_SECONDS

    def register(self, servant: Servant, name: str, *, threads: int | None = None) -> int:
        """Returns the number that calls name the servant by. It answers in worker processes, or, with
        `threads`, in at most so many threads of this process.

        Raises ValueError, with its `name`, for a servant that can't be sent to a process.
        """
        number = self._registered
        if threads is not None:
            self._services[number] = servant, ServiceThreads(servant, threads, self._settle, self._lost)
        else:
            self._servants[number] = pickled_servant(servant, name)
        self._registered += 1
        return number

    def submit(self, servant: int, *arguments: Any, deadline: float, about: str = "") -> Future[Any]:
        """Returns the future result. Does not block. See `ServantCall`.

        The future raises WorkerStartError if no worker can load the servant; so does `submit` from then on.
        Raises ValueError if the pool is closed.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._works += 1
            work = ServantCall(self._works, servant, arguments, deadline, about)
            self._waiting[work.number] = future
            if servant not in self._services:
                self._queue.append(work)
                if self._thread is None:
                    self._wake_read, self._wake_write = os.pipe()
                    os.set_blocking(self._wake_read, False)
                    self._thread = threading.Thread(target=self._serve, name="workers", daemon=True)
                    self._thread.start()
                elif len(self._queue) == 1:
                    os.write(self._wake_write, b"x")
                return future
        self._services[servant][1].add(work)
        return future

    def close(self) -> None:
        """Ends the workers; results that are still missing are cancelled. Safe to call twice."""
        with self._lock:
            self._failure = self._failure or ValueError(f"{self._name} is closed")
        for _, threads in self._services.values():
            threads.close()
        for servant, _ in self._services.values():
            servant.close()
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
        self._fail(CancelledError(f"{self._name} was closed before this was done"))

    def _settle(self, work: ServantCall, result: Any) -> None:
        with self._lock:
            future = self._waiting.pop(work.number, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(result)

    def _fail(self, error: BaseException) -> None:
        """Gives the error to everyone who waits, and to whoever comes."""
        with self._lock:
            self._failure = self._failure or error
            futures = list(self._waiting.values())
            self._waiting.clear()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    # The rest runs in the thread that owns the workers. The kernel kills them when the thread
    # that started them ends, so no other thread may start one.

    def _serve(self) -> None:
        workers: list[WorkerProcess] = []
        failure: BaseException | None = None
        try:
            workers.extend(self._start() for _ in range(self._worker_count))
            while not self._closed:
                self._hand_out(workers)
                self._wait(workers)
                for index, worker in enumerate(workers):
                    if not self._attend(worker):
                        workers[index] = self._start()
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
        """Waits until a worker has something to say, can be sent more or is overdue, or work has come."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            for worker in workers:
                selector.register(worker.results, selectors.EVENT_READ)
                if worker.sending:
                    selector.register(worker.requests, selectors.EVENT_WRITE)
            overdue = [at for worker in workers if (at := worker.overdue_at()) is not None]
            selector.select(max(0.0, min(overdue) - time.monotonic()) if overdue else None)
        with contextlib.suppress(BlockingIOError):  # when it was a worker that ended the wait
            os.read(self._wake_read, 4096)

    def _attend(self, worker: WorkerProcess) -> bool:
        """Settles the results that have come; False if the worker had to be given up and must be replaced."""
        now = time.monotonic()
        results, alive = worker.receive()
        for work, result in results:
            self._done(work, result)
        outcome: Literal["timeout", "error"]
        if not alive:
            outcome, message = "error", f"the worker process {worker.ending()}"
        elif (at := worker.overdue_at()) is not None and at <= now:
            outcome, message = "timeout", "it took too long"
        else:
            worker.send()
            return True
        worker.kill()
        if not worker.ready:
            if outcome == "timeout" or None in self._struck:
                raise WorkerStartError(f"a worker process did not start: {message}")
            self._struck.add(None)
        if worker.batch:
            work = worker.batch[0]
            if outcome == "timeout":
                message = work.too_long
            log.warning("%s on an answer to problem %s: %s", outcome, work.about, message)
            if outcome == "timeout" or work.number in self._struck:
                worker.batch.popleft()
                self._done(work, self._lost(outcome, message, max(0.0, now - worker.since)))
            self._struck.add(work.number)
            with self._lock:
                self._queue.extendleft(reversed(worker.batch))
        return False

    def _done(self, work: ServantCall, result: Any) -> None:
        self._mean_seconds += _MEAN_STEP * (result.seconds - self._mean_seconds)
        self._settle(work, result)


def pickled_servant(servant: Servant, name: str) -> bytes:
    """Raises ValueError, with its `name`, for a servant that can't be sent to a process."""
    try:
        return pickle.dumps(servant)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{name} cannot be sent to a worker process ({error}): define it at the top level of a"
            " module, with fields that can be pickled"
        ) from error


def start_worker(
    module: str, memory_bytes: int | None, stdin: int, stdout: int
) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """Starts a process that runs a module, and returns it with the first message that it has to be sent.
    `memory_bytes` limits its address space."""
    source = str(Path(treetune.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        # -P: a file in the working directory must not shadow a module of the worker's.
        [sys.executable, "-P", "-m", module, str(os.getpid())],
        stdin=stdin,
        stdout=stdout,
        bufsize=0,
        # One thread each: there are as many workers as there is work for, and idle threads of
        # linear algebra libraries would count against the memory.
        env={
            **without_secrets(),
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        },
        start_new_session=True,
    )
    setup = {"path": list(sys.path), "own_folders": folders.searched(), "memory_bytes": memory_bytes}
    return process, setup


def exit_words(code: int) -> str:
    """Says how a process with this exit code ended."""
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class WorkerProcess:
    """A process that does one batch of work at a time; `batch` is what it has not answered yet. It loads a
    servant when it is first given work for it.

    It is a fresh interpreter, not a fork: forking a process with threads, torch or CUDA in it is
    unsafe, and multiprocessing's spawn would import the run's main module again. It leads a
    session of its own, so that Ctrl-C does not reach it and that whatever a servant starts is
    killed along with it. No call to it ever waits.
    """

    def __init__(self, servants: Mapping[int, bytes], memory_bytes: int | None) -> None:
        """`servants` are pickled, by their numbers, and may grow; `memory_bytes` limits the address space."""
        self._servants = servants
        self._known: set[int] = set()
        self._loading = 0
        self._process, setup = start_worker(
            "treetune.processes.worker", memory_bytes, subprocess.PIPE, subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.requests = self._process.stdin.fileno()
        self.results = self._process.stdout.fileno()
        os.set_blocking(self.requests, False)
        os.set_blocking(self.results, False)
        self._up = False
        self.batch: deque[ServantCall] = deque()
        self.since = time.monotonic()
        """When the start, the loading of a servant, or the work that is being done, began."""
        self._outbox = bytearray(frame(setup))
        self._inbox = bytearray()
        self.send()

    @property
    def ready(self) -> bool:
        """Returns whether what it does now, if anything, is work."""
        return self._up and not self._loading

    @property
    def idle(self) -> bool:
        return self.ready and not self.batch

    @property
    def sending(self) -> bool:
        return bool(self._outbox)

    def give(self, batch: list[ServantCall]) -> None:
        assert self.idle
        self.batch.extend(batch)
        self.since = time.monotonic()
        for servant in dict.fromkeys(work.servant for work in batch if work.servant not in self._known):
            self._known.add(servant)
            self._loading += 1
            self._outbox += frame((servant, self._servants[servant]))
        self._outbox += frame([(work.number, work.servant, work.arguments) for work in batch])
        self.send()

    def send(self) -> None:
        """Sends as much as the pipe takes now. A dead worker is noticed by `receive`."""
        try:
            while self._outbox:
                del self._outbox[: os.write(self.requests, self._outbox)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._outbox.clear()

    def receive(self) -> tuple[list[tuple[ServantCall, Any]], bool]:
        """Returns all results that have come, and whether the worker is still there.

        Raises WorkerStartError if the servant could not be loaded.
        """
        alive = True
        try:
            while True:
                data = os.read(self.results, _READ_BYTES)
                if not data:
                    alive = False
                    break
                self._inbox += data
        except BlockingIOError:
            pass
        results = []
        start = 0
        while len(self._inbox) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._inbox, start)
            end = start + LENGTH.size + length
            if len(self._inbox) < end:
                break
            kind, *content = pickle.loads(memoryview(self._inbox)[start + LENGTH.size : end])
            start = end
            if kind == "failed":
                raise WorkerStartError(f"a worker process cannot load what it works with: {content[0]}")
            self.since = content[0]
            if kind == "ready":
                self._up = True
            elif kind == "loaded":
                self._loading -= 1
            else:
                work = self.batch.popleft()
                assert work.number == content[1], "results come in the order of the batch"
                results.append((work, content[2]))
        del self._inbox[:start]
        return results, alive

    def overdue_at(self) -> float | None:
        """Returns when this worker has to be killed, unless it says something before."""
        if not self.ready:
            return self.since + START_SECONDS
        return self.since + self.batch[0].deadline if self.batch else None

    def ending(self) -> str:
        """Says how a worker whose pipe has closed came to its end."""
        try:
            return exit_words(self._process.wait(timeout=_ENDING_SECONDS))
        except subprocess.TimeoutExpired:
            return "closed its pipe"

    def kill(self) -> None:
        """Kills the process and what it started, and reaps it. Safe to call twice."""
        with contextlib.suppress(ProcessLookupError):  # when the whole group is gone already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=_ENDING_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class CallClock:
    """The time that a service call has left. It stands still while the call waits for its turn at something
    that answers one call after another: whoever is before it there has a clock of its own.
    """

    def __init__(self, seconds: float, changed: threading.Condition) -> None:
        self._left = seconds
        self._runs_since: float | None = time.monotonic()
        self._stood_since = 0.0
        self._stood_s = 0.0
        self._changed = changed  # notified when the clock is stopped or started

    @property
    def overdue_at(self) -> float:
        """When the call is overdue."""
        if self._runs_since is None:
            return self._stood_since + _STANDS_AT_MOST_S
        return self._runs_since + self._left

    @property
    def stood_s(self) -> float:
        """Seconds that it stood still so far."""
        return self._stood_s

    def stop(self) -> None:
        with self._changed:
            if self._runs_since is not None:
                now = time.monotonic()
                self._left -= now - self._runs_since
                self._runs_since, self._stood_since = None, now
                self._changed.notify_all()

    def start(self) -> None:
        """Starts it again. Safe to call twice, and from any thread."""
        with self._changed:
            if self._runs_since is None:
                now = time.monotonic()
                self._runs_since = now
                self._stood_s += now - self._stood_since
                self._changed.notify_all()


_call = threading.local()


def call_clock() -> CallClock:
    """Returns the clock of the service call that this thread is at work on; one that nobody reads where it is
    at work on none."""
    clock: CallClock | None = getattr(_call, "clock", None)
    return clock or CallClock(math.inf, threading.Condition())


class ServiceThreads:
    """Threads that call a servant which waits for something outside: `concurrency` calls at a time, each
    within its deadline, which a servant may stop while it waits for its turn (`call_clock`).

    A call can't be ended from outside. One that is overdue is left to itself and its result is
    ``unavailable``; another thread takes the place of its own. Threads end with this process.
    """

    def __init__(
        self, servant: Servant, concurrency: int, settle: Callable[[ServantCall, Any], None], lost: Lost
    ) -> None:
        self._servant, self._concurrency, self._settle, self._lost_result = servant, concurrency, settle, lost
        self._changed = threading.Condition()
        self._queue: deque[ServantCall] = deque()
        self._running: dict[int, tuple[ServantCall, CallClock]] = {}
        self._idle = self._lost = self._numbers = 0
        self._closed = False
        self._watcher: threading.Thread | None = None

    def add(self, work: ServantCall) -> None:
        with self._changed:
            self._queue.append(work)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="service calls", daemon=True)
                self._watcher.start()
            self._staff()
            self._changed.notify_all()

    def close(self) -> None:
        """Stops: nothing more is asked, and nothing more is settled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _staff(self) -> None:
        """Starts a further thread, where there is work for it. With the lock held."""
        if len(self._queue) > self._idle and self._idle + len(self._running) < self._concurrency:
            self._numbers += 1
            self._idle += 1
            name = f"service call {self._numbers}"
            threading.Thread(target=self._work, args=(self._numbers,), name=name, daemon=True).start()

    def _work(self, number: int) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._closed):
                    self._changed.wait()
                self._idle -= 1
                if self._closed:
                    return
                work = self._queue.popleft()
                _call.clock = CallClock(work.deadline, self._changed)
                self._running[number] = work, _call.clock
                self._changed.notify_all()
            result = self._servant.answer(*work.arguments)
            with self._changed:
                if self._running.pop(number, None) is None:  # given up: another thread has its place
                    self._lost -= 1
                    return
                self._idle += 1
            if not self._closed:
                self._settle(work, result)

    def _watch(self) -> None:
        """Gives up overdue calls, and all that wait while too many threads are lost."""
        while not self._closed:
            given_up: list[tuple[ServantCall, str]] = []
            with self._changed:
                next_at = min((clock.overdue_at for _, clock in self._running.values()), default=math.inf)
                self._changed.wait(None if next_at == math.inf else max(0.0, next_at - time.monotonic()))
                now = time.monotonic()
                for number, (work, clock) in list(self._running.items()):
                    if clock.overdue_at <= now:
                        del self._running[number]
                        self._lost += 1
                        given_up.append((work, work.too_long))
                if self._lost >= _LOST_AT_MOST * self._concurrency:
                    why = f"not asked: {self._lost} earlier calls have not returned"
                    given_up += [(work, why) for work in self._queue]
                    self._queue.clear()
                self._staff()
            for work, why in given_up:
                self._settle(work, self._lost_result("unavailable", why, 0.0))
