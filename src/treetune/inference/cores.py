"""How many servers fill a machine's cores, where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

MOST = 8
"""Beyond this, servers get more threads instead."""
SHARE = 1 / 2
"""Of the machine's memory, for servers."""
SERVER_GIB = 3
"""Of a server of a small model, beside its cache."""

THREADS = "OMP_NUM_THREADS"
GIB = 2**30


def servers_that_fill(
    threads: int, cache_gib: int, environment: Mapping[str, str] = os.environ, *, memory: int | None = None
) -> int:
    """One of so many threads for every core that this run may use, and for which there is memory; at least
    one, and one alone beside several ranks, which compute on the same cores and may be on unlike machines.

    A run may use the cores that it is bound to, or as many as OMP_NUM_THREADS says: whoever runs several at
    once shares the cores out with it. `memory` is in bytes, by default what the machine has.
    """
    if int(environment.get("WORLD_SIZE") or 1) > 1:
        return 1
    cores = len(os.sched_getaffinity(0))
    said = environment.get(THREADS, "").partition(",")[0]
    if said.isdecimal() and int(said):
        cores = min(cores, int(said))
    whole = host_memory() if memory is None else memory
    room = int(SHARE * whole / ((SERVER_GIB + cache_gib) * GIB))
    return max(1, min(cores // threads, room, MOST))


def host_memory() -> int:
    """Bytes that this process may use: the machine's, or less where a control group has a limit."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            return min(whole, int(text))
    return whole
