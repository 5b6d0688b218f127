"""Ends processes together: a rank with its launcher, a child with its parent; and ends a run gracefully.

A launcher consists of two processes, the `deepspeed` command and its per-node launcher::

    deepspeed (or `treetune run`)
      └─ deepspeed.launcher.launch
           ├─ rank 0        watches both processes above it (`end_with_launcher`)
           │    └─ server   gets a signal when rank 0 dies (PDEATHSIG)
           └─ rank 1

Linux notifies a process only of its direct parent's death. If the topmost process is killed, the others would
continue training, so each rank checks all of its ancestors.
"""

from __future__ import annotations

import atexit
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
STARTED_BY_VARIABLE = "TREETUNE_STARTED_BY"
"""The environment variable with the process id of the `treetune run` that started the node launcher. It is
not set if DeepSpeed's own command started the launcher."""

EXIT_CODE_OF_SIGTERM = 128 + signal.SIGTERM
"""The exit code of a process that SIGTERM ended."""

POLL_S, END_POLL_S = 0.5, 0.1
"""The seconds between two looks at the launcher, and at a group of processes that is being ended."""

STATE_FIELD, START_TIME_FIELD = 0, 19
"""The indices of two fields in `process_fields`, which begin with the third field of /proc/PID/stat."""

ORPHAN_GRACE_S = 20.0
"""The longest that a rank without its launcher may take to close its server and exit, before it is killed."""

END_GRACE_S = 30.0
"""The longest that a process may take to end after SIGTERM, before it is killed."""


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process for ever: process ids are used again, but not with the same start time.

    Example: ``ProcessIdentity(pid=4711, started="8123456")``.
    """

    pid: int
    started: str
    """The process's start time in ticks since the machine started, as the kernel gives it. It doesn't depend
    on a clock that may be set; psutil's start time, in seconds since 1970, does."""

    @staticmethod
    def of(pid: int) -> ProcessIdentity | None:
        """Returns the identity of the process that has this id now; None if there is none."""
        fields = process_fields(pid)
        return ProcessIdentity(pid, fields[START_TIME_FIELD]) if fields else None

    def is_alive(self) -> bool:
        """Returns whether this process still runs. Zombies (Z) and dead processes (X) don't."""
        fields = process_fields(self.pid)
        return (
            bool(fields)
            and fields[START_TIME_FIELD] == self.started
            and fields[STATE_FIELD] not in ("Z", "X")
        )


def process_fields(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the third (state) on; none if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The second field is the program's name in parentheses, which may contain spaces and parentheses itself.
    return text.rpartition(")")[2].split()


def launcher_processes() -> list[psutil.Process]:
    """Returns the ancestors of this process that belong to its launcher, nearest first."""
    launcher: list[psutil.Process] = []
    # Process 1 is left out. If it is the launcher in a container, the kernel ends the container with it.
    # psutil fails if an ancestor is gone, or hidden from this user (/proc mounted with hidepid).
    with contextlib.suppress(psutil.Error):
        process = psutil.Process().parent()
        while process is not None and process.pid > 1 and "deepspeed" in _command_line_of(process.pid):
            launcher.append(process)
            process = process.parent()
    return launcher


def _command_line_of(pid: int) -> str:
    """Returns the command line of a process; empty if it can't be read."""
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def end_with_launcher() -> None:
    """Ends this process when any process of its launcher ends, whatever the reason.

    Raises:
        Stopped: A process of the launcher is gone already.
    """
    # The parent is the per-node launcher, and the `deepspeed` command may be its parent. The kernel sends
    # SIGTERM when the parent dies. The thread below also notices the end of the command.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    launcher = launcher_processes()
    if _is_orphan(launcher):  # a process of the launcher died before the calls above
        raise Stopped(EXIT_CODE_OF_SIGTERM)
    if not launcher:
        return

    def watch() -> None:
        """Ends this process when a process of the launcher has ended."""
        while all(map(is_alive, launcher)):
            time.sleep(POLL_S)
        # SIGTERM lets the main thread close its server and exit. If the main thread hangs, this thread ends
        # the process, and the server is not closed.
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="launcher watch", daemon=True).start()


