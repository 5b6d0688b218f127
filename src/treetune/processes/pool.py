"""Runs calls in worker processes or in threads, and gives a call up at its deadline.

Graders and environments use it. A call in a process is killed with its process (`Pool`, `WorkerProcess`). A
call in a thread can't be killed, so its result is dropped when it comes (`ServiceThreads`).

Calls in processes; the child's side is in `worker`::

    a caller's thread              thread "workers" (Pool._serve)          worker process
    ─────────────────────────      ────────────────────────────────        ──────────────────
    submit(call)
      queue, wake pipe  ─────────► _assign_batches: to idle workers ─────► pipe: reads a batch
      returns a future             _wait_for_event, the first of: a        prepares the servant,
                                     result, a deadline, the wake pipe       answers call by call
    future.result() waits          _attend_to_worker, to each of them:
             ◄───────────────────    result came → settle the future ◄──── pipe: each result at once
                                     deadline over → kill, "timeout"
                                     process died → try once more,
                                       then "error"
                     failed to load → try once more,
                                       then raise
                                     … and start another worker

Only the thread "workers" starts processes, since the kernel kills a child when the *thread* that started it
ends (PDEATHSIG).

Calls in threads::

    submit(call) ──► queue ──► thread "service call n": servant.answer(…) ──► settle the future
                       ▲
                     thread "service calls" (_watch): waits for the earliest deadline; gives the call up as
                     "unavailable"; its thread is then stuck, and another one may take its place
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
from treetune.inherited import remove_secrets
from treetune.processes.worker import MESSAGE_LENGTH, Servant, pack_message

log = logging.getLogger(__name__)

MakeLostResult = Callable[[Literal["timeout", "error", "unavailable"], str, float], Any]
"""Makes the result of a call that was given up, from the outcome, a message, and the seconds that the call
took."""

START_SECONDS = 120.0
"""The longest that a worker may take to import its servant. Symbolic algebra on a busy disk takes a while."""

ENDING_SECONDS = 10.0
"""The longest that the kernel may take to end a process that was killed or has closed its pipes."""

_CLOSE_SECONDS = 60.0
_READ_BYTES = 1 << 16

_SECONDS_OF_BATCH = 0.02
"""The seconds that a batch should take: much more than the 0.1 ms that sending it takes, and short enough for
all workers to be busy until the end."""

_MOST_CALLS_IN_BATCH = 64
"""The most calls in a batch. Without this limit, a batch would be too large if the earlier calls, whose mean
seconds give its size, were much cheaper than its own."""

_WEIGHT_OF_NEWEST = 0.1
"""The weight of the newest result in the running mean of seconds for a call."""

_STUCK_PER_THREAD = 4
"""If this many threads, for each thread that may run, are stuck in calls that don't return, waiting calls are
given up until some of the stuck threads return."""

_LONGEST_PAUSE_S = 3600.0
"""The longest that a service call may wait for its turn, which doesn't count towards its deadline."""


@dataclass(frozen=True)
class ServantCall:
    """A call of a servant.

    Example::

        ServantCall(number=812, servant=0, arguments=(problem, answer), deadline_s=10.0, about="train/17")
    """

    number: int
    """Identifies the call between parent and worker."""
    servant: int
    """The number of the servant that answers the call (`Pool.register`)."""
    arguments: tuple[Any, ...]
    deadline_s: float
    """The seconds that the call may take, from its beginning."""
    about: str = ""
    """Names the call in the log."""

    @property
    def overdue_message(self) -> str:
        return f"no result within {self.deadline_s:g} s"


