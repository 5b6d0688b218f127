"""Runs as a worker process: reads batches of calls, such as answers to grade, and sends their results.

`WorkerProcess` starts it as ``python -m treetune.processes.worker``. Messages are pickles with their length
before them::

    from the parent                              to the parent
    {"path": …, "memory_bytes": …}   first       ("ready", time)
    (number, pickled servant)                    ("loaded", time), or ("failed", reason) and exit
    [(number, servant, arguments), …]            ("result", time, number, result), for each call at once

The times say when each call ended, so that the parent knows since when the next one has been running.
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

MESSAGE_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1


class Servant:
    """An object that answers calls: in a worker process, to which it is sent as a pickle, or in threads of
    this process."""

    def prepare(self) -> None:
        """Prepares the servant. Called once in each worker process, before any deadline begins."""

    def answer(self, *arguments: Any, **named: Any) -> Any:
        """Answers a call, and raises nothing. The result must have an attribute `seconds`, the time that the
        call took."""
        raise NotImplementedError

    def close(self) -> None:
        """Releases what the servant holds. When the pool is closed, this is called for servants in threads,
        and not for those in worker processes."""


def pack_message(message: object) -> bytes:
    """Packs a message for the pipe."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return MESSAGE_LENGTH.pack(len(body)) + body


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, however that happens (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)  # the parent died before the call above


def read_message(pipe: BinaryIO) -> Any:
    """Reads the next message; ends the process when the parent has closed the pipe."""
    packed_length = pipe.read(MESSAGE_LENGTH.size)
    if len(packed_length) < MESSAGE_LENGTH.size:
        sys.exit(0)
    (body_length,) = MESSAGE_LENGTH.unpack(packed_length)
    return pickle.loads(pipe.read(body_length))


def become_worker() -> tuple[BinaryIO, Callable[..., None]]:
    """Sets this process up by the parent's first message.

    Returns:
        The pipe of further messages, and a function that sends a message to the parent.
    """
    die_with_parent(int(sys.argv[1]))
    # The parent handles Ctrl-C, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM may send it to all processes of a job
    # The pipes move to other descriptors, so that a grader can't write into them: standard input becomes
    # empty, and standard output goes to standard error.
    requests = os.fdopen(os.dup(0), "rb")
    results = os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)

    def send(*message: Any) -> None:
        unsent = pack_message(message)
        while unsent:
            n_written = os.write(results, unsent)
            unsent = unsent[n_written:]

    setup = read_message(requests)
    sys.path[:] = setup["path"]
    # The user's modules are looked for in the same folders as in the parent.
    folders.set_search_folders(*setup["own_folders"])
    if (memory := setup["memory_bytes"]) is not None:
        # A process may lower its hard limit, but not raise it.
        hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = memory if hard_limit == resource.RLIM_INFINITY else min(memory, hard_limit)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return requests, send


def load_servant(pickled: bytes, send: Callable[..., None]) -> Any:
    """Unpickles and prepares a servant, which then answers the calls that the parent sends.

    If that fails, sends the reason to the parent, and exits.
    """
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
    """Answers calls until the parent closes the pipe."""
    requests, send = become_worker()
    send("ready", time.monotonic())
    # A servant does the work of a call, such as grading. The parent sends it once, with a number by which
    # later calls name it.
    servants: dict[int, Servant] = {}
    while True:
        message = read_message(requests)
        if isinstance(message, list):  # a batch of calls; any other message is a servant with its number
            for call_number, servant_number, arguments in message:
                result = servants[servant_number].answer(*arguments)
                send("result", time.monotonic(), call_number, result)
            continue
        servant_number, pickled = message
        servants[servant_number] = load_servant(pickled, send)
        send("loaded", time.monotonic())


if __name__ == "__main__":
    main()
