"""What answers to the tiny Countdown are made of: tries, their totals, and whether the last one is given.

python benchmarks/countdown_tries.py experiments/countdown/tiny_sft/evaluations/0012/validation/answers.jsonl
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

from treetune.exceptions import NotAnExpression
from treetune.tasks.graders.countdown import read_expression

TOTAL = re.compile(r"=-?\d+")


def totals_are_right(line: str) -> bool:
    """Of a try such as ``12+34=46+7=53``: is each total that of what stands before it?"""
    try:
        return all(
            read_expression(left).value == int(re.match(r"-?\d+", right)[0])  # type: ignore[index]
            for left, right in pairwise(line.split("="))
        )
    except (NotAnExpression, TypeError):
        return False


def shares(path: Path) -> dict[str, float]:
    tries: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    count = 0
    for line in path.read_text().splitlines():
        row = json.loads(line)
        target = row["gold"].partition(" from ")[0]
        *attempts, answer = row["text"].split("\n")
        tries["all"] += len(attempts)
        tries["wrong"] += sum(not totals_are_right(attempt) for attempt in attempts)
        last = attempts[-1] if attempts else ""
        said_so = last.rpartition("=")[2] == target
        right = row["reward"] >= 1
        answers["right, and the last try said so"] += right and said_so
        answers["right, and the last try said otherwise"] += right and not said_so
        answers["the last try is the answer"] += answer == "#" + TOTAL.sub("", last)
        count += 1
    found = {"tries with a wrong total": tries["wrong"] / max(1, tries["all"])}
    return found | {name: number / count for name, number in answers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("answers", nargs="+", type=Path, help="answers.jsonl of an evaluation")
    for path in parser.parse_args().answers:
        print(path)
        for name, share in shares(path).items():
            print(f"  {share:.3f}  {name}")


if __name__ == "__main__":
    main()
