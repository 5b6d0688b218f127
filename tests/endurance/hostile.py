"""Gives hostile answers to graders and hostile programs to the sandbox; the exit code is 1 if one does harm.

    python tests/endurance/hostile.py answers --count 10000 --seed 1    # try to hang, crash or fill a grader
    python tests/endurance/hostile.py programs                          # try to leave their sandbox
    python tests/endurance/hostile.py throughput --count 1000           # ordinary, graded as in a run

Every grader gets all answers as in a run: in two worker processes with a run's deadline, or, if it can't
hang, in this process. No grade may be missing or late, and no process left. No program of
`tests.support.hostile_programs` may read or reach anything outside of its sandbox, outlive its deadline,
leave a process, take more memory than its limit, or earn a reward.
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
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import treetune.parts  # noqa: E402, F401  (registers them)
from tests.support.hostile_programs import (  # noqa: E402
    FORGED_GOLDS,
    ORDINARY,
    HostileProgram,
    Trap,
    hostile_programs,
)
from treetune.domains.graders.code import Code  # noqa: E402
from treetune.domains.sandbox.base import ProgramLimits, ProgramOutcome  # noqa: E402
from treetune.domains.sandbox.bubblewrap import Bubblewrap, uids_of_programs  # noqa: E402
from treetune.domains.sandbox.program import find_descendants, measure_usage  # noqa: E402
from treetune.tasks.graders.base import Grader  # noqa: E402
from treetune.tasks.graders.conformance import hostile_answers  # noqa: E402
from treetune.tasks.graders.pool import GraderPool  # noqa: E402
from treetune.vocabulary import Problem  # noqa: E402

TAGGED, BOXED, FENCED = "<answer>{}</answer>", "\\boxed{{{}}}", "```json\n{}\n```"
GRADERS: dict[str, tuple[str, str | None]] = {
    "math": ("{}", None),
    "minerva": ("{}", None),
    "numeric": ("{}", None),
    "codeio": (FENCED, None),
    "exact_match": (TAGGED, None),
    "f1": (TAGGED, None),
    "grid": (TAGGED, "[[1, 0], [0, 1]]"),
    "multiple_choice": (BOXED, "B"),
    "one_word": (TAGGED, None),
    "ordering": (TAGGED, '["Ann", "Bob", "Eve"]'),
    "table": (BOXED, None),
    "zebra": (TAGGED, '{"header": ["Position", "Name"], "rows": [["1", "Ann"], ["2", "Bob"]]}'),
}
"""For each grader, the form in which it looks for an answer, and the gold; None takes the answer's gold."""

SPARE_S = 2.0
"""The time that a busy machine may need after a deadline to kill everything and to note its end."""

SLACK_MIB = 160
"""The memory that a program may take beyond its limit before the watch sees it, between two looks."""


