"""Writes the rows of two tasks, as conversations: sums of three digits in data/sums, sums of four in
data/sums_of_four. Each folder has train.jsonl, validation.jsonl and test.jsonl.

A prompt shows three solved sums as earlier turns, since the chat model hardly ever writes steps without them.
"""

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

Numbers = tuple[int, ...]
"""The digits of a sum, in the order of the question."""

SOLVED_BY_FOLDER: dict[str, list[Numbers]] = {
    "data/sums": [(2, 3, 4), (6, 1, 5), (8, 7, 2)],
    "data/sums_of_four": [(2, 3, 4, 1), (6, 1, 5, 3), (8, 7, 2, 4)],
}
"""The solved sums of the prompt. They have as many digits as the sums of the task."""
VALIDATION_ROWS, TEST_ROWS = 100, 100
MOST_ORDERS = 6
"""The most orders of the same digits. Three digits have no more; four digits have up to 24."""


def write_question(numbers: Numbers) -> str:
    """Returns the question, e.g. "What is 2 + 3 + 4?"."""
    return "What is " + " + ".join(map(str, numbers)) + "?"


def write_solution(numbers: Numbers) -> str:
    """Returns one addition a line and the marked result, e.g. "2 + 3 = 5\\n5 + 4 = 9\\n#### 9"."""
    total = numbers[0]
    lines = []
    for number in numbers[1:]:
        lines.append(f"{total} + {number} = {total + number}")
        total += number
    lines.append(f"#### {total}")
    return "\n".join(lines)


def make_row(numbers: Numbers, solved_sums: Sequence[Numbers]) -> dict[str, object]:
    """Returns the problem in the schema of the task `rows`: messages, and the sum as the reference answer."""
    messages = []
    for solved in solved_sums:
        messages.append({"role": "user", "content": write_question(solved)})
        messages.append({"role": "assistant", "content": write_solution(solved)})
    messages.append({"role": "user", "content": write_question(numbers)})
    return {
        "data_source": "math__sums",
        "prompt": messages,
        "apply_chat_template": True,
        "reward_model": {"style": "rule", "ground_truth": str(sum(numbers))},
        "extra_info": {"solution": write_solution(numbers)},
    }


def split_sums(solved_sums: Sequence[Numbers]) -> dict[str, list[Numbers]]:
    """Returns the sums of each split. The same digits in any order are in one split only.

    The solved sums of the prompt are in none.
    """
    rng = random.Random(0)
    digits = len(solved_sums[0])
    unordered = list(itertools.combinations_with_replacement(range(1, 10), digits))
    rng.shuffle(unordered)
    in_prompt = {tuple(sorted(numbers)) for numbers in solved_sums}
    sums: dict[str, list[Numbers]] = {"validation": [], "test": [], "train": []}
    for numbers in unordered:
        if numbers in in_prompt:
            continue
        orders = sorted(set(itertools.permutations(numbers)))
        if len(orders) > MOST_ORDERS:
            orders = rng.sample(orders, MOST_ORDERS)
        if len(sums["validation"]) < VALIDATION_ROWS:
            sums["validation"] += orders
        elif len(sums["test"]) < TEST_ROWS:
            sums["test"] += orders
        else:
            sums["train"] += orders
    sums["validation"] = sums["validation"][:VALIDATION_ROWS]
    sums["test"] = sums["test"][:TEST_ROWS]
    rng.shuffle(sums["train"])
    return sums


def main() -> None:
    for folder_name, solved_sums in SOLVED_BY_FOLDER.items():
        folder = Path(folder_name)
        folder.mkdir(parents=True, exist_ok=True)
        for split, sums in split_sums(solved_sums).items():
            rows = [json.dumps(make_row(numbers, solved_sums)) + "\n" for numbers in sums]
            (folder / f"{split}.jsonl").write_text("".join(rows))


if __name__ == "__main__":
    main()
