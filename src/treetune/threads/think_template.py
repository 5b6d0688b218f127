"""Copies a model, with a chat template that makes it think first.

The model's own Jinja template is not changed. A line before it adds a system message to conversations without
one, and an expression after it opens the thought at the end of the prompt::

    {% set messages = [{'role': 'system', 'content': '...'}] + ... %}
    (the model's template)
    {{ '<think>\n' if add_generation_prompt ... }}
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from treetune.models.chat import Chat, end_of_turn, render
from treetune.store.files import make_folder_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM_MESSAGE = (
    "Think before you answer: write what you think between <think> and </think>, and after </think> the"
    " answer alone."
)
THOUGHT_OPENING = "<think>\n"
REFUSAL = "refused:"
"""The beginning of the text that stands for the prompt of a conversation that the template refuses."""

Messages = Sequence[Mapping[str, str]]

_PROBE_QUESTION = {"role": "user", "content": "What is 6 * 7?"}
_PROBE_ANSWER = {"role": "assistant", "content": "<think>\nSix sevens.\n</think>\n\n42"}
# Conversations that are rendered with the old and the new template, to check the new one.
PROBES: tuple[Messages, ...] = (
    (_PROBE_QUESTION,),
    ({"role": "system", "content": "Be brief."}, _PROBE_QUESTION),
    (_PROBE_QUESTION, _PROBE_ANSWER, {"role": "user", "content": "And 6 * 8?"}),
)


@dataclass(frozen=True)
class ThinkModel:
    """The changes of a model's chat template."""

    before: str
    """A prompt of the old template."""
    after: str
    """The same prompt of the new template."""
    system_in: Literal["system", "user", "nowhere"]
    """The role of the message that contains the added system message; ``nowhere`` if none is added."""
    opens_thought: bool
    """Whether the new template opens the thought and the old one did not."""
    end_token: str | None
    """The new token that ends an answer; None if the token is the same as before."""


def write_think_model(
    source: Path,
    output: Path,
    *,
    system: str = SYSTEM_MESSAGE,
    opening: str = THOUGHT_OPENING,
    end_token: str | None = None,
) -> ThinkModel:
    """Copies a model, with a chat template that makes it think.

    Args:
        source: The folder of the model.
        output: The folder of the copy, which doesn't exist yet.
        system: The system message that is added to conversations without one; if it is empty, none is added.
            It becomes a part of the first question if the template doesn't support system messages.
        opening: The text that is added to the end of every prompt. It is not added if the template's prompts
            end with it already, or if the template is rendered with ``enable_thinking: false``.
        end_token: The token that ends an answer; None: the one that the template writes after an answer.

    Raises:
        ValueError: The model has no chat template, nothing would change, or the template can't be extended.
    """
    from transformers import AutoTokenizer

    if not (source / "config.json").is_file():
        raise ValueError(f"{source} is not the folder of a model: it has no config.json")
    if output.exists():
        raise ValueError(f"{output} exists already: name a folder that does not")
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer in {source} has no chat template: take a model that has one, or copy that of its"
            " family into its chat_template.jinja"
        )
    think_model = _set_thinking_template(tokenizer, source, system, opening)
    new_end_token = _new_end_token(tokenizer, end_token)
    with make_folder_atomically(output) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        # The tokenizer may write its template to another file than the one that was copied.
        for old_template in ("chat_template.json", "chat_template.jinja"):
            (folder / old_template).unlink(missing_ok=True)
        if new_end_token is not None:
            tokenizer.eos_token = new_end_token
            _write_end_token(folder, tokenizer.convert_tokens_to_ids(new_end_token))
        tokenizer.save_pretrained(folder)
    return replace(think_model, end_token=new_end_token)


def _set_thinking_template(
    tokenizer: PreTrainedTokenizerBase, source: Path, system: str, opening: str
) -> ThinkModel:
    """Gives the tokenizer its new template, and checks it with the probes."""
    old_template = tokenizer.chat_template
    # The prompts of the old template for the probes, which are fixed conversations. If the template refuses
    # one, `REFUSAL` and the reason stand in place of the prompt.
    old_prompts = [_render(tokenizer, probe) for probe in PROBES]
    old_template_opens = old_prompts[0].rstrip().endswith(opening.strip())
    opens_thought = bool(opening.strip()) and not old_template_opens
    target: Literal["system", "user", "nowhere"] = "nowhere"
    if system:
        target = "system" if _supports_system_message(tokenizer, system) else "user"

    # A tokenizer may have several templates, by name.
    has_several = isinstance(old_template, dict)
    old_templates = old_template if has_several else {"default": old_template}
    new_templates = {}
    for name, template in old_templates.items():
        new_templates[name] = extend_template(template, system, target, opening if opens_thought else "")

    # The new template must give the same texts as the old one does for conversations in which the system
    # message has been added by hand, followed by the opening of the thought.
    expected = []
    for probe in PROBES:
        text = _render(tokenizer, add_system_message(probe, system, target))
        if opens_thought and not text.startswith(REFUSAL):
            text += opening
        expected.append(text)
    tokenizer.chat_template = new_templates if has_several else new_templates["default"]
    new_prompts = [_render(tokenizer, probe) for probe in PROBES]
    if new_prompts == old_prompts:
        raise ValueError(
            f"nothing would change: prompts of the model in {source} end with {old_prompts[0][-40:]!r}"
            " already" + ("" if system else ", and there is no system message to add")
        )
    if new_prompts != expected:
        raise ValueError(
            f"the chat template in {source} can't be extended: it gives {new_prompts[0]!r} instead of"
            f" {expected[0]!r}"
        )
    return ThinkModel(old_prompts[0], new_prompts[0], target, opens_thought, end_token=None)


