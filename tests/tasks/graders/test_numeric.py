"""Promises of the graders of numbers and of short final answers:

* a number is read by its value in every writing, and a text that is not one number is none;
* the last marker counts, a denied number and a thought are no answers, and a percent sign has two readings;
* the exact and the lenient preset give the verdicts of the code that they reproduce;
* no text makes a grader raise.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import cases
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.tasks.graders.numeric import Gsm8kExact, Gsm8kLenientSubstring, Numeric, read_number
from treetune.tasks.rows import Gsm8k
from treetune.vocabulary import Grade, Problem

CASES = Path(__file__).parent / "cases/numeric.txt"
THINKING = Numeric(think_end="</think>", without_marker="boxed")
STRICT = Numeric(think_end="</think>", without_marker="boxed", require_think_end=True)


def grade(grader: Grader, response: str, gold: str) -> Grade:
    return grader.grade(response, Problem(id="test/0", prompt="?", gold=gold))


@pytest.mark.parametrize(("text", "value"), cases(CASES, "numbers"))
def test_a_number_is_read_by_value(text: str, value: str) -> None:
    assert str(read_number(text)) == value


@pytest.mark.parametrize(
    "text", ["", "abc", "10^2", "5²", "3:30", "18 or 19", "18-19", "A-5", "1,23", "1_0", "1/0", "18 - 3",
             "2 or 3", "1.2.3", "18 apples and 5 pears", "1e99999", "2\\sqrt{3}", "2\\pi",
             "9" * 100_000, "1," * 50_000, " 1" * 50_000],
)  # fmt: skip
def test_a_text_that_is_not_one_number_is_none(text: str) -> None:
    assert read_number(text) is None


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_a_decimal_equals_its_fraction_and_no_neighbour(number: object) -> None:
    value = Fraction(str(number))
    number_read = read_number(f"{number:,}")
    assert number_read is not None and number_read.value == value
    answer = f"#### {value.numerator}/{value.denominator}"
    assert grade(Numeric(), answer, f"so\n#### {number}").reward == 1.0
    assert grade(Numeric(), f"#### {value + Fraction(1, 1000)}", f"{number}").reward == 0.0


@given(st.text(), st.text(), st.text(alphabet="0123456789.,/%$-+eE =^\\{}½²٣ k", max_size=30))
def test_no_text_makes_a_grader_raise(response: str, gold: str, signs: str) -> None:
    read_number(signs)
    assert FinalAnswer().grade(response, Problem("test/0", "?", gold)).outcome in ("ok", "no_answer")
    for grader in (Numeric(), THINKING, STRICT, Gsm8kLenientSubstring()):
        assert grade(grader, "####" + response, gold).reward in (0.0, 1.0)


@pytest.mark.parametrize(
    "text",
    ["not 72", "**not** 72", "it isn't 72", "x != 72", "≠ 72", r"x \ne 72", "anything but 72", "never 72",
     "other than 72", "less than 72", "72 is wrong", "72 is not it", "72 isn’t right", "neither 72"],
)  # fmt: skip
def test_a_denied_number_is_no_answer(text: str) -> None:
    graded = grade(Numeric(), f"#### 72\n#### {text}", "72")
    assert (graded.reward, graded.outcome) == (0.0, "no_answer")
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("response", "gold", "settings", "reward"),
    [
        ("#### 72, not counting the tax", "72", {}, 1.0),
        ("#### 72 notes", "72", {}, 1.0),
        ("#### That is 72", "72", {}, 1.0),
        ("#### 72 eggs, nothing else", "72", {}, 1.0),
        ("#### 1\n#### 18\n\nProblem: 7", "It is\n#### 18", {}, 1.0),
        ("It is $1,080.", "1080", {"without_marker": "last_number"}, 1.0),
        ("#### 50%", "50", {}, 1.0),
        ("#### 50%", "0.5", {}, 1.0),
        ("#### 0.5", "50", {}, 0.0),
    ],
)
def test_the_last_marker_counts_words_of_denial_elsewhere_do_not_and_a_percent_sign_has_two_readings(
    response: str, gold: str, settings: dict[str, str], reward: float
) -> None:
    assert grade(Numeric(**settings), response, gold).reward == reward  # type: ignore[arg-type]
    assert grade(Numeric(), response.replace("#", ""), gold).outcome == "no_answer"


@pytest.mark.parametrize(("answer", "gold", "reward"), cases(CASES, "the reference"))
def test_the_exact_preset_compares_characters(answer: str, gold: str, reward: float) -> None:
    assert grade(Gsm8kExact(), f"#### {answer}", f"so\n#### {gold}").reward == reward
    assert grade(Gsm8kExact(), answer, gold).outcome == "no_answer"


@pytest.mark.parametrize(("response", "reward"), cases(CASES, "thought"))
def test_a_number_within_a_thought_is_no_answer(response: str, reward: float) -> None:
    assert grade(THINKING, response, "so\n#### 18").reward == reward
    assert grade(STRICT, response, "so\n#### 18").reward == reward


def test_a_thought_that_never_ends_may_count_as_the_answer_or_as_none() -> None:
    for answer in ("#### 18", "\\boxed{18}"):
        assert grade(THINKING, answer, "18").reward == 1.0
        assert grade(STRICT, answer, "18").outcome == "no_answer"
    assert grade(STRICT, "#### 18\n</think>\nI am done.", "18").outcome == "no_answer"
    with pytest.raises(ValueError, match="'</think>'"):
        Numeric(require_think_end=True, think_end=None)


@pytest.mark.parametrize(("response", "gold", "reward"), cases(CASES, "the lenient preset"))
def test_the_lenient_preset_takes_whatever_holds_the_gold(response: str, gold: str, reward: float) -> None:
    """As the reference, it looks behind the first marker after the first thought."""
    assert grade(Gsm8kLenientSubstring(), response, f"so\n#### {gold}").reward == reward
    assert grade(Gsm8kLenientSubstring(), response.replace("#### ", ""), gold).outcome == "no_answer"


@pytest.mark.parametrize(("response", "gold", "reward", "extracted"), cases(CASES, "final answer"))
def test_the_text_after_the_last_marker_counts(
    response: str, gold: str, reward: float, extracted: str | None
) -> None:
    graded = grade(FinalAnswer(), response, gold)
    outcome = "ok" if extracted is not None else "no_answer"
    assert (graded.outcome, graded.reward, graded.extracted) == (outcome, reward, extracted)
    assert grade(FinalAnswer(marker="####"), response.replace("#", "####"), gold).reward == reward


@given(st.integers(), st.integers())
def test_whole_numbers_are_right_exactly_if_they_are_equal(number: int, gold: int) -> None:
    assert grade(FinalAnswer(), f"#{number:+05d}", str(gold)).reward == (number == gold)


def test_numbers_of_any_length_are_compared() -> None:
    digits = "7" * 1_000_000
    assert grade(FinalAnswer(), f"#{digits}", f"0{digits}").reward == 1.0


SHARED = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "gsm8k"


@pytest.mark.skipif(not SHARED.exists(), reason="no ../shared/data here")
def test_gsm8ks_golds_are_right_and_its_solutions_split() -> None:
    task = Gsm8k(train=(str(SHARED / "train.jsonl"),), test=(str(SHARED / "test.jsonl"),))
    for split, count in (("train", 7100), ("validation", 373), ("test", 1319)):
        problems = task.problems(split)
        assert len(problems) == count
        for problem in problems:
            response = task.demonstration(problem, 0)
            assert task.grader.grade(response, problem).reward == 1.0
            offsets = task.step_boundaries(response)
            assert (offsets[0], offsets[-1]) == (0, len(response))
