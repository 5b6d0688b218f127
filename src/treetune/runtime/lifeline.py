"""A run ends whole: when any process above this one is gone, this one goes too.

The launcher is two processes (the `deepspeed` command and its per-node launcher). Linux tells a
child only of its direct parent's death, and a killed command leaves the launcher and the ranks
training for nobody, so each rank watches all of its ancestors.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
POLL_S = 0.5
GRACE_S = 20.0
"""How long an orphan may take to close its server and leave before it is ended the hard way."""


@dataclass(frozen=True)
class Process:
    """A process id alone may be used again; with its start time it is one process for ever."""

    pid: int
    started: str

    @staticmethod
    def of(pid: int) -> Process | None:
        fields = process_fields(pid)
        return Process(pid, fields[19]) if fields else None

    def alive(self) -> bool:
        fields = process_fields(self.pid)
        return bool(fields) and fields[19] == self.started and fields[0] not in ("Z", "X")


def process_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third (state) on; empty where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def launcher_processes() -> list[Process]:
    """The ancestors of this process that belong to its launcher, nearest first."""
    found: list[Process] = []
    pid = os.getppid()
    while pid > 1:
        fields = process_fields(pid)
        if not fields or "deepspeed" not in _command(pid):
            break
        found.append(Process(pid, fields[19]))
        pid = int(fields[1])
    return found


def _is_left_behind(launcher: list[Process]) -> bool:
    """Whether the launcher, or its upper half, was gone before this process could see it.

    DeepSpeed's per-node launcher says in the environment that it started this process; on one machine it has
    a parent itself, the `deepspeed` command. Whoever lost its parent is init's child.
    """
    if "CROSS_SIZE" not in os.environ or "deepspeed" in _command(1):
        return False
    if not launcher:
        return os.getppid() == 1
    outermost = launcher[-1].pid
    fields = process_fields(outermost)
    if (started_by := os.environ.get(STARTED_BY)) is not None:  # `treetune run`, which may be init itself
        return not fields or fields[1] != started_by
    halved = os.environ["CROSS_SIZE"] == "1" and "deepspeed.launcher.launch" in _command(outermost)
    return not fields or (halved and fields[1] == "1")


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def end_with_launcher() -> None:
    """From here on, this process ends when its launcher does, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    launcher = launcher_processes()
    if _is_left_behind(launcher):
        raise Stopped(TERMINATED)
    if not launcher:
        return

    def watch() -> None:
        while all(process.alive() for process in launcher):
            time.sleep(POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


STARTED_BY = "TREETUNE_STARTED_BY"
"""The process that started the node launcher, where that wasn't DeepSpeed's command."""

TERMINATED = 128 + signal.SIGTERM
"""The exit code of a process that SIGTERM ended."""


class Stopped(SystemExit):
    """SIGTERM or Ctrl-C as an exception, so that every `finally` on the way out runs."""


def exit_on_signals() -> None:
    """SIGTERM and Ctrl-C unwind the stack, once; a second signal of the same kind ends at once.

    The other kind is then ignored: DeepSpeed's launcher answers Ctrl-C, which the terminal sends to all,
    with a SIGTERM to ranks that are on their way out already.
    """
    stopped_by: int | None = None

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal stopped_by
        if stopped_by is None:
            stopped_by = number
            raise Stopped(128 + number)
        if number == stopped_by:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)
