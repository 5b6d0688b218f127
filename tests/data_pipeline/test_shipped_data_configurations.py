"""Every configuration of a data set is right, and called by the source that it is of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import treetune.parts  # noqa: F401  (registers them)
from treetune.config.build import build
from treetune.config.jsonnet import configurations, load
from treetune.main import main
from treetune_data.expansions import code_tests
from treetune_data.pipelines import DataPipeline, PrepareData

ROOT = Path(__file__).parents[2]
DATA = configurations(ROOT / "configs" / "data")


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
def test_a_data_set_is_right_and_called_by_its_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--configs", str(path), "check_config"]) == 0, capsys.readouterr().err
    source = load([str(path)], ()).data["data_source"]
    assert path.stem == source


DAPO = (
    "Solve the following math problem step by step. The last line … is the answer to the problem.\n\n"
    'What is \\boxed{1} + 1?\n\nRemember to put your answer on its own line after "Answer:".'
)
CALLS = [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}]
STDIN = [{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}]
TACO = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
LONG = "Add two numbers. " * 10
OPTIONS = {
    "Correct Answer": "4",
    "Incorrect Answer 1": "1",
    "Incorrect Answer 2": "2",
    "Incorrect Answer 3": "3",
}

ROWS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "math__dapo": (
        {
            "prompt": [{"role": "user", "content": DAPO}],
            "reward_model": {"ground_truth": "2"},
            "extra_info": {"index": "a"},
        },
        "What is \\boxed{1} + 1? Please output the final answer within \\boxed{}.",
        "2",
    ),
    "math__or1": (
        {"prompt": [{"content": "1 + 1?", "role": "user"}], "reward_model": {"ground_truth": '["2"]'}},
        "1 + 1?",
        "2",
    ),
    "math__orz": ({"0": {"value": "1 + 1?"}, "1": {"ground_truth": {"value": "2"}}}, "1 + 1?", "2"),
    "math__amc": ({"problem": "1 + 1?", "answer": 2.0}, "1 + 1?", "2"),
    "math__olympiadbench": ({"question": "1 + 1?", "final_answer": ["2"]}, "1 + 1?", "2"),
    "codegen__leetcode2k": (
        {
            "query": "Add. ### Format: x ### Answer: (use the provided format with backticks)",
            "prompt": "import math",
            "test": "def check(f): assert f(1, 2) == 3",
            "entry_point": " Solution().add ",
            "completion": "class Solution: ...",
            "meta": {"question_title": "Add", "difficulty": "Easy"},
        },
        "Add. ### Format: x",
        {"functional": "def check(f): assert f(1, 2) == 3\n\ncheck(Solution().add)"},
    ),
    "codegen__livecodebench": (
        {
            "problem": "Add.",
            "starter_code": "def add(a, b):",
            "tests": json.dumps(CALLS),
            "metadata": {"func_name": "add"},
        },
        "Use this starter code:\n\n```python\ndef add(a, b):\n```",
        {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"},
    ),
    "codegen__primeintellect": (
        {"problem": LONG, "tests": json.dumps(STDIN), "solutions": ["```python\nprint(3)\n```"]},
        LONG.strip(),
        {"inputs": ["1 2\n"], "outputs": ["3\n"]},
    ),
    "codegen__taco": (
        {
            "question": LONG,
            "source": "codeforces",
            "starter_code": "",
            "input_output": json.dumps(TACO),
            "solutions": ["print(sum(map(int, input().split())))"],
            "difficulty": "EASY",
        },
        "Write the whole program or function",
        TACO,
    ),
    "codegen__humaneval": (
        {
            "prompt": "def add(a, b):\n",
            "test": "def check(f): ...",
            "entry_point": "add",
            "canonical_solution": "    return a + b\n",
        },
        "def add(a, b):",
        {"functional": "def check(f): ...\n\ncheck(add)"},
    ),
    "codegen__mbpp": (
        {
            "text": "Add.",
            "code": "def add(): ...",
            "test_list": ["assert add(1, 2) == 3"],
            "test_setup_code": "",
        },
        "pass these tests:\n\nassert add(1, 2) == 3",
        {"functional": ["assert add(1, 2) == 3"]},
    ),
    "simulation__codeio": (
        {
            "problem_description": "Add.",
            "io_requirements": "Input: a.",
            "refcode": "def main_solution(a): ...",
            "ios": [{"input": {"a": 1}, "output": 1}],
        },
        "def main_solution",
        None,
    ),
    "simulation__cruxeval_o": (
        {"code": "def f(x): return x", "input": "'a'", "output": "'a'", "id": "sample_0"},
        "assert f('a') == ??",
        {"code": "def f(x): return x", "input": "'a'"},
    ),
    "table__finqa": (
        {
            "pre_text": ["Before."],
            "table": [["year", "sum"], ["2001", "3"]],
            "post_text": ["After."],
            "question": "Sum?",
            "answer": "3",
        },
        "| year | sum |\n| 2001 | 3 |",
        "3",
    ),
    "stem__web": (
        {
            "question": "Why?",
            "answer": "1.25 m",
            "category": "Physics",
            "difficulty": "PhD",
            "answer_type": "Float",
        },
        "Why?",
        "1.25 m",
    ),
    "stem__gpqa_diamond": ({"Question": "2 + 2?", **OPTIONS}, "A) ", None),
    "stem__supergpqa": (
        {
            "question": "2 + 2?",
            "options": ["3", "4"],
            "answer_letter": "B",
            "field": "x",
            "difficulty": "easy",
        },
        "A) 3\nB) 4",
        "B",
    ),
    "ood__ifeval": (
        {"prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}], "key": 1},
        "No commas.",
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    ),
    "ood__livebench_reasoning": (
        {
            "turns": ["Who lies?"],
            "ground_truth": "yes",
            "livebench_release_date": "2024-06-24",
            "category": "r",
            "task": "t",
        },
        "Who lies?",
        "yes",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_as_the_source_has_them_becomes_a_prompt_and_its_gold(name: str) -> None:
    fields, words, gold = ROWS[name]
    (row,) = _pipeline(name).rows_of(fields)
    assert isinstance(row, dict), f"a filter dropped it: {row}"
    assert words in row["prompt"][0]["content"]
    found = row["reward_model"]["ground_truth"]
    if isinstance(gold, dict):
        assert json.loads(found) == gold
    elif gold is not None:
        assert found == gold


def test_choices_are_shuffled_with_their_right_letter() -> None:
    letters = set()
    for number in range(40):
        (row,) = _pipeline("stem__gpqa").rows_of({"Question": f"{number}?", **OPTIONS})
        assert isinstance(row, dict)
        letter = row["reward_model"]["ground_truth"]
        assert f"{letter}) 4" in row["prompt"][0]["content"]
        letters.add(letter)
    assert letters == set("ABCD")


def test_either_side_of_a_program_is_asked_for_about_as_often() -> None:
    fields, pipeline = ROWS["simulation__codeio"][0], _pipeline("simulation__codeio")
    asked = [pipeline.rows_of({**fields, "refcode": str(number)})[0] for number in range(60)]
    outputs = sum("predict the output" in str(row) for row in asked)
    assert 20 < outputs < 40


def test_eight_tests_of_a_program_are_kept() -> None:
    numbers = [str(number) for number in range(50)]
    tests = {"inputs": [[number] for number in numbers], "outputs": numbers}
    made = code_tests({"input_output": json.dumps(tests)}, 3)
    assert made is not None
    oracle = made["oracle"]
    assert len(oracle["inputs"]) == 8 and oracle["inputs"] == oracle["outputs"]
    assert code_tests({"tests": "[]"}, 3) is None


def test_rows_that_guru_leaves_out_are_left_out() -> None:
    web = ROWS["stem__web"][0]
    for changed, name in (
        ({"category": "Mathematics"}, "mathematics"),
        ({"difficulty": "Senior High School"}, "below university"),
        ({"answer_type": "Boolean"}, "choices and yes or no"),
        ({"answer": "3.14159"}, "many decimals"),
    ):
        assert _pipeline("stem__web").rows_of({**web, **changed}) == [name]
    taco = ROWS["codegen__taco"][0]
    for changed, name in (
        ({"source": "leetcode"}, "GeeksforGeeks and LeetCode"),
        ({"question": "Add."}, "too short"),
        ({"question": LONG + "\n![](x.png)"}, "pictures"),
    ):
        assert _pipeline("codegen__taco").rows_of({**taco, **changed}) == [name]


def _pipeline(name: str) -> PrepareData:
    built = build(DataPipeline, load([str(ROOT / "configs" / "data" / f"{name}.jsonnet")], ()).data)
    assert isinstance(built, PrepareData)
    return built
