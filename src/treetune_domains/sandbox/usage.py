"""What the processes of a sandbox use together, read from outside through /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")
_COUNTED = (b"RssAnon:", b"RssShmem:", b"VmSwap:")


@dataclass(frozen=True)
class Usage:
    """Bytes of memory, tasks (processes and threads), seconds of processor time."""

    memory: int
    tasks: int
    cpu_seconds: float


def usage_of(pids: Iterable[int]) -> Usage:
    """Of all these processes together; one that has ended is left out.

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
    return Usage(memory, tasks, seconds)


def descendants(root: int) -> list[int]:
    """Processes that `root` or one of its descendants started, in no order. Needs /proc/…/children."""
    found: list[int] = []
    seen = {root}
    waiting = [root]
    while waiting:
        for child in _children(waiting.pop()):
            if child not in seen:
                seen.add(child)
                found.append(child)
                waiting.append(child)
    return found


def _children(pid: int) -> list[int]:
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += [int(child) for child in file.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has ended: what it had started belongs to another by now
    return found
