"""Control tokens: those that a chat template puts around what is said, and that text of a problem must not
become.

A data set's row may hold ``<|im_end|>`` as text. Read as the token, it would end the user's message and let
the row write the next one. In a chat, such text therefore becomes the ordinary tokens of its characters. A
prompt without such text has the same ids as ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_FIRST_MARK, _FIRST_STAND_IN = 0xF5000, 0xFA000
"""Characters for private use, which no normaliser changes. A mark stands in a message for text that looks
like a control token; a stand-in is what such a token of the template is called in a tokenizer that knows it
by no other name."""


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Returns the ids of the tokens that decoding leaves out, by their texts."""
    added = tokenizer.added_tokens_decoder.items()
    return {str(token): int(token_id) for token_id, token in added if token.special}


def refuse_hidden_stops(tokenizer: PreTrainedTokenizerBase, stops: Iterable[str]) -> None:
    """Raises ValueError for a stop string that holds a special token and more: it is never found, since text
    doesn't show such tokens. (One that is a special token is looked for by its id.)"""
    specials = special_tokens(tokenizer)
    for stop in stops:
        inside = [special for special in specials if special in stop and special != stop]
        if inside and stop not in specials:
            raise ValueError(
                f"the stop string {stop!r} holds the special token {inside[0]!r}, which the text of an answer"
                f" doesn't show, so that it would never be found: name {inside[0]!r} alone, or leave it out"
            )


class ControlTokens:
    """The special tokens of a tokenizer, and the `markers` of turns that its chat template writes though they
    aren't special.

    A problem that speaks of ``<|im_end|>`` must not end a turn. So its text is marked before a template puts
    control tokens around it, and encoded with both kept apart. Marks and stand-ins are characters for private
    use, written here as ① and ❶; the ids are of a tokenizer whose ``<|im_end|>`` is 2:

    * `mark`: ``Say <|im_end|>!`` is ``Say ①!``;
    * the template: ``Say ①!<|im_end|>`` has one control token, at the end;
    * `encode` renames the control tokens, in this text and in a copy of the tokenizer, to stand-ins:
      ``Say ①!❶``. Then it puts the problem's own text back: ``Say <|im_end|>!❶``. The copy reads
      ``<|im_end|>`` as ten characters and ❶ as the token 2;
    * `unmark`: people read ``Say <|im_end|>!<|im_end|>``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, markers: Iterable[str] = ()) -> None:
        """Gives each control token a mark, which stands for its text where a problem has it, and a stand-in,
        which is its name in the copy of the tokenizer: of ``<|im_end|>`` and ``<s>`` the marks are
        U+F5000 and U+F5001, and the stand-ins U+FA000 and U+FA001."""
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        self.ids = special_tokens(tokenizer) | {marker: vocabulary[marker] for marker in markers}
        # The longest first: one may begin like another.
        self._texts = sorted(self.ids, key=lambda text: (-len(text), text))
        self._any = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")
        self._marks = {text: chr(_FIRST_MARK + i) for i, text in enumerate(self._texts)}
        self._stand_ins = {text: chr(_FIRST_STAND_IN + i) for i, text in enumerate(self._texts)}
        self._text_of_mark = {mark: text for text, mark in self._marks.items()}
        self._any_mark = re.compile(f"[{''.join(self._text_of_mark)}]" if self._marks else r"(?!)")

    def mark(self, text: str) -> str:
        """Returns what somebody said with a mark in place of each text that looks like a control token."""
        return self._any.sub(lambda match: self._marks[match.group()], text)

    def unmark(self, text: str) -> str:
        """Returns the text for people: with what the marks stand for."""
        return self._any_mark.sub(lambda match: self._text_of_mark[match.group()], text)

    def is_marked(self, text: str) -> bool:
        return self._any_mark.search(text) is not None

    def remove(self, text: str) -> str:
        """Returns the text without any control token, also without those that the removal of another
        makes."""
        while self._any.search(text):
            text = self._any.sub("", text)
        return text

    def encode(self, marked: str) -> list[int]:
        """Returns the ids of a marked text: control tokens outside of the marks, characters for the marks.

        Raises ValueError for a tokenizer that can't be told to keep the two apart.
        """
        shown = self.unmark(self._any_mark.search(marked).group())  # type: ignore[union-attr]
        if not self._tokenizer.is_fast:
            raise ValueError(
                f"a problem holds {shown!r}, which the tokenizer of {self._tokenizer.name_or_path!r} can only"
                " read as a control token: leave the problem out, or write it otherwise"
            )
        renamed, id_of_renamed = self._renamed
        with_stand_ins = self._any.sub(lambda match: self._stand_ins[match.group()], marked)
        encoded: Sequence[int] = renamed.encode(self.unmark(with_stand_ins), add_special_tokens=False).ids
        ids = [id_of_renamed.get(token_id, token_id) for token_id in encoded]
        controls = set(self.ids.values())
        if sum(token_id in controls for token_id in ids) > len(self._any.findall(marked)):
            raise ValueError(
                f"a problem holds {shown!r}, which the tokenizer of {self._tokenizer.name_or_path!r} reads as"
                " a control token though it is told not to: leave the problem out, or write it otherwise"
            )
        return ids

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, dict[int, int]]:
        """The tokenizer with stand-ins for names of its control tokens, and the ids of all its added tokens,
        which may be numbered anew there."""
        from tokenizers import Tokenizer

        described = json.loads(self._tokenizer.backend_tokenizer.to_str())
        added = described["added_tokens"]
        for token in added:
            token["content"] = self._stand_ins.get(token["content"], token["content"])
        described["post_processor"] = None  # it may name tokens that are called otherwise now
        renamed = Tokenizer.from_str(json.dumps(described))
        id_of_renamed: dict[int, int] = {}
        for token in added:
            renamed_id = renamed.token_to_id(token["content"])
            assert renamed_id is not None, token
            id_of_renamed[renamed_id] = token["id"]
        return renamed, id_of_renamed
