"""From a problem's text to the ids that a model is asked with, and the ids that end its answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.columns import plain
from tests.models.chat_models import (
    BEGIN,
    BEGINS_ITSELF,
    CHATML,
    END,
    TURN_END,
    bpe_tokenizer,
    random_model,
    save_as_on_the_hub,
)
from treetune.models.chat import Chat
from treetune.models.pretrained import PretrainedModel
from treetune.models.tokenizer import codec_of
from treetune.vocabulary import Message, Problem, TextCodec

PROMPT = "what is 12 plus 34?"
CHAT = Chat()


def shown(codec: TextCodec, tokenizer) -> str:
    """The prompt with its special tokens."""
    return tokenizer.decode(codec.encode_prompt(PROMPT))


def test_text_becomes_ids_without_anything_around_it() -> None:
    tokenizer = bpe_tokenizer()
    codec = codec_of(tokenizer)
    assert plain(codec.encode_prompt(PROMPT)) == codec.encode(PROMPT)
    assert shown(codec, tokenizer) == PROMPT
    assert plain(codec.encode_prompt("")) == ()


@pytest.mark.parametrize("by_itself", [True, False])
@pytest.mark.parametrize("asked", [True, False, None])
def test_a_prompt_begins_once_or_not_at_all(by_itself: bool, asked: bool | None) -> None:
    tokenizer = bpe_tokenizer(begin=BEGIN, begins_by_itself=by_itself)
    begins = by_itself if asked is None else asked
    codec = codec_of(tokenizer, begin_of_text=asked)
    assert shown(codec, tokenizer) == BEGIN * begins + PROMPT
    assert codec.encode(PROMPT)[0] != tokenizer.bos_token_id, "text that is no prompt has no beginning"


@pytest.mark.parametrize("template", [CHATML, BEGINS_ITSELF])
@pytest.mark.parametrize("by_itself", [True, False])
@pytest.mark.parametrize("asked", [True, False, None])
def test_a_chat_begins_once_or_not_at_all(template: str, by_itself: bool, asked: bool | None) -> None:
    tokenizer = bpe_tokenizer(template=template, begin=BEGIN, begins_by_itself=by_itself)
    begins = template == BEGINS_ITSELF if asked is None else asked
    codec = codec_of(tokenizer, begin_of_text=asked, chat=CHAT)
    chat = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    assert shown(codec, tokenizer) == BEGIN * begins + chat


def test_a_chat_is_what_transformers_makes_of_it() -> None:
    tokenizer = bpe_tokenizer(template=BEGINS_ITSELF, begin=BEGIN, begins_by_itself=True)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    theirs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    ours = codec_of(tokenizer, chat=Chat(system="Be brief.")).encode_prompt(PROMPT)
    assert plain(ours) == tuple(theirs)


def test_arguments_reach_the_template() -> None:
    tokenizer = bpe_tokenizer()
    chat = Chat(template_arguments={"enable_thinking": False})
    assert shown(codec_of(tokenizer, chat=chat), tokenizer).endswith("assistant\n<think>\n\n</think>\n\n")


def test_an_answer_ends_with_the_end_of_its_turn_and_so_does_one_to_learn_from() -> None:
    tokenizer = bpe_tokenizer()
    end, turn_end = tokenizer.convert_tokens_to_ids([END, TURN_END])
    assert (codec_of(tokenizer).eos_id, codec_of(tokenizer).end_ids) == (end, (end,))
    codec = codec_of(tokenizer, chat=CHAT, end_ids=(9, end))
    assert (codec.eos_id, codec.end_ids) == (turn_end, (turn_end, end, 9))


def test_a_template_without_an_end_of_turn_leaves_the_tokenizers() -> None:
    tokenizer = bpe_tokenizer(template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert codec_of(tokenizer, chat=CHAT).eos_id == tokenizer.eos_token_id


def test_an_answer_is_encoded_as_it_follows_its_prompt() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # As SentencePiece does: whatever begins a text has a space before it.
    vocabulary = {piece: i for i, piece in enumerate(["<eos>", "▁", "a", "b", "\n"])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme="first")])
    codec = codec_of(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"))
    assert codec.encode("\nb") == (1, 4, 3)
    together = plain(codec.encode_prompt("a")) + plain(codec.encode_answer("a", "\nb"))
    assert together == codec.encode("a\nb") == (1, 2, 4, 3)


def test_an_answer_that_would_change_its_prompts_tokens_is_encoded_alone() -> None:
    tokenizer = bpe_tokenizer()
    codec = codec_of(tokenizer)
    piece = next(text for token in codec.encode(PROMPT) if len(text := codec.decode([token])) > 1)
    assert len(codec.encode(piece[:1]) + codec.encode(piece[1:])) > len(codec.encode(piece)) == 1
    assert codec.encode_answer(piece[:1], piece[1:]) == codec.encode(piece[1:])


@pytest.mark.parametrize(
    ("tokenizer", "asked", "told"),
    [
        ({}, {"begin_of_text": True}, "no token for the beginning of text"),
        ({}, {"begin_of_text": True, "chat": CHAT}, "no token for the beginning of text"),
        ({"template": None}, {"chat": CHAT}, "no chat template: set it to null"),
        ({"end": None}, {}, "has no end token"),
        (
            {},
            {"chat": Chat(template_arguments={"thinking": 1, "enable_thinking": 1})},
            "sets thinking, which",
        ),
        (
            {"template": "{{ raise_exception('no system here') }}"},
            {"chat": Chat(system="x")},
            "refuses a chat of system, user: no system here",
        ),
        (
            {"template": "Today is {{ strftime_now('%d %b %Y') }}." + CHATML},
            {"chat": CHAT},
            "writes today's date into every prompt.*date_string",
        ),
    ],
)
def test_what_a_tokenizer_cannot_do_is_told(tokenizer: dict, asked: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        codec_of(bpe_tokenizer(**tokenizer), **asked)


def test_a_template_that_is_given_its_date_is_used() -> None:
    template = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d') %}{% endif %}"
        "{{ date_string }} " + CHATML
    )
    tokenizer = bpe_tokenizer(template=template)
    codec = codec_of(tokenizer, chat=Chat(template_arguments={"date_string": "26 Jul 2024"}))
    assert shown(codec, tokenizer).startswith("26 Jul 2024 <|im_start|>user")


def test_what_the_run_decides_is_no_argument() -> None:
    with pytest.raises(ValueError, match="sets messages, which the run sets itself"):
        Chat(template_arguments={"messages": []})


def test_a_model_ends_its_answers_as_its_files_say(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer()
    end, turn_end = tokenizer.convert_tokens_to_ids([END, TURN_END])
    model = random_model("qwen2", len(tokenizer), eos_token_id=7)
    named = save_as_on_the_hub(tmp_path / "named", model, tokenizer, end_ids=[turn_end, end])
    source = PretrainedModel(name_or_path=str(named))
    assert source.codec(source.load_tokenizer(str)).end_ids == (end, turn_end)
    (named / "generation_config.json").unlink()
    assert source.codec(source.load_tokenizer(str)).end_ids == (end, 7), "config.json names one as well"


def test_a_tokenizer_without_padding_pads_with_its_end_token(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer()
    assert tokenizer.pad_token_id is None
    folder = save_as_on_the_hub(tmp_path / "m", random_model("llama", len(tokenizer)), tokenizer)
    assert PretrainedModel(name_or_path=str(folder)).load_tokenizer(str).pad_token == END


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_sharded_weights_with_a_tied_head_are_read_whole(tmp_path: Path, architecture: str) -> None:
    import torch

    from treetune.models.policy_files import read_policy, write_for_engine

    tokenizer = bpe_tokenizer()
    model = random_model(architecture, len(tokenizer))
    folder = save_as_on_the_hub(tmp_path / "m", model, tokenizer, shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    loaded = PretrainedModel(name_or_path=str(folder)).load_model(0, str)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)
    weights, config = read_policy(folder)
    assert weights.keys() == dict(model.named_parameters()).keys()
    write_for_engine(weights, config, tokenizer, tmp_path / "engine")
    head = read_policy(tmp_path / "engine")[0]["lm_head.weight"]
    assert torch.equal(head, model.get_input_embeddings().weight)


MESSAGES = (Message("system", "Be brief."), Message("user", PROMPT))


def test_a_conversation_is_what_transformers_makes_of_it() -> None:
    tokenizer = bpe_tokenizer(template=BEGINS_ITSELF, begin=BEGIN, begins_by_itself=True)
    problem = Problem("a", PROMPT, "46", messages=MESSAGES)
    turns = [vars(message) for message in MESSAGES]
    theirs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    ours = codec_of(tokenizer, chat=Chat(system="Be long.")).encode_prompt(problem)
    assert plain(ours) == tuple(theirs), "its own system message takes the place of the configured one"


def test_a_conversation_of_the_user_alone_has_the_configured_system_message() -> None:
    codec = codec_of(bpe_tokenizer(), chat=Chat(system="Be brief."))
    asked = Problem("a", PROMPT, "46", messages=MESSAGES[1:])
    assert plain(codec.encode_prompt(asked)) == plain(codec.encode_prompt(PROMPT))


def test_a_conversation_needs_a_chat_template() -> None:
    with pytest.raises(
        ValueError, match=r"problem 'a' is a conversation of 2 messages, and model.chat is null"
    ):
        codec_of(bpe_tokenizer()).encode_prompt(Problem("a", PROMPT, "46", messages=MESSAGES))


@pytest.mark.parametrize("begins", [True, False])
def test_a_prompt_that_is_used_as_it_is_has_nothing_around_it_and_begins_once(begins: bool) -> None:
    tokenizer = bpe_tokenizer(begin=BEGIN)
    codec = codec_of(tokenizer, chat=CHAT, begin_of_text=True)
    text = f"{BEGIN * begins}<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n<think>"
    ids = codec.encode_prompt(Problem("a", text, "46", as_is=True))
    assert tokenizer.decode(ids) == BEGIN * (not begins) + text
    assert plain(ids)[0] == tokenizer.bos_token_id != plain(ids)[1]


def test_an_answer_is_encoded_behind_the_prompt_of_its_problem() -> None:
    codec = codec_of(bpe_tokenizer(), chat=CHAT)
    problem = Problem("a", PROMPT, "46", messages=MESSAGES)
    whole = codec.encode(codec.framed(problem) + "It is 46.")
    assert plain(codec.encode_prompt(problem)) + plain(codec.encode_answer(problem, "It is 46.")) == whole
