"""Writes data/digits/train.jsonl and data/digits/test.jsonl: numbers, and their digits in ascending order.

The first row: {"question": "60494>", "answer": "04469"}
"""

import json
import random
from pathlib import Path

folder = Path("data/digits")
folder.mkdir(parents=True, exist_ok=True)
numbers = random.Random(0).sample(range(10_000, 100_000), 3200)
splits = {"train": numbers[:3000], "test": numbers[3000:]}
for split, numbers_of_split in splits.items():
    with open(folder / f"{split}.jsonl", "w") as file:
        for number in numbers_of_split:
            row = {"question": f"{number}>", "answer": "".join(sorted(str(number)))}
            file.write(json.dumps(row) + "\n")
