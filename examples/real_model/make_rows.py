"""Writes data/shop/train.jsonl and test.jsonl: word problems of three steps, each with its solution."""

import json
import random
from pathlib import Path

NAMES = ["Anna", "Ben", "Eva", "Leo", "Mia", "Tom", "Nora", "Paul"]
THINGS = ["apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps"]
CONTAINERS = ["bags", "boxes", "jars", "packs"]
TRAINING_ROWS, TEST_ROWS = 1200, 400


def draw_row(rng: random.Random) -> dict[str, str]:
    """Returns a problem with small numbers, and its solution.

    Example: the question "Ben has 6 coins. Ben buys 3 bags with 4 coins each and gives away 5 coins. How many
    coins does Ben have now?" has the answer "3 * 4 = 12\\n6 + 12 = 18\\n18 - 5 = 13\\n#### 13".
    """
    name, thing, container = rng.choice(NAMES), rng.choice(THINGS), rng.choice(CONTAINERS)
    at_first, containers, in_each, given_away = (rng.randint(2, 6) for _ in range(4))
    bought = containers * in_each
    together = at_first + bought
    at_last = together - given_away  # at least 0: given_away is at most 6, and together at least 6
    question = (
        f"{name} has {at_first} {thing}. {name} buys {containers} {container} with {in_each} {thing} each"
        f" and gives away {given_away} {thing}. How many {thing} does {name} have now?"
    )
    steps = [
        f"{containers} * {in_each} = {bought}",
        f"{at_first} + {bought} = {together}",
        f"{together} - {given_away} = {at_last}",
        f"#### {at_last}",
    ]
    return {"question": question, "answer": "\n".join(steps)}


def main() -> None:
    rng = random.Random(0)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < TRAINING_ROWS + TEST_ROWS:
        row = draw_row(rng)
        rows[row["question"]] = row  # a question comes once, so that no test row is trained on
    folder = Path("data/shop")
    folder.mkdir(parents=True, exist_ok=True)
    in_order = list(rows.values())
    splits = {"train": in_order[:TRAINING_ROWS], "test": in_order[TRAINING_ROWS:]}
    for split, part in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    main()
