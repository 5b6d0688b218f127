"""Distributes work among processes that share only a file system, by claims.

A claim is a file, held by the process that has created it::

    claims/0000    process A, which died
    claims/0001    process B, which took over: the newest file counts

A process takes a claim over by creating the file with the next number, which only one process can do. A file
is never deleted: a process that looked a moment too early could otherwise delete the claim of another one.
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
"""The time without a sign of life after which a holder loses its claim. A network file system must show a
sign of life of another machine within this time."""
BEAT_S = 10.0
"""The seconds between two signs of life."""

_CLAIM_FILES_PATTERN = "[0-9]" * 4
"""The glob pattern of the claims' file names."""


class Claim:
    """A claim that this process holds until it releases it, or until it shows no sign of life for too long.

    A thread touches the file every `beat_s`, as a sign of life.
    """

    def __init__(self, file: Path, beat_s: float) -> None:
        self.file = file
        self._beat_s = beat_s
        self._is_over = threading.Event()
        threading.Thread(target=self._beat, name="claim", daemon=True).start()

    @property
    def number(self) -> int:
        """The number of times that the work was taken over."""
        return int(self.file.name)

    def is_lost(self) -> bool:
        """Returns whether another process has taken over, for example because this one was suspended."""
        return _find_newest(self.file.parent) != self.file

    def release(self) -> None:
        """Ends the claim: the work is done, or left to another process. Safe to call twice."""
        if not self._is_over.is_set():
            self._is_over.set()
            write_text(self.file, json.dumps(_own_identity() | {"released": True}))

    def _beat(self) -> None:
        while not self._is_over.wait(self._beat_s):
            # A file system that fails for a moment doesn't matter: the next sign of life may succeed.
            with contextlib.suppress(OSError):
                os.utime(self.file)


class Claims:
    """Takes claims, and judges whether the holders of others are alive.

    A holder on this machine is dead if its process is gone. A holder on another machine is dead if its file
    has not changed for `lease_s` by this process's own clock; other machines' clocks are not trusted.
    """

    def __init__(self, lease_s: float = LEASE_S, beat_s: float = BEAT_S) -> None:
        """Prepares to take claims for this process.

        The holder of a claim shows that it is alive: it touches the claim's file again and again. Each time
        is a sign of life.

        Args:
            lease_s: The seconds without a sign of life after which a holder on another machine loses its
                claim.
            beat_s: The seconds between two signs of life of this process's claims.
        """
        assert beat_s < lease_s
        self._lease_s, self._beat_s = lease_s, beat_s
        self._seen: dict[Path, tuple[int, float]] = {}
        """The last change of each file, and the time by this process's clock when it first saw that
        change."""

    def take(self, folder: Path) -> Claim | None:
        """Claims the work of `folder`. Returns None if another process holds the claim.

        A claim is a numbered file in the folder. The process that has created the newest one holds the claim.
        """
        newest = _find_newest(folder)
        if newest is not None and not self._is_free(newest):
            return None
        folder.mkdir(parents=True, exist_ok=True)
        # Only one process can create the file with the next number, so no two processes take the same claim.
        number = 0 if newest is None else int(newest.name) + 1
        file = folder / f"{number:04d}"
        try:
            with file.open("x") as new_file:
                new_file.write(json.dumps(_own_identity()))
        except FileExistsError:
            return None  # another process was faster
        return Claim(file, self._beat_s)

    def is_held(self, folder: Path) -> bool:
        """Returns whether a process holds the claim, as far as this process can tell by now."""
        newest = _find_newest(folder)
        return newest is not None and not self._is_free(newest)

    def holder(self, folder: Path) -> str:
        """Returns the holder of the claim for a message: ``process 4711 on node1``."""
        newest = _find_newest(folder)
        content = {} if newest is None else _read_claim(newest)
        return f"process {content.get('pid', '?')} on {content.get('host', 'another machine')}"

    def _is_free(self, file: Path) -> bool:
        """Returns whether a claim was released, or its holder is dead."""
        content = _read_claim(file)
        if content.get("released"):
            return True
        if content.get("machine") == _read_machine_name():
            return not ProcessIdentity(content["pid"], content["started"]).is_alive()
        # The holder is on another machine, whose processes can't be listed, or has not written its identity
        # yet. A living holder touches the file again and again, so the time of its last change counts. The
        # file is opened to get that time, since a network file system then asks its server for it.
        with file.open("rb") as opened:
            last_change = os.fstat(opened.fileno()).st_mtime_ns
        # `last_change` comes from another machine's clock, which may be wrong. So this process measures by
        # its own clock how long it has seen no new change.
        now = time.monotonic()
        previous_change, first_seen_at = self._seen.get(file, (None, now))
        if last_change != previous_change:
            first_seen_at = now
        self._seen[file] = (last_change, first_seen_at)
        return now - first_seen_at > self._lease_s


def _find_newest(folder: Path) -> Path | None:
    """Returns the file of the claim that counts."""
    return max(folder.glob(_CLAIM_FILES_PATTERN), default=None)


def _read_claim(file: Path) -> dict[str, Any]:
    """Returns the content of a claim: a file by which its holder, a process, has taken over some work.

    The content is empty if the holder has not written it yet, or died before it could.
    """
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except ValueError:
        return {}
    return content


def _own_identity() -> dict[str, Any]:
    """Returns the content of a claim of this process, by which others judge whether it is alive."""
    process = ProcessIdentity.of(os.getpid())
    assert process is not None, "this process exists"
    return {
        "host": platform.node(),  # for messages
        "machine": _read_machine_name(),
        "pid": process.pid,
        "started": process.started,
    }


def _read_machine_name() -> str:
    """Returns a text that identifies the machine, its present boot and the PID namespace (container).

    A process id means the same process only where this text is the same.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"
