"""Converts the files of a data set into the rows that the tasks read.

scripts/download_and_prepare_datasets.sh calls it; by hand:

    python scripts/prepare_datasets.py math data/downloads/math --data data

Writes ``DATA/SET/SPLIT.jsonl`` whole or not at all, and prints the number of problems. Ends with code 1 and a
message if a row has no problem or no answer, and if a split is not as large as it should be.
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treetune.tasks.base import Split

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT / "src"))

SIZES = {
    "gsm8k": {"train": 7473, "test": 1319},
    "math": {"train": 12000, "test": 500},
    "college_math": {"test": 2818},
    "olympiadbench": {"test": 674},
}
"""The number of rows of each split."""
PROBLEM_KEYS = ("problem", "question")
ANSWER_KEYS = ("answer", "final_answer")
KIND_KEYS = ("type", "subject", "subfield", "data_topic")
PAPER_SPLITS: tuple[Split, ...] = ("train", "validation", "test")
PAPER_SIZES = {"math": (11500, 500, 500), "gsm8k": (7100, 373, 1319)}
"""The number of rows of each of `PAPER_SPLITS` in the paper's archive."""


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
            unpack_paper(options.source, options.data / "paper")
        else:
            for split, size in SIZES[options.set].items():
                expected_size = None if options.any_size else size
                prepare_split(options.source, options.data, options.set, split, expected_size)
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        print(f"prepare_datasets.py: {error}", file=sys.stderr)
        return 1
    return 0


def prepare_split(source: Path, data: Path, name: str, split: str, expected_size: int | None) -> None:
    """Writes the rows of a split.

    Args:
        source: The folder with the files of the data set.
        data: The folder of all data sets.
        name: The name of the data set.
        split: The name of the split.
        expected_size: The number of rows that it should have; None: any number.
    """
    lines = []
    for place, row in read_rows(source, split):
        # The task of GSM8K reads the data set's own rows.
        prepared = row if name == "gsm8k" else convert_row(row, place)
        lines.append(json.dumps(prepared, ensure_ascii=False))
    if expected_size is not None and len(lines) != expected_size:
        raise ValueError(f"{source}: the {split} split has {len(lines)} rows, not {expected_size}")
    target = data / name / f"{split}.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".part")
    unfinished.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    os.replace(unfinished, target)
    print(f"{target}: {len(lines)} problems", file=sys.stderr)


def read_rows(source: Path, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of a split, each with its place, such as ``test.parquet[17]``, for messages."""
    from treetune.tasks.sources import read_json_lines

    table = source / f"{split}.parquet"
    if not table.exists():
        yield from read_json_lines(source / f"{split}.jsonl")
        return
    from pyarrow import parquet

    columns = [name for name in parquet.read_schema(table).names if not name.startswith("image")]
    for number, row in enumerate(parquet.read_table(table, columns=columns).to_pylist()):
        yield f"{table}[{number}]", row


def convert_row(row: dict[str, Any], place: str) -> dict[str, str]:
    """Returns a row with the keys that the task `math` reads. Several final answers become one, separated by
    commas.

    Raises:
        ValueError: if the row has no problem or no answer.
    """
    problem = first_value(row, PROBLEM_KEYS)
    answer = first_value(row, ANSWER_KEYS)
    if isinstance(answer, list):
        answer = ", ".join(str(part) for part in answer)
    for what, value in (("problem", problem), ("answer", answer)):
        if not isinstance(value, str | int | float) or not str(value).strip():
            keys = ", ".join(repr(key) for key in sorted(row))
            raise ValueError(f"{place}: a row without {what}: it has {keys}")
    converted = {"problem": str(problem), "answer": str(answer)}

    solution = row.get("solution")
    if isinstance(solution, list):
        solution = "\n\n".join(str(part) for part in solution)
    if isinstance(solution, str) and solution.strip():
        converted["solution"] = solution
    kinds = [row[key] for key in KIND_KEYS if isinstance(row.get(key), str)]
    if kinds and kinds[0]:
        converted["type"] = kinds[0]
    if row.get("level") is not None:
        converted["level"] = str(row["level"])
    return converted


def first_value(row: dict[str, Any], keys: Sequence[str]) -> Any:
    """Returns the value of the first key that has one that is not empty; None if none has."""
    for key in keys:
        if row.get(key):
            return row[key]
    return None


def unpack_paper(archive: Path, target: Path) -> None:
    """Unpacks the paper's archive. It contains an archive ``data-NAME.zip`` for each data set, with a
    `DatasetDict` of the library datasets."""
    unfinished = target.with_name(target.name + ".part")
    with zipfile.ZipFile(archive) as outer:
        inner_names = []
        for name in outer.namelist():
            if Path(name).name.startswith("data-") and name.endswith(".zip"):
                inner_names.append(name)
        if not inner_names:
            raise ValueError(f"{archive} holds no data-NAME.zip: is it the paper's wandb_export_root.zip?")
        shutil.rmtree(unfinished, ignore_errors=True)
        for name in inner_names:
            with outer.open(name) as file, zipfile.ZipFile(file) as inner:
                inner.extractall(unfinished)
    for description in sorted(unfinished.rglob("dataset_dict.json")):
        data_set = description.parent
        folder = target / data_set.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(str(data_set), folder)
        check_paper_sizes(folder)
        print(f"{folder}", file=sys.stderr)
    shutil.rmtree(unfinished, ignore_errors=True)


def check_paper_sizes(folder: Path) -> None:
    """Raises ValueError if a data set of the paper does not have the paper's number of rows."""
    from treetune.tasks.sources import OnDisk

    expected_sizes = PAPER_SIZES.get(folder.name)
    if expected_sizes is None:
        return
    source = OnDisk(path=str(folder))
    sizes = tuple(len(list(source.rows(split))) for split in PAPER_SPLITS)
    if sizes != expected_sizes:
        raise ValueError(f"{folder} has {sizes} rows in train, validation and test, not {expected_sizes}")


if __name__ == "__main__":
    sys.exit(main())
