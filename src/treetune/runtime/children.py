"""Processes that end with the block that started them, whole, and with this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from treetune.runtime.lifeline import PR_SET_PDEATHSIG, process_fields

POLL_S, END_POLL_S = 0.5, 0.1
GRACE_S = 30.0
"""How long a process may take to end after the signal, before it is ended the hard way."""


@contextlib.contextmanager
def started(words: Sequence[str], settings: Mapping[str, str], log: Any) -> Iterator[subprocess.Popen[bytes]]:
    """In a process group of its own, which ends with this block, and with this process."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = {k: v for k, v in os.environ.items() if k != "APP_EXPERIMENT_NAME"}
    libc = ctypes.CDLL(None, use_errno=True)  # loaded here: the child must not between fork and exec
    process = subprocess.Popen(
        words,
        env=environment | {"PATH": path} | dict(settings),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
    )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> None:
    """Ends the whole group: kindly, upon which most end by themselves, and what stays not."""
    group, deadline = process.pid, time.monotonic() + grace_s
    if process.poll() is None:
        _signal([group], signal.SIGTERM)
    while (members := _members(group)) and time.monotonic() < deadline:
        process.poll()
        time.sleep(END_POLL_S)
    _signal(members, signal.SIGKILL)
    process.wait(GRACE_S)


def wait_a_moment(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit code, if it ends within a moment."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(POLL_S)
    return None


def _members(group: int) -> list[int]:
    """Living processes of a group. (Those that nobody has waited for yet do not count.)"""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            fields = process_fields(int(folder.name))
            if fields and fields[0] not in ("Z", "X") and int(fields[2]) == group:
                found.append(int(folder.name))
    return found


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
