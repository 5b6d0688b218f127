"""A run goes on under another configuration where that leaves what it has trained as it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.in_process import directory_of, small, train
from treetune.runtime import manifest
from treetune.runtime.machine import unlike
from treetune.runtime.manifest import differences
from treetune.trainers.base import Schedule, Trainer, Warmup
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient

JUDGE: dict[str, Any] = {"model": "one", "server": {"type": "vllm"}, "context_length": 512}
STORED: dict[str, Any] = {
    "type": "policy_iteration",
    "iterations": 2,
    "trainer": {"objective": {"type": "ppo"}, "learning_rate": 1e-3},
    "rollout": {"type": "single_turn", "samples": 2, "max_tokens": 12},
    "engines": {"policy": {"type": "vllm"}, "judge": JUDGE},
}


def engines(**keys: Any) -> dict[str, Any]:
    return {"engines": {**STORED["engines"], **keys}}


def trainer(schedule: Schedule | None = None) -> Trainer:
    return Trainer(objective=ClippedPolicyGradient(), learning_rate=1e-3, schedule=schedule or Warmup())


def changed(**keys: Any) -> dict[str, Any]:
    return {**STORED, **keys}


def test_a_finished_run_that_is_extended_ends_as_one_that_was_as_long_from_the_beginning(
    tmp_path: Path,
) -> None:
    long = train(small(tmp_path / "long", iterations=3), **changed(iterations=3))
    train(small(tmp_path / "short"), **STORED)
    short = train(small(tmp_path / "short", iterations=3), **changed(iterations=3))
    weights = [one.checkpoint(3) / "policy" / "model.safetensors" for one in (long, short)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert [row["iteration"] for row in short.read_metrics()] == [0, 1, 2]
    assert json.loads((short.path / "config.json").read_text())["iterations"] == 3
    (entry,) = json.loads((short.path / "manifest.json").read_text())["continued"]
    assert entry["after"] == 2
    assert entry["changed"] == {"iterations": "iterations was 2 and is 3"}


def test_a_run_that_has_more_iterations_than_are_asked_for_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(small(tmp_path), **STORED)
    train(small(tmp_path, iterations=1), **changed(iterations=1))
    assert "all 2 iterations are done" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "why"),
    [(Warmup(decay="cosine"), "its cosine decay spans the whole of it"), (Warmup(ratio=0.1), "ratio")],
)
def test_a_schedule_over_the_whole_of_training_refuses_another_length_and_says_why(
    schedule: Schedule, why: str, tmp_path: Path
) -> None:
    train(small(tmp_path, trainer=trainer(schedule)), **STORED)
    with pytest.raises(ValueError, match=f"iterations was 2 and is 4.*trainer.schedule.*{why}"):
        train(small(tmp_path, trainer=trainer(schedule), iterations=4), **changed(iterations=4))
    assert json.loads((directory_of(small(tmp_path)).path / "config.json").read_text())["iterations"] == 2


def test_where_every_iteration_starts_anew_the_schedule_spans_one_of_them(tmp_path: Path) -> None:
    config = small(tmp_path, trainer=trainer(Warmup(decay="linear")), restart="every_iteration")
    assert config.length_matters is None
    assert replace(config, restart="never").length_matters is not None


@pytest.mark.parametrize(
    "keys",
    [
        {"sinks": [{"type": "tensorboard"}]},
        {"evaluation": {"every": 3}},
        {"diagnostics": {"patience": 9}},
        engines(policy={"type": "vllm", "max_num_seqs": 7}),
        engines(judge={**JUDGE, "server": {"type": "vllm", "max_num_seqs": 7}, "timeout": 7.0}),
        {"checkpoints": {"keep_every": 2}},
        {"grader_workers": 7, "grader_deadline": 3.0, "rank_deadline": 7.0},
        {"trainer": {**STORED["trainer"], "tokens_per_micro_batch": 99, "layout": "packed"}},
        {"trainer": {**STORED["trainer"], "gradient_checkpointing": True, "offload_reference": True}},
        {"trainer": {**STORED["trainer"], "weight_decay": 0.0}},  # the default, spelled out
        {"rollout": {**STORED["rollout"], "temperature": 1.0}},
    ],
)
def test_what_leaves_training_as_it_is_goes_on(keys: dict[str, Any]) -> None:
    assert not [one.name for one in differences(STORED, changed(**keys)) if not one.changeable]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"trainer": {**STORED["trainer"], "learning_rate": 2e-3}},
            "trainer.learning_rate was 0.001 and is 0.002",
        ),
        ({"trainer": {**STORED["trainer"], "zero_stage": 1}}, "trainer.zero_stage was 0 and is 1"),
        ({"rollout": {**STORED["rollout"], "samples": 4}}, "rollout.samples was 2 and is 4"),
        ({"rollout": {"type": "demonstrations"}}, "rollout.type was 'single_turn' and is 'demonstrations'"),
        ({"seed": 7}, "seed was 0 and is 7"),
        (engines(judge={**JUDGE, "model": "two"}), "engines.judge.model was 'one' and is 'two'"),
        (engines(judge={**JUDGE, "max_tokens": 64}), "engines.judge.max_tokens was 512 and is 64"),
    ],
)
def test_what_would_have_trained_otherwise_is_refused_by_name_with_both_values(
    keys: dict[str, Any], words: str, tmp_path: Path
) -> None:
    train(small(tmp_path), **STORED)
    with pytest.raises(ValueError, match="another configuration") as told:
        train(small(tmp_path), **changed(**keys))
    assert words in str(told.value)


def test_an_evaluation_that_chooses_the_weights_is_a_part_of_training() -> None:
    chosen = changed(choose_checkpoint={"set": "validation"}, evaluation={"every": 1})
    (one,) = differences(chosen, {**chosen, "evaluation": {"every": 2}})
    assert one.name == "evaluation.every" and not one.changeable


def test_the_manifest_says_what_bits_rest_on_and_another_machine_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train(small(tmp_path), **STORED)
    capsys.readouterr()
    bits = json.loads((directory.path / "manifest.json").read_text())["bits_rest_on"]
    assert bits["threads"] >= 1 and bits["ranks"] == 1
    assert {"processor", "instruction_sets", "engine_threads", "settings", "torch_kernels"} <= bits.keys()
    assert {"torch", "numpy", "deepspeed", "transformers"} <= bits["packages"].keys()
    real = manifest.bits_rest_on
    monkeypatch.setattr(
        manifest, "bits_rest_on", lambda *at: {**real(*at), "processor": "another", "threads": 64}
    )
    train(small(tmp_path, iterations=3), **changed(iterations=3))
    said = capsys.readouterr().err
    assert "results may differ in the last bits: " in said
    assert f"threads was {bits['threads']}, is 64" in said and "processor was " in said
    train(small(tmp_path, iterations=4), **changed(iterations=4))
    assert "last bits" not in capsys.readouterr().err, "it is where it was continued"


def test_the_same_machine_has_nothing_to_say() -> None:
    here = {"processor": "a", "packages": {"torch": "1"}, "instruction_sets": ["avx2"]}
    assert unlike(here, here) == []
    other = {"processor": "a", "packages": {"torch": "2"}, "instruction_sets": ["avx2", "avx512f"]}
    assert unlike(here, other) == ["instruction sets were avx2, are avx2, avx512f", "torch was 1, is 2"]
