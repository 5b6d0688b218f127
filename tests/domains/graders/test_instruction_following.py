"""Promises of the grader of instructions, which uses the library of IFEval:

* all instructions count, or their share, of what follows a thought;
* the same answer gets the same grade every time, without a network, and no random generator is touched;
* unknown instructions and missing data are told with their remedy.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from treetune.domains.graders.instruction_following import (
    MISSING_SENTENCE_DATA,
    InstructionFollowing,
    _load_check_classes,
)
from treetune.exceptions import Unavailable
from treetune.findings import missing_requirements
from treetune.vocabulary import Grade, Problem

GERMAN = "Das ist ein kurzer Satz über das Wetter in Hamburg."


def problem(*instructions: tuple[str, dict[str, Any]]) -> Problem:
    ids = [instruction_id for instruction_id, _ in instructions]
    arguments = [arguments_of_one for _, arguments_of_one in instructions]
    gold = json.dumps({"instruction_id_list": ids, "kwargs": arguments})
    return Problem(id="x", prompt="?", gold=gold)


def grade(response: str, *instructions: tuple[str, dict[str, Any]], **settings: Any) -> Grade:
    return InstructionFollowing(**settings).grade(response, problem(*instructions))


COMMA: tuple[str, dict[str, Any]] = ("punctuation:no_comma", {})
FIVE_WORDS: tuple[str, dict[str, Any]] = (
    "length_constraints:number_words",
    {"num_words": 5, "relation": "at least", "keywords": None},
)


def test_all_instructions_count_or_their_share() -> None:
    for response, share in (
        ("one two three four five", 1.0),
        ("one, two three four five", 0.5),
        ("a, b", 0.0),
    ):
        graded = grade(response, COMMA, FIVE_WORDS)
        assert graded.reward == float(share == 1)
        assert graded.numbers == {"instructions": share}
        assert grade(response, COMMA, FIVE_WORDS, score="share").reward == share


def test_instructions_stand_in_the_gold_or_in_the_fields_of_the_row() -> None:
    fields = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": "[null]"}
    assert InstructionFollowing().grade("a b", Problem(id="x", prompt="?", gold="", data=fields)).correct
    with pytest.raises(ValueError, match="has no 'instruction_id_list'"):
        InstructionFollowing().grade("a b", Problem(id="x", prompt="?", gold="a"))


def test_a_loose_reading_forgives_a_first_line_and_asterisks() -> None:
    title = ("startend:end_checker", {"end_phrase": "the end"})
    assert not grade("Sure, here it is:\none *two* three four five", COMMA).correct
    assert grade("Sure, here it is:\none *two* three four five", COMMA, strict=False).correct
    assert not grade("It was so. **the end**", title).correct
    assert grade("It was so. **the end**", title, strict=False).correct


def test_a_thought_is_not_checked() -> None:
    assert grade("<think>one, two</think>one two", COMMA).correct
    assert grade("<think>one two</think>", COMMA).outcome == "no_answer"


def test_the_language_is_detected_the_same_way_every_time_and_symbols_have_none() -> None:
    german = ("language:response_language", {"language": "de"})
    assert {grade(GERMAN, german).reward for _ in range(20)} == {1.0}
    for text in ("This is a short sentence on the weather.", "12345 !!! 678"):
        assert not grade(text, german).correct
    assert not grade("12345", ("change_case:english_capital", {})).correct


def test_signs_are_counted_where_the_library_would_draw_a_letter() -> None:
    for relation, right, wrong in (("at least", "wow!!", "wow!"), ("less than", "wow!", "wow!!")):
        frequency = {"letter": "!", "let_frequency": 2, "let_relation": relation}
        assert grade(right, ("keywords:letter_frequency", frequency)).correct
        assert not grade(wrong, ("keywords:letter_frequency", frequency)).correct


def test_grading_draws_nothing_from_the_generator_of_others() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    frequency = {"letter": "a", "let_frequency": 1, "let_relation": "at least"}
    grade(GERMAN, COMMA, ("keywords:letter_frequency", frequency))
    assert random.random() == expected


def test_the_25_published_instructions_are_known_and_others_are_refused() -> None:
    assert len(_load_check_classes()) == 25
    with pytest.raises(ValueError, match="did you mean 'punctuation:no_comma'"):
        grade("a", ("punctuation:no_commas", {}))
    with pytest.raises(ValueError, match="have its arguments num_words"):
        grade("a", ("length_constraints:number_words", {"relation": "at least"}))


def test_without_the_data_for_sentences_instructions_about_them_are_ungraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nltk

    _load_check_classes()
    from lm_eval.tasks.ifeval import instructions_util

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    instructions_util._get_sentence_tokenizer.cache_clear()
    two_sentences = ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"})
    assert missing_requirements([InstructionFollowing()]) == [MISSING_SENTENCE_DATA]
    with pytest.raises(Unavailable, match="punkt_tab"):
        grade("One. Two.", two_sentences)
    data = tmp_path / "tokenizers" / "punkt_tab" / "english"
    data.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (data / name).write_text("")
    assert missing_requirements([InstructionFollowing()]) == []
    assert grade("This is one. That is two.", two_sentences).correct
    assert not grade("This is one.", two_sentences).correct
