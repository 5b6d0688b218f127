"""Every grader that can be named in a configuration stands the conformance suite."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import treetune.parts  # noqa: F401
from tests.support.grader_cases import ELSEWHERE, LABELLED, Labelled, problem
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.conformance import Case, conformance
from treetune.vocabulary import Grade, Problem


def test_every_registered_grader_has_labelled_cases() -> None:
    ours = {name for name, part in Grader.registered().items() if part.__module__.startswith("treetune")}
    assert ours == LABELLED.keys() | ELSEWHERE.keys()
    for file in ELSEWHERE.values():
        assert "conformance(" in Path(__file__).with_name(file).read_text()
    for name, labelled in LABELLED.items():
        assert type(labelled.grader) is Grader.registered()[name]
        for case in labelled.cases:
            assert case.right
            assert case.wrong


@pytest.mark.parametrize("labelled", LABELLED.values(), ids=LABELLED)
def test_a_grader_stands_the_conformance_suite(labelled: Labelled) -> None:
    conformance(labelled.grader, labelled.cases, deadline=20.0, skip=labelled.skip)


@dataclass(frozen=True)
class Bad(Grader):
    """Does one thing that no grader may."""

    how: str = ""

    @property
    def best(self) -> float:
        return 0.5 if self.how == "best" else 1.0

    def extract(self, response: str, problem: Problem) -> str | None:
        answer = response.strip() or None
        return "something" if answer is None and self.how == "guesses" else answer

    def verdict(self, extracted: str, problem: Problem) -> float:
        if self.how == "slow" and extracted.startswith("a" * 1000):
            time.sleep(60)
        if self.how == "generous" and extracted == "1e999999":
            return 1.0
        if self.how == "prefix":
            return float(extracted.startswith(problem.gold))
        if self.how == "chance":
            return float(extracted == problem.gold) * float(time.perf_counter_ns() % 1000) / 999
        return (2.0 if self.how == "too much" else 1.0) * float(extracted == problem.gold)

    def grade(self, response: str, problem: Problem) -> Grade:
        if self.how == "other":
            return Grade(float(problem.gold in response), "ok")
        if self.how == "guesses" and not response.strip():
            return Grade(1.0, "ok")
        return super().grade(response, problem)


CASE = Case(problem("7"), right=["7"], wrong=["8"], nearly=["7.5"])


def test_a_good_grader_of_ones_own_conforms() -> None:
    conformance(Bad(), [CASE])


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("best", "the best answer earns 0.5"),
        ("guesses", "and isn't correct"),
        ("slow", "kept the grader busy"),
        ("generous", "'1e999999'"),
        ("prefix", "'7.5'"),
        ("chance", "and then as"),
        ("too much", "the most that can be earned is 1"),
        ("other", "earns"),
    ],
)
def test_what_no_grader_may_do_is_found(how: str, told: str) -> None:
    deadline = 1.0 if how == "slow" else 10.0
    wrong = ["77"] if how == "other" else ["8"]
    with pytest.raises(AssertionError, match=told):
        conformance(
            Bad(how), [Case(problem("7"), right=["7"], wrong=wrong, nearly=["7.5"])], deadline=deadline
        )
