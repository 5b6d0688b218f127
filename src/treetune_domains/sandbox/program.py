"""Starts boot.py with a program, wherever that is, and waits until the program begins."""

from __future__ import annotations

import marshal
import math
import os
import select
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from treetune_domains.sandbox.base import Limits, Outcome, SandboxUnavailable
from treetune_domains.sandbox.follow import Followed

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


def start(
    command: Sequence[str],
    setup: Mapping[str, Any],
    *,
    work: str,
    stdin: int,
    descriptors: Sequence[int] = (),
    meet: Callable[[], None] = lambda: None,
) -> subprocess.Popen[bytes]:
    """Starts a command that ends in boot.py, to which `setup` is handed. Returns when the program is about to
    begin, whose standard input is the descriptor `stdin` (or a pipe, for `subprocess.PIPE`). `meet` is called
    when the command has started.

    Raises SandboxUnavailable with what the command said if it ends before that, or takes too long.
    """
    payload = read_only(marshal.dumps(dict(setup)))
    begun, begun_write = os.pipe()
    try:
        try:
            process = subprocess.Popen(
                [*command, str(payload), str(begun_write)],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**ENVIRONMENT, "HOME": work, "TMPDIR": work},
                pass_fds=(payload, begun_write, *descriptors),
                start_new_session=True,
            )
        finally:
            os.close(payload)
            os.close(begun_write)
        meet()
        if wait_for(begun, START_SECONDS) and os.read(begun, 1):
            return process
    finally:
        os.close(begun)
    process.kill()
    said = process.communicate()[1].decode(errors="replace").strip()
    raise SandboxUnavailable(
        f"{command[0]} did not start a program: {said or f'nothing happened in {START_SECONDS:g} s'}"
    )


def wait_for(descriptor: int, seconds: float) -> bool:
    """Whether there is something to read, or an end, within so long. (`select.select` knows the first
    thousand descriptors alone.)"""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def setup_of(
    code: str,
    files: Mapping[str, str],
    limits: Mapping[str, int],
    *,
    work: str,
    path: Sequence[str],
    uid: int | None,
) -> dict[str, Any]:
    """What boot.py is handed. `limits` are by their names in `resource`."""
    return {
        "code": code,
        "files": dict(files),
        "limits": dict(limits),
        "work": work,
        "path": list(path),
        "uid": uid,
    }


def outcome_of(followed: Followed, status: int, seconds: float) -> Outcome:
    return Outcome(
        stdout=followed.stdout.decode(errors="replace"),
        stderr=followed.stderr.decode(errors="replace"),
        # The first process of a namespace says which signal ended the program as a shell does.
        exit=None if followed.killed_by else 128 - status if status > 128 else status,
        killed_by=followed.killed_by,
        seconds=seconds,
    )


def read_only(data: bytes) -> int:
    """A descriptor that gives these bytes, as a file does, and that nobody can write to."""
    writable = os.memfd_create("sandbox", os.MFD_CLOEXEC)
    try:
        with open(writable, "wb", closefd=False) as file:
            file.write(data)
        return os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writable)


def resource_limits(limits: Limits) -> dict[str, int]:
    """Those that hold for each process by itself, wherever it runs."""
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
