"""Promises of scripts/gpu/half_hour.py, which measures on a rented GPU:

* a step that fails stops no other, a late one ends with all its processes, and a second call runs the rest;
* results are written after each step, and a dry run only prints the commands with their times;
* the most valuable steps come first, after those that they need, and all configurations of the steps are
  valid.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.support.shipped import experiment_of
from treetune.runtime.rank_launcher import count_ranks_here

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("half_hour", ROOT / "scripts/gpu/half_hour.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def half_hour(program: ModuleType, tmp_path: Path) -> Any:
    folder = tmp_path / "half_hour"
    (folder / "logs").mkdir(parents=True)
    return program.HalfHour(folder, True, time.monotonic() + 60)


def python_command(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def test_a_step_that_fails_stops_no_other(program: ModuleType, half_hour: Any) -> None:
    read_word = program.read_last_line("word")
    failing = program.Step("first", 1, 60, (python_command("print('why'); exit(3)"),), read_word)
    half_hour.run_step(failing)
    half_hour.run_step(program.Step("second", 1, 60, (python_command("print('a | b')"),), read_word))
    half_hour.until = time.monotonic()
    half_hour.run_step(program.Step("third", 1, 60, (python_command("print(1)"),), read_word))

    outcomes = [step.outcome.split(":")[0] for step in half_hour.outcomes]
    assert outcomes == ["FAILED", "ok", "no time was left"]
    assert "exit code 3, see first.log: why" in half_hour.outcomes[0].outcome
    page = (half_hour.folder / "gpu.md").read_text()
    assert "| second | ok | 0 |" in page and "| word | a \\| b |" in page


def test_a_second_call_runs_the_steps_that_are_not_done(
    program: ModuleType, half_hour: Any, tmp_path: Path
) -> None:
    read_word = program.read_last_line("word")
    half_hour.results = tmp_path / "results"
    half_hour.run_step(program.Step("good", 1, 60, (python_command("print(1)"),), read_word))
    half_hour.run_step(program.Step("bad", 1, 60, (python_command("exit(1)"),), read_word))

    second_call = program.HalfHour(half_hour.folder, True, time.monotonic() + 60)
    second_call.read_results()
    assert second_call.is_done("good") and not second_call.is_done("bad") and not second_call.is_done("new")
    second_call.run_step(program.Step("bad", 1, 60, (python_command("print(2)"),), read_word))
    assert [(step.name, step.outcome) for step in second_call.outcomes] == [("good", "ok"), ("bad", "ok")]
    copied = sorted(path.name for path in half_hour.results.iterdir())
    assert copied == ["gpu.md", "half_hour.tar.gz", "steps.json"]


def test_a_late_command_is_ended_with_all_its_processes(half_hour: Any) -> None:
    inner = (
        "import subprocess, time; print(subprocess.Popen(['sleep', '77']).pid, flush=True); time.sleep(77)"
    )
    log = half_hour.folder / "logs/late.log"
    with pytest.raises(RuntimeError, match=r"not done after 2 s; see late\.log"):
        half_hour.run(python_command(inner), 2.0, log)
    pid_of_child = int(log.read_text().split()[-1])
    assert (
        not psutil.pid_exists(pid_of_child) or psutil.Process(pid_of_child).status() == psutil.STATUS_ZOMBIE
    )


def test_a_run_is_killed_after_some_iterations_and_started_again(program: ModuleType, half_hour: Any) -> None:
    metrics = half_hour.folder / "experiments/killed/metrics.jsonl"
    script = f"""
import json, pathlib, time
path = pathlib.Path({str(metrics)!r})
path.parent.mkdir(parents=True, exist_ok=True)
for _ in range(2 if path.exists() else 1):
    with path.open("a") as file:
        file.write(json.dumps({{"seconds/total": 1.0, "episodes/reward": 0.5}}) + "\\n")
    if path.read_text().count("\\n") == 1:
        time.sleep(77)
