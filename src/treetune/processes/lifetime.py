"""Processes that end together: a rank with its launcher, a child with whoever started it.

A run ends whole: when any process above this one is gone, this one goes too. The launcher is two processes
(the `deepspeed` command and its per-node launcher). Linux tells a child only of its direct parent's death,
and a killed command leaves the launcher and the ranks training for nobody, so each rank watches all of its
ancestors.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

PR_SET_PDEATHSIG = 1
STARTED_BY = "TREETUNE_STARTED_BY"
"""The process that started the node launcher, where that wasn't DeepSpeed's command."""

TERMINATED = 128 + signal.SIGTERM
"""The exit code of a process that SIGTERM ended."""

POLL_S, END_POLL_S = 0.5, 0.1
ORPHAN_GRACE_S = 20.0
"""How long an orphan may take to close its server and leave before it is ended the hard way."""

GRACE_S = 30.0
"""How long a process may take to end after the signal, before it is ended the hard way."""


@dataclass(frozen=True)
class Process:
    """A process id alone may be used again; with its start time it is one process for ever.

    `started` is in ticks since the machine started, as the kernel has it: psutil's seconds since 1970 depend
    on a clock that may be set, and files have this.
    """

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
    """Returns the fields of /proc/PID/stat from the third (state) on; none where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def launcher_processes() -> list[psutil.Process]:
    """Returns the ancestors of this process that belong to its launcher, nearest first."""
    launcher: list[psutil.Process] = []
    # An ancestor may be gone, or hidden from this user (a mount of /proc with hidepid).
    with contextlib.suppress(psutil.Error):
        process = psutil.Process().parent()
        while process is not None and process.pid > 1 and "deepspeed" in _command(process.pid):
            launcher.append(process)
            process = process.parent()
    return launcher


def _command(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def end_with_launcher() -> None:
    """Has this process end when its launcher does, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    launcher = launcher_processes()
    if _is_left_behind(launcher):
        raise Stopped(TERMINATED)
    if not launcher:
        return

    def watch() -> None:
        while all(map(is_alive, launcher)):
            time.sleep(POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="launcher watch", daemon=True).start()


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def _is_left_behind(launcher: list[psutil.Process]) -> bool:
    """Returns whether the launcher, or its upper half, was gone before this process could see it.

    DeepSpeed's per-node launcher says in the environment that it started this process; on one machine it has
    a parent itself, the `deepspeed` command. Whoever lost its parent is init's child.
    """
    if "CROSS_SIZE" not in os.environ or "deepspeed" in _command(1):
        return False
    if not launcher:
        return os.getppid() == 1
    outermost = launcher[-1]
    try:
        parent = outermost.ppid()
    except psutil.Error:
        return True
    if (started_by := os.environ.get(STARTED_BY)) is not None:  # `treetune run`, which may be init itself
        return str(parent) != started_by
    halved = os.environ["CROSS_SIZE"] == "1" and "deepspeed.launcher.launch" in _command(outermost.pid)
    return halved and parent == 1


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


# Children, each with a process group of its own


@contextlib.contextmanager
def started(
    command: Sequence[str], settings: Mapping[str, str], log: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a process group, which ends with this block, whole, and with this process."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = {k: v for k, v in os.environ.items() if k != "APP_EXPERIMENT_NAME"}
    libc = ctypes.CDLL(None, use_errno=True)  # loaded here: the child must not between fork and exec
    process = subprocess.Popen(
        command,
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
    """Ends the whole group: kindly, upon which most end by themselves, and after `grace_s` by force."""
    deadline = time.monotonic() + grace_s
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    while (members := _members(process.pid)) and time.monotonic() < deadline:
        process.poll()
        time.sleep(END_POLL_S)
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(GRACE_S)


def _members(group: int) -> list[psutil.Process]:
    """Returns the living processes of a group. (Those that nobody has waited for yet do not count.)"""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and is_alive(process):
                members.append(process)
    return members