def is_alive(process: psutil.Process) -> bool:
    """Returns whether a process runs. A zombie, which has ended and is not reaped yet, doesn't."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def _is_orphan(launcher: list[psutil.Process]) -> bool:
    """Returns whether a process of the launcher was gone before this process could find it.

    A process whose parent is gone becomes a child of init (process 1).

    Args:
        launcher: The processes of the launcher that exist, nearest first.
    """
    # DeepSpeed's per-node launcher sets CROSS_SIZE, the number of machines. Without it, this process has no
    # launcher.
    if "CROSS_SIZE" not in os.environ:
        return False
    # In a container the launcher may itself be process 1. A parent with the number 1 is then no sign that a
    # process is gone.
    if "deepspeed" in _command_line_of(1):
        return False
    if not launcher:
        return os.getppid() == 1
    topmost = launcher[-1]
    try:
        parent = topmost.ppid()
    except psutil.Error:  # the topmost process has ended meanwhile
        return True
    started_by = os.environ.get(STARTED_BY_VARIABLE)
    if started_by is not None:
        # `treetune run` started the launcher, and STARTED_BY_VARIABLE is the process id of `treetune run`.
        # This id may itself be 1, so the parent is compared with the id.
        return str(parent) != started_by
    # On a single machine, the `deepspeed` command starts the per-node launcher. If the command is gone, the
    # per-node launcher is the topmost process, and its parent is init.
    on_single_machine = os.environ["CROSS_SIZE"] == "1"
    topmost_is_per_node = "deepspeed.launcher.launch" in _command_line_of(topmost.pid)
    return on_single_machine and topmost_is_per_node and parent == 1


ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that end a process. SIGHUP comes when a terminal is closed."""

CHECKPOINT_SIGNAL = signal.SIGUSR1
"""The signal that asks for an end at the next boundary, however far away: SLURM's ``--signal=USR1@300``."""

DEEPSPEED_GRACE_S = 20.0
"""The longest grace under DeepSpeed's own command, which kills its ranks 30 s after the signal. The
checkpoint must be written by then."""

ECHO_WITHIN_S = 1.0
"""A SIGTERM to all processes of a run arrives at a rank twice: directly, and within this time from its
launcher, which passes it on."""


RAISED_AGAIN_AFTER_S = 0.01
"""The time after which a Stopped that Python has ignored is raised once more."""


