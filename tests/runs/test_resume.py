"""A run goes on where it was, and under another configuration where that leaves what it has trained as it is;
what is wrong ends in one clear message, behind which it can go on. (test_interrupted_runs has the rest.)"""

from __future__ import annotations

import errno
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_models import bpe_tokenizer, random_model, save_as_on_the_hub
from tests.support.experiment_runs import CONFIG, ROOT
from tests.support.small_run import (
    TRAINER,
    computed,
    directory_of,
    engines_of,
    evaluated,
    log_of,
    raises_after,
    sampled_requests,
    small,
    train,
    trained,
    weights_of,
)
from treetune.config import folders
from treetune.credit.vineppo import MonteCarlo
from treetune.models import policy_files
from treetune.models.pretrained import PretrainedModel
from treetune.rollouts.selection import MixedGroups
from treetune.rollouts.single_turn import SingleTurn
from treetune.runtime import manifest
from treetune.runtime.base import Checkpoints, Evaluation, EvaluationSet, PolicyIteration, StopAfter
from treetune.runtime.directory import ExperimentDirectory, iterations_of, tokens_sampled
from treetune.runtime.machine import describe_different_bits
from treetune.runtime.manifest import find_changed_keys
from treetune.runtime.session import Session
from treetune.store.checksums import read_record, write_record
from treetune.trainer.base import Schedule, Warmup

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
JUDGE: dict[str, Any] = {"model": "one", "server": {"type": "vllm"}, "context_length": 512}
STORED: dict[str, Any] = {
    "type": "policy_iteration",
    "iterations": 2,
    "trainer": {"objective": {"type": "ppo"}, "learning_rate": 1e-3},
    "rollout": {"type": "single_turn", "samples": 2, "max_tokens": 12},
    "engines": {"policy": {"type": "vllm"}, "judge": JUDGE},
}


def changed(**keys: Any) -> dict[str, Any]:
    return {**STORED, **keys}


def within(part: str, **keys: Any) -> dict[str, Any]:
    return {part: {**STORED[part], **keys}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> PolicyIteration:
    return trained(small(tmp_path_factory.mktemp("undisturbed")))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> PolicyIteration:
    """Trained under `STORED`."""
    config = small(tmp_path_factory.mktemp("stored"))
    train(config, **STORED)
    return config


# Another configuration


def test_a_finished_run_that_is_extended_ends_as_one_that_was_as_long_from_the_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long, short = (small(tmp_path / name, iterations=3) for name in ("long", "short"))
    train(long, **changed(iterations=3))
    train(small(tmp_path / "short"), **STORED)
    directory = train(short, **changed(iterations=3))
    assert weights_of(short, 3) == weights_of(long, 3)
    assert [row["iteration"] for row in directory.read_metrics()] == [0, 1, 2]
    assert json.loads((directory.path / "config.json").read_text())["iterations"] == 3
    (entry,) = json.loads((directory.path / "manifest.json").read_text())["continued"]
    assert (entry["after"], entry["changed"]) == (2, {"iterations": "iterations was 2 and is 3"})
    train(small(tmp_path / "short", iterations=1), **changed(iterations=1))
    assert "all 3 iterations are done" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "why"),
    [(Warmup(decay="cosine"), "its cosine decay spans the whole of it"), (Warmup(ratio=0.1), "ratio")],
)
def test_a_schedule_over_the_whole_of_training_refuses_another_length_and_says_why(
    schedule: Schedule, why: str, tmp_path: Path
) -> None:
    config = small(tmp_path, trainer=replace(TRAINER, schedule=schedule))
    directory = train(config, **STORED)
    with pytest.raises(ValueError, match=f"iterations was 2 and is 4.*trainer.schedule.*{why}"):
        train(replace(config, iterations=4), **changed(iterations=4))
    assert json.loads((directory.path / "config.json").read_text())["iterations"] == 2
    anew = replace(config, restart="every_iteration")
    assert anew.length_matters is None is not config.length_matters, "it spans one of them"


