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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from treetune.exceptions import Stopped

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
class ProcessIdentity:
    """A process id alone may be used again; with its start time it is one process for ever.

    `started` is in ticks since the machine started, as the kernel has it: psutil's seconds since 1970 depend
    on a clock that may be set, and files have this.
    """

    pid: int
    started: str

    @staticmethod
    def of(pid: int) -> ProcessIdentity | None:
        fields = process_fields(pid)
        return ProcessIdentity(pid, fields[19]) if fields else None

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


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a process. SIGHUP comes when a terminal is closed."""

CHECKPOINT = signal.SIGUSR1
"""Asks for an end at the next boundary, however far that is: SLURM's ``--signal=USR1@300`` sends it."""

OTHERS_GRACE_S = 20.0
"""DeepSpeed's own command kills its ranks 30 s after the signal: a checkpoint has to be written by then."""

ECHO_WITHIN_S = 1.0
"""A SIGTERM to all processes of a run comes to a rank again, from its launcher, within this time."""


class GracefulStop:
    """An end that waits for the next boundary: the point of a loop from where nothing has to be done again.

    The loop says with `begin` what an end at once would lose, looks at `asked_by` at its boundaries, and ends
    there. A signal of ENDING ends the process at once all the same where no finished iteration would be lost,
    where the boundary is further away than `grace_s`, and when it is the second one. CHECKPOINT always waits.
    """

    def __init__(self, grace_s: float, say: Callable[[str], None] = lambda message: None) -> None:
        self._own_grace_s = grace_s
        self._say = say
        self.asked_by: int | None = None
        """The signal that asks for the end; None: none has come."""
        self._asked_at = 0.0
        self._boundary = ""
        self._would_lose: str | None = None
        self._expected_end: float | None = None
        self._may_interrupt = False

    @property
    def grace_s(self) -> float:
        """Most seconds until the boundary: fewer where a launcher that nobody holds back kills its ranks."""
        if not launcher_processes():
            return self._own_grace_s
        started_by = os.environ.get(STARTED_BY)
        if started_by is not None and psutil.pid_exists(int(started_by)):
            return self._own_grace_s
        return min(self._own_grace_s, OTHERS_GRACE_S)

    def begin(self, boundary: str, would_lose: str | None, expected_s: float | None) -> None:
        """Says what comes next: the name of the next `boundary` ("the end of iteration 11"), what of the work
        before now an end at once `would_lose` (None: nothing), and how long it takes, where that is known."""
        self._boundary, self._would_lose = boundary, would_lose
        self._expected_end = None if expected_s is None else time.monotonic() + expected_s

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within the block, a signal raises Stopped at once: the caller catches it to write a checkpoint."""
        self._may_interrupt = True
        try:
            if self.asked_by is not None:
                raise Stopped(128 + self.asked_by)
            yield
        finally:
            self._may_interrupt = False

    def take_signal(self, number: int) -> bool:
        """Decides on a signal: returns True where it ends the process now. Otherwise asks the loop to end at
        its next boundary, starts the grace, says so, and returns False."""
        if self._may_interrupt:
            return True
        if self.asked_by in ENDING and number in ENDING:
            return not self._is_echo(number)
        if number in ENDING and self.asked_by is None:
            if self._would_lose is None:
                return True
            left = None if self._expected_end is None else self._expected_end - time.monotonic()
            if left is not None and left > self.grace_s:
                self._say(
                    f"{_name(number)}: {self._boundary} is about {left:.0f} s away, and"
                    f" checkpoints.grace is {self.grace_s:.0f} s: stopping now; {self._would_lose}"
                )
                return True
        if self.asked_by is None or number in ENDING:
            self._ask(number)
        return False

    def _ask(self, number: int) -> None:
        self.asked_by, self._asked_at = number, time.monotonic()
        within = ""
        if number in ENDING:
            signal.setitimer(signal.ITIMER_REAL, self.grace_s)
            within = f", within {self.grace_s:.0f} s"
        about = ""
        if self._expected_end is not None:
            about = f" (in about {max(0.0, self._expected_end - time.monotonic()):.0f} s)"
        once_more = (
            "" if self._would_lose is None else f"; once more ends at once, and then {self._would_lose}"
        )
        self._say(
            f"{_name(number)}: stopping with a checkpoint at {self._boundary}{about}{within}{once_more}"
        )

    def reach_boundary(self) -> None:
        """Ends the grace: writing a checkpoint, which follows, has no deadline of its own. DeepSpeed's
        launcher still kills its ranks 30 s after the signal (OTHERS_GRACE_S)."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def end_grace(self) -> int:
        """Ends the wait for a boundary that didn't come in time: says so, and returns the signal that asked
        for the end."""
        assert self.asked_by is not None, "the timer is started when a signal comes"
        lost = "" if self._would_lose is None else f"; {self._would_lose}"
        self._say(f"{self._boundary} didn't come within {self.grace_s:.0f} s: stopping now{lost}")
        return self.asked_by

    def _is_echo(self, number: int) -> bool:
        """Returns whether the launcher repeats to this rank what it got itself."""
        if number != signal.SIGTERM or not launcher_processes():
            return False
        if self.asked_by != signal.SIGTERM:
            return STARTED_BY not in os.environ  # DeepSpeed's command answers Ctrl-C with it
        return time.monotonic() - self._asked_at < ECHO_WITHIN_S


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


_graceful: list[GracefulStop] = []
"""The stop of the loop that is at work in this process, if one is."""


@contextlib.contextmanager
def stopping_gracefully(stop: GracefulStop) -> Iterator[GracefulStop]:
    """Has signals ask for the end that `stop` describes, as long as the block runs."""
    _graceful.append(stop)
    try:
        yield stop
    finally:
        _graceful.remove(stop)
        signal.setitimer(signal.ITIMER_REAL, 0)


def exit_on_signals() -> None:
    """Signals unwind the stack, once; a second one of the same kind ends the process at once.

    The other kinds are then ignored: DeepSpeed's launcher answers Ctrl-C, which the terminal sends to all,
    with a SIGTERM to ranks that are on their way out already. A rank ignores its launcher's second SIGTERM
    for the same reason. Within `stopping_gracefully`, signals first ask for an end at the next boundary.
    """
    stopped_by: int | None = None

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal stopped_by
        if stopped_by is None:
            if _graceful:
                if number == signal.SIGALRM:
                    number = _graceful[-1].end_grace()
                elif not _graceful[-1].take_signal(number):
                    return
            if number == signal.SIGALRM:  # of a stop that is over by now
                return
            stopped_by = number
            raise Stopped(128 + number)
        if number == stopped_by and number != CHECKPOINT and not launcher_processes():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (*ENDING, CHECKPOINT, signal.SIGALRM):
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # `nohup`: the run outlives its terminal
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

    def set_up_child() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(CHECKPOINT, signal.SIG_IGN)  # SLURM may send it to all processes of a job

    process = subprocess.Popen(
        command,
        env=environment | {"PATH": path} | dict(settings),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=set_up_child,
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
