"""Small prepared data sets of every kind, with hostile texts in some rows."""

from __future__ import annotations

import json
from pathlib import Path

from tests.view.hostile import KINDS
from treetune.data.difficulty.merging import RATES_FILE, RowRate, write_rates
from treetune.domains.domain_rows import DomainRow, domain_row, write_parquet

HOSTILE = "".join(kind for kind in KINDS if len(kind) < 200)
ROWS, SAMPLES = 24, 4


def rows() -> list[DomainRow]:
    """Builds the rows of the data set; every text of the first is hostile."""
    built = []
    for number in range(ROWS):
        text = HOSTILE if number == 0 else f"What is {number} + {number}?" + " Think." * number
        row = domain_row(
            "math__sums" if number % 3 else "logic__puzzles",
            text,
            HOSTILE if number == 0 else str(2 * number),
            extra_info={"words": len(text.split()), "note": text, "tests": {"cases": [number]}},
        )
        built.append(row | {"pass_rate": (number % (SAMPLES + 1)) / SAMPLES})
    return built


def write_data_sets(folder: Path) -> Path:
    """Writes a Parquet file and a file of JSON lines, whose last two lines are damaged."""
    folder.mkdir(parents=True, exist_ok=True)
    write_parquet(folder / "sums.parquet", rows())
    lines = [{"question": f"trip {n}", "answer": 3 * n, "odd": n if n % 2 else "even"} for n in range(6)]
    lines[1]["question"] = HOSTILE
    text = "\n\n".join(map(json.dumps, lines))
    (folder / "trips.jsonl").write_text(text + '\n{"question": "half \\ud800"}\n{"question": "torn')
    return folder


def save(folder: Path) -> Path:
    """Saves a data set of two splits with `save_to_disk`."""
    from datasets import Dataset, DatasetDict

    split = Dataset.from_list([{"q": f"question {n}", "a": n / 2, "tags": ["x"]} for n in range(5)])
    DatasetDict({"train": split, "test": split.select(range(2))}).save_to_disk(str(folder))
    return folder


def write_estimate(folder: Path, *, finished: bool = True) -> Path:
    """Writes the output of `estimate_difficulty` on `rows`, in two shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "estimate.json").write_text(json.dumps({"identity": "x", "rows": ROWS, "shards": 2}))
    rates = []
    for number, row in enumerate(rows()):
        right = round(row["pass_rate"] * SAMPLES)
        shard = folder / "shards" / f"{2 * number // ROWS:04d}"
        shard.mkdir(parents=True, exist_ok=True)
        for sample in range(SAMPLES):
            key = {"row": number, "sample": sample}
            answer = {**key, "text": f"answer {sample} {HOSTILE}", "complete": True, "tokens": 7}
            grade = {
                **key, "reward": float(sample < right), "correct": sample < right, "outcome": "ok",
                "extracted": HOSTILE, "complete": True, "tokens": 7,
            }  # fmt: skip
            for name, line in (("answers.jsonl", answer), ("grades.jsonl", grade)):
                with (shard / name).open("a") as file:
                    file.write(json.dumps(line, separators=(",", ":")) + "\n")
        rate = right / SAMPLES
        rates.append(
            RowRate(number, f"k{number}", 0, row["data_source"], SAMPLES, right, rate, rate, 7.0, 0, 0)
        )
    if finished:
        write_rates(folder / RATES_FILE, rates)
        write_parquet(folder / "rows.parquet", rows())
    return folder
