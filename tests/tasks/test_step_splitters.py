from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import treetune.parts  # noqa: F401
from treetune.tasks.steps import Gsm8kReference, Lines, StepSplitter
from treetune_domains.math_reference_steps import MathReference
from treetune_domains.math_tasks import Sentences

SPLITTERS = sorted(StepSplitter.registered())
PIECES = ["\n", " ", "$", "$$", "\\(", "\\[", "\\]", "\\)", "#### ", "\n#### ", ". ", "A", "b", "\\begin{a}",
          "\\end{a}", "[asy]", "[/asy]", "Then it is so. ", "x = 2", ",", "and", "é"]  # fmt: skip


def steps(splitter: StepSplitter, text: str) -> list[str]:
    offsets = splitter.boundaries(text)
    return [text[start:end] for start, end in pairwise(offsets)]


@pytest.mark.parametrize("name", SPLITTERS)
@given(text=st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=60).map("".join)))
def test_boundaries_rise_from_0_to_the_length_for_any_text(name: str, text: str) -> None:
    offsets = StepSplitter.registered()[name]().boundaries(text)
    assert offsets[0] == 0
    assert offsets[-1] == len(text)
    assert all(start < end for start, end in pairwise(offsets))


def test_a_line_begins_with_its_newline_and_the_answer_goes_with_the_last() -> None:
    text = "\n\nOne.\n\nTwo.\nThree.\n#### 6"
    assert steps(Lines(), text) == ["\n\nOne.", "\n\nTwo.", "\nThree.\n#### 6"]


def test_the_reference_counts_blank_lines_in_the_middle() -> None:
    text = "\nOne.\n\nTwo.\n\n#### 6"
    assert steps(Gsm8kReference(), text) == ["\nOne.", "\n", "\nTwo.\n\n#### 6"]


@pytest.mark.parametrize("text", ["abc", "\n#### 1\n#### 2", "#### 5", "\n\n\n", ""])
def test_short_and_odd_answers_are_not_lost(text: str) -> None:
    assert "".join(steps(Lines(), text)) == text


@given(text=st.lists(st.sampled_from(["\n", " ", "a", "b", "#### 5"]), max_size=30).map("".join))
def test_where_a_newline_ends_a_step_no_later_text_changes_a_boundary(text: str) -> None:
    splitter = Lines(newline="ends")
    whole = splitter.answer_boundaries(text)[:-1]
    for end in range(len(text) + 1):
        assert splitter.answer_boundaries(text[:end])[:-1] == [offset for offset in whole if offset <= end]


def test_a_line_may_end_with_its_newline_and_the_answer_is_then_a_step() -> None:
    text = "\n\nOne.\n\nTwo.\n#### 6\n"
    assert steps(Lines(newline="ends"), text) == ["\n\nOne.\n", "\nTwo.\n", "#### 6\n"]


@pytest.mark.parametrize(
    ("splitter", "text", "boundaries"),
    [
        (Lines(), "One.\nTwo.", [0, 4, 9, 9]),
        (Lines(), "One.\nTwo.\n", [0, 4, 9, 10]),
        (Lines(newline="ends"), "One.\nTwo.", [0, 5, 9]),
        (Lines(newline="ends"), "One.\nTwo.\n", [0, 5, 10, 10]),
        (Lines(end_token="last_step"), "One.\nTwo.", [0, 4, 9]),
        (Gsm8kReference(), "One.\nTwo.", [0, 4, 9]),
        (MathReference(), "This sentence is one. And this is the other.", [0, 21, 44]),
        (Sentences(), "This sentence is one. And this is the other.", [0, 21, 44, 44]),
        (Sentences(), "This sentence is one.\nThis", [0, 21, 26]),
        (Lines(), "", [0, 0]),
    ],
    ids=repr,
)
def test_an_answer_that_ends_is_cut_as_if_another_line_followed(
    splitter: StepSplitter, text: str, boundaries: list[int]
) -> None:
    assert splitter.answer_boundaries(text) == boundaries
