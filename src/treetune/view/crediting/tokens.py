"""Makes token ids of the prompts and answers in a log that has only texts.

An answer's text is encoded with the tokenizer of the model. If the answer was not cut off, the end token is
added, because trainers store texts without it. The ids may differ from those that were sampled.

verl and TRL also store the prompts without special tokens. A prompt in the form of the chat template gets
them back if the result, decoded without special tokens, is exactly the stored text::

    stored      user\\n2+2=?\\nassistant\\n
    restored    <|im_start|>user\\n2+2=?<|im_end|>\\n<|im_start|>assistant\\n
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treetune.credit.library.assigner import load_tokenizer
from treetune.vocabulary import Message, TextCodec, TokenIds, concatenate, token_array

SYSTEM_MARK, USER_MARK = "⟦the system's text⟧", "⟦the user's text⟧"
"""Messages that are encoded by a chat template, to find the text that the template writes around them."""

EXAMPLE_CHARACTERS = 60
"""The number of characters that a warning shows of a text."""


@dataclass(frozen=True)
class ChatForm:
    """The text, without special tokens, that a chat template writes around the messages of a prompt.

    Example: ``ChatForm(("user",), ("user\\n", "\\nassistant\\n"))`` is the form of the prompt
    "user\\n2+2=?\\nassistant\\n".
    """

    roles: tuple[str, ...]
    """The roles of the messages."""
    texts: tuple[str, ...]
    """The texts before, between and after the messages: one text more than there are roles."""

    def messages_of(self, prompt: str) -> list[Message] | None:
        """Returns the messages of a prompt in this form, and None if the prompt doesn't have this form."""
        beginning, *between, end = self.texts
        if not prompt.startswith(beginning) or not prompt.endswith(end):
            return None
        remaining = prompt[len(beginning) : len(prompt) - len(end)]
        contents = []
        for text in between:
            content, separator, remaining = remaining.partition(text)
            if not separator:
                return None
            contents.append(content)
        contents.append(remaining)
        return [Message(role, content) for role, content in zip(self.roles, contents, strict=True)]

    def may_have_more_turns(self, messages: Sequence[Message]) -> bool:
        """Returns whether the last message contains the beginning of an answer, such as "\\nassistant\\n".

        If it does, the stored prompt may have had several turns.
        """
        # `texts[-1]` is what the template writes after the last message: the beginning of an answer. Only its
        # first line, which names the role, is looked for, because templates may begin the answer to the last
        # message with more text, such as "<think>".
        role_line = re.match(r"\s*\S[^\n]*\n", self.texts[-1])
        if role_line is None or not any(map(str.isalpha, role_line[0])):
            return False  # the template names no role: it writes no line, or a line without a letter
        return role_line[0] in messages[-1].content


