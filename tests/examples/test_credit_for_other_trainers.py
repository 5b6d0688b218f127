"""The example of docs/credit_for_other_trainers.md and the files of examples/other_trainers work.

Each file in examples/other_trainers runs with the package that it is for, in two optimiser steps (TRL) or as
the package calls it (verl, verifiers). The advantages that the other trainer used are those that a credit
gives the same answers in a run of treetune.

The packages are no dependencies. A test runs if the package is installed here, or if an environment variable
names the Python of an environment that has the package, PyTorch, transformers and treetune's dependencies:

    TREETUNE_TRL_PYTHON=/path/to/venv/bin/python
    TREETUNE_VERL_PYTHON=…  TREETUNE_VERIFIERS_PYTHON=…
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.examples.runs_credit import advantages_in_run
from tests.support.documents import ROOT, Document
from treetune.models.tokenizer import character_tokenizer

SHIMS = ROOT / "examples" / "other_trainers"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model of characters and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = character_tokenizer("0123456789+=?\n", 64)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(python: str, program: Path, *arguments: str, cwd: Path) -> str:
    """Runs a program with this checkout's treetune, and returns what it printed."""
    done = subprocess.run(
        [python, str(program), *arguments],
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(SHIMS), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_the_example_of_the_page_prints_values_and_advantages(model_folder: Path, tmp_path: Path) -> None:
    page = Document(ROOT / "docs" / "credit_for_other_trainers.md")
    program = tmp_path / "step_credit.py"
    program.write_text(page.files["step_credit.py"])
    values, step_ends, advantages, cost = run(
        sys.executable, program, str(model_folder), cwd=tmp_path
    ).splitlines()
    assert json.loads(step_ends.replace("(", "[").replace(")", "]")) == [[6, 12], [6, 12]]
    values_of_answers = json.loads(values.replace("(", "[").replace(")", "]"))
    for answer_values, answer_advantages, reward in zip(
        values_of_answers, json.loads(advantages), [1.0, 0.0], strict=True
    ):
        assert len(answer_values) == 2 and len(answer_advantages) == 12
        sum_of_steps = answer_advantages[0] + answer_advantages[6]
        assert sum_of_steps == pytest.approx(reward - answer_values[0])
    # The prompt is continued for both answers together, and the first line of each answer.
    assert cost.startswith("CreditCost(samples=27, ")


def test_the_notebook_compares_three_estimators_by_the_advantages_of_a_run(model_folder: Path) -> None:
    cells = json.loads((SHIMS / "credit.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            exec(re.sub('MODEL = ".*"', f"MODEL = {str(model_folder)!r}", source), names)
    rows = []
    for answer in names["answers"]:
        rows.append(({}, answer["prompt_ids"], answer["response_ids"], answer["reward"], None))
    assert list(names["credited"]) == ["continuations", "sequential", "topped_up"]
    for values, credited in names["credited"].items():
        expected = advantages_in_run(
            {"type": "monte_carlo", "samples": 9, "values": {"type": values}},
            rows,
            model=names["model"],
            tokenizer=names["tokenizer"],
            reward=lambda text, row: names["reward"]("", text),
            max_tokens=24,
            seed=0,
            iteration=0,
        )
        for row, expected_row in zip(credited.advantages, expected, strict=True):
            assert row == expected_row.tolist()
    table = names["table"]
    assert len(table) == len(names["ends"]) > 1
    assert "".join(table["step"]) == names["tokenizer"].decode(names["response_ids"])
    rewards = {answer["reward"] for answer in names["answers"]}
    assert rewards == {0.0, 1.0}, "some answers are right, and some are wrong"


def python_with(package: str) -> str:
    """Returns a Python that has the package; skips the test where there is none."""
    variable = f"TREETUNE_{package.upper()}_PYTHON"
    python = os.environ.get(variable)
    if python is None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed, and {variable} names no Python that has it")
    return python or sys.executable


def test_trl_trains_two_steps_with_the_advantages_of_a_run(model_folder: Path, tmp_path: Path) -> None:
    python = python_with("trl")
    program = ROOT / "tests" / "examples" / "trl_two_steps.py"
    printed = run(python, program, str(model_folder), cwd=tmp_path).splitlines()[-1]
    steps, _, compared = printed.removeprefix("steps ").partition(", answers with several advantages ")
    assert int(steps) == 2
    assert int(compared) > 0, "VinePPO tells the steps of an answer apart"


def test_verl_computes_the_advantages_of_a_run(model_folder: Path, tmp_path: Path) -> None:
    python = python_with("verl")
    program = ROOT / "tests" / "examples" / "verl_advantages.py"
    assert run(python, program, str(model_folder), cwd=tmp_path).splitlines()[-1] == "equal"


def test_traces_of_verifiers_hold_the_advantages_of_their_sampled_tokens(tmp_path: Path) -> None:
    python = python_with("verifiers")
    program = ROOT / "tests" / "examples" / "verifiers_advantages.py"
    assert run(python, program, cwd=tmp_path).splitlines()[-1] == "equal"
