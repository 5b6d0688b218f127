"""The default grader of MATH: right where math-verify and the VinePPO paper's code are known to be wrong."""

from __future__ import annotations

import json
import logging
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treetune.vocabulary import Grade, Problem
from treetune_domains.graders.math import MathGrader
from treetune_domains.graders.math_text import given_answer, gold_answer
from treetune_domains.graders.minerva import Minerva

CORPUS = [
    json.loads(line) for line in (Path(__file__).parent / "math_answers.jsonl").read_text().splitlines()
]

LABELLED = Path(__file__).parent / "labelled/math.jsonl"


def grade(answer: str, gold: str, question: str = "?", grader: MathGrader | Minerva | None = None) -> Grade:
    problem = Problem(id="test/0", prompt=question, gold=gold)
    return (grader or MathGrader()).grade(f"So it is $\\boxed{{{answer}}}$.", problem)


def boxed(answer: str, gold: str) -> bool:
    return grade(answer, gold).reward == 1.0


def test_every_answer_of_the_corpus_is_judged_as_it_should_be() -> None:
    wrong = [row for row in CORPUS if boxed(row["answer"], row["gold"]) is not row["right"]]
    assert not wrong


def test_the_corpus_is_judged_better_than_by_math_verify_alone() -> None:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    rows = [
        row
        for row in CORPUS
        if row["kind"] in ("full stop", "base", "matrix", "unit", "text", "percent", "mixed number")
    ]
    alone: Counter[bool] = Counter()
    ours: Counter[bool] = Counter()
    for row in rows:
        said = verify(parse(f"\\boxed{{{row['gold']}}}"), parse(f"\\boxed{{{row['answer']}}}"))
        alone[row["right"]] += said is not row["right"]
        ours[row["right"]] += boxed(row["answer"], row["gold"]) is not row["right"]
    assert ours[True] < alone[True], "rejects fewer right ones"
    assert ours[False] < alone[False], "accepts fewer wrong ones"


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("(1,2)", "[1,2]", False),  # the type of brackets
        ("[1,2)", "[1,2]", False),
        ("500", "5", False),  # a factor of a hundred
        ("0.05", "5", False),
        ("0.0002", "0.0001", False),  # absolute closeness of small numbers
        ("3.0005", "3", False),
        ("3.1416", r"\pi", False),
        ("1024", "2^{10}", True),  # refused because of "^{"
        (r"\text{information}", r"\infty", False),  # "inf" within a word
        (r"\text{information}", r"\text{information}", True),
        (r"50\%", r"\frac12", True),
        (
            "\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}",
            r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
            True,
        ),  # lines
        ("\\begin{pmatrix}\n1 \\\\\n3\n\\end{pmatrix}", "\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}", False),
        (r"7\cdot 1", "7", True),  # a product that lost its sign
        (r"7\cdot 1", "71", False),
    ],
)
def test_the_default_is_right_where_the_reference_is_not(answer: str, gold: str, right: bool) -> None:
    assert boxed(answer, gold) is right
    assert (
        grade(answer, gold, grader=Minerva()).reward == 1.0
    ) is not right or answer == r"\text{information}"


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"\text{4:30 p.m.}", r"4:30 \text{ p.m.}", True),  # the same words, split differently
        ("4:30 PM", r"\text{4:30 p.m.}", True),
        (r"4:30 \text{ a.m.}", r"\text{4:30 p.m.}", False),
        (r"\text{3 dollars}", "3", True),
        (r"\text{3 dollars}", r"\$3", True),
        (r"\text{3 cents}", r"\$3", False),
        (r"\text{145 degrees}", r"145^\circ", True),
        ("75^\\circ", "75\\%", False),
        ("twenty-five", "25", True),  # numbers in words
        (r"\text{three hundred and twelve}", "312", True),
        (r"\text{two thirds}", r"\frac{2}{3}", True),
        (r"\text{three dollars}", "3", True),
        (r"\text{two or more}", "2", False),
        (r"\text{one to one}", "1", False),
        (r"\text{third}", r"\frac13", False),
        (r"\sfrac{3}{8}", r"\frac{3}{8}", True),
        (r"\nicefrac{8}{3}", r"\frac{3}{8}", False),
        ("x = 2+3 = 5", "5", True),  # the end of a chain
        (r"\frac{10!}{5!} = 10\cdot 9\cdot 8\cdot 7\cdot 6 = 30{,}240", "30240", True),
        ("P(A) = \\frac13", r"\frac{1}{3}", True),
        ("x = 5 = 6", "5", False),
        ("2+2 = 5", "5", False),
        ("x+2 = 5", "5", False),
        (r"0.1666\ldots", r"\frac16", True),
        ("0.1666", r"\frac16", False),
        (r"\sin 60^\circ", r"\frac{\sqrt{3}}{2}", True),
        ("3-x", "|x-3|", False),  # equal where x is small
        (r"x > 1 \text{ and } x \le 2", "(1,2]", True),
        (r"x < -3 \text{ and } x > 4", r"(-\infty,-3)\cup(4,\infty)", False),
        ("12 000", "12000", True),
        ("1 2", "12", False),
        ("1  2", "12", False),
    ],
)
def test_what_says_the_same_is_right_and_what_only_looks_like_it_is_not(
    answer: str, gold: str, right: bool
) -> None:
    assert boxed(answer, gold) is right


