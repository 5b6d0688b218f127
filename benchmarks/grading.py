"""Measures graders on labelled answers: how many wrong ones they accept, how many right ones they reject.

    .venv/bin/python benchmarks/grading.py --write
    .venv/bin/python benchmarks/grading.py --grader math --show

Each grader has labelled answers in the cases of tests.support.grader_cases. Some have more in
tests/domains/graders/labelled/<grader>.jsonl. A row of such a file has `response`, `gold`, `label` (whether
the answer is correct) and `data`, of which `prompt` is the question and `part` the use of the row: ``tuned``
if the grader was improved with it, ``unseen`` if it was not. Rows without a part belong to the part
``labelled``.

Each answer is graded as in a run, in worker processes or threads. --write puts the table into
docs/results/grading.md. --show prints the answers whose verdicts differ from their labels.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

PAGE = ROOT / "docs/results/grading.md"
ROWS = ROOT / "tests/domains/graders/labelled"
BEGIN, END = "<!-- benchmarks/grading.py: begin -->\n", "<!-- benchmarks/grading.py: end -->\n"
"""The lines of the page between which the table stands."""
FILES_OF_OTHERS = {"minerva": "math"}
"""Graders that are also measured on another grader's file."""
CASES, LABELLED_PART = "cases", "labelled"
"""The parts of the cases, and of rows without a part."""
DEADLINE_S = 20.0

HEAD = (
    "| grader | answers | right | wrong | accepts wrong | rejects right | not judged |\n"
    "|---|---|---:|---:|---:|---:|---:|\n"
)


@dataclass(frozen=True)
class LabelledAnswer:
    """An answer, and whether it is correct."""

    response: str
    gold: str
    data: dict[str, object]
    label: bool
    part: str


@dataclass
class Counts:
    """The numbers of answers of one grader and part."""

    right: int = 0
    wrong: int = 0
    accepted_wrong: int = 0
    rejected_right: int = 0
    ungraded: int = 0
    """Answers without a verdict, such as after a time-out."""

    def to_line(self, grader: str, part: str) -> str:
        """Returns the line of the table."""
        cells = [
            f"`{grader}`",
            part,
            str(self.right),
            str(self.wrong),
            number_and_share(self.accepted_wrong, self.wrong),
            number_and_share(self.rejected_right, self.right),
            str(self.ungraded or ""),
        ]
        return f"| {' | '.join(cells)} |"


def number_and_share(count: int, total: int) -> str:
    """Returns a text such as ``3 (0.61 %)``."""
    return f"{count} ({100 * count / total:.2f} %)" if count else "0"


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
    from tests.support.grader_cases import ELSEWHERE, LABELLED

    graders = {*LABELLED, *ELSEWHERE}
    for name in options.grader or ():
        if name not in graders:
            parser.error(f"--grader {name} has no labelled answers; these have: {', '.join(sorted(graders))}")
    lines = measure_graders(options.grader, options.part, options.show)
    table = HEAD + "\n".join(lines)
    print(table)
    if options.write:
        before, _, from_table_on = PAGE.read_text().partition(BEGIN)
        _, _, after = from_table_on.partition(END)
        PAGE.write_text(before + BEGIN + table + "\n" + END + after)
    return 0


def measure_graders(names: Sequence[str] | None, parts: Sequence[str] | None, show: bool) -> list[str]:
    """Grades the labelled answers of graders, and returns the lines of the table.

    Args:
        names: The graders; None: all.
        parts: The parts of their answers; None: all.
        show: Whether answers whose verdicts differ from their labels are printed.
    """
    import treetune.parts  # noqa: F401  (registers all graders)
    from tests.support.grader_cases import ELSEWHERE, LABELLED

    lines = []
    for name in sorted(names or {*LABELLED, *ELSEWHERE}):
        if name in ELSEWHERE:  # its answers are in a test file, which the line names
            lines.append(f"| `{name}` | in `{ELSEWHERE[name]}` |  |  |  |  |  |")
            continue
        start = time.monotonic()
        answers = [answer for answer in read_answers(name) if not parts or answer.part in parts]
        for part, counts in count_mistakes(name, answers, show=show).items():
            lines.append(counts.to_line(name, part))
        print(f"{name}: {len(answers)} answers in {time.monotonic() - start:.0f} s", file=sys.stderr)
    return lines


def read_answers(name: str) -> list[LabelledAnswer]:
    """Returns all labelled answers of a grader."""
    from tests.support.grader_cases import LABELLED

    answers = []
    for case in LABELLED[name].cases:
        problem = case.problem
        data = {**problem.data, "prompt": problem.prompt}
        for response in case.right:
            answers.append(LabelledAnswer(response, problem.gold, data, True, CASES))
        for response in (*case.wrong, *case.nearly, *case.silent):
            answers.append(LabelledAnswer(response, problem.gold, data, False, CASES))
    files = [ROWS / f"{name}.jsonl"]
    if name in FILES_OF_OTHERS:
        files.append(ROWS / f"{FILES_OF_OTHERS[name]}.jsonl")
    for file in files:
        if file.is_file():
            answers += read_file(file)
    return answers


def read_file(path: Path) -> list[LabelledAnswer]:
    answers = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        part = str(row["data"].get("part", LABELLED_PART))
        answers.append(LabelledAnswer(row["response"], row["gold"], row["data"], row["label"], part))
    return answers


def count_mistakes(name: str, answers: Sequence[LabelledAnswer], *, show: bool = False) -> dict[str, Counts]:
    """Grades answers. Returns the counts by part, in the order in which the parts occur."""
    from tests.support.grader_cases import LABELLED
    from treetune.tasks.graders.pool import GraderPool
    from treetune.vocabulary import Problem

    counts_of_parts: dict[str, Counts] = {}
    with GraderPool(LABELLED[name].grader, deadline=DEADLINE_S) as pool:
        futures = []
        for number, answer in enumerate(answers):
            prompt = str(answer.data.get("prompt", "?"))
            problem = Problem(f"labelled/{number}", prompt, answer.gold, answer.data)
            futures.append(pool.submit(answer.response, problem))
        for answer, future in zip(answers, futures):
            grade = future.result()
            counts = counts_of_parts.setdefault(answer.part, Counts())
            if answer.label:
                counts.right += 1
            else:
                counts.wrong += 1
            if not grade.is_known:
                counts.ungraded += 1
                continue
            if grade.correct is answer.label:
                continue
            if answer.label:
                counts.rejected_right += 1
                mistake = "rejects right"
            else:
                counts.accepted_wrong += 1
                mistake = "accepts wrong"
            if show:
                print(f"{name} {mistake}: {answer.response!r} to {answer.gold!r} ({grade.outcome})")
    return counts_of_parts


if __name__ == "__main__":
    raise SystemExit(main())
