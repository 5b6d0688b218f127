"""Promises of extracting answers from responses:

* an answer is found between tags, in a box, in a fence or as the last value among prose;
* a value is JSON or a Python literal, and all else is refused and never evaluated;
* any text is searched without an error, in one pass.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cases import cases
from treetune.exceptions import UnreadableValue
from treetune.tasks.graders.conformance import hostile_answers
from treetune.tasks.graders.extraction import (
    DEEPEST_VALUE,
    LONGEST_VALUE,
    fenced_blocks,
    find_values,
    last_between,
    last_box,
    read_value,
)
from treetune.tasks.thoughts import after_thought

CASES = Path(__file__).parent / "cases/extraction.txt"


def test_only_text_after_the_last_thought_counts() -> None:
    assert after_thought("<think>a</think>b</think> c") == " c"
    assert after_thought("no thought") == "no thought"
    assert after_thought("a || b", "||") == " b"


@pytest.mark.parametrize(("text", "answer"), cases(CASES, "between tags"))
def test_a_tagged_answer_is_the_last_closed_one(text: str, answer: str | None) -> None:
    assert last_between(text) == answer


def test_an_answer_that_a_stop_string_ended_is_what_follows_the_last_opening() -> None:
    assert last_between("#a\n#b", "#", "\n", unclosed=True) == "b"
    assert last_between("#a\nrest", "#", "\n", unclosed=True) == "a"
    assert last_between("a", "#", "\n", unclosed=True) is None


def test_fenced_blocks_come_in_their_order_and_by_their_language() -> None:
    text = "See:\n```python\na = 1\nb = 2\n```\nand\n  ```json\n{}\n  ```\n```\n```\n```text"
    assert fenced_blocks(text) == ["a = 1\nb = 2", "{}", ""]
    assert fenced_blocks(text, "json", "python") == ["a = 1\nb = 2", "{}"]
    assert fenced_blocks("```json\n1\n```python\n2\n```") == ["2"]
    assert fenced_blocks("an `inline` ```one``` is none") == []


@pytest.mark.parametrize(("text", "content"), cases(CASES, "in a box"))
def test_a_box_is_the_last_whose_brace_is_closed(text: str, content: str | None) -> None:
    assert last_box(text) == content


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, true, null]}', {"a": [1, True, None]}),
        ("{'a': (1, True, None)}", {"a": (1, True, None)}),
        (" [ [ 1 , 0 ],\n [0, 1 ] ] ", [[1, 0], [0, 1]]),
        ('"(((("', "(((("),
        ("-3.5", -3.5),
        (json.dumps({"output": "(" * 200}), {"output": "(" * 200}),  # brackets in strings are no nesting
    ],
)
def test_json_and_python_literals_are_read_as_values(text: str, value: Any) -> None:
    assert read_value(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "", "abc", "1+x", "__import__('os').system('true')", "[i for i in 'ab']", "open('a')", "2**9999",
        "[" * 100_000, "[" * (DEEPEST_VALUE + 1) + "]" * (DEEPEST_VALUE + 1), "(" * 90 + ")" * 90,
        "-" * 90_000 + "1", "1" * 5000, "1+" * 40_000 + "1", "[" + "1," * LONGEST_VALUE + "1]", "{[]: 1}",
        '"' + '\\"' * 40_000, "'" * 49_999, "\x00", "[1, 2",
    ],
)  # fmt: skip
def test_any_other_text_is_refused_and_never_evaluated(text: str) -> None:
    with pytest.raises(UnreadableValue):
        read_value(text)


@pytest.mark.parametrize(("text", "last"), cases(CASES, "last value"))
def test_the_last_complete_value_is_found_among_prose(text: str, last: str) -> None:
    assert next(find_values(text))[0] == last


def test_values_of_one_kind_of_bracket_may_stand_in_another() -> None:
    assert [value for _, value in find_values("{grid: [1, 2]} [3]", "[")] == [[3], [1, 2]]


@pytest.mark.parametrize("between", ["it's", r"it's \'so\'", r'5" or 6\"', "it's \\"])
def test_a_quote_that_is_not_closed_hides_nothing(between: str) -> None:
    """Also if escaped quotes follow in its line, which close nothing."""
    assert next(find_values(f"[{between}] gives [7]"))[1] == [7]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(JSON_VALUES, max_size=4) | st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=4),
    st.text(alphabet="ab'\". \n", max_size=20),
    st.booleans(),
)
@settings(max_examples=100)
def test_a_value_is_found_behind_any_prose_and_read_back(value: Any, prose: str, literal: bool) -> None:
    text = repr(value) if literal else json.dumps(value)
    assert next(find_values(f"{prose} {text} {prose}"))[1] == value


SEARCHES = (
    after_thought, last_between, fenced_blocks, last_box, lambda text: list(find_values(text)),
    lambda text: list(find_values(text, "[{(")),
)  # fmt: skip


@given(st.text(alphabet="[]{}()\"'\\`\n ab1,:<>/answer", max_size=120))
@settings(max_examples=150)
def test_any_text_is_searched_without_an_error(text: str) -> None:
    for function in SEARCHES:
        function(text)


def test_hostile_answers_are_searched_without_an_error() -> None:
    for response, _ in hostile_answers(7, 200):
        for function in SEARCHES:
            function(response)


@pytest.mark.parametrize(
    "piece",
    [
        "[", "]", "{", "(", "[]", '"', "'", '["', "['", '[\\"', "\\", "[1,", "```", "```\n", "```a", "`", " ",
        "<answer>", "</answer>", "</think>", r"\boxed{", r"\boxed", r"\fbox{}", "{'", "[\"'", '["\n', "[\\'",
    ],
)  # fmt: skip
def test_a_long_text_is_searched_in_one_pass(piece: str) -> None:
    """A quadratic search of a million characters would take hours, so that this test would never end."""
    text = (piece * (1_000_000 // len(piece) + 1))[:1_000_000]
    for function in (*SEARCHES[:-2], lambda text: next(find_values(text), None)):
        function(text)
