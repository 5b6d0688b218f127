"""Starts programs, follows them until they end or exceed a limit, and kills them.

`start_program` and `follow_program` serve every sandbox::

    this process                              the program's process
    ────────────                              ─────────────────────
    start_program ── setup (a descriptor) ──► inside/boot.py: limits, user, files
                  ◄── one byte ─────────────  about to begin
    follow_program ◄── stdout, stderr ──────  runs
       every MEASURE_EVERY_SECONDS: usage, limits
       beyond a limit: kill ───────────────►  dies

`UnsafeLocal` runs programs without a sandbox.
"""

from __future__ import annotations

import contextlib
import marshal
import math
import os
import select
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from treetune.domains.sandbox.base import KilledBy, ProgramLimits, ProgramOutcome, ResourceUsage, Sandbox
from treetune.exceptions import SandboxUnavailable

BOOT_FILE = Path(__file__).parent / "inside" / "boot.py"

PYTHON_FLAGS = ("-s", "-P", "-S", "-X", "utf8")
"""Python imports nothing from the user's or the working directory. It leaves out `site`, which takes half of
the start's time."""

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # With a fixed seed, sets of strings are printed in the same order every time, and an answer's verdict is
    # always the same.
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

START_SECONDS = 20.0
"""The longest time from the call until the program begins, on a busy machine."""

END_SECONDS = 10.0
"""The longest time in which the last output of a killed program arrives."""

MEASURE_EVERY_SECONDS = 0.02
"""Time between two measurements of a program's resources. A core fills some 40 MiB in this time."""

_READ_BYTES = 1 << 16


def start_program(
    command: Sequence[str],
    code: str,
    files: Mapping[str, str],
    limits: Mapping[str, int],
    *,
    work: str,
    path: Sequence[str],
    uid: int | None,
    stdin: int,
    descriptors: Sequence[int] = (),
    on_start: Callable[[], None] = lambda: None,
) -> subprocess.Popen[bytes]:
    """Starts a program, and returns when it is about to begin.

    Args:
        command: Starts `BOOT_FILE` (inside/boot.py), which sets everything below and then runs the program.
        code: The program.
        files: Texts by file name, which boot.py writes to the work folder.
        limits: Limits of each process, by their names in the module `resource`.
        work: The work folder, as the program sees it.
        path: Folders from which the program imports.
        uid: The user to whom boot.py changes before it runs the program; None: it doesn't change the user.
        stdin: The descriptor of the program's standard input, or `subprocess.PIPE`.
        descriptors: Further descriptors that the command inherits.
        on_start: Called after the command has been started, before the program begins.

    Raises:
        SandboxUnavailable: The command ended before the program began, or took too long.
    """
    setup = {
        "code": code,
        "files": dict(files),
        "limits": dict(limits),
        "work": work,
        "path": list(path),
        "uid": uid,
    }
    setup_fd = read_only_descriptor(marshal.dumps(setup))
    started_read, started_write = os.pipe()  # boot.py writes a byte when the program is about to begin
    try:
        try:
            process = subprocess.Popen(
                [*command, str(setup_fd), str(started_write)],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**ENVIRONMENT, "HOME": work, "TMPDIR": work},
                pass_fds=(setup_fd, started_write, *descriptors),
                start_new_session=True,
            )
        finally:
            os.close(setup_fd)
            os.close(started_write)
        try:
            on_start()
            is_readable = wait_until_readable(started_read, START_SECONDS)
            # The pipe is also readable, but has no byte, if the command ended before the program began.
            begins = is_readable and os.read(started_read, 1) != b""
        except BaseException:
            with process:  # closes its pipes, and waits for its end
                _kill_starting(process)
            raise
        if begins:
            return process
    finally:
        os.close(started_read)
    _kill_starting(process)
    try:
        error_output = process.communicate(timeout=END_SECONDS)[1]
    except subprocess.TimeoutExpired as expired:  # a process that it has started still holds the pipe
        error_output = expired.stderr or b""
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel can't end it, as on a hung disk
            process.wait(END_SECONDS)
    message = error_output.decode(errors="replace").strip()
    raise SandboxUnavailable(
        f"{command[0]} did not start a program: {message or f'nothing happened in {START_SECONDS:g} s'}"
    )


def _kill_starting(process: subprocess.Popen[bytes]) -> None:
    """Kills a command that was to start a program, with all processes of its group.

    While bubblewrap sets a sandbox up, the sandbox's first process waits for bubblewrap, and both are in the
    same group. If only bubblewrap were killed then, the first process would wait for ever.
    """
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)


