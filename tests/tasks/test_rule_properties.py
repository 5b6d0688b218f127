"""Graders that judge by rules: what holds of any gold and any answer to it."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tasks.rule_grading import GRADERS, ZEBRA, answer, grade, reward
from treetune_domains.graders.codeio import CodeIO
from treetune_domains.graders.multiple_choice import MultipleChoice
from treetune_domains.graders.puzzles import GridGrader, OrderingGrader, ZebraGrader, read_grid, written
from treetune_domains.graders.table import TableGrader
from treetune_domains.graders.tagged import F1, ExactMatch

_words = st.text(alphabet=string.ascii_letters, min_size=1, max_size=6)
_cells = st.text(alphabet=string.ascii_lowercase, min_size=1, max_size=4)


def _swapped(draw: Any, text: str) -> str:
    return "".join(draw.choice((sign.upper(), sign.lower())) for sign in text)


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=1, max_size=5)
    ),
    st.data(),
)
@settings(max_examples=100)
def test_every_way_to_write_a_grid_is_read_and_one_changed_cell_is_seen(
    grid: list[list[int]], data: Any
) -> None:
    gold = json.dumps(grid)
    for text in (gold, str(grid), written(grid), "\n".join(" ".join(map(str, row)) for row in grid)):  # type: ignore[arg-type]
        assert read_grid(text) == tuple(map(tuple, grid))
        assert reward(GridGrader(), answer(text), gold) == 1
    row = data.draw(st.integers(0, len(grid) - 1))
    column = data.draw(st.integers(0, len(grid[0]) - 1))
    changed = [list(one) for one in grid]
    changed[row][column] = (changed[row][column] + data.draw(st.integers(1, 9))) % 10
    found = grade(GridGrader(score="cells"), answer(changed), gold)
    assert found.reward == pytest.approx(1 - 1 / (len(grid) * len(grid[0])))
    assert reward(GridGrader(), answer(changed), gold) == 0
    assert reward(GridGrader(), answer([*grid, grid[0]]), gold) == 0


@given(
    st.lists(_words, min_size=2, max_size=6, unique_by=str.lower),
    st.randoms(use_true_random=False),
    st.sampled_from(["json", "commas", "lines", "numbered"]),
)
@settings(max_examples=100)
def test_an_order_is_right_in_every_writing_and_no_other_order_is(
    names: list[str], draw: Any, form: str
) -> None:
    def text(order: list[str]) -> str:
        said = [_swapped(draw, name) for name in order]
        if form == "json":
            return json.dumps(said)
        numbered = [f"{place}. {name}" for place, name in enumerate(said, start=1)]
        return {"commas": ", ".join(said), "lines": "\n".join(said), "numbered": "\n".join(numbered)}[form]

    gold = json.dumps(names)
    assert reward(OrderingGrader(), answer(text(names)), gold) == 1
    other = list(names)
    one, another = draw.sample(range(len(names)), 2)
    other[one], other[another] = other[another], other[one]
    assert reward(OrderingGrader(), answer(text(other)), gold) == 0
    assert reward(OrderingGrader(score="places"), answer(text(other)), gold) == pytest.approx(
        1 - 2 / len(names)
    )
    assert reward(OrderingGrader(score="places"), answer(text([*names, "Zz"])), gold) == 0
    assert reward(OrderingGrader(score="places"), answer(text(names[:-1])), gold) == 0


@given(
    st.integers(2, 4).flatmap(
        lambda n: st.lists(st.lists(_cells, min_size=n, max_size=n), min_size=1, max_size=5)
    ),
    st.randoms(use_true_random=False),
)
@settings(max_examples=100)
def test_a_table_is_right_in_any_order_of_rows_and_columns_and_one_changed_cell_is_seen(
    cells: list[list[str]], draw: Any
) -> None:
    header = ["Position", *(f"Thing {place}" for place in range(len(cells[0])))]
    rows = [[str(place), *row] for place, row in enumerate(cells, start=1)]
    gold = json.dumps({"header": header, "rows": rows})
    order = draw.sample(range(len(header)), len(header))
    shuffled = {
        "header": [_swapped(draw, header[place]) for place in order],
        "rows": [[_swapped(draw, row[place]) for place in order] for row in draw.sample(rows, len(rows))],
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


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_words, inner, max_size=3),
    max_leaves=8,
)


@given(_values, _values, st.sampled_from(["output", "input"]), st.booleans())
@settings(max_examples=200)
def test_a_value_equals_itself_in_every_writing_and_equality_has_no_direction(
    value: Any, other: Any, key: str, in_braces: bool
) -> None:
    block = json.dumps({key: value}) if in_braces else f'"{key}": {json.dumps(value)}'
    grader = CodeIO()
    for gold in (json.dumps({key: value}), json.dumps(value)):
        assert reward(grader, f"So:\n```json\n{block}\n```", gold) == 1
    assert grader.equal(value, other) == grader.equal(other, value)
    assert not grader.equal([value], [value, other])
    assert not grader.equal({"a": value}, {"b": value})


_FORMS = {
    "one_word": ("<answer>{}</answer>", st.text(alphabet="abcxyz", min_size=1, max_size=6)),
    "exact_match": ("<answer>{}</answer>", st.text(alphabet="bcx yz", min_size=1, max_size=9)),
    "table": ("\\boxed{{{}}}", st.text(alphabet="qxyz", min_size=2, max_size=6)),
    "multiple_choice": ("\\boxed{{{}}}", st.sampled_from("ABCDEFGHIJ")),
}


@pytest.mark.parametrize("name", _FORMS)
@given(st.data(), st.sampled_from(["", " ", "\n", "\t \n"]), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_case_and_spaces_around_change_no_verdict(name: str, data: Any, space: str, draw: Any) -> None:
    form, texts = _FORMS[name]
    gold = data.draw(texts.filter(str.strip))
    other = data.draw(texts.filter(str.strip))
    same = " ".join(gold.lower().split()) == " ".join(other.lower().split())
    for text in (other, other.upper(), _swapped(draw, other), f"{space}{other}{space}"):
        assert reward(GRADERS[name], form.format(text), gold) == same
        assert reward(GRADERS[name], form.format(text), gold.upper()) == same


@given(st.sampled_from("ABCDEFGHIJ"), st.sampled_from("ABCDEFGHIJ"))
def test_a_choice_is_right_where_it_is_the_gold_and_nowhere_else(said: str, gold: str) -> None:
    for form in (
        r"\boxed{%s}",
        r"\boxed{(%s)}",
        r"\boxed{\text{%s}}",
        "Answer: %s",
        "**Answer:** (%s)",
        "the final answer is %s.",
        "Answer: %s) Paris",
        "The correct answer is option (%s) Paris",
    ):
        assert reward(MultipleChoice(), form % said, gold) == (said == gold), form
    assert grade(MultipleChoice(options=4), rf"\boxed{{{said}}}", "A").outcome == (
        "ok" if said <= "D" else "no_answer"
    )


@given(*[st.sampled_from("ABCDEFGHIJ")] * 3, st.sampled_from([". Wait, no. ", "\n", ". Actually, ", "; "]))
def test_a_later_choice_replaces_an_earlier_one(one: str, other: str, gold: str, between: str) -> None:
    for said in (
        f"Answer: {one}{between}The answer is {other}.",
        f"\\boxed{{{one}}}{between}Answer: {other}",
    ):
        assert reward(MultipleChoice(), said, gold) == (other == gold), said
    for hedge in ("{} or {}", "({}) or ({})", "{}) or {})", "{}. Maybe {}", "{}, {}", "{}/{}", "{} and {}"):
        said = f"Answer: {hedge.format(one, other)}"
        assert one == other or grade(MultipleChoice(), said, gold).outcome == "no_answer", said


@given(
    st.lists(st.integers(-9999, 9999).map(str) | _words.map(lambda word: f"q{word}"), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
@settings(max_examples=100)
def test_several_answers_count_in_any_order_and_each_once(golds: list[str], draw: Any) -> None:
    gold = " | ".join(golds)
    shuffled = draw.sample(golds, len(golds))
    assert reward(TableGrader(), rf"\boxed{{{'|'.join(shuffled)}}}", gold) == 1
    assert reward(TableGrader(), rf"\boxed{{{'|'.join([*golds, golds[0]])}}}", gold) == 0
    changed = ["qqqqqqqqqq", *golds[1:]]
    assert reward(TableGrader(), rf"\boxed{{{'|'.join(changed)}}}", gold) == 0


@given(st.lists(_words, min_size=1, max_size=5), st.lists(_words, min_size=1, max_size=5))
def test_f1_is_symmetric_and_one_exactly_for_the_same_words(one: list[str], other: list[str]) -> None:
    there, back = (
        reward(F1(), answer(" ".join(one)), json.dumps([" ".join(other)])),
        reward(F1(), answer(" ".join(other)), json.dumps([" ".join(one)])),
    )
    assert there == pytest.approx(back)
    if reward(ExactMatch(), answer(" ".join(one)), json.dumps([" ".join(other)])):
        assert there == 1


@pytest.mark.parametrize("name", GRADERS)
@given(
    st.text(max_size=60),
    st.sampled_from(["{}", "<answer>{}</answer>", "\\boxed{{{}}}", "```json\n{}\n```", "Answer: {}"]),
)
@settings(max_examples=60)
def test_any_text_gets_a_verdict(name: str, text: str, form: str) -> None:
    gold = {"zebra": ZEBRA, "grid": "[[4]]", "multiple_choice": "A"}.get(name, "4")
    assert 0 <= reward(GRADERS[name], form.format(text), gold) <= 1
