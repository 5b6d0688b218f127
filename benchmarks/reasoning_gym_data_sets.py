"""Goes through all data sets of reasoning_gym: makes problems, has golds and other answers scored.

    python benchmarks/reasoning_gym_data_sets.py [--problems 10] [--only NAME …] [--output FILE]

Each data set's problems are made with another seed of Python's hashes too, in a process of its own, and
scored in grader processes. Writes a page with one row each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from treetune.domains.puzzles.reasoning_gym import ReasoningGym, data_sets
from treetune.domains.sandbox.inside.reasoning_gym_scores import unpacked
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import CORRECT_SCORE, Grade, Problem

ROOT = Path(__file__).parents[1]
WRONG = ("xyzzy", "0", "True", "[]", "{}")
OTHER_HASHES = """
import os, sys
from treetune.domains.puzzles import reasoning_gym as library
real = library.subprocess.run
library.subprocess.run = lambda *a, env, **k: real(*a, env=env | {"PYTHONHASHSEED": "1"}, **k)
from treetune.domains.puzzles.reasoning_gym import ReasoningGym
for problem in ReasoningGym(dataset=sys.argv[1]).examples(int(sys.argv[2])):
    print(repr((problem.prompt, problem.gold)))
"""


@dataclass
class Row:
    name: str
    module: str
    seconds: float = 0.0
    golds: list[float] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--problems", type=int, default=10)
    parser.add_argument("--only", nargs="+", default=None)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "reasoning_gym.md")
    arguments = parser.parse_args()
    rows = []
    for name, module in sorted(data_sets().items()):
        if arguments.only is None or name in arguments.only:
            row = of_data_set(name, module, arguments.problems)
            rows.append(row)
            print(f"{name}: {row.seconds:.3f} s, {'; '.join(row.remarks) or 'nothing odd'}", flush=True)
    text = page(rows, arguments.problems)
    arguments.output.write_text(text)
    return 0


def of_data_set(name: str, module: str, count: int) -> Row:
    row = Row(name, module)
    task = ReasoningGym(dataset=name, train_size=count, validation_size=count, test_size=count)
    start = time.perf_counter()
    splits = {split: task.problems(split) for split in ("test", "validation", "train")}  # type: ignore[arg-type]
    row.seconds = (time.perf_counter() - start) / (3 * count)
    questions = [one.prompt for problems in splits.values() for one in problems]
    assert len(set(questions)) == 3 * count, f"{name}: a question is there twice"
    problems = splits["test"]
    with GraderPool(task.grader, workers=1, deadline=20.0) as pool:
        golds = graded(pool, [(one, reference(one)) for one in problems])
        row.golds = [one.reward for one in golds if one is not None]
        if not row.golds:
            row.remarks.append("has no answers, it only scores")
        elif len(row.golds) < count:
            row.remarks.append(f"{count - len(row.golds)} of {count} have no answer")
        elif not problems[0].gold:
            row.remarks.append("has no answers in `answer`, only in its metadata")
        if wrong := sum(score < CORRECT_SCORE for score in row.golds):
            row.remarks.append(f"{wrong} of {len(row.golds)} golds are not scored 1")
        empty = graded(pool, [(one, "") for one in problems])
        assert not any(one.reward for one in empty if one), f"{name}: an empty answer earned something"
        row.remarks += list(of_wrong_answers(pool, problems))
        row.remarks += list(in_sentences(pool, problems))
    if made_with_other_hashes(name, count) != [repr((one.prompt, one.gold)) for one in task.examples(count)]:
        row.remarks.append("the order of sets goes into its problems")
    return row


def reference(problem: Problem) -> str | None:
    """An answer that should be right: the gold or, for some that only score, what the metadata has."""
    if problem.gold:
        return problem.gold
    metadata = unpacked(problem.data["entry"])["metadata"]
    if coloring := metadata.get("possible_answer"):
        return json.dumps(coloring)
    return metadata.get("example_correct_answer") or metadata.get("example_answer")


def graded(pool: GraderPool, answers: list[tuple[Problem, str | None]]) -> list[Grade | None]:
    asked = [(f"<answer>{text}</answer>", one) for one, text in answers if text is not None]
    found = iter(pool.grade_many(asked))
    return [None if text is None else next(found) for _, text in answers]


def of_wrong_answers(pool: GraderPool, problems: list[Problem]) -> list[str]:
    grades = {
        text: [
            grade
            for one, grade in zip(problems, graded(pool, [(one, text) for one in problems]), strict=True)
            if grade is not None and not same(one.gold, text)
        ]
        for text in WRONG
    }
    correct = [
        text for text, of_text in grades.items() if any(one.reward >= CORRECT_SCORE for one in of_text)
    ]
    most = max(
        (one.reward for of_text in grades.values() for one in of_text if one.reward < CORRECT_SCORE),
        default=0.0,
    )
    raised = [text for text, of_text in grades.items() if any(one.message for one in of_text)]
    remarks = []
    if correct:
        shares = ", ".join(
            f"`{text}` {sum(one.reward >= CORRECT_SCORE for one in grades[text])} of {len(grades[text])}"
            for text in correct
        )
        remarks.append(f"scores wrong answers 1: {shares}")
    if most >= 0.005:
        remarks.append(f"up to {most:.2g} for such wrong answers")
    if raised:
        remarks.append(f"raises on {', '.join(f'`{text}`' for text in raised)}")
    return remarks


def same(gold: str, text: str) -> bool:
    try:
        return float(gold) == float(text)
    except ValueError:
        return gold.strip().casefold() == text.casefold()


def in_sentences(pool: GraderPool, problems: list[Problem]) -> list[str]:
    said = graded(pool, [(one, one.gold and f"I think it is {one.gold}") for one in problems if one.gold])
    if not said:
        return []
    correct = sum(one.reward >= CORRECT_SCORE for one in said if one)
    return [f"takes the answer out of a sentence ({correct} of {len(said)})"] if correct else []


def made_with_other_hashes(name: str, count: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", OTHER_HASHES, name, str(count)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"},
    )
    return done.stdout.splitlines()


def page(rows: list[Row], count: int) -> str:
    whole = sum(bool(row.golds) and min(row.golds) >= CORRECT_SCORE for row in rows)
    silent = [row.name for row in rows if not row.golds]
    lines = [
        "# The data sets of reasoning_gym",
        "",
        f"`python benchmarks/reasoning_gym_data_sets.py --problems {count}`, reasoning_gym 0.1.25.",
        "",
        f"{len(rows)} data sets, {3 * count} problems of each at its own settings, no question twice. In"
        f" {whole} of them {count} of {count} golds are scored 1; {len(silent)} give no answer at all"
        f" ({', '.join(silent)}). An empty answer is correct nowhere. *Odd* is what a user should know of a"
        " scorer before training with it: it is the library's, and is not changed here. The wrong answers"
        f" that were tried are {', '.join(f'`{text}`' for text in WRONG)}.",
        "",
        "| data set | kind | ms a problem | gold's score | odd |",
        "|---|---|---:|---:|---|",
    ]
    for row in rows:
        gold = f"{sum(row.golds) / len(row.golds):.2f}" if row.golds else "–"
        kind = row.module.split(".")[1]
        lines.append(
            f"| `{row.name}` | {kind} | {1000 * row.seconds:.1f} | {gold} | {'; '.join(row.remarks)} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
