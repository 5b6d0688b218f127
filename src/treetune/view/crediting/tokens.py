"""Makes token ids of the prompts and answers in a log that has texts alone.

An answer's text is encoded with the tokenizer of the model, and the end token is added where the answer was
not cut off, since trainers store texts without it. The ids may differ from those that were sampled.

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
from treetune.vocabulary import Message, TextCodec, TokenIds, joined, token_array

SYSTEM_MARK, USER_MARK = "⟦the system's text⟧", "⟦the user's text⟧"
"""Texts with which the form of a chat template is found."""

EXAMPLE_CHARACTERS = 60
"""The number of characters that a warning shows of a text."""


@dataclass(frozen=True)
class ChatForm:
    """The text of a prompt by the chat template, without special tokens, around the texts of its messages.

    Example: ``ChatForm(("user",), ("user\\n", "\\nassistant\\n"))``.
    """

    roles: tuple[str, ...]
    """The roles of the messages."""
    texts: tuple[str, ...]
    """The texts before, between and after those of the messages."""

    def messages_of(self, prompt: str) -> list[Message] | None:
        """Returns the messages of a prompt in this form; None for a prompt that isn't."""
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
        """Returns whether the user's message contains the beginning of an answer, such as "\\nassistant\\n".
        Then the stored prompt may have had several turns."""
        # `texts[-1]` is what the template writes after the last message: the beginning of an answer. Its
        # first line names the role. Templates may begin answers with more text, such as "<think>".
        beginning = re.match(r"\s*\S[^\n]*\n", self.texts[-1])
        has_role = beginning is not None and any(map(str.isalpha, beginning[0]))
        return beginning is not None and has_role and beginning[0] in messages[-1].content


@dataclass
class LogTokenizer:
    """Encodes texts of a log, and counts texts whose ids may differ from the sampled ones.

    `codec` encodes texts as they are, and `chat` conversations by the chat template.
    """

    codec: TextCodec
    chat: TextCodec | None = None
    """None for a tokenizer without a chat template."""
    vocabulary_size: int = 0
    """The number of the tokenizer's tokens, whose texts the viewer needs; 0: they aren't stored."""
    why_no_chat: str = ""
    """The reason why conversations can't be encoded."""
    tokenizer: Any = None
    """The tokenizer of transformers; None if there is only a codec."""
    counts: Counter[str] = field(default_factory=Counter)
    """The number of such texts, by kind: ``encoded``, ``restored``, ``ambiguous`` and ``changed``."""
    changed_example: tuple[str, str] | None = None
    """The first text that differs from its decoded ids, and the latter."""

    def __post_init__(self) -> None:
        self._forms = [] if self.chat is None else _forms_of(self.chat, self.codec)

    @property
    def source(self) -> Any:
        """The tokenizer as the library takes it."""
        return self.codec if self.tokenizer is None else self.tokenizer

    def encode_prompt(self, text: str, messages: Sequence[Mapping[str, str]]) -> TokenIds:
        """Returns the ids of a prompt.

        Args:
            text: The prompt, if it is a text.
            messages: The messages of a conversation; empty for a text.

        Raises:
            ValueError: The prompt can't be encoded. The message says what kind of prompt it is.
        """
        if messages:
            return self._encode_conversation([Message(turn["role"], turn["content"]) for turn in messages])
        # The text may be a conversation by the chat template whose special tokens were left out.
        restored_ids = self._restore_chat(text)
        if restored_ids is not None:
            self.counts["restored"] += 1
            return restored_ids
        try:
            prompt_ids = self.codec.encode_prompt(text)
        except ValueError as error:
            raise ValueError("a prompt that the tokenizer can't encode") from error
        # Tokens that begin every prompt, such as <s>, are not in the stored text.
        begin = len(self.codec.begin)
        has_begin = tuple(prompt_ids[:begin].tolist()) == self.codec.begin
        self._compare(text, prompt_ids[begin:] if has_begin else prompt_ids)
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
        self._compare(text, ids)
        return ids

    def add_end(self, ids: TokenIds) -> TokenIds:
        """Returns an answer's ids with the end token, which is added where it is missing."""
        if ids[-1:].tolist() == [self.codec.eos_id]:
            return ids
        return joined([ids, token_array([self.codec.eos_id])])

    def warnings(self) -> list[str]:
        """Returns messages on texts whose ids may not be those of the log's model."""
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
        if self.chat is None:
            raise ValueError(f"a prompt that is a conversation: {self.why_no_chat}")
        try:
            return _encode_chat(self.chat, messages)
        except ValueError as error:
            raise ValueError("a prompt that the chat template refuses") from error

    def _restore_chat(self, text: str) -> TokenIds | None:
        """Returns the token ids of a prompt whose text lacks its special tokens. Returns None for any other
        text, and for a prompt that may have several turns."""
        is_ambiguous = False
        # A form is what the chat template writes around one or two messages, without special tokens.
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
        self.counts["ambiguous"] += is_ambiguous
        return None

    def _compare(self, text: str, ids: TokenIds) -> None:
        """Counts a text if its ids decode to another text, both with and without special tokens.

        Keeps the first such text as an example.
        """
        decode_all = self.codec.decode_all or self.codec.decode
        decoded = decode_all(ids)
        if decoded == text or self.codec.decode(ids) == text:
            return
        self.counts["changed"] += 1
        if self.changed_example is None:
            start = _first_difference(text, decoded)
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
    """Returns the codec with the tokenizer's chat template, or the reason why there is none."""
    from treetune.models.chat import Chat
    from treetune.models.tokenizer import codec_of

    if not tokenizer.chat_template:
        return None, "the tokenizer has no chat template"
    try:
        return codec_of(tokenizer, chat=Chat()), ""
    except ValueError as error:
        return None, f"the tokenizer's chat template can't be used ({error})"


def _forms_of(chat: TextCodec, codec: TextCodec) -> list[ChatForm]:
    """Returns the forms of prompts with a user's message, and with a system's message before it.

    A form has the texts that the chat template writes around the messages.

    Args:
        chat: Encodes conversations.
        codec: Decodes conversations without special tokens. Turn markers that aren't special tokens stay.
    """
    forms = []
    for messages in (
        [Message("user", USER_MARK)],
        [Message("system", SYSTEM_MARK), Message("user", USER_MARK)],
    ):
        try:
            text = codec.decode(_encode_chat(chat, messages))
        except ValueError:  # the template has no system messages, or the tokenizer can't encode the marks
            continue
        texts = []
        for message in messages:
            before, mark, text = text.partition(message.content)
            if mark:
                texts.append(before)
        # Without text between the messages, their border can't be found.
        if len(texts) == len(messages) and all(texts[1:]):
            forms.append(ChatForm(tuple(message.role for message in messages), (*texts, text)))
    return forms


def _encode_chat(chat: TextCodec, messages: Sequence[Message]) -> TokenIds:
    """Returns the ids of a conversation, up to the beginning of the next answer. Raises ValueError."""
    assert chat.conversation is not None, "codecs of chats have conversations"
    return token_array((*chat.begin, *chat.encode(chat.conversation(messages))))


def _first_difference(text: str, other: str) -> int:
    """Returns the first character in which two texts differ, or the length of the shorter one."""
    for position, (character, other_character) in enumerate(zip(text, other)):
        if character != other_character:
            return position
    return min(len(text), len(other))