class GracefulStop:
    """Lets a signal end a loop at its next boundary, a point at which nothing is lost.

    The loop says with `begin` which boundary comes next and what an end before it would lose, looks at
    `asked_by` at each boundary, and ends there if it is set.

    A signal of ENDING_SIGNALS ends the process at once nevertheless, if no finished iteration would be lost,
    if the boundary is further away than `grace_s`, or if it is the second signal. CHECKPOINT_SIGNAL always
    waits.

    Args:
        grace_s: The longest wait for the boundary after a signal of ENDING_SIGNALS, in seconds (see the
            property `grace_s`).
        say: Shows a message to the user.
    """

    def __init__(self, grace_s: float, say: Callable[[str], None] = lambda message: None) -> None:
        self._configured_grace_s = grace_s
        self._say = say
        self.asked_by: int | None = None
        """The signal that asked for the end; None if none has come."""
        self._asked_at = 0.0
        self._boundary = ""
        """The next boundary, a point at which the loop can end and lose nothing, for messages: ``the end of
        iteration 3``."""
        self._would_lose: str | None = None
        """Says in messages which work an end before the boundary would lose; None: no work is lost."""
        self._expected_end: float | None = None
        """The time at which the boundary is expected; None if unknown."""
        self._may_interrupt = False
        """Whether any signal raises Stopped at once: True within `interruptible`."""
        self.has_reached_boundary = False
        """Whether the loop ends at a boundary, as the signal has asked."""

    @property
    def grace_s(self) -> float:
        """The longest wait for the boundary. It is shorter under a launcher that kills its ranks itself."""
        if not launcher_processes():
            return self._configured_grace_s
        started_by = os.environ.get(STARTED_BY_VARIABLE)
        if started_by is not None and psutil.pid_exists(int(started_by)):
            # `treetune run` sends signals only to the ranks, so the launcher doesn't kill them.
            return self._configured_grace_s
        # DeepSpeed's own command kills its ranks 30 s after the signal, and the checkpoint must be written by
        # then.
        return min(self._configured_grace_s, DEEPSPEED_GRACE_S)

    def begin(self, boundary: str, would_lose: str | None, expected_s: float | None) -> None:
        """Says which boundary comes next: a point at which the loop can end and lose nothing.

        Args:
            boundary: The name of the boundary in messages, such as "the end of iteration 11".
            would_lose: Says in messages which earlier work is lost if the process ends before the boundary,
                such as "the next start does iterations 8 to 10 again". None: no earlier work is lost.
            expected_s: The seconds until the boundary; None if unknown.
        """
        self._boundary, self._would_lose = boundary, would_lose
        self._expected_end = None if expected_s is None else time.monotonic() + expected_s

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Lets a signal raise Stopped at once within the block. The caller catches Stopped to write a
        checkpoint."""
        self._may_interrupt = True
        try:
            if self.asked_by is not None:  # a signal has come before the block
                raise Stopped(128 + self.asked_by)
            yield
        finally:
            self._may_interrupt = False

    def take_signal(self, number: int) -> bool:
        """Decides what a signal does: returns True if the caller should raise Stopped at once.

        If not, the signal asks the loop to end at its next boundary, a point at which nothing is lost. A
        signal of ENDING_SIGNALS also starts the timer of the grace, which is the longest wait for the
        boundary. A signal that adds nothing to an earlier one is ignored.
        """
        if self._may_interrupt:  # within `interruptible`, whose caller catches Stopped
            return True
        if self.asked_by in ENDING_SIGNALS and number in ENDING_SIGNALS:
            # A second signal doesn't wait for the boundary, unless it is an echo: the launcher got the first
            # signal, too, and then sent this one.
            return not self._is_echo(number)
        if number in ENDING_SIGNALS and self.asked_by is None:
            if self._would_lose is None:  # an end now loses no finished iteration
                return True
            remaining_s = None if self._expected_end is None else self._expected_end - time.monotonic()
            if remaining_s is not None and remaining_s > self.grace_s:
                self._say(
                    f"{_signal_name(number)}: {self._boundary} is about {remaining_s:.0f} s away, and"
                    f" checkpoints.grace is {self.grace_s:.0f} s: stopping now; {self._would_lose}"
                )
                return True
        # After CHECKPOINT_SIGNAL, the wait for the boundary has no limit. So a signal of ENDING_SIGNALS asks
        # once more, which limits the wait to the grace. Any other signal after the first one adds nothing.
        is_first_signal = self.asked_by is None
        if is_first_signal or number in ENDING_SIGNALS:
            self._ask_for_end(number)
        return False

    def _ask_for_end(self, number: int) -> None:
        """Asks the loop to end at its next boundary, a point at which nothing is lost.

        A signal of ENDING_SIGNALS also starts the timer of the grace, the longest wait for the boundary.
        """
        self.asked_by, self._asked_at = number, time.monotonic()
        grace_text = ""
        if number in ENDING_SIGNALS:  # after CHECKPOINT_SIGNAL, the wait is not limited
            signal.setitimer(signal.ITIMER_REAL, self.grace_s)
            grace_text = f", within {self.grace_s:.0f} s"
        expected_text = ""
        if self._expected_end is not None:
            remaining_s = max(0.0, self._expected_end - time.monotonic())
            expected_text = f" (in about {remaining_s:.0f} s)"
        lost_text = ""
        if self._would_lose is not None:
            lost_text = f"; once more ends at once, and then {self._would_lose}"
        self._say(
            f"{_signal_name(number)}: stopping with a checkpoint at"
            f" {self._boundary}{expected_text}{grace_text}{lost_text}"
        )

    def reach_boundary(self) -> None:
        """Stops the timer of the grace, because the checkpoint that follows has no deadline."""
        self.has_reached_boundary = True
        signal.setitimer(signal.ITIMER_REAL, 0)

    def end_grace(self) -> int:
        """Reports that the boundary didn't come in time, and returns the signal that asked for the end."""
        assert self.asked_by is not None, "the timer is started when a signal comes"
        lost = "" if self._would_lose is None else f"; {self._would_lose}"
        self._say(f"{self._boundary} didn't come within {self.grace_s:.0f} s: stopping now{lost}")
        return self.asked_by

    def _is_echo(self, number: int) -> bool:
        """Returns whether this signal is an echo: the launcher got the first signal, too, and then sent this
        one."""
        if number != signal.SIGTERM or not launcher_processes():
            return False
        if self.asked_by == signal.SIGTERM:
            return time.monotonic() - self._asked_at < ECHO_WITHIN_S
        # The first signal was a Ctrl-C, for example, which a terminal sends to all its processes. DeepSpeed's
        # command gets the Ctrl-C as well, and then sends its ranks SIGTERM. Under `treetune run`, which sets
        # STARTED_BY_VARIABLE, ranks get only the signals that `treetune run` passes on, and none twice.
        started_by_deepspeed = STARTED_BY_VARIABLE not in os.environ
        return started_by_deepspeed


