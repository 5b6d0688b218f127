"""Processes below this one."""

from __future__ import annotations

import os
from pathlib import Path

from treetune.inference.guard import descendants


def process_named(title: str) -> int:
    """The process below this one whose command line begins with `title`."""
    for pid in descendants(os.getpid()):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode()):
            return pid
    raise AssertionError(f"no {title} runs below this process")
