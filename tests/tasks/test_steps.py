"""Promises of splitting answers into steps:

* boundaries rise from 0 to the length of any text, and the tokens of the steps are those of the text;
* steps are lines, or sentences and rows of formulas, in many languages, and no later text moves a boundary of
  finished lines;
* the reference splitters make the steps of published code;
* a long text takes time linear in its length.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import treetune.parts  # noqa: F401
from treetune.domains.math_reference_steps import MathReference
from treetune.domains.math_tasks import Sentences
from treetune.models.tokenizer import step_ends
from treetune.tasks.splitter_task import SplitterTask
from treetune.tasks.steps import Gsm8kReference, Lines, StepSplitter
from treetune.vocabulary import TextCodec

SPLITTERS = sorted(StepSplitter.parts_by_name())
PIECES = ["\n", " ", "$", "$$", "\\(", "\\[", "\\]", "\\)", "#### ", "\n#### ", ". ", "A", "b", "\\begin{a}",
          "\\end{a}", "[asy]", "[/asy]", "Then it is so. ", "x = 2", ",", "and", "é"]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TaskWithSteps(SplitterTask):
    steps: StepSplitter


def steps(splitter: StepSplitter, text: str) -> list[str]:
    offsets = splitter.boundaries(text)
    return [text[start:end] for start, end in pairwise(offsets)]


@pytest.mark.parametrize("name", SPLITTERS)
@given(text=st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=60).map("".join)))
@example(text="abc")
@example(text="\n#### 1\n#### 2")
@example(text="#### 5")
@example(text="\n\n\n")
@example(text="")
def test_boundaries_rise_from_0_to_the_length_for_any_text_and_any_token_ids(name: str, text: str) -> None:
    splitter = StepSplitter.parts_by_name()[name]()
    offsets = splitter.boundaries(text)
    assert (offsets[0], offsets[-1]) == (0, len(text))
    assert all(start < end for start, end in pairwise(offsets))
    codec = TextCodec(
        encode=lambda t: tuple(map(ord, t)), decode=lambda ids: "".join(map(chr, ids)), eos_id=0
    )
    ids = codec.encode(text)
    ends = step_ends(ids, offsets, codec, text)
    parts = [codec.decode(ids[start:end]) for start, end in pairwise((0, *ends))]
    assert parts == steps(splitter, text) and "".join(parts) == text


def test_a_line_begins_with_its_newline_and_the_answer_goes_with_the_last() -> None:
    text = "\n\nOne.\n\nTwo.\nThree.\n#### 6"
    assert steps(Lines(), text) == ["\n\nOne.", "\n\nTwo.", "\nThree.\n#### 6"]


def test_the_reference_of_gsm8k_counts_blank_lines_in_the_middle_as_steps() -> None:
    text = "\nOne.\n\nTwo.\n\n#### 6"
    assert steps(Gsm8kReference(), text) == ["\nOne.", "\n", "\nTwo.\n\n#### 6"]


@given(text=st.lists(st.sampled_from(["\n", " ", "a", "b", "#### 5"]), max_size=30).map("".join))
def test_where_a_newline_ends_a_step_no_later_text_changes_a_boundary(text: str) -> None:
    task = TaskWithSteps(steps=Lines(newline="ends"))
    boundaries = task.answer_boundaries(text)[:-1]
    for end in range(len(text) + 1):
        assert task.answer_boundaries(text[:end])[:-1] == [offset for offset in boundaries if offset <= end]


def test_a_line_may_end_with_its_newline_and_the_answer_is_then_a_step() -> None:
    text = "\n\nOne.\n\nTwo.\n#### 6\n"
    assert steps(Lines(newline="ends"), text) == ["\n\nOne.\n", "\nTwo.\n", "#### 6\n"]


@pytest.mark.parametrize(
    ("newline", "last_steps"), [("begins", ["\nTwo.\n\n \n"]), ("ends", ["Two.\n", "\n \n"])]
)
def test_blank_lines_at_the_end_are_a_step_of_their_own_only_where_a_newline_ends_a_step(
    newline: Literal["begins", "ends"], last_steps: list[str]
) -> None:
    assert steps(Lines(newline=newline), "One.\nTwo.\n\n \n")[1:] == last_steps


@pytest.mark.parametrize(
    ("splitter", "answer", "boundaries"),
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
    splitter: StepSplitter, answer: str, boundaries: list[int]
) -> None:
    assert TaskWithSteps(steps=splitter).answer_boundaries(answer) == boundaries


# Steps of solutions of MATH

ALIGNED = "We have\n\\begin{align*}\nx &= 1 + 2 \\\\\n&= 3 \\\\\n&= 4\n\\end{align*}"
NESTED = (
    "We have\n\\begin{align*}\nx &= \\text{ if $x>0$} \\\\\n&= 3\n\\end{align*}\nSo it is done here, at last."
)


def test_a_step_is_a_sentence_or_a_line_and_begins_with_its_white_space() -> None:
    text = "Let $x=2.5$. Then we see that\n$y=3$, as Mr. Smith says.\n\nSo $z. W$ is it."
    assert steps(Sentences(), text) == [
        "Let $x=2.5$.", " Then we see that\n$y=3$, as Mr. Smith says.", "\n\nSo $z. W$ is it.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "sentences",
    [
        ["Znajdujemy wartość liczby x w równaniu.", " Żądamy, by była parzysta."],
        ["Ta tính giá trị của x trước.", " Để kết thúc, ta cộng lại."],
        ["Primero hallamos el valor buscado.", " ¿Es un número par?", " ¡Entonces lo sumamos!"],
        ["Önce x değerini buluyoruz.", " İkinci adımda onu topluyoruz."],
    ],
    ids=["Polish", "Vietnamese", "Spanish", "Turkish"],
)
def test_sentences_of_languages_beyond_english_are_steps(sentences: list[str]) -> None:
    assert steps(Sentences(), "".join(sentences)) == sentences


def test_rows_of_a_displayed_formula_are_steps_and_those_of_a_matrix_are_not() -> None:
    assert steps(Sentences(), ALIGNED) == [
        "We have\n\\begin{align*}\nx &= 1 + 2 \\\\",
        "\n&= 3 \\\\",
        "\n&= 4\n\\end{align*}",
    ]
    matrix = "So \\[A = \\begin{pmatrix}\n1 & 2 \\\\\n3 & 4\n\\end{pmatrix}\\] is the matrix."
    assert steps(Sentences(), matrix) == [matrix]


def test_a_formula_within_an_environment_is_no_obstacle() -> None:
    assert steps(Sentences(), NESTED)[-1] == "\nSo it is done here, at last."
    assert steps(MathReference(), NESTED)[-1] == "\nSo it is done here, at last."


@pytest.mark.parametrize(
    "text", ["abc", "Hi. A", "Short\nok", "The answer is 5.", "$", "\\begin{align*}", "\n", "[asy]"]
)
@pytest.mark.parametrize("splitter", [Sentences(), MathReference()])
def test_short_answers_are_one_step(splitter: StepSplitter, text: str) -> None:
    assert steps(splitter, text) == [text]


def test_dollars_that_are_money_do_not_swallow_sentences() -> None:
    text = "A pen costs $5 and a pencil $3. Then they cost $8 in all. So it is $8."
    assert len(steps(Sentences(), text)) == 3


def test_long_sentences_are_cut_at_a_clause_near_the_middle() -> None:
    text = "We count the ways to choose an apple of the many, and then we multiply it by $f(a,b,c)$, too."
    first_part, second_part = steps(Sentences(longest=90), text)
    assert first_part.endswith("many,")
    assert second_part.startswith(" and then")
    assert steps(Sentences(longest=None), text) == [text]
    formula = "$" + "a, " * 100 + "b$"
    assert steps(Sentences(), formula) == [formula]


def test_the_reference_of_math_makes_the_steps_of_published_code() -> None:
    text = "Let $x=2$. Therefore $y=3$. So the answer is 5."
    assert steps(MathReference(), text) == ["Let $x=2$. Therefore $y=3$.", " So the answer is 5."]
    text = "Let $a$ be the first number. Mr. Smith gave two to Bob.\nThen he has 1.\nThe answer is it."
    assert steps(MathReference(), text) == [
        "Let $a$ be the first number.", " Mr. Smith gave two to Bob.", "\nThen he has 1.\nThe answer is it.",
    ]  # fmt: skip
    assert steps(MathReference(), ALIGNED)[-1] == "\n\\end{align*}"
    text = "First $a.$ Then the sum is $b.$ And so it goes on and on."
    assert steps(MathReference(), text) == [
        "First $a.$",
        " Then the sum is $b.$",
        " And so it goes on and on.",
    ]


def test_the_reference_cuts_long_parts_behind_commas_and_then_behind_signs() -> None:
    first_part, second_part = (
        "We know that the number of ways is large,",
        " and that there are as many apples as there are ripe pears in it.",
    )
    assert steps(MathReference(), first_part + second_part) == [first_part, second_part]
    formula = "\\[" + "a" * 60 + "=" + "b" * 60 + "\\]"
    assert steps(MathReference(), formula) == [formula[:63], formula[63:]]


@pytest.mark.parametrize("word", [" and", "\nand", " to"])
def test_the_reference_cuts_behind_a_word_and_before_the_blank_that_follows(word: str) -> None:
    first_part, second_part = "w" * 50 + word, " " + "w" * 60
    # A newline is a cut of its own: of stage 2, with the newline first in the part that follows.
    expected = [first_part, second_part] if word[0] == " " else ["w" * 50, word + second_part]
    assert steps(MathReference(), first_part + second_part) == expected


def test_the_reference_looks_for_the_middle_with_each_formula_counted_as_sixty_characters() -> None:
    # By its characters the text's middle is nearer to the second comma.
    text = "$x+y$ " + "w" * 43 + ", " + "w" * 28 + ", " + "w" * 59
    assert steps(MathReference(), text)[0] == "$x+y$ " + "w" * 43 + ","


def test_the_reference_tries_the_next_sign_and_not_the_next_place_of_the_same_one() -> None:
    # Less than 40 characters stand before the comma in the middle; behind the other one it could be cut.
    text = "$x$ " + "w" * 20 + ", " + "w" * 22 + " and www, " + "w" * 47
    assert steps(MathReference(), text)[0].endswith(" and")


LONG_FORMULA = "$" + "a" * 100 + "=" + "b" * 100 + "$"


def test_the_reference_cuts_text_again_that_stands_before_a_cut_in_a_formula_and_not_behind_one() -> None:
    before = "w" * 50 + ", " + LONG_FORMULA + " " + "v" * 5 + ", $x$" + "u" * 34
    behind = "$x$" + "u" * 34 + ", " + LONG_FORMULA + " " + "v" * 45 + ", " + "w" * 45
    for text, lengths in ((before, [51, 103, 146]), (behind, [141, 194])):
        assert [len(part) for part in steps(MathReference(), text)] == lengths


@pytest.mark.parametrize(
    ("word", "ends"),
    [("neighbours", True), ("Carla's", False), ("p.m", False), ("J", False), ("St", False), ("Bob", True)],
)
def test_a_single_letter_before_a_full_stop_ends_no_sentence_of_the_references(word: str, ends: bool) -> None:
    first_sentence, second_sentence = (
        f"In the end it was the turn of {word}.",
        " Then they all went home at last.",
    )
    assert steps(MathReference(), first_sentence + second_sentence) == (
        [first_sentence, second_sentence] if ends else [first_sentence + second_sentence]
    )


@pytest.mark.parametrize(
    "piece", ["$", "\\[", "\\begin{a}", "a. B", "\n", "a\n", ".$", "=", ", ", "{", "$\n"]
)
@pytest.mark.parametrize("splitter", [Sentences(), MathReference()])
def test_long_texts_of_one_sign_are_cut(splitter: StepSplitter, piece: str) -> None:
    # Were it quadratic in the text, this would not end in a minute.
    offsets = splitter.boundaries(piece * (20_000 // len(piece)))
    assert offsets[-1] == len(piece) * (20_000 // len(piece))