def _signal_name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


_graceful_stops: list[GracefulStop] = []
"""The stop of the loop that runs in this process; empty if none does."""


@contextlib.contextmanager
def stopping_gracefully(stop: GracefulStop) -> Iterator[GracefulStop]:
    """Lets `stop` decide what signals do while the block runs."""
    _graceful_stops.append(stop)
    try:
        yield stop
    finally:
        _graceful_stops.remove(stop)
        signal.setitimer(signal.ITIMER_REAL, 0)  # stops the timer of the grace, if it runs


def exit_on_signals() -> None:
    """Lets the first signal raise Stopped, and a second one of the same kind end the process at once.

    Within `stopping_gracefully`, the first signal may only ask the loop to end at its next boundary, a point
    at which nothing is lost. Then no Stopped is raised yet (`GracefulStop.take_signal`).

    Once a process is on its way out, other kinds of signals are ignored: after a Ctrl-C, which the terminal
    sends to all processes, DeepSpeed's launcher sends its ranks a SIGTERM as well. A rank with a launcher
    also ignores a second SIGTERM, for the same reason.

    Python ignores every exception that is raised within a finalizer or a weak reference's callback, where a
    signal may well arrive. Such a Stopped is raised once more, a moment later.
    """
    signals = _EndingSignals(sys.unraisablehook)
    sys.unraisablehook = signals.raise_again
    atexit.register(signals.ignore_echoes)
    # SIGALRM comes from two timers of this module: one limits the wait for the boundary, and the other one
    # raises an ignored Stopped once more.
    for number in (*ENDING_SIGNALS, CHECKPOINT_SIGNAL, signal.SIGALRM):
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # `nohup`: the run outlives its terminal
        signal.signal(number, signals.handle)


