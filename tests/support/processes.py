"""Processes below this one."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from treetune.engine.guard import find_descendants


def processes_named(title: str) -> list[int]:
    """The processes below this one whose command line begins with `title`."""
    wanted = title.encode()
    return [pid for pid in find_descendants(os.getpid()) if _command_line(pid).startswith(wanted)]


def engine_core_of(url: str) -> int:
    """The engine process of the server at an address. This process may have started other servers, too."""
    port = str(urlsplit(url).port).encode()
    for pid in processes_named("VLLM::EngineCore"):
        if any(port in _command_line(parent.pid).split(b"\0") for parent in psutil.Process(pid).parents()):
            return pid
    raise AssertionError(f"no engine process of {url} runs below this process")


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return b""
