"""Promises of scripts/download_and_prepare_datasets.sh and scripts/prepare_datasets.py:

* without a network they say which file belongs where, and a file with another checksum is refused;
* rows of the sources become rows of the tasks, and wrong sizes and rows without an answer are told.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from treetune.domains.math_tasks import CollegeMath, Math, OlympiadBench

ROOT = Path(__file__).parents[2]
main = runpy.run_path(str(ROOT / "scripts" / "prepare_datasets.py"))["main"]


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_script(data: Path, curl: str) -> subprocess.CompletedProcess[str]:
    folder = data.parent / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "curl").write_text(curl)
    (folder / "curl").chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable}
    return subprocess.run(
        [ROOT / "scripts" / "download_and_prepare_datasets.sh"],
        env=environment | {"TREETUNE_DATA": str(data)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_without_a_network_it_says_what_to_put_where(tmp_path: Path) -> None:
    done = run_script(tmp_path / "data", "#!/bin/bash\necho 'could not resolve host' >&2; exit 6\n")
    assert done.returncode == 1
    names = ("gsm8k/train.jsonl", "math/train.jsonl", "college_math/test.jsonl", "olympiadbench/test.parquet")
    for name in names:
        assert f"put it at {tmp_path}/data/downloads/{name}" in done.stderr
    assert not list((tmp_path / "data").rglob("*.jsonl"))


def test_a_file_with_another_checksum_is_refused(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "data" / "downloads" / "gsm8k" / "train.jsonl", [{"question": "?", "answer": "#### 1"}]
    )
    done = run_script(tmp_path / "data", "#!/bin/bash\nexit 6\n")
    assert done.returncode == 1
    assert "gsm8k/train.jsonl has the SHA-256" in done.stderr
    assert not (tmp_path / "data" / "gsm8k").exists()


def test_rows_of_other_names_become_those_of_the_tasks(tmp_path: Path) -> None:
    from pyarrow import Table, parquet

    raw, data = tmp_path / "raw", tmp_path / "data"
    row = {"problem": "1+1?", "solution": "$\\boxed{2}$", "answer": "2", "subject": "Algebra", "level": 1}
    write_rows(raw / "math" / "train.jsonl", [row | {"unique_id": "a"}] * 2)
    write_rows(raw / "math" / "test.jsonl", [row])
    exercise = {"question": "$x=1$?", "answer": "$1$", "data_topic": "algebra"}
    write_rows(raw / "college_math" / "test.jsonl", [exercise])
    (raw / "olympiadbench").mkdir()
    columns = {
        "question": ["Which?"],
        "final_answer": [["$1$", "$2$"]],
        "solution": [["So."]],
        "image_1": [None],
    }
    parquet.write_table(Table.from_pydict(columns), raw / "olympiadbench" / "test.parquet")
    for name in ("math", "college_math", "olympiadbench"):
        assert main([name, str(raw / name), "--data", str(data), "--any-size"]) == 0
    train = Math(train=(str(data / "math" / "train.jsonl"),), validation_size=None).problems("train")
    assert train[0].data == {"level": "1", "type": "Algebra", "solution": "$\\boxed{2}$"}
    (college,) = CollegeMath(test=(str(data / "college_math" / "test.jsonl"),)).problems("test")
    assert college.gold == "$1$"
    task = OlympiadBench(test=(str(data / "olympiadbench" / "test.jsonl"),))
    (contest,) = task.problems("test")
    assert task.grader.grade("\\boxed{2, 1}", contest).reward == 1.0


def test_a_split_of_another_size_and_a_row_without_an_answer_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "raw" / "test.jsonl", [{"question": "?", "answer": "1"}])
    assert main(["college_math", str(tmp_path / "raw"), "--data", str(tmp_path)]) == 1
    assert "the test split has 1 rows, not 2818" in capsys.readouterr().err
    write_rows(tmp_path / "raw" / "test.jsonl", [{"question": "?", "final_answer": []}])
    assert main(["college_math", str(tmp_path / "raw"), "--data", str(tmp_path), "--any-size"]) == 1
    assert "test.jsonl:1: a row without answer: it has 'final_answer', 'question'" in capsys.readouterr().err


def test_the_papers_archive_becomes_data_sets_on_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list(
        [{"problem": "?", "solution": "\\boxed{1}", "answer": "1", "level": "1", "type": "a"}]
    )
    DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "made" / "olympiadbench"))
    inner = shutil.make_archive(str(tmp_path / "data-olympiadbench"), "zip", tmp_path / "made")
    archive = tmp_path / "wandb_export_root.zip"
    with zipfile.ZipFile(archive, "w") as outer:
        outer.write(inner, "wandb_export_root/datasets/data-olympiadbench.zip")
    assert main(["paper", str(archive), "--data", str(tmp_path / "data")]) == 0
    assert (tmp_path / "data" / "paper" / "olympiadbench" / "dataset_dict.json").exists()
    with zipfile.ZipFile(archive, "w") as outer:
        outer.writestr("other.txt", "")
    assert main(["paper", str(archive), "--data", str(tmp_path / "data")]) == 1
    assert "holds no data-NAME.zip" in capsys.readouterr().err
