"""Writes data/sums/train.jsonl, validation.jsonl and test.jsonl: sums of three digits, as conversations.

A prompt shows three solved sums as earlier turns, since the chat model hardly ever writes steps without them.
"""

import itertools
import json
import random
from pathlib import Path

SOLVED = [(2, 3, 4), (6, 1, 5), (8, 7, 2)]
VALIDATION_ROWS, TEST_ROWS = 100, 100


def write_question(numbers: tuple[int, ...]) -> str:
    """Returns the question, e.g. "What is 2 + 3 + 4?"."""
    return "What is " + " + ".join(map(str, numbers)) + "?"


def write_solution(numbers: tuple[int, int, int]) -> str:
    """Returns one addition a line and the marked result, e.g. "2 + 3 = 5\\n5 + 4 = 9\\n#### 9"."""
    first, second, third = numbers
    subtotal = first + second
    total = subtotal + third
    return f"{first} + {second} = {subtotal}\n{subtotal} + {third} = {total}\n#### {total}"


def make_row(numbers: tuple[int, int, int]) -> dict[str, object]:
    """Returns the problem in the schema of the task `rows`: messages, and the sum as the reference answer."""
    messages = []
    for solved in SOLVED:
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


def split_sums() -> dict[str, list[tuple[int, int, int]]]:
    """Returns the sums of each split. The same three digits in any order are in one split only.

    The solved sums of the prompt are in none.
    """
    rng = random.Random(0)
    unordered = list(itertools.combinations_with_replacement(range(1, 10), 3))
    rng.shuffle(unordered)
    in_prompt = {tuple(sorted(numbers)) for numbers in SOLVED}
    sums: dict[str, list[tuple[int, int, int]]] = {"validation": [], "test": [], "train": []}
    for numbers in unordered:
        if numbers in in_prompt:
            continue
        orders = sorted(set(itertools.permutations(numbers)))
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
    folder = Path("data/sums")
    folder.mkdir(parents=True, exist_ok=True)
    for split, sums in split_sums().items():
        rows = [json.dumps(make_row(numbers)) + "\n" for numbers in sums]
        (folder / f"{split}.jsonl").write_text("".join(rows))


if __name__ == "__main__":
    main()
