"""`treetune new` writes a folder whose commands work as they are printed, for our tasks and other rows."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.documents import Document
from tests.support.many_runs import run_each
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


def test_own_rows_are_looked_at_and_three_answers_graded_before_anything_is_trained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert new("mine", "rows.jsonl", "tiny", "sft", "in_process") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "rows.jsonl: 60 rows; the problem is 'question', the gold 'answer'"
    assert [line.split()[:2] for line in said[2:5]] == [
        ["1.0", "(ok)"],
        ["0.0", "(ok)"],
        ["0.0", "(no_answer)"],
    ]
    assert said[-3:] == [f"  treetune {one} --configs sft.jsonnet" for one in ("check", "plan", "run")]
    files = {path.name for path in Path("mine").iterdir()}
    assert files >= {"README.md", "sft.jsonnet", "reward.py", "train.jsonl", "test.jsonl", "examples.jsonl"}
    rows = [len(Path("mine", f"{name}.jsonl").read_text().splitlines()) for name in ("train", "test")]
    assert rows == [54, 6]
    config = Path("mine/sft.jsonnet").read_text()
    assert '"rows": 48' in config and '"longest_gold": 21' in config
    assert '"alphabet": "\\n #+.0123456789?Ieimorst"' in config


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
    assert len(Path(f"mine/{method}.jsonnet").read_text().splitlines()) <= 24


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (
            {"data": "rows.csv", "method": "sft"},
            "problem and gold? Give --fields PROBLEM,GOLD of 'id'",
        ),
        ({"data": "addition_chan"}, "addition_chain.jsonnet"),
        ({"method": "vinepo"}, "vineppo.jsonnet"),
        ({"hardware": "tpu"}, "in_process, cpu or gpu"),
        ({"data": "none.jsonl"}, "there is no file none.jsonl"),
        ({"name": "rows.csv"}, "is there already"),
    ],
)
def test_a_wrong_answer_is_told_what_would_be_right_and_no_folder_is_left(
    answers: dict[str, str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(Path().iterdir())
    monkeypatch.setattr("builtins.input", lambda question: answers.get(question.partition(":")[0], ""))
    assert main(["new"]) == 2
    assert told in capsys.readouterr().err
    assert sorted(Path().iterdir()) == before


def test_where_nobody_answers_the_option_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(question: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", closed)
    assert main(["new", "--name", "x"]) == 2
    assert "give --data" in capsys.readouterr().err
