"""How threads wait for each other, beside others who compute on the machine when a run begins."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

BUSY = 0.25
"""Of the cores, kept at work by others: from there on threads that wait for each other are held up."""
LOOKED_FOR_S = 0.3

WAIT_POLICY = "OMP_WAIT_POLICY"


def heed_others(others: float, cores: int, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Where other processes keep so many of the cores at work, has OpenMP's threads sleep while they wait, in
    this process and its children, and gives what to say about it; None where they hardly do.

    It has to be called before PyTorch is imported, which reads it once. It changes no sum. Somebody's own
    choice is left.
    """
    if others <= BUSY * cores:
        return None
    environment.setdefault(WAIT_POLICY, "PASSIVE")
    return (
        f"this machine is busy: others keep {others:.1f} of {cores} cores at work, and all takes longer."
        f" {WAIT_POLICY} is {environment[WAIT_POLICY]}: threads that spin while they wait would make it"
        " several times longer. Fewer threads are another way (OMP_NUM_THREADS, engines.policy.omp_threads),"
        " which rounds otherwise"
    )


def look_around() -> None:
    """Heeds others on this machine; the first rank says so."""
    said = heed_others(cores_at_work_for_others(), len(os.sched_getaffinity(0)))
    if said is not None and os.environ.get("RANK", "0") == "0":
        print(f"note: {said}", file=sys.stderr)


def cores_at_work_for_others() -> float:
    """On average over a moment, by /proc/stat, without this process; 0 where nobody tells."""
    try:
        before, own, start = _ticks(), time.process_time(), time.monotonic()
        time.sleep(LOOKED_FOR_S)
        after, taken = _ticks(), time.monotonic() - start
    except OSError:
        return 0.0
    everyone = (after - before) / os.sysconf("SC_CLK_TCK")
    return max(0.0, (everyone - (time.process_time() - own)) / taken)


def _ticks() -> int:
    """That all cores have worked since the machine started: for users, nice ones, the system."""
    with Path("/proc/stat").open() as file:
        return sum(int(number) for number in file.readline().split()[1:4])