@pytest.mark.parametrize(
    "keys",
    [
        {"sinks": [{"type": "tensorboard"}]},
        {"evaluation": {"every": 3}},
        {"diagnostics": {"patience": 9}},
        within("engines", policy={"type": "vllm", "max_num_seqs": 7}),
        within("engines", judge={**JUDGE, "server": {"type": "vllm", "max_num_seqs": 7}, "timeout": 7.0}),
        {"checkpoints": {"keep_every": 2}},
        {"grader_workers": 7, "grader_deadline": 3.0, "rank_deadline": 7.0},
        within("trainer", tokens_per_micro_batch=99, layout="packed"),
        within("trainer", gradient_checkpointing=True, offload_reference=True),
        within("trainer", weight_decay=0.0),  # the default, spelled out
        within("rollout", temperature=1.0),
    ],
)
def test_what_leaves_training_as_it_is_goes_on(keys: dict[str, Any]) -> None:
    assert not [one.name for one in find_changed_keys(STORED, changed(**keys)) if not one.changeable]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (within("trainer", learning_rate=2e-3), "trainer.learning_rate was 0.001 and is 0.002"),
        (within("trainer", zero_stage=1), "trainer.zero_stage was 0 and is 1"),
        (within("rollout", samples=4), "rollout.samples was 2 and is 4"),
        ({"rollout": {"type": "demonstrations"}}, "rollout.type was 'single_turn' and is 'demonstrations'"),
        ({"seed": 7}, "seed was 0 and is 7"),
        (
            within("engines", judge={**JUDGE, "model": "two"}),
            "engines.judge.model was 'one' and is 'two'",
        ),
        (
            within("engines", judge={**JUDGE, "max_tokens": 64}),
            "engines.judge.max_tokens was 512 and is 64",
        ),
    ],
)
def test_what_would_have_trained_otherwise_is_refused_by_name_with_both_values(
    keys: dict[str, Any], words: str, stored: PolicyIteration
) -> None:
    path = directory_of(stored).path
    before = {file: file.read_bytes() for file in path.rglob("*.json")}
    with pytest.raises(ValueError, match=r"another configuration: (.|\n)*was not changed") as told:
        train(stored, **changed(**keys))
    assert words in str(told.value)
    assert {file: file.read_bytes() for file in path.rglob("*.json")} == before


def test_an_evaluation_that_chooses_the_weights_is_a_part_of_training() -> None:
    chosen = changed(choose_checkpoint={"set": "validation"}, evaluation={"every": 1})
    (one,) = find_changed_keys(chosen, {**chosen, "evaluation": {"every": 2}})
    assert one.name == "evaluation.every" and not one.changeable


# Another machine, and other code


def test_the_manifest_says_what_bits_rest_on_and_another_machine_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train(small(tmp_path), **STORED)
    capsys.readouterr()
    bits = json.loads((directory.path / "manifest.json").read_text())["bits_rest_on"]
    assert bits["threads"] >= 1 and bits["ranks"] == 1
    assert {"processor", "instruction_sets", "engine_threads", "settings", "torch_kernels"} <= bits.keys()
    assert {"torch", "numpy", "deepspeed", "transformers"} <= bits["packages"].keys()
    real = manifest.facts_that_decide_bits
    elsewhere = {"processor": "another", "threads": 64}
    monkeypatch.setattr(manifest, "facts_that_decide_bits", lambda *at: {**real(*at), **elsewhere})
    train(small(tmp_path, iterations=3), **changed(iterations=3))
    said = capsys.readouterr().err
    assert "results may differ in the last bits: " in said
    assert f"threads was {bits['threads']}, is 64" in said and "processor was " in said
    train(small(tmp_path, iterations=4), **changed(iterations=4))
    assert "last bits" not in capsys.readouterr().err, "it is where it was continued"

    here = {"processor": "a", "packages": {"torch": "1"}, "instruction_sets": ["avx2"]}
    other = {"processor": "a", "packages": {"torch": "2"}, "instruction_sets": ["avx2", "avx512f"]}
    assert describe_different_bits(here, here) == []
    assert describe_different_bits(here, other) == [
        "instruction sets were avx2, are avx2, avx512f",
        "torch was 1, is 2",
    ]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "own" / "module_of_a_run.py"
    file.parent.mkdir()
    file.write_text("weight = 1\n")
    monkeypatch.setattr(folders, "_OWN_FOLDERS", folders.OwnFolders())
    finders = list(sys.meta_path)
    folders.set_search_folders([file.parent])
    importlib.import_module("module_of_a_run")
    yield file
    sys.meta_path[:] = finders
    del sys.modules["module_of_a_run"]


