"""`treetune new` writes a folder whose commands work as they are printed, for our tasks and other rows."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.documents import Document
from tests.support.many_runs import run_each
from treetune.config.jsonnet import load
from treetune.main import main

ONE_ITERATION = """{
  iterations: 1, problems_per_iteration: 16, evaluation+: { every: null, sets: [] },
  trainer+: { minibatch_size: null, schedule: { type: 'warmup', may_outlast_training: true } },
}"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"id": n, "question": f"{n} + 4?", "answer": f"It is 4 more.\n#### {n + 4}"} for n in range(60)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Path("rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text", "number"])
        writer.writerows([{"id": "id", "text": "text", "number": "number"}])
        writer.writerows({"id": n, "text": f"{n} + 4?", "number": n + 4} for n in range(60))


def new(name: str, data: str, model: str, method: str, hardware: str, *more: str) -> int:
    """Runs the command, and returns its exit code."""
    options = {"name": name, "data": data, "model": model, "method": method, "hardware": hardware}
    return main(["new", *(word for key, value in options.items() for word in (f"--{key}", value)), *more])


def commands_of(folder: str) -> list[Sequence[str]]:
    """What the README tells to type, with one small iteration in place of all."""
    typed = [words[1:] for _, words in Document(Path(folder, "README.md")).commands]
    typed = [words for words in typed if words[0] == "run"]
    return [[*words, "--override", ONE_ITERATION] for words in typed]


@pytest.mark.slow
def test_a_built_in_task_and_own_rows_each_come_to_their_first_iteration() -> None:
    assert new("first", "addition_chain", "tiny", "sft", "in_process") == 0
    assert new("mine", "rows.jsonl", "tiny", "grpo", "in_process") == 0
    for folder, stages in {"first": ["sft"], "mine": ["sft", "grpo"]}.items():
        run_each(*commands_of(folder), cwd=Path(folder))
        for stage in stages:
            policy = Path(folder, "experiments", folder, stage, "checkpoints", "0001", "policy")
            assert (policy / "model.safetensors").is_file()