def extend_template(template: str, system: str, target: str, opening: str) -> str:
    """Returns the template with a line before it that adds the system message, and an expression after it
    that opens the thought.

    Args:
        template: The model's Jinja template.
        system: The system message.
        target: The role of the message that gets the system message, as in `add_system_message`.
        opening: The text that opens the thought; empty if nothing is to be added.
    """
    before, after = "", ""
    if target != "nowhere":
        text = _literal(system)
        if target == "system":
            with_message = f"[{{'role': 'system', 'content': {text}}}] + (messages | list)"
            condition = "messages[0]['role'] != 'system'"
        else:
            question = f"{{'role': 'user', 'content': {text} + '\\n\\n' + messages[0]['content']}}"
            with_message = f"[{question}] + (messages | list)[1:]"
            condition = "messages[0]['role'] == 'user'"
        # Example: {% set messages = ([...] + (messages | list)) if messages and ... else messages %}
        # The Jinja environment of chat templates removes the newline after it.
        before = f"{{% set messages = ({with_message}) if messages and {condition} else messages %}}\n"
    if opening:
        # Example: {{ "<think>" if add_generation_prompt and not (...) else '' }}
        condition = "add_generation_prompt and not (enable_thinking is defined and not enable_thinking)"
        after = f"{{{{ {_literal(opening)} if {condition} else '' }}}}"
    # Jinja removes a newline at the end of a template, but not one before an added expression. So it is
    # removed here.
    return before + template.removesuffix("\n") + after


def add_system_message(messages: Messages, system: str, target: str) -> list[Mapping[str, str]]:
    """Returns the conversation with the system message, as a template from `extend_template` would add it.

    A conversation that begins with a system message already is returned unchanged.

    Args:
        target: The role of the message that gets the text: ``system`` for a message of its own, ``user`` for
            the first question, if the template supports no system messages, or ``nowhere``.
    """
    first_message = messages[0]
    if target == "system" and first_message["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if target == "user" and first_message["role"] == "user":
        return [{**first_message, "content": f"{system}\n\n{first_message['content']}"}, *messages[1:]]
    return list(messages)


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str:
    """Renders a conversation; returns `REFUSAL` and the reason if the template refuses it."""
    try:
        return render(tokenizer, Chat(), list(messages))
    except ValueError as error:
        if len(messages) == 1:
            raise  # the template refuses even a single question, so the model can't be used with it
        return f"{REFUSAL} {error}"


def _supports_system_message(tokenizer: PreTrainedTokenizerBase, system: str) -> bool:
    """Returns whether the template renders a system message, and neither refuses it nor leaves it out."""
    try:
        text = render(tokenizer, Chat(), [{"role": "system", "content": system}, _PROBE_QUESTION])
    except ValueError:
        return False
    return system in text


def _new_end_token(tokenizer: PreTrainedTokenizerBase, end_token: str | None) -> str | None:
    """Returns the new token that ends answers; None if it is the tokenizer's end token already."""
    if end_token is not None:
        if end_token not in tokenizer.get_vocab():
            raise ValueError(f"the tokenizer has no token {end_token!r} to end an answer with")
        return None if end_token == tokenizer.eos_token else end_token
    end_id = end_of_turn(tokenizer, Chat())
    if end_id is None or end_id == tokenizer.eos_token_id:
        return None
    return str(tokenizer.convert_ids_to_tokens(end_id))


def _write_end_token(folder: Path, token_id: int) -> None:
    """Writes the token that ends an answer into the model's files. In sampling, the former end tokens still
    end an answer, too."""
    # Sampling reads generation_config.json, which lists all end tokens. config.json names only the new one.
    for name, takes_several in (("config.json", False), ("generation_config.json", True)):
        path = folder / name
        if not path.is_file():
            continue
        settings: dict[str, Any] = json.loads(path.read_text())
        former_end_tokens = settings.get("eos_token_id")
        if former_end_tokens is None:
            former_ids = []
        elif isinstance(former_end_tokens, list):
            former_ids = former_end_tokens
        else:
            former_ids = [former_end_tokens]
        ids = [token_id, *(former_id for former_id in former_ids if former_id != token_id)]
        settings["eos_token_id"] = ids if takes_several and len(ids) > 1 else token_id
        path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _literal(text: str) -> str:
    """Returns a text as a Jinja literal."""
    return json.dumps(text, ensure_ascii=False)
