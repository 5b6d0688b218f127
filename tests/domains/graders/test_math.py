"""Promises of the two graders of MATH, the default and the preset with the verdicts of the VinePPO paper's
code:

* the default grades a corpus and labelled answers right, and is right where the reference is wrong;
* equal answers are right in every way to write them, and a difference of kind or of one digit decides;
* no answer makes a grader raise, run code or compute for long;
* the preset gives the verdicts of a plain reference that was written independently.
"""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.domains.graders import minerva_reference
from tests.support.cases import cases
from treetune.domains.graders import formulas
from treetune.domains.graders.formulas import same_value
from treetune.domains.graders.math import MathGrader
from treetune.domains.graders.math_answers import BracketGroup, read_answer
from treetune.domains.graders.math_endings import find_answer, find_gold
from treetune.domains.graders.math_kinds import TimeOfDay
from treetune.domains.graders.minerva import Minerva, extract_answers, lists_agree
from treetune.vocabulary import Grade, Problem

HERE = Path(__file__).parent
CASES, PRESET = HERE / "cases/math.txt", HERE / "cases/minerva.txt"
CORPUS = [json.loads(line) for line in (HERE / "math_answers.jsonl").read_text().splitlines()]


def boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def grade(answer: str, gold: str, question: str = "?", grader: MathGrader | Minerva | None = None) -> Grade:
    problem = Problem(id="test/0", prompt=question, gold=gold)
    return (grader or MathGrader()).grade(f"So it is ${boxed(answer)}$.", problem)


def is_right(answer: str, gold: str) -> bool:
    return grade(answer, gold).reward == 1.0


def test_every_answer_of_the_corpus_is_graded_right_which_math_verify_alone_does_not_achieve() -> None:
    from math_verify import parse, verify

    assert [row for row in CORPUS if is_right(row["answer"], row["gold"]) is not row["right"]] == []
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    kinds = ("full stop", "base", "matrix", "unit", "text", "percent", "mixed number")
    errors_of_math_verify: Counter[bool] = Counter()
    for row in CORPUS:
        if row["kind"] in kinds:
            verdict = verify(parse(boxed(row["gold"])), parse(boxed(row["answer"])))
            errors_of_math_verify[row["right"]] += verdict is not row["right"]
    # It rejects right answers and accepts wrong ones, so that the grader's other steps are needed.
    assert min(errors_of_math_verify[True], errors_of_math_verify[False]) > 0


def test_expressions_are_compared_at_points_where_all_unknowns_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points: list[tuple[Fraction, ...]] = []

    def note_point(point: dict[Any, Fraction], first: object, second: object) -> bool:
        points.append(tuple(point.values()))
        return True

    monkeypatch.setattr(formulas, "_agree_at", note_point)
    x, y, z = sympy.symbols("x y z")
    assert same_value(x + y, z)
    assert points[:2] == [
        (Fraction(3, 7), Fraction(5, 7), Fraction(7, 7)),
        (Fraction(-5, 12), Fraction(-3, 12), Fraction(-1, 12)),
    ]
    assert len(points) == 8 and all(len(set(point)) == 3 for point in points)


@pytest.mark.parametrize(
    ("first", "second", "are_same"),
    [
        ("x - y", "0", False),
        ("Abs(x)", "x", False),
        ("Abs(x - 3)", "3 - x", False),
        ("Abs(x - 3)", "x - 3", False),
        ("(x + y)**2", "x**2 + 2*x*y + y**2", True),
        ("(x**2 - y**2)/(x - y)", "x + y", True),
    ],
)
def test_expressions_are_the_same_if_they_agree_at_all_points(
    first: str, second: str, are_same: bool
) -> None:
    assert same_value(sympy.sympify(first), sympy.sympify(second)) == are_same


def test_at_most_one_wrong_answer_in_a_thousand_is_accepted_and_three_right_ones_in_a_hundred_rejected() -> (
    None
):
    rows = [json.loads(line) for line in (HERE / "labelled/math.jsonl").read_text().splitlines()][::3]
    errors: Counter[bool] = Counter()
    for row in rows:
        problem = Problem("test/0", row["data"].get("prompt", "?"), row["gold"])
        errors[row["label"]] += MathGrader().grade(row["response"], problem).correct is not row["label"]
    assert errors[False] <= 0.001 * sum(not row["label"] for row in rows)
    assert errors[True] <= 0.03 * sum(row["label"] for row in rows)


@pytest.mark.parametrize(("answer", "gold", "verdict"), cases(CASES, "where the reference is wrong"))
def test_the_default_is_right_where_the_reference_is_not(answer: str, gold: str, verdict: bool) -> None:
    assert is_right(answer, gold) is verdict
    reference = grade(answer, gold, grader=Minerva()).reward == 1.0
    assert reference is not verdict or answer == r"\text{information}"


