"""Makes prompts with the model's chat template."""

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

_RESERVED_ARGUMENTS = {"add_generation_prompt", "chat_template", "conversation", "messages", "tokenize"}
"""The arguments of a template that this module sets itself."""

# The texts with which a template is tried. `_TRIAL_DATE` takes the place of today's date.
_TRIAL_DATE = "\N{REFERENCE MARK}today\N{REFERENCE MARK}"
_TRIAL_ANSWER = "The answer is 7."
_TRIAL_THOUGHT = "<think>\nThree and four.\n</think>\n\n"
_TRIAL_QUESTIONS = ("What is 31 plus 44?", "Name the 7th prime.")
TOOL_RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "4"}


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Settings of a chat in which the problem is the user's message and the sampled answer is the
    assistant's."""

    system: str | None = None
    """The system message; null leaves it to the template, which may have a default."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the template, such as ``{enable_thinking: false}`` for Qwen3 or ``{date_string: '26 Jul
    2024'}`` for Llama 3.2."""
    template: str | None = None
    """A Jinja template that replaces the tokenizer's."""
    earlier_turns: Literal["as_templated", "as_sampled"] = "as_templated"
    """The form of earlier turns in answers of several turns. Templates of models that think leave the
    thoughts of earlier turns out. With ``as_templated`` a template that changes earlier turns is refused;
    with ``as_sampled`` earlier turns stay as they were sampled and are trained."""

    def __post_init__(self) -> None:
        reserved = sorted(_RESERVED_ARGUMENTS & set(self.template_arguments))
        if reserved:
            raise ValueError(f"template_arguments sets {', '.join(reserved)}, which the run sets itself")


def chat_frame(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, control: ControlTokens
) -> Callable[[str], str]:
    """Returns a function that makes the whole prompt, up to the beginning of the answer, from a problem's
    text. It marks text of the problem that looks like one of the `control` tokens.

    The template is tried at once, so that a run with an unusable one fails here and not at its first problem.

    Raises:
        ValueError: There is no template, it doesn't use one of the arguments, it leaves out the question or
            the system message, or it writes today's date, which would change the prompts tomorrow.
    """
    refuse_no_template(tokenizer)
    name = repr(tokenizer.name_or_path)
    template = tokenizer.chat_template
    texts = list(template.values()) if isinstance(template, dict) else [template]
    template_words = set(re.findall(r"\w+", " ".join(texts)))
    unknown_arguments = sorted(set(chat.template_arguments) - template_words)
    if unknown_arguments:
        raise ValueError(
            f"chat.template_arguments sets {', '.join(unknown_arguments)}, which the chat template of {name}"
            " does not use: leave it out"
        )
    # A template gets today's date from its argument `strftime_now`. The function here returns a text that no
    # template contains, so it is in the prompt only if the template writes the date.
    prompt = render(tokenizer, chat, [user_message("1 + 1?")], strftime_now=lambda form: _TRIAL_DATE)
    if _TRIAL_DATE in prompt:
        raise ValueError(
            f"the chat template of {name} writes today's date into every prompt, so that the same run would"
            " differ tomorrow: give the date in chat.template_arguments, e.g. {date_string: '26 Jul 2024'}"
        )
    for question in _TRIAL_QUESTIONS:
        if question not in render(tokenizer, chat, [user_message(question)]):
            raise ValueError(
                f"the chat template of {name} leaves the user's question out, whether it is a text or a list"
                " of parts, so that all problems would have the same prompt: set another template in"
                " chat.template"
            )
    if chat.system:
        prompt = render(tokenizer, chat, [user_message(_TRIAL_QUESTIONS[0])])
        if chat.system.strip() not in prompt:
            raise ValueError(
                f"the chat template of {name} leaves the system message out: set chat.system to null, and put"
                " the message into the task's prompt"
            )
    return lambda prompt: render(tokenizer, chat, [user_message(control.mark(prompt))])


def chat_conversation(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, control: ControlTokens
) -> Callable[[Sequence[Message]], str]:
    """Returns a function that makes the whole prompt, up to the beginning of the next answer, from the
    messages of a conversation.

    A system message among them replaces `chat.system`. The function marks text that looks like one of the
    `control` tokens. It raises ValueError if the template refuses the conversation, or leaves out a message
    of the user or the system. `chat_frame` checks the template itself.
    """
    chat_without_system = replace(chat, system=None)

    def conversation(messages: Sequence[Message]) -> str:
        has_system = any(message.role == "system" for message in messages)
        # Text that looks like a control token is replaced by a mark, so that it can't end a turn.
        turns = [{**vars(message), "content": control.mark(message.content)} for message in messages]
        # A system message of the conversation replaces `chat.system`.
        chat_of_conversation = chat_without_system if has_system else chat
        text = render(tokenizer, chat_of_conversation, turns)
        for turn in turns:
            # Answers are not checked, since a template may leave out their thoughts.
            if turn["role"] in ("system", "user") and turn["content"].strip() not in text:
                original = control.unmark(turn["content"])
                raise ValueError(
                    f"the chat template of {tokenizer.name_or_path!r} leaves out the message of the"
                    f" {turn['role']} ({original[:60]!r}): set another template in chat.template"
                )
        return text

    return conversation


