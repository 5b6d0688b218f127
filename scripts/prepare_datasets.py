"""Turns a data set's own files into the rows that the tasks read.

scripts/download_and_prepare_datasets.sh calls it; by hand:

    python scripts/prepare_datasets.py math data/downloads/math --data data

Writes ``DATA/SET/SPLIT.jsonl`` whole or not at all, and says how many problems each holds. Ends with code 1
and a message for a row without a problem or an answer, and for a split that is not as large as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT / "src"))

SIZES = {
    "gsm8k": {"train": 7473, "test": 1319},
    "math": {"train": 12000, "test": 500},
    "college_math": {"test": 2818},
    "olympiadbench": {"test": 674},
}
PROBLEM = ("problem", "question")
ANSWER = ("answer", "final_answer")
KIND = ("type", "subject", "subfield", "data_topic")
PAPER_SIZES = {"math": (11500, 500, 500), "gsm8k": (7100, 373, 1319)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("set", choices=[*SIZES, "paper"])
    parser.add_argument("source", type=Path, help="the folder with its files, or the paper's archive")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--any-size", action="store_true", help="splits may have any number of rows")
    options = parser.parse_args(arguments)
    try:
        if options.set == "paper":
            _unpack(options.source, options.data / "paper")
        else:
            for split, size in SIZES[options.set].items():
                _prepare(options, split, None if options.any_size else size)
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        print(f"prepare_datasets.py: {error}", file=sys.stderr)
        return 1
    return 0


def _prepare(options: argparse.Namespace, split: str, size: int | None) -> None:
    rows = _rows(options.source, split)
    prepared = [row if options.set == "gsm8k" else _row(row, place) for place, row in rows]
    lines = [json.dumps(row, ensure_ascii=False) for row in prepared]
    if size is not None and len(lines) != size:
        raise ValueError(f"{options.source}: the {split} split has {len(lines)} rows, not {size}")
    target = options.data / options.set / f"{split}.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    part.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    os.replace(part, target)
    print(f"{target}: {len(lines)} problems", file=sys.stderr)


def _rows(source: Path, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    from treetune.tasks.sources import json_lines

    table = source / f"{split}.parquet"
    if not table.exists():
        yield from json_lines(source / f"{split}.jsonl")
        return
    from pyarrow import parquet

    columns = [name for name in parquet.read_schema(table).names if not name.startswith("image")]
    for number, row in enumerate(parquet.read_table(table, columns=columns).to_pylist()):
        yield f"{table}[{number}]", row


def _row(row: dict[str, Any], place: str) -> dict[str, str]:
    """The same in the words of `Math`: several final answers are one, parted by commas."""
    problem = next((row[key] for key in PROBLEM if row.get(key)), None)
    answer = next((row[key] for key in ANSWER if row.get(key)), None)
    if isinstance(answer, list):
        answer = ", ".join(str(part) for part in answer)
    for what, value in (("problem", problem), ("answer", answer)):
        if not isinstance(value, str | int | float) or not str(value).strip():
            raise ValueError(f"{place}: a row without {what}: it has {', '.join(map(repr, sorted(row)))}")
    kept = {"problem": str(problem), "answer": str(answer)}
    solution = row.get("solution")
    if isinstance(solution, list):
        solution = "\n\n".join(map(str, solution))
    kept |= {"solution": solution} if isinstance(solution, str) and solution.strip() else {}
    kind = next((row[key] for key in KIND if isinstance(row.get(key), str)), None)
    kept |= {"type": kind} if kind else {}
    return kept | ({"level": str(row["level"])} if row.get("level") is not None else {})


def _unpack(archive: Path, target: Path) -> None:
    """The paper's archive holds an archive per data set, ``data-NAME.zip``: a DatasetDict each."""
    from treetune.tasks.sources import OnDisk

    with zipfile.ZipFile(archive) as outer:
        inner_ones = [
            name for name in outer.namelist() if Path(name).name.startswith("data-") and name.endswith(".zip")
        ]
        if not inner_ones:
            raise ValueError(f"{archive} holds no data-NAME.zip: is it the paper's wandb_export_root.zip?")
        part = target.with_name(target.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        for name in inner_ones:
            with outer.open(name) as file, zipfile.ZipFile(file) as inner:
                inner.extractall(part)
    for found in sorted(part.rglob("dataset_dict.json")):
        folder = target / found.parent.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(str(found.parent), folder)
        sizes = PAPER_SIZES.get(folder.name)
        if sizes is not None:
            source = OnDisk(path=str(folder))
            counted = tuple(sum(1 for _ in source.rows(split)) for split in ("train", "validation", "test"))
            if counted != sizes:
                raise ValueError(f"{folder} has {counted} rows in train, validation and test, not {sizes}")
        print(f"{folder}", file=sys.stderr)
    shutil.rmtree(part, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