"""
    command = python_command(script)
    read_result = program.read_resumption("killed", "undisturbed")
    half_hour.run_step(
        program.Step(
            "killed", 1, 30, (command, command), read_result, kill_after=1, killed_experiment="killed"
        )
    )

    (outcome,) = half_hour.outcomes
    assert outcome.outcome == "ok", outcome
    assert ("iterations", "3") in outcome.rows
    assert ("reward of the sampled answers", "0.5, 0.5, 0.5") in outcome.rows


def test_keys_that_extend_others_are_written_with_a_plus_outside_the_quotes(
    program: ModuleType, half_hour: Any
) -> None:
    path = program.write_changes(half_hour, "name", {"trainer+": {"schedule+": program.OUTLASTS}})
    assert '"trainer"+: {' in path.read_text() and '"schedule"+: {' in path.read_text()


def test_words_choose_steps_and_the_steps_that_these_need(program: ModuleType, half_hour: Any) -> None:
    steps = program.list_steps(half_hour, gpus=2)
    chosen = [step.name for step in program.choose_steps(steps, ["VinePPO", "nccl"])]
    assert chosen == [
        "real model made", "real model, VinePPO", "1.1B made", "SFT", "VinePPO", "1.1B, weights by nccl",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no step has 'auto' in its name; the steps are:\n  real model made"):
        program.choose_steps(steps, ["SFT", "auto"])


def test_a_dry_run_prints_commands_and_seconds_and_leaves_no_file(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert program.main(["--dry-run", "--minutes", "15"]) == 0

    printed = capsys.readouterr().out
    assert "real model, GRPO: about 120 s, at most 240 s" in printed
    assert "examples/real_model/grpo.jsonnet," in printed
    assert "killed with SIGKILL after 2 iterations" in printed
    assert "begins after 15 minutes, by these estimates" in printed
    assert list(tmp_path.iterdir()) == []


def test_the_most_valuable_steps_come_first_and_limits_exceed_expected_times(
    program: ModuleType, half_hour: Any
) -> None:
    half_hour.rehearse = False
    steps = program.list_steps(half_hour, gpus=1)
    names = [step.name for step in steps]
    order = ("real model, GRPO", "real model, engine", "1.1B, all phases", "killed and resumed", "flash-attn")
    positions = [next(i for i, name in enumerate(names) if word in name) for word in order]
    assert positions == sorted(positions)
    assert len(set(names)) == len(names)
    for step in steps:
        assert step.expected_s < step.limit_s
        assert set(step.needs) <= set(names[: names.index(step.name)]), "what it needs comes before it"


@pytest.mark.parametrize("rehearse", [False, True])
def test_every_configuration_of_the_steps_is_valid(
    program: ModuleType, half_hour: Any, rehearse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    half_hour.rehearse = rehearse
    experiments = {}
    for step in program.list_steps(half_hour, gpus=2):
        for command in step.commands:
            if "benchmarks/benchmark.py" in command:
                continue  # its --configs is a folder of configurations
            if "--configs" in command:
                experiment = experiment_of(command[command.index("--configs") + 1])
                experiments[experiment.experiment_name] = experiment

    for step in program.list_steps(half_hour, gpus=2):
        assert not step.killed_experiment or step.killed_experiment in experiments
    paper = experiments["random_weights/paper"]
    if not rehearse:
        assert (paper.problems_per_iteration, paper.rollout.samples, paper.credit.samples) == (64, 8, 9)
        assert paper.engines.policy.sleep and paper.trainer.precision == "bfloat16"
        assert paper.model.name_or_path.endswith("random-model")
    assert experiments["real_model/grpo"].engines.policy.dtype == "float32"
    assert experiments["real_model/grpo"].model.chat is not None


def test_a_rehearsal_starts_its_runs_without_a_gpu(
    program: ModuleType, half_hour: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as in a rehearsal
    run_commands = []
    for step in program.list_steps(half_hour, gpus=0):
        run_commands += [command for command in step.commands if command[: len(program.RUN)] == program.RUN]
    assert run_commands

    for command in run_commands:
        options = dict(itertools.pairwise(command))
        num_gpus, ranks = options.get("--num_gpus"), options.get("--ranks")
        assert count_ranks_here(num_gpus and int(num_gpus), ranks and int(ranks)) == 1


@pytest.mark.slow
def test_a_rehearsed_step_makes_the_tiny_chat_model(program: ModuleType, half_hour: Any) -> None:
    steps = program.list_steps(half_hour, gpus=0)
    half_hour.run_step(next(step for step in steps if step.name == "real model made"))

    (outcome,) = half_hour.outcomes
    assert outcome.outcome == "ok", outcome
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(half_hour.folder / "real-model")
    text = "What is 2 + 3?\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text, "white space is kept when it is loaded"
    assert tokenizer.chat_template