def refuse_no_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError for a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"model.chat is set, but the tokenizer of {tokenizer.name_or_path!r} has no chat template: set"
            " model.chat to null, or choose a model that was trained to chat"
        )


def end_of_turn(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> int | None:
    """Returns the token that the template writes after an assistant's answer; None if there is none.

    The token is among the tokenizer's added tokens. It need not be a special token.
    """
    try:
        turns = render(
            tokenizer,
            chat,
            [user_message("1 + 1?"), _assistant_message(_TRIAL_ANSWER)],
            add_generation_prompt=False,
        )
    except ValueError:
        return None  # a template for a single question
    if _TRIAL_ANSWER not in turns:
        return None  # the template leaves answers out
    after_answer = turns.rpartition(_TRIAL_ANSWER)[2]
    # The template may write white space before the token.
    ids = tokenizer.encode(after_answer.lstrip(), add_special_tokens=False)
    if not ids or ids[0] not in tokenizer.added_tokens_decoder:
        return None
    return ids[0]


def turn_markers(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> list[str]:
    """Returns the added tokens with which the template ends and begins turns, such as ``<|im_end|>``.

    Tags in pairs, such as ``<think>`` and ``</think>``, are not markers unless they are special tokens, since
    prompts may contain them.
    """
    added_tokens = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}

    def render_turns(turns: Sequence[Mapping[str, str]]) -> str | None:
        try:
            return render(tokenizer, replace(chat, system=None), turns, add_generation_prompt=False)
        except ValueError:
            return None  # a template for a single question, or one that `chat_frame` refuses with a reason

    # What the template writes after a question, and between an answer and the next question.
    template_texts: list[str] = []
    first_question, second_question = _TRIAL_QUESTIONS
    question = render_turns([user_message(first_question)])
    if question is not None:
        template_texts.append(question.partition(first_question)[2])
    two_questions = render_turns(
        [user_message(first_question), _assistant_message(_TRIAL_ANSWER), user_message(second_question)]
    )
    if two_questions is not None:
        after_answer = two_questions.partition(_TRIAL_ANSWER)[2]
        template_texts.append(after_answer.partition(second_question)[0])
    template_ids: list[int] = []
    for text in template_texts:
        template_ids += tokenizer.encode(text, add_special_tokens=False)
    if (end := end_of_turn(tokenizer, chat)) is not None:
        template_ids.append(end)
    distinct_ids = dict.fromkeys(template_ids)
    markers = [added_tokens[token_id] for token_id in distinct_ids if token_id in added_tokens]
    added_texts = set(added_tokens.values())
    special_tokens = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return [marker for marker in markers if marker in special_tokens or not _has_partner(marker, added_texts)]


def _has_partner(tag: str, tokens: set[str]) -> bool:
    """Returns whether the tag's partner is among the tokens: ``</think>`` for ``<think>``, and ``<think>``
    for ``</think>``."""
    bracket, name = tag[:1], tag[1:]
    is_closing = name.startswith("/")
    partner = f"{bracket}{name[1:]}" if is_closing else f"{bracket}/{name}"
    return partner in tokens


def turn_frame(
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    between: Sequence[Mapping[str, str]],
    control: ControlTokens,
) -> Callable[[Sequence[Mapping[str, str]]], str]:
    """Returns a function that makes the text between two turns of the assistant from the messages between
    them.

    The function renders a made-up chat: a question, an answer and these messages. It returns what the
    template writes after the answer. Control tokens in a message are removed, so that an environment can't
    end its own turn.

    Args:
        between: Example messages, with which the template is tried here. They have the same roles as the
            messages that the function gets later.

    Raises:
        ValueError: The template refuses a second turn or such messages, changes earlier turns or leaves them
            out, or writes another text between later turns than between the first two.
    """
    name = repr(tokenizer.name_or_path)

    def render_chat(
        answer: str, messages: Sequence[Mapping[str, str]], turns: Sequence[Mapping[str, str]] = ()
    ) -> tuple[str, str, str]:
        """Returns the text before the answer, the whole chat, and the text after the answer.

        The chat has the earlier `turns`, a question, the answer, and the `messages` after the answer.
        """
        earlier_messages = [*turns, user_message("1 + 1?")]
        prompt = render(tokenizer, chat, earlier_messages)
        rendered_chat = render(tokenizer, chat, [*earlier_messages, _assistant_message(answer), *messages])
        # `answer` may be `_TRIAL_ANSWER` with thoughts before it, which the template may leave out.
        _, found_answer, after_answer = rendered_chat.partition(_TRIAL_ANSWER)
        if not found_answer:
            raise ValueError(f"the chat template of {name} leaves earlier answers out of a chat")
        return prompt, rendered_chat, after_answer

    thinks = "</think>" in str(tokenizer.chat_template)
    if chat.earlier_turns == "as_templated":  # then the template must not change earlier turns
        answers = [_TRIAL_ANSWER]
        if thinks:
            answers.append(_TRIAL_THOUGHT + _TRIAL_ANSWER)
        for answer in answers:
            prompt, rendered_chat, _ = render_chat(answer, between)
            if not rendered_chat.startswith(prompt + answer):
                has_thoughts = answer != _TRIAL_ANSWER
                change = "it leaves the thoughts out" if has_thoughts else "it begins the turn differently"
                raise ValueError(
                    f"the chat template of {name} changes earlier turns ({change}), so that the prompts of"
                    " answers of several turns would differ from the template's: set chat.earlier_turns to"
                    " 'as_sampled' to keep earlier turns as they were sampled"
                )
    first_turns = [user_message("0 + 0?"), _assistant_message("0.")]
    _, _, after_first = render_chat(_TRIAL_ANSWER, between)
    _, _, after_second = render_chat(_TRIAL_ANSWER, between, first_turns)
    if after_first != after_second:
        raise ValueError(
            f"the chat template of {name} writes another text between later turns than between the first two,"
            " so that answers of several turns can't be composed from it"
        )

    def frame(messages: Sequence[Mapping[str, str]]) -> str:
        cleaned = [{**message, "content": control.remove(message["content"])} for message in messages]
        _, _, after_answer = render_chat(_TRIAL_ANSWER, cleaned)
        return after_answer

    return frame


def render(
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    turns: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
    **arguments: Any,
) -> str:
    """Renders a chat by the template.

    Raises:
        ValueError: The template refuses the chat.
    """
    system = [] if chat.system is None else [{"role": "system", "content": chat.system}]
    arguments = {"add_generation_prompt": add_generation_prompt, **chat.template_arguments, **arguments}
    # The template shows messages of these roles only if their content is a list of parts, and not a text.
    roles_in_parts = _roles_in_parts(tokenizer, chat)
    messages: list[Mapping[str, Any]] = []
    for turn in [*system, *turns]:
        if turn["role"] in roles_in_parts:
            messages.append({**turn, "content": _make_parts(turn["content"])})
        else:
            messages.append(turn)
    return _apply_template(tokenizer, messages, arguments)


def _apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> str:
    """Renders messages by the tokenizer's template. Raises ValueError if it refuses them."""
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, **arguments
        )
    except (TemplateError, TypeError) as error:  # TypeError: for example, a text was added to a list
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} refuses a chat of"
            f" {', '.join(message['role'] for message in messages)}: {error}"
        ) from error
    return str(text)