def wait_until_readable(descriptor: int, seconds: float) -> bool:
    """Returns whether the descriptor has something to read, or is at its end, within so many seconds."""
    poll = select.poll()  # `select.select` takes no descriptors above 1,023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def read_only_descriptor(data: bytes) -> int:
    """Returns a descriptor of a file in memory that holds these bytes and can't be written to."""
    writable = os.memfd_create("sandbox", os.MFD_CLOEXEC)
    try:
        with open(writable, "wb", closefd=False) as file:
            file.write(data)
        return os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writable)


def resource_limits(limits: ProgramLimits) -> dict[str, int]:
    """Returns the limits that the kernel applies to each process by itself, with or without a sandbox."""
    return {
        "RLIMIT_AS": limits.memory_mib << 20,
        # The kernel needs whole seconds. One is added, so that `follow_program` ends the program first: it
        # measures all processes together.
        "RLIMIT_CPU": math.ceil(limits.cpu_seconds or limits.seconds) + 1,
        "RLIMIT_NOFILE": limits.files,
        "RLIMIT_FSIZE": limits.disk_mib << 20,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_SIGPENDING": 256,
    }


# Following a program to its end

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_MEMORY_FIELDS = (b"RssAnon:", b"RssShmem:", b"VmSwap:")
"""Lines of /proc/PID/status that together are a process's memory; files that it has mapped don't count."""


def measure_usage(pids: Iterable[int]) -> ResourceUsage:
    """Returns what all these processes use together. A process that has ended counts as nothing.

    Pages that processes share after a fork count once for each of them.
    """
    memory = tasks = 0
    seconds = 0.0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/status", "rb") as file:
                for line in file:
                    if line.startswith(_MEMORY_FIELDS):
                        memory += int(line.split()[1]) * 1024
                    elif line.startswith(b"Threads:"):
                        tasks += int(line.split()[1])
                        break  # the memory fields come before this one
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The process's name, in parentheses, may hold anything, so fields are counted after it.
                fields = file.read().rpartition(b")")[2].split()
            # utime and stime, and those of children that have been waited for
            ticks = sum(map(int, fields[11:15]))
            seconds += ticks / _TICKS_PER_SECOND
        except (FileNotFoundError, ProcessLookupError):
            continue
    return ResourceUsage(memory, tasks, seconds)


def find_descendants(root: int) -> list[int]:
    """Returns the processes that `root` or one of its descendants started, in any order.

    It reads /proc/PID/task/TID/children, which is cheaper than reading the parent of every process of the
    machine.
    """
    found_pids = {root}
    to_visit = [root]
    while to_visit:
        pid = to_visit.pop()
        children: set[int] = set()
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                    children |= {int(child) for child in file.read().split()}
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has ended: its children have another parent by now
        to_visit += children - found_pids
        found_pids |= children
    return list(found_pids - {root})


