"""Promises of Countdown's grader:

* an expression is graded by its numbers and then by its exact value, and agrees with Python on both;
* all that the grammar doesn't have is malformed, and nothing huge or deep is computed;
* the last answer counts, and the four scores tell it from a wrong, a malformed and a missing one.
"""

from __future__ import annotations

import operator
import random
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cases import cases
from treetune.exceptions import NotAnExpression
from treetune.tasks.graders.conformance import hostile_answers
from treetune.tasks.graders.countdown import (
    MOST_CHARACTERS_OF_EXPRESSION,
    MOST_DIGITS_OF_A_NUMBER,
    MOST_NESTED_BRACKETS,
    MOST_TOKENS,
    CountdownGrader,
    CountdownScores,
    read_expression,
    write_gold,
)
from treetune.vocabulary import Problem

SCORES = CountdownScores(no_answer=0.0, malformed=0.1, wrong=0.2, correct=1.0)
VERDICTS = {0.0: "no answer", 0.1: "malformed", 0.2: "wrong", 1.0: "right"}

NUMBERS = [62, 70, 71]
PROBLEM = Problem(id="x", prompt="", gold=write_gold(61, NUMBERS))
CASES = Path(__file__).parent / "cases/countdown.txt"


def verdict_on_response(
    response: str, target: int = 61, numbers: list[int] = NUMBERS, **options: object
) -> str:
    grader = CountdownGrader(scores=SCORES, **options)  # type: ignore[arg-type]
    return VERDICTS[
        grader.grade(response, Problem(id="x", prompt="", gold=write_gold(target, numbers))).reward
    ]


def verdict_on_expression(
    expression: str, target: int = 61, numbers: list[int] = NUMBERS, **options: object
) -> str:
    return verdict_on_response(f"<think>…</think> <answer>{expression}</answer>", target, numbers, **options)


EXPRESSIONS = {
    "right": [
        "62+70-71", "70 + 62 - 71", "(62+70)-71", "-71+62+70", "70-(71-62)", "((62))+(70-71)", "62 + 70 − 71",
        " 62\n+70\t-71 ", "62+70-71=61", "62+70-71 = 7", "062+70-71", "-(71-62-70)", "62+70-71=61=61",
    ],
    "wrong": ["62+71-70", "(62*70)/71", "70-62-71", "62*(70-71)", "62+71-70=61"],
    "malformed": [  # read, but of other numbers than the given ones
        "71-71+62", "71-71+61", "62", "62+70", "62+70-71+0", "62+70-71+62-62", "61", "6270-71",
        "62+(70-71)*1",
        "61=62+70-71", "62=62+70-71",  # the right side of an equation is no answer
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("expression", "expected"),
    [(expression, verdict) for verdict, expressions in EXPRESSIONS.items() for expression in expressions],
)
def test_an_expression_is_graded_by_its_numbers_and_then_by_its_value(expression: str, expected: str) -> None:
    read_expression(expression.partition("=")[0])
    assert verdict_on_expression(expression) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "62**1+70-71", "62^1+70-71", "62//1+70-71", "62%70+71", "71***70-62", "62<<70>>71",  # signs
        "62+-71+70", "62--71-70", "+62+70-71", "62*-70", "62+70-", "*62+70-71", "--62+70-71", "+", "-",
        "62.0+70-71", "62+70-71.", "6.2e1+70-71", "1e9", "6_2+70-71", "6 2+70-71", "62,70-71", "",  # numbers
        "0x3e+70-71", "62+70-71j", "６２+70-71", "٦٢+70-71", "6²+70-71", "Ⅼ+70-71", "𝟔𝟐+70-71",
        "(62)(70)-71", "62(70-71)", "62+70-71)", "(62+70-71", "()62+70-71", ")62+70-71(", "()",  # brackets
        "62+70-71 is it", "sixty-two", "abs(62)+70-71", "[62,70,71][0]", "62+70-71;", "62+70-71\x00",
        "__import__('os').system('true')", "62+70-71 if True else 0", "lambda: 61", "\\frac{62}{70}-71",
        "$62+70-71$", "\\timesx 3", "62 \\divide 70", "=62+70-71",
    ],
)  # fmt: skip
def test_a_text_outside_the_grammar_is_no_expression(expression: str) -> None:
    with pytest.raises(NotAnExpression):
        read_expression(expression)
    assert verdict_on_expression(expression) in ("malformed", "no answer")


@pytest.mark.parametrize(
    "expression",
    ["3×8÷1", "3 x 8 / 1", "3·8/1", "3⋅8÷1", "3X8/1", "3 \\times 8 \\div 1", "3\\cdot8/1"],
)
def test_signs_of_multiplication_and_division_are_read_in_every_writing(expression: str) -> None:
    assert verdict_on_expression(expression, 24, [1, 3, 8]) == "right"


