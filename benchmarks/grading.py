"""Measures graders by labelled answers: how many wrong ones they accept, how many right ones they reject.

    .venv/bin/python benchmarks/grading.py --write
    .venv/bin/python benchmarks/grading.py --grader math --show

Labelled answers of a grader are the cases of tests.support.grader_cases, which every grader has, and the
rows of tests/domains/labelled/<grader>.jsonl, where there is such a file: `response`, `gold`, `label`
(whether the answer is correct) and `data`, of which `prompt` is the question and `part` says what the row was
for (``tuned``: the grader was mended by it; ``unseen``: it was not). Rows without a part are ``labelled``.

Each answer is graded as in a run, in worker processes or threads. --write puts the table into
docs/results/grading.md; --show prints the answers that were judged otherwise than labelled.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

PAGE = ROOT / "docs/results/grading.md"
ROWS = ROOT / "tests/domains/labelled"
BEGIN, END = "<!-- benchmarks/grading.py: begin -->\n", "<!-- benchmarks/grading.py: end -->\n"
SAME_ROWS = {"minerva": "math"}
"""Graders that are measured by another one's rows as well: presets, whose mistakes these count."""

HEAD = (
    "| grader | answers | right | wrong | accepts wrong | rejects right | not judged |\n"
    "|---|---|---:|---:|---:|---:|---:|\n"
)


@dataclass(frozen=True)
class Row:
    """A labelled answer; `part` says what it was for."""

    response: str
    gold: str
    data: dict[str, object]
    label: bool
    part: str


@dataclass
class Count:
    """Of one grader and part."""

    right: int = 0
    wrong: int = 0
    accepted: int = 0
    rejected: int = 0
    unavailable: int = 0

    def line(self, grader: str, part: str) -> str:
        return (
            f"| `{grader}` | {part} | {self.right} | {self.wrong} | {_share(self.accepted, self.wrong)} "
            f"| {_share(self.rejected, self.right)} | {self.unavailable or ''} |"
        )


def _share(count: int, of: int) -> str:
    return f"{count} ({100 * count / of:.2f} %)" if count else "0"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grader", action="append", help="by its registered name; default: all of them")
    parser.add_argument("--part", action="append", help="default: all of them")
    parser.add_argument("--show", action="store_true", help="print what was judged otherwise than labelled")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    if options.write and (options.grader or options.part):
        parser.error("--write needs all graders and parts: the table has a line for each")
    lines = list(_lines(options))
    print(HEAD + "\n".join(lines))
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(before + BEGIN + HEAD + "\n".join(lines) + "\n" + END + after)
    return 0


def _lines(options: argparse.Namespace) -> Iterator[str]:
    import treetune.parts  # noqa: F401
    from tests.support.grader_cases import ELSEWHERE, LABELLED

    for name in sorted(options.grader or {*LABELLED, *ELSEWHERE}):
        if name in ELSEWHERE:
            yield f"| `{name}` | in `{ELSEWHERE[name]}` |  |  |  |  |  |"
            continue
        start = time.monotonic()
        rows = [row for row in labelled(name) if not options.part or row.part in options.part]
        for part, count in measured(name, rows, show=options.show).items():
            yield count.line(name, part)
        print(f"{name}: {len(rows)} answers in {time.monotonic() - start:.0f} s", file=sys.stderr)


def labelled(name: str) -> list[Row]:
    """All labelled answers of a grader."""
    from tests.support.grader_cases import LABELLED

    rows = [
        Row(response, case.problem.gold, {**case.problem.data, "prompt": case.problem.prompt}, label, "cases")
        for case in LABELLED[name].cases
        for label, responses in ((True, case.right), (False, (*case.wrong, *case.nearly, *case.silent)))
        for response in responses
    ]
    for stem in (name, SAME_ROWS.get(name)):
        path = ROWS / f"{stem}.jsonl"
        if stem is None or not path.is_file():
            continue
        for line in path.read_text().splitlines():
            row = json.loads(line)
            part = str(row["data"].get("part", "labelled"))
            rows.append(Row(row["response"], row["gold"], row["data"], row["label"], part))
    return rows


def measured(name: str, rows: Sequence[Row], *, show: bool = False) -> dict[str, Count]:
    """Counts by part, in the order in which the parts come."""
    from tests.support.grader_cases import LABELLED
    from treetune.tasks.graders.pool import GraderPool
    from treetune.vocabulary import Problem

    counts: dict[str, Count] = {}
    with GraderPool(LABELLED[name].grader, deadline=20.0) as pool:
        futures = [
            pool.submit(
                row.response,
                Problem(f"labelled/{number}", str(row.data.get("prompt", "?")), row.gold, row.data),
            )
            for number, row in enumerate(rows)
        ]
        for row, future in zip(rows, futures):
            grade = future.result()
            count = counts.setdefault(row.part, Count())
            count.right += row.label
            count.wrong += not row.label
            if not grade.is_known:
                count.unavailable += 1
            elif grade.correct is not row.label:
                count.rejected += row.label
                count.accepted += not row.label
                if show:
                    what = "rejects right" if row.label else "accepts wrong"
                    print(f"{name} {what}: {row.response!r} to {row.gold!r} ({grade.outcome})")
    return counts


if __name__ == "__main__":
    raise SystemExit(main())