@pytest.mark.parametrize(("answer", "gold", "verdict"), cases(CASES, "what says the same"))
def test_an_equal_answer_is_right_and_one_that_only_looks_equal_is_wrong(
    answer: str, gold: str, verdict: bool
) -> None:
    assert is_right(answer, gold) is verdict


@pytest.mark.parametrize(("answer", "gold", "question", "verdict"), cases(CASES, "what the question decides"))
def test_percent_bases_and_equations_are_read_as_the_question_asks(
    answer: str, gold: str, question: str, verdict: bool
) -> None:
    assert grade(answer, gold, question).correct is verdict


@given(st.integers(-999, 999), st.integers(0, 9), st.integers(-9, 9), st.sampled_from(["e", "E", "e+"]))
@settings(max_examples=50)
def test_a_number_may_have_its_power_of_ten_behind_an_e(
    integer: int, digit: int, power: int, sign: str
) -> None:
    answer = f"{integer}.{digit}{'e' if power < 0 else sign}{power}"
    value = Fraction(f"{integer}.{digit}") * Fraction(10) ** power
    for gold in (f"{value.numerator}/{value.denominator}", rf"{integer}.{digit} \times 10^{{{power}}}"):
        assert is_right(answer, gold)
        assert is_right(f"{integer}.{digit}e{power + 1}", gold) is (value == 0)


@settings(max_examples=60)
@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=500), st.fractions(max_denominator=50))
def test_a_fraction_equals_itself_in_every_writing_and_no_other_fraction(
    value: Fraction, other_value: Fraction
) -> None:
    sign = "-" if value < 0 else ""
    not_reduced = rf"{sign}\dfrac{{{2 * abs(value.numerator)}}}{{{2 * value.denominator}}}"
    assert is_right(not_reduced, f"{value.numerator}/{value.denominator}")
    integer, remainder = divmod(abs(value.numerator), value.denominator)
    assert is_right(rf"{sign}{integer}\frac{{{remainder}}}{{{value.denominator}}}", str(value))
    assert is_right(str(other_value), str(value)) is (other_value == value)


@pytest.mark.parametrize(("response", "answer"), cases(CASES, "boxes"))
def test_the_answer_stands_in_the_last_box_or_behind_answer_is(response: str, answer: str | None) -> None:
    assert find_answer(response) == answer


def test_several_boxes_are_one_answer_where_the_gold_has_as_many_parts() -> None:
    problem = Problem(id="test/0", prompt="?", gold="1, 2")
    for response, reward in (
        (r"$x=\boxed{1}$ or $x=\boxed{2}$", 1.0),
        (r"$x=\boxed{1}$ or $x=\boxed{3}$", 0.0),
        ("First $\\boxed{1}$.\n\nThen $\\boxed{2}$", 0.0),
    ):
        assert MathGrader().grade(response, problem).reward == reward


def test_a_gold_may_be_a_worked_solution() -> None:
    solution = r"We have $\boxed{\frac{1}{2}}$, as asked. The answer is: \frac{1}{2}"
    golds = {solution: r"\frac{1}{2}", "So it goes.The answer is: (1,2)": "(1,2)", "  x+1 ": "x+1"}
    assert {gold: find_gold(gold) for gold in golds} == golds
    problem = Problem(id="test/0", prompt="?", gold="7", data={"solution": r"It is $\boxed{8}$."})
    assert Minerva().grade(boxed("8"), problem).reward == 1.0
    assert Minerva().grade(boxed("7"), Problem(id="test/1", prompt="?", gold="7")).reward == 1.0
    assert Minerva().grade("none", Problem(id="test/1", prompt="?", gold="7")).outcome == "no_answer"


@pytest.mark.parametrize(
    "answer",
    ["9^{9^{9^{9}}}", "2^{999999999}", "(x+1)^{1000000}", "1000000!", "((3!)!)!!", "7" * 1000 + "^2",
     "(" * 500 + "1" + ")" * 500, "x" * 5000, r"\int_0^1 \int_0^1 \sin(xy) dx dy"],
)  # fmt: skip
def test_an_answer_that_would_take_for_ever_is_refused_at_once(answer: str) -> None:
    result = grade(answer, "5")
    assert (result.outcome, result.reward) == ("error", 0.0)
    assert "not computed" in (result.message or "")


