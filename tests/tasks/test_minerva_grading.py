"""The preset with the verdicts of the VinePPO paper's code: the values that it was seen to give."""

from __future__ import annotations

import pytest

from treetune.tasks.graders.minerva import Minerva, lists_agree
from treetune.tasks.graders.minerva_text import extract
from treetune.vocabulary import Problem


def box(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (r"\boxed{5}.", ["5"]),
        (r"\boxed{1} or \boxed{2}", ["1", "2"]),
        (box(r"\frac12"), [r"\frac{1}{2}"]),
        (box("3/4"), [r"\frac{3}{4}"]),
        (box(r"50\%"), ["50%"]),
        (r"\boxed{50}%", ["50%"]),
        (box(r"12\text{ cm}"), ["12"]),
        (box("x=5"), ["x=5"]),
        (box(r"\text{Evelyn}"), ["Evelyn"]),
        (box(r"\$18.90"), ["18.90"]),
        (box(r"10,\!000"), ["10,000"]),
        (box("2.0"), ["2"]),
        (box(r"3\sqrt2"), [r"3\sqrt{2}"]),
        (box(r"90^\circ"), ["90"]),
        (box(r"x \in [-2,7]"), [r"x\in[-2,7]"]),
        (box("2+3j"), ["2+3i"]),
        (box(r"1 \text{ and } 2"), ["1", "2"]),
        (box(".5"), ["0.5"]),
        (box("3 t"), ["3"]),
        ("it is boxed", []),
        (r"\boxed{5", []),
        (r"\boxed 5", []),
        (r"\boxed {5}", []),
        (box(r"\text{information}"), [r"\inftyormation"]),
        ("first 1,234 and 7", ["7"]),
        ("Final Answer: The final answer is $7$. I hope it is correct.", ["7"]),
        ("The answer is 1.\nThe answer is: 8.", ["8"]),
        ("```output\n9\n```", ["9"]),
        (box("\\begin{pmatrix}\n1\n\\end{pmatrix}"), [r"\begin{pmatrix}"]),
        (box(r"7\cdot 1"), ["71"]),
        ("nothing", []),
    ],
)
def test_extraction_is_the_references(text: str, answers: list[str]) -> None:
    assert extract(text, "?") == answers


def test_commas_part_answers_where_the_problem_says_so() -> None:
    asked = "Enter your answers, separated by commas."
    assert extract(box("1, 2"), asked) == ["1", "2"]
    assert extract(box("(1, 2)"), asked) == ["(1,2)"]
    assert extract(box("1, 2"), "?") == ["1,2"]


@pytest.mark.parametrize(
    ("given", "gold", "same"),
    [
        ("5", "500", True),
        ("0.5", "50", True),
        ("0.0001", "0.0002", True),
        ("(1,2)", "[1,2]", True),
        ("3", "3.0005", True),
        (r"\pi", "3.1416", True),
        ("2/4", "1/2", True),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        ("10000", "10,000", True),
        ("B", r"\text{(B)}", True),
        ("50%", "0.5", True),
        (r"50\%", r"\frac12", False),
        ("2^{10}", "1024", False),
        (r"(1,2)\cup(3,4)", r"(3,4)\cup(1,2)", True),
        ("y=2x+1", "2x-y+1=0", True),
        ("1000000", "1000001", False),
        ("x=5", "5", True),
        ("6", "5", False),
    ],
)
def test_equality_is_the_references(given: str, gold: str, same: bool) -> None:
    assert lists_agree(extract(box(given), "?"), extract(box(gold), "?")) is same


@pytest.mark.parametrize(
    ("given", "gold", "same"),
    [
        (["1", "2", "2"], ["2"], True),
        ([], ["2"], False),
        (["1", "2"], ["2", "1"], True),
        (["1"], ["1", "2"], False),
    ],
)
def test_of_several_answers_the_last_ones_count_in_any_order(
    given: list[str], gold: list[str], same: bool
) -> None:
    assert lists_agree(given, gold) is same


def test_the_gold_is_taken_out_of_the_worked_solution() -> None:
    problem = Problem(id="test/0", prompt="?", gold="7", data={"solution": r"It is $\boxed{8}$."})
    assert Minerva().grade(box("8"), problem).reward == 1.0
    assert Minerva().grade(box("7"), Problem(id="test/1", prompt="?", gold="7")).reward == 1.0
    assert Minerva().grade("none", Problem(id="test/1", prompt="?", gold="7")).outcome == "no_answer"