def test_check_tries_the_reward_function_on_the_first_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert new("mine", "rows.jsonl", "tiny", "sft", "in_process") == 0
    monkeypatch.chdir("mine")
    capsys.readouterr()
    command = ["check", "sft.jsonnet"]
    assert main(command) == 0
    assert "reward:score gives the reference answer of example/0 the reward 1" in capsys.readouterr().err
    Path("reward.py").write_text("def score(response, gold):\n    return float({}[gold])\n")
    # A process of its own: this one has already imported `reward`.
    done = subprocess.run(
        [sys.executable, "-m", "treetune.main", *command], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    message = " ".join(done.stderr.split())
    assert "task.grader: reward:score can't grade the reference answer of example/0 as a response" in message
    assert re.search(r"KeyError: .* \(reward.py, line 2\)", message)


def test_a_table_of_new_experiments_is_refused_without_the_one_that_trains_the_start_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert new("mine", "rows.jsonl", "tiny", "grpo", "in_process") == 0
    monkeypatch.chdir("mine")
    table = {
        "type": "reproduction",
        "name": "mine",
        "seeds": [3, 4],
        "directory": "experiments",
        "rows": [{"name": "GRPO", "experiment": "grpo"}],
        "columns": [{"name": "test", "evaluation": "test"}],
    }
    grpo, sft = {"configs": ["grpo.jsonnet"]}, {"configs": ["sft.jsonnet"]}
    for experiments, code in (({"grpo": grpo}, 2), ({"sft": sft, "grpo": grpo | {"needs": ["sft"]}}, 0)):
        Path("table.json").write_text(json.dumps(table | {"experiments": experiments}))
        capsys.readouterr()
        assert main(["check", "table.json"]) == code
        message = " ".join(capsys.readouterr().err.split())
        missing = "starts from experiments/seed-3/mine/sft/checkpoints/last/policy, which doesn't exist"
        assert (missing in message) == (code == 2)


def test_own_rows_are_looked_at_and_three_answers_graded_before_anything_is_trained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert new("mine", "rows.jsonl", "tiny", "sft", "in_process") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "rows.jsonl: 60 rows; the problem is 'question', the reference answer 'answer'"
    assert said[1].startswith("note: 6 test problems are few")
    assert [line.split()[:2] for line in said[3:6]] == [
        ["1.0", "(ok)"],
        ["0.0", "(ok)"],
        ["0.0", "(no_answer)"],
    ]
    assert said[-3:] == [f"  treetune {command} sft.jsonnet" for command in ("check", "plan", "run")]
    files = {path.name for path in Path("mine").iterdir()}
    assert files >= {"README.md", "sft.jsonnet", "reward.py", "train.jsonl", "test.jsonl", "examples.jsonl"}
    rows = [len(Path("mine", f"{name}.jsonl").read_text().splitlines()) for name in ("train", "test")]
    assert rows == [54, 6]
    config = load(["mine/sft.jsonnet"]).data
    assert config["task"]["train"] == ["train.jsonl"] and config["task"]["validation_size"] == 6
    assert config["model"]["alphabet"] == "\n #+.0123456789?Ieimorst"
    assert config["evaluation"]["rollout"]["max_tokens"] == len("It is 4 more.\n#### 63") + 16


def test_the_file_shows_what_one_edits_with_values_that_suit_the_rows() -> None:
    assert new("mine", "rows.jsonl", "Qwen/Qwen2.5-1.5B-Instruct", "grpo", "gpu") == 0
    text = Path("mine/grpo.jsonnet").read_text()
    for key in (
        "train:", "test:", "prompt:", "grader:", "model:", "max_tokens:", "context_length:", "samples:",
        "iterations:", "problems_per_iteration:", "learning_rate:", "minibatch_size:", "prompt_tokens:",
    ):  # fmt: skip
        assert key in text, key
    config = load(["mine/grpo.jsonnet"]).data
    assert config["task"]["name"] == "mine"
    # 48 rows are left to train on.
    assert config["iterations"] * config["problems_per_iteration"] <= 10 * 48
    answers = config["problems_per_iteration"] * config["rollout"]["samples"]
    assert answers % config["trainer"]["minibatch_size"] == 0


def test_what_has_a_default_is_not_asked_for_and_a_name_with_a_space_is_quoted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["new", "--name", "my exp", "--data", "rows.jsonl"]) == 0
    assert "  cd 'my exp'\n" in capsys.readouterr().out
    assert main(["new", "--data", "rows.jsonl"]) == 2
    assert "stdin is not a terminal: pass --name" in capsys.readouterr().err


def test_a_large_model_on_a_cpu_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert new("mine", "rows.jsonl", "someone/model-7b", "grpo", "cpu") == 0
    assert "7.0 billion weights: on a CPU, an iteration takes hours" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "method", "hardware"),
    [
        ("qwen2.5-1.5b-instruct", "dapo", "gpu"),
        ("someone/model", "sft", "gpu"),
        ("someone/model", "dpo_positive", "cpu"),
        ("tiny", "ppo", "cpu"),
    ],
)
def test_models_methods_and_hardware_go_together_and_own_fields_are_taken(
    model: str, method: str, hardware: str
) -> None:
    assert new("mine", "rows.csv", model, method, hardware, "--fields", "text,number") == 0
    assert load([f"mine/{method}.jsonnet"]).data["task"]["gold_field"] == "number"


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (
            {"data": "rows.csv", "method": "sft"},
            "which fields hold problem and answer: give --fields PROBLEM,ANSWER of 'id'",
        ),
        ({"data": "addition_chan"}, "addition_chain.jsonnet"),
        ({"method": "vinepo"}, "did you mean vineppo?"),
        ({"method": "gpro"}, "did you mean grpo?"),
        ({"hardware": "tpu"}, "give in_process, cpu, gpu"),
        ({"data": "none.jsonl"}, "there is no file none.jsonl"),
        ({"name": "rows.csv"}, "exists already"),
        ({"name": "../x"}, "--name: '../x' can't be the name of a folder"),
        ({"model": "tinny"}, "nor owner/name: did you mean tiny?"),
    ],
)
def test_a_wrong_answer_is_told_what_would_be_right_and_no_folder_is_left(
    answers: dict[str, str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(Path().iterdir())
    options = [word for key, value in ({"name": "first"} | answers).items() for word in (f"--{key}", value)]
    assert main(["new", *options]) == 2
    assert told in capsys.readouterr().err
    assert sorted(Path().iterdir()) == before