def table(first: str, rows: Mapping[str, Mapping[str, object]]) -> str:
    columns = list(next(iter(rows.values())))
    lines = [f"| {first} | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    lines += [f"| {name} | {' | '.join(map(str, row.values()))} |" for name, row in rows.items()]
    return "\n".join(lines)


def try_answers(options: argparse.Namespace) -> list[str]:
    """Grades hostile answers with each grader, prints a table, and returns the faults."""
    rows, faults = {}, list[str]()
    for name in options.grader or GRADERS:
        form, gold_of_grader = GRADERS[name]
        pairs = []
        for number, (response, gold) in enumerate(hostile_answers(options.seed, options.count or 10_000)):
            problem = Problem(id=f"hostile/{number}", prompt="?", gold=gold_of_grader or gold)
            pairs.append((form.format(response), problem))
        workers, most, start = set[int](), 0, time.monotonic()
        grader = Grader.parts_by_name()[name]()
        with GraderPool(grader, workers=options.workers, deadline=options.seconds or 10.0) as pool:
            futures = [pool.submit(*pair) for pair in pairs]
            for number, future in enumerate(futures):
                future.result(timeout=120 + pool.deadline * 10)
                if number % 50 == 0:
                    for child in psutil.Process().children():
                        workers.add(child.pid)
                        most = max(most, child.memory_info().rss if child.is_running() else 0)
        grades = [future.result() for future in futures]
        outcomes = Counter(grade.outcome for grade in grades)
        rows[name] = {
            "answers": len(grades),
            "right": sum(grade.correct for grade in grades),
            "ok": outcomes["ok"],
            "no answer": outcomes["no_answer"],
            "error": outcomes["error"],
            "timeout": outcomes["timeout"],
            "seconds": f"{time.monotonic() - start:.0f}",
            "slowest, s": f"{max(grade.seconds for grade in grades):.2f}",
            "most MiB": most >> 20,
        }  # fmt: skip
        for grade, (response, problem) in zip(grades, pairs):
            if grade.outcome == "timeout" or (
                grade.outcome == "error" and "not " not in (grade.message or "")
            ):
                print(grade.outcome, grade.message, repr(response[:80]), repr(problem.gold), file=sys.stderr)
            if grade.seconds > pool.deadline + SPARE_S:
                faults.append(f"{name}: {grade.seconds:.1f} s for {response[:80]!r}")
        faults += [f"{name}: the process {pid} is left" for pid in workers if psutil.pid_exists(pid)]
    print(table("grader", rows))
    return faults


class Result(NamedTuple):
    """What became of a hostile program in the sandbox."""

    program: HostileProgram
    outcome: ProgramOutcome
    seconds: float
    faults: Sequence[str]


def try_programs(options: argparse.Namespace) -> list[str]:
    """Runs hostile programs in the sandbox, prints a table, and returns the faults."""
    tried, seconds = hostile_programs(options.seed, options.count), options.seconds or 3.0
    sandbox = Bubblewrap()
    limits = ProgramLimits(seconds=seconds, memory_mib=256, disk_mib=16, output_kib=256)
    peak, ended = 0, threading.Event()

    def watch_memory() -> None:
        nonlocal peak
        while not ended.wait(0.01):
            peak = max(peak, measure_usage(find_descendants(os.getpid())).memory >> 20)

    def run(program: HostileProgram) -> Result:
        start = time.monotonic()
        outcome = sandbox.run(trap.code(program), stdin="in\n", limits=limits)
        took = time.monotonic() - start
        late = [f"it took {took:.1f} s"] if took > seconds + SPARE_S else []
        return Result(program, outcome, took, [*trap.faults(outcome.stdout + outcome.stderr), *late])

    with tempfile.TemporaryDirectory() as folder, Trap(Path(folder)).set() as trap:
        watching = threading.Thread(target=watch_memory)
        watching.start()
        with ThreadPoolExecutor(options.workers) as threads:
            results = list(threads.map(run, tried))
        ended.set()
        watching.join()
        users = uids_of_programs()
        left = [str(pid) for pid in find_descendants(os.getpid())]
        for process in psutil.process_iter(["uids"]):
            if process.info["uids"] and process.info["uids"].effective in users:
                left.append(str(process.pid))
    faults = []
    for result in results:
        name = f"{result.program.kind}, {result.program.name}"
        faults += [f"{name}: {fault}" for fault in result.faults]
    faults += [f"a process is left: {pid}" for pid in left]
    if peak > options.workers * (limits.memory_mib + SLACK_MIB):
        faults.append(f"{options.workers} programs at a time took {peak} MiB")
    faults += try_forgeries([program for program in tried if program.kind == "forging"], seconds)
    rows = {}
    for kind in [*sorted({result.program.kind for result in results}), "all"]:
        of_kind = [result for result in results if kind in (result.program.kind, "all")]
        killed_by = Counter(result.outcome.killed_by for result in of_kind)
        rows[kind] = {
            "programs": len(of_kind),
            "ended": killed_by[None],
            **{limit: killed_by[limit] for limit in ("time", "memory", "output", "processes")},
            "faults": sum(len(result.faults) for result in of_kind),
            "longest, s": f"{max(result.seconds for result in of_kind):.2f}",
        }
    print(table("kind of attack", rows))
    print(f"\n{options.workers} at a time, with {limits} each. Most memory at a time: {peak} MiB.")
    return faults


def try_forgeries(programs: Sequence[HostileProgram], seconds: float) -> list[str]:
    """Grades programs that forge a verdict, and returns those that earn a reward as faults."""
    grader = Code(test_seconds=seconds / 2, limits=ProgramLimits(seconds=seconds, memory_mib=256))
    problems = [Problem(id=f"forged/{n}", prompt="?", gold=gold) for n, gold in enumerate(FORGED_GOLDS)]
    pairs = []
    for program in programs:
        pairs += [(f"```python\n{program.code}\n```", problem) for problem in problems]
    with GraderPool(grader, workers=2, deadline=60) as pool:
        grades = pool.grade_many(pairs)
    print(f"{len(pairs)} attempts at a verdict: {sum(grade.correct for grade in grades)} believed\n")
    faults = []
    for (response, problem), grade in zip(pairs, grades):
        if grade.reward > 0 or grade.outcome in ("error", "unavailable"):
            faults.append(f"forging: {response[:200]!r} earned {grade.reward} at {problem.gold}")
    return faults


def measure_throughput(options: argparse.Namespace) -> list[str]:
    """Grades ordinary programs as a run does, prints how many a minute, and returns the wrong grades."""
    count, pairs = options.count or 1000, []
    for number in range(count):
        ordinary = ORDINARY[number % len(ORDINARY)]
        code, gold = ordinary["code"], {"inputs": ordinary["inputs"], "outputs": ordinary["outputs"]}
        if number // len(ORDINARY) % 2:
            code = f"def f(n):\n    return sum(i * i for i in range(n + {number}))"
            sums = [sum(i * i for i in range(n + number)) for n in range(3)]
            gold = {"functional": "\n".join(f"assert f({n}) == {right}" for n, right in enumerate(sums))}
        # The number makes every answer different, as equal answers are graded only once.
        response = f"<think>…</think>\n```python\n# {number}\n{code}\n```"
        pairs.append((response, Problem(id=f"ordinary/{number}", prompt="?", gold=json.dumps(gold))))
    with GraderPool(Code(), workers=options.workers, deadline=60) as pool:
        # A few answers first, so that the workers have started.
        pool.grade_many([(response + " ", problem) for response, problem in pairs[:4]])
        load, start = os.getloadavg()[0], time.monotonic()
        grades = pool.grade_many(pairs)
        seconds = time.monotonic() - start
    right = sum(grade.correct for grade in grades)

    def processor_seconds() -> float:
        of_this_process = resource.getrusage(resource.RUSAGE_SELF)
        of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return sum(usage.ru_utime + usage.ru_stime for usage in (of_this_process, of_children))

    before, some = processor_seconds(), pairs[: max(count // 10, 1)]
    for response, problem in some:
        Code().grade(response, problem)
    print(
        f"{count} ordinary programs with 3 tests each, {options.workers} at a time on {os.cpu_count()} cores"
        f" (load before: {load:.1f}): {seconds:.1f} s, {60 * count / seconds:.0f} in a minute, {right} right;"
        f" {1000 * (processor_seconds() - before) / len(some):.0f} ms of processor time each"
    )
    return [] if right == count else [f"{count - right} are graded as wrong"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["answers", "programs", "throughput"])
    parser.add_argument("--count", type=int, help="answers (10000), programs (all hostile, 1000 ordinary)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="deadline of an answer (10) or a hostile program (3)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--grader", action="append", choices=GRADERS, help="of answers; default: all of them")
    options = parser.parse_args(arguments)
    if options.what != "answers" and (missing := Bubblewrap().missing()):
        parser.exit(1, "\n".join(missing))
    functions = {"answers": try_answers, "programs": try_programs, "throughput": measure_throughput}
    faults = functions[options.what](options)
    print(f"\n{len(faults)} faults", *faults, sep="\n* ")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
