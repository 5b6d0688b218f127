from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.models.chat_models import END, bpe_tokenizer, random_model, save_as_on_the_hub
from treetune.config.jsonnet import load
from treetune.models.policy_files import read_policy, write_for_engine, write_policy
from treetune.models.pretrained import PretrainedModel
from treetune.models.sources import TinyModel
from treetune.models.tokenizer import add_tokens, codec_of, embed_tokens, token_offsets
from treetune.vocabulary import TextCodec
from treetune_threads.format import TAGS, TagIds

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


def tables(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


def test_the_fragment_adds_the_tags_of_threads_in_their_order() -> None:
    assert load(["configs/models/thread_tokens.jsonnet"]).data == {"model": {"added_tokens": list(TAGS)}}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_new_token_begins_as_the_mean_of_the_tokens_of_its_word(tmp_path: Path, tied: bool) -> None:
    before, source = hub_model(tmp_path, tie_word_embeddings=tied)
    after, tokenizer, own = source.load_model(0, str), source.load_tokenizer(str), bpe_tokenizer()
    rows = len(own)
    for old, new in zip(tables(before), tables(after)):
        assert torch.equal(new[:rows], old), "known tokens keep their weights"
        for token, word in (("<Parallel>", "Parallel"), ("</Parallel>", "/Parallel"), ("</Think>", "/Think")):
            ids = own.encode(word)
            assert len(ids) > 1
            expected = sum(old[i] for i in ids) / len(ids)
            torch.testing.assert_close(new[tokenizer.convert_tokens_to_ids(token)], expected)
        beyond = new[rows + len(TAGS) :]
        assert len(beyond) and torch.allclose(beyond, old.mean(0).expand_as(beyond), atol=1e-7)
    embeddings, head = tables(after)
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
    after = source.load_model(0, str)
    (old, _), (new, _) = tables(before), tables(after)
    assert new.shape == old.shape
    assert torch.equal(new[:300], old[:300]) and torch.equal(new[312:], old[312:])
    assert not torch.isclose(new[300:312], old[300:312]).all(1).any()


def test_two_loads_give_the_same_weights_and_draw_nothing_from_the_runs_stream(tmp_path: Path) -> None:
    _, source = hub_model(tmp_path)
    torch.manual_seed(1)
    first = source.load_model(0, str).state_dict()
    torch.manual_seed(2)
    expected = torch.rand(1)
    torch.manual_seed(2)
    second = source.load_model(0, str).state_dict()
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


def test_in_bfloat16_the_mean_is_taken_in_float32(tmp_path: Path) -> None:
    _, source = hub_model(tmp_path)
    model = replace(source, dtype="bfloat16").load_model(0, str)
    table = tables(model)[0]
    ids = bpe_tokenizer().encode("Conclusion")
    token = source.load_tokenizer(str).convert_tokens_to_ids("<Conclusion>")
    assert torch.equal(table[token], table[ids].float().mean(0).bfloat16())


@pytest.mark.parametrize("write", ["write_policy", "write_for_engine"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_what_was_trained_on_comes_back_unchanged_and_loads_without_our_code(
    tmp_path: Path, write: str, tied: bool
) -> None:
    _, source = hub_model(tmp_path / "hub", tie_word_embeddings=tied)
    model, tokenizer = source.load_model(0, str), source.load_tokenizer(str)
    with torch.no_grad():
        for table in {id(t): t for t in tables(model)}.values():
            table.add_(torch.randn_like(table))  # the tags are no means of anything any more
    saved: Callable[..., None] = {"write_policy": write_policy, "write_for_engine": write_for_engine}[write]
    saved(dict(model.named_parameters()), model.config, tokenizer, tmp_path / "saved")

    again = replace(source, name_or_path=str(tmp_path / "saved"))
    assert source.unlearned_tokens() == TAGS and again.unlearned_tokens() == ()
    plain = AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "<think>Is it <Think>12?</Think></Parallel>\n"
    for loaded in (again.load_tokenizer(str), plain):
        assert loaded.get_vocab() == tokenizer.get_vocab()
        assert loaded.encode(text) == tokenizer.encode(text)
    for reloaded in (
        again.load_model(0, str),
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved"),
    ):
        assert all(torch.equal(new, old) for new, old in zip(tables(reloaded), tables(model)))
    weights, config = read_policy(tmp_path / "saved")
    assert config.vocab_size == 320 and all(len(w) == 320 for n, w in weights.items() if "embed_tokens" in n)


def test_a_tiny_model_has_rows_for_the_tags_and_they_come_back(tmp_path: Path) -> None:
    model, tokenizer = TINY.load_model(0, digits), TINY.load_tokenizer(digits)
    assert tokenizer.convert_tokens_to_ids(list(TAGS)) == [*range(16, 28)], "behind the alphabet"
    assert len(tables(model)[0]) == len(tokenizer) == 28
    write_policy(dict(model.named_parameters()), model.config, tokenizer, tmp_path / "policy")
    source = PretrainedModel(name_or_path=str(tmp_path / "policy"), added_tokens=TAGS)
    assert source.load_tokenizer(str).get_vocab() == tokenizer.get_vocab()
    assert all(torch.equal(new, old) for new, old in zip(tables(source.load_model(0, str)), tables(model)))


def test_tokens_that_were_there_keep_their_ids_beside_new_ones(tmp_path: Path) -> None:
    _, source = hub_model(tmp_path / "hub")
    first = replace(source, added_tokens=TAGS[:4])
    model, tokenizer = first.load_model(0, str), first.load_tokenizer(str)
    write_policy(dict(model.named_parameters()), model.config, tokenizer, tmp_path / "saved")
    more = replace(source, name_or_path=str(tmp_path / "saved"))
    assert more.unlearned_tokens() == TAGS[4:]
    grown, vocabulary = more.load_model(0, str), more.load_tokenizer(str).get_vocab()
    assert [vocabulary[tag] for tag in TAGS] == [*range(300, 312)]
    assert torch.equal(tables(grown)[0][:304], tables(model)[0][:304])


@lru_cache
def codecs() -> list[TextCodec]:
    """Of characters, and of a BPE."""
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
        found = TagIds.of(codec.encode)
        assert found is not None and codec.decode((found.end_thread,)) == "</Thread>"
    assert TagIds.of(codec_of(bpe_tokenizer()).encode) is None


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        (("",), "added_tokens has '': a token needs characters"),
        (("<a b>",), "'<a b>': a token needs characters, and no white space"),
        (("<a>", "</a>", "<a>"), "'<a>' more than once"),
    ],
)
def test_what_is_no_token_is_refused(tokens: tuple[str, ...], told: str) -> None:
    for source in (TinyModel, lambda **given: PretrainedModel(name_or_path="gpt2", **given)):
        with pytest.raises(ValueError, match=told):
            source(added_tokens=tokens)


def test_a_special_token_is_refused_because_text_does_not_show_it(tmp_path: Path) -> None:
    _, source = hub_model(tmp_path)
    with pytest.raises(ValueError, match=r"'<\|endoftext\|>', which the tokenizer has as a special token"):
        replace(source, added_tokens=(END,)).load_tokenizer(str)


@pytest.mark.parametrize(("token", "word"), [("<Go>", "Go"), ("<>", "")])
def test_a_word_that_the_tokenizer_cannot_write_is_named(tmp_path: Path, token: str, word: str) -> None:
    plain = replace(TINY, added_tokens=())
    model = plain.load_model(0, digits)
    write_policy(
        dict(model.named_parameters()), model.config, plain.load_tokenizer(digits), tmp_path / "policy"
    )
    source = PretrainedModel(name_or_path=str(tmp_path / "policy"), added_tokens=(token,))
    with pytest.raises(
        ValueError, match=f"'{token}', which would begin as the mean of the tokens of '{word}'"
    ):
        source.load_model(0, digits)


def test_a_model_with_too_few_rows_for_its_own_tokens_is_not_grown(tmp_path: Path) -> None:
    _, source = hub_model(tmp_path, rows=290)
    with pytest.raises(ValueError, match="embeds 290 tokens, and its tokenizer has 300"):
        source.load_model(0, str)
