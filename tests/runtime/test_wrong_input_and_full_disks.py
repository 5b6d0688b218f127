"""What goes wrong ends in one clear message and leaves the experiment so that it can go on."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.chat_models import bpe_tokenizer, random_model, save_as_on_the_hub
from tests.runtime import in_process
from tests.runtime.in_process import (
    FakeSettings,
    directory_of,
    raises_after,
    sampled_requests,
    small,
    train,
)
from tests.support.faults import CONFIG, ROOT
from treetune.inference.base import EngineError
from treetune.models import policy_files
from treetune.models.pretrained import PretrainedModel
from treetune.rollouts.selection import MixedGroups
from treetune.rollouts.single_turn import SingleTurn
from treetune.runtime import commands
from treetune.runtime.base import Evaluation, EvaluationSet

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def weights(config, number: int = 2) -> bytes:
    return (directory_of(config).checkpoint(number) / "policy" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory):
    config = small(tmp_path_factory.mktemp("undisturbed"))
    train(config)
    return config


def test_an_engine_that_fails_for_good_leaves_a_run_that_goes_on_from_the_last_answer(
    tmp_path: Path, undisturbed
) -> None:
    config = small(tmp_path, engine=FakeSettings(fail_after=6))
    with pytest.raises(EngineError, match="told to fail here"):
        train(config)
    directory = directory_of(config)
    assert directory.checkpoints() == [1]
    with directory.metrics.open("a") as file:
        file.write('{"iteration": 1, "tra')  # as a crash in the middle of a line would leave it
    again = small(tmp_path)
    train(again)
    assert [row["iteration"] for row in directory.read_metrics()] == [0, 1]
    assert sampled_requests(again) == sampled_requests(undisturbed) - 6
    assert weights(again) == weights(undisturbed)


def test_a_finished_run_does_nothing_when_it_is_run_again(
    undisturbed, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = sampled_requests(undisturbed)
    train(undisturbed)
    assert "is finished" in capsys.readouterr().out
    assert sampled_requests(undisturbed) == asked


def test_a_checkpoint_that_is_half_written_is_made_again(undisturbed, tmp_path: Path) -> None:
    config = small(tmp_path)
    shutil.copytree(directory_of(undisturbed).path, directory_of(config).path)
    (directory_of(config).checkpoint(2) / "state.json").unlink()
    assert directory_of(config).resumable() == 1
    train(config)
    assert sampled_requests(config) == 0
    assert weights(config) == weights(undisturbed)
    assert [row["iteration"] for row in directory_of(config).read_metrics()] == [0, 1]


@pytest.mark.parametrize("where", ["write_policy", "save_checkpoint"])
def test_a_disk_that_is_full_at_a_checkpoint_leaves_the_one_before(
    where: str, tmp_path: Path, undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    config = small(tmp_path)
    owner, error = (
        (policy_files, FULL) if where == "write_policy" else (DeepSpeedEngine, RuntimeError("pos 5"))
    )
    with monkeypatch.context() as patch:
        patch.setattr(owner, where, raises_after(getattr(owner, where), 1, error))
        with pytest.raises(OSError, match=r"checkpoint .*0002 could not be written: .* MiB are free"):
            train(config)
    assert directory_of(config).checkpoints() == [1]
    train(config)
    assert weights(config) == weights(undisturbed)


@pytest.mark.parametrize("name", ["trajectories", "episodes"])
def test_a_disk_that_is_full_while_sampling_leaves_the_answers(
    name: str, tmp_path: Path, undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treetune.runtime import generation

    config = small(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(generation, f"write_{name}", raises_after(lambda *a: None, 0, FULL))
        with pytest.raises(OSError, match="No space left on device"):
            train(config)
    asked = sampled_requests(config)
    train(config)
    assert sampled_requests(config) == sampled_requests(undisturbed), f"{asked} were asked for before"
    assert weights(config) == weights(undisturbed)


def test_a_selection_that_keeps_nothing_stops_the_run_and_says_what_to_do(tmp_path: Path) -> None:
    config = small(tmp_path, rollout=SingleTurn(samples=2, max_tokens=12), selection=MixedGroups())
    with pytest.raises(
        RuntimeError, match=r"iteration 1: .*MixedGroups.* kept no episode.*on_empty_selection"
    ):
        train(config)
    assert directory_of(config).checkpoints() == []


def test_a_selection_that_keeps_nothing_is_skipped_where_so_configured(tmp_path: Path) -> None:
    config = small(
        tmp_path,
        rollout=SingleTurn(samples=2, max_tokens=12),
        selection=MixedGroups(),
        on_empty_selection="skip",
    )
    directory = train(config)
    assert directory.checkpoints() == [1, 2]
    assert weights(config, 1) == weights(config, 2)
    assert [row["iteration"] for row in directory.read_metrics()] == [0, 1]


def test_a_prompt_that_does_not_fit_is_named_and_binds_the_experiment_to_nothing(
    tmp_path: Path, undisturbed
) -> None:
    with pytest.raises(ValueError, match=r"problem 'train/\d+' has a prompt of 10 tokens.*context of 20"):
        train(small(tmp_path, context_length=20), context_length=20)
    directory = directory_of(small(tmp_path))
    assert directory.checkpoints() == []
    assert directory.read_metrics() == []
    corrected = small(tmp_path)
    train(corrected, context_length=64)
    assert weights(corrected) == weights(undisturbed)


def test_a_tokenizer_with_more_tokens_than_its_model_is_refused(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer()
    model = random_model("llama", len(tokenizer) - 1)
    folder = save_as_on_the_hub(tmp_path / "model", model, tokenizer)
    with pytest.raises(ValueError, match="tokens were added and the model's embeddings not resized"):
        train(small(tmp_path, model=PretrainedModel(name_or_path=str(folder))))


def test_another_configuration_is_refused_once_there_is_something(undisturbed) -> None:
    path = directory_of(undisturbed).path
    before = {file: file.read_bytes() for file in path.rglob("*.json")}
    with pytest.raises(ValueError, match=r"another configuration: trainer.*left as it is"):
        train(undisturbed, trainer={"seed": 2})
    assert {file: file.read_bytes() for file in path.rglob("*.json")} == before


def test_what_computes_nothing_may_change(undisturbed) -> None:
    train(undisturbed, evaluation={"every": 3}, grader_workers=1, sinks=[])


def test_an_evaluation_set_larger_than_its_split_is_refused(undisturbed, tmp_path: Path) -> None:
    config = small(tmp_path, evaluation=Evaluation(sets=(EvaluationSet(split="test", problems=11),)))
    shutil.copytree(directory_of(undisturbed).path, directory_of(config).path)
    with pytest.raises(ValueError, match="asks for 11 problems of the test split, which has 10"):
        commands.run_evaluation(config, {})


@pytest.mark.parametrize(
    "command", [commands.run_evaluation, commands.run_evaluation_on_baseline], ids=lambda c: c.__name__
)
def test_an_evaluation_without_sets_says_how_to_add_one(command: Callable, undisturbed) -> None:
    with pytest.raises(ValueError, match=r"no evaluation sets: add e\.g\. evaluation\+"):
        command(undisturbed, {})


def test_an_evaluation_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no checkpoint to evaluate: run_iteration_loop makes them"):
        commands.run_evaluation(small(tmp_path), {})


def test_a_second_run_is_refused_before_it_touches_anything(undisturbed, tmp_path: Path) -> None:
    config = small(tmp_path)
    with (
        directory_of(config).locked(),
        pytest.raises(ValueError, match="another process is at work on the run"),
    ):
        train(config)
    assert not (directory_of(config).path / "config.json").exists()


@pytest.mark.slow
def test_a_disk_that_is_really_full_ends_the_command_in_one_message(tmp_path: Path) -> None:
    """Supervised training needs no engine; files larger than 60 kB don't fit."""
    supervised = (
        "{rollout: {type: 'demonstrations'}, credit: {type: 'none'}, checkpoints: {every: 2},"
        " trainer+: {objective: {type: 'mle'}, advantage_normalisation: 'none'}}"
    )
    command = [sys.executable, str(ROOT / "src/treetune/main.py"), "--configs", str(CONFIG)]
    command += ["--override", supervised, "run_iteration_loop"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"APP_DIRECTORY": str(tmp_path), "APP_EXPERIMENT_NAME": "small", "OMP_NUM_THREADS": "1"}

    def run(largest: int | None) -> subprocess.CompletedProcess[str]:
        def limit() -> None:
            if largest is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

        return subprocess.run(
            command,
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            preexec_fn=limit,
            check=False,
        )

    failed = run(60_000)
    assert failed.returncode == 1, failed.stderr
    assert "0002 could not be written" in failed.stderr
    assert "a file may have 60000 bytes (raise `ulimit -f`)" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert "Traceback" in (tmp_path / "small" / "logs" / "run.log").read_text()
    directory = in_process.ExperimentDirectory(tmp_path / "small")
    assert directory.checkpoints() == []
    finished = run(None)
    assert finished.returncode == 0, finished.stderr
    assert directory.checkpoints() == [2, 4]