@pytest.mark.parametrize(
    ("answer", "gold", "question", "right"),
    [
        (r"0.5\%", "0.5", "What is the ratio?", False),
        (r"\frac37\%", r"\frac{3}{7}", "What is the ratio?", False),
        (r"(50\%, 1)", "(50, 1)", "Which pair?", False),
        (r"50\%", "0.5", "What is the ratio?", True),
        (r"50\%", "50", "What is the ratio?", False),
        (r"50\%", "50", "What percent of them?", True),
        (r"50\%", "50", r"How many \% of them?", True),
        ("50", r"50\%", "What is the ratio?", True),
        (r"0.5\%", r"50\%", "What percent of them?", False),
    ],
)
def test_a_percent_sign_is_dropped_only_where_percent_are_asked_for(
    answer: str, gold: str, question: str, right: bool
) -> None:
    assert grade(answer, gold, question).correct is right


@given(st.integers(-999, 999), st.integers(0, 9), st.integers(-9, 9), st.sampled_from(["e", "E", "e+"]))
@settings(max_examples=50)
def test_a_number_may_have_its_power_of_ten_behind_an_e(
    whole: int, digit: int, power: int, sign: str
) -> None:
    written = f"{whole}.{digit}{'e' if power < 0 else sign}{power}"
    value = Fraction(f"{whole}.{digit}") * Fraction(10) ** power
    for gold in (f"{value.numerator}/{value.denominator}", rf"{whole}.{digit} \times 10^{{{power}}}"):
        assert boxed(written, gold)
        assert boxed(f"{whole}.{digit}e{power + 1}", gold) is (value == 0)


def test_an_equation_says_what_was_asked_for() -> None:
    assert grade("a+b = 7", "7", "What is $a + b$?").reward == 1.0
    assert grade("a+b = 7", "7", "What is $a$, if $a - b = 3$?").reward == 0.0


def test_at_most_one_wrong_answer_in_a_thousand_is_accepted_and_three_right_ones_in_a_hundred_rejected() -> (
    None
):
    rows = [json.loads(line) for line in LABELLED.read_text().splitlines()][::3]
    wrong: Counter[bool] = Counter()
    for row in rows:
        problem = Problem("test/0", row["data"].get("prompt", "?"), row["gold"])
        wrong[row["label"]] += MathGrader().grade(row["response"], problem).correct is not row["label"]
    assert wrong[False] <= 0.001 * sum(not row["label"] for row in rows)
    assert wrong[True] <= 0.03 * sum(row["label"] for row in rows)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed {5}", "5"),
        (r"\boxed 5", "5"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        (r"\boxed{1} and so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{5", None),
        (r"\boxed{5} is $\boxed{6", "5"),
        (r"\boxed{}", None),
        ("The answer is $5$.", "5"),
        ("The answer is: 3.5. We are done.", "3.5"),
        ("Final answer: x = 7\nbye", "x = 7"),
        ("It is 5", None),
        ("", None),
    ],
)
def test_the_answer_stands_in_the_last_box_or_behind_answer_is(response: str, answer: str | None) -> None:
    assert given_answer(response) == answer


