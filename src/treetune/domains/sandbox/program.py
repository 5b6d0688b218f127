"""Programs under limits: started, followed from the start to the end, and ended; and those without a
sandbox."""

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

from treetune.domains.sandbox.base import KilledBy, ProgramLimits, ProgramOutcome, Sandbox
from treetune.exceptions import SandboxUnavailable

BOOT = Path(__file__).parent / "inside" / "boot.py"

PYTHON_FLAGS = ("-s", "-P", "-S", "-X", "utf8")
"""Nothing is imported from the user's or the working directory; `site`, half of a start, is left out."""

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # The same answer has the same verdict: sets of strings are printed in the same order every time.
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

START_SECONDS = 20.0
"""How long a busy machine may take from the call until the program begins."""

LOOK_SECONDS = 0.02
"""How often memory, processes and processor time are looked at. A core fills some 40 MiB meanwhile."""

_READ_BYTES = 1 << 16


def start(
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
    meet: Callable[[], None] = lambda: None,
) -> subprocess.Popen[bytes]:
    """Starts a command that ends in boot.py, which becomes the user `uid`, takes the `limits` (by their names
    in `resource`) and runs the program. Returns when the program is about to begin, whose standard input is
    the descriptor `stdin` (or a pipe, for `subprocess.PIPE`). `meet` is called when the command has started.

    Raises SandboxUnavailable with what the command said if it ends before that, or takes too long.
    """
    setup = {
        "code": code,
        "files": dict(files),
        "limits": dict(limits),
        "work": work,
        "path": list(path),
        "uid": uid,
    }
    payload = read_only(marshal.dumps(setup))
    started, started_write = os.pipe()
    try:
        try:
            process = subprocess.Popen(
                [*command, str(payload), str(started_write)],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**ENVIRONMENT, "HOME": work, "TMPDIR": work},
                pass_fds=(payload, started_write, *descriptors),
                start_new_session=True,
            )
        finally:
            os.close(payload)
            os.close(started_write)
        meet()
        if wait_for(started, START_SECONDS) and os.read(started, 1):
            return process
    finally:
        os.close(started)
    process.kill()
    message = process.communicate()[1].decode(errors="replace").strip()
    raise SandboxUnavailable(
        f"{command[0]} did not start a program: {message or f'nothing happened in {START_SECONDS:g} s'}"
    )


def wait_for(descriptor: int, seconds: float) -> bool:
    """Returns whether there is something to read, or an end, within so long. (`select.select` knows the first
    thousand descriptors alone.)"""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def read_only(data: bytes) -> int:
    """Returns a descriptor that gives these bytes, as a file does, and that nobody can write to."""
    writable = os.memfd_create("sandbox", os.MFD_CLOEXEC)
    try:
        with open(writable, "wb", closefd=False) as file:
            file.write(data)
        return os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writable)


def resource_limits(limits: ProgramLimits) -> dict[str, int]:
    """Returns the limits that hold for each process by itself, wherever it runs."""
    return {
        "RLIMIT_AS": limits.memory_mib << 20,
        "RLIMIT_CPU": math.ceil(limits.cpu_seconds or limits.seconds) + 1,
        "RLIMIT_NOFILE": limits.files,
        "RLIMIT_FSIZE": limits.disk_mib << 20,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_SIGPENDING": 256,
    }


# Followed to its end

_TICKS = os.sysconf("SC_CLK_TCK")
_COUNTED = (b"RssAnon:", b"RssShmem:", b"VmSwap:")


@dataclass(frozen=True)
class ResourceUsage:
    """Bytes of memory, tasks (processes and threads), seconds of processor time."""

    memory: int
    tasks: int
    cpu_seconds: float


def usage_of(pids: Iterable[int]) -> ResourceUsage:
    """Adds up all these processes; one that has ended is left out.

    Pages that processes share after a fork count once for each of them.
    """
    memory = tasks = 0
    seconds = 0.0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/status", "rb") as file:
                for line in file:
                    if line.startswith(_COUNTED):
                        memory += int(line.split()[1]) * 1024
                    elif line.startswith(b"Threads:"):
                        tasks += int(line.split()[1])
                        break  # what follows is of no interest
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The name, in parentheses, may hold anything; then come state, ..., utime, stime, and
                # those of children that were waited for.
                fields = file.read().rpartition(b")")[2].split()
            seconds += sum(map(int, fields[11:15])) / _TICKS
        except (FileNotFoundError, ProcessLookupError):
            continue
    return ResourceUsage(memory, tasks, seconds)


def descendants(root: int) -> list[int]:
    """Returns the processes that `root` or one of its descendants started, in no order. Needs
    /proc/…/children, which costs less than the parents of all processes of the machine."""
    seen = {root}
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        children: set[int] = set()
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                    children |= {int(child) for child in file.read().split()}
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has ended: what it had started belongs to another by now
        waiting += children - seen
        seen |= children
    return list(seen - {root})