@pytest.mark.parametrize(
    "answer",
    [r"((3n)^{1500})^{1500}", r"(x^{900}+2)^{900}", r"\ln(\ln(\ln(\ln(\ln(7)))))", r"\cosh(\cosh(\cosh(12)))",
     r"\tanh(\exp(5000))"],
)  # fmt: skip
def test_an_answer_that_grows_with_each_nested_operation_is_refused(answer: str) -> None:
    assert grade(answer, "x+1").outcome == "error"


@pytest.mark.parametrize(
    ("answer", "gold", "verdict"),
    [
        (r"(3n)!^{80}", "3^{1500}", False),
        (r"\binom{311}{s57}", r"\binom{312}{57}", False),
        (r"\frac{(2n)!}{n! \cdot n!}", r"\binom{2n}{n}", True),
        (r"(n+1) \cdot n!", "(n+1)!", True),
        (r"\sqrt{10^{90}+1}", r"10^{45}", False),
        (r"((x+1)^{40}+1)^{2}", r"(x+1)^{80}+2(x+1)^{40}+1", True),
        (r"((x+1)^{40}+1)^{2}", r"(x+1)^{80}+2(x+1)^{40}+2", False),
        (r"\frac{x^2-4}{x-2}", "x+2", True),
        (r"x^{-3}+x^0", r"\frac{1+x^3}{x^3}", True),
        (r"|x|", "x", False),
    ],
)
def test_expressions_are_compared_exactly_and_by_the_digits_that_they_need(
    answer: str, gold: str, verdict: bool
) -> None:
    result = grade(answer, gold)
    assert result.outcome == "ok"
    assert result.correct is verdict


def test_a_gold_that_is_read_once_grades_every_answer() -> None:
    gold = r"So there are $\boxed{\dfrac{7}{8}}$ of them."
    assert [is_right(answer, gold) for answer in ("7/8", "0.875", "8/7", r"\tfrac78", "7")] == [
        True, True, False, True, False,
    ]  # fmt: skip
    assert [is_right(answer, '["3", "4"]') for answer in ("3, 4", "[4, 3]", "3")] == [True, True, False]


def test_an_answer_that_reads_like_the_gold_is_right_however_huge() -> None:
    assert is_right("9^{9^{9^9}}", "9^{9^{9^{ 9}}}") is False
    assert is_right("9^{9^{9^9}}", "9^{9^{9^9}}")


@pytest.mark.parametrize("grader", [MathGrader(), Minerva()], ids=["default", "preset"])
@settings(max_examples=100)
@given(answer=st.text(alphabet="0123456789xyi\\{}()[]^_=,.;<>+-*/!%$& frac sqrt text pm cup", max_size=60))
def test_no_mixture_of_characters_makes_a_grader_raise(grader: MathGrader | Minerva, answer: str) -> None:
    assert grade(answer, r"\frac{1}{2}", grader=grader).outcome in ("ok", "no_answer", "error")


@pytest.mark.parametrize("answer", [r"\{a \middle b\}", r"\{a \vertical b\}", r"\{a \colonequals 3\}"])
def test_commands_that_begin_like_the_sign_of_a_condition_are_no_such_sign(answer: str) -> None:
    assert isinstance(read_answer(answer), BracketGroup)
    assert grade(answer, "5").reward == 0.0


@pytest.mark.parametrize(
    "sign", [r"\mid", "|", r"\vert", ":", r"\colon", r"\middle|", r"\middle\vert", r"\,\middle\vert\,"]
)
def test_the_condition_of_a_set_may_come_after_any_sign_for_such_that(sign: str) -> None:
    for answer in (rf"\{{x {sign} x>3\}}", rf"\left\{{x \in \mathbb{{R}} {sign} x>3\right\}}"):
        assert grade(answer, r"(3, \infty)").reward == 1.0
        assert grade(answer, r"[3, \infty)").reward == 0.0


def test_bars_of_absolute_values_in_a_set_are_no_signs_for_such_that() -> None:
    for answer in (r"\{|x|, 3\}", r"\{\vert x \vert, 3\}", r"\{3, |x|\}", r"\{3, \vert x \vert\}"):
        assert grade(answer, r"\{3, \lvert x \rvert\}").reward == 1.0
        assert grade(answer, r"\{3, x\}").reward == 0.0


def test_nothing_that_a_model_wrote_is_run() -> None:
    for code in ("__import__('os').system('touch /tmp/x')", "exit()", "[].__class__", "open('/etc/passwd')"):
        assert [grade(code, "5", grader=grader).reward for grader in (MathGrader(), Minerva())] == [0.0, 0.0]


# The preset


@pytest.mark.parametrize(("text", "answers"), cases(PRESET, "extraction"))
def test_extraction_is_the_references(text: str, answers: list[str]) -> None:
    assert extract_answers(text, "?") == answers


