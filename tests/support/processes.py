"""Processes below this one."""

from __future__ import annotations

import os
from pathlib import Path

from treetune.engine.guard import descendants


def processes_named(title: str) -> list[int]:
    """The processes below this one whose command line begins with `title`."""
    wanted = title.encode()
    return [pid for pid in descendants(os.getpid()) if _command_line(pid).startswith(wanted)]


def process_named(title: str) -> int:
    """One of them."""
    found = processes_named(title)
    assert found, f"no {title} runs below this process"
    return found[0]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return b""
