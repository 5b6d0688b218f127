r"""Writes labelled answers to mathematical problems: rewrites of golds, and near misses that are wrong.

    python tests/tasks/labelled/make_labelled_math.py --data /path/to/math500/test.jsonl

Golds are those of MATH-500 (MIT), rewritten by their shape, and those of math_by_hand.json and
math_unseen.json, each with its own rewrites and near misses. benchmarks/grading.py measures graders by the
output, in three parts: ``tuned``, by which the grader was mended; ``held out``, the other half of the golds
by a digest of theirs, looked at once, with what it showed mended too; ``unseen``, by which nothing was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

from labelled_math_rewrites import rewritten  # noqa: E402
from labelled_math_shapes import shapes  # noqa: E402

OUTPUT = ROOT / "tests/tasks/labelled/math.jsonl"
BY_HAND = {"": OUTPUT.with_name("math_by_hand.json"), "unseen": OUTPUT.with_name("math_unseen.json")}
"""Files of golds with their rewrites and near misses, by the part of the measurement that they are."""

OF_EACH_SHAPE = 12

SAID = (
    "It is $\\boxed{%s}$.",
    "\\[\\boxed{%s}\\]",
    "Not $\\boxed{17}$.\n\nSo $\\boxed{%s}.$",
    "$\\boxed{%s}$",
)


def cases(golds: Sequence[tuple[str, str]]) -> Iterator[dict[str, object]]:
    """Of MATH's (gold, question) pairs and the hand-made ones; of what comes up twice one."""
    seen: set[tuple[str, str]] = set()
    for gold, question in golds:
        made = rewritten(gold)
        kind, right, wrong = made if made is not None else ("as it stands", [gold], [])
        yield from _rows(kind, gold, question, right, wrong, seen)
    for part, path in BY_HAND.items():
        for entry in json.loads(path.read_text()):
            right = [entry["gold"], *entry["right"]]
            yield from _rows(entry["kind"], entry["gold"], "", right, entry["wrong"], seen, part)
    for kind, (gold, right, wrong) in shapes(OF_EACH_SHAPE, seed=11):
        yield from _rows(kind, gold, "", right, wrong, seen, "unseen")


def _rows(
    kind: str,
    gold: str,
    question: str,
    right: list[str],
    wrong: list[str],
    seen: set[tuple[str, str]],
    part: str = "",
) -> Iterator[dict[str, object]]:
    draw = random.Random(gold)
    assert not set(right) & set(wrong), (gold, set(right) & set(wrong))
    part = part or ("tuned" if hashlib.sha256(gold.encode()).digest()[-1] % 2 else "held out")
    for answer, label in [*((one, True) for one in right), *((one, False) for one in wrong)]:
        if (gold, answer) in seen:
            continue
        seen.add((gold, answer))
        data = {"kind": kind, "part": part} | ({"prompt": question} if kind == "base" and question else {})
        yield {"response": draw.choice(SAID) % answer, "gold": gold, "data": data, "label": label}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="MATH-500 as JSON lines of question, answer")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    rows = [json.loads(line) for line in options.data.read_text().splitlines()]
    golds = [(row["answer"].rpartition("The answer is:")[2].strip(), row["question"]) for row in rows]
    made = list(cases(list(dict(golds).items())))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made))
    print(f"{len(made)} answers, {sum(bool(row['label']) for row in made)} of them right: {options.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
