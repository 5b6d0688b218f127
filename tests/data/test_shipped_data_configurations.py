"""Promises of the configurations under configs/data:

* each passes the check, and has the name of its data source;
* a row as the source has it becomes a prompt with the right reference answer;
* rows that Guru's paper leaves out are left out.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

import treetune.parts  # noqa: F401  (registers them)
from treetune.config.build import build
from treetune.config.jsonnet import load
from treetune.config.layers import find_configuration_files
from treetune.data.expansions import code_tests
from treetune.data.pipelines import DataPipeline, PrepareData
from treetune.main import main

ROOT = Path(__file__).parents[2]
DATA = find_configuration_files(ROOT / "configs" / "data")


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
def test_a_configuration_passes_the_check_and_has_the_name_of_its_data_source(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--configs", str(path), "check_config", "--config-only"]) == 0, capsys.readouterr().err
    source = load([str(path)], ()).data["data_source"]
    assert path.stem == source


LINES = (Path(__file__).parent / "source_rows.jsonl").read_text().splitlines()
SOURCE_ROWS = {line["data_set"]: line for line in map(json.loads, LINES)}
"""A row of each data set as its source has it, a part of the prompt that it becomes, and its gold."""


@pytest.mark.parametrize("name", SOURCE_ROWS)
def test_a_row_as_the_source_has_it_becomes_a_prompt_and_its_gold(name: str) -> None:
    (row,) = pipeline_of(name).rows_of(SOURCE_ROWS[name]["row"])
    assert isinstance(row, dict), f"a filter dropped it: {row}"
    assert SOURCE_ROWS[name]["prompt_has"] in row["prompt"][0]["content"]
    expected, gold = SOURCE_ROWS[name]["gold"], row["reward_model"]["ground_truth"]
    if isinstance(expected, dict):
        assert json.loads(gold) == expected
    elif expected is not None:
        assert gold == expected


def test_choices_are_shuffled_and_the_gold_is_the_letter_of_the_right_one() -> None:
    options = {
        name: value for name, value in SOURCE_ROWS["stem__gpqa_diamond"]["row"].items() if "Answer" in name
    }
    letters = set()
    for number in range(40):
        (row,) = pipeline_of("stem__gpqa").rows_of({"Question": f"{number}?", **options})
        letter = row["reward_model"]["ground_truth"]
        assert f"{letter}) 4" in row["prompt"][0]["content"]
        letters.add(letter)
    assert letters == set("ABCD")


def test_either_side_of_a_program_is_asked_for_about_as_often() -> None:
    fields, pipeline = SOURCE_ROWS["simulation__codeio"]["row"], pipeline_of("simulation__codeio")
    rows = [pipeline.rows_of({**fields, "refcode": str(number)})[0] for number in range(60)]
    outputs = sum("predict the output" in str(row) for row in rows)
    assert 20 < outputs < 40


def test_eight_tests_of_a_program_are_kept() -> None:
    numbers = [str(number) for number in range(50)]
    tests = {"inputs": [[number] for number in numbers], "outputs": numbers}
    program_tests = code_tests({"input_output": json.dumps(tests)}, 3)
    assert program_tests is not None
    oracle = program_tests["oracle"]
    assert len(oracle["inputs"]) == 8 and oracle["inputs"] == oracle["outputs"]
    assert code_tests({"tests": "[]"}, 3) is None


@pytest.mark.parametrize(
    ("name", "changed", "filtered_by"),
    [
        ("stem__web", {"category": "Mathematics"}, "mathematics"),
        ("stem__web", {"difficulty": "Senior High School"}, "below university"),
        ("stem__web", {"answer_type": "Boolean"}, "choices and yes or no"),
        ("stem__web", {"answer": "3.14159"}, "many decimals"),
        ("codegen__taco", {"source": "leetcode"}, "GeeksforGeeks and LeetCode"),
        ("codegen__taco", {"question": "Add."}, "too short"),
        ("codegen__taco", {"question": "Add two numbers. " * 10 + "\n![](x.png)"}, "pictures"),
    ],
)
def test_rows_that_guru_leaves_out_are_left_out(name: str, changed: dict[str, str], filtered_by: str) -> None:
    assert pipeline_of(name).rows_of(SOURCE_ROWS[name]["row"] | changed) == [filtered_by]


@cache
def pipeline_of(name: str) -> PrepareData:
    built = build(DataPipeline, load([str(ROOT / "configs" / "data" / f"{name}.jsonnet")], ()).data)
    assert isinstance(built, PrepareData)
    return built
