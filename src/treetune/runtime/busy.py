"""How threads wait for each other, beside others who compute on the machine when a run begins."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

from treetune.processes.lifetime import launcher_processes, process_fields

BUSY = 0.25
"""Of the cores, kept at work by others: from there on threads that wait for each other are held up."""
LOOKED_FOR_S = 0.3

TIMES = slice(11, 15)
"""Among a process's fields, its ticks for itself and the system, and those of children that have ended."""

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


def _ticks_of_cores() -> int:
    """Of work on this process's cores since the machine started: for users, nice ones, the system."""
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    return sum(int(number) for name, *numbers in rows if name in mine for number in numbers[:3])


def _ticks_of_the_run() -> int:
    """Of that, what this run's processes did, with children of theirs that have ended."""
    mine, ticks = os.sched_getaffinity(0), 0
    for pid in processes_below(root_of_the_run()):
        try:
            shares_cores = bool(mine & os.sched_getaffinity(pid))
        except OSError:  # it has just ended
            continue
        if shares_cores:
            ticks += sum(int(number) for number in process_fields(pid)[TIMES])
    return ticks


def root_of_the_run(environment: Mapping[str, str] = os.environ) -> int:
    """The process above all ranks on this machine: the launcher, or this one where there is none."""
    if launcher := launcher_processes():
        return launcher[-1].pid
    return os.getppid() if "LOCAL_RANK" in environment else os.getpid()


def processes_below(root: int) -> set[int]:
    """The process and all that it and its children started, as far as their parents are there."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := process_fields(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found, new = {root}, {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found


def cores_at_work_for_others(
    everyone: Callable[[], int] = _ticks_of_cores,
    own: Callable[[], int] = _ticks_of_the_run,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Of the cores that this process may use, on average over a moment, by /proc, without what this run's
    processes do; 0 where nobody tells."""
    try:
        before, start = everyone() - own(), clock()
        time.sleep(LOOKED_FOR_S)
        after, taken = everyone() - own(), clock() - start
    except OSError:
        return 0.0
    return max(0.0, (after - before) / os.sysconf("SC_CLK_TCK") / taken)
