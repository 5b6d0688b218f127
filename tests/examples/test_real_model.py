"""The example on a pretrained model: its rows are right, and no existing folder is overwritten.

Where `pretrained/SmolLM2-135M-Instruct` has been made, the model answers a question and ends its turn with
the tokenizer's end of text.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.shipped import ROOT, experiment_of
from treetune.vocabulary import Problem

FOLDER = ROOT / "pretrained/SmolLM2-135M-Instruct"


Rows = dict[str, list[dict[str, Any]]]
"""The rows of each split."""


@pytest.fixture(scope="module")
def rows_by_task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    folder = tmp_path_factory.mktemp("rows")
    subprocess.run([sys.executable, ROOT / "examples/real_model/make_rows.py"], cwd=folder, check=True)
    rows_by_task = {}
    for task in ("sums", "sums_of_four"):
        files = sorted((folder / "data" / task).iterdir())
        rows_by_task[task] = {
            file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in files
        }
    return rows_by_task


@pytest.fixture(scope="module")
def rows(rows_by_task: dict[str, Rows]) -> Rows:
    return rows_by_task["sums"]


def numbers_of(question: str) -> list[int]:
    return [int(number) for number in question.removeprefix("What is ").removesuffix("?").split(" + ")]


def asked_numbers(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(sorted(numbers_of(row["prompt"][-1]["content"])))


@pytest.mark.parametrize(("task", "digits", "train_rows"), [("sums", 3, 511), ("sums_of_four", 4, 2561)])
def test_every_line_of_every_solution_is_right(
    rows_by_task: dict[str, Rows], task: str, digits: int, train_rows: int
) -> None:
    rows = rows_by_task[task]
    assert {split: len(of_split) for split, of_split in rows.items()} == {
        "test": 100, "train": train_rows, "validation": 100,
    }  # fmt: skip
    for row in itertools.chain.from_iterable(rows.values()):
        *solved, question = row["prompt"]
        solution = {"role": "assistant", "content": row["extra_info"]["solution"]}
        turns = [*solved, question, solution]
        for asked, answered in zip(turns[::2], turns[1::2], strict=True):
            assert (asked["role"], answered["role"]) == ("user", "assistant")
            *steps, marked_answer = answered["content"].splitlines()
            for step in steps:
                terms, result = step.split(" = ")
                assert sum(map(int, terms.split(" + "))) == int(result), row
            assert len(steps) == digits - 1
            assert marked_answer == f"#### {sum(numbers_of(asked['content']))}"
        assert row["reward_model"]["ground_truth"] == str(sum(numbers_of(question["content"])))


@pytest.mark.parametrize("task", ["sums", "sums_of_four"])
def test_no_held_out_sum_is_trained_on_or_shown_in_any_order(
    rows_by_task: dict[str, Rows], task: str
) -> None:
    rows = rows_by_task[task]
    digits = {split: set(map(asked_numbers, of_split)) for split, of_split in rows.items()}
    shown = {tuple(sorted(numbers_of(turn["content"]))) for turn in rows["train"][0]["prompt"][:-1:2]}
    assert len(shown) == 3
    for first, second in itertools.combinations([*digits.values(), shown], 2):
        assert first.isdisjoint(second)


def test_grpo_and_vineppo_differ_in_their_credit_only() -> None:
    grpo, vineppo = (experiment_of(f"{ROOT}/examples/real_model/{name}") for name in ("grpo", "vineppo"))
    assert grpo.credit != vineppo.credit
    assert replace(vineppo, credit=grpo.credit, experiment_name=grpo.experiment_name) == grpo


def test_the_grader_reads_the_marked_sum_of_an_answer(rows: Rows) -> None:
    row = rows["test"][0]
    problem = Problem(
        id="test/0",
        prompt=row["prompt"][-1]["content"],
        gold=row["reward_model"]["ground_truth"],
        data={"data_source": row["data_source"]},
    )
    grader = experiment_of(f"{ROOT}/examples/real_model/grpo").task.grader
    solution = row["extra_info"]["solution"]
    assert grader.grade(solution, problem).reward == 1.0
    assert grader.grade(solution.replace("####", "The sum is"), problem).reward == 0.0


def test_a_folder_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("mine")
    script = ROOT / "scripts/pretrained_135m.py"
    finished = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True)
    assert finished.returncode == 1
    assert "exists" in finished.stderr
    assert (tmp_path / "weights").read_text() == "mine"


@pytest.mark.skipif(not FOLDER.is_dir(), reason="made by scripts/pretrained_135m.py")
def test_the_pretrained_model_answers_and_ends_its_turn() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    message = {"role": "user", "content": "What is the capital of France?"}
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_tensors="pt")
    sampled = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    answer = tokenizer.decode(sampled[0, prompt["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
