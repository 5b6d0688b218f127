"""A plain function grades answers in the grader processes, and is checked before anything starts."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treetune.config import folders
from treetune.tasks.graders.function import FunctionGrader
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Problem

REWARDS = """
import os, time
from treetune.vocabulary import Grade

def contains(response, gold):
    return gold in response

def lengths(response, problem, *, most=10):
    return 1 - len(response) / most if problem.data["counted"] else None

def whole(response, gold):
    return Grade(reward=0.5, outcome="ok", extracted=response)

def hangs(response, gold):
    time.sleep(60)

def crashes(response, gold):
    os._exit(3)

def raises(response, gold):
    raise KeyError(response)

def text(response, gold):
    return "good"

def key(response, gold):
    return float("OWN_API_KEY" in os.environ)

def one(response):
    return 1

async def waits(response, gold):
    import asyncio
    await asyncio.sleep(0)
    return gold in response

def scored(response, gold):
    return {"score": 0.5, "acc": True}

def lacks(response, gold):
    return {"acc": 1.0}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float((data_source, ground_truth, extra_info) == ("sums", "4", {"split": "train"})
            and solution_str == "x")}

def strict(data_source, solution_str, ground_truth):
    return float(ground_truth in solution_str and data_source == "sums")
"""

PROBLEM = Problem(
    id="p",
    prompt="?",
    gold="4",
    data={"counted": True, "data_source": "sums", "extra_info": {"split": "train"}},
)


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_rewards.py").write_text(textwrap.dedent(REWARDS))
    monkeypatch.setattr(folders, "_OWN", folders.OwnFolders())
    finders = list(sys.meta_path)
    folders.search_in([tmp_path])
    yield
    sys.meta_path[:] = finders
    sys.modules.pop("own_rewards", None)


def grades(name: str, *responses: str, deadline: float = 30, **arguments: object) -> list[Any]:
    grader = FunctionGrader(path=f"own_rewards:{name}", arguments=arguments)
    with GraderPool(grader, workers=1, deadline=deadline) as pool:
        return [(g.outcome, g.reward) for g in pool.grade_many([(one, PROBLEM) for one in responses])]


def test_a_number_is_the_reward() -> None:
    assert grades("contains", "2 + 2 = 4", "2 + 2 = 5") == [("ok", 1.0), ("ok", 0.0)]


def test_a_function_may_ask_for_the_whole_problem_and_for_arguments() -> None:
    assert grades("lengths", "abcde") == [("ok", 0.5)]
    assert grades("lengths", "abcde", most=20) == [("ok", 0.75)]


def test_a_function_may_give_a_grade() -> None:
    assert grades("whole", "x") == [("ok", 0.5)]


def test_a_coroutine_is_awaited_in_processes_and_in_threads() -> None:
    assert grades("waits", "2 + 2 = 4", "2 + 2 = 5") == [("ok", 1.0), ("ok", 0.0)]
    service = FunctionGrader(path="own_rewards:waits", isolation="service")
    with GraderPool(service, workers=1, deadline=30) as pool:
        assert pool.grade_many([("4", PROBLEM)])[0].reward == 1.0


def test_a_dictionary_gives_its_score() -> None:
    assert grades("scored", "x") == [("ok", 0.5)]
    assert grades("lacks", "x") == [("error", 0.0)]


def test_a_function_with_verls_parameters_gets_them_by_name() -> None:
    assert grades("compute_score", "x", "y") == [("ok", 1.0), ("ok", 0.0)]
    assert grades("strict", "4") == [("ok", 1.0)]


@pytest.mark.parametrize(
    ("name", "outcome"), [("hangs", "timeout"), ("crashes", "error"), ("raises", "error"), ("text", "error")]
)
def test_a_function_that_fails_costs_an_answer_its_reward_and_nothing_else(name: str, outcome: str) -> None:
    assert grades(name, "x", deadline=2.0 if name == "hangs" else 30.0) == [(outcome, 0.0)]


def test_keys_reach_those_alone_who_wait_for_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_API_KEY", "secret")
    assert grades("key", "x") == [("ok", 0.0)]
    service = FunctionGrader(path="own_rewards:key", isolation="service")
    with GraderPool(service, workers=1, deadline=30) as pool:
        assert pool.grade_many([("x", PROBLEM)])[0].reward == 1.0


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("own_rewards.contains", "such as 'my_rewards:score'"),
        ("own_rewards:contain", "did you mean 'contains'"),
        ("own_reward:contains", "did you mean 'own_rewards'"),
        ("own_rewards:one", "can't be called with a response and a gold answer"),
    ],
)
def test_a_path_that_names_no_such_function_is_refused_at_once(path: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FunctionGrader(path=path)


def test_arguments_that_the_function_does_not_take_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="and the given arguments"):
        FunctionGrader(path="own_rewards:lengths", arguments={"least": 1})
