"""Leases on work among processes that share a file system and nothing else.

A claim is a file; whoever creates it holds it. It is taken over by creating the file with the next number,
which only one can, and never by deleting one: so nobody can lose a claim to a process that looked a moment
too early.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

from treetune.processes.lifetime import ProcessIdentity
from treetune.store.files import write_text

LEASE_S = 120.0
"""A holder that shows no sign of life for this long has lost its claim. Longer than what file
systems over a network take to show one machine what another has done."""
BEAT_S = 10.0

_NUMBER = "[0-9]" * 4


class Claim:
    """A claim, held until it is released, or until this process has shown no sign of life for too long."""

    def __init__(self, file: Path, beat_s: float) -> None:
        self.file = file
        self._beat_s = beat_s
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="claim", daemon=True).start()

    @property
    def number(self) -> int:
        """Returns how often the work was taken over."""
        return int(self.file.name)

    def lost(self) -> bool:
        """Returns whether another process took over, as after a long standstill of this one."""
        return _newest(self.file.parent) != self.file

    def release(self) -> None:
        """Ends the claim: the work is done, or left to the next. Safe to call twice."""
        if not self._over.is_set():
            self._over.set()
            write_text(self.file, json.dumps(_me() | {"released": True}))

    def _beat(self) -> None:
        while not self._over.wait(self._beat_s):
            # A file system that is away for a moment: the next beat tells.
            with contextlib.suppress(OSError):
                os.utime(self.file)


class Claims:
    """All claims as this process sees them. Other machines' clocks are not trusted: a holder is dead when its
    file has not changed for `lease_s` by this process's own clock, or at once when it ran on this machine and
    is gone.
    """

    def __init__(self, lease_s: float = LEASE_S, beat_s: float = BEAT_S) -> None:
        assert beat_s < lease_s
        self._lease_s, self._beat_s = lease_s, beat_s
        self._seen: dict[Path, tuple[int, float]] = {}

    def take(self, folder: Path) -> Claim | None:
        """Returns the claim on the work of `folder`; None while another process holds it."""
        newest = _newest(folder)
        if newest is not None and not self._is_free(newest):
            return None
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{int(newest.name) + 1 if newest else 0:04d}"
        try:
            with file.open("x") as own:
                own.write(json.dumps(_me()))
        except FileExistsError:
            return None  # another one was quicker
        return Claim(file, self._beat_s)

    def held(self, folder: Path) -> bool:
        """Returns whether somebody has the claim, as far as this process can tell by now."""
        newest = _newest(folder)
        return newest is not None and not self._is_free(newest)

    def holder(self, folder: Path) -> str:
        """Returns the holder of the claim, for people."""
        newest = _newest(folder)
        content = {} if newest is None else _read(newest)
        return f"process {content.get('pid', '?')} on {content.get('host', 'another machine')}"

    def _is_free(self, file: Path) -> bool:
        content = _read(file)
        if content.get("released"):
            return True
        if content.get("machine") == _machine():
            return not ProcessIdentity(content["pid"], content["started"]).alive()
        # Opened, and not only looked at: network file systems then ask for what is new.
        with file.open("rb") as opened:
            beat = os.fstat(opened.fileno()).st_mtime_ns
        now = time.monotonic()
        last, since = self._seen.get(file, (None, now))
        if beat != last:
            since = now
        self._seen[file] = (beat, since)
        return now - since > self._lease_s


def _newest(folder: Path) -> Path | None:
    return max(folder.glob(_NUMBER), default=None)


def _read(file: Path) -> dict[str, Any]:
    """Returns the content; empty for a file that its maker has not written to yet, or never will."""
    try:
        return dict(json.loads(file.read_text()))
    except ValueError:
        return {}


def _me() -> dict[str, Any]:
    process = ProcessIdentity.of(os.getpid())
    assert process is not None
    return {
        "host": platform.node(),
        "machine": _machine(),
        "pid": process.pid,
        "started": process.started,
    }


def _machine() -> str:
    """Returns this machine since it was started, as far as its process ids go."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"
