from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treetune.models.tokenizer import character_tokenizer, codec_of, step_ends, token_offsets
from treetune.vocabulary import TextCodec

LINES = "\n"


def wrapped(backend: Tokenizer) -> TextCodec:
    backend.add_special_tokens(["<eos>"])
    return codec_of(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"))


def byte_level() -> TextCodec:
    """Like GPT-2's and Qwen's: every byte is a token, and some strings are; Ġ is a space, Ċ a newline."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ċ", "#"), ("Ġ", "a"), ("Ð", "¶"), ("ab", "Ċ"), ("ð", "Ł")]
    vocabulary = {token: i for i, token in enumerate([*letters, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return wrapped(backend)


def sentence_pieces() -> TextCodec:
    """Like Llama 2's: words begin with a mark for the space, which the first word of a text loses;
    characters that are no tokens are spelt in bytes."""
    pieces = ["▁", "▁a", "a", "b", "ab", "▁ab", "\n", "#", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrapped(backend)


CODECS = {
    "characters": codec_of(character_tokenizer("ab#é\n", 64)),
    "byte level": byte_level(),
    "sentence pieces": sentence_pieces(),
}
SIZES = {"characters": 7, "byte level": 263, "sentence pieces": 265}


def ends_of(ids: Sequence[int], boundaries: Sequence[int], codec: TextCodec) -> tuple[int, ...]:
    return step_ends(ids, boundaries, codec, codec.decode(ids))


def offsets_by_definition(ids: Sequence[int], codec: TextCodec) -> list[int]:
    """How much of the text all tokens before this one show already."""
    text = codec.decode(ids)
    offsets = [0]
    for end in range(1, len(ids)):
        both = zip(codec.decode(ids[:end]), text)
        common = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], both)))
        offsets.append(max(offsets[-1], common))
    return offsets[: len(ids)]


def test_broken_bytes_show_what_they_show_with_those_before_them() -> None:
    codec, ids = CODECS["sentence pieces"], [202, 136, 136]
    assert "".join(codec.decode([token]) for token in ids) == codec.decode(ids) != codec.decode(ids[:2])
    assert token_offsets(ids, codec, codec.decode(ids)) == [0, 1, 1]


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data())
def test_offsets_are_what_earlier_tokens_show_for_any_ids(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    ids = data.draw(st.lists(st.integers(0, SIZES[name] - 1), max_size=12))
    assert token_offsets(ids, codec, codec.decode(ids)) == offsets_by_definition(ids, codec)


@pytest.mark.parametrize("name", ["byte level", "sentence pieces"])
@given(text=st.text(alphabet="ab\n#éж🙂", max_size=20))
@example(text="a🙂\n🙂b")
def test_every_byte_of_a_character_has_the_characters_offset(name: str, text: str) -> None:
    codec = CODECS[name]
    ids = codec.encode(text)
    text = codec.decode(ids)
    offsets = token_offsets(ids, codec, codec.decode(ids))
    tokens = {"🙂": (3, 4), "ж": (1, 2), "é": (1, 2)}
    for index, character in enumerate(text):
        fewest, most = tokens.get(character, (0, 1))
        assert fewest <= offsets.count(index) <= most


def test_a_token_over_a_boundary_belongs_to_the_step_that_it_begins_in() -> None:
    codec = CODECS["byte level"]
    ids = codec.encode("ab\nb\n#a")
    assert [codec.decode([i]) for i in ids] == ["ab\n", "b", "\n#", "a"]
    assert ends_of((*ids, codec.eos_id), [0, 3, 5, 7], codec) == (1, 3, 5)


def test_a_step_in_which_no_token_begins_is_dropped() -> None:
    codec = CODECS["byte level"]
    ids = codec.encode("ab\nb")
    assert ends_of(ids, [0, 1, 2, 3, 4], codec) == (1, 2)


def test_the_end_token_belongs_to_the_last_step() -> None:
    codec = CODECS["characters"]
    assert ends_of((*codec.encode("a\nb"), codec.eos_id), [0, 2, 3], codec) == (2, 4)
    assert ends_of((codec.eos_id,), [0], codec) == (1,)
    assert ends_of((), [0], codec) == ()


def test_the_end_token_is_a_step_of_its_own_where_the_end_of_the_text_is_told_twice() -> None:
    codec = CODECS["characters"]
    assert ends_of((*codec.encode("a\nb"), codec.eos_id), [0, 2, 3, 3], codec) == (2, 3, 4)
    assert ends_of(codec.encode("a\nb"), [0, 2, 3, 3], codec) == (2, 3)
    assert ends_of((codec.eos_id,), [0, 0], codec) == (1,)


def test_boundaries_of_another_text_are_refused() -> None:
    codec = CODECS["characters"]
    for boundaries in ([0, 2], [1, 3], []):
        with pytest.raises(ValueError, match="3 characters"):
            ends_of(codec.encode("a\nb"), boundaries, codec)


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data())
def test_step_ends_rise_to_the_number_of_tokens_for_any_ids(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    ids = data.draw(st.lists(st.integers(0, SIZES[name] - 1), min_size=1, max_size=12))
    text = codec.decode(ids)
    inner = data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=4)) if len(text) > 1 else set()
    ends = ends_of(ids, sorted({0, len(text), *inner}), codec)
    assert ends[-1] == len(ids)
    assert all(a < b for a, b in itertools.pairwise((0, *ends)))
