"""Promises of `treetune new`:

* it writes a folder whose printed commands work, for built-in tasks and for a user's rows;
* the values in the configuration suit the rows, and the rows and their reward function are tried before
  training;
* a wrong answer is told with the right ones, and leaves no folder.
"""

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

from tests.support.documents import Document
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


def run_new(name: str, data: str, model: str, method: str, hardware: str, *more: str) -> int:
    """Run `treetune new` with these options, and return its exit code."""
    options = ["--name", name, "--data", data, "--model", model, "--method", method, "--hardware", hardware]
    return main(["new", *options, *more])


def training_commands_of(folder: str) -> list[Sequence[str]]:
    """List the README's training commands, each with one small iteration in place of all."""
    commands = []
    for _, (_program, *arguments) in Document(Path(folder, "README.md")).commands:
        if arguments[0] == "run":
            commands.append([*arguments, "--override", ONE_ITERATION])
    return commands


@pytest.mark.slow
def test_a_built_in_task_and_own_rows_each_come_to_their_first_iteration() -> None:
    assert run_new("first", "addition_chain", "tiny", "sft", "in_process") == 0
    assert run_new("mine", "rows.jsonl", "tiny", "grpo", "in_process") == 0
    for folder, stages in {"first": ["sft"], "mine": ["sft", "grpo"]}.items():
        run_each(*training_commands_of(folder), cwd=Path(folder))
        for stage in stages:
            policy = Path(folder, "experiments", folder, stage, "checkpoints", "0001", "policy")
            assert (policy / "model.safetensors").is_file()


def test_check_tries_the_reward_function_on_the_first_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_new("mine", "rows.jsonl", "tiny", "sft", "in_process") == 0
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
    assert run_new("mine", "rows.jsonl", "tiny", "grpo", "in_process") == 0
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
    assert run_new("mine", "rows.jsonl", "tiny", "sft", "in_process") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "rows.jsonl: 60 rows; the problem is 'question', the reference answer 'answer'"
    assert printed[1].startswith("note: 6 test problems are few")
    grades = [line.split()[:2] for line in printed[3:6]]
    assert grades == [["1.0", "(ok)"], ["0.0", "(ok)"], ["0.0", "(no_answer)"]]
    assert printed[-3:] == [f"  treetune {command} sft.jsonnet" for command in ("check", "plan", "run")]
    files = {path.name for path in Path("mine").iterdir()}
    assert files >= {"README.md", "sft.jsonnet", "reward.py", "train.jsonl", "test.jsonl", "examples.jsonl"}
    rows = [len(Path("mine", f"{name}.jsonl").read_text().splitlines()) for name in ("train", "test")]
    assert rows == [54, 6]
    config = load(["mine/sft.jsonnet"]).data
    assert config["task"]["train"] == ["train.jsonl"] and config["task"]["validation_size"] == 6
    assert config["model"]["alphabet"] == "\n #+.0123456789?Ieimorst"
    assert config["evaluation"]["rollout"]["max_tokens"] == len("It is 4 more.\n#### 63") + 16


def test_the_configuration_shows_the_keys_that_users_edit_with_values_that_suit_the_rows() -> None:
    assert run_new("mine", "rows.jsonl", "Qwen/Qwen2.5-1.5B-Instruct", "grpo", "gpu") == 0
    configuration = Path("mine/grpo.jsonnet").read_text()
    for key in (
        "train:", "test:", "prompt:", "grader:", "model:", "max_tokens:", "context_length:", "samples:",
        "iterations:", "problems_per_iteration:", "learning_rate:", "minibatch_size:", "prompt_tokens:",
    ):  # fmt: skip
        assert key in configuration, key
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
    assert run_new("mine", "rows.jsonl", "someone/model-7b", "grpo", "cpu") == 0
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
def test_models_methods_and_hardware_can_be_combined_and_fields_can_be_named(
    model: str, method: str, hardware: str
) -> None:
    assert run_new("mine", "rows.csv", model, method, hardware, "--fields", "text,number") == 0
    assert load([f"mine/{method}.jsonnet"]).data["task"]["gold_field"] == "number"


@pytest.mark.parametrize(
    ("answers", "part_of_message"),
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
    answers: dict[str, str], part_of_message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(Path().iterdir())
    options = []
    for key, value in ({"name": "first"} | answers).items():
        options += [f"--{key}", value]
    assert main(["new", *options]) == 2
    assert part_of_message in capsys.readouterr().err
    assert sorted(Path().iterdir()) == before