def test_values_are_rational_and_exact() -> None:
    assert verdict_on_expression("8/(3-8/3)", 24, [3, 3, 8, 8]) == "right"
    assert verdict_on_expression("7/2*2", 7, [2, 2, 7]) == "right"
    assert verdict_on_expression("1/3*3", 1, [1, 3, 3]) == "right"
    # 0.1 + 0.2 in floating point, and a difference that it doesn't see.
    assert verdict_on_expression("(1/10+2/10)*10", 3, [1, 10, 2, 10, 10]) == "right"
    assert verdict_on_expression("100000000000000+1/100000000000000", 10**14, [10**14, 10**14, 1]) == "wrong"


def test_a_division_by_zero_is_malformed() -> None:
    for expression in ("62/(70-70)", "62/(0*71)", "71/0", "62/(71-71)+70"):
        assert verdict_on_expression(expression, 61, [62, 70, 70, 71, 71, 0]) == "malformed"
    assert verdict_on_expression("5/(3-3)", 5, [5, 3, 3]) == "malformed"


@pytest.mark.parametrize(
    "expression",
    [
        "(" * 10_000 + "62" + ")" * 10_000 + "+70-71", "9" * 1_000_000, "+".join(["62"] * 300_000),
        "(" * (MOST_NESTED_BRACKETS + 1) + "62" + ")" * (MOST_NESTED_BRACKETS + 1) + "+70-71",
        "9" * (MOST_DIGITS_OF_A_NUMBER + 1) + "+70-71",
        "(" * 400, "-" * 900, "1-" * (MOST_TOKENS // 2) + "1", "9" * 12 + "*" + "9" * 12,
    ],
)  # fmt: skip
def test_what_is_huge_or_deep_is_malformed_without_being_computed(expression: str) -> None:
    assert verdict_on_expression(expression) == "malformed"


def test_as_many_brackets_as_are_allowed_are_read() -> None:
    assert (
        verdict_on_expression("(" * MOST_NESTED_BRACKETS + "62" + ")" * MOST_NESTED_BRACKETS + "+70-71")
        == "right"
    )
    assert verdict_on_expression(" " * (MOST_CHARACTERS_OF_EXPRESSION - 8) + "62+70-71") == "right"


def test_each_number_counts_as_often_as_it_was_given() -> None:
    assert verdict_on_expression("5+5", 10, [5, 5]) == "right"
    assert verdict_on_expression("5+5", 10, [5, 5, 5]) == "malformed"
    assert verdict_on_expression("5+5", 10, [5, 5, 5], require_all=False) == "right"
    assert verdict_on_expression("5+5", 10, [5, 6], require_all=False) == "malformed"
    assert verdict_on_expression("71-71+62", 62, require_all=False) == "malformed"
    assert verdict_on_expression("62", 62, require_all=False) == "right"


@pytest.mark.parametrize(("response", "expected"), cases(CASES, "last answer"))
def test_the_last_answer_counts(response: str, expected: str) -> None:
    # Two closing tags: the last answer runs up to the last of them.
    assert verdict_on_response(response) == expected


def test_an_answer_that_a_stop_string_ended_counts_where_that_is_said() -> None:
    stopped = "so <answer>62+70-71"
    assert verdict_on_response(stopped) == "no answer"
    assert verdict_on_response(stopped, unclosed=True) == "right"
    assert verdict_on_response(stopped + "</answer> done", unclosed=True) == "right"
    assert verdict_on_response("<answer>62+70-71</answer><answer>", unclosed=True) == "no answer"
    assert (
        verdict_on_response("1+1=2\n#62+70-71\nand more", opening="#", closing="\n", unclosed=True) == "right"
    )


def test_an_equation_may_be_refused() -> None:
    assert verdict_on_expression("62+70-71=61", equation="refused") == "malformed"
    assert verdict_on_expression("62+70-71", equation="refused") == "right"


def test_a_malformed_answer_is_told_what_is_wrong_with_it_in_few_words() -> None:
    huge, too_often, unused = (
        CountdownGrader().grade(f"<answer>{expression}</answer>", PROBLEM)
        for expression in ("7" * 100_000, "71-71+62", "71-62")
    )
    assert (huge.outcome, huge.reward) == ("ok", 0.0)
    assert huge.extracted is not None and len(huge.extracted) < 300
    assert (too_often.message, unused.message) == ("71 not given, or used too often", "70 not used")


def test_only_the_score_of_a_right_answer_counts_as_correct() -> None:
    scores = CountdownScores(no_answer=0.01, malformed=0.01, wrong=0.02, correct=1.01)
    grader = CountdownGrader(scores=scores)
    answers = ["", "<answer>61</answer>", "<answer>62+71-70</answer>", "<answer>62+70-71</answer>"]
    grades = [grader.grade(answer, PROBLEM) for answer in answers]
    assert [grade.reward for grade in grades] == [0.01, 0.01, 0.02, 1.01]
    assert [grade.correct for grade in grades] == [False, False, False, True]
    with pytest.raises(ValueError, match=r"scores\.wrong is 1\.0.*less than 1"):
        CountdownScores(wrong=1.0)


@pytest.mark.parametrize(
    "gold", ["39", "39 from", "39 from 1,2", "from 1 2", "3.5 from 1 2", "1" * 16 + " from 1"]
)
def test_a_gold_of_another_form_is_an_error(gold: str) -> None:
    with pytest.raises(ValueError, match="not one of Countdown"):
        CountdownGrader().grade("<answer>1</answer>", Problem(id="x", prompt="", gold=gold))


Tree = int | tuple[str, "Tree", "Tree"]

trees = st.recursive(
    st.integers(0, 99),
    lambda inner: st.tuples(st.sampled_from("+-*/"), inner, inner),
    max_leaves=7,
)


def value_of(tree: Tree) -> Fraction:
    """Compute the value of a tree: the plain reference, which raises ZeroDivisionError."""
    if isinstance(tree, int):
        return Fraction(tree)
    sign, left, right = tree
    operation = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}[sign]
    value: Fraction = operation(value_of(left), value_of(right))
    return value


