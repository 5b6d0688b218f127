"""The commands beside the loop: they measure, sample ahead and tidy up what a run has made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.runtime.in_process import FakeSettings, directory_of, sampled_requests, small, train
from tests.support.faults import Experiment
from treetune.processes import lifetime
from treetune.runtime import commands
from treetune.runtime.base import Checkpoints, Evaluation, EvaluationSet

SETS = Evaluation(
    sets=(
        EvaluationSet(split="validation", problems=4, samples=2),
        EvaluationSet(split="test", name="often", problems=3, samples=4, temperature=0.5),
    )
)
MEASURED = "{evaluation+: {sets: [{split: 'test', problems: 6, samples: 2}]}}"


@pytest.fixture
def finished(tmp_path: Path):
    config = small(tmp_path, evaluation=SETS)
    train(small(tmp_path))
    return config


def test_run_evaluation_measures_every_set_on_every_checkpoint_once(
    finished, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = directory_of(finished)
    commands.run_evaluation(finished, {})
    for number in (1, 2):
        for label, split, problems, samples in (("validation", "validation", 4, 2), ("often", "test", 3, 4)):
            folder = directory.evaluation(number, label)
            summary = json.loads((folder / "summary.json").read_text())
            expected = {"split": split, "iteration": number, "n_problems": problems, "samples": samples}
            assert expected.items() <= summary.items()
            rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
            assert len(rows) == problems * samples
            assert all(row["problem"].startswith(f"{split}/") for row in rows)
            assert summary["unfinished"] == sum(row["finish_reason"] == "length" for row in rows) / len(rows)
    (engine,) = finished.engines.policy.engines
    assert [version for _, version in engine.loaded] == [1, 2]
    asked = sampled_requests(finished)
    commands.run_evaluation(finished, {})
    assert "all sets are measured" in capsys.readouterr().out
    assert sampled_requests(finished) == asked


def test_run_evaluation_goes_on_where_it_was_interrupted(finished, tmp_path: Path) -> None:
    failing = small(tmp_path, evaluation=SETS, engine=FakeSettings(fail_after=9))
    with pytest.raises(RuntimeError, match="told to fail"):
        commands.run_evaluation(failing, {})
    commands.run_evaluation(finished, {})
    assert sampled_requests(failing) + sampled_requests(finished) == 2 * (4 + 3)


def test_run_evaluation_on_baseline_measures_the_start_weights_as_checkpoint_0(finished) -> None:
    commands.run_evaluation_on_baseline(finished, {})
    assert (directory_of(finished).evaluation(0, "often") / "summary.json").is_file()
    (engine,) = finished.engines.policy.engines
    assert engine.loaded == []


def test_evaluations_while_training_are_in_the_metrics(tmp_path: Path) -> None:
    often = EvaluationSet(split="validation", problems=4, while_training=True)
    rare = EvaluationSet(split="test", problems=4)
    directory = train(small(tmp_path, evaluation=Evaluation(sets=(often, rare), every=1)))
    measured = [
        {key.split("/")[1] for key in row if key.startswith("evaluation/")}
        for row in directory.read_metrics()
    ]
    assert measured == [{"validation"}, {"validation", "test"}]


def test_only_generate_episodes_leaves_them_for_the_run(tmp_path: Path) -> None:
    ahead, alone = small(tmp_path / "ahead"), small(tmp_path / "alone")
    plain = {"type": "policy_iteration", "trainer": {"seed": 1}}
    commands.only_generate_episodes(ahead, plain)
    assert directory_of(ahead).checkpoints() == []
    train(ahead)
    train(alone)
    assert sampled_requests(ahead) == sampled_requests(alone)
    policies = [
        (directory_of(config).checkpoint(2) / "policy" / "model.safetensors").read_bytes()
        for config in (ahead, alone)
    ]
    assert policies[0] == policies[1]


def test_clean_up_checkpoints_deletes_what_the_configuration_does_not_keep(
    finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = directory_of(finished)
    longer = {"checkpoints": Checkpoints(every=1, keep_every=1), "iterations": 4}
    train(small(tmp_path, **longer))
    assert directory.checkpoints() == [1, 2, 3, 4]
    assert directory.resumables() == [3, 4], "the older one is for when the newest is damaged"
    commands.clean_up_checkpoints(small(tmp_path, checkpoints=Checkpoints(), iterations=4), {})
    assert "deleted 2 checkpoints, kept [3, 4]" in capsys.readouterr().out
    assert directory.checkpoints() == directory.resumables() == [3, 4]


def test_a_run_that_was_ended_before_its_last_iteration_is_not_finished(finished, tmp_path: Path) -> None:
    commands.check_finished(small(tmp_path), {})
    with pytest.raises(ValueError, match=r"2 of 3 iterations are done.*run_iteration_loop goes on"):
        commands.check_finished(small(tmp_path, iterations=3), {})
    with pytest.raises(ValueError, match="0 of 2 iterations"):
        commands.check_finished(small(tmp_path, experiment_name="another"), {})


@pytest.mark.server
@pytest.mark.slow
def test_a_server_without_a_trainer_measures_every_checkpoint(
    undisturbed: Experiment, tmp_path: Path
) -> None:
    experiment = undisturbed.copy(tmp_path)
    experiment.run("run_evaluation", MEASURED)
    answers = []
    for number in (2, 4):
        folder = experiment.directory.evaluation(number, "test")
        assert json.loads((folder / "summary.json").read_text())["n_problems"] == 6
        rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
        assert len(rows) == 12
        answers.append([row["text"] for row in rows])
    assert answers[0] != answers[1], "both checkpoints answer alike: were the weights exchanged?"


@pytest.mark.server
@pytest.mark.slow
def test_episodes_sampled_ahead_by_a_server_are_those_that_the_run_would_sample(
    undisturbed: Experiment, tmp_path: Path
) -> None:
    experiment = undisturbed.copy(tmp_path)
    third = experiment.directory.iteration(2)
    shutil.rmtree(third)
    # As after two iterations. Nothing is trained here.
    experiment.forget_training()
    shutil.copytree(undisturbed.directory.checkpoint(2), experiment.directory.checkpoint(2))
    experiment.run("only_generate_episodes")
    sampled = (third / "episodes.arrow").read_bytes()
    assert sampled == (undisturbed.directory.iteration(2) / "episodes.arrow").read_bytes()


def test_a_finished_run_is_not_held_against_a_smaller_machine(
    finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(config: object) -> None:
        raise ValueError("it doesn't fit")

    monkeypatch.setattr(commands, "BEFORE_A_RUN", [refuse])
    for name in ("exit_on_signals", "end_with_launcher"):  # the test's process keeps its own
        monkeypatch.setattr(lifetime, name, lambda: None)
    plain = {"type": "policy_iteration", "trainer": {"seed": 1}}
    commands.run("run_iteration_loop", small(tmp_path), plain)
    assert "is finished: all 2 iterations are done" in capsys.readouterr().out
    with pytest.raises(ValueError, match="it doesn't fit"):
        commands.run("run_iteration_loop", small(tmp_path, iterations=3), plain)