def follow(
    process: subprocess.Popen[bytes],
    limits: ProgramLimits,
    start: float,
    usage: Callable[[], ResourceUsage],
    kill: Callable[[], None],
) -> ProgramOutcome:
    """Takes what the process prints until it has ended, by itself or by `kill`; it is reaped, its pipes are
    closed.

    `start` is when its time began (`time.monotonic`). `kill` ends it and all that it started.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    printed = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    most = limits.output_kib * 1024
    killed_by: KilledBy | None = None
    ended = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ)
            for descriptor in printed:
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
            look = start + LOOK_SECONDS
            while killed_by is None:
                ready = [key.fd for key, _ in selector.select(max(0.0, look - time.monotonic()))]
                if ended in ready:
                    break
                for descriptor in ready:
                    if not _take(descriptor, printed[descriptor], most):
                        selector.unregister(descriptor)
                    elif len(printed[descriptor]) > most:
                        killed_by = "output"
                now = time.monotonic()
                if killed_by is None and now >= look:
                    killed_by = passed(limits, now - start, usage())
                    look = min(now + LOOK_SECONDS, start + limits.seconds)
    finally:
        kill()
        process.wait()
        os.close(ended)
        # Whoever held the other ends is dead: what is in the pipes is all that there will be.
        for descriptor, text in printed.items():
            while len(text) <= most and _take(descriptor, text, most, once=True):
                pass
        process.stdout.close()
        process.stderr.close()
    if killed_by is None and any(len(text) > most for text in printed.values()):
        killed_by = "output"
    if killed_by is None and process.returncode in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
        killed_by = "time"
    stdout, stderr = (bytes(text[:most]).decode(errors="replace") for text in printed.values())
    status = process.returncode
    return ProgramOutcome(
        stdout=stdout,
        stderr=stderr,
        # The first process of a namespace says which signal ended the program as a shell does.
        exit=None if killed_by else 128 - status if status > 128 else status,
        killed_by=killed_by,
        seconds=time.monotonic() - start,
    )


def passed(limits: ProgramLimits, seconds: float, usage: ResourceUsage) -> KilledBy | None:
    """Returns the limit that is passed after so many seconds, if any."""
    if seconds >= limits.seconds:
        return "time"
    if limits.cpu_seconds is not None and usage.cpu_seconds > limits.cpu_seconds:
        return "time"
    if usage.memory > limits.memory_mib * 2**20:
        return "memory"
    if usage.tasks > limits.processes + 1:  # the first process of a namespace is not the program's
        return "processes"
    return None


def _take(descriptor: int, text: bytearray, most: int, once: bool = False) -> bool:
    """Takes what is in the pipe, a little more than `most` bytes at most. Returns whether more may come; with
    `once`, whether there was anything."""
    try:
        while len(text) <= most:
            data = os.read(descriptor, _READ_BYTES)
            if not data:
                return False
            text += data
            if once:
                return True
    except BlockingIOError:
        return not once
    return True


# Without a sandbox


@Sandbox.register("unsafe_local")
@dataclass(frozen=True, kw_only=True)
class UnsafeLocal(Sandbox):
    """Runs programs without a sandbox: they run as you, see your files and your network, and can harm
    whatever you can.

    The limits hold as far as they do without a namespace: deadline, memory, output, open files, size of a
    file. A program that wants to outlives them. For programs that you trust, on machines that you can
    lose.
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
        given = read_only(stdin.encode(errors="surrogatepass"))
        try:
            started = _StartedAsYou(code, files or {}, limits, stdin=given)
        finally:
            os.close(given)
        with started.work:
            return follow(started.process, limits, time.monotonic(), started.usage, started.kill)

    @override
    def begin(self, code: str, limits: ProgramLimits) -> _StartedAsYou:
        return _StartedAsYou(code, {}, limits, stdin=subprocess.PIPE)


class _StartedAsYou:
    """A program that is about to begin without a sandbox, in a work folder that is removed with this."""

    def __init__(self, code: str, files: Mapping[str, str], limits: ProgramLimits, *, stdin: int) -> None:
        self.work = tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True)
        try:
            self.process = start(
                [sys.executable, *PYTHON_FLAGS, str(BOOT)],
                code,
                files,
                resource_limits(limits),
                work=self.work.name,
                path=[self.work.name, *(folder for folder in sys.path if folder.endswith("-packages"))],
                uid=None,
                stdin=stdin,
            )
        except BaseException:
            self.work.cleanup()
            raise

    def usage(self) -> ResourceUsage:
        return usage_of([self.process.pid, *descendants(self.process.pid)])

    def kill(self) -> None:
        if self.process.returncode is None:  # else the number may be another process's by now
            for pid in (self.process.pid, *descendants(self.process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.work.cleanup()
