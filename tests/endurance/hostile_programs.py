"""Runs programs that are made to leave their sandbox, and says how it went.

    .venv/bin/python tests/endurance/hostile_programs.py
    .venv/bin/python tests/endurance/hostile_programs.py throughput --count 1000

The first runs all of `tests.support.hostile_programs`, two at a time, and ends with exit code 1 if one got
what it should not, outlived its deadline, left a process, or earned a reward. `throughput` grades ordinary
programs as a run does, in two worker processes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.support.hostile_programs import (  # noqa: E402
    FORGED_GOLDS,
    HostileProgram,
    Trap,
    hostile_programs,
)
from treetune.tasks.graders.pool import GraderPool  # noqa: E402
from treetune.vocabulary import Problem  # noqa: E402
from treetune_domains.graders.code import Code  # noqa: E402
from treetune_domains.sandbox.base import Limits, Outcome  # noqa: E402
from treetune_domains.sandbox.bubblewrap import Bubblewrap, uids_of_programs  # noqa: E402
from treetune_domains.sandbox.program import descendants, usage_of  # noqa: E402

SPARE_S = 2.0
"""What a busy machine may add to a deadline until everything is killed and its end noted."""

SLACK_MIB = 160
"""By how much a program may pass the limit of memory before it is seen: what is written in two looks."""


@dataclass(frozen=True)
class Result:
    program: HostileProgram
    outcome: Outcome
    seconds: float
    faults: Sequence[str]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["hostile", "throughput"], default="hostile")
    parser.add_argument("--count", type=int, help="programs (default: all that are hostile; 1000 ordinary)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="deadline of a hostile program (default 3)"
    )
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    for what in Bubblewrap().missing():
        print(what, file=sys.stderr)
        return 1
    if options.what == "throughput":
        return _throughput(options.count or 1000, options.workers)
    return _hostile(hostile_programs(options.seed, options.count), options.seconds, options.workers)


def _hostile(programs: Sequence[HostileProgram], seconds: float, workers: int) -> int:
    sandbox = Bubblewrap()
    limits = Limits(seconds=seconds, memory_mib=256, disk_mib=16, output_kib=256)
    with tempfile.TemporaryDirectory() as folder, Trap(Path(folder)).set() as trap, _Memory() as memory:

        def run(program: HostileProgram) -> Result:
            start = time.monotonic()
            outcome = sandbox.run(trap.code(program), stdin="in\n", limits=limits)
            took = time.monotonic() - start
            faults = trap.faults(outcome.stdout + outcome.stderr)
            if took > seconds + SPARE_S:
                faults.append(f"it took {took:.1f} s")
            return Result(program, outcome, took, faults)

        with ThreadPoolExecutor(workers) as threads:
            results = list(threads.map(run, programs))
        left = _left_processes()
    faults = [f"{one.program.kind}, {one.program.name}: {fault}" for one in results for fault in one.faults]
    faults += [f"a process is left: {one}" for one in left]
    if memory.peak > workers * (limits.memory_mib + SLACK_MIB):
        faults.append(f"{workers} programs at a time took {memory.peak} MiB")
    forged = _forged([one for one in programs if one.kind == "forging"], seconds)
    faults += forged
    _print_table(results)
    print(
        f"\n{len(results)} programs, {workers} at a time, with {seconds:g} s, {limits.memory_mib} MiB, "
        f"{limits.processes} processes, {limits.disk_mib} MiB of disk and {limits.output_kib} KiB of output "
        f"each: {len(faults)} faults, {len(left)} processes left. Most memory at a time: {memory.peak} MiB."
    )
    for fault in faults:
        print(f"* {fault}")
    return 1 if faults else 0


def _print_table(results: Sequence[Result]) -> None:
    kinds: dict[str, list[Result]] = defaultdict(list)
    for one in results:
        kinds[one.program.kind].append(one)
    columns = ["programs", "ended", "time", "memory", "output", "processes", "faults", "longest, s"]
    print("| they are after | " + " | ".join(columns) + " |\n|---|" + "---:|" * len(columns))
    for kind, ones in [*sorted(kinds.items()), ("all", list(results))]:
        ends = Counter(one.outcome.killed_by for one in ones)
        faults = sum(len(one.faults) for one in ones)
        cells = [
            len(ones),
            ends[None],
            ends["time"],
            ends["memory"],
            ends["output"],
            ends["processes"],
            faults,
        ]
        print(f"| {kind} | " + " | ".join(map(str, cells)) + f" | {max(one.seconds for one in ones):.2f} |")


def _forged(programs: Sequence[HostileProgram], seconds: float) -> list[str]:
    """Programs that earn a reward that they should not."""
    grader = Code(test_seconds=seconds / 2, limits=Limits(seconds=seconds, memory_mib=256))
    problems = [Problem(id=f"forged/{n}", prompt="?", gold=gold) for n, gold in enumerate(FORGED_GOLDS)]
    pairs = [(f"```python\n{one.code}\n```", problem) for one in programs for problem in problems]
    with GraderPool(grader, workers=2, deadline=60) as pool:
        grades = pool.grade_many(pairs)
    print(f"{len(pairs)} attempts at a verdict: {sum(grade.correct for grade in grades)} believed\n")
    return [
        f"forging: {response[:200]!r} earned {grade.reward} at {problem.gold}"
        for (response, problem), grade in zip(pairs, grades)
        if grade.reward > 0 or grade.outcome in ("error", "unavailable")
    ]


def _left_processes() -> list[str]:
    """Processes of programs that are still there: of the users that they ran as, and our own children."""
    found = [f"{pid}" for pid in descendants(os.getpid())]
    users = uids_of_programs()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid in users:
                    found.append(entry.name)
            except OSError:
                continue
    return found


class _Memory:
    """The most MiB that all programs took at a time, looked at every 10 ms."""

    def __init__(self) -> None:
        self.peak = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(0.01):
            self.peak = max(self.peak, usage_of(descendants(os.getpid())).memory >> 20)


ORDINARY = (
    ("a, b = map(int, input().split())\nprint(a + b)", [("1 2", "3"), ("10 -3", "7"), ("0 0", "0")]),
    (
        "import sys\ndata = list(map(int, sys.stdin.read().split()))\nprint(max(data[1:]), min(data[1:]))",
        [("3\n1 2 3", "3 1"), ("1\n5", "5 5"), ("4\n-1 7 7 0", "7 -1")],
    ),
    (
        "from collections import Counter\ns = input().strip()\n"
        "print(''.join(c for c, _ in sorted(Counter(s).items(), key=lambda p: (-p[1], p[0]))))",
        [("hello", "leho"), ("aabb", "ab"), ("zyx", "xyz")],
    ),
    (
        "import heapq\nn = int(input())\nedges = {}\nfor _ in range(n):\n    a, b, w = input().split()\n"
        "    edges.setdefault(a, []).append((b, int(w)))\n    edges.setdefault(b, []).append((a, int(w)))\n"
        "best = {}\nheap = [(0, 'A')]\nwhile heap:\n    d, at = heapq.heappop(heap)\n    if at in best: "
        "continue\n"
        "    best[at] = d\n    for to, w in edges.get(at, []): heapq.heappush(heap, (d + w, to))\n"
        "print(best['Z'])",
        [("2\nA B 1\nB Z 2", "3"), ("3\nA B 5\nA Z 9\nB Z 1", "6"), ("1\nA Z 4", "4")],
    ),
    (
        "from functools import lru_cache\na, b = input(), input()\n@lru_cache(None)\ndef f(i, j):\n"
        "    if i == len(a) or j == len(b): return 0\n"
        "    return 1 + f(i + 1, j + 1) if a[i] == b[j] else max(f(i + 1, j), f(i, j + 1))\nprint(f(0, 0))",
        [("abcde\nace", "3"), ("abc\nxyz", "0"), ("a" * 60 + "\n" + "a" * 60, "60")],
    ),
    (
        "n = int(input())\nsieve = [True] * (n + 1)\nfor p in range(2, int(n ** 0.5) + 1):\n"
        "    if sieve[p]:\n        for q in range(p * p, n + 1, p): sieve[q] = False\nprint(sum(sieve[2:]))",
        [("10", "4"), ("100", "25"), ("100000", "9592")],
    ),
)


def _throughput(count: int, workers: int) -> int:
    pairs = []
    for number in range(count):
        code, tests = ORDINARY[number % len(ORDINARY)]
        kind = number // len(ORDINARY) % 2
        inputs, outputs = zip(*tests)
        gold: dict[str, object] = {"inputs": inputs, "outputs": outputs}
        if kind:
            code, gold = (
                f"def f(n):\n    return sum(i * i for i in range(n + {number}))",
                {
                    "functional": "\n".join(
                        f"assert f({n}) == {sum(i * i for i in range(n + number))}" for n in range(3)
                    )
                },
            )
        # No two are the same: equal answers are graded once.
        response = f"<think>…</think>\n```python\n# {number}\n{code}\n```"
        pairs.append((response, Problem(id=f"ordinary/{number}", prompt="?", gold=json.dumps(gold))))
    with GraderPool(Code(), workers=workers, deadline=60) as pool:
        pool.grade_many([(response + " ", problem) for response, problem in pairs[:4]])  # the workers are up
        load, start = os.getloadavg()[0], time.monotonic()
        grades = pool.grade_many(pairs)
        seconds = time.monotonic() - start
    right = sum(grade.correct for grade in grades)
    print(
        f"{count} ordinary programs with 3 tests each, {workers} at a time on {os.cpu_count()} cores (load "
        f"before: {load:.1f}): {seconds:.1f} s, {60 * count / seconds:.0f} in a minute, {right} right; "
        f"{_cpu_ms(pairs[: count // 10]):.0f} ms of processor time each"
    )
    return 0 if right == count else 1


def _cpu_ms(pairs: Sequence[tuple[str, Problem]]) -> float:
    """Processor time of one program, ours and its own, whatever else this machine does."""

    def used() -> float:
        whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        return sum(one.ru_utime + one.ru_stime for one in map(resource.getrusage, whose))

    before = used()
    for response, problem in pairs:
        Code().grade(response, problem)
    return 1000 * (used() - before) / len(pairs)


if __name__ == "__main__":
    sys.exit(main())
