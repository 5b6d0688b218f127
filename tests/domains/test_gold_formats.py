"""Promises of reading golds and prompts from files:

* a gold is what its file says in every format: with its nulls, whole numbers, decimals, dates and bytes;
* a chat that is written as text, and a file that is one JSON array, are read;
* a row that can't be read is refused by row and field, and `check` names a field that no row has.
"""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from treetune.domains.graders.codeio import CodeIO
from treetune.domains.routed_rows import RoutedRows
from treetune.exceptions import NoPlainValue
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.tasks.graders.numeric import Numeric
from treetune.tasks.row_values import check_plain, plain_value
from treetune.tasks.rows import JsonLines


def routed_row(gold: Any, **more: Any) -> dict[str, Any]:
    return {"data_source": "simulation__mine", "prompt": "q?", "reward_model": {"ground_truth": gold}, **more}


def golds(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    path = folder / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return [problem.gold for problem in routed(path).problems("train")]


def routed(path: Path) -> RoutedRows:
    return RoutedRows(train=(str(path),), routes={"": CodeIO()})


def test_a_null_in_a_structured_gold_is_part_of_it(tmp_path: Path) -> None:
    texts = golds(tmp_path, [routed_row({"low": None, "high": 5}), routed_row({"low": 1, "high": 2})])
    assert list(map(json.loads, texts)) == [{"low": None, "high": 5}, {"low": 1, "high": 2}]


def test_golds_with_other_keys_in_each_row_are_refused_where_nulls_fill_them_in(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"have different keys from row to row .* write golds as JSON text"):
        golds(tmp_path, [routed_row({"x": 1}), routed_row({"y": 2})])


@pytest.mark.parametrize(
    ("value", "gold"),
    [
        (Decimal("42.50"), "42.50"),
        (date(2025, 1, 2), "2025-01-02"),
        (b"Rome", "Rome"),
        (7.0, "7"),
        (2.5, "2.5"),
    ],
)
def test_values_of_parquet_become_text(tmp_path: Path, value: Any, gold: str) -> None:
    assert golds(tmp_path, [routed_row(value)]) == [gold]


def test_values_of_numpy_are_those_of_other_files() -> None:
    missing = np.array(["2025-01-02", "NaT"], "datetime64[ns]")
    assert plain_value(missing[1]) is None and plain_value(pd.NaT) is None
    assert plain_value(missing) == ["2025-01-02T00:00:00.000000000", None]
    assert plain_value(np.array([[1, 2]])) == [[1, 2]]
    # No type of Python is equal to it, so it stays, and is refused if it is needed.
    with pytest.raises(NoPlainValue, match=r"its answer"):
        check_plain(plain_value(np.longdouble("0.1")), "answer")


def test_whole_numbers_beside_a_null_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pa.table({"question": ["a", "b", "c"], "answer": pa.array([7.0, 12.0, None], pa.float64())})
    parquet.write_table(table, path)
    task = JsonLines(train=(str(path),), grader=FinalAnswer(), bad_rows="skip")
    assert [problem.gold for problem in task.problems("train")] == ["7", "12"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (routed_row(""), "has an empty ground_truth"),
        (routed_row(" \n"), "has an empty ground_truth"),
        (routed_row(b"\xff\xfe"), "its ground_truth is 2 bytes|its reward_model.ground_truth is 2 bytes"),
        (routed_row("1", extra_info={"image": b"\xff\xd8"}), "its extra_info.image is 2 bytes"),
        (routed_row("1", prompt=[{"role": "user", "content": "  "}]), "the user with nothing in its content"),
    ],
)
def test_what_cannot_be_read_is_refused_by_row_and_field(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"rows.parquet\[0\]: .*({message})"):
        golds(tmp_path, [row])


CHAT = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.mark.parametrize("text", [json.dumps(CHAT), repr(CHAT), json.dumps(CHAT[0])])
def test_a_chat_written_as_text_is_read_as_a_chat(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(routed_row("5", prompt=text)) + "\n")
    assert routed(path).problems("train")[0].prompt == "What is 2 + 3?"
    path.write_text(json.dumps({"question": text, "answer": "5"}) + "\n")
    task = JsonLines(train=(str(path),), grader=Numeric(), prompt="{problem}")
    assert task.problems("train")[0].prompt == "What is 2 + 3?"


def test_a_prompt_with_calls_of_tools_is_refused(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "search", "arguments": "{}"}}
    chat = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(routed_row("5", prompt=chat)) + "\n")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: .*assistant with tool_calls"):
        routed(path).problems("train")


def test_a_file_that_is_one_array_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([routed_row("1"), routed_row("2")], indent=1))
    assert [problem.gold for problem in routed(path).problems("train")] == ["1", "2"]
    path = tmp_path / "torn.json"
    path.write_text('[\n {"data_source": "a__b"')
    with pytest.raises(ValueError, match=r"begins like a JSON array, and can't be read as one"):
        routed(path).problems("train")


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"problem_field": "questions"}, "problem_field"), ({"gold_field": "gold"}, "gold_field"), ({}, None)],
)
def test_check_says_that_no_row_has_a_field(
    tmp_path: Path, settings: dict[str, str], key: str | None
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    task = JsonLines(train=(str(path),), grader=Numeric(), **settings)
    keys = [finding.key for finding in task.check(None) if finding.level == "error"]
    assert keys == ([key] if key else [])
