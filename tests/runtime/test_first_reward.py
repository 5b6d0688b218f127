"""`treetune check` tries a reward function on the reference answer of the first problem.

The tests hold that it shows the reward, warns of None in every form of the answer, and refuses functions that
raise or return nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from treetune.config import folders
from treetune.domains.graders.function import FunctionGrader
from treetune.exceptions import ConfigError
from treetune.runtime import first_reward
from treetune.vocabulary import Grade, Problem

REWARDS = """
import re

def bare(response, gold):
    return float(response == gold)

def boxed(response, gold):
    match = re.search(r"boxed{(.*)}", response)
    return float(match[1] == gold) if match else None

def in_words(response, gold):
    return 1.0 if response.startswith("In words: ") else None

def raises(response, gold):
    raise KeyError(response)

def forgets(response, gold):
    reward = float(response == gold)

def forgets_in_a_branch(response, gold):
    def same(text):
        return text == gold
    if same(response):
        return None
    return

def explains(response, gold):
    raise NotImplementedError

async def awaits(response, gold):
    return 1.0
"""


class PoolInThisProcess:
    """Grades like `GraderPool`, without worker processes."""

    def __init__(self, grader: FunctionGrader, **settings: Any) -> None:
        self.grader = grader

    def __enter__(self) -> PoolInThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def submit(self, response: str, problem: Problem) -> Future[Grade]:
        future: Future[Grade] = Future()
        try:
            future.set_result(self.grader.grade(response, problem))
        except KeyError as error:
            future.set_result(Grade(reward=0.0, outcome="error", message=repr(error)))
        return future


@pytest.fixture(autouse=True)
def _rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "tried_rewards.py").write_text(REWARDS)
    monkeypatch.setattr(folders, "_OWN_FOLDERS", folders.OwnFolders())
    monkeypatch.setattr(first_reward, "GraderPool", PoolInThisProcess)
    finders = list(sys.meta_path)
    folders.set_search_folders([tmp_path])
    yield
    sys.meta_path[:] = finders
    sys.modules.pop("tried_rewards", None)


def describe(name: str) -> str:
    """Describes the first reward of a function of `REWARDS`."""

    def refuse(*_: object) -> str:
        raise ValueError("there are no demonstrations")

    task: Any = SimpleNamespace(
        grader=FunctionGrader(path=f"tried_rewards:{name}"),
        examples=lambda count: [Problem(id="train/0", prompt="2 + 2?", gold="4")][:count],
        demonstration=refuse,
    )
    [line] = first_reward.describe_first_reward(task, deadline=1.0)
    return line


def test_the_reward_of_the_reference_answer_is_shown() -> None:
    assert describe("bare") == "tried_rewards:bare gives the reference answer of train/0 the reward 1"


def test_a_function_that_expects_a_boxed_answer_gets_a_boxed_one() -> None:
    line = describe("boxed")
    assert "finds no answer (None) in the bare reference answer of train/0" in line
    assert line.endswith(r"gives '\\boxed{4}' the reward 1")


def test_none_for_every_form_is_a_warning_that_names_the_consequence_for_a_run() -> None:
    line = describe("in_words")
    assert line.startswith(
        "warning: tried_rewards:in_words returned None (no answer) for the reference answer"
    )
    assert r"'4', '\\boxed{4}', '#### 4', '<answer>4</answer>'" in line
    assert "the run ends there with an error. Return a number" in line


def test_an_exception_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="can't grade the reference answer of train/0"):
        describe("raises")


@pytest.mark.parametrize("name", ["forgets", "forgets_in_a_branch"])
def test_a_function_without_a_return_value_is_refused_by_every_command(name: str) -> None:
    [finding] = FunctionGrader(path=f"tried_rewards:{name}").check(None)
    assert finding.level == "error" and "has no `return` with a value" in finding.what
    assert "return a number for every answer" in finding.remedy


@pytest.mark.parametrize("name", ["bare", "boxed", "raises", "explains", "awaits"])
def test_other_functions_are_not_refused(name: str) -> None:
    assert list(FunctionGrader(path=f"tried_rewards:{name}").check(None)) == []