def test_a_run_that_goes_on_with_changed_code_says_which(module: Path, tmp_path: Path) -> None:
    config = small(tmp_path)

    def opened() -> str:
        """Opens the run as a command does; what its log says afterwards."""
        with Session.open(config, {"type": "policy_iteration"}):
            pass
        marker = directory_of(config).iteration_folder(0) / "episodes.arrow"
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_bytes(b"")  # something was computed: from here on the directory binds
        return log_of(config)

    assert opened() == ""
    stored = json.loads((directory_of(config).path / "manifest.json").read_text())
    assert list(stored["own_modules"]) == ["module_of_a_run"]
    assert "your own code has changed" not in opened()
    module.write_text("weight = 2\n")
    warning = f"warning: your own code has changed since this run was last started: {module}."
    said = opened()
    assert warning in said and "can't be compared" in said and "put the earlier code back" in said
    [continued] = json.loads((directory_of(config).path / "manifest.json").read_text())["continued"]
    assert continued["changed_code"] == {"module_of_a_run": str(module)}
    assert opened().count(warning) == 1, "the present code is recorded, and not reported again"


# A budget of sampled tokens


def budgeted(base: Path, tokens: int) -> PolicyIteration:
    return small(
        base,
        iterations=50,
        stop_after=StopAfter(sampled_tokens=tokens),
        credit=MonteCarlo(samples=2),
        evaluation=Evaluation(sets=(EvaluationSet(split="test", problems=2),), every=None),
        checkpoints=Checkpoints(every=2),
    )


@pytest.mark.parametrize(
    ("of_iterations", "further"),
    [
        ([], None),
        ([40], 2),
        ([40, 40], 1),
        ([40, 40, 19], 0),
        ([40, 40, 40], 0),
        ([60, 41], 0),
        ([60], 1),
        ([67], 0),
    ],
)
def test_the_run_ends_with_the_iteration_that_comes_nearest_to_the_budget(
    of_iterations: list[int], further: int | None
) -> None:
    assert StopAfter(sampled_tokens=100).further_iterations(of_iterations) == further


def test_a_run_ends_near_its_budget_is_evaluated_there_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    config = budgeted(tmp_path, 600)
    directory = train(config)
    rows = directory.read_metrics()
    sampled = tokens_sampled(directory, len(rows))
    assert abs(sum(sampled) - 600) <= max(sampled) / 2
    assert sampled == [round(row["rollout/sampled_tokens"] + row["credit/value_tokens"]) for row in rows]
    answers = rows[0]["episodes/count"] * rows[0]["episodes/response_tokens"]
    assert rows[0]["rollout/sampled_tokens"] == pytest.approx(answers)
    assert rows[0]["credit/value_tokens"] > 0
    assert directory.checkpoints()[-1] == len(rows)
    assert evaluated(config, len(rows), "test")[0]["n_problems"] == 2
    asked = sampled_requests(config)
    train(config)
    assert sampled_requests(config) == asked, "it stays as it is"

    larger = replace(config, stop_after=StopAfter(sampled_tokens=1500))
    train(larger, stop_after={"sampled_tokens": 1500})
    done = len(directory.read_metrics())
    assert len(rows) < done == iterations_of(larger, directory, done) < 50

    path = directory.iteration_folder(0) / "rollout.json"
    record = read_record(path, "")
    del record["metrics"]["rollout/sampled_tokens"]
    write_record(path, record)
    with pytest.raises(ValueError, match="did not count its tokens"):
        train(larger, stop_after={"sampled_tokens": 1500})


# What was left half done


def test_a_finished_run_does_nothing_when_it_is_run_again(
    undisturbed: PolicyIteration, capsys: pytest.CaptureFixture[str]
) -> None:
    before, asked = directory_of(undisturbed).metrics_file.read_bytes(), sampled_requests(undisturbed)
    train(undisturbed, evaluation={"every": 3}, grader_workers=1, sinks=[])  # which computes nothing
    assert "is finished" in capsys.readouterr().out
    assert (directory_of(undisturbed).metrics_file.read_bytes(), sampled_requests(undisturbed)) == (
        before,
        asked,
    )


def test_a_checkpoint_that_is_half_written_and_a_torn_line_of_metrics_are_made_again(
    undisturbed: PolicyIteration, tmp_path: Path
) -> None:
    config = small(tmp_path)
    directory = directory_of(config)
    shutil.copytree(directory_of(undisturbed).path, directory.path)
    (directory.checkpoint_folder(2) / "state.json").unlink()
    with directory.metrics_file.open("a") as file:
        file.write('{"iteration": 1, "tra')  # as a crash in the middle of a line would leave it
    assert directory.newest_resumable() == 1
    train(config)
    assert sampled_requests(config) == 0
    assert computed(config) == computed(undisturbed)


