"""Runs whose grader is not always there: what it could not grade is left out, counted and told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.runtime.even_answers import OutOfOrder
from tests.runtime.in_process import TASK, FakeSettings, directory_of, sampled_requests, small, train
from treetune.inference.base import EngineError
from treetune.rollouts.credit import Rloo
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.storage import read_episodes, read_trajectories
from treetune.rollouts.unavailable import NothingGraded
from treetune.runtime.base import Evaluation, EvaluationSet, PolicyIteration

SETS = Evaluation(every=1, sets=(EvaluationSet(split="test", samples=4, while_training=True),))


def disturbed(base: Path, switch: str = "", **changes: Any) -> PolicyIteration:
    """Every third answer stays without a verdict."""
    return small(
        base,
        task=replace(TASK, grader=OutOfOrder(switch)),
        rollout=SingleTurn(samples=3, max_tokens=12, unfinished_reward=None),
        credit=Rloo(),
        evaluation=SETS,
        **changes,
    )


def weights(config: PolicyIteration) -> dict[str, Any]:
    return load_file(directory_of(config).checkpoint(2) / "policy" / "model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> PolicyIteration:
    config = disturbed(tmp_path_factory.mktemp("disturbed"))
    train(config)
    return config


def test_answers_without_a_verdict_are_stored_and_not_trained_on(finished: PolicyIteration) -> None:
    directory = directory_of(finished)
    for row in directory.read_metrics():
        folder = directory.iteration(row["iteration"])
        answers = read_trajectories(folder / "trajectories.arrow")
        lost = [one for one in answers if not one.grade.is_known]
        assert 0 < len(lost) < len(answers) == 12
        assert row["episodes/unavailable"] == len(lost) / len(answers)
        known = [one for one in answers if one.grade.is_known]
        assert row["episodes/score"] == pytest.approx(sum(one.score for one in known) / len(known))
        trained = read_episodes(folder / "episodes.arrow")
        alone = row.get("episodes/groups_ungraded", 0.0)
        assert {e.trajectory for e in trained} <= {one.id for one in known}
        assert len({e.group for e in trained}) == 4 - alone
        assert all(sum(other.group == e.group for other in trained) > 1 for e in trained)


def test_a_person_is_told_how_many_and_why(finished: PolicyIteration) -> None:
    log = (directory_of(finished).logs / "run.log").read_text()
    for iteration in (1, 2):
        assert f"iteration {iteration}: " in log
    assert log.count("answers could not be graded and are left out: the judge is down (") == 4


def test_accuracies_are_those_of_graded_answers_and_the_summary_counts_the_others(
    finished: PolicyIteration,
) -> None:
    folder = directory_of(finished).evaluation(2, "test")
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    known = [row for row in rows if row["outcome"] != "unavailable"]
    assert summary["unavailable"] == len(rows) - len(known) > 0
    groups: dict[str, list[bool]] = {}
    for row in known:
        groups.setdefault(row["problem"], []).append(row["reward"] == 1.0)
    assert summary["pass_at_1"] == pytest.approx(
        sum(sum(group) / len(group) for group in groups.values()) / len(groups)
    )
    metrics = directory_of(finished).read_metrics()[-1]
    assert metrics["evaluation/test/unavailable"] == summary["unavailable"]


def test_a_run_struck_while_sampling_ends_the_same(finished: PolicyIteration, tmp_path: Path) -> None:
    struck = disturbed(tmp_path, engine=FakeSettings(fail_after=16))
    with pytest.raises(EngineError, match="told to fail"):
        train(struck)
    resumed = disturbed(tmp_path, engine=FakeSettings())
    train(resumed)
    assert sampled_requests(struck) + sampled_requests(resumed) == sampled_requests(finished)
    ours, theirs = weights(resumed), weights(finished)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_where_nothing_can_be_graded_the_run_ends_and_goes_on_later_without_sampling_again(
    finished: PolicyIteration, tmp_path: Path
) -> None:
    switch = tmp_path / "down"
    switch.touch()
    down = disturbed(tmp_path, str(switch), engine=FakeSettings())
    with pytest.raises(NothingGraded, match=r"12 of 12 answers could not be graded .* the judge is down"):
        train(down)
    assert not (directory_of(down).iteration(0) / "trajectories.arrow").exists()
    switch.unlink()
    up = disturbed(tmp_path, str(switch), engine=FakeSettings())
    train(up)
    assert sampled_requests(down) + sampled_requests(up) == sampled_requests(finished)
    ours, theirs = weights(up), weights(finished)
    assert all((ours[name] == theirs[name]).all() for name in theirs)
