"""Promises of the grader that calls a user's function:

* the function gets the parameters that it names, and returns a number, a grade or a dictionary with a score;
* it runs in the grader processes, or in threads as a service, and a failure costs one answer its reward;
* an exception is recorded with the line of the user's file, and a wrong path is refused at once.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treetune.config import folders
from treetune.domains.graders.function import FunctionGrader
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Problem

DATA = {"counted": True, "data_source": "sums", "extra_info": {"split": "train"}}
PROBLEM = Problem(id="p", prompt="?", gold="4", data=DATA)


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    shutil.copy(Path(__file__).parent / "programs/own_rewards.txt", tmp_path / "own_rewards.py")
    monkeypatch.setattr(folders, "_OWN_FOLDERS", folders.OwnFolders())
    finders = list(sys.meta_path)
    folders.set_search_folders([tmp_path])
    yield
    sys.meta_path[:] = finders
    sys.modules.pop("own_rewards", None)


def grades(name: str, *responses: str, deadline: float = 30, **settings: Any) -> list[Any]:
    grader = FunctionGrader(path=f"own_rewards:{name}", **settings)
    with GraderPool(grader, workers=1, deadline=deadline) as pool:
        answers = [(response, PROBLEM) for response in responses]
        return [(grade.outcome, grade.reward) for grade in pool.grade_many(answers)]


@pytest.mark.parametrize(
    ("name", "response", "arguments", "reward"),
    [
        ("contains", "2 + 2 = 4", {}, 1.0),
        ("contains", "2 + 2 = 5", {}, 0.0),
        ("lengths", "abcde", {}, 0.5),  # asks for the whole problem
        ("lengths", "abcde", {"most": 20}, 0.75),
        ("whole", "x", {}, 0.5),
        ("scored", "x", {}, 0.5),
        ("compute_score", "x", {}, 1.0),  # has verl's parameters
        ("compute_score", "y", {}, 0.0),
        ("strict", "4", {}, 1.0),
    ],
)
def test_a_function_gets_the_parameters_that_it_names_and_returns_a_number_a_grade_or_a_dictionary(
    name: str, response: str, arguments: dict[str, Any], reward: float
) -> None:
    grade = FunctionGrader(path=f"own_rewards:{name}", arguments=arguments).grade(response, PROBLEM)
    assert (grade.outcome, grade.reward) == ("ok", reward)


def test_a_coroutine_is_awaited_in_processes_and_in_threads() -> None:
    assert grades("waits", "2 + 2 = 4", "2 + 2 = 5") == [("ok", 1.0), ("ok", 0.0)]
    assert grades("waits", "4", isolation="service") == [("ok", 1.0)]


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("hangs", "timeout"), ("crashes", "error"), ("raises", "error"), ("text", "error"), ("lacks", "error")],
)
def test_a_function_that_fails_costs_an_answer_its_reward_and_nothing_else(name: str, outcome: str) -> None:
    assert grades(name, "x", deadline=2.0 if name == "hangs" else 30.0) == [(outcome, 0.0)]


def test_an_exception_is_recorded_with_the_line_of_the_users_file() -> None:
    grader = FunctionGrader(path="own_rewards:raises")
    with GraderPool(grader, workers=1, deadline=30) as pool:
        [grade] = pool.grade_many([("x", PROBLEM)])
    assert grade.message == "KeyError: 'x' (own_rewards.py, line 20)"


def test_keys_of_the_environment_reach_services_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_API_KEY", "secret")
    assert grades("key", "x") == [("ok", 0.0)]
    assert grades("key", "x", isolation="service") == [("ok", 1.0)]


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("own_rewards.contains", {}, "such as 'my_rewards:score'"),
        ("own_rewards:contain", {}, "did you mean 'contains'"),
        ("own_reward:contains", {}, "did you mean 'own_rewards'"),
        ("own_rewards:one", {}, "can't be called with a response and a gold answer"),
        ("own_rewards:lengths", {"least": 1}, "and the given arguments"),
    ],
)
def test_a_path_or_arguments_that_fit_no_function_are_refused_at_once(
    path: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FunctionGrader(path=path, arguments=arguments)
