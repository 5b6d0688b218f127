"""Grades every `math` case of JSON-lines files and prints those that come out otherwise than expected.

    .venv/bin/python benchmarks/grading_cases.py FILE.jsonl [MORE.jsonl]

A case is a line with `id`, `call` (cases whose call names another grader are left out), `input` (`gold`,
`response` and perhaps `prompt`) and `expected`: ``reward >= 1`` or ``reward < 1``. The grader is the one that
Python imports, so that PYTHONPATH chooses between two checkouts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

RIGHT = "reward >= 1"


class GradingCase(NamedTuple):
    """One line of a file of cases."""

    id: str
    kind: str
    gold: str
    response: str
    prompt: str
    is_right: bool


def read_cases(path: Path) -> Iterator[GradingCase]:
    """Yields the cases of a file that are for the grader `math`."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        is_for_math = "grader {type: 'math'}" in row["call"]
        if not is_for_math or "response" not in row["input"]:
            continue
        yield GradingCase(
            id=row["id"],
            kind=row["kind"],
            gold=row["input"]["gold"],
            response=row["input"]["response"],
            prompt=row["input"].get("prompt", "?"),
            is_right=row["expected"] == RIGHT,
        )


def main(paths: Sequence[str]) -> int:
    from treetune.domains.graders.math import MathGrader
    from treetune.tasks.graders.pool import GraderPool
    from treetune.vocabulary import Problem

    differing = 0
    with GraderPool(MathGrader(), deadline=20.0) as pool:
        for path in paths:
            grading_cases = list(read_cases(Path(path)))
            futures = [
                pool.submit(case.response, Problem(case.id, case.prompt, case.gold)) for case in grading_cases
            ]
            for case, future in zip(grading_cases, futures):
                grade = future.result()
                if grade.correct is case.is_right:
                    continue
                differing += 1
                label = "right" if case.is_right else "wrong"
                print(f"{case.id} ({case.kind}): {case.response!r} to {case.gold!r} is {label},"
                      f" graded {grade.reward} ({grade.outcome}) {grade.message or ''}")  # fmt: skip
            print(f"{path}: {len(grading_cases)} cases, {differing} differ so far")
    return int(differing > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
