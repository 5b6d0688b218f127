"""Grades answers that are made to hang, crash or fill a grader, and says how it went.

    .venv/bin/python tests/endurance/hostile_answers.py --count 10000 --seed 1

Every grader gets all of them where a run calls it: in two worker processes with the deadline that a run has,
or, what can't hang, in this one. Ends with exit code 1 if a grade is missing, a grade took longer than the
deadline allows, or a process is left.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

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
"""How an answer is put before each grader, so that it looks into it, and the gold; None: the answer's own."""

SPARE_S = 2.0
"""What a busy machine may add to a deadline until the worker is killed and its end noted."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds per answer (default 10)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--grader", action="append", choices=GRADERS, help="default: all of them")
    options = parser.parse_args(arguments)
    columns = ["answers", "right", "ok", "no answer", "error", "timeout", "seconds", "slowest, s", "most MiB"]
    print("| grader | " + " | ".join(columns) + " |\n|---|" + "---:|" * len(columns))
    return max(_measure(name, options) for name in options.grader or GRADERS)


def _measure(name: str, options: argparse.Namespace) -> int:
    import psutil

    import treetune.parts  # noqa: F401
    from treetune.tasks.graders.base import Grader
    from treetune.tasks.graders.conformance import hostile_answers
    from treetune.tasks.graders.pool import GraderPool
    from treetune.vocabulary import Problem

    written, own = GRADERS[name]
    pairs = [
        (written.format(response), Problem(id=f"hostile/{number}", prompt="?", gold=own or gold))
        for number, (response, gold) in enumerate(hostile_answers(options.seed, options.count))
    ]
    most = 0
    workers: set[int] = set()
    start = time.monotonic()
    with GraderPool(Grader.registered()[name](), workers=options.workers, deadline=options.deadline) as pool:
        futures = [pool.submit(*pair) for pair in pairs]
        for number, future in enumerate(futures):
            future.result(timeout=120 + options.deadline * 10)
            if number % 50 == 0:
                for child in psutil.Process().children():
                    workers.add(child.pid)
                    with_memory = child.memory_info().rss if child.is_running() else 0
                    most = max(most, with_memory)
    seconds = time.monotonic() - start
    grades = [future.result() for future in futures]
    outcomes = Counter(grade.outcome for grade in grades)
    slowest = max(grade.seconds for grade in grades)
    left = [pid for pid in workers if psutil.pid_exists(pid)]
    print(
        f"| {name} | {len(grades)} | {sum(grade.correct for grade in grades)} | {outcomes['ok']} "
        f"| {outcomes['no_answer']} | {outcomes['error']} | {outcomes['timeout']} | {seconds:.0f} "
        f"| {slowest:.2f} | {most / 2**20:.0f} |",
        flush=True,
    )
    for grade, (response, problem) in zip(grades, pairs):
        if grade.outcome == "timeout" or (grade.outcome == "error" and "not " not in (grade.message or "")):
            print(
                f"{grade.outcome}: {grade.message}: {response[:80]!r} against {problem.gold!r}",
                file=sys.stderr,
            )
    bad = bool(left) or slowest > options.deadline + SPARE_S
    if left:
        print(f"{name}: processes left: {left}", file=sys.stderr)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