def leaves(tree: Tree) -> list[int]:
    return [tree] if isinstance(tree, int) else [*leaves(tree[1]), *leaves(tree[2])]


def write_tree(tree: Tree, draw: random.Random) -> str:
    """Write a tree with the brackets that it needs and, at random, some that it doesn't need."""
    if isinstance(tree, int):
        return f"({tree})" if draw.random() < 0.1 else str(tree)
    sign, left, right = tree
    levels = {"+": 1, "-": 1, "*": 2, "/": 2}

    def side(inner: Tree, least: int) -> str:
        text = write_tree(inner, draw)
        needed = not isinstance(inner, int) and levels[inner[0]] < least
        return f"({text})" if needed or draw.random() < 0.1 else text

    space = " " * draw.randint(0, 1)
    # What stands right of a minus or a division needs brackets at its own level too.
    return f"{side(left, levels[sign])}{space}{sign}{space}{side(right, levels[sign] + 1)}"


@given(trees, st.randoms(use_true_random=False), st.sampled_from([0, 0, 1, -1]), st.booleans())
@settings(max_examples=150)
def test_a_printed_tree_is_right_exactly_if_its_value_is_the_target(
    tree: Tree, draw: random.Random, error: int, require_all: bool
) -> None:
    numbers, text = leaves(tree), write_tree(tree, draw)
    try:
        value = value_of(tree)
    except ZeroDivisionError:
        with pytest.raises(NotAnExpression, match="division by zero"):
            read_expression(text)
        return
    expression = read_expression(text)
    assert (expression.value, list(expression.numbers)) == (value, numbers)
    target = int(value) + error
    if abs(target) >= 10**MOST_DIGITS_OF_A_NUMBER:
        return
    draw.shuffle(numbers)
    expected = "right" if value == target else "wrong"
    assert verdict_on_expression(text, target, numbers, require_all=require_all) == expected
    # One number more may be left over only where not all are asked for; one less never does.
    assert verdict_on_expression(text, target, [*numbers, 100], require_all=require_all) == (
        "malformed" if require_all else expected
    )
    changed = [*numbers[1:], 100]
    assert verdict_on_expression(text, target, changed, require_all=require_all) == "malformed"


@given(st.text(alphabet="0123456789+-*/()=x.e \n", max_size=40))
@settings(max_examples=150)
def test_python_gives_the_same_value_to_every_expression_that_is_read(text: str) -> None:
    """Python gives every expression that the grader reads the same value."""
    try:
        expression = read_expression(text)
    except NotAnExpression:
        return
    text_for_python = " ".join(text.replace("x", "*").split())
    with_fractions = "".join(
        f"F({part})" if part.isdigit() else part for part in numbers_and_signs(text_for_python)
    )
    assert eval(with_fractions, {"F": lambda *digits: Fraction(*digits)}) == expression.value


def numbers_and_signs(text: str) -> list[str]:
    """Split a text into numbers and single characters; leading zeros, which Python refuses, are left out."""
    parts: list[str] = []
    for character in text:
        if character.isdigit() and parts and parts[-1].isdigit():
            parts[-1] += character
        else:
            parts.append(character)
    return [part.lstrip("0") or "0" if part.isdigit() else part for part in parts]


@given(st.text(max_size=60))
@settings(max_examples=100)
def test_any_text_gets_one_of_the_four_scores(text: str) -> None:
    assert {verdict_on_expression(text), verdict_on_response(text)} <= set(VERDICTS.values())


def test_no_hostile_answer_is_right() -> None:
    assert all(
        verdict_on_expression(response) in ("malformed", "no answer", "wrong")
        for response, _ in hostile_answers(5, 150)
    )