def test_commas_separate_answers_where_the_problem_says_so() -> None:
    question = "Enter your answers, separated by commas."
    assert extract_answers(boxed("1, 2"), question) == ["1", "2"]
    assert extract_answers(boxed("(1, 2)"), question) == ["(1,2)"]
    assert extract_answers(boxed("1, 2"), "?") == ["1,2"]


@pytest.mark.parametrize(("answer", "gold", "verdict"), cases(PRESET, "equality"))
def test_equality_is_the_references(answer: str, gold: str, verdict: bool) -> None:
    assert lists_agree(extract_answers(boxed(answer), "?"), extract_answers(boxed(gold), "?")) is verdict


@pytest.mark.parametrize(
    ("answers", "gold", "verdict"),
    [("122", "2", True), ("", "2", False), ("12", "21", True), ("1", "12", False)],
)
def test_of_several_answers_the_last_ones_count_in_any_order(answers: str, gold: str, verdict: bool) -> None:
    assert lists_agree(list(answers), list(gold)) is verdict


def random_pair(draw: random.Random) -> tuple[str, str]:
    """Draw two answers of one kind, which are often equal, and otherwise nearly equal."""
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
    rng = random.Random(11)
    differing = []
    equal = 0
    for _ in range(500):
        answer, gold = (extract_answers(boxed(text), "?") for text in random_pair(rng))
        expected = minerva_reference.equal_lists(answer, gold)
        equal += expected
        if lists_agree(answer, gold) is not expected:
            differing.append((answer, gold, expected))
    assert 100 < equal < 400, "both verdicts must occur often, or the test says nothing"
    assert len(differing) <= 5, differing


# Kinds of answers


def test_answers_of_forty_kinds_are_graded_as_their_templates_say() -> None:
    from benchmarks.grading_battery import battery

    wrong = []
    rows = list(battery(seed=7))
    assert len(rows) > 1000
    for row in rows:
        grade_of_row = MathGrader().grade(row.response, Problem("test/0", row.prompt, row.gold))
        if grade_of_row.correct is not row.is_right:
            wrong.append(row)
    assert len(wrong) <= 0.01 * len(rows), wrong


@pytest.mark.parametrize(
    ("answer", "gold", "verdict"),
    [
        (r"4^{5000000}", r"2^{10^7}", True),
        (r"4^{5000001}", r"2^{10^7}", False),
        (r"\frac{4000!}{3999!}", r"4000 \cdot 2^{10^6} / 2^{10^6}", True),
        (r"\sqrt{10^{80}+1}", r"10^{40}", False),
        (r"\text{12 pears}", r"12 \text{ apples}", False),
        (r"14:30", r"2:30 \text{ p.m.}", True),
        (r"(7,6)", r"\begin{cases} a=6 \\ b=7 \end{cases}", False),
        (r"x \ne 1, x \ne 2", r"\mathbb{R} \setminus \{1, 2\}", True),
        (r"3 \text{ if } n > 2", "3", False),
        (r"\frac{1}{0}", r"\frac{2}{0}", False),
    ],
)
def test_a_difference_of_kind_or_of_one_digit_decides(answer: str, gold: str, verdict: bool) -> None:
    assert is_right(answer, gold) is verdict


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("24:00", "12:00 am", True),
        ("24:00", "midnight", True),
        ("24:00", "0:00", True),
        ("24:00", "12:00 pm", False),
        ("12:00", "24:00", False),
    ],
)
def test_the_hour_24_is_midnight(answer: str, gold: str, equal: bool) -> None:
    answer_time, gold_time = TimeOfDay.read(answer), TimeOfDay.read(gold)
    assert answer_time is not None and gold_time is not None
    assert answer_time.equals(gold_time) is equal


@pytest.mark.parametrize("text", ["24:30", "24:00:01", "25:00"])
def test_there_is_no_time_after_24_00(text: str) -> None:
    assert TimeOfDay.read(text) is None


def test_an_empty_gold_is_an_error() -> None:
    assert grade(r"\,", "").outcome == "error"


def test_a_solution_that_gives_one_value_in_two_forms_has_one_answer() -> None:
    gold = r"So $d = \boxed{12\frac{3}{4}},$ or $\boxed{\frac{51}{4}}$ litres."
    assert grade(r"\frac{51}{4}", gold).reward == 1.0
    assert grade("12.75", gold).reward == 1.0
    assert grade("12", gold).reward == 0.0
    two_values = r"The roots are \(\boxed{4}\) or \(\boxed{-9}\)."
    assert grade("4", two_values).reward == 0.0
