from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.vocabulary import Problem


def problem(gold: str) -> Problem:
    return Problem(id="test/0", prompt="?", gold=gold)


@pytest.mark.parametrize(
    ("response", "gold", "reward", "extracted"),
    [
        ("46\n#180", "180", 1.0, "180"),
        ("#18", "180", 0.0, "18"),
        ("#1\n#180", "180", 1.0, "180"),
        ("#180\n#1", "180", 0.0, "1"),
        ("# 180 \n", "180", 1.0, "180"),
        ("#0180", "180", 1.0, "0180"),
        ("#+180", "180", 1.0, "+180"),
        ("#-0", "0", 1.0, "-0"),
        ("#-5", "5", 0.0, "-5"),
        ("#180\n46", "180", 0.0, "180\n46"),
        ("#1_80", "180", 0.0, "1_80"),
        ("#180.0", "180", 0.0, "180.0"),
        ("#(A)", "(A)", 1.0, "(A)"),
        ("#(a)", "(A)", 0.0, "(a)"),
    ],
)
def test_the_text_after_the_last_marker_counts(
    response: str, gold: str, reward: float, extracted: str
) -> None:
    grade = FinalAnswer().grade(response, problem(gold))
    assert (grade.outcome, grade.reward, grade.extracted) == ("ok", reward, extracted)


@pytest.mark.parametrize("response", ["", "180", "180#", "180#  \n"])
def test_nothing_after_a_marker_is_no_answer(response: str) -> None:
    grade = FinalAnswer().grade(response, problem("180"))
    assert (grade.outcome, grade.reward, grade.extracted) == ("no_answer", 0.0, None)


def test_the_marker_can_be_chosen() -> None:
    assert FinalAnswer(marker="####").grade("#1 #### 7", problem("7")).reward == 1.0


@given(st.integers(), st.integers())
def test_whole_numbers_are_right_exactly_if_they_are_equal(given_number: int, gold: int) -> None:
    assert FinalAnswer().grade(f"#{given_number:+05d}", problem(str(gold))).reward == (given_number == gold)


@given(st.text(), st.text())
def test_any_text_gets_a_grade(response: str, gold: str) -> None:
    assert FinalAnswer().grade(response, problem(gold)).outcome in ("ok", "no_answer")


def test_numbers_of_any_length_are_compared() -> None:
    digits = "7" * 1_000_000
    assert FinalAnswer().grade(f"#{digits}", problem(f"0{digits}")).reward == 1.0
