"""Runs one command, and ensures that none of its processes outlives this program's parent.

    python -I -S guard.py PARENT_PID SCRATCH_FOLDER COMMAND…

A server starts processes that can outlive it: an engine core whose server was killed keeps its memory. So
this program runs between the parent and the server::

    parent ──► guard ──► server ──► engine core, workers

The guard is the subreaper of all processes below it. It ends all of them, and deletes the scratch folder,
when

* the parent is gone, or writes to the guard's standard input or closes it;
* the command has ended;
* the engine core is gone: the server itself would continue, and requests other than for samples would never
  be answered.

The server's processes also share memory in files ``/dev/shm/psm_…``. These files would stay if all of the
processes are killed. The guard notes the files, and deletes those that are left.

If the guard itself is killed, the command gets SIGTERM, and the next start deletes the files
(`treetune.store.held_folders.delete_abandoned_folders`). The guard uses only the standard library, so it
takes little memory while the server runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SERVER_GRACE_S = 8.0
"""The most seconds of a clean end of the server. vLLM needs one to three."""
ORPHAN_GRACE_S = 1.0
"""The most seconds of a clean end of the server's children, after the server itself has ended."""
WITHOUT_ENGINE_S = 2.0
"""The most seconds in which a server without its engine may write its error and end."""
ENGINE_TITLE = b"VLLM::EngineCore"
"""The beginning of the command line of vLLM's engine core."""
TRACKER_GRACE_S = 2.0
"""The most seconds in which Python's resource tracker may delete shared memory after all other processes are
killed."""
END_NOW = b"k"
"""The byte on standard input that ends the server at once. Any other byte, or the end of the input, ends it
cleanly."""
STANDARD_INPUT = 0
"""The file descriptor of standard input."""
POLL_EVERY_S = 0.5
SHARED_MEMORY_PREFIX = "/dev/shm/psm_"
"""The beginning of the paths of files with which Python's multiprocessing shares memory."""
NOTES_OF_SHARED_MEMORY = "shared_memory"
"""The file in the scratch folder with a line for each file of shared memory: its name, a space, its inode."""
NOTE_SHARED_MEMORY_EVERY_S = 30.0
"""The seconds between two looks for files of shared memory while the engine runs. Most of them are made when
the server starts, and until then the guard looks every `POLL_EVERY_S` seconds."""


