"""The child side of a worker process: reads batches of work, such as answers to grade, and does it in order.

Run as ``python -m treetune.tasks.graders.worker`` by `WorkerProcess`, never by hand. Messages are
pickles with a length before them. The first one sets the process up; each later one is a servant with the
number that work names it by, or a batch of work. Every result is sent as soon as it is there, stamped
with the time of its end, so that the parent knows what is being done and since when.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
import struct
import sys
import time
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Protocol

from treetune.config import folders
from treetune.tasks.graders.base import Grader, Unavailable
from treetune.tasks.graders.service import Service
from treetune.vocabulary import Grade, GradeOutcome, Problem

LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1


class Servant(Protocol):
    """What a worker process does work with. It is pickled; `answer` raises nothing."""

    def prepare(self) -> None:
        """Called once in each worker process, before deadlines begin."""

    def answer(self, *arguments: Any) -> Any: ...


@dataclass(frozen=True)
class Grading:
    """Grades answers: the servant of a grader."""

    grader: Grader

    def prepare(self) -> None:
        self.grader.prepare()

    def answer(self, response: str, problem: Problem) -> Grade:
        return graded(self.grader, response, problem)


def frame(message: object) -> bytes:
    """A message as it goes over the pipe."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


def graded(grader: Grader | Service, response: str, problem: Problem) -> Grade:
    """The grader's verdict with the seconds that it took; what it raises is the outcome ``error``."""
    start = time.perf_counter()
    outcome: GradeOutcome = "error"
    try:
        return replace(grader.grade(response, problem), seconds=time.perf_counter() - start)
    except Unavailable as error:
        outcome, message = "unavailable", str(error)
    except (Exception, SystemExit) as error:
        # Whatever an answer makes a grader raise is recorded with that answer, and ends no run.
        name = type(error).__name__
        message = f"{name}: {error}" if str(error) else name
        if not isinstance(grader, Grader) and isinstance(error, OSError):
            outcome = "unavailable"  # of a service: broken connections are among these
    return Grade(reward=0.0, outcome=outcome, seconds=time.perf_counter() - start, message=message)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, however that happens (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)  # it died before the kernel was asked


def _read(pipe: BinaryIO) -> Any:
    """The next message; ends the process when the parent has closed the pipe."""
    header = pipe.read(LENGTH.size)
    if len(header) < LENGTH.size:
        sys.exit(0)
    return pickle.loads(pipe.read(LENGTH.unpack(header)[0]))


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def main() -> None:
    die_with(int(sys.argv[1]))
    # Ctrl-C in the terminal is the parent's to handle, who ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The pipes move to descriptors of their own: what a grader prints goes to the error stream.
    requests = os.fdopen(os.dup(0), "rb")
    results = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)

    setup = _read(requests)
    sys.path[:] = setup["path"]
    folders.search_in(*setup["own_folders"])
    if setup["memory_bytes"] is not None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        allowed = (
            setup["memory_bytes"] if hard == resource.RLIM_INFINITY else min(setup["memory_bytes"], hard)
        )
        resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))  # a limit can't be raised, only lowered
    _write_all(results, frame(("ready", time.monotonic())))
    servants: dict[int, Servant] = {}
    while True:
        message = _read(requests)
        if isinstance(message, tuple):
            number, pickled = message
            servants[number] = _loaded(pickled, results)
            _write_all(results, frame(("loaded", time.monotonic())))
            continue
        for number, servant, arguments in message:
            result = servants[servant].answer(*arguments)
            _write_all(results, frame(("result", time.monotonic(), number, result)))


def _loaded(pickled: bytes, results: int) -> Servant:
    try:
        servant: Servant = pickle.loads(pickled)
        servant.prepare()
    except Exception as error:
        # Reported to the parent, which tells the user; there is nothing to work with.
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, MemoryError):
            limit = resource.getrlimit(resource.RLIMIT_AS)[0]
            what += f" (the process may have {limit / 2**30:.1f} GiB of address space: raise `ulimit -v`)"
        _write_all(results, frame(("failed", what)))
        sys.exit(1)
    return servant


if __name__ == "__main__":
    main()
