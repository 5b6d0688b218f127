"""Promises of tokenizers, added tokens and step ends:

* a tokenizer of characters encodes its alphabet and nothing else, and is the same when it is loaded
  elsewhere;
* an added token begins as the mean of the tokens of its word, all known tokens keep their weights and ids,
  and what was trained comes back unchanged;
* the offset of a token is the length of the text that earlier tokens show, for any ids of any tokenizer;
* step ends rise to the number of tokens, and a token over a boundary belongs to the step in which it
  begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from tests.support.chat_models import END, bpe_tokenizer, random_model, save_as_on_the_hub
from treetune.config.jsonnet import load
from treetune.models.policy_files import read_policy, write_for_engine, write_policy
from treetune.models.pretrained import PretrainedModel
from treetune.models.sources import TinyModel
from treetune.models.tokenizer import (
    add_tokens,
    character_tokenizer,
    codec_of,
    embed_tokens,
    step_ends,
    token_offsets,
)
from treetune.threads.format import TAGS, TagIds
from treetune.vocabulary import TextCodec

ALPHABET = "0123456789+*=#\n é∑🙂<>"
CODEC = codec_of(character_tokenizer(ALPHABET, 64))


@given(st.text(alphabet=ALPHABET))
def test_text_over_the_alphabet_is_one_token_a_character_and_back(text: str) -> None:
    ids = CODEC.encode(text)
    assert len(ids) == len(text)
    assert CODEC.decode(ids) == text
    assert CODEC.decode((*ids, CODEC.eos_id)) == text


def test_ids_are_pad_end_and_the_alphabet_in_its_order_and_no_other_character_has_one() -> None:
    tokenizer = character_tokenizer("ab", 64)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 4)
    assert codec_of(tokenizer).encode("ba") == (3, 2)
    with pytest.raises(ValueError, match="cannot encode 'abx'"):
        codec_of(tokenizer).encode("abx")


def test_a_saved_tokenizer_is_the_same_when_it_is_loaded_without_our_code(tmp_path: Path) -> None:
    character_tokenizer(ALPHABET, 64).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    codec = codec_of(loaded)
    assert codec.encode(ALPHABET) == CODEC.encode(ALPHABET)
    assert codec.decode(codec.encode(ALPHABET)) == ALPHABET
    assert (codec.eos_id, loaded.pad_token_id, loaded.model_max_length) == (1, 0, 64)


def test_only_a_tokenizer_of_single_characters_counts_as_one(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "a": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    digits = Tokenizer(models.WordLevel({"<unk>": 0, "1": 1, "2": 2}, unk_token="<unk>"))
    digits.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizers = {
        "words": PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>"),
        "digits between spaces": PreTrainedTokenizerFast(tokenizer_object=digits, unk_token="<unk>"),
        "characters": character_tokenizer("ab", 64),
    }
    tokens = {}
    for name, tokenizer in tokenizers.items():
        tokenizer.save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text("{}")
        tokens[name] = PretrainedModel(name_or_path=str(tmp_path / name)).single_tokens()
    assert tokens == {
        "words": None,
        "digits between spaces": None,
        "characters": frozenset({"<pad>", "<eos>", "a", "b"}),
    }


def test_an_alphabet_with_the_characters_of_a_special_token_does_not_encode_it(tmp_path: Path) -> None:
    character_tokenizer("<pade>", 64).save_pretrained(tmp_path)
    codec = codec_of(AutoTokenizer.from_pretrained(tmp_path))
    assert codec.encode("<pad>") == (2, 3, 4, 5, 7)
    assert codec.decode(codec.encode("<pad>")) == "<pad>"


@pytest.mark.parametrize(
    ("alphabet", "message"),
    [("", "empty"), ("abca", "'a' more than once"), ("<pad>⟨⟩", "has all characters of '<pad>'")],
)
def test_an_ambiguous_or_empty_alphabet_is_refused(alphabet: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        character_tokenizer(alphabet, 64)


TINY = TinyModel(layers=1, hidden_size=64, heads=2, intermediate_size=64, added_tokens=TAGS)


def digits() -> str:
    return "0123456789+=#\n"


def hub_model(
    folder: Path, rows: int | None = None, **changes: Any
) -> tuple[PreTrainedModel, PretrainedModel]:
    """A BPE model with `rows` embeddings (by default one per token), and the source that reads it."""
    tokenizer = bpe_tokenizer()
    model = random_model("qwen3", rows or len(tokenizer), **changes)
    save_as_on_the_hub(folder, model, tokenizer)
    return model, PretrainedModel(name_or_path=str(folder), added_tokens=TAGS)


def embeddings_and_head(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


def test_the_fragment_adds_the_tags_of_threads_in_their_order() -> None:
    assert load(["configs/models/thread_tokens.jsonnet"]).data == {"model": {"added_tokens": list(TAGS)}}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_new_token_begins_as_the_mean_of_the_tokens_of_its_word(tmp_path: Path, tied: bool) -> None:
    before, source = hub_model(tmp_path, tie_word_embeddings=tied)
    after, tokenizer, without_tags = source.load_model(0, str), source.load_tokenizer(str), bpe_tokenizer()
    rows = len(without_tags)
    for old, new in zip(embeddings_and_head(before), embeddings_and_head(after)):
        assert torch.equal(new[:rows], old), "known tokens keep their weights"
        for token, word in (("<Parallel>", "Parallel"), ("</Parallel>", "/Parallel"), ("</Think>", "/Think")):
            ids = without_tags.encode(word)
            assert len(ids) > 1
            expected = sum(old[i] for i in ids) / len(ids)
            torch.testing.assert_close(new[tokenizer.convert_tokens_to_ids(token)], expected)
        beyond = new[rows + len(TAGS) :]
        assert len(beyond) and torch.allclose(beyond, old.mean(0).expand_as(beyond), atol=1e-7)
    embeddings, head = embeddings_and_head(after)
    assert (embeddings is head) == tied == after.config.tie_word_embeddings
    assert after.config.vocab_size == len(embeddings) == 320 and rows == 300, "a multiple of 64"


def test_a_head_that_has_a_bias_gets_its_mean_too() -> None:
    model = random_model("qwen3", 300, tie_word_embeddings=False)
    model.lm_head = torch.nn.Linear(64, 300)
    old = model.lm_head.bias.detach().clone()
    embed_tokens(model, {300: (7, 9)})
    assert torch.allclose(model.lm_head.bias[300], (old[7] + old[9]) / 2)
    assert torch.equal(model.lm_head.bias[:300], old)


def test_a_table_with_room_is_not_resized(tmp_path: Path) -> None:
    before, source = hub_model(tmp_path, rows=330)
    (old, _), (new, _) = embeddings_and_head(before), embeddings_and_head(source.load_model(0, str))
    assert new.shape == old.shape
    changed = (new != old).any(1)
    assert changed.nonzero().flatten().tolist() == [*range(300, 312)]


def test_two_loads_give_the_same_weights_and_draw_nothing_from_the_runs_stream(tmp_path: Path) -> None:
    _, source = hub_model(tmp_path)
    torch.manual_seed(1)
    weights = source.load_model(0, str).state_dict()
    torch.manual_seed(2)
    expected = torch.rand(1)
    torch.manual_seed(2)
    weights_of_second_load = source.load_model(0, str).state_dict()
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(weight, weights_of_second_load[name]) for name, weight in weights.items())


def test_in_bfloat16_the_mean_is_taken_in_float32(tmp_path: Path) -> None:
    _, source = hub_model(tmp_path)
    model = replace(source, dtype="bfloat16").load_model(0, str)
    table = embeddings_and_head(model)[0]
    ids = bpe_tokenizer().encode("Conclusion")
    token = source.load_tokenizer(str).convert_tokens_to_ids("<Conclusion>")
    assert torch.equal(table[token], table[ids].float().mean(0).bfloat16())


@pytest.mark.parametrize("write", [write_policy, write_for_engine])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_trained_embeddings_of_added_tokens_come_back_unchanged_and_load_without_our_code(
    tmp_path: Path, write: Callable[..., None], tied: bool
) -> None:
    _, source = hub_model(tmp_path / "hub", tie_word_embeddings=tied)
    model, tokenizer = source.load_model(0, str), source.load_tokenizer(str)
    with torch.no_grad():
        for table in {id(t): t for t in embeddings_and_head(model)}.values():
            table.add_(torch.randn_like(table))  # the tags are no longer means of other tokens
    write(dict(model.named_parameters()), model.config, tokenizer, tmp_path / "saved")

    again = replace(source, name_or_path=str(tmp_path / "saved"))
    assert source.unlearned_tokens() == TAGS and again.unlearned_tokens() == ()
    text = "<think>Is it <Think>12?</Think></Parallel>\n"
    for loaded in (again.load_tokenizer(str), AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert loaded.get_vocab() == tokenizer.get_vocab()
        assert loaded.encode(text) == tokenizer.encode(text)
    for reloaded in (again.load_model(0, str), AutoModelForCausalLM.from_pretrained(tmp_path / "saved")):
        assert all(
            torch.equal(new, old)
            for new, old in zip(embeddings_and_head(reloaded), embeddings_and_head(model))
        )
    weights, config = read_policy(tmp_path / "saved")
    assert config.vocab_size == 320 and all(len(w) == 320 for n, w in weights.items() if "embed_tokens" in n)


def test_a_tiny_model_has_rows_for_the_tags_and_they_come_back(tmp_path: Path) -> None:
    model, tokenizer = TINY.load_model(0, digits), TINY.load_tokenizer(digits)
    assert tokenizer.convert_tokens_to_ids(list(TAGS)) == [*range(16, 28)], "behind the alphabet"
    assert len(embeddings_and_head(model)[0]) == len(tokenizer) == 28
    write_policy(dict(model.named_parameters()), model.config, tokenizer, tmp_path / "policy")
    source = PretrainedModel(name_or_path=str(tmp_path / "policy"), added_tokens=TAGS)
    assert source.load_tokenizer(str).get_vocab() == tokenizer.get_vocab()
    assert all(
        torch.equal(new, old)
        for new, old in zip(embeddings_and_head(source.load_model(0, str)), embeddings_and_head(model))
    )


def test_existing_tokens_keep_their_ids_and_weights_beside_new_ones(tmp_path: Path) -> None:
    _, source = hub_model(tmp_path / "hub")
    with_four_tags = replace(source, added_tokens=TAGS[:4])
    model, tokenizer = with_four_tags.load_model(0, str), with_four_tags.load_tokenizer(str)
    write_policy(dict(model.named_parameters()), model.config, tokenizer, tmp_path / "saved")
    more = replace(source, name_or_path=str(tmp_path / "saved"))
    assert more.unlearned_tokens() == TAGS[4:]
    grown, vocabulary = more.load_model(0, str), more.load_tokenizer(str).get_vocab()
    assert [vocabulary[tag] for tag in TAGS] == [*range(300, 312)]
    assert torch.equal(embeddings_and_head(grown)[0][:304], embeddings_and_head(model)[0][:304])


@lru_cache
def codecs() -> list[TextCodec]:
    """Make a codec of characters and one of a BPE, both with the tags."""
    tokenizer = bpe_tokenizer()
    add_tokens(tokenizer, TAGS)
    return [codec_of(TINY.load_tokenizer(digits)), codec_of(tokenizer)]


@given(st.lists(st.sampled_from([*TAGS, "1", "2", "12", "=", "\n", "+3"]), max_size=12))
def test_every_tag_is_one_token_wherever_it_stands_and_is_shown(pieces: list[str]) -> None:
    text = "".join(pieces)
    for codec in codecs():
        ids = codec.encode(text)
        assert codec.decode(ids) == text
        single = {codec.encode(tag)[0]: tag for tag in TAGS}
        assert [single[i] for i in ids if i in single] == [piece for piece in pieces if piece in TAGS]
        offsets = token_offsets(ids, codec, codec.decode(ids))
        assert all(text.startswith(single[i], offset) for i, offset in zip(ids, offsets) if i in single)


def test_the_rollout_finds_its_tags_only_where_they_are_tokens() -> None:
    for codec in codecs():
        assert codec.decode((TagIds.of(codec.encode).end_thread,)) == "</Thread>"
    assert TagIds.of(codec_of(bpe_tokenizer()).encode) is None


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (("",), "added_tokens has '': a token needs characters"),
        (("<a b>",), "'<a b>': a token needs characters, and no white space"),
        (("<a>", "</a>", "<a>"), "'<a>' more than once"),
    ],
)
def test_empty_spaced_and_repeated_tokens_are_refused(tokens: tuple[str, ...], message: str) -> None:
    for source, settings in ((TinyModel, {}), (PretrainedModel, {"name_or_path": "gpt2"})):
        with pytest.raises(ValueError, match=message):
            source(added_tokens=tokens, **settings)


def test_tokens_that_text_does_not_show_and_tables_with_too_few_rows_are_refused(tmp_path: Path) -> None:
    _, source = hub_model(tmp_path, rows=290)
    with pytest.raises(ValueError, match=r"'<\|endoftext\|>', which is a special token of the tokenizer"):
        replace(source, added_tokens=(END,)).load_tokenizer(str)
    with pytest.raises(ValueError, match="embeds 290 tokens, and its tokenizer has 300"):
        source.load_model(0, str)


@pytest.mark.parametrize(("token", "word"), [("<Go>", "Go"), ("<>", "")])
def test_a_word_that_the_tokenizer_cannot_write_is_named(tmp_path: Path, token: str, word: str) -> None:
    without_added_tokens = replace(TINY, added_tokens=())
    model, tokenizer = without_added_tokens.load_model(0, digits), without_added_tokens.load_tokenizer(digits)
    write_policy(dict(model.named_parameters()), model.config, tokenizer, tmp_path / "policy")
    source = PretrainedModel(name_or_path=str(tmp_path / "policy"), added_tokens=(token,))
    message = f"'{token}', whose embedding would be the mean of the tokens of '{word}'"
    with pytest.raises(ValueError, match=message):
        source.load_model(0, digits)


def codec_of_backend(backend: Tokenizer) -> TextCodec:
    backend.add_special_tokens(["<eos>"])
    return codec_of(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"))


def byte_level() -> TextCodec:
    """Make a codec like GPT-2's and Qwen's: bytes and some strings are tokens; Ġ is a space, Ċ a newline."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ċ", "#"), ("Ġ", "a"), ("Ð", "¶"), ("ab", "Ċ"), ("ð", "Ł")]
    vocabulary = {token: i for i, token in enumerate([*letters, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return codec_of_backend(backend)


def sentence_pieces() -> TextCodec:
    """Make a codec like Llama 2's.

    Words begin with a mark for the space, which the first word of a text loses, and characters that are no
    tokens are spelt in bytes.
    """
    pieces = ["▁", "▁a", "a", "b", "ab", "▁ab", "\n", "#", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return codec_of_backend(backend)


CODECS = {
    "characters": codec_of(character_tokenizer("ab#é\n", 64)),
    "byte level": byte_level(),
    "sentence pieces": sentence_pieces(),
}
SIZES = {"characters": 7, "byte level": 263, "sentence pieces": 265}


def ends_of(ids: Sequence[int], boundaries: Sequence[int], codec: TextCodec) -> tuple[int, ...]:
    return step_ends(ids, boundaries, codec, codec.decode(ids))


def offsets_by_definition(ids: Sequence[int], codec: TextCodec) -> list[int]:
    """Compute for each token how much of the text all earlier tokens show already."""
    text = codec.decode(ids)
    offsets = [0]
    for end in range(1, len(ids)):
        text_of_earlier = codec.decode(ids[:end])
        shown = 0
        while shown < min(len(text_of_earlier), len(text)) and text_of_earlier[shown] == text[shown]:
            shown += 1
        offsets.append(max(offsets[-1], shown))
    return offsets[: len(ids)]


def test_the_text_of_broken_bytes_depends_on_the_bytes_before_them() -> None:
    codec, ids = CODECS["sentence pieces"], [202, 136, 136]
    assert "".join(codec.decode([token]) for token in ids) == codec.decode(ids) != codec.decode(ids[:2])
    assert token_offsets(ids, codec, codec.decode(ids)) == [0, 1, 1]


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data())
def test_an_offset_is_the_length_of_the_text_of_earlier_tokens_for_any_ids(
    name: str, data: st.DataObject
) -> None:
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


def test_a_token_over_a_boundary_belongs_to_the_step_that_it_begins_in_and_others_are_dropped() -> None:
    codec = CODECS["byte level"]
    ids = codec.encode("ab\nb\n#a")
    assert [codec.decode([i]) for i in ids] == ["ab\n", "b", "\n#", "a"]
    assert ends_of((*ids, codec.eos_id), [0, 3, 5, 7], codec) == (1, 3, 5)
    assert ends_of(codec.encode("ab\nb"), [0, 1, 2, 3, 4], codec) == (1, 2)


@pytest.mark.parametrize(
    ("text", "ended", "boundaries", "ends"),
    [
        ("a\nb", True, [0, 2, 3], (2, 4)),
        ("", True, [0], (1,)),
        ("", False, [0], ()),
        # The end of the text is told twice: the end token is a step of its own.
        ("a\nb", True, [0, 2, 3, 3], (2, 3, 4)),
        ("a\nb", False, [0, 2, 3, 3], (2, 3)),
        ("", True, [0, 0], (1,)),
    ],
)
def test_the_end_token_belongs_to_the_last_step_or_is_a_separate_step(
    text: str, ended: bool, boundaries: list[int], ends: tuple[int, ...]
) -> None:
    codec = CODECS["characters"]
    assert ends_of((*codec.encode(text), *([codec.eos_id] if ended else [])), boundaries, codec) == ends


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