def test_several_boxes_are_one_answer_where_the_gold_has_as_many_parts() -> None:
    problem = Problem(id="test/0", prompt="?", gold="1, 2")
    assert MathGrader().grade(r"$x=\boxed{1}$ or $x=\boxed{2}$", problem).reward == 1.0
    assert MathGrader().grade(r"$x=\boxed{1}$ or $x=\boxed{3}$", problem).reward == 0.0
    assert MathGrader().grade("First $\\boxed{1}$.\n\nThen $\\boxed{2}$", problem).reward == 0.0


def test_a_gold_may_be_a_worked_solution() -> None:
    assert (
        gold_answer(r"We have $\boxed{\frac{1}{2}}$, as asked. The answer is: \frac{1}{2}") == r"\frac{1}{2}"
    )
    assert gold_answer("So it goes.The answer is: (1,2)") == "(1,2)"
    assert gold_answer("  x+1 ") == "x+1"


def test_a_base_that_only_the_answer_names_must_be_the_problems() -> None:
    assert grade("66_7", "66", "Write it in base $7$.").reward == 1.0
    assert grade("66_8", "66", "Write it in base $7$.").reward == 0.0


@pytest.mark.parametrize(
    "answer",
    ["9^{9^{9^{9}}}", "2^{999999999}", "(x+1)^{1000000}", "1000000!", "((3!)!)!!", "7" * 1000 + "^2",
    "(" * 500 + "1" + ")" * 500,
     "x" * 5000, r"\int_0^1 \int_0^1 \sin(xy) dx dy"],
)  # fmt: skip
def test_what_would_take_for_ever_is_refused_at_once(answer: str) -> None:
    result = grade(answer, "5")
    assert (result.outcome, result.reward) == ("error", 0.0)
    assert result.message is not None
    assert "not computed" in result.message


def test_an_answer_that_reads_like_the_gold_is_right_however_huge() -> None:
    assert boxed("9^{9^{9^9}}", "9^{9^{9^{ 9}}}") is False
    assert boxed("9^{9^{9^9}}", "9^{9^{9^9}}")


@pytest.mark.parametrize(
    "code", ["__import__('os').system('touch /tmp/x')", "exit()", "[].__class__", "open('/etc/passwd')"]
)
def test_nothing_that_a_model_wrote_is_run(code: str) -> None:
    assert grade(code, "5").reward == 0.0
    assert grade(code, "5", grader=Minerva()).reward == 0.0


@settings(max_examples=60)
@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=500), st.fractions(max_denominator=50))
def test_a_fraction_equals_itself_in_every_dress_and_no_other(value: object, other: object) -> None:
    assert isinstance(value, Fraction) and isinstance(other, Fraction)
    sign = "-" if value < 0 else ""
    dressed = rf"{sign}\dfrac{{{2 * abs(value.numerator)}}}{{{2 * value.denominator}}}"
    assert boxed(dressed, f"{value.numerator}/{value.denominator}")
    whole, rest = divmod(abs(value.numerator), value.denominator)
    assert boxed(rf"{sign}{whole}\frac{{{rest}}}{{{value.denominator}}}", str(value))
    assert boxed(str(other), str(value)) is (other == value)


@settings(max_examples=100)
@given(st.text(alphabet="0123456789xyi\\{}()[]^_=,.;<>+-*/!%$& frac sqrt text pm cup", max_size=60))
def test_no_mix_of_signs_makes_the_graders_raise(answer: str) -> None:
    for grader in (MathGrader(), Minerva()):
        assert grade(answer, r"\frac{1}{2}", grader=grader).outcome in ("ok", "no_answer", "error")
