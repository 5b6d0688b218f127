"""Steps of MATH solutions: the default's, and those that the VinePPO paper's code was seen to make."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treetune.models.tokenizer import step_ends
from treetune.tasks.steps.base import StepSplitter
from treetune.tasks.steps.math_reference import MathReference
from treetune.tasks.steps.sentences import Sentences
from treetune.vocabulary import TextCodec


def steps(splitter: StepSplitter, text: str) -> list[str]:
    return [text[start:end] for start, end in pairwise(splitter.boundaries(text))]


ALIGNED = "We have\n\\begin{align*}\nx &= 1 + 2 \\\\\n&= 3 \\\\\n&= 4\n\\end{align*}"
NESTED = (
    "We have\n\\begin{align*}\nx &= \\text{ if $x>0$} \\\\\n&= 3\n\\end{align*}\nSo it is done here, at last."
)


def test_a_step_is_a_sentence_or_a_line_and_begins_with_its_white_space() -> None:
    text = "Let $x=2.5$. Then we see that\n$y=3$, as Mr. Smith says.\n\nSo $z. W$ is it."
    assert steps(Sentences(), text) == [
        "Let $x=2.5$.", " Then we see that\n$y=3$, as Mr. Smith says.", "\n\nSo $z. W$ is it.",
    ]  # fmt: skip


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
    first, second = steps(Sentences(longest=90), text)
    assert first.endswith("many,")
    assert second.startswith(" and then")
    assert steps(Sentences(longest=None), text) == [text]
    formula = "$" + "a, " * 100 + "b$"
    assert steps(Sentences(), formula) == [formula]


def test_the_references_steps() -> None:
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


def test_the_reference_cuts_long_parts_at_commas_and_then_at_signs() -> None:
    first, second = (
        "We know that the number of ways is large,",
        " and that there are as many apples as there are ripe pears in it.",
    )
    assert steps(MathReference(), first + second) == [first, second]
    formula = "\\[" + "a" * 60 + "=" + "b" * 60 + "\\]"
    assert steps(MathReference(), formula) == [formula[:62], formula[62:]]


@settings(max_examples=50)
@given(text=st.text(alphabet="ab. \n$\\[](){}=,AB", max_size=80))
@pytest.mark.parametrize("splitter", [Sentences(), MathReference()])
def test_steps_over_token_ids_are_lossless(splitter: StepSplitter, text: str) -> None:
    codec = TextCodec(
        encode=lambda t: tuple(map(ord, t)), decode=lambda ids: "".join(map(chr, ids)), eos_id=0
    )
    ids = codec.encode(text)
    ends = step_ends(ids, splitter.boundaries(text), codec, text)
    parts = [codec.decode(ids[start:end]) for start, end in pairwise((0, *ends))]
    assert "".join(parts) == text
    assert parts == steps(splitter, text)


@pytest.mark.parametrize(
    "piece", ["$", "\\[", "\\begin{a}", "a. B", "\n", "a\n", ".$", "=", ", ", "{", "$\n"]
)
@pytest.mark.parametrize("splitter", [Sentences(), MathReference()])
def test_long_texts_of_one_sign_are_cut(splitter: StepSplitter, piece: str) -> None:
    # Were it quadratic in the text, this would not end in a minute.
    offsets = splitter.boundaries(piece * (20_000 // len(piece)))
    assert offsets[-1] == len(piece) * (20_000 // len(piece))
