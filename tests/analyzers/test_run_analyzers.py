"""The commands `run_analyzers` and `compare_analyses` on experiments that a small run left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import treetune.parts  # noqa: F401  (registers the analyzers)
from tests.runtime.in_process import FakeSettings, sampled_requests, small, train
from treetune.config.build import build, checked
from treetune.rollouts.credit import Gae
from treetune.runtime.analysis import Analyzer
from treetune.runtime.base import PolicyIteration
from treetune.runtime.commands import run_iteration_loop
from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.session import Session
from treetune.trainers.ranks import Ranks
from treetune_lab.analyzers.command import compare_analyses, run_analyzers
from treetune_lab.analyzers.gradients import gradient_sums

ROLLOUTS = {"rollouts": 8, "states": 6, "problems": 4, "samples": [1, 3]}
VALUES = {"type": "value_accuracy", "prompts": 2, **ROLLOUTS}
EVERY_ANALYZER = [
    {**VALUES, "checkpoints": "all"},
    {"type": "action_ranking", "candidates": 12, "alternatives": 40, "at_least": 2, **ROLLOUTS},
    {"type": "gradient_variance", "checkpoints": "all", "minibatch_size": 2},
    {"type": "advantage_distribution"},
    {"type": "kl_to_reference", "problems": 4, "samples": 2},
    {"type": "diversity", "name": "different"},
    {"type": "weight_distance"},
]
PLAIN = {"type": "policy_iteration", "trainer": {"seed": 1}}


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """DeepSpeed remembers a process group that was left: several runs in one process share one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "leave", lambda self: None)
        yield


