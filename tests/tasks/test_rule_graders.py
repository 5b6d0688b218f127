"""Graders of logic, simulation, tables, choices and facts: labelled cases and faults of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tasks.rule_grading import GRADERS, ZEBRA, answer, grade, reward
from treetune.tasks.graders.conformance import hostile_answers
from treetune.vocabulary import Grade, Problem
from treetune_domains.graders.codeio import CodeIO
from treetune_domains.graders.instruction_following import InstructionFollowing
from treetune_domains.graders.livebench import LiveBench
from treetune_domains.graders.multiple_choice import MultipleChoice
from treetune_domains.graders.puzzles import GridGrader, OrderingGrader, ZebraGrader
from treetune_domains.graders.table import TableGrader
from treetune_domains.graders.tagged import OneWord

LABELLED = Path(__file__).parent / "labelled"

OF_ROWS = {"instruction_following": InstructionFollowing(), "livebench": LiveBench()}
"""Graders that need fields of the row."""


@pytest.mark.parametrize("name", [*GRADERS, *OF_ROWS])
def test_labelled_cases_are_told_apart(name: str) -> None:
    """But those that say how good a grader is, since nothing is mended by them."""
    rows = [json.loads(line) for line in (LABELLED / f"{name}.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["data"].get("part") != "unseen" or not row["label"]]
    assert len(rows) >= 30
    assert {row["label"] for row in rows} == {True, False}
    wrong = []
    grader = (GRADERS | OF_ROWS)[name]
    for row in rows:
        problem = Problem(id="x", prompt="?", gold=row["gold"], data=row["data"])
        if grader.grade(row["response"], problem).correct is not row["label"]:
            wrong.append(row)
    assert not wrong


# What published scorers get wrong, each a fault that was seen in one of them.


@pytest.mark.parametrize("given", ["400", "0.04", "4%", "40000%"])
def test_a_hundred_times_the_number_and_a_hundredth_of_it_are_wrong(given: str) -> None:
    assert reward(TableGrader(), rf"\boxed{{{given}}}", "4") == 0


def test_percent_is_read_both_ways_only_where_asked_and_allowed() -> None:
    asked, written_out = TableGrader(percent="asked"), TableGrader()
    question = "By how many percent did it rise?"
    for said in ("23.5", "23.5%", r"23.5\%", "0.235"):
        assert reward(asked, rf"\boxed{{{said}}}", "23.5", question) == 1
        assert reward(asked, rf"\boxed{{{said}}}", "23.5", "How much did it rise?") == (said == "23.5")
        assert reward(written_out, rf"\boxed{{{said}}}", "23.5", question) == (said == "23.5")
    assert reward(asked, r"\boxed{2350%}", "23.5%", question) == 0
    assert reward(written_out, r"\boxed{0.235}", "23.5%") == 1


@pytest.mark.parametrize(
    "response", ["", " ", "I don't know.", r"\boxed{}", "Answer:", r"\boxed{none of them}"]
)
def test_what_chooses_nothing_earns_nothing_however_often_it_is_graded(response: str) -> None:
    for gold in "ABCD":
        for _ in range(5):
            assert grade(MultipleChoice(), response, gold) == Grade(reward=0.0, outcome="no_answer")


@pytest.mark.parametrize(
    "response", [r"\boxed{Apple}", "Answer: Bad", r"\boxed{DNA}", "The answer is A dog", "Answer: I think so"]
)
def test_a_letter_within_a_word_or_an_article_is_no_choice(response: str) -> None:
    for gold in "ABCDI":
        assert reward(MultipleChoice(), response, gold) == 0


CHOICES = [
    ("Answer: B. Wait, actually the answer is C.", "C"),
    ("Answer: C. Wait, actually the answer is B.", "B"),
    ("Answer: C\n\nAnswer: D", "D"),
    (r"\boxed{C}, maybe \boxed{D}", "D"),
    (r"\boxed{A} no, \boxed{C}", "C"),
    ("The answer is C, and the answer is C.", "C"),
    ("The correct choice is C. This option is consistent with all that is known.", "C"),
    ("The answer is C.\nThe answer is Paris.", "C"),
    ("I choose C, since (A) and (B) are wrong.", "C"),
    ("Answer: C because A or B is wrong", "C"),
    ("Answer: C) Both A and B", "C"),
    ("Answer: C) vitamin A", "C"),
    ("Answer: C) Paris, I think", "C"),
    ("The answer is C. A is too small.", "C"),
    ("Option C is the best choice: it fits.", "C"),
]
HEDGES = [
    "Answer: C or D", "Answer: (C) or (D)", "Answer: (C), (D)", "Answer: C, D", "Answer: A) or B)",
    "Answer: **C** / **D**", "Answer: (C) and (D)", "Answer: C) Paris or D) London", "Answer: C. Or maybe D.",
    "Answer: C. Wait, D.", r"\boxed{C} or \boxed{D}", r"\boxed{C} \boxed{D}", r"\boxed{C} or D",
    r"\boxed{C} (or D)", "Answer: C, or the answer is D", "The answer is C and the answer is D",
    "Option C is correct or option D is correct", "Answer: C. The answer is not C.",
]  # fmt: skip


@pytest.mark.parametrize(("response", "letter"), CHOICES)
def test_the_last_choice_counts_wherever_it_stands(response: str, letter: str) -> None:
    assert MultipleChoice().extract(response, Problem(id="x", prompt="?", gold="C")) == letter


@pytest.mark.parametrize("response", HEDGES)
def test_who_names_two_options_has_chosen_none(response: str) -> None:
    for gold in "ABCD":
        assert grade(MultipleChoice(), response, gold) == Grade(reward=0.0, outcome="no_answer")


@pytest.mark.parametrize("name", ["zebra", "ordering", "one_word", "grid"])
def test_newlines_within_the_tags_change_nothing(name: str) -> None:
    gold, text = {
        "zebra": (ZEBRA, json.dumps(json.loads(ZEBRA), indent=2)),
        "ordering": ('["Ann", "Bob"]', '[\n"Ann",\n"Bob"\n]'),
        "one_word": ("dax", "\ndax\n"),
        "grid": ("[[1, 0], [0, 1]]", "[\n [1, 0],\n [0, 1]\n]"),
    }[name]
    assert reward(GRADERS[name], f"<answer>\n{text}\n</answer>", gold) == 1


@pytest.mark.parametrize("given", ['["Ann", "Bob", "Eve"]', '["ann", "bob", "eve"]', "ANN, BOB, EVE"])
def test_people_are_in_order_whatever_the_case(given: str) -> None:
    assert reward(OrderingGrader(), answer(given), '["Ann", "bob", "EVE"]') == 1


def test_the_given_column_and_the_header_earn_nothing() -> None:
    copied = {"header": ["Position", "Name", "Pet"], "rows": [[str(place), "?", "?"] for place in (1, 2, 3)]}
    assert reward(ZebraGrader(), answer(copied), ZEBRA) == 0
    one_right = {**copied, "rows": [["1", "Ann", "?"], ["2", "?", "?"], ["3", "?", "?"]]}
    assert reward(ZebraGrader(), answer(one_right), ZEBRA) == pytest.approx(1 / 6)
    assert reward(ZebraGrader(score="exact"), answer(one_right), ZEBRA) == 0


def test_a_house_that_is_no_number_is_asked_for_like_anything_else() -> None:
    gold = json.dumps({"header": ["Position", "House"], "rows": [["1", "red"], ["2", "blue"]]})
    assert reward(ZebraGrader(), answer([["1", "red"], ["2", "blue"]]), gold) == 1
    assert reward(ZebraGrader(), answer([["1", "blue"], ["2", "red"]]), gold) == 0


@pytest.mark.parametrize("given", ["x.", " x ", "X", '"x"', "**x**", "\nx\n", "`x`!"])
def test_signs_around_a_word_do_not_matter(given: str) -> None:
    assert reward(OneWord(), answer(given), "x") == 1
    assert reward(OneWord(), answer(given), "y") == 0


@pytest.mark.parametrize(
    "given", ["[ [1, 0] , [0, 1] ]", "[[1,0],[0,1]]", "( (1, 0), (0, 1) )", "1 0\n0 1", "10/01"]
)
def test_a_grid_is_read_with_any_spaces(given: str) -> None:
    assert reward(GridGrader(), answer(given), "[[1, 0], [0, 1]]") == 1


def test_nothing_that_an_answer_says_is_evaluated(tmp_path: Path) -> None:
    target = tmp_path / "made"
    code = f"__import__('pathlib').Path({str(target)!r}).write_text('x') or 4"
    for name, grader in GRADERS.items():
        gold = {"zebra": ZEBRA, "grid": "[[4]]", "multiple_choice": "A"}.get(name, "4")
        for response in (rf"\boxed{{{code}}}", answer(code), f"```json\n{code}\n```"):
            assert not grade(grader, response, gold).correct
    assert not target.exists()


# What is no answer, and what is no gold.


def test_two_answers_at_once_are_none() -> None:
    assert reward(CodeIO(), '```json\n{"output": 1, "input": 2}\n```', "1") == 0
    assert reward(CodeIO(), '```json\n{"output": 1, "input": 2}\n```', '{"output": 1}') == 0
    assert reward(CodeIO(), '```json\n{"output": 1, "because": 2}\n```', '{"output": 1}') == 0
    assert reward(MultipleChoice(), r"\boxed{A or B}", "A") == reward(OneWord(), answer("x or y"), "x") == 0
    assert reward(TableGrader(), r"\boxed{1 or 2}", "1") == 0


@pytest.mark.parametrize("name", GRADERS)
def test_hostile_answers_are_wrong_or_none(name: str) -> None:
    gold = {"zebra": ZEBRA, "grid": "[[4]]", "multiple_choice": "A"}.get(name, "qqq")
    for response, _ in hostile_answers(13, 60):
        assert not grade(GRADERS[name], response, gold).correct


@pytest.mark.parametrize(
    ("name", "gold"),
    [
        ("zebra", "{}"),
        ("zebra", '{"header": ["Position"], "rows": [["1"]]}'),
        ("zebra", '[["1", "2"], ["1"]]'),
        ("grid", "none"),
        ("ordering", ""),
        ("one_word", "…"),
        ("multiple_choice", "Paris"),
        ("exact_match", "[]"),
        ("f1", " "),
        ("table", ""),
    ],
)
def test_a_gold_that_says_nothing_is_told(name: str, gold: str) -> None:
    problem = Problem(id="x", prompt="?", gold=gold)
    with pytest.raises(ValueError, match="gold"):
        GRADERS[name].verdict("A" if name == "multiple_choice" else "[[1]]", problem)