class _EndingSignals:
    """Raises Stopped at signals; see `exit_on_signals`."""

    def __init__(self, earlier_hook: Callable[[sys.UnraisableHookArgs], Any]) -> None:
        """Makes the handler of signals.

        Args:
            earlier_hook: The `sys.unraisablehook` so far. It gets all other exceptions that Python ignores.
        """
        self._earlier_hook = earlier_hook
        self._stopped_by: int | None = None
        """The signal that has raised Stopped."""
        self._ignored_signal: int | None = None
        """The signal whose Stopped Python has ignored, until it is raised again."""

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal: raises Stopped, unless the innermost graceful stop (`stopping_gracefully`) lets
        the loop go on to its next boundary.

        Two timers of this module send SIGALRM: that of `raise_again`, and that of a graceful stop's grace.
        """
        if number == signal.SIGALRM and self._ignored_signal is not None:  # the timer of `raise_again`
            number, self._ignored_signal = self._ignored_signal, None
            raise Stopped(128 + number)
        if self._stopped_by is not None:
            # The process is on its way out. A second signal of the same kind ends it at once, except for
            # CHECKPOINT_SIGNAL, which only asks for a checkpoint. With a launcher, a second signal may be the
            # first one that the launcher passed on, so it is ignored.
            may_end_at_once = number == self._stopped_by and number != CHECKPOINT_SIGNAL
            if may_end_at_once and not launcher_processes():
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if _graceful_stops:
            if number == signal.SIGALRM:  # the grace is over
                number = _graceful_stops[-1].end_grace()
            elif not _graceful_stops[-1].take_signal(number):
                return  # the loop ends at its next boundary
        elif number == signal.SIGALRM:  # the grace of a graceful stop whose block has ended
            return
        self._stopped_by = number
        if _graceful_stops:
            # The loop looks at `asked_by` at its next boundary. So it ends there even if other code catches
            # the Stopped below and drops it.
            _graceful_stops[-1].asked_by = number
        raise Stopped(128 + number)

    def raise_again(self, ignored: sys.UnraisableHookArgs) -> None:
        """If Python has ignored a Stopped, raises it once more a moment later."""
        if isinstance(ignored.exc_value, Stopped) and isinstance(ignored.exc_value.code, int):
            self._ignored_signal = ignored.exc_value.code - 128  # the code of Stopped is 128 + the signal
            # The timer's signal raises it, since Python would also ignore an exception of this hook.
            signal.setitimer(signal.ITIMER_REAL, RAISED_AGAIN_AFTER_S)
        else:
            self._earlier_hook(ignored)

    def ignore_echoes(self) -> None:
        """Ignores further signals at the exit, so that the exit code is the first signal's.

        While Python takes the interpreter down, Python gives signals their default actions back, except for
        ignored signals. Without this function, a signal that comes then would end the process.
        """
        if self._stopped_by is None:
            return
        for number in (*ENDING_SIGNALS, CHECKPOINT_SIGNAL):
            # Without a launcher, a second signal of the first one's kind may still end the process.
            if number != self._stopped_by or launcher_processes():
                signal.signal(number, signal.SIG_IGN)


# Children, each with a process group of its own


@contextlib.contextmanager
def start_process_group(
    command: Sequence[str], settings: Mapping[str, str], log: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a process in a group of its own, and ends the whole group at the end of the block. If this
    process dies before that, the started process gets SIGTERM.

    Args:
        settings: Further environment variables.
        log: The file for its output.
    """
    # The programs of this environment come first, such as `deepspeed`.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    # APP_EXPERIMENT_NAME is the name of one experiment. If the new process inherited it, all experiments that
    # the new process runs would get this name.
    inherited = {name: value for name, value in os.environ.items() if name != "APP_EXPERIMENT_NAME"}
    # Loaded before the fork: between fork and exec, another thread's lock may be held for ever.
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def set_up_child() -> None:
        """Runs in the new process before its program, and has the kernel send it SIGTERM when this process
        dies."""
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before the call above, so no signal will come
            os._exit(EXIT_CODE_OF_SIGTERM)
        signal.signal(CHECKPOINT_SIGNAL, signal.SIG_IGN)  # SLURM may send it to all processes of a job

    process = subprocess.Popen(
        command,
        env=inherited | {"PATH": path} | dict(settings),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=set_up_child,
    )
    try:
        yield process
    finally:
        end_process_group(process)


def end_process_group(process: subprocess.Popen[bytes], grace_s: float = END_GRACE_S) -> None:
    """Ends a process by SIGTERM and, after `grace_s`, all that is left of its group by SIGKILL.

    The process was started in a group of its own, so the group's number is the process's id.
    """
    deadline = time.monotonic() + grace_s
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    while (members := _living_members(process.pid)) and time.monotonic() < deadline:
        process.poll()  # reaps the process if it has ended
        time.sleep(END_POLL_S)
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            member.kill()
    process.wait(END_GRACE_S)


def _living_members(group: int) -> list[psutil.Process]:
    """Returns the living processes of a group, without zombies."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            if os.getpgid(process.pid) == group and is_alive(process):
                members.append(process)
    return members
