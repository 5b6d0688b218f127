"""Prompts as a chat: the model's own template around a problem's text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from treetune.models.control_tokens import ControlTokens
from treetune.vocabulary import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESERVED = {"add_generation_prompt", "chat_template", "conversation", "messages", "tokenize"}
"""Arguments of a template that this module sets."""

# Texts by which a template is probed.
_DATE = "\N{REFERENCE MARK}today\N{REFERENCE MARK}"
_ANSWER = "The answer is 7."
_THOUGHT = "<think>\nThree and four.\n</think>\n\n"
_QUESTIONS = ("What is 31 plus 44?", "Name the 7th prime.")
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


def chat_frame(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, control: ControlTokens
) -> Callable[[str], str]:
    """Returns the function from a problem's text to the whole prompt's, up to where the assistant's answer
    begins. Text of the problem that looks like one of the `control` tokens is marked in it.

    Raises ValueError, here and not at the first problem, for a tokenizer without a chat template, for
    an argument that the template doesn't know, for a template that refuses the system message or leaves it or
    the question out, and for one that writes today's date, since prompts would be others tomorrow.
    """
    refuse_no_template(tokenizer)
    name = repr(tokenizer.name_or_path)
    template = tokenizer.chat_template
    texts = list(template.values()) if isinstance(template, dict) else [template]
    template_words = set(re.findall(r"\w+", " ".join(texts)))
    unknown = sorted(set(chat.template_arguments) - template_words)
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
    for question in _QUESTIONS:
        if question not in render(tokenizer, chat, [user(question)]):
            raise ValueError(
                f"the chat template of {name} leaves the user's question out, be it a text or a list of"
                " parts, so that all problems would have one prompt: give another template in chat.template"
            )
    if chat.system and chat.system.strip() not in render(tokenizer, chat, [user(_QUESTIONS[0])]):
        raise ValueError(
            f"the chat template of {name} leaves the system message out: set chat.system to null, and put its"
            " text into the task's prompt"
        )
    return lambda prompt: render(tokenizer, chat, [user(control.mark(prompt))])


def chat_conversation(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, control: ControlTokens
) -> Callable[[Sequence[Message]], str]:
    """Returns the function from the messages of a conversation to the whole prompt's text, up to where the
    assistant's next answer begins. A system message among them takes the place of `chat.system`. Text that
    looks like one of the `control` tokens is marked. Raises ValueError as `chat_frame`, whose checks it
    leaves to it, at a conversation that the template refuses, and where it leaves out what the user or the
    system says.
    """
    without_system = replace(chat, system=None)

    def conversation(messages: Sequence[Message]) -> str:
        has_system = any(message.role == "system" for message in messages)
        turns = [{**vars(message), "content": control.mark(message.content)} for message in messages]
        text = render(tokenizer, without_system if has_system else chat, turns)
        for turn in turns:
            # An earlier answer may be shown without its thoughts.
            if turn["role"] in ("system", "user") and turn["content"].strip() not in text:
                raise ValueError(
                    f"the chat template of {tokenizer.name_or_path!r} leaves out what the {turn['role']} says"
                    f" ({control.unmark(turn['content'])[:60]!r}): give another template in chat.template"
                )
        return text

    return conversation


def refuse_no_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError for a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"model.chat is set, and the tokenizer of {tokenizer.name_or_path!r} has no chat template: set it"
            " to null, or take a model that was trained to chat"
        )


def end_of_turn(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> int | None:
    """The token that the template puts behind an assistant's answer; None if there is none.

    It is one that was added to the tokenizer's vocabulary, and need not be special.
    """
    try:
        turns = render(tokenizer, chat, [user("1 + 1?"), _assistant(_ANSWER)], add_generation_prompt=False)
    except ValueError:
        return None  # a template for questions alone
    _, answer, behind = turns.rpartition(_ANSWER)
    ids = tokenizer.encode(behind.lstrip(), add_special_tokens=False) if answer else []
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def turn_markers(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> list[str]:
    """The added tokens that the template writes around a user's message, and the one that ends an answer.
    Tags that come in pairs, such as ``<think>`` and ``</think>``, are no markers: prompts speak of them."""
    added = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
    first, second = _QUESTIONS
    markers: list[int] = []
    for turns, begin, end_text in (
        ([user(first)], first, None),
        ([user(first), _assistant(_ANSWER), user(second)], _ANSWER, second),
    ):
        try:
            text = render(tokenizer, replace(chat, system=None), turns, add_generation_prompt=False)
        except ValueError:
            continue  # a template for one question alone, or one that `chat_frame` says what is wrong with
        _, _, behind = text.partition(begin)
        around_turns = behind.partition(end_text)[0] if end_text else behind
        markers += tokenizer.encode(around_turns, add_special_tokens=False)
    if (end := end_of_turn(tokenizer, chat)) is not None:
        markers.append(end)
    texts = [added[token_id] for token_id in dict.fromkeys(markers) if token_id in added]
    vocabulary = set(added.values())
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return [text for text in texts if text in special or not _is_of_a_pair(text, vocabulary)]


def _is_of_a_pair(tag: str, tokens: set[str]) -> bool:
    """Returns whether there is the tag that closes it, or the one that it closes."""
    opening, name = tag[:1], tag[1:]
    return (f"{opening}{name[1:]}" if name.startswith("/") else f"{opening}/{name}") in tokens


def turn_frame(
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    between: Sequence[Mapping[str, str]],
    control: ControlTokens,
) -> Callable[[Sequence[Mapping[str, str]]], str]:
    """Returns the function from the messages between two turns of the assistant to all that the template puts
    between them: from the end of the one turn to where the next begins.

    It is the difference of two chats that the template renders, and tried with messages like those in
    `between`. Control tokens in a message are left out: an environment can't end it. Raises ValueError, with
    the reason, for a template that refuses a second turn or such messages, or writes earlier turns otherwise
    than they were sampled.
    """
    name = repr(tokenizer.name_or_path)

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
        shown = [{**message, "content": control.remove(message["content"])} for message in messages]
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
    """The text of a chat. A content is a list of parts for a role whose messages the template reads so alone.

    Raises ValueError where the template refuses it.
    """
    system = [] if chat.system is None else [{"role": "system", "content": chat.system}]
    arguments = {"add_generation_prompt": add_generation_prompt, **chat.template_arguments, **arguments}
    in_parts = _roles_in_parts(tokenizer, chat)
    messages: list[Mapping[str, Any]] = [
        {**turn, "content": _parts(turn["content"])} if turn["role"] in in_parts else turn
        for turn in [*system, *turns]
    ]
    return _applied(tokenizer, messages, arguments)


def _applied(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> str:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, **arguments
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} refuses a chat of"
            f" {', '.join(message['role'] for message in messages)}: {error}"
        ) from error
    return str(text)


_IN_PARTS: WeakKeyDictionary[PreTrainedTokenizerBase, dict[str, frozenset[str]]] = WeakKeyDictionary()
"""Answers of `_roles_in_parts`, by the tokenizer, its template and the template's arguments."""