@pytest.mark.parametrize("where", ["write_policy", "save_checkpoint"])
def test_a_disk_that_is_full_at_a_checkpoint_leaves_the_one_before(
    where: str, tmp_path: Path, undisturbed: PolicyIteration, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    config = small(tmp_path)
    engine = DeepSpeedEngine, RuntimeError("pos 5")
    owner, error = (policy_files, FULL) if where == "write_policy" else engine
    with monkeypatch.context() as patch:
        patch.setattr(owner, where, raises_after(getattr(owner, where), 1, error))
        with pytest.raises(OSError, match=r"checkpoint .*0002 could not be written: .* MiB are free"):
            train(config)
    assert directory_of(config).checkpoints() == [1]
    train(config)
    assert weights_of(config) == weights_of(undisturbed)


@pytest.mark.slow
def test_a_disk_that_is_really_full_ends_the_command_in_one_message(tmp_path: Path) -> None:
    """Supervised training needs no engine; files larger than 60 kB don't fit."""
    supervised = (
        "{rollout: {type: 'demonstrations'}, credit: {type: 'none'}, checkpoints: {every: 2},"
        " trainer+: {objective: {type: 'mle'}, advantage_normalisation: 'none'}}"
    )
    command = [sys.executable, str(ROOT / "src/treetune/main.py"), "--configs", str(CONFIG)]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"APP_DIRECTORY": str(tmp_path), "APP_EXPERIMENT_NAME": "small", "OMP_NUM_THREADS": "1"}
    failed = subprocess.run(
        [*command, "--override", supervised, "run_iteration_loop"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)),
        check=False,
    )
    assert failed.returncode == 1, failed.stderr
    assert "0002 could not be written" in failed.stderr
    assert "a file may have 60000 bytes (raise `ulimit -f`)" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert "Traceback" in (tmp_path / "small" / "logs" / "run.log").read_text()
    assert ExperimentDirectory(tmp_path / "small").checkpoints() == []


# What is wrong


def test_a_selection_that_keeps_nothing_stops_the_run_unless_it_is_to_be_skipped(tmp_path: Path) -> None:
    rollout = SingleTurn(samples=2, max_tokens=12)
    config = small(tmp_path, rollout=rollout, selection=MixedGroups())
    with pytest.raises(
        RuntimeError, match=r"iteration 1: .*MixedGroups.* has left no episode.*on_empty_selection"
    ):
        train(config)
    assert directory_of(config).checkpoints() == []
    directory = train(replace(config, on_empty_selection="skip"))
    assert directory.checkpoints() == [1, 2]
    assert weights_of(config, 1) == weights_of(config, 2)
    rows = directory.read_metrics()
    assert [(row["iteration"], row["train/steps"]) for row in rows] == [(0, 0), (1, 0)]


def test_a_prompt_that_does_not_fit_is_named_and_binds_the_experiment_to_nothing(
    tmp_path: Path, undisturbed: PolicyIteration
) -> None:
    with pytest.raises(ValueError, match=r"problem 'train/\d+' has a prompt of 10 tokens.*context of 20"):
        train(small(tmp_path, context_length=20), context_length=20)
    corrected = small(tmp_path)
    assert directory_of(corrected).checkpoints() == []
    assert directory_of(corrected).read_metrics() == []
    train(corrected, context_length=64)
    assert weights_of(corrected) == weights_of(undisturbed)


def test_a_tokenizer_with_more_tokens_than_its_model_is_refused(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer()
    model = random_model("llama", len(tokenizer) - 1)
    folder = save_as_on_the_hub(tmp_path / "model", model, tokenizer)
    with pytest.raises(ValueError, match="tokens were added and the model's embeddings not resized"):
        train(small(tmp_path, model=PretrainedModel(name_or_path=str(folder))))


def test_a_second_run_is_refused_before_it_touches_anything(tmp_path: Path) -> None:
    config = small(tmp_path)
    with (
        directory_of(config).locked(),
        pytest.raises(ValueError, match="another process holds the lock of the run"),
    ):
        train(config)
    assert not (directory_of(config).path / "config.json").exists()
    assert not engines_of(config)
