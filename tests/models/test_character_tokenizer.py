from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from treetune.models.tokenizer import character_tokenizer, codec_of

ALPHABET = "0123456789+*=#\n é∑🙂<>"
CODEC = codec_of(character_tokenizer(ALPHABET, 64))


@given(st.text(alphabet=ALPHABET))
def test_text_over_the_alphabet_is_one_token_a_character_and_back(text: str) -> None:
    ids = CODEC.encode(text)
    assert len(ids) == len(text)
    assert CODEC.decode(ids) == text
    assert CODEC.decode((*ids, CODEC.eos_id)) == text


def test_ids_are_pad_end_and_the_alphabet_in_its_order() -> None:
    tokenizer = character_tokenizer("ab", 64)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 4)
    assert codec_of(tokenizer).encode("ba") == (3, 2)


def test_a_character_outside_the_alphabet_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="cannot encode '12x'"):
        codec_of(character_tokenizer("12", 64)).encode("12x")


def test_a_saved_tokenizer_is_the_same_when_it_is_loaded_without_our_code(tmp_path: Path) -> None:
    character_tokenizer(ALPHABET, 64).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    codec = codec_of(loaded)
    assert codec.encode(ALPHABET) == CODEC.encode(ALPHABET)
    assert codec.decode(codec.encode(ALPHABET)) == ALPHABET
    assert (codec.eos_id, loaded.pad_token_id, loaded.model_max_length) == (1, 0, 64)


def test_an_alphabet_with_the_signs_of_a_special_token_spells_none(tmp_path: Path) -> None:
    character_tokenizer("<pade>", 64).save_pretrained(tmp_path)
    codec = codec_of(AutoTokenizer.from_pretrained(tmp_path))
    assert codec.encode("<pad>") == (2, 3, 4, 5, 7)
    assert codec.decode(codec.encode("<pad>")) == "<pad>"


@pytest.mark.parametrize(
    ("alphabet", "told"), [("", "empty"), ("abca", "'a' more than once"), ("<pad>⟨⟩", "can spell '<pad>'")]
)
def test_an_alphabet_that_cannot_be_told_apart_is_refused(alphabet: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        character_tokenizer(alphabet, 64)
