"""Writes labelled answers to word problems: numbers as people write them, and numbers that are another.

    python tests/tasks/labelled/make_labelled_numbers.py --data /path/to/gsm8k/test.jsonl

Golds are the first 60 of GSM8K's test problems (MIT). benchmarks/grading.py measures `numeric` by the output.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
OUTPUT = ROOT / "tests/tasks/labelled/numeric.jsonl"
GOLDS = 60


def answers(value: int) -> Iterator[tuple[str, bool]]:
    """What may stand behind the marker, and whether it is the gold."""
    shown = f"{value:,}"
    right = [
        f"{value}",
        f"{shown}",
        f"{value}.",
        f"{value}.00",
        f"${value}",
        f"${shown}.00",
        f"{value} apples",
        f"{2 * value}/2",
        f"{shown} dollars",
        f"x = {value}",
        f"{value - 1} + 1 = {value}",
        f"**{value}**",
        f"\\boxed{{{value}}}",
        f"+{value}",
        f"{value} km/h",
    ]
    wrong = [
        f"{value + 1}",
        f"{value - 1}",
        f"-{value}" if value else "-1",
        f"{value}0" if value else "10",
        f"{value}.5",
        f"{value}/3" if value else "1/3",
        f"{value} or {value + 1}",
        f"{value}^2" if value > 1 else "9",
        f"{value}, {value + 2}",
        f"{value} + 1 = {value + 1}",
        "none",
        f"{value}e2" if value else "1e2",
        f"{value + 1000:,}",
        f"1{value}",
        f"{value} million" if value else "1 million",
        f"{value}:30",
    ]
    yield from ((one, True) for one in right)
    yield from ((one, False) for one in wrong)


def rows(data: Path) -> Iterator[dict[str, object]]:
    for line in data.read_text().splitlines()[:GOLDS]:
        row = json.loads(line)
        gold = row["answer"].rpartition("####")[2].strip()
        for answer, label in answers(int(gold.replace(",", ""))):
            yield {"response": f"So it is.\n#### {answer}", "gold": gold, "data": {}, "label": label}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's test split as JSON lines")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    made = list({(row["response"], row["gold"]): row for row in rows(options.data)}.values())
    options.output.write_text("".join(json.dumps(row) + "\n" for row in made))
    print(f"{len(made)} answers: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