@dataclass
class LogTokenizer:
    """Encodes texts of a log, and counts texts whose ids may differ from the sampled ids."""

    codec: TextCodec
    """Encodes texts as they are."""
    chat: TextCodec | None = None
    """Encodes conversations by the chat template; None if they can't be encoded."""
    vocabulary_size: int = 0
    """The number of the tokenizer's tokens. The text of each is stored for the viewer; with 0, none is."""
    why_no_chat: str = ""
    """The reason why conversations can't be encoded."""
    tokenizer: Any = None
    """The tokenizer of transformers; None if there is only a codec."""
    counts: Counter[str] = field(default_factory=Counter)
    """The number of texts of each kind. `warnings` explains the kinds:

    * ``encoded``: answers that were encoded from their text.
    * ``restored``: prompts that got their special tokens back.
    * ``ambiguous``: prompts that may have several turns.
    * ``changed``: texts that their ids don't decode to.
    """
    changed_example: tuple[str, str] | None = None
    """The first text of the kind ``changed``, and the text that its ids decode to, both from the first
    difference on."""

    def __post_init__(self) -> None:
        self._forms = [] if self.chat is None else _forms_of(self.chat, self.codec)

    @property
    def source(self) -> Any:
        """The tokenizer in a form that the library accepts."""
        return self.codec if self.tokenizer is None else self.tokenizer

    def encode_prompt(self, text: str, messages: Sequence[Mapping[str, str]]) -> TokenIds:
        """Returns the ids of a prompt.

        Args:
            text: The prompt. It is used only if there are no messages.
            messages: The messages, if the prompt is a conversation, and otherwise empty.

        Raises:
            ValueError: The prompt can't be encoded. The message says what kind of prompt it is.
        """
        if messages:
            return self._encode_conversation([Message(turn["role"], turn["content"]) for turn in messages])
        # The text may be a conversation that the chat template wrote, stored without its special tokens.
        restored_ids = self._restore_chat(text)
        if restored_ids is not None:
            self.counts["restored"] += 1
            return restored_ids
        try:
            prompt_ids = self.codec.encode_prompt(text)
        except ValueError as error:
            raise ValueError("a prompt that the tokenizer can't encode") from error
        # Tokens that begin every prompt, such as <s>, are not in the stored text.
        n_begin = len(self.codec.begin)
        has_begin = tuple(prompt_ids[:n_begin].tolist()) == self.codec.begin
        ids_of_text = prompt_ids[n_begin:] if has_begin else prompt_ids
        self._count_if_decoded_differently(text, ids_of_text)
        return prompt_ids

    def encode_answer(self, text: str) -> TokenIds:
        """Returns the ids of an answer's text, without an end token.

        Raises:
            ValueError: The tokenizer can't encode it.
        """
        try:
            ids = token_array(self.codec.encode(text))
        except ValueError as error:
            raise ValueError("an answer that the tokenizer can't encode") from error
        self.counts["encoded"] += 1
        self._count_if_decoded_differently(text, ids)
        return ids

    def add_end(self, ids: TokenIds) -> TokenIds:
        """Returns an answer's ids with the end token, which is added if the ids don't end with it."""
        if ids[-1:].tolist() == [self.codec.eos_id]:
            return ids
        return concatenate([ids, token_array([self.codec.eos_id])])

    def warnings(self) -> list[str]:
        """Returns messages on texts whose ids may differ from those that the log's model sampled or read."""
        messages = []
        if encoded := self.counts["encoded"]:
            messages.append(
                f"{encoded:,} answers have no token ids in the log: their texts were encoded with the"
                " tokenizer, and the end token was added to those that were not cut off"
            )
        if restored := self.counts["restored"]:
            messages.append(
                f"{restored:,} prompts were stored without special tokens, and got them back by the chat"
                " template"
            )
        if ambiguous := self.counts["ambiguous"]:
            messages.append(f"{ambiguous:,} prompts may have several turns: they were encoded as plain text")
        if changed := self.counts["changed"]:
            assert self.changed_example is not None
            stored, decoded = self.changed_example
            messages.append(
                f"{changed:,} texts are not what their token ids decode to, so that the log's model can't"
                f" have sampled exactly these ids, such as {stored!r}, which becomes {decoded!r}: is this the"
                " tokenizer of the log's model?"
            )
        return messages

    def _encode_conversation(self, messages: Sequence[Message]) -> TokenIds:
        """Returns the ids of a conversation by the chat template. Raises ValueError if it can't be
        encoded."""
        if self.chat is None:
            raise ValueError(f"a prompt that is a conversation: {self.why_no_chat}")
        try:
            return _encode_chat(self.chat, messages)
        except ValueError as error:
            raise ValueError("a prompt that the chat template refuses") from error

    def _restore_chat(self, text: str) -> TokenIds | None:
        """Returns the token ids, with special tokens, of a prompt that was stored without special tokens.

        Returns None for any other text, and for a prompt that may have several turns.
        """
        is_ambiguous = False
        # A form has the text that the chat template writes around one or two messages.
        for form in self._forms:
            messages = form.messages_of(text)
            if messages is None:
                continue
            if form.may_have_more_turns(messages):
                # With several turns, the ids would lack the special tokens between them. The check below
                # would not notice, since the stored text has no special tokens either.
                is_ambiguous = True
                continue
            try:
                ids = self._encode_conversation(messages)
            except ValueError:  # the template refuses these messages
                continue
            if self.codec.decode(ids) == text:
                return ids
        if is_ambiguous:
            self.counts["ambiguous"] += 1
        return None

    def _count_if_decoded_differently(self, text: str, ids: TokenIds) -> None:
        """Counts a text as ``changed`` if its ids don't decode to it, neither with special tokens nor without
        them.

        Keeps the first such text as an example.
        """
        # `decode_all` keeps special tokens, and `decode` leaves them out. A codec may have only `decode`.
        decode_all = self.codec.decode_all or self.codec.decode
        decoded = decode_all(ids)
        if decoded == text or self.codec.decode(ids) == text:
            return
        self.counts["changed"] += 1
        if self.changed_example is None:
            start = _first_different_position(text, decoded)
            end = start + EXAMPLE_CHARACTERS
            self.changed_example = text[start:end], decoded[start:end]