def _roles_in_parts(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> frozenset[str]:
    """The roles whose contents have to be lists of parts (``[{type: 'text', text: …}]``), as the templates of
    models that see want them: those whose text is in the prompt that way and isn't as a plain text."""
    if not tokenizer.chat_template:
        return frozenset()
    answers = _IN_PARTS.setdefault(tokenizer, {})
    key = repr((tokenizer.chat_template, sorted(chat.template_arguments.items(), key=str)))
    if key not in answers:
        said = "Say 5 words."
        contents: tuple[Any, Any] = (said, _parts(said))

        def shows(role: str, content: Any, question: Any) -> bool:
            message, asking = {"role": role, "content": content}, {"role": "user", "content": question}
            chats = {
                "user": [message],
                "system": [message, asking],
                "assistant": [asking, message],
                "tool": [asking, {"role": "assistant", "content": question}, message],
            }
            try:
                prompt = _applied(
                    tokenizer,
                    chats[role],
                    {"add_generation_prompt": role == "user", **chat.template_arguments},
                )
            except ValueError:
                return False  # refused: said where a chat of that kind is asked for
            return said in prompt

        roles: set[str] = set()
        question: Any = _QUESTIONS[0]
        for role in ("user", "system", "assistant", "tool"):
            if not shows(role, contents[0], question) and shows(role, contents[1], question):
                roles.add(role)
            if role == "user" and "user" in roles:
                question = _parts(question)
        answers[key] = frozenset(roles)
    return answers[key]


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