def follow_program(
    process: subprocess.Popen[bytes],
    limits: ProgramLimits,
    start: float,
    usage: Callable[[], ResourceUsage],
    kill: Callable[[], None],
) -> ProgramOutcome:
    """Reads what a program prints until it ends or exceeds a limit, and returns how it ended.

    The process is reaped and its pipes are closed, even if this function raises.

    Args:
        process: The program, with pipes as standard output and error.
        limits: The resources that it may use.
        start: The moment at which its time began (`time.monotonic`).
        usage: Measures what it uses.
        kill: Ends the program and all that it started.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    stdout_fd, stderr_fd = process.stdout.fileno(), process.stderr.fileno()
    printed = {stdout_fd: bytearray(), stderr_fd: bytearray()}
    most_bytes = limits.output_kib * 1024
    try:
        killed_by = _watch_program(process.pid, printed, limits, start, usage)
    finally:
        kill()
        process.wait()
        # Every process that could write to the pipes is dead now. The pipes still hold the last part of what
        # was printed.
        for descriptor, text in printed.items():
            _read_available(descriptor, text, most_bytes)
        process.stdout.close()
        process.stderr.close()
    if killed_by is None and any(len(text) > most_bytes for text in printed.values()):
        killed_by = "output"
    if killed_by is None and process.returncode in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
        killed_by = "time"  # the kernel's own limit of processor time
    status = process.returncode
    if status > 128:
        # The first process of a namespace reports a signal as a shell does: 137 for signal 9, which is -9.
        status = 128 - status
    return ProgramOutcome(
        stdout=bytes(printed[stdout_fd][:most_bytes]).decode(errors="replace"),
        stderr=bytes(printed[stderr_fd][:most_bytes]).decode(errors="replace"),
        exit=None if killed_by else status,
        killed_by=killed_by,
        seconds=time.monotonic() - start,
    )


def _watch_program(
    pid: int,
    printed: Mapping[int, bytearray],
    limits: ProgramLimits,
    start: float,
    usage: Callable[[], ResourceUsage],
) -> KilledBy | None:
    """Reads what a program prints, and returns as soon as it ends or exceeds a limit.

    Args:
        pid: The program's process.
        printed: For each descriptor to read, the text so far, to which the new text is added.

    Returns:
        The limit that the program exceeds; None if it has ended.
    """
    most_bytes = limits.output_kib * 1024
    end_fd = os.pidfd_open(pid)  # readable when the process has ended
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(end_fd, selectors.EVENT_READ)
            for descriptor in printed:
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
            next_measurement = start + MEASURE_EVERY_SECONDS
            while True:
                seconds_left = max(0.0, next_measurement - time.monotonic())
                ready = [key.fd for key, _ in selector.select(seconds_left)]
                if end_fd in ready:
                    return None
                for descriptor in ready:
                    is_open = _read_available(descriptor, printed[descriptor], most_bytes)
                    if not is_open:
                        selector.unregister(descriptor)
                    elif len(printed[descriptor]) > most_bytes:
                        return "output"
                now = time.monotonic()
                if now >= next_measurement:
                    exceeded = exceeded_limit(limits, now - start, usage())
                    if exceeded is not None:
                        return exceeded
                    next_measurement = min(now + MEASURE_EVERY_SECONDS, start + limits.seconds)
    finally:
        os.close(end_fd)


def exceeded_limit(limits: ProgramLimits, seconds: float, usage: ResourceUsage) -> KilledBy | None:
    """Returns the limit that a program exceeds; None if the program keeps all limits.

    `seconds` is the time for which the program has run.
    """
    if seconds >= limits.seconds:
        return "time"
    if limits.cpu_seconds is not None and usage.cpu_seconds > limits.cpu_seconds:
        return "time"
    if usage.memory > limits.memory_mib * 2**20:
        return "memory"
    if usage.tasks > limits.processes + 1:  # the first process of a namespace doesn't belong to the program
        return "processes"
    return None


def _read_available(descriptor: int, text: bytearray, most_bytes: int) -> bool:
    """Appends what a pipe holds now to `text`, until that has more than `most_bytes`.

    Returns whether the pipe may hold more later; False once its other end is closed.
    """
    try:
        while len(text) <= most_bytes:
            data = os.read(descriptor, _READ_BYTES)
            if not data:
                return False
            text += data
    except BlockingIOError:
        return True
    return True


# Without a sandbox


@Sandbox.register("unsafe_local")
@dataclass(frozen=True, kw_only=True)
class UnsafeLocal(Sandbox):
    """Runs programs without a sandbox, with your user's rights: they can read and delete your files and use
    your network.

    Only the limits of time, memory, output, open files and file size apply, and a malicious program can evade
    them. Use it for programs that you trust, on machines that you can afford to lose.
    """

    @override
    def missing(self) -> Sequence[str]:
        return ()

    @override
    def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: ProgramLimits | None = None,
    ) -> ProgramOutcome:
        limits = limits or ProgramLimits()
        stdin_fd = read_only_descriptor(stdin.encode(errors="surrogatepass"))
        try:
            program = _UnconfinedProgram(code, files or {}, limits, stdin=stdin_fd)
        finally:
            os.close(stdin_fd)
        with program.work:
            return follow_program(program.process, limits, time.monotonic(), program.usage, program.kill)

    @override
    def begin(self, code: str, limits: ProgramLimits) -> _UnconfinedProgram:
        return _UnconfinedProgram(code, {}, limits, stdin=subprocess.PIPE)


class _UnconfinedProgram:
    """A program that is about to begin without a sandbox. `kill` also removes its work folder."""

    def __init__(self, code: str, files: Mapping[str, str], limits: ProgramLimits, *, stdin: int) -> None:
        self.work = tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True)
        try:
            self.process = start_program(
                [sys.executable, *PYTHON_FLAGS, str(BOOT_FILE)],
                code,
                files,
                resource_limits(limits),
                work=self.work.name,
                # The program also imports what is installed here: in folders called site-packages or
                # dist-packages.
                path=[self.work.name, *(folder for folder in sys.path if folder.endswith("-packages"))],
                uid=None,
                stdin=stdin,
            )
        except BaseException:
            self.work.cleanup()
            raise

    def usage(self) -> ResourceUsage:
        return measure_usage([self.process.pid, *find_descendants(self.process.pid)])

    def kill(self) -> None:
        if self.process.returncode is None:  # once it is reaped, another process may have its number
            # Both ways of ending processes are needed: a descendant may have left the program's group, and
            # one whose parent has ended is found only as a member of the group.
            for pid in (self.process.pid, *find_descendants(self.process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.work.cleanup()