def open_tokenizer(source: str | Path) -> LogTokenizer:
    """Returns the tokenizer in a folder. Raises ValueError for a folder without one."""
    from treetune.models.tokenizer import codec_of

    try:
        tokenizer = load_tokenizer(source)
    except ValueError as error:
        raise ValueError(f"there is no tokenizer in {source}: name its folder with --tokenizer") from error
    chat, why_no_chat = _chat_codec(tokenizer)
    return LogTokenizer(codec_of(tokenizer), chat, len(tokenizer), why_no_chat, tokenizer)


def _chat_codec(tokenizer: Any) -> tuple[TextCodec | None, str]:
    """Returns (codec with the tokenizer's chat template, ""), or (None, the reason why there is none)."""
    from treetune.models.chat import Chat
    from treetune.models.tokenizer import codec_of

    if not tokenizer.chat_template:
        return None, "the tokenizer has no chat template"
    try:
        return codec_of(tokenizer, chat=Chat()), ""
    except ValueError as error:
        return None, f"the tokenizer's chat template can't be used ({error})"


def _forms_of(chat: TextCodec, codec: TextCodec) -> list[ChatForm]:
    """Returns the forms of two kinds of prompts: a user's message, and a system's and a user's message.

    A kind is left out if the template or the tokenizer doesn't support it.

    Args:
        chat: Encodes conversations.
        codec: Decodes conversations. It leaves out special tokens, but not markers of turns that are plain
            text.
    """
    forms = []
    for messages in (
        [Message("user", USER_MARK)],
        [Message("system", SYSTEM_MARK), Message("user", USER_MARK)],
    ):
        try:
            remaining = codec.decode(_encode_chat(chat, messages))
        except ValueError:  # the template has no system messages, or the tokenizer can't encode the marks
            continue
        texts = []
        for message in messages:
            text_before, mark, remaining = remaining.partition(message.content)
            if mark:  # the template has written this message
                texts.append(text_before)
        has_all_messages = len(texts) == len(messages)
        # `texts[0]` is before the first message. If the template writes no text between two messages, a
        # prompt can't be split into them.
        if has_all_messages and all(texts[1:]):
            forms.append(ChatForm(tuple(message.role for message in messages), (*texts, remaining)))
    return forms


def _encode_chat(chat: TextCodec, messages: Sequence[Message]) -> TokenIds:
    """Returns the ids of a conversation, up to the beginning of the next answer.

    Raises ValueError if the template refuses the messages, or if they can't be encoded.
    """
    assert chat.conversation is not None, "codecs of chats have conversations"
    return token_array((*chat.begin, *chat.encode(chat.conversation(messages))))


def _first_different_position(text: str, other: str) -> int:
    """Returns the position of the first character in which two texts differ, or the length of the shorter
    text if there is none."""
    for position, (character, other_character) in enumerate(zip(text, other)):
        if character != other_character:
            return position
    return min(len(text), len(other))