_CACHED_ROLES: WeakKeyDictionary[PreTrainedTokenizerBase, dict[str, frozenset[str]]] = WeakKeyDictionary()
"""The results of `_roles_in_parts`, by the tokenizer, its template and the template's arguments."""


def _roles_in_parts(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> frozenset[str]:
    """Returns the roles whose messages must be lists of parts (``[{type: 'text', text: …}]``), as in the
    templates of vision models.

    Each role is tried twice with the same text: first plainly, then as a list with one part. Its messages
    must be lists of parts if the rendered chat contains the text only the second time.
    """
    if not tokenizer.chat_template:
        return frozenset()
    cached_roles = _CACHED_ROLES.setdefault(tokenizer, {})
    key = repr((tokenizer.chat_template, sorted(chat.template_arguments.items())))
    if key not in cached_roles:
        text = "Say 5 words."

        def shows_text(role: str, content: Any, question: Any) -> bool:
            """Returns whether the template shows `text` in a chat with a message of this role and content.

            `question` is the content of the other messages that such a chat needs.
            """
            message = {"role": role, "content": content}
            question_message = {"role": "user", "content": question}
            chats = {
                "user": [message],
                "system": [message, question_message],
                "assistant": [question_message, message],
                "tool": [question_message, {"role": "assistant", "content": question}, message],
            }
            arguments = {"add_generation_prompt": role == "user", **chat.template_arguments}
            try:
                prompt = _apply_template(tokenizer, chats[role], arguments)
            except ValueError:
                return False  # a run reports the refusal when it needs a chat of that kind
            return text in prompt

        roles: set[str] = set()
        question: Any = _TRIAL_QUESTIONS[0]
        # The user comes first, since the chats of the other roles contain a user's message.
        for role in ("user", "system", "assistant", "tool"):
            if not shows_text(role, text, question) and shows_text(role, _make_parts(text), question):
                roles.add(role)
            if role == "user" and "user" in roles:
                question = _make_parts(question)
        cached_roles[key] = frozenset(roles)
    return cached_roles[key]


def _make_parts(text: str) -> list[dict[str, str]]:
    """Returns the content of a message as a list of parts."""
    return [{"type": "text", "text": text}]


def user_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant_message(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
