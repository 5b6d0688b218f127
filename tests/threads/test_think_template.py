"""Promises of `treetune chat_template`, which makes a chat template with a thought of another one:

* the new template equals the old one with a system message and an opened thought, for templates of many
  families;
* the token that ends a turn ends answers, and the model itself stays unchanged;
* a request that would change nothing, or that a template can't serve, is refused and writes nothing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.support.chat_models import END, TURN_END
from tests.support.chat_models import template as template_of
from treetune.main import main
from treetune.models.chat import Chat, render
from treetune.threads.think_template import SYSTEM_MESSAGE, THOUGHT_OPENING, write_think_model

QWEN, LLAMA2, GEMMA, PLAIN, DEAF = map(template_of, ("qwen", "llama2", "gemma", "plain", "deaf"))
OPENED = PLAIN + "{{ '<think>\\n' }}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a folder with a tiny tokenizer and the files that name the tokens that end an answer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", END, TURN_END, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token=END, additional_special_tokens=[TURN_END]
    )
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)
    described = {"model_type": "llama", "vocab_size": len(vocabulary), "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "top_k": 20}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def with_template(folder: Path, template: str) -> Path:
    (folder / "chat_template.jinja").write_text(template)
    return folder


def loaded(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


QUESTION = [{"role": "user", "content": "1 + 1?"}]
THREE_TURNS = [*QUESTION, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2 + 2?"}]
WITH_SYSTEM = [{"role": "system", "content": "Be brief."}, *QUESTION]


@pytest.mark.parametrize("template", [QWEN, LLAMA2, PLAIN], ids=["qwen", "llama 2", "plain"])
def test_the_template_is_as_before_with_a_system_message_and_an_opened_thought(
    template: str, model: Path, tmp_path: Path
) -> None:
    with_template(model, template)
    before = loaded(model)
    result = write_think_model(model, tmp_path / "out")
    after = loaded(tmp_path / "out")
    system = {"role": "system", "content": SYSTEM_MESSAGE}
    assert result.system_in == "system" and result.opens_thought
    for turns in (QUESTION, THREE_TURNS):
        assert render(after, Chat(), turns) == render(before, Chat(), [system, *turns]) + THOUGHT_OPENING
        without_prompt = render(after, Chat(), turns, add_generation_prompt=False)
        assert without_prompt == render(before, Chat(), [system, *turns], add_generation_prompt=False)
    assert render(after, Chat(), WITH_SYSTEM) == render(before, Chat(), WITH_SYSTEM) + THOUGHT_OPENING
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("template", [GEMMA, DEAF], ids=["refuses", "leaves out"])
def test_in_a_template_without_system_messages_the_question_begins_with_the_text(
    template: str, model: Path, tmp_path: Path
) -> None:
    with_template(model, template)
    assert write_think_model(model, tmp_path / "out").system_in == "user"
    assert f"{SYSTEM_MESSAGE}\n\n1 + 1?" in render(loaded(tmp_path / "out"), Chat(), QUESTION)


def test_a_thought_is_not_opened_where_it_is_open_already_or_the_model_is_told_not_to_think(
    model: Path, tmp_path: Path
) -> None:
    with_template(model, QWEN)
    write_think_model(model, tmp_path / "out")
    quiet = Chat(template_arguments={"enable_thinking": False})
    assert not render(loaded(tmp_path / "out"), quiet, QUESTION).endswith(THOUGHT_OPENING)
    with_template(model, OPENED)
    assert not write_think_model(model, tmp_path / "opened").opens_thought
    assert render(loaded(tmp_path / "opened"), Chat(), QUESTION).count("<think>\n") == 1


def test_the_token_behind_a_turn_ends_answers(model: Path, tmp_path: Path) -> None:
    with_template(model, QWEN)
    assert write_think_model(model, tmp_path / "out").end_token == "<|im_end|>"
    assert loaded(tmp_path / "out").eos_token == "<|im_end|>"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 2
    sampling = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert sampling == {"eos_token_id": [2, 1], "top_k": 20}
    assert json.loads((model / "config.json").read_text())["eos_token_id"] == 1, "the model itself stays"


def test_the_command_prints_an_example(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_template(model, QWEN)
    command = ["chat_template", "--model", str(model), "--output", str(tmp_path / "out")]
    assert main([*command, "--system", 'Say "why" first.\nThen what.']) == 0
    printed = capsys.readouterr().out
    assert 'Say "why" first.\nThen what.' in printed and "<|im_start|>assistant\n<think>\n" in printed
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err


def test_the_command_says_of_an_empty_opening_that_none_is_added(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_template(model, QWEN)
    assert (
        main(["chat_template", "--model", str(model), "--output", str(tmp_path / "out"), "--opening", ""])
        == 0
    )
    printed = capsys.readouterr().out
    assert "no opening is added, since --opening is empty" in printed
    assert "opened a thought" not in printed


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (None, {}, "no chat template"),
        (OPENED, {"system": ""}, "nothing would change"),
        (QWEN, {"system": "", "opening": ""}, "nothing would change"),
        (QWEN, {"end_token": "<|stop|>"}, "no token '<|stop|>'"),
        ("{{ raise_exception('never') }}", {}, "refuses a chat"),
        (None, {}, "is not the folder of a model"),
    ],
)
def test_a_request_that_cannot_be_met_or_changes_nothing_is_refused(
    template: str | None, options: dict[str, str], message: str, model: Path, tmp_path: Path
) -> None:
    if template is not None:
        with_template(model, template)
    folder = tmp_path if message.startswith("is not the folder") else model
    with pytest.raises(ValueError, match=re.escape(message)):
        write_think_model(folder, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
