"""Rows of many domains: what is written is what is read, and what others write is read as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from treetune.tasks.sources import InFiles, read_rows
from treetune_domains.domain_rows import (
    domain_row,
    normalised,
    prompt_text,
    read_domain_rows,
    row_key,
    write_parquet,
)

ROWS = [
    domain_row("math__sums", "1 + 1?", 2, ability="math", extra_info={"index": 0, "level": "easy"}),
    domain_row(
        "codegen__mine",
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sort."}],
        {"inputs": ["2 1"], "outputs": ["1 2"]},
        extra_info={"index": 1, "tests": [{"in": 1}, {"in": "x"}], "names": ["f", "g"], "level": 3},
    ),
    domain_row("ood__raw", "Ask", "x", raw_prompt="Ask\n<think>", apply_chat_template=False),
]


def test_what_is_written_is_read_with_its_lists_and_objects(tmp_path: Path) -> None:
    write_parquet(tmp_path / "rows.parquet", ROWS)
    assert [row for _, row in read_domain_rows(tmp_path / "rows.parquet")] == ROWS


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ROWS)
    write_parquet(tmp_path / "b.parquet", [normalised(json.loads(json.dumps(row))) for row in ROWS])
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_others_read_the_fields_that_verl_asks_for(tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    write_parquet(tmp_path / "rows.parquet", ROWS)
    rows = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert rows[0]["prompt"] == [{"role": "user", "content": "1 + 1?"}]
    assert rows[0]["reward_model"] == {"style": "rule", "ground_truth": "2"}
    assert rows[0]["extra_info"]["index"] == 0
    assert rows[1]["extra_info"]["names"] == ["f", "g"]


def test_columns_of_ones_own_stay(tmp_path: Path) -> None:
    row = {**ROWS[0], "low_pass_rate": 0.5, "tags": [{"a": 1}]}
    write_parquet(tmp_path / "rows.parquet", [row, ROWS[1]])
    assert [row for _, row in read_domain_rows(tmp_path / "rows.parquet")] == [row, ROWS[1]]


def test_a_row_is_known_by_what_is_asked_and_what_is_right() -> None:
    same = domain_row("math__sums", "1 + 1?", "2", extra_info={"index": 99})
    assert row_key(same) == row_key(ROWS[0])
    assert row_key(domain_row("math__sums", "1 + 1?", "3")) != row_key(ROWS[0])


def test_a_raw_prompt_is_used_as_it_is() -> None:
    assert prompt_text(ROWS[2]) == "Ask\n<think>"


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "x", "reward_model": {"ground_truth": "1"}}, "no data_source"),
        ({**ROWS[0], "reward_model": {"style": "rule"}}, "no ground_truth"),
        ({**ROWS[0], "prompt": []}, "list of messages"),
        ({**ROWS[0], "prompt": [{"role": "me", "content": "x"}]}, "role 'me'"),
        ({**ROWS[0], "extra_info": "text"}, "extra_info should be an object"),
    ],
)
def test_a_row_that_is_none_says_what_it_lacks(row: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        normalised(row)


def test_files_are_read_by_their_ending_in_the_order_of_names(tmp_path: Path) -> None:
    write_parquet(tmp_path / "1.parquet", ROWS[:1])
    write_parquet(tmp_path / "2.parquet", ROWS[1:])
    found = list(InFiles(train=str(tmp_path / "*.parquet")).rows("train"))
    assert [place for place, _ in found] == [
        f"{tmp_path}/1.parquet[0]",
        f"{tmp_path}/2.parquet[0]",
        f"{tmp_path}/2.parquet[1]",
    ]
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    assert list(read_rows(tmp_path / "rows.jsonl")) == [(f"{tmp_path}/rows.jsonl:1", {"a": 1})]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"torn\.parquet can't be read as Parquet"):
        list(read_rows(tmp_path / "torn.parquet"))
    with pytest.raises(ValueError, match="there is no file"):
        InFiles(train=str(tmp_path / "nowhere.parquet")).files("train")
