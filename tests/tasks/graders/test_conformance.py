"""Promises of all graders that a configuration can name, and of the conformance suite:

* each grader has labelled cases and passes the suite, and hostile answers leave no process;
* the suite finds each thing that no grader may do.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import treetune.parts  # noqa: F401
from tests.domains.graders.code_grading import needs_sandbox
from tests.support.grader_cases import ELSEWHERE, LABELLED, Labelled, problem
from treetune.domains.graders.math import MathGrader
from treetune.domains.graders.minerva import Minerva
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.conformance import Case, conformance, hostile_answers
from treetune.tasks.graders.numeric import Numeric
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Grade, Problem

ROOT = Path(__file__).parents[3]


def test_every_registered_grader_has_labelled_cases() -> None:
    ours = {name for name, part in Grader.parts_by_name().items() if part.__module__.startswith("treetune")}
    assert ours == LABELLED.keys() | ELSEWHERE.keys()
    for file in ELSEWHERE.values():
        assert "conformance(" in (ROOT / file).read_text()
    for name, labelled in LABELLED.items():
        assert type(labelled.grader) is Grader.parts_by_name()[name]
        for case in labelled.cases:
            assert case.right
            assert case.wrong


@pytest.mark.parametrize(
    "labelled",
    [
        pytest.param(labelled, id=name, marks=[needs_sandbox] if hasattr(labelled.grader, "sandbox") else [])
        for name, labelled in LABELLED.items()
    ],
)
def test_a_grader_passes_the_conformance_suite(labelled: Labelled) -> None:
    conformance(labelled.grader, labelled.cases, deadline=20.0, skip=labelled.skip)


@dataclass(frozen=True)
class Bad(Grader):
    """A grader that does the listed things, which no grader may do."""

    does: tuple[str, ...] = ()

    @property
    def best(self) -> float:
        return 0.5 if "best" in self.does else 1.0

    def extract(self, response: str, problem: Problem) -> str | None:
        answer = response.strip() or None
        return "something" if answer is None and "guesses" in self.does else answer

    def verdict(self, extracted: str, problem: Problem) -> float:
        if "slow" in self.does and extracted.startswith("a" * 1000):
            time.sleep(60)
        if "dies" in self.does and extracted == "1e999999":
            os._exit(3)
        if "generous" in self.does and extracted == "1e999999":
            return 1.0
        if "chance" in self.does:
            return float(extracted == problem.gold) * float(time.perf_counter_ns() % 1000) / 999
        right = extracted.startswith(problem.gold) if "prefix" in self.does else extracted == problem.gold
        return (2.0 if "too much" in self.does else 1.0) * float(right)

    def grade(self, response: str, problem: Problem) -> Grade:
        if "other" in self.does:
            return Grade(float(problem.gold in response), "ok")
        if "guesses" in self.does and not response.strip():
            return Grade(1.0, "ok")
        return super().grade(response, problem)


def test_a_good_grader_passes_the_conformance_suite() -> None:
    conformance(Bad(), [Case(problem("7"), right=["7"], wrong=["8"], nearly=["7.5"])])


@pytest.mark.parametrize(
    "messages",
    [
        {
            "best": "the best answer earns 0.5,",
            "guesses": "a hostile answer, '', gets .*, and isn't correct",
            "generous": "a hostile answer, '1e999999', gets .*, and isn't correct",
            "prefix": "a nearly right answer, '7.5', gets .*, and isn't correct",
            "too much": r"reward=2\.0, .*the most that can be earned is 0\.5",
        },
        {"too much": "the most that can be earned is 1"},
        {"chance": "and then as"},
        {"dies": "'1e999999', gets .*, or ended its process"},
        {"slow": "kept the grader busy"},
        {"other": "'77?' earns"},
    ],
    ids=" and ".join,
)
def test_what_no_grader_may_do_is_found(messages: dict[str, str]) -> None:
    case = Case(problem("7"), right=["7"], wrong=["77" if "other" in messages else "8"], nearly=["7.5"])
    with pytest.raises(AssertionError) as error:
        conformance(Bad(tuple(messages)), [case], deadline=1.0 if "slow" in messages else 10.0)
    for fault, message in messages.items():
        assert re.search(message, str(error.value)), fault


def test_hostile_answers_are_the_same_for_the_same_seed_and_of_many_kinds() -> None:
    answers = list(hostile_answers(3, 50))
    assert answers == list(hostile_answers(3, 50))
    assert answers != list(hostile_answers(4, 50))
    assert max(len(response) for response, _ in hostile_answers(3, 200)) > 90_000


@pytest.mark.parametrize("grader", [MathGrader(), Minerva(), Numeric()])
def test_every_hostile_answer_gets_a_grade_and_no_process_is_left(grader: Grader) -> None:
    pairs = [
        (response, Problem(id=f"hostile/{number}", prompt="?", gold=gold))
        for number, (response, gold) in enumerate(hostile_answers(11, 250))
    ]
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with GraderPool(grader, workers=1, deadline=60.0) as pool:
        futures = [pool.submit(*pair) for pair in pairs]
        grades = [future.result(timeout=300) for future in futures]
    assert {grade.outcome for grade in grades} <= {"ok", "no_answer", "error"}
    assert sum(grade.reward for grade in grades) == 0
    assert not {child.pid for child in psutil.Process().children(recursive=True)} - before