def main(arguments: list[str]) -> int:
    """Runs the command, and then ends all processes below this one. Returns the command's exit code.

    The command runs until one of these happens: it ends, its engine core is gone, this process gets a signal,
    the parent is gone, or the parent asks for the end on standard input.
    """
    # The parent passes its ID: if it has ended already, `os.getppid()` returns the ID of another process.
    parent, scratch, command = int(arguments[0]), arguments[1], arguments[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    wake_read, ending_signals = _catch_signals()
    server = _spawn(libc, command)
    status: int | None = None  # the server's wait status, once it has ended
    grace = SERVER_GRACE_S
    engine = _EngineCore()
    shared_memory: dict[str, int] = {}  # the inodes of the server's files, by their paths
    next_look_at = time.monotonic()
    while True:
        status = _reap(server, status)
        is_parent_gone = os.getppid() != parent
        if status is not None or ending_signals or is_parent_gone:
            break

        if time.monotonic() >= next_look_at:
            present_files = _find_shared_memory(find_descendants(os.getpid()))
            if not present_files.items() <= shared_memory.items():  # there are new files
                shared_memory |= present_files
                # If this process is killed, the next start reads these notes and deletes the files.
                _note_shared_memory(shared_memory, scratch)
            # Until there is an engine, the server is starting, and makes its files.
            seconds = POLL_EVERY_S if engine.pid is None else NOTE_SHARED_MEMORY_EVERY_S
            next_look_at = time.monotonic() + seconds

        if engine.has_been_gone():
            sys.stderr.write(f"the engine's process {engine.pid} is gone: its server is ended\n")
            grace = 0.0
            break

        readable, _, _ = select.select([STANDARD_INPUT, wake_read], [], [], POLL_EVERY_S)
        if wake_read in readable:
            os.read(wake_read, 4096)  # empties the pipe
        if STANDARD_INPUT in readable:  # the parent has written, or has closed its end
            if os.read(STANDARD_INPUT, 1) == END_NOW:
                grace = 0.0
            break
    shared_memory |= _find_shared_memory(find_descendants(os.getpid()))
    status = _end_tree(server, status, grace)
    _delete_shared_memory(shared_memory)
    shutil.rmtree(scratch, ignore_errors=True)
    # The server's exit code is negative if a signal ended it. A process can't exit with a negative code, so
    # only the lowest byte is returned.
    return 0 if status is None else os.waitstatus_to_exitcode(status) & 0xFF


class _EngineCore:
    """vLLM's engine core, which is found some time after the server has started."""

    def __init__(self) -> None:
        self.pid: int | None = None
        """Its process; None until it has been seen."""
        self._gone_at: float | None = None
        """The time at which it was first missed."""

    def has_been_gone(self) -> bool:
        """Looks for the engine core, and returns whether it has been gone for WITHOUT_ENGINE_S seconds.

        In these seconds, the server may write its error and end by itself.
        """
        if self.pid is None:
            self.pid = _find_engine_process()
            return False
        if self._gone_at is None:
            if not _is_alive(self.pid):
                self._gone_at = time.monotonic()
            return False
        return time.monotonic() - self._gone_at > WITHOUT_ENGINE_S


def _catch_signals() -> tuple[int, list[int]]:
    """Lets signals wake this process instead of ending it.

    Returns (pipe, signals): a pipe from which one can read after each signal, and the list to which the
    signals are added that ask for the end.
    """
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    ending_signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda signum, frame: ending_signals.append(signum))
    # Only signals with a handler write into the pipe.
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    return wake_read, ending_signals


def _spawn(libc: ctypes.CDLL, command: list[str]) -> int:
    """Starts the command as a child, which gets SIGTERM if this process dies. Returns its process ID."""
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    # The child
    try:
        # The guard handles these signals (`_catch_signals`), and the command must not.
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        # SIGTERM, not SIGKILL: a server that is killed leaves its own children behind.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        # If the guard died before that call, no signal comes any more, so nothing is started.
        if os.getppid() == guard:
            # The guard's standard input is only for the guard, so the server gets an empty one.
            os.dup2(os.open(os.devnull, os.O_RDONLY), STANDARD_INPUT)
            os.execvp(command[0], command)
    finally:
        os._exit(127)  # only reached if the command could not be started


def _reap(server: int, status: int | None) -> int | None:
    """Collects all children that have ended. Returns the server's wait status if the server is among them,
    and `status` if it isn't."""
    with contextlib.suppress(ChildProcessError):  # there is no child any more
        while True:
            pid, status_of_child = os.waitpid(-1, os.WNOHANG)
            if pid == 0:  # the children that are left have not ended
                break
            if pid == server:
                status = status_of_child
    return status


def _reap_until(
    is_done: Callable[[int | None], bool], server: int, status: int | None, seconds: float
) -> int | None:
    """Collects children that have ended, until `is_done(status)` is true, but for `seconds` at most.

    `status` is the server's wait status; None while the server runs. Returns the latest one.
    """
    deadline = time.monotonic() + seconds
    while True:
        status = _reap(server, status)
        if is_done(status) or time.monotonic() > deadline:
            return status
        time.sleep(0.02)


