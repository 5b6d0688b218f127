"""The example on a pretrained model: its rows are right, and a folder that exists is never overwritten.

Where `pretrained/SmolLM2-135M-Instruct` has been made, the model answers a question and ends its turn with
the tokenizer's end of text.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.many_runs import ROOT

FOLDER = ROOT / "pretrained/SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("rows")
    subprocess.run([sys.executable, ROOT / "examples/real_model/make_rows.py"], cwd=folder, check=True)
    files = sorted((folder / "data/shop").iterdir())
    return {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in files}


def test_every_line_of_every_solution_is_right(rows: dict[str, list[dict[str, str]]]) -> None:
    for row in rows["train"] + rows["test"]:
        *steps, marked_answer = row["answer"].splitlines()
        results = []
        for step in steps:
            left_side, result = step.split(" = ")
            first, operator, second = left_side.split()
            by_operator = {"*": int(first) * int(second), "+": int(first) + int(second)}
            assert int(result) == by_operator.get(operator, int(first) - int(second)), row
            results.append(int(result))
        assert marked_answer == f"#### {results[-1]}"
        assert results[-1] >= 0


def test_no_test_question_is_trained_on(rows: dict[str, list[dict[str, str]]]) -> None:
    training_questions = {row["question"] for row in rows["train"]}
    assert len(training_questions) == len(rows["train"])
    assert training_questions.isdisjoint(row["question"] for row in rows["test"])


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
