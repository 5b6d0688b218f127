"""The parent's side of one worker process: start it, talk to it without ever waiting, kill it."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import treetune
from treetune.config import folders
from treetune.inherited import without_secrets
from treetune.tasks.graders.worker import LENGTH, frame

START_SECONDS = 120.0
"""How long a worker may take to import its grader. Symbolic algebra on a busy disk takes a while."""

_ENDING_SECONDS = 10.0
"""How long the kernel may take to end a process that was killed or has closed its pipes."""

_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Work:
    """Something to do within `deadline` seconds, such as an answer to grade.

    `number` is its name between parent and worker, `servant` that of what does it, with `arguments`. `about`
    is what it is called in a log. `worker` is the place of the one worker that may do it; None: any may.
    `pieces` are how many things have the deadline together, of which a message names the part of one.
    """

    number: int
    servant: int
    arguments: tuple[Any, ...]
    deadline: float
    about: str = ""
    worker: int | None = None
    pieces: int = 1

    @property
    def too_long(self) -> str:
        """What is said of work that did not end in time."""
        return f"no result within {self.deadline / self.pieces:g} s"


class WorkerStartError(RuntimeError):
    """A worker process did not come up: its servant cannot be unpickled or imported there."""


class WorkerProcess:
    """A process that does one batch of work at a time; `batch` is what it has not answered yet. It loads a
    servant when it is first given work for it.

    It is a fresh interpreter, not a fork: forking a process with threads, torch or CUDA in it is
    unsafe, and multiprocessing's spawn would import the run's main module again. It leads a
    session of its own, so that Ctrl-C does not reach it and that whatever a servant starts is
    killed along with it.
    """

    def __init__(self, servants: Mapping[int, bytes], memory_bytes: int | None) -> None:
        """`servants` are pickled, by their numbers, and may grow; `memory_bytes` limits the address space."""
        source = str(Path(treetune.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        setup = {
            "path": list(sys.path),
            "own_folders": folders.searched(),
            "memory_bytes": memory_bytes,
        }
        self._servants = servants
        self._known: set[int] = set()
        self._loading = 0
        self._process = subprocess.Popen(
            # -P: a file in the working directory must not shadow a module of the worker's.
            [sys.executable, "-P", "-m", "treetune.tasks.graders.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
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
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.requests = self._process.stdin.fileno()
        self.results = self._process.stdout.fileno()
        os.set_blocking(self.requests, False)
        os.set_blocking(self.results, False)
        self.pid = self._process.pid
        self._up = False
        self.batch: deque[Work] = deque()
        self.since = time.monotonic()
        """When the start, the loading of a servant, or the work that is being done, began."""
        self._outbox = bytearray(frame(setup))
        self._inbox = bytearray()
        self.send()

    @property
    def ready(self) -> bool:
        """Whether what it does now, if anything, is work."""
        return self._up and not self._loading

    @property
    def idle(self) -> bool:
        return self.ready and not self.batch

    @property
    def sending(self) -> bool:
        return bool(self._outbox)

    def give(self, batch: list[Work]) -> None:
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

    def receive(self) -> tuple[list[tuple[Work, Any]], bool]:
        """All results that have come, and whether the worker is still there.

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
        for message in self._messages():
            if message[0] == "failed":
                raise WorkerStartError(f"a worker process cannot load what it works with: {message[1]}")
            self.since = message[1]
            if message[0] == "ready":
                self._up = True
                continue
            if message[0] == "loaded":
                self._loading -= 1
                continue
            work = self.batch.popleft()
            assert work.number == message[2], "results come in the order of the batch"
            results.append((work, message[3]))
        return results, alive

    def _messages(self) -> list[Any]:
        messages = []
        start = 0
        while len(self._inbox) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._inbox, start)
            end = start + LENGTH.size + length
            if len(self._inbox) < end:
                break
            messages.append(pickle.loads(memoryview(self._inbox)[start + LENGTH.size : end]))
            start = end
        del self._inbox[:start]
        return messages

    def overdue_at(self) -> float | None:
        """The time at which this worker has to be killed, unless it says something before."""
        if not self.ready:
            return self.since + START_SECONDS
        return self.since + self.batch[0].deadline if self.batch else None

    def ending(self) -> str:
        """How a worker whose pipe has closed came to its end."""
        try:
            code = self._process.wait(timeout=_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """Kills the process and what it started, and reaps it. Safe to call twice."""
        with contextlib.suppress(ProcessLookupError):  # when the whole group is gone already
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(timeout=_ENDING_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