def _end_tree(server: int, status: int | None, grace: float) -> int | None:
    """Ends all processes below this one, and returns when they are gone.

    First the server gets SIGTERM and `grace` seconds for a clean end. Then its children get SIGTERM. Then
    all that are left get SIGKILL. With a `grace` of 0, the first two steps are left out.
    """
    if grace > 0:
        if status is None:
            _send_signal(server, signal.SIGTERM)
            status = _reap_until(_has_ended, server, status, grace)
        # The server has had its time to end its children. Those that are left are asked here.
        for pid in find_descendants(os.getpid()):
            _send_signal(pid, signal.SIGTERM)
        status = _reap_until(_are_all_gone, server, status, ORPHAN_GRACE_S)
    # A resource tracker of Python's multiprocessing deletes shared memory that its killed owner left, and
    # then ends by itself. So it is killed only after some time.
    for pid in find_descendants(os.getpid()):
        if b"resource_tracker" not in _read_command_line(pid):
            _send_signal(pid, signal.SIGKILL)
    status = _reap_until(_are_all_gone, server, status, TRACKER_GRACE_S)
    while remaining_pids := find_descendants(os.getpid()):
        for pid in remaining_pids:
            _send_signal(pid, signal.SIGKILL)
        status = _reap_until(_are_all_gone, server, status, 0.2)
    return _reap(server, status)


def _has_ended(status: int | None) -> bool:
    """Returns whether the server has ended."""
    return status is not None


def _are_all_gone(status: int | None) -> bool:
    """Returns whether no process below this one is left. It takes the server's status as every `is_done` of
    `_reap_until` does, and doesn't need it."""
    return not find_descendants(os.getpid())


def _find_shared_memory(pids: list[int]) -> dict[str, int]:
    """Returns the inodes of the files with shared memory that these processes have open, by their paths."""
    inodes: dict[str, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # it is closed already, or the file is deleted
                    path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                    if path.startswith(SHARED_MEMORY_PREFIX):
                        inodes[path] = os.lstat(path).st_ino
    return inodes


def _note_shared_memory(inodes: dict[str, int], scratch: str) -> None:
    """Writes the files' names into the scratch folder, for the case that this process is killed."""
    notes = os.path.join(scratch, NOTES_OF_SHARED_MEMORY)
    text = "".join(f"{os.path.basename(path)} {inode}\n" for path, inode in inodes.items())
    with contextlib.suppress(OSError):  # a full disk, for example: then the files may stay
        with open(f"{notes}.new", "w") as file:
            file.write(text)
        os.replace(f"{notes}.new", notes)


def _delete_shared_memory(inodes: dict[str, int]) -> None:
    """Deletes the files that are left. Another program's file of the same name has another inode."""
    for path, inode in inodes.items():
        with contextlib.suppress(OSError):  # usually Python's resource tracker has deleted it
            if os.lstat(path).st_ino == inode:
                os.unlink(path)


def _send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _find_engine_process() -> int | None:
    """Returns vLLM's engine below this process, or None as long as there is none."""
    engines = [
        pid for pid in find_descendants(os.getpid()) if _read_command_line(pid).startswith(ENGINE_TITLE)
    ]
    return engines[0] if engines else None


def _is_alive(pid: int) -> bool:
    """Returns whether a process exists and has not ended. One that has ended stays in /proc, in the state Z
    or X, until its parent collects it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The state comes after the name in parentheses, which may contain spaces and parentheses itself.
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def _read_command_line(pid: int) -> bytes:
    """Returns the command line of a process; empty if the process has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:  # the process has ended
        return b""


def find_descendants(root: int) -> list[int]:
    """Returns the living processes below `root`, by the parents that /proc names."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The name in parentheses comes before these fields. It may contain spaces and parentheses.
                fields_after_name = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it has ended since the folder was listed
        state, parent = fields_after_name[:2]
        if state not in (b"Z", b"X"):  # those have ended (`_is_alive`)
            children.setdefault(int(parent), []).append(int(name))
    pids, frontier = [], [root]
    while frontier:
        child_pids = children.get(frontier.pop(), [])
        pids += child_pids
        frontier += child_pids
    return pids


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
