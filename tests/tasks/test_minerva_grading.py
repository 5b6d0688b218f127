"""The preset with the verdicts of the VinePPO paper's code: the values that it was seen to give."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.tasks import minerva_reference
from treetune.vocabulary import Problem
from treetune_domains.graders.minerva import Minerva, extract, lists_agree


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
        ("x^2+y^2", "y^2+x^2", True),
        ("(x+1)^2", "x^2+2x+1", True),
        ("2^3^2", "512", False),  # only a chain of powers is too hard
        (r"\fbox{5}", "5", True),
        (r"\textbf{5}", "5", True),
        (r"90\degree", "90", True),
        (r"4\frac23", r"\frac{14}{3}", True),
        (r"4\frac23", r"\frac83", False),
        ("[4]", "4", False),
        ("[4]", "[4]", True),
        ("|4|", "4", False),
        (r"\{144\}", "144", False),
        (r"14\div3", r"\frac{14}{3}", False),
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


def answers(draw: random.Random) -> tuple[str, str]:
    """Two answers of one kind, which often say the same: near misses are as likely as rewrites."""
    a, b, c = (draw.randint(1, 12) for _ in range(3))
    d = draw.choice((0, 0, 1))
    x, y = draw.sample("xyab", 2)
    kinds: list[Callable[[], tuple[str, str]]] = [
        lambda: (f"{a}", f"{a + d}"),
        lambda: (f"{a}", f"{(a + d) * 100}"),
        lambda: (f"{a / 10}", f"{a * 10 + d}"),
        lambda: (f"{a},{b}00", f"{a}{b + d}00"),
        lambda: (f"\\frac{{{a}}}{{{b}}}", f"\\frac{{{a * c}}}{{{b * c + d}}}"),
        lambda: (f"{a}/{b}", f"\\dfrac{{{a + d}}}{{{b}}}"),
        lambda: (f"{a}\\frac{{{b}}}{{{c}}}", f"\\frac{{{a * c + b + d}}}{{{c}}}"),
        lambda: (f"{a}\\frac{b % 9 + 1}{c % 9 + 1}", f"\\frac{{{a * (b % 9 + 1)}}}{{{c % 9 + 1}}}"),
        lambda: (f"{a}\\sqrt{{{b}}}", f"\\sqrt{{{a * a * b + d}}}"),
        lambda: (f"\\frac{{1}}{{\\sqrt{{{b}}}}}", f"\\frac{{\\sqrt{{{b + d}}}}}{{{b}}}"),
        lambda: (f"{a}^{b % 5}+{c}^2", f"{a ** (b % 5) + c * c + d}"),
        lambda: (f"{x}^2+{y}^2", f"{y}^2+{x}^2+{d}"),
        lambda: (f"({x}+{a})^2", f"{x}^2+{2 * a}{x}+{a * a + d}"),
        lambda: (f"{x}^{{{a}}}", f"{x}^{{{a}}}+{d}"),
        lambda: (f"2^{a}^2", f"2^{a * 2}"),
        lambda: (f"{a}\\pi", f"\\pi({a + d})"),
        lambda: ("\\pi", draw.choice(("3.1416", "3.14", "\\frac{22}{7}"))),
        lambda: (draw.choice(("\\fbox{%d}", "\\textbf{%d}", "%d\\degree", "%d^\\circ")) % a, f"{a + d}"),
        lambda: (draw.choice(("[%d]", "\\{%d\\}", "(%d)", "|%d|")) % a, f"{a}"),
        lambda: (f"{a}\\div{b}", f"\\frac{{{a}}}{{{b}}}"),
        lambda: (f"{a}\\times{b}", f"{a * b + d}"),
        lambda: (f"({a},{b})", draw.choice(("[%d,%d]", "(%d,%d]", "(%d,%d)")) % (a, b + d)),
        lambda: (f"({a},{b})", f"({a},{b},{c})"),
        lambda: (f"({a},{b})\\cup({b},{c})", f"({b},{c})\\cup({a},{b + d})"),
        lambda: (f"x={a}", f"{a + d}"),
        lambda: (f"y={a}x+{b}", f"{a}x-y+{b + d}=0"),
        lambda: (f"{a}\\%", draw.choice((f"{a / 100}", f"{a}", f"\\frac{{{a}}}{{100}}"))),
        lambda: (f"{a}\\text{{ cm}}", f"{a + d}"),
        lambda: (f"\\text{{{draw.choice('ABC')}}}", f"\\text{{({draw.choice('ABC')})}}"),
        lambda: (f"{x}{y}+{a}", f"{a}+{y}{x}"),
        lambda: (f"{a}x+{b}y+{c}z", f"{c}z+{b}y+{a}x"),
        lambda: (f"{a}.000", f"{a}.000{d * 9}"),
    ]
    pair = draw.choice(kinds)()
    return pair if draw.random() < 0.5 else pair[::-1]


def test_at_least_99_of_100_verdicts_are_those_of_a_plain_reference() -> None:
    draw = random.Random(11)
    differing = []
    equal = 0
    for _ in range(500):
        given, gold = (extract(box(answer), "?") for answer in answers(draw))
        expected = minerva_reference.equal_lists(given, gold)
        equal += expected
        if lists_agree(given, gold) is not expected:
            differing.append((given, gold, expected))
    assert 100 < equal < 400, "a test of one verdict says nothing"
    assert len(differing) <= 5, differing
