"""A reward function that fails is told in the first iteration, and trains nothing where it fails on all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runtime.in_process import TASK, directory_of, small, train
from treetune.config import folders
from treetune.rollouts.unavailable import NothingGraded
from treetune.runtime.base import Evaluation, EvaluationSet
from treetune.tasks.graders.function import FunctionGrader

REWARDS = """
import os

def raises(response, gold):
    return 1 / (len(gold) - len(gold))

async def awaits(response, gold):
    raise ConnectionError("nobody listens")

def text(response, gold):
    return "good"

def dictionary(response, gold):
    return {"accuracy": 1.0}

def dies(response, gold):
    os._exit(3)

def sometimes(response, problem):
    if problem.id.endswith(("0", "1", "2", "3", "4")):
        raise KeyError(problem.id)
    return 1.0

def on_tests(response, problem):
    if not problem.id.startswith("train"):
        raise KeyError(problem.id)
    return 1.0
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "broken_rewards.py").write_text(REWARDS)
    monkeypatch.setattr(folders, "_OWN", folders.OwnFolders())
    finders = list(sys.meta_path)
    folders.search_in([tmp_path])
    yield
    sys.meta_path[:] = finders
    sys.modules.pop("broken_rewards", None)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", "ZeroDivisionError: division by zero"),
        ("awaits", "ConnectionError: nobody listens"),
        ("text", "should return a finite number, a Grade, a dictionary .* not 'good'"),
        ("dictionary", r"not {'accuracy': 1.0}"),
        ("dies", "process"),
    ],
)
def test_a_function_that_fails_on_all_answers_ends_the_run(tmp_path: Path, name: str, why: str) -> None:
    config = small(tmp_path, task=replace(TASK, grader=FunctionGrader(path=f"broken_rewards:{name}")))
    words = rf"1: grading failed on 8 of 8 answers, .* the first, to the problem 'train/\d+': .*{why}"
    with pytest.raises(NothingGraded, match=words):
        train(config)
    assert not (directory_of(config).iteration(0) / "trajectories.arrow").exists()


def test_a_function_that_fails_on_some_answers_is_told_with_the_first(tmp_path: Path) -> None:
    grader = FunctionGrader(path="broken_rewards:sometimes")
    directory = train(small(tmp_path, task=replace(TASK, grader=grader)))
    log = (directory.logs / "run.log").read_text()
    assert "grading failed on " in log and "which earn nothing; the first, to the problem 'train/" in log
    assert directory.resumable() == 2


def test_a_function_that_fails_in_evaluation_alone_measures_nothing(tmp_path: Path) -> None:
    config = small(
        tmp_path,
        task=replace(TASK, grader=FunctionGrader(path="broken_rewards:on_tests")),
        evaluation=Evaluation(sets=(EvaluationSet(split="test", samples=2),)),
    )
    with pytest.raises(NothingGraded, match="evaluating test after iteration 2: grading failed on 20 of 20"):
        train(config)
    assert not (directory_of(config).evaluation(2, "test") / "summary.json").exists()
