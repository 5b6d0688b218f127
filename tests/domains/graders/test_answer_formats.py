"""Promises of graders and votes about the ways in which models write answers:

* numbers in words, powers, units and signs are read, and choices by their letter;
* a hedge or a list of options is no answer;
* sentences of other scripts are steps, and notation changes no words;
* equal answers in different writing are one vote.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

import treetune.parts  # noqa: F401
from treetune.data.rules.alike import word_list
from treetune.domains.graders.multiple_choice import MultipleChoice
from treetune.domains.graders.puzzles import GridGrader
from treetune.domains.graders.table import TableGrader
from treetune.domains.graders.tagged import F1, ExactMatch
from treetune.domains.math_tasks import Sentences
from treetune.runtime.evaluation import majority_is_right
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.numeric import Numeric
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Problem, Trajectory, token_array


def reward(grader: Any, response: str, gold: str) -> float:
    return grader.grade(response, Problem("p", "?", gold)).reward


@pytest.mark.parametrize(
    ("response", "gold", "right"),
    [
        ("They pay $7{,}250.", "7250", True),
        ("The floor has 48 m^2", "48", True),
        ("It is 31 cm².", "31", True),
        ("It is −8.", "-8", True),
        ("It is −8.", "8", False),
        ("So 4.1 \\times 10^{-2}", "0.041", True),
        ("That is 1.5e3", "1500", True),
        ("It is 25 %", "0.25", True),
        ("The answer is thirty-four.", "34", True),
        ("It is not 48.", "48", False),
        ("It isn't 5, it's 48.", "48", True),
        ("between 10-5", "5", True),
    ],
)
def test_the_last_number_is_read_with_units_signs_powers_and_words(
    response: str, gold: str, right: bool
) -> None:
    assert reward(Numeric(without_marker="last_number"), response, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("seventeen apples", "17", True),
        ("three hundred and six", "306", True),
        ("two thousand one hundred", "2100", True),
        ("minus nine", "-9", True),
        ("17", "seventeen", True),
        ("seventeen or eighteen", "17", False),
        ("not seventeen", "17", False),
        ("two three", "5", False),
        ("7.5 × 10³", "7500", True),
        ("3 + 10^2", "100", False),
    ],
)
def test_numbers_in_words_and_powers_of_ten_are_numbers(answer: str, gold: str, right: bool) -> None:
    assert reward(Numeric(), f"#### {answer}", gold) == right


@pytest.mark.parametrize(
    ("response", "chosen"),
    [
        ("C", "C"),
        ("c", "C"),
        ("**C**", "C"),
        ("[C]", "C"),
        ("Option C", "C"),
        ("（Ｃ）", "C"),
        ("答案：C", "C"),
        ("故选C。", "C"),
        ("<answer>C</answer>", "C"),
        ("Let me see.\n\nC", "C"),
        ("The answer is (C), since option A is too heavy.", "C"),
        ("The answer is C because B floats.", "C"),
        ("Answer: C\nas in \\boxed{B - A}", "C"),
        ("Answer: C\nas in \\boxed{17}", "C"),
        ("A\nB\nC\nD", None),
        ("C and D", None),
        ("<answer>C or D</answer>", None),
        ("Answer: C\n\\boxed{A, B}", None),
        ("A cat sleeps.", None),
        ("not C", None),
    ],
)
def test_a_choice_is_read_by_its_letter(response: str, chosen: str | None) -> None:
    assert MultipleChoice().extract(response, Problem("p", "?", "C")) == chosen


def test_a_gold_of_articles_or_signs_does_not_match_an_empty_answer() -> None:
    assert reward(ExactMatch(), "<answer>an</answer>", '["A"]') == 0
    assert reward(ExactMatch(), "<answer>a</answer>", '["A"]') == 1
    assert reward(ExactMatch(), "<answer>-</answer>", "+") == 0
    assert reward(F1(), "<answer>the</answer>", '["", "A"]') == 0


@pytest.mark.parametrize(
    "sentences",
    [
        ["我们先把两个数字相加得到九。", "然后把它除以三。", "所以答案是三。"],
        ["三と六を足します。", "次に三で割ります。", "答えは三です。"],
        ["Сложим числа три и шесть.", " Потом разделим сумму на три.", " Ответ равен трём."],
        ["Πόσο κάνει τρία και έξι;", " Κάνει εννέα.", " Άρα η απάντηση είναι τρία."],
        ["ما هو مجموع ثلاثة وستة؟", " المجموع تسعة.", " إذن الجواب ثلاثة."],
        ["तीन और छह का योग नौ है।", " इसे तीन से भाग दें।", " उत्तर तीन है।"],
        ["圆周率是３．１４左右。", "所以面积约为十二点五六．", "结束了。"],
    ],
)
def test_sentences_of_other_scripts_are_steps(sentences: list[str]) -> None:
    text = "".join(sentences)
    offsets = Sentences().boundaries(text)
    assert [text[start:end] for start, end in pairwise(offsets)] == sentences


@pytest.mark.parametrize(
    ("text", "other_notation"),
    [
        ("12,500 pens", "12500 pens"),
        ("12{,}500", "１２５００"),
        ("$3 \\times 4 \\cdot 5$", "3×4*5"),
        ("\\dfrac{3}{4} \\le x^{2}", "3/4 ≤ x²"),
        ("**Find** 7 − 2", "Find 7-2"),
        ("\\left(\\sqrt{2}\\right)", "(√2)"),
    ],
)
def test_the_same_formula_in_another_notation_has_the_same_words(text: str, other_notation: str) -> None:
    assert word_list(text) == word_list(other_notation)


def grade_answers(pool: GraderPool, problem: Problem, answers: list[str]) -> list[Trajectory]:
    return [
        Trajectory(
            problem=problem,
            sample=sample,
            prompt_ids=token_array(()),
            segments=(),
            finish_reason="stop",
            text="",
            grade=pool.submit(f"\\boxed{{{answer}}}", problem).result(),
            step_ends=(),
        )
        for sample, answer in enumerate(answers)
    ]


@pytest.mark.parametrize(
    ("gold", "answers", "right"),
    [
        ("0.25", ["\\frac14", "0.25", "1/4", "3", "3"], True),
        ("3", ["\\frac14", "0.25", "1/4", "3", "3"], False),
        ("3", ["\\frac14", "0.25", "3", "3", "3"], True),
        ("3", ["5", "6", "3", "3"], True),
    ],
)
def test_equal_answers_have_one_vote_together(gold: str, answers: list[str], right: bool) -> None:
    from treetune.domains.graders.math import MathGrader

    problem = Problem("p", "?", gold)
    with GraderPool(MathGrader(), workers=1) as pool:
        assert majority_is_right(grade_answers(pool, problem, answers), pool.same_answer) is right


VOTES = [
    # The grader, gold and data of the problem, two spellings of one wrong answer, another wrong answer
    ("table", {"gold": "12.5 %"}, ("\\boxed{1,250}", "\\boxed{1250}"), "\\boxed{1251}"),
    (
        "table",
        {"gold": "Norway | Oslo"},
        ("\\boxed{Rome | Italy}", "\\boxed{italy|ROME}"),
        "\\boxed{Rome | Bonn}",
    ),
    ("minerva", {"gold": "7"}, ("\\boxed{\\frac{1}{4}}", "\\boxed{0.25}"), "\\boxed{3}"),
    ("minerva", {"gold": "7"}, ("\\boxed{(1, 2)}", "\\boxed{(1,2)}"), "\\boxed{(2,1)}"),
    ("gsm8k_exact", {"gold": "#### 7"}, ("#### 1,080", "#### 1080"), "#### 1080.0"),
    (
        "f1",
        {"gold": "a red house"},
        ("<answer>The sea.</answer>", "<answer>sea</answer>"),
        "<answer>lake</answer>",
    ),
    (
        "grid",
        {"gold": "12/34"},
        ("<answer>[[1, 1], [1, 1]]</answer>", "<answer>11/11</answer>"),
        "<answer>11/12</answer>",
    ),
    (
        "ordering",
        {"gold": '["a", "b", "c"]'},
        ("<answer>cab</answer>", "<answer>C, A, B</answer>"),
        "<answer>bca</answer>",
    ),
    (
        "zebra",
        {"gold": '{"header": ["House", "Pet"], "rows": [["1", "cat"], ["2", "dog"]]}'},
        (
            '<answer>[["1", "dog"], ["2", "cat"]]</answer>',
            '<answer>[{"Pet": "Cat", "House": "2"}, {"Pet": "Dog", "House": "1"}]</answer>',
        ),
        '<answer>[["1", "dog"], ["2", "dog"]]</answer>',
    ),
    (
        "countdown",
        {"gold": "39 from 12 34 7"},
        ("<answer>12 + 34 + 7</answer>", "<answer>(7+34)+12</answer>"),
        "<answer>12*34*7</answer>",
    ),
    (
        "codeio",
        {"gold": '{"output": [1, 2]}'},
        ('```json\n{"output": [1, 3]}\n```', "```\n[1, 3.0]\n```"),
        "```\n[3, 1]\n```",
    ),
    (
        "cruxeval",
        {"gold": '{"code": "def f(x): return x", "input": "1"}'},
        ("<answer>{'a': 1, 'b': 2}</answer>", '<answer>{"b": 2, "a": 1}</answer>'),
        "<answer>{'a': 1}</answer>",
    ),
    (
        "livebench",
        {"gold": "yes, no, yes", "data": {"task": "web_of_lies_v2"}},
        ("**no, no, no**", "<solution>No, No, No</solution>"),
        "**no, no, yes**",
    ),
]


@pytest.mark.parametrize(("name", "question", "equal_responses", "different"), VOTES)
def test_each_grader_that_can_compare_answers_counts_equal_ones_as_one_vote(
    name: str, question: dict[str, Any], equal_responses: tuple[str, str], different: str
) -> None:
    problem = Problem("p", "?", question["gold"], data=question.get("data", {}))
    grader = Grader.parts_by_name()[name]()
    with GraderPool(grader, workers=1) as pool:
        answers = [grader.grade(response, problem).extracted for response in (*equal_responses, different)]
        answer, equal_answer, different_answer = (str(answer) for answer in answers)
        assert None not in answers
        assert pool.same_answer(answer, answer, problem)
        assert pool.same_answer(answer, equal_answer, problem)
        assert pool.same_answer(equal_answer, answer, problem)
        assert not pool.same_answer(answer, different_answer, problem)
        assert not pool.same_answer(different_answer, equal_answer, problem)


def test_an_answer_that_cannot_be_read_leaves_the_others_comparable() -> None:
    problem = Problem("p", "?", "12/34")
    with GraderPool(GridGrader(), workers=1) as pool:
        assert pool.same_answer("no grid", "11/11", problem) is False
        assert pool.same_answer("11/11", "no grid", problem) is False
        assert pool.same_answer("11/11", "[[1, 1], [1, 1]]", problem) is True


def test_answers_of_tables_are_compared_as_texts_and_not_as_json() -> None:
    grader, problem = TableGrader(), Problem("p", "?", "7")
    assert grader.same_answer("[5]", "[5]", problem)
    assert not grader.same_answer("[" * 3000, "[" * 3000 + "1", problem)
    assert not grader.same_answer("1|" * 3000, "1 |" * 3000, problem), "nobody compares so many"


def test_programs_are_not_compared() -> None:
    with GraderPool(Grader.parts_by_name()["code"](), workers=1) as pool:
        assert pool.same_answer("x = 1", "x=1", Problem("p", "?", "{}")) is None
