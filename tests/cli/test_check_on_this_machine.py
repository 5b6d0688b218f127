"""Promises of `treetune check` about the machine on which it runs:

* it ends with 2 and names the key if a file, a model folder or a GPU is missing here, and only notes this
  with `--config-only`, for the run may be for another machine;
* a missing column is a mistake on every machine, and batches that don't divide are a note;
* a run that lacks a device ends before it starts;
* it warns if the experiment's folder holds a run with another configuration; `run` then refuses to start
  before it loads PyTorch, and leaves the log of that run as it is.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from treetune.main import main

EXPERIMENT = """(import 'quickstart/sft.jsonnet') + {
  experiment_name: 'missing',
  task: {
    type: 'questions', train: ['train.jsonl'], test: ['test.jsonl'], validation_size: 1,
    problem_field: 'question', grader: { type: 'numeric' },
  },
  model+: { alphabet: '0123456789+?' },
  problems_per_iteration: null,
  trainer+: { minibatch_size: null, schedule+: { may_outlast_training: true } },
  evaluation+: { sets: [{ split: 'test' }] },
}"""


@pytest.fixture(autouse=True)
def _experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("train", "test"):
        rows = [json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(4)]
        Path(f"{name}.jsonl").write_text("".join(rows))
    Path("mine.jsonnet").write_text(EXPERIMENT)


@pytest.mark.parametrize(
    ("override", "key", "part_of_message"),
    [
        ("{ task+: { train: ['trian.jsonl'] } }", "task.train", "did you mean train.jsonl?"),
        (
            "{ task+: { train: ['data/gsm8k/train.jsonl'] } }",
            "task.train",
            "download_and_prepare_datasets.sh",
        ),
        (
            "{ model: { type: 'pretrained', name_or_path: 'experiments/x/checkpoints/last/policy' } }",
            "model.name_or_path",
            "treetune run",
        ),
        ("{ model: { type: 'pretrained', name_or_path: './no/folder' } }", "model.name_or_path", "no such"),
        ("{ engines+: { policy+: { devices: [0] } } }", "engines.policy.devices", "has no GPUs"),
    ],
)
def test_what_is_missing_here_is_told_with_its_key_unless_the_run_is_for_another_machine(
    override: str, key: str, part_of_message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "mine.jsonnet"]) == 0, capsys.readouterr().err
    assert main(["check", "mine.jsonnet", "--override", override]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert (
        message.startswith("missing on this machine") and f"{key}: " in message and part_of_message in message
    )
    assert main(["check", "mine.jsonnet", "--override", override, "--config-only"]) == 0
    assert f"note: missing here: {key}: " in " ".join(capsys.readouterr().err.split())


def test_rows_that_are_next_to_an_imported_configuration_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Path("below").mkdir()
    monkeypatch.chdir("below")
    Path("child.jsonnet").write_text("(import '../mine.jsonnet') + { seed: 2 }")
    assert main(["check", "child.jsonnet"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert f"there is no file train.jsonl (looked for in {tmp_path / 'below'})" in message
    assert f"There is one in {tmp_path}, next to the configuration" in message
    assert f"start the command in {tmp_path}, or write" in message
    assert f"where {tmp_path / 'mine.jsonnet'}" in message


def test_a_missing_column_is_a_mistake_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    override = "{ task+: { gold_field: 'anser' } }"
    assert main(["check", "mine.jsonnet", "--override", override, "--config-only"]) == 2
    assert "did you mean 'answer'?" in capsys.readouterr().err


def test_batches_that_do_not_divide_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "mine.jsonnet", "--override", "{ trainer+: { minibatch_size: 2 } }"]) == 0
    note = " ".join(capsys.readouterr().err.split())
    assert "minibatch_size 2 doesn't divide the 3 sequences" in note and "no sequence is dropped" in note


def test_engines_devices_that_are_missing_end_a_run_before_it_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    override = "{ engines+: { policy+: { devices: [0] } } }"
    assert main(["run_iteration_loop", "mine.jsonnet", "--override", override]) == 2
    assert "engines.policy.devices: devices names GPU 0" in capsys.readouterr().err


@pytest.fixture
def log_of_earlier_run(capsys: pytest.CaptureFixture[str]) -> Path:
    """The log of an earlier run of the experiment, whose folder has its configuration and an iteration."""
    folder = Path("experiments/missing")
    assert main(["print_config", "mine.jsonnet"]) == 0
    for file, text in {
        "config.json": capsys.readouterr().out,
        "manifest.json": "{}",
        "iterations/0000/episodes.arrow": "",
        "logs/run.log": "iteration 1 is done\n",
    }.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return folder / "logs/run.log"


OTHER_LEARNING_RATE = ["--override", "{ trainer+: { learning_rate: 0.5 } }"]


@pytest.mark.usefixtures("log_of_earlier_run")
def test_check_warns_of_a_run_with_another_configuration_in_the_experiments_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "mine.jsonnet"]) == 0
    assert "another configuration" not in capsys.readouterr().err, "the run has the same one"
    assert main(["check", "mine.jsonnet", *OTHER_LEARNING_RATE]) == 0
    out, err = capsys.readouterr()
    warning = " ".join(err.split())
    assert "warning: `treetune run` will not start: experiments/missing holds an experiment with" in warning
    assert "another configuration: trainer.learning_rate was 0.002 and is 0.5." in warning
    assert out.startswith("fine")
    assert main(["check", "mine.jsonnet", *OTHER_LEARNING_RATE, "--config-only"]) == 0
    assert "another configuration" not in capsys.readouterr().err


def test_a_run_with_another_configuration_is_refused_before_pytorch_is_loaded(
    log_of_earlier_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run_iteration_loop", "mine.jsonnet", *OTHER_LEARNING_RATE]) == 2
    message = capsys.readouterr().err
    assert "holds an experiment with another configuration: trainer.learning_rate was" in message
    assert "loading PyTorch" not in message
    assert log_of_earlier_run.read_text() == "iteration 1 is done\n"
