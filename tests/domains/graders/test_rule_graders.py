"""Promises of the graders by rule, of logic, simulation, tables, choices and facts:

* labelled responses get the grades of their labels, and faults that were seen in published scorers don't
  occur;
* an answer is right in every way to write it, one changed part makes it wrong, and a later choice replaces
  an earlier one;
* any text gets a grade between 0 and 1, and nothing that a response says is evaluated;
* a gold that says nothing is an error.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cases import cases
from treetune.domains.graders.codeio import CodeIO
from treetune.domains.graders.instruction_following import InstructionFollowing
from treetune.domains.graders.livebench import SCORE_OF_TASK, LiveBench, edit_distance
from treetune.domains.graders.multiple_choice import MultipleChoice
from treetune.domains.graders.puzzles import (
    GridGrader,
    OrderingGrader,
    ZebraGrader,
    read_grid,
    read_table,
    write_grid,
)
from treetune.domains.graders.table import TableGrader
from treetune.domains.graders.tagged import F1, ExactMatch, OneWord
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.numeric import Numeric
from treetune.vocabulary import Grade, Problem

HERE = Path(__file__).parent
CHOICES = HERE / "cases/multiple_choice.txt"
GRADERS: dict[str, Grader] = {
    "codeio": CodeIO(),
    "exact_match": ExactMatch(),
    "f1": F1(),
    "grid": GridGrader(),
    "multiple_choice": MultipleChoice(),
    "one_word": OneWord(),
    "ordering": OrderingGrader(),
    "table": TableGrader(),
    "zebra": ZebraGrader(),
}
LABELLED = GRADERS | {
    "instruction_following": InstructionFollowing(),
    "livebench": LiveBench(),
    "numeric": Numeric(),
}
ZEBRA = json.dumps(
    {
        "header": ["Position", "Name", "Pet"],
        "rows": [["1", "Ann", "cat"], ["2", "Bob", "dog"], ["3", "Eve", "eel"]],
    }
)
GOLDS = {"zebra": ZEBRA, "grid": "[[4]]", "multiple_choice": "A"}
"""Golds of graders that take no others."""


def grade(grader: Grader, response: str, gold: str, prompt: str = "?", **data: str) -> Grade:
    return grader.grade(response, Problem(id="x", prompt=prompt, gold=gold, data=data))


def reward(grader: Grader, response: str, gold: str, prompt: str = "?", **data: str) -> float:
    return grade(grader, response, gold, prompt, **data).reward


def answer(text: object) -> str:
    return f"<think>so</think> <answer>{text if isinstance(text, str) else json.dumps(text)}</answer>"


@pytest.mark.parametrize("name", LABELLED)
def test_labelled_cases_are_told_apart(name: str) -> None:
    """Right answers of the unseen part are left out: they measure a grader, and none is changed by them."""
    rows = [json.loads(line) for line in (HERE / f"labelled/{name}.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["data"].get("part") != "unseen" or not row["label"]]
    assert len(rows) >= 30 and {row["label"] for row in rows} == {True, False}
    wrong = []
    for row in rows:
        problem = Problem(id="x", prompt="?", gold=row["gold"], data=row["data"])
        if LABELLED[name].grade(row["response"], problem).correct is not row["label"]:
            wrong.append(row)
    assert not wrong


# Faults that were seen in published scorers


def test_percent_is_read_both_ways_only_where_asked_and_allowed() -> None:
    lenient, strict = TableGrader(percent="asked"), TableGrader()
    question = "By how many percent did it rise?"
    for number in ("23.5", "23.5%", r"23.5\%", "0.235"):
        response = rf"\boxed{{{number}}}"
        assert reward(lenient, response, "23.5", question) == 1
        assert reward(lenient, response, "23.5", "How much did it rise?") == (number == "23.5")
        assert reward(strict, response, "23.5", question) == (number == "23.5")
    assert reward(lenient, r"\boxed{2350%}", "23.5%", question) == 0
    assert reward(strict, r"\boxed{0.235}", "23.5%") == 1
    for number in ("400", "0.04", "4%", "40000%"):
        assert reward(strict, rf"\boxed{{{number}}}", "4") == 0, "a hundred times it, or a hundredth of it"


@pytest.mark.parametrize(
    "response",
    [
        "", " ", "I don't know.", r"\boxed{}", "Answer:", r"\boxed{none of them}",
        *(response for (response,) in cases(CHOICES, "two options")),
    ],
)  # fmt: skip
def test_a_response_that_names_no_option_or_two_has_no_answer_however_often_it_is_graded(
    response: str,
) -> None:
    for gold in "ABCD":
        for _ in range(3):  # a published scorer draws an option at random
            assert grade(MultipleChoice(), response, gold) == Grade(reward=0.0, outcome="no_answer")


@pytest.mark.parametrize(
    "response", [r"\boxed{Apple}", "Answer: Bad", r"\boxed{DNA}", "The answer is A dog", "Answer: I think so"]
)
def test_a_letter_within_a_word_or_an_article_is_no_choice(response: str) -> None:
    assert [reward(MultipleChoice(), response, gold) for gold in "ABCDI"] == [0] * 5


@pytest.mark.parametrize(("response", "letter"), cases(CHOICES, "choices"))
def test_the_last_choice_counts_wherever_it_stands(response: str, letter: str) -> None:
    assert MultipleChoice().extract(response, Problem(id="x", prompt="?", gold="C")) == letter


def test_the_column_of_positions_and_the_header_earn_nothing() -> None:
    header = ["Position", "Name", "Pet"]
    positions_alone = {"header": header, "rows": [["1", "?", "?"], ["2", "?", "?"], ["3", "?", "?"]]}
    assert reward(ZebraGrader(), answer(positions_alone), ZEBRA) == 0
    one_right = {"header": header, "rows": [["1", "Ann", "?"], ["2", "?", "?"], ["3", "?", "?"]]}
    assert reward(ZebraGrader(), answer(one_right), ZEBRA) == pytest.approx(1 / 6)
    assert reward(ZebraGrader(score="exact"), answer(one_right), ZEBRA) == 0


def test_a_column_that_is_called_house_and_has_colours_is_graded_like_any_other() -> None:
    gold = json.dumps({"header": ["Position", "House"], "rows": [["1", "red"], ["2", "blue"]]})
    assert reward(ZebraGrader(), answer([["1", "red"], ["2", "blue"]]), gold) == 1
    assert reward(ZebraGrader(), answer([["1", "blue"], ["2", "red"]]), gold) == 0


def test_nothing_that_an_answer_says_is_evaluated(tmp_path: Path) -> None:
    target = tmp_path / "made"
    code = f"__import__('pathlib').Path({str(target)!r}).write_text('x') or 4"
    for name, grader in GRADERS.items():
        for response in (rf"\boxed{{{code}}}", answer(code), f"```json\n{code}\n```"):
            assert not grade(grader, response, GOLDS.get(name, "4")).correct
    assert not target.exists()


# Responses without an answer, and golds that are none


def test_a_choice_is_read_and_nothing_hangs_however_many_blanks_stand_in_a_row() -> None:
    blanks = " " * 200_000
    assert MultipleChoice().grade(f"answer: {blanks}?", Problem("x", "?", "B")).outcome == "no_answer"
    assert MultipleChoice().grade(f"x{blanks}y", Problem("x", "?", "B")).outcome == "no_answer"
    assert reward(MultipleChoice(), "The correct answer    B", "B") == 1
    assert reward(MultipleChoice(), f"B) the first{blanks}of them", "B") == 1


def test_two_answers_at_once_earn_nothing() -> None:
    for gold in ("1", '{"output": 1}'):
        assert reward(CodeIO(), '```json\n{"output": 1, "input": 2}\n```', gold) == 0
    assert reward(CodeIO(), '```json\n{"output": 1, "because": 2}\n```', '{"output": 1}') == 0
    assert reward(MultipleChoice(), r"\boxed{A or B}", "A") == reward(OneWord(), answer("x or y"), "x") == 0
    assert reward(TableGrader(), r"\boxed{1 or 2}", "1") == 0


@pytest.mark.parametrize(
    ("name", "gold"),
    [
        ("zebra", "{}"), ("zebra", '{"header": ["Position"], "rows": [["1"]]}'),
        ("zebra", '[["1", "2"], ["1"]]'),
        ("grid", "none"), ("ordering", ""), ("one_word", "…"), ("multiple_choice", "Paris"),
        ("exact_match", "[]"), ("f1", " "), ("table", ""),
    ],
)  # fmt: skip
def test_a_gold_that_says_nothing_is_an_error(name: str, gold: str) -> None:
    problem = Problem(id="x", prompt="?", gold=gold)
    with pytest.raises(ValueError, match="gold"):
        GRADERS[name].verdict("A" if name == "multiple_choice" else "[[1]]", problem)


# Properties of any gold and any answer to it


RANDOM_WORDS = st.text(alphabet=string.ascii_letters, min_size=1, max_size=6)
RANDOM_CELLS = st.text(alphabet=string.ascii_lowercase, min_size=1, max_size=4)


def with_random_case(draw: Any, text: str) -> str:
    return "".join(draw.choice((sign.upper(), sign.lower())) for sign in text)


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=1, max_size=5)
    ),
    st.data(),
)
@settings(max_examples=50)
def test_every_way_to_write_a_grid_is_read_and_one_changed_cell_is_seen(
    grid: list[list[int]], data: Any
) -> None:
    gold = json.dumps(grid)
    spaces_and_lines = "\n".join(" ".join(map(str, row)) for row in grid)
    for text in (gold, str(grid), write_grid(grid), spaces_and_lines):  # type: ignore[arg-type]
        assert read_grid(text) == tuple(map(tuple, grid))
        assert reward(GridGrader(), answer(text), gold) == 1
    row = data.draw(st.integers(0, len(grid) - 1))
    column = data.draw(st.integers(0, len(grid[0]) - 1))
    changed = [list(cells) for cells in grid]
    changed[row][column] = (changed[row][column] + data.draw(st.integers(1, 9))) % 10
    reward_of_cells = reward(GridGrader(score="cells"), answer(changed), gold)
    assert reward_of_cells == pytest.approx(1 - 1 / (len(grid) * len(grid[0])))
    assert reward(GridGrader(), answer(changed), gold) == 0
    assert reward(GridGrader(), answer([*grid, grid[0]]), gold) == 0


@given(
    st.lists(RANDOM_WORDS, min_size=2, max_size=6, unique_by=str.lower),
    st.randoms(use_true_random=False),
    st.sampled_from(["json", "commas", "lines", "numbered"]),
)
@settings(max_examples=50)
def test_an_order_is_right_in_every_writing_and_no_other_order_is(
    names: list[str], draw: Any, form: str
) -> None:
    def write_order(order: list[str]) -> str:
        order = [with_random_case(draw, name) for name in order]
        if form == "json":
            return json.dumps(order)
        if form == "commas":
            return ", ".join(order)
        if form == "lines":
            return "\n".join(order)
        return "\n".join(f"{number}. {name}" for number, name in enumerate(order, start=1))

    gold = json.dumps(names)
    by_places = OrderingGrader(score="places")
    assert reward(OrderingGrader(), answer(write_order(names)), gold) == 1
    swapped = list(names)
    i, j = draw.sample(range(len(names)), 2)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    assert reward(OrderingGrader(), answer(write_order(swapped)), gold) == 0
    assert reward(by_places, answer(write_order(swapped)), gold) == pytest.approx(1 - 2 / len(names))
    assert reward(by_places, answer(write_order([*names, "Zz"])), gold) == 0
    assert reward(by_places, answer(write_order(names[:-1])), gold) == 0


@given(
    st.integers(2, 4).flatmap(
        lambda n: st.lists(st.lists(RANDOM_CELLS, min_size=n, max_size=n), min_size=1, max_size=5)
    ),
    st.randoms(use_true_random=False),
)
@settings(max_examples=50)
def test_a_table_is_right_in_any_order_of_rows_and_columns_and_one_changed_cell_is_seen(
    cells: list[list[str]], draw: Any
) -> None:
    header = ["Position", *(f"Thing {number}" for number in range(len(cells[0])))]
    rows = [[str(position), *row] for position, row in enumerate(cells, start=1)]
    gold = json.dumps({"header": header, "rows": rows})
    columns = draw.sample(range(len(header)), len(header))
    shuffled_rows = []
    for row in draw.sample(rows, len(rows)):
        shuffled_rows.append([with_random_case(draw, row[column]) for column in columns])
    shuffled = {
        "header": [with_random_case(draw, header[column]) for column in columns],
        "rows": shuffled_rows,
    }
    grader = ZebraGrader()
    for table in (
        shuffled,
        rows,
        cells,
        {"header": header[1:], "rows": cells},
        [dict(zip(header, row, strict=True)) for row in rows],
    ):
        assert reward(grader, answer(table), gold) == 1
    changed = [list(row) for row in rows]
    row, column = draw.randrange(len(rows)), draw.randrange(1, len(header))
    changed[row][column] += "x"
    assert reward(grader, answer(changed), gold) == pytest.approx(1 - 1 / (len(cells) * len(cells[0])))
    assert reward(ZebraGrader(score="exact"), answer(changed), gold) == 0
    assert reward(grader, answer([*rows, rows[0]]), gold) == 0


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | RANDOM_WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(RANDOM_WORDS, inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, VALUES, st.sampled_from(["output", "input"]), st.booleans())
@settings(max_examples=50)
def test_a_value_equals_itself_in_every_writing_and_equality_has_no_direction(
    value: Any, other_value: Any, key: str, in_braces: bool
) -> None:
    block = json.dumps({key: value}) if in_braces else f'"{key}": {json.dumps(value)}'
    grader = CodeIO()
    for gold in (json.dumps({key: value}), json.dumps(value)):
        assert reward(grader, f"So:\n```json\n{block}\n```", gold) == 1
    assert grader.are_equal(value, other_value) == grader.are_equal(other_value, value)
    assert not grader.are_equal([value], [value, other_value])
    assert not grader.are_equal({"a": value}, {"b": value})


FORMS_AND_GOLDS = {
    "one_word": ("<answer>{}</answer>", st.text(alphabet="abcxyz", min_size=1, max_size=6)),
    "exact_match": ("<answer>{}</answer>", st.text(alphabet="bcx yz", min_size=1, max_size=9)),
    "table": ("\\boxed{{{}}}", st.text(alphabet="qxyz", min_size=2, max_size=6)),
    "multiple_choice": ("\\boxed{{{}}}", st.sampled_from("ABCDEFGHIJ")),
}


@pytest.mark.parametrize("name", FORMS_AND_GOLDS)
@given(st.data(), st.sampled_from(["", " ", "\n", "\t \n"]), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_case_and_surrounding_spaces_change_no_grade(name: str, data: Any, space: str, rng: Any) -> None:
    form, texts = FORMS_AND_GOLDS[name]
    gold = data.draw(texts.filter(str.strip))
    other_answer = data.draw(texts.filter(str.strip))
    is_right = " ".join(gold.lower().split()) == " ".join(other_answer.lower().split())
    for text in (
        other_answer,
        other_answer.upper(),
        with_random_case(rng, other_answer),
        f"{space}{other_answer}{space}",
    ):
        assert reward(GRADERS[name], form.format(text), gold) == is_right
        assert reward(GRADERS[name], form.format(text), gold.upper()) == is_right


@given(st.sampled_from("ABCDEFGHIJ"), st.sampled_from("ABCDEFGHIJ"))
def test_a_choice_is_right_where_it_is_the_gold_and_nowhere_else(letter: str, gold: str) -> None:
    forms = [r"\boxed{%s}", r"\boxed{(%s)}", r"\boxed{\text{%s}}", "Answer: %s", "**Answer:** (%s)"]
    forms += ["the final answer is %s.", "Answer: %s) Paris", "The correct answer is option (%s) Paris"]
    for form in forms:
        assert reward(MultipleChoice(), form % letter, gold) == (letter == gold), form
    outcome = grade(MultipleChoice(options=4), rf"\boxed{{{letter}}}", "A").outcome
    assert outcome == ("ok" if letter <= "D" else "no_answer")


@given(*[st.sampled_from("ABCDEFGHIJ")] * 3, st.sampled_from([". Wait, no. ", "\n", ". Actually, ", "; "]))
def test_a_later_choice_replaces_an_earlier_one(earlier: str, later: str, gold: str, between: str) -> None:
    for response in (
        f"Answer: {earlier}{between}The answer is {later}.",
        f"\\boxed{{{earlier}}}{between}Answer: {later}",
    ):
        assert reward(MultipleChoice(), response, gold) == (later == gold), response
    for hedge in ("{} or {}", "({}) or ({})", "{}) or {})", "{}. Maybe {}", "{}, {}", "{}/{}", "{} and {}"):
        response = f"Answer: {hedge.format(earlier, later)}"
        outcome = grade(MultipleChoice(), response, gold).outcome
        assert earlier == later or outcome == "no_answer", response


@given(
    st.lists(
        st.integers(-9999, 9999).map(str) | RANDOM_WORDS.map(lambda word: f"q{word}"), min_size=1, max_size=5
    ),
    st.randoms(use_true_random=False),
)
@settings(max_examples=50)
def test_several_answers_count_in_any_order_and_each_once(golds: list[str], draw: Any) -> None:
    gold = " | ".join(golds)
    shuffled = draw.sample(golds, len(golds))
    assert reward(TableGrader(), rf"\boxed{{{'|'.join(shuffled)}}}", gold) == 1
    assert reward(TableGrader(), rf"\boxed{{{'|'.join([*golds, golds[0]])}}}", gold) == 0
    changed = ["qqqqqqqqqq", *golds[1:]]
    assert reward(TableGrader(), rf"\boxed{{{'|'.join(changed)}}}", gold) == 0


@given(st.lists(RANDOM_WORDS, min_size=1, max_size=5), st.lists(RANDOM_WORDS, min_size=1, max_size=5))
def test_f1_is_symmetric_and_one_for_an_exact_match(words: list[str], other_words: list[str]) -> None:
    text, other_text = " ".join(words), " ".join(other_words)
    f1 = reward(F1(), answer(text), json.dumps([other_text]))
    assert f1 == pytest.approx(reward(F1(), answer(other_text), json.dumps([text])))
    if reward(ExactMatch(), answer(text), json.dumps([other_text])):
        assert f1 == 1


@pytest.mark.parametrize("name", GRADERS)
@given(
    st.text(max_size=60),
    st.sampled_from(["{}", "<answer>{}</answer>", "\\boxed{{{}}}", "```json\n{}\n```", "Answer: {}"]),
)
@settings(max_examples=60)
def test_any_text_gets_a_grade_between_0_and_1(name: str, text: str, form: str) -> None:
    assert 0 <= reward(GRADERS[name], form.format(text), GOLDS.get(name, "4")) <= 1


# LiveBench, where parts of an answer earn parts of the reward


def livebench(task: str, response: str, gold: str) -> float:
    return reward(LiveBench(), response, gold, task=task)


def test_parts_of_an_answer_to_livebench_earn_parts() -> None:
    groups = "a, b, c, d, e, f, g, h"
    assert livebench("connections", "<solution>d, c, b, a, e, f, g, x</solution>", groups) == 0.5
    assert livebench("zebra_puzzle", "<solution>a, c</solution>", "a, b") == 0.25
    assert livebench("tablejoin", "{'a': 'x'}", "{'a': 'x', 'b': 'y'}") == pytest.approx(2 / 3)
    assert livebench("tablereformat", '[{"a": "TRUE", "b": 1.0}]', '[{"a": "True", "b": "1"}]') == 1
    assert livebench("tablereformat", '[{"a": "false", "b": 1}]', '[{"a": "true", "b": 1}]') == 0
    plot = "One thing happens. Another thing follows. They all go home."
    reordered = "They all go home. One thing happens. Another thing follows."
    assert livebench("plot_unscrambling", reordered, plot) == pytest.approx(1 - 2 / 3)


def test_a_table_in_markdown_may_have_empty_cells_at_its_ends() -> None:
    table = read_table("|a|b|\n|---|---|\n|1||\n||2|")
    assert table is not None and table.rows == (("1", ""), ("", "2"))


def test_cells_of_a_table_may_be_empty_and_may_have_tags_within() -> None:
    rows = '[{"a": "1", "b": "", "c": ""}, {"a": "", "b": "2", "c": "3"}]'
    bars = "|a|b|c|\n|---|---|---|\n|1|||\n||2|3|"
    tags = (
        "<table><tr><th><b>a</b></th><th>b</th><th>c</th></tr>"
        "<tr><td><b>1</b></td><td></td><td><br></td></tr>"
        "<tr><td></td><td>2<td><i>3</i></table>That is <b>all</b>."
    )
    for answer in (bars, tags):
        assert livebench("tablereformat", answer, rows) == 1


def test_the_last_answer_alone_counts_however_many_stand_in_bold() -> None:
    """The published scorers take the best of all groups in bold, or any of the last three words."""
    assert livebench("connections", "**a, b, c, d**\n\n**a, b, x, y**", "a, b, c, d") == 0
    assert livebench("spatial", "**4**\n\n**5**\n\n**6**", "4") == 0


def test_a_task_that_livebench_does_not_have_is_told() -> None:
    with pytest.raises(ValueError, match="did you mean 'spatial'"):
        livebench("spacial", "4", "4")


@given(st.sampled_from(sorted(SCORE_OF_TASK)), st.text(max_size=80))
def test_any_answer_to_livebench_earns_at_most_1(task: str, text: str) -> None:
    gold = {"tablejoin": "{'a': 'b'}", "tablereformat": '[{"a": 1, "b": 2}]'}.get(task, "One. Two")
    assert 0 <= livebench(task, text, gold) <= 1


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_edit_distance_is_a_symmetric_distance_between_the_difference_of_lengths_and_the_longer_length(
    numbers: list[int], other_numbers: list[int]
) -> None:
    distance = edit_distance(numbers, other_numbers)
    assert distance == edit_distance(other_numbers, numbers)
    assert (distance == 0) == (numbers == other_numbers)
    assert abs(len(numbers) - len(other_numbers)) <= distance <= max(len(numbers), len(other_numbers))