@pytest.fixture(scope="module")
def runs(one_process: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished experiment without a critic, and one with: not to be changed."""
    base = tmp_path_factory.mktemp("runs")
    train(small(base, experiment_name="group"))
    train(small(base, experiment_name="gae", credit=Gae()))
    return base


@pytest.fixture
def base(runs: Path, tmp_path: Path) -> Path:
    shutil.copytree(runs, tmp_path / "runs")
    return tmp_path / "runs"


def experiment(base: Path, name: str, *settings: dict[str, Any], **changes: Any) -> PolicyIteration:
    if name == "gae":
        changes["credit"] = Gae()
    analyzers = tuple(build(Analyzer, dict(one)) for one in settings)
    return small(base, experiment_name=name, analyzers=analyzers, **changes)


def analyse(base: Path, name: str, *settings: dict[str, Any], **changes: Any) -> tuple[int, PolicyIteration]:
    config = experiment(base, name, *settings, **changes)
    return run_analyzers(config, {**PLAIN, "analyzers": list(settings)}), config


def result(base: Path, name: str, label: str) -> dict[str, Any]:
    return json.loads((base / name / "analyses" / label / "result.json").read_text())


@pytest.mark.parametrize("name", ["group", "gae"])
def test_every_analyzer_writes_numbers_a_figure_and_its_states_once(
    base: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, config = analyse(base, name, *EVERY_ANALYZER)
    assert code == 0, capsys.readouterr()
    labels = [one.get("name", one["type"]) for one in EVERY_ANALYZER]
    assert sorted(path.name for path in (base / name / "analyses").iterdir()) == sorted(labels)
    for label in labels:
        folder = base / name / "analyses" / label
        names = {path.name for path in folder.iterdir()}
        assert names == {"result.json", "states.jsonl", "figure.png", "figure.svg"}
        assert (folder / "figure.png").read_bytes()[1:4] == b"PNG"
        assert label == "weight_distance" or (folder / "states.jsonl").read_text()

    values = result(base, name, "value_accuracy")
    assert values["points"] == [0, 1, 2]
    numbers = values["numbers"]
    assert numbers["answers"] == {"0": "stored", "1": "stored", "2": "sampled"}, "the run ended there"
    estimators = {"monte_carlo_1", "monte_carlo_3"} | ({"critic"} if name == "gae" else set())
    assert set(numbers["by_checkpoint"]["2"]["estimators"]) == estimators
    assert set(result(base, name, "gradient_variance")["numbers"]["by_checkpoint"]) == {"0", "1"}
    kl = result(base, name, "kl_to_reference")["numbers"]["by_checkpoint"]
    assert kl["0"]["k3"]["value"] == pytest.approx(0, abs=1e-9)
    assert kl["2"]["k3"]["value"] > kl["0"]["k3"]["value"]
    distance = result(base, name, "weight_distance")["numbers"]["by_checkpoint"]
    assert distance["0"]["all"]["absolute"] == 0 < distance["2"]["all"]["relative"]
    advantages = result(base, name, "advantage_distribution")["numbers"]
    assert advantages["episodes_without_advantages"] == 0
    assert advantages["episodes_without_values"] == (0 if name == "gae" else advantages["episodes"])

    asked = sampled_requests(config)
    assert run_analyzers(config, {**PLAIN, "analyzers": list(EVERY_ANALYZER)}) == 0
    assert sampled_requests(config) == asked
    assert capsys.readouterr().out.count("is done") == len(EVERY_ANALYZER)


@pytest.mark.parametrize("name", ["group", "gae"])
@pytest.mark.parametrize("point", [0, 1])
def test_the_gradient_over_all_episodes_is_the_one_that_the_trainer_took(
    base: Path, name: str, point: int
) -> None:
    """At the weights that sampled them, advantages and all: an iteration off, and it would differ."""
    config = experiment(base, name, VALUES)
    with Session.open(config, PLAIN, "analysis") as session:
        _, (row,) = gradient_sums(session, point, minibatch_size=8, minibatches=1, seed=0)
    taken = ExperimentDirectory(base / name).read_metrics()[point]
    assert row["gradient_norm"] == pytest.approx(taken["train/grad_norm"], rel=1e-4)
    assert row["loss"] == pytest.approx(taken["train/loss"], rel=1e-4, abs=1e-6)


def test_answers_of_other_weights_than_the_checkpoints_are_refused(base: Path) -> None:
    """An iteration's episodes belong to the weights before it, and to no others."""
    folder = base / "group" / "iterations"
    shutil.rmtree(folder / "0001")
    shutil.copytree(folder / "0000", folder / "0001")
    settings = (
        {"type": "gradient_variance", "checkpoints": [1], "minibatch_size": 2},
        {**VALUES, "checkpoints": [1]},
    )
    code, _ = analyse(base, "group", *settings)
    assert code == 1
    assert not (base / "group" / "analyses" / "gradient_variance").exists()
    assert not (base / "group" / "analyses" / "value_accuracy").exists()


def test_what_one_analyzer_lacks_is_said_and_the_others_go_on(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(base / "gae" / "checkpoints" / "0002" / "critic")
    shutil.rmtree(base / "gae" / "iterations")
    settings = (VALUES, {"type": "diversity"}, {"type": "weight_distance", "checkpoints": [7]})
    code, config = analyse(base, "gae", *settings, {"type": "weight_distance", "name": "distance"})
    said = capsys.readouterr().out
    assert code == 1
    assert "value_accuracy: the checkpoint" in said and "holds no critic" in said
    assert "diversity: " in said and "no iteration with trajectories.arrow" in said
    assert "weight_distance: 7 is not the number of a checkpoint" in said and "there are 0, 1, 2" in said
    assert [path.name for path in (base / "gae" / "analyses").iterdir()] == ["distance"]
    assert config.engines.policy.engines == [], "nothing that could still be done needs an engine"


def test_an_experiment_without_checkpoints_says_so(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(base / "group" / "checkpoints")
    assert analyse(base, "group", VALUES)[0] == 1
    assert "has no checkpoint: run_iteration_loop makes them" in capsys.readouterr().out
    with pytest.raises(ValueError, match="holds no experiment"):
        analyse(base, "another", VALUES)
    with pytest.raises(ValueError, match="has no analyzers"):
        analyse(base, "group")


def test_another_configuration_than_the_runs_is_refused(base: Path) -> None:
    config = experiment(base, "group", VALUES)
    with pytest.raises(ValueError, match="another configuration"):
        run_analyzers(config, {**PLAIN, "trainer": {"seed": 2}, "analyzers": [VALUES]})


def test_an_interrupted_analysis_goes_on_where_it_was_and_comes_out_the_same(
    base: Path, tmp_path: Path
) -> None:
    shutil.copytree(base, tmp_path / "undisturbed")
    code, whole = analyse(tmp_path / "undisturbed", "group", VALUES)
    assert code == 0
    needed = sampled_requests(whole)
    code, interrupted = analyse(base, "group", VALUES, engine=FakeSettings(fail_after=needed // 2))
    assert code == 1
    assert not (base / "group" / "analyses" / "value_accuracy").exists(), "whole or not at all"
    code, resumed = analyse(base, "group", VALUES)
    assert code == 0
    assert sampled_requests(interrupted) + sampled_requests(resumed) == needed
    states = [
        (place / "group" / "analyses" / "value_accuracy" / "states.jsonl").read_text()
        for place in (base, tmp_path / "undisturbed")
    ]
    assert states[0] == states[1]


def test_other_settings_are_another_analysis(base: Path) -> None:
    assert analyse(base, "group", {"type": "diversity"})[0] == 0
    assert analyse(base, "group", {"type": "diversity", "order": 2})[0] == 0
    assert result(base, "group", "diversity")["settings"] == {"type": "diversity", "order": 2}


def test_an_analyzer_that_two_fragments_want_runs_once(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyse(base, "group", {"type": "diversity"}, {"type": "diversity"})[0] == 0
    assert analyse(base, "group", {"type": "diversity"}, {"type": "diversity"})[0] == 0
    assert capsys.readouterr().out.count("is done") == 1
    with pytest.raises(ValueError, match="two different ones are called diversity"):
        checked(experiment(base, "group", {"type": "diversity"}, {"type": "diversity", "order": 2}))


def test_analyses_of_several_experiments_go_into_one_figure(base: Path, tmp_path: Path) -> None:
    for name in ("group", "gae"):
        assert analyse(base, name, VALUES)[0] == 0
    experiments = [f"VinePPO={base / 'group'}", str(base / "gae")]
    drawn = compare_analyses("value_accuracy", experiments, tmp_path / "out" / "values")
    assert sorted(path.name for path in drawn.parent.iterdir()) == ["values.json", "values.png", "values.svg"]
    assert set(json.loads(drawn.with_name("values.json").read_text())) == {"VinePPO", "gae"}
    svg = drawn.with_name("values.svg").read_text()
    assert "VinePPO: MC, K = 3" in svg and "gae: critic" in svg
    with pytest.raises(ValueError, match=r"has no analysis 'diversity' .*there: value_accuracy"):
        compare_analyses("diversity", experiments, tmp_path / "out" / "diversity")


def test_experiments_of_one_name_are_taken_together(base: Path, tmp_path: Path) -> None:
    for name in ("group", "gae"):
        settings = (VALUES, {"type": "weight_distance"}) if name == "gae" else (VALUES,)
        assert analyse(base, name, *settings)[0] == 0
    both = [f"both={base / name}" for name in ("group", "gae")]
    drawn = compare_analyses("value_accuracy", both, tmp_path / "both")
    (pooled,) = json.loads(drawn.with_name("both.json").read_text()).values()
    apart = [result(base, name, "value_accuracy")["numbers"]["all"] for name in ("group", "gae")]
    together = pooled["numbers"]["all"]
    for part in ("within", "prompts"):
        assert together["states"][part]["count"] == sum(one["states"][part]["count"] for one in apart)
    errors = [one["estimators"]["monte_carlo_3"]["within"] for one in (*apart, together)]
    sums = [one["states"] * one["mean_absolute_error"]["value"] for one in errors]
    assert sums[2] == pytest.approx(sums[0] + sums[1])
    assert together["estimators"]["critic"] == apart[1]["estimators"]["critic"]
    with pytest.raises(ValueError, match="weight_distance can't be taken together"):
        compare_analyses("weight_distance", [both[1]] * 2, tmp_path / "twice")


def test_a_run_is_finished_whatever_analyzers_stand_on_its_right(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = experiment(base, "group", VALUES)
    run_iteration_loop(config, {**PLAIN, "analyzers": [VALUES]})
    assert "is finished" in capsys.readouterr().out
    assert ExperimentDirectory(base / "group").checkpoints() == [1, 2]
