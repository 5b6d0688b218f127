"""Writes data/digits/train.jsonl and test.jsonl: numbers, and their digits in order."""

import json
import random
from pathlib import Path

folder, rng = Path("data/digits"), random.Random(0)
folder.mkdir(parents=True, exist_ok=True)
numbers = rng.sample(range(10_000, 100_000), 3200)
for name, part in {"train": numbers[:3000], "test": numbers[3000:]}.items():
    rows = [{"question": f"{number}>", "answer": "".join(sorted(str(number)))} for number in part]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
