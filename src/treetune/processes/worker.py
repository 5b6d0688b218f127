"""The child side of a worker process: reads batches of calls, such as answers to grade, and makes them.

Run as ``python -m treetune.processes.worker`` by `WorkerProcess`, never by hand. Messages are pickles with a
length before them. The first one sets the process up; each later one is a servant with the number that calls
name it by, or a batch of calls. Every result is sent as soon as it is there, stamped with the time of its
end, so that the parent knows what is being done and since when.
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
from collections.abc import Callable
from typing import Any, BinaryIO

from treetune.config import folders

LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1


class Servant:
    """Answers calls in a worker process, for which it is pickled, or in threads of this one.

    `answer` raises nothing, and its results have the `seconds` that they took.
    """

    def prepare(self) -> None:
        """Called once in each worker process, before deadlines begin."""

    def answer(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        """Called when the pool is closed, of a servant in threads."""


def frame(message: object) -> bytes:
    """Packs a message for the pipe."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, however that happens (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)  # it died before the kernel was asked


def read(pipe: BinaryIO) -> Any:
    """Reads the next message; ends the process when the parent has closed the pipe."""
    header = pipe.read(LENGTH.size)
    if len(header) < LENGTH.size:
        sys.exit(0)
    return pickle.loads(pipe.read(LENGTH.unpack(header)[0]))


def become_worker() -> tuple[BinaryIO, Callable[..., None]]:
    """Makes of this process a worker as its parent's first message says. Returns the pipe of further
    messages, and a function that sends some back."""
    die_with_parent(int(sys.argv[1]))
    # Ctrl-C in the terminal is the parent's to handle, who ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM may send it to all processes of a job
    # The pipes move to descriptors of their own: what a grader prints goes to the error stream.
    requests = os.fdopen(os.dup(0), "rb")
    results = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)

    def send(*message: Any) -> None:
        data = frame(message)
        while data:
            data = data[os.write(results, data) :]

    setup = read(requests)
    sys.path[:] = setup["path"]
    folders.search_in(*setup["own_folders"])
    if (memory := setup["memory_bytes"]) is not None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        allowed = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))  # a limit can't be raised, only lowered
    return requests, send


def load(pickled: bytes, send: Callable[..., None]) -> Any:
    """Returns a servant that is ready to answer. Where it can't be loaded, the parent is told, who tells the
    user: there is nothing to work with."""
    try:
        servant = pickle.loads(pickled)
        servant.prepare()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, MemoryError):
            limit = resource.getrlimit(resource.RLIMIT_AS)[0] / 2**30
            reason += f" (the process may have {limit:.1f} GiB of address space: raise `ulimit -v`)"
        send("failed", reason)
        sys.exit(1)
    return servant


def main() -> None:
    requests, send = become_worker()
    send("ready", time.monotonic())
    servants: dict[int, Servant] = {}
    while True:
        message = read(requests)
        if isinstance(message, list):
            for number, servant, arguments in message:
                result = servants[servant].answer(*arguments)
                send("result", time.monotonic(), number, result)
            continue
        number, pickled = message
        servants[number] = load(pickled, send)
        send("loaded", time.monotonic())


if __name__ == "__main__":
    main()