class Pool:
    """Answers calls of servants in worker processes or in threads.

    A call in a process that takes longer than its deadline gets the result that `make_lost_result` makes of
    ``timeout``. A call at which its process dies twice gets the result that it makes of ``error``. In both
    cases the worker is replaced, and the others are not disturbed. A call in a thread that takes longer than
    its deadline gets the result that it makes of ``unavailable``.

    Workers start with the first call, and end with the pool or with this process, however it ends. Safe to
    use from several threads.

    Args:
        name: The name of the pool in messages.
        workers: The number of processes.
        memory_gib: The most address space of each process, in GiB. A servant that needs more gets a
            MemoryError. None: no limit.
    """

    def __init__(
        self, name: str, workers: int, memory_gib: float | None, make_lost_result: MakeLostResult
    ) -> None:
        self._name, self._worker_count = name, workers
        self._make_lost_result = make_lost_result
        """Makes the result of a call that was given up: at its deadline, or because its worker died."""
        self._memory_bytes = None if memory_gib is None else int(memory_gib * 2**30)
        self._lock = threading.Lock()
        """Guards all that callers and the thread "workers" share: the queue, the futures, the failure."""
        self._servants: dict[int, bytes] = {}
        """The pickled servants of worker processes, by their numbers."""
        self._services: dict[int, tuple[Servant, ServiceThreads]] = {}
        """The servants in threads, by their numbers."""
        self._registered_count = 0
        self._call_count = 0
        self._futures: dict[int, Future[Any]] = {}
        """The futures of calls without a result, by the numbers of the calls."""
        self._failure: BaseException | None = None
        """The error that all calls get from now on."""
        self._queue: deque[ServantCall] = deque()
        self._calls_with_death = set[int]()
        """The numbers of the calls at which a worker has died. A single death may have another cause than the
        call, so the call is tried once more."""
        self._failed_starts = set[int | None]()
        """What a worker failed to start: a servant, by its number, or the process itself, as None.

        After a first failure another worker is tried, since the failure may have had another cause. An entry
        is removed when a worker succeeds: in a long run, there may be any number of single failures."""
        self._closed = False
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = -1, -1
        """The two ends of a pipe: a byte in it ends the thread's `_wait_for_event`."""
        self._mean_seconds = _SECONDS_OF_BATCH
        """The running mean of the seconds of a call. At the beginning, a batch has a single call."""

    def register(self, servant: Servant, name: str, *, threads: int | None = None) -> int:
        """Registers a servant (an object that answers calls), and returns its number for `submit`.

        Args:
            name: The name of the servant in messages.
            threads: The most threads of this process that call it at a time; None for worker processes.

        Raises:
            ValueError: The servant can't be sent to a process.
        """
        number = self._registered_count
        if threads is not None:
            self._services[number] = (
                servant,
                ServiceThreads(servant, threads, self._settle, self._make_lost_result),
            )
        else:
            self._servants[number] = pickle_servant(servant, name)
        self._registered_count += 1
        return number

    def submit(self, servant: int, *arguments: Any, deadline_s: float, about: str = "") -> Future[Any]:
        """Returns the future result of a call (see `ServantCall`). Does not block.

        Raises:
            WorkerStartError: No worker can load the servant. Futures of earlier calls raise it, too.
            ValueError: The pool is closed.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._call_count += 1
            call = ServantCall(self._call_count, servant, arguments, deadline_s, about)
            self._futures[call.number] = future
            if servant not in self._services:  # a servant for worker processes
                self._queue.append(call)
                if self._thread is None:
                    self._wake_read, self._wake_write = os.pipe()
                    os.set_blocking(self._wake_read, False)
                    self._thread = threading.Thread(target=self._serve, name="workers", daemon=True)
                    self._thread.start()
                elif len(self._queue) == 1:
                    # With a longer queue, the thread has been woken already.
                    os.write(self._wake_write, b"x")
                return future
        # The lock is released here: the service's threads may settle this call at once, which takes the lock.
        _, service_threads = self._services[servant]
        service_threads.add(call)
        return future

    def close(self) -> None:
        """Ends the workers, and cancels all calls without a result. Safe to call twice."""
        # First of all, so that `submit` takes no further call.
        with self._lock:
            self._failure = self._failure or ValueError(f"{self._name} is closed")
        # The threads end before the servants, so that no call begins on a servant that is closed.
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
        self._fail_all_calls(CancelledError(f"{self._name} was closed before this was done"))

    def _settle(self, call: ServantCall, result: Any) -> None:
        """Sets the result of a call's future, unless it was cancelled."""
        with self._lock:
            future = self._futures.pop(call.number, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(result)

    def _fail_all_calls(self, error: BaseException) -> None:
        """Lets all calls without a result, and all later ones, raise the error."""
        with self._lock:
            self._failure = self._failure or error
            futures = list(self._futures.values())
            self._futures.clear()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    # All methods from here on run in the thread "workers".

    def _serve(self) -> None:
        """Keeps the workers busy until the pool is closed, and kills them at the end."""
        workers: list[WorkerProcess] = []
        failure: BaseException | None = None
        try:
            for _ in range(self._worker_count):
                workers.append(self._start_worker())
            while not self._closed:
                self._assign_batches(workers)
                self._wait_for_event(workers)
                for index, worker in enumerate(workers):
                    can_go_on = self._attend_to_worker(worker)
                    if not can_go_on:
                        workers[index] = self._start_worker()
        except BaseException as error:  # `_fail_all_calls` passes it on to everyone who waits
            failure = error
        finally:
            for worker in workers:
                worker.kill()
            if failure is not None:
                self._fail_all_calls(failure)

    def _start_worker(self) -> WorkerProcess:
        return WorkerProcess(self._servants, self._memory_bytes)

    def _assign_batches(self, workers: list[WorkerProcess]) -> None:
        """Gives each idle worker a batch of calls.

        A batch is as large as `_SECONDS_OF_BATCH` allow, at most `_MOST_CALLS_IN_BATCH`, and at most an equal
        share of the queue, so that the other workers get as many calls.
        """
        for worker in workers:
            if not worker.is_idle:
                continue
            with self._lock:
                if not self._queue:
                    return
                share = -(-len(self._queue) // len(workers))  # rounded up
                calls_in_time = _MOST_CALLS_IN_BATCH
                if self._mean_seconds > 0:
                    calls_in_time = min(_MOST_CALLS_IN_BATCH, int(_SECONDS_OF_BATCH / self._mean_seconds))
                size = max(1, min(share, calls_in_time))
                batch = [self._queue.popleft() for _ in range(size)]
            worker.give(batch)

    def _wait_for_event(self, workers: list[WorkerProcess]) -> None:
        """Waits until a result arrives, a pipe takes more, a deadline is over, or a call is submitted."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            for worker in workers:
                selector.register(worker.results, selectors.EVENT_READ)
                if worker.has_unsent_bytes:
                    selector.register(worker.requests, selectors.EVENT_WRITE)
            overdue_times = [worker.overdue_at() for worker in workers]
            deadlines = [deadline for deadline in overdue_times if deadline is not None]
            wait_s: float | None = None  # without a deadline, only the other events end the wait
            if deadlines:
                wait_s = max(0.0, min(deadlines) - time.monotonic())
            selector.select(wait_s)
        with contextlib.suppress(BlockingIOError):  # nothing to read if something else ended the wait
            os.read(self._wake_read, 4096)

    def _attend_to_worker(self, worker: WorkerProcess) -> bool:
        """Settles the results of a worker, and kills it if it is dead or overdue.

        The call that such a worker was answering is given up, or tried once more. The rest of its batch goes
        back to the front of the queue.

        Returns:
            True if the worker can go on, and False if it must be replaced.

        Raises:
            WorkerStartError: Two workers, with no success in between, have failed to start, or to load a
                servant: they died, took too long, or loading raised an exception.
        """
        now = time.monotonic()
        results, is_alive = worker.receive()
        self._failed_starts -= worker.started
        worker.started.clear()
        for call, result in results:
            self._finish_call(call, result)
        outcome: Literal["timeout", "error"]
        if worker.load_failure is not None:
            outcome, message = "error", f"it cannot load what it works with: {worker.load_failure}"
        elif not is_alive:
            outcome, message = "error", f"the worker process {worker.describe_end()}"
        elif (deadline := worker.overdue_at()) is not None and deadline <= now:
            outcome, message = "timeout", "it took too long"
        else:
            worker.send()
            return True
        worker.kill()
        if not worker.is_ready:
            # It was starting, or loading a servant, so none of its calls is to blame. Even an exception of
            # loading may have a passing cause, such as a file system that doesn't answer for a moment.
            failed_start = worker.unstarted[0]
            if failed_start in self._failed_starts:
                raise WorkerStartError(f"two worker processes in a row did not start: {message}")
            log.warning("a worker process did not start: %s; another one is tried", message)
            self._failed_starts.add(failed_start)
        elif worker.batch:
            call = worker.batch[0]
            if outcome == "timeout":
                message = call.overdue_message
            log.warning("%s on an answer to problem %s: %s", outcome, call.about, message)
            if outcome == "timeout" or call.number in self._calls_with_death:
                worker.batch.popleft()
                # `busy_since` may be later than `now`, since `receive` has set it.
                seconds = max(0.0, now - worker.busy_since)
                self._finish_call(call, self._make_lost_result(outcome, message, seconds))
            else:
                # A call at which a worker has died for the first time stays in the batch, and is tried once
                # more.
                self._calls_with_death.add(call.number)
        with self._lock:
            self._queue.extendleft(reversed(worker.batch))
        return False

    def _finish_call(self, call: ServantCall, result: Any) -> None:
        """Settles a call, and takes its seconds into the running mean, by which batches are sized."""
        self._mean_seconds += _WEIGHT_OF_NEWEST * (result.seconds - self._mean_seconds)
        self._settle(call, result)


def pickle_servant(servant: Servant, name: str) -> bytes:
    """Pickles a servant. Raises ValueError, with its `name`, if it can't be sent to a process."""
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
    """Starts a process that runs a module.

    Args:
        module: The name of the module, such as ``treetune.processes.worker``.
        memory_bytes: The most address space of the process; None for no limit.
        stdin: A file descriptor for the process's standard input, or `subprocess.PIPE`.
        stdout: The same for its standard output.

    Returns:
        The process, and the first message, which the caller must send to it.
    """
    # The worker imports the same treetune as this process, wherever that is. The other modules are looked for
    # in this process's `sys.path`, which may have changed since the start and is part of the first message.
    source = str(Path(treetune.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        # -P: a file in the working directory must not shadow a module of the worker's.
        # The worker asks the kernel to be killed when its parent dies, and then compares its parent's id with
        # the argument: if they differ, this process died before that.
        [sys.executable, "-P", "-m", module, str(os.getpid())],
        stdin=stdin,
        stdout=stdout,
        bufsize=0,
        # Each worker computes with a single thread, since several workers run at a time. Idle threads of
        # linear algebra libraries would also count against the limit of memory.
        env={
            **remove_secrets(),
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        },
        start_new_session=True,
    )
    setup = {
        "path": list(sys.path),
        "own_folders": folders.search_folders_and_names(),
        "memory_bytes": memory_bytes,
    }
    return process, setup


def describe_exit(code: int) -> str:
    """Says how a process with this exit code ended."""
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class WorkerProcess:
    """A process that answers one batch of calls at a time.

    The process loads a servant when it gets the first call of this servant. It is a fresh interpreter and not
    a fork: a fork of a process with threads, torch or CUDA is unsafe, and multiprocessing's spawn would
    import the run's main module again. It leads a session of its own, so that Ctrl-C does not reach it, and
    so that all that a servant starts is killed along with it. Only `describe_end` and `kill` wait for the
    process, for at most `ENDING_SECONDS`; the other methods never wait.
    """

    def __init__(self, servants: Mapping[int, bytes], memory_bytes: int | None) -> None:
        """Starts the process.

        Args:
            servants: The pickled servants (the objects that answer calls) by their numbers. More may be
                added later.
            memory_bytes: The most address space; None for no limit.
        """
        self._servants = servants
        self._sent_servants: set[int] = set()
        self.unstarted: deque[int | None] = deque([None])
        """What the process still has to start or load, in order: None for the process itself, and the numbers
        of servants that were sent to it."""
        self.started = set[int | None]()
        """What it has started or loaded since the pool has cleared this set."""
        self.load_failure: str | None = None
        """The exception with which it failed to load a servant, after which it ends."""
        self._process, setup = start_worker(
            "treetune.processes.worker", memory_bytes, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.requests = self._process.stdin.fileno()
        self.results = self._process.stdout.fileno()
        os.set_blocking(self.requests, False)
        os.set_blocking(self.results, False)
        self.batch: deque[ServantCall] = deque()
        """The calls that the process has not answered yet, in order; it works on the first of them."""
        self.busy_since = time.monotonic()
        """The time at which the process began what it is doing: its start, the loading of a servant, or a
        call. Each message of the process says when it ended one of these, and so began the next."""
        # `setup` is the first message to the worker.
        self._outbox = bytearray(pack_message(setup))
        """Bytes that the pipe has not taken yet."""
        self._inbox = bytearray()
        """Received bytes of a message that is not complete yet."""
        self.send()

    @property
    def is_ready(self) -> bool:
        """True unless it is starting or loading a servant."""
        return not self.unstarted

    @property
    def is_idle(self) -> bool:
        return self.is_ready and not self.batch

    @property
    def has_unsent_bytes(self) -> bool:
        return bool(self._outbox)

    def give(self, batch: list[ServantCall]) -> None:
        """Sends the worker a batch of calls, and first the servants that the worker doesn't have yet."""
        assert self.is_idle
        self.batch.extend(batch)
        self.busy_since = time.monotonic()
        for call in batch:
            if call.servant not in self._sent_servants:
                self._sent_servants.add(call.servant)
                self.unstarted.append(call.servant)
                self._outbox += pack_message((call.servant, self._servants[call.servant]))
        self._outbox += pack_message([(call.number, call.servant, call.arguments) for call in batch])
        self.send()

    def send(self) -> None:
        """Sends as much as the pipe takes now."""
        try:
            while self._outbox:
                n_written = os.write(self.requests, self._outbox)
                del self._outbox[:n_written]
        except BlockingIOError:
            return
        except BrokenPipeError:
            # The worker is dead, which `receive` will notice. `_wait_for_event` must not wait for this pipe
            # any more.
            self._outbox.clear()

    def receive(self) -> tuple[list[tuple[ServantCall, Any]], bool]:
        """Returns the results that have arrived, and whether the worker is alive. Sets `load_failure` if the
        worker could not load a servant."""
        is_alive = True
        try:
            while True:
                received = os.read(self.results, _READ_BYTES)
                if not received:  # the process has closed the pipe
                    is_alive = False
                    break
                self._inbox += received
        except BlockingIOError:
            pass
        results = []
        start = 0
        while len(self._inbox) - start >= MESSAGE_LENGTH.size:
            (length,) = MESSAGE_LENGTH.unpack_from(self._inbox, start)
            end = start + MESSAGE_LENGTH.size + length
            if len(self._inbox) < end:
                break
            kind, *content = pickle.loads(memoryview(self._inbox)[start + MESSAGE_LENGTH.size : end])
            start = end
            if kind == "failed":
                (self.load_failure,) = content
                is_alive = False  # it ends now
                break
            # Each message says when the worker ended what it was doing: its start, the loading of a servant,
            # or a call. The worker went on with its next work at once, so it is busy with that since then.
            ended_at, *content = content
            self.busy_since = ended_at
            if kind in ("ready", "loaded"):
                self.started.add(self.unstarted.popleft())
            else:
                number, result = content
                call = self.batch.popleft()
                assert call.number == number, "results come in the order of the batch"
                results.append((call, result))
        del self._inbox[:start]
        return results, is_alive

    def overdue_at(self) -> float | None:
        """Returns the time at which to kill this worker unless it sends something earlier. Returns None while
        the worker is idle."""
        if not self.is_ready:
            return self.busy_since + START_SECONDS
        return self.busy_since + self.batch[0].deadline_s if self.batch else None

    def describe_end(self) -> str:
        """Says how a worker whose pipe has closed came to its end."""
        try:
            return describe_exit(self._process.wait(timeout=ENDING_SECONDS))
        except subprocess.TimeoutExpired:
            return "closed its pipe"

    def kill(self) -> None:
        """Kills the process and all that it started, and reaps it. Safe to call twice.

        The kernel can't end a process that waits for a hung disk. Such a process is left behind.
        """
        with contextlib.suppress(ProcessLookupError):  # the whole group may be gone already
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(timeout=ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("a worker process (%d) did not end after it was killed", self._process.pid)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class CallClock:
    """Counts the seconds that a service call has until its deadline.

    A servant stops the clock while its call waits for its turn at something that answers one call after
    another, such as a tool server. So the seconds count only for the call that is being answered.
    """

    def __init__(self, seconds: float, changed: threading.Condition) -> None:
        self._remaining_s = seconds
        self._runs_since: float | None = time.monotonic()
        """The time at which the clock was last started; None while it is stopped."""
        self._paused_since = 0.0
        """The time at which the clock was last stopped."""
        self._paused_s = 0.0
        """The seconds of all pauses that have ended."""
        self._changed = changed
        """Notified when the clock is stopped or started, because the deadline moves."""

    @property
    def overdue_at(self) -> float:
        """The time of the deadline."""
        if self._runs_since is None:  # a stopped clock, too, must start again in time
            return self._paused_since + _LONGEST_PAUSE_S
        return self._runs_since + self._remaining_s

    @property
    def paused_s(self) -> float:
        """The seconds that the clock was stopped so far."""
        return self._paused_s

    def stop(self) -> None:
        """Stops the clock. Safe to call twice, and from any thread."""
        with self._changed:
            if self._runs_since is not None:
                now = time.monotonic()
                self._remaining_s -= now - self._runs_since
                self._runs_since, self._paused_since = None, now
                self._changed.notify_all()

    def start(self) -> None:
        """Starts the clock again. Safe to call twice, and from any thread."""
        with self._changed:
            if self._runs_since is None:
                now = time.monotonic()
                self._runs_since = now
                self._paused_s += now - self._paused_since
                self._changed.notify_all()


_call_of_thread = threading.local()


def call_clock() -> CallClock:
    """Returns the clock of the service call that this thread answers. If it answers none, returns a clock
    without a deadline, which has no effect."""
    clock: CallClock | None = getattr(_call_of_thread, "clock", None)
    return clock or CallClock(math.inf, threading.Condition())


class ServiceThreads:
    """Threads that call a servant which waits for something outside of this process, such as a judge.

    At most `concurrency` calls run at a time. A servant may stop a call's clock while the call waits for its
    turn (`call_clock`). A thread can't be stopped from outside: a call that is overdue gets the result
    ``unavailable``, and its thread is *stuck* until the call returns. A stuck thread doesn't count among the
    running ones, so another thread can take its place. Threads end with this process.

    Args:
        settle: Is called with each call and its result.
        make_lost_result: Makes the result of a call that is given up.
    """

    def __init__(
        self,
        servant: Servant,
        concurrency: int,
        settle: Callable[[ServantCall, Any], None],
        make_lost_result: MakeLostResult,
    ) -> None:
        self._servant = servant
        self._concurrency = concurrency
        """The most calls that run at a time."""
        self._settle = settle
        """Is called with each call and its result."""
        self._make_lost_result = make_lost_result
        """Makes the result of a call that is given up."""
        self._changed = threading.Condition()
        """Guards all that follows. Notified when a thread or the watcher may have something to do."""
        self._queue: deque[ServantCall] = deque()
        self._running: dict[int, tuple[ServantCall, CallClock]] = {}
        """The call of each running thread and its clock, by the thread's number."""
        self._idle_count = 0  # threads that wait for a call
        self._stuck_count = 0  # threads whose call was given up and has not returned yet
        self._started_count = 0  # all threads so far, which are numbered by it
        self._closed = False
        self._watcher: threading.Thread | None = None

    def add(self, call: ServantCall) -> None:
        """Queues a call, and starts the threads that it needs. Does not block."""
        with self._changed:
            self._queue.append(call)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="service calls", daemon=True)
                self._watcher.start()
            self._start_thread_if_needed()
            self._changed.notify_all()

    def close(self) -> None:
        """Ends idle threads and the watcher. Calls that run continue, and their results are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _start_thread_if_needed(self) -> None:
        """Starts a thread if more calls wait than threads are idle, and `concurrency` allows it. The caller
        holds the lock."""
        if self._are_too_many_stuck():
            return  # the watcher gives the waiting calls up
        needs_thread = len(self._queue) > self._idle_count
        thread_count = self._idle_count + len(self._running)  # without threads that are stuck
        if needs_thread and thread_count < self._concurrency:
            self._started_count += 1
            self._idle_count += 1
            number = self._started_count
            name = f"service call {number}"
            threading.Thread(target=self._work, args=(number,), name=name, daemon=True).start()

    def _are_too_many_stuck(self) -> bool:
        """Returns whether so many threads are stuck that no further call is made. The caller holds the
        lock."""
        return self._stuck_count >= _STUCK_PER_THREAD * self._concurrency

    def _work(self, number: int) -> None:
        """Makes the calls of the queue, one after the other, in the thread with this number."""
        while True:
            # The thread counts as idle here, and from its start on.
            with self._changed:
                # While too many are stuck, the watcher gives the waiting calls up.
                while not self._closed and (not self._queue or self._are_too_many_stuck()):
                    self._changed.wait()
                self._idle_count -= 1
                if self._closed:
                    return
                call = self._queue.popleft()
                # The servant may stop this clock of the call's deadline while it waits for something outside,
                # such as a tool server that answers other calls first.
                _call_of_thread.clock = CallClock(call.deadline_s, self._changed)
                self._running[number] = call, _call_of_thread.clock
                self._changed.notify_all()  # the watcher, since this deadline may be the earliest
            result = self._servant.answer(*call.arguments)
            with self._changed:
                if self._running.pop(number, None) is None:
                    # The watcher has given the call up. Another thread may have taken this one's place.
                    self._stuck_count -= 1
                    self._changed.notify_all()  # threads that wait because too many were stuck
                    return
                self._idle_count += 1
            if not self._closed:
                self._settle(call, result)

    def _watch(self) -> None:
        """Gives up calls at their deadlines, and all waiting calls while too many threads are stuck."""
        while not self._closed:
            given_up: list[tuple[ServantCall, str]] = []
            with self._changed:
                earliest = min((clock.overdue_at for _, clock in self._running.values()), default=math.inf)
                wait_s = None if earliest == math.inf else max(0.0, earliest - time.monotonic())
                self._changed.wait(wait_s)
                now = time.monotonic()
                for number, (call, clock) in list(self._running.items()):
                    if clock.overdue_at <= now:
                        del self._running[number]
                        self._stuck_count += 1
                        given_up.append((call, call.overdue_message))
                if self._are_too_many_stuck():
                    reason = f"not asked: {self._stuck_count} earlier calls have not returned"
                    given_up += [(call, reason) for call in self._queue]
                    self._queue.clear()
                self._start_thread_if_needed()  # in the place of one that is stuck
            # The lock is released here, since settling a call may run callbacks of its future.
            for call, reason in given_up:
                self._settle(call, self._make_lost_result("unavailable", reason, 0.0))
