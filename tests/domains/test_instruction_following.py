"""Instructions are checked by the library of IFEval, the same way every time and without a network."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from treetune.domains.graders.instruction_following import NO_SENTENCES, InstructionFollowing, _library
from treetune.exceptions import Unavailable
from treetune.findings import missing_requirements
from treetune.vocabulary import Grade, Problem

GERMAN = "Das ist ein kurzer Satz über das Wetter in Hamburg."


def problem(*instructions: tuple[str, dict[str, Any]]) -> Problem:
    ids, arguments = [one for one, _ in instructions], [given for _, given in instructions]
    gold = json.dumps({"instruction_id_list": ids, "kwargs": arguments})
    return Problem(id="x", prompt="?", gold=gold)


def grade(text: str, *instructions: tuple[str, dict[str, Any]], **settings: Any) -> Grade:
    return InstructionFollowing(**settings).grade(text, problem(*instructions))


COMMA: tuple[str, dict[str, Any]] = ("punctuation:no_comma", {})
FIVE_WORDS: tuple[str, dict[str, Any]] = (
    "length_constraints:number_words",
    {"num_words": 5, "relation": "at least", "keywords": None},
)


def test_all_instructions_count_or_their_share() -> None:
    for text, share in (("one two three four five", 1.0), ("one, two three four five", 0.5), ("a, b", 0.0)):
        found = grade(text, COMMA, FIVE_WORDS)
        assert found.reward == float(share == 1)
        assert found.numbers == {"instructions": share}
        assert grade(text, COMMA, FIVE_WORDS, score="share").reward == share


def test_instructions_stand_in_the_gold_or_in_the_fields_of_the_row() -> None:
    held = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": "[null]"}
    assert InstructionFollowing().grade("a b", Problem(id="x", prompt="?", gold="", data=held)).correct
    with pytest.raises(ValueError, match="has no 'instruction_id_list'"):
        InstructionFollowing().grade("a b", Problem(id="x", prompt="?", gold="a"))


def test_a_loose_reading_forgives_a_first_line_and_asterisks() -> None:
    title = ("startend:end_checker", {"end_phrase": "the end"})
    assert not grade("Sure, here it is:\none *two* three four five", COMMA).correct
    assert grade("Sure, here it is:\none *two* three four five", COMMA, strict=False).correct
    assert not grade("It was so. **the end**", title).correct
    assert grade("It was so. **the end**", title, strict=False).correct


def test_what_was_only_thought_is_not_checked() -> None:
    assert grade("<think>one, two</think>one two", COMMA).correct
    assert grade("<think>one two</think>", COMMA).outcome == "no_answer"


def test_the_language_is_told_the_same_way_every_time_and_none_where_there_is_none() -> None:
    german = ("language:response_language", {"language": "de"})
    assert {grade(GERMAN, german).reward for _ in range(20)} == {1.0}
    for text in ("This is a short sentence on the weather.", "12345 !!! 678"):
        assert not grade(text, german).correct
    assert not grade("12345", ("change_case:english_capital", {})).correct


def test_signs_are_counted_where_the_library_would_draw_a_letter() -> None:
    for relation, right, wrong in (("at least", "wow!!", "wow!"), ("less than", "wow!", "wow!!")):
        two = {"letter": "!", "let_frequency": 2, "let_relation": relation}
        assert grade(right, ("keywords:letter_frequency", two)).correct
        assert not grade(wrong, ("keywords:letter_frequency", two)).correct


def test_grading_draws_nothing_from_the_generator_of_others() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    frequency = {"letter": "a", "let_frequency": 1, "let_relation": "at least"}
    grade(GERMAN, COMMA, ("keywords:letter_frequency", frequency))
    assert random.random() == expected


def test_instructions_are_those_of_the_published_rows_and_others_are_told() -> None:
    assert len(_library()) == 25
    with pytest.raises(ValueError, match="did you mean 'punctuation:no_comma'"):
        grade("a", ("punctuation:no_commas", {}))
    with pytest.raises(ValueError, match="have its arguments num_words"):
        grade("a", ("length_constraints:number_words", {"relation": "at least"}))


def test_without_the_data_for_sentences_nothing_is_said_about_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nltk

    _library()
    from lm_eval.tasks.ifeval import instructions_util

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    instructions_util._get_sentence_tokenizer.cache_clear()
    two = ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"})
    assert missing_requirements([InstructionFollowing()]) == [NO_SENTENCES]
    with pytest.raises(Unavailable, match="punkt_tab"):
        grade("One. Two.", two)
    data = tmp_path / "tokenizers" / "punkt_tab" / "english"
    data.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (data / name).write_text("")
    assert missing_requirements([InstructionFollowing()]) == []
    assert grade("This is one. That is two.", two).correct
    assert not grade("This is one.", two).correct
