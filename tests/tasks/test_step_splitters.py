from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import treetune.parts  # noqa: F401
from treetune.tasks.steps.base import StepSplitter
from treetune.tasks.steps.lines import Gsm8kReference, Lines

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
