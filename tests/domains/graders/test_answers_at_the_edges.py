"""Promises of graders about rare answers and golds:

* a table is compared by the order of its columns if the gold has no header;
* the kind of newline changes no choice, and zero in words is the number 0;
* a gold that can't be read is refused with its problem.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from treetune.domains.graders.cruxeval import CruxEval
from treetune.domains.graders.multiple_choice import MultipleChoice
from treetune.domains.graders.number_words import number_in_words
from treetune.domains.graders.puzzles import ZebraGrader
from treetune.vocabulary import Grade, Problem


def test_an_answer_with_a_header_fits_a_gold_without_one() -> None:
    problem = Problem("1", "?", gold='[["1", "cat"], ["2", "dog"]]')
    answer = '{"header": ["House", "Pet"], "rows": [["1", "cat"], ["2", "dog"]]}'
    verdict = ZebraGrader().verdict(answer, problem)
    assert isinstance(verdict, Grade)
    assert verdict.reward == 1.0
    assert ZebraGrader().same_answer(answer, problem.gold, problem)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_last_choice_counts_with_every_kind_of_newline(newline: str) -> None:
    response = newline.join([*["text"] * 60, r"\boxed{A}", "Wait.", "B"])
    assert MultipleChoice().extract(response, Problem("1", "?", gold="B")) == "B"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("zero thirds", Fraction(0)),
        ("zero hundred", Fraction(0)),
        ("zero thousand", Fraction(0)),
        ("half", Fraction(1, 2)),
        ("hundred", Fraction(100)),
        ("two thousand", Fraction(2000)),
    ],
)
def test_zero_in_words_is_zero(text: str, number: Fraction) -> None:
    assert number_in_words(text) == (number, "")


def test_an_input_that_is_no_literals_is_refused_with_its_problem() -> None:
    problem = Problem("cruxeval/7", "?", gold='{"code": "def f(x): return x", "input": "open(1)"}')
    with pytest.raises(ValueError, match="problem cruxeval/7"):
        CruxEval().verdict("1", problem)
