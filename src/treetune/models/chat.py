"""Prompts as a chat: the model's own template around a problem's text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from treetune.vocabulary import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESERVED = {"add_generation_prompt", "chat_template", "conversation", "messages", "tokenize"}
"""Arguments of a template that this module sets."""

# Texts by which a template is probed.
_DATE = "\N{REFERENCE MARK}today\N{REFERENCE MARK}"
_ANSWER = "The answer is 7."
_THOUGHT = "<think>\nThree and four.\n</think>\n\n"
TOOL_RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "4"}


@dataclass(frozen=True, kw_only=True)
class Chat:
    """The problem is the user's message, and the sampled answer is the assistant's."""

    system: str | None = None
    """The system message; None leaves it to the template, and some have one of their own."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Handed to the template by name: ``{enable_thinking: false}`` for Qwen3, ``{date_string: '26 Jul
    2024'}`` for Llama 3.2."""
    template: str | None = None
    """A template (Jinja) in place of the tokenizer's own."""
    earlier_turns: Literal["as_templated", "as_sampled"] = "as_templated"
    """For answers of several turns, and templates that write an earlier turn otherwise than it was sampled
    (those of models that think leave its thoughts out). Such a template is refused; or, with ``as_sampled``,
    earlier turns stay in sight as they were sampled, which is how they are trained."""

    def __post_init__(self) -> None:
        taken = sorted(_RESERVED & set(self.template_arguments))
        if taken:
            raise ValueError(f"template_arguments sets {', '.join(taken)}, which the run sets itself")


def chat_frame(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> Callable[[str], str]:
    """Returns the function from a problem's text to the whole prompt's, up to where the assistant's answer
    begins.

    Raises ValueError, here and not at the first problem, for a tokenizer without a chat template, for
    an argument that the template doesn't know, for a template that refuses the system message, and
    for one that writes today's date, since prompts would be others tomorrow.
    """
    name = repr(tokenizer.name_or_path)
    template = tokenizer.chat_template
    if not template:
        raise ValueError(
            f"model.chat is set, and the tokenizer of {name} has no chat template: set it to null, or take a"
            " model that was trained to chat"
        )
    texts = list(template.values()) if isinstance(template, dict) else [template]
    known = set(re.findall(r"\w+", " ".join(texts)))
    unknown = sorted(set(chat.template_arguments) - known)
    if unknown:
        raise ValueError(
            f"chat.template_arguments sets {', '.join(unknown)}, which the chat template of {name}"
            " does not read: leave it out"
        )
    if _DATE in render(tokenizer, chat, [user("1 + 1?")], strftime_now=lambda form: _DATE):
        raise ValueError(
            f"the chat template of {name} writes today's date into every prompt, so that the same run would"
            " differ tomorrow: give the date in chat.template_arguments, e.g. {date_string: '26 Jul 2024'}"
        )
    return lambda prompt: render(tokenizer, chat, [user(prompt)])


def chat_conversation(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> Callable[[Sequence[Message]], str]:
    """Returns the function from the messages of a conversation to the whole prompt's text, up to where the
    assistant's next answer begins. A system message among them takes the place of `chat.system`. Raises
    ValueError as `chat_frame`, whose checks it leaves to it, and at a conversation that the template refuses.
    """
    without_system = replace(chat, system=None)

    def conversation(messages: Sequence[Message]) -> str:
        has_system = any(message.role == "system" for message in messages)
        turns = [vars(message) for message in messages]
        return render(tokenizer, without_system if has_system else chat, turns)

    return conversation


def end_of_turn(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> int | None:
    """The special token that the template puts behind an assistant's answer; None if there is none."""
    try:
        turns = render(tokenizer, chat, [user("1 + 1?"), _assistant(_ANSWER)], add_generation_prompt=False)
    except ValueError:
        return None  # a template for questions alone
    _, answer, behind = turns.rpartition(_ANSWER)
    ids = tokenizer.encode(behind.lstrip(), add_special_tokens=False) if answer else []
    if not ids:
        return None
    added = tokenizer.added_tokens_decoder.get(ids[0])
    return ids[0] if added is not None and added.special else None


def turn_frame(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, between: Sequence[Mapping[str, str]]
) -> Callable[[Sequence[Mapping[str, str]]], str]:
    """Returns the function from the messages between two turns of the assistant to all that the template puts
    between them: from the end of the one turn to where the next begins.

    It is the difference of two chats that the template renders, and tried with messages like those in
    `between`. Special tokens in a message are left out: an environment can't end it. Raises ValueError, with
    the reason, for a template that refuses a second turn or such messages, or writes earlier turns otherwise
    than they were sampled.
    """
    name = repr(tokenizer.name_or_path)
    specials = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]

    def rendered(
        answer: str, messages: Sequence[Mapping[str, str]], turns: Sequence[Mapping[str, str]] = ()
    ) -> tuple[str, str, str]:
        """The chat up to where the answer begins, the whole chat, and its part behind the answer."""
        before = [*turns, user("1 + 1?")]
        prompt = render(tokenizer, chat, before)
        whole = render(tokenizer, chat, [*before, _assistant(answer), *messages])
        _, kept, behind = whole.partition(_ANSWER)
        if not kept:
            raise ValueError(f"the chat template of {name} leaves an earlier answer out of a chat")
        return prompt, whole, behind

    thinks = "</think>" in str(tokenizer.chat_template)
    if chat.earlier_turns == "as_templated":
        for answer in (_ANSWER, *([_THOUGHT + _ANSWER] if thinks else [])):
            prompt, whole, _ = rendered(answer, between)
            if not whole.startswith(prompt + answer):
                raise ValueError(
                    f"the chat template of {name} writes an earlier turn otherwise than it was sampled"
                    f" ({'its thoughts are left out' if answer != _ANSWER else 'what begins it differs'}), so"
                    " that a chat of several turns is not what the template makes of it: set"
                    " chat.earlier_turns to 'as_sampled', to keep earlier turns in sight as they were sampled"
                )
    earlier = [user("0 + 0?"), _assistant("0.")]
    if rendered(_ANSWER, between)[2] != rendered(_ANSWER, between, earlier)[2]:
        raise ValueError(
            f"the chat template of {name} puts something else between later turns than between the first two:"
            " answers of several turns can't be put together from it"
        )

    def frame(messages: Sequence[Mapping[str, str]]) -> str:
        shown = []
        for message in messages:
            text = message["content"]
            # Until none is left: without one, the characters around it may spell another.
            while special := next((special for special in specials if special in text), None):
                text = text.replace(special, "")
            shown.append({**message, "content": text})
        return rendered(_ANSWER, shown)[2]

    return frame


def render(
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    turns: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
    **arguments: Any,
) -> str:
    """The text of a chat. Raises ValueError where the template refuses it."""
    from jinja2 import TemplateError

    system = [] if chat.system is None else [{"role": "system", "content": chat.system}]
    try:
        text = tokenizer.apply_chat_template(
            [*system, *map(dict, turns)],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **{**chat.template_arguments, **arguments},
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} refuses a chat of"
            f" {', '.join(turn['role'] for turn in [*system, *turns])}: {error}"
        ) from error
    return str(text)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
