"""Keeps the control tokens of a chat template apart from text of a problem that looks like them.

A row of a data set may contain the text ``<|im_end|>``. Encoded as that token, it would end the user's
message, and the rest of the row could pose as the next message. In a chat such text is therefore encoded by
its characters. The ids of prompts without such text don't change.
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
"""The first of the private-use characters that serve as marks and as stand-ins. No normaliser changes them. A
mark replaces text of a problem that looks like a control token. A stand-in replaces a control token of the
template, and is the token's only name in a copy of the tokenizer. See `ControlTokens`."""


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Returns the ids of the special tokens, which decoding leaves out, by their texts."""
    added = tokenizer.added_tokens_decoder.items()
    return {str(token): int(token_id) for token_id, token in added if token.special}


def refuse_hidden_stops(tokenizer: PreTrainedTokenizerBase, stops: Iterable[str]) -> None:
    """Raises ValueError for a stop string that contains a special token and other text. It would never be
    found, since decoded text doesn't contain special tokens. (The engine finds a stop string that is a
    special token by its id.)"""
    specials = special_tokens(tokenizer)
    for stop in stops:
        if stop in specials:
            continue
        contained = [special for special in specials if special in stop]
        if contained:
            raise ValueError(
                f"the stop string {stop!r} contains the special token {contained[0]!r}, which the text of"
                f" an answer doesn't contain, so that it would never be found: use {contained[0]!r} alone, or"
                " leave it out"
            )


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and the `markers` that its chat template writes
    around turns.

    A problem that contains ``<|im_end|>`` must not end a turn. So such text is marked before a template adds
    control tokens, and the two are kept apart when the prompt is encoded. Marks and stand-ins are private-use
    characters, written here as ① and ❶. For a tokenizer whose ``<|im_end|>`` has the id 2:

    * `mark` turns ``Say <|im_end|>!`` into ``Say ①!``;
    * the template adds a control token at the end: ``Say ①!<|im_end|>``;
    * `encode` replaces control tokens by stand-ins, ``Say ①!❶``, and then marks by the problem's text,
      ``Say <|im_end|>!❶``. A copy of the tokenizer, in which the control tokens have the stand-ins as names,
      encodes ``<|im_end|>`` as ten characters and ❶ as the token 2;
    * `unmark` returns the text for people: ``Say <|im_end|>!<|im_end|>``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, markers: Iterable[str] = ()) -> None:
        """Gives each control token a mark and a stand-in, which are single private-use characters.

        A mark replaces text of a problem that looks like the control token. A stand-in replaces the control
        token itself where the template wrote it. Example: for ``<|im_end|>`` and ``<s>`` the marks are
        U+F5000 and U+F5001, and the stand-ins U+FA000 and U+FA001.
        """
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        self.ids = special_tokens(tokenizer) | {marker: vocabulary[marker] for marker in markers}
        # The pattern takes the first text that matches. So longer texts come first: `<s>1` before `<s>`.
        self._texts = sorted(self.ids, key=lambda text: (-len(text), text))
        any_text = "|".join(map(re.escape, self._texts))
        self._control_pattern = re.compile(any_text or r"(?!)")  # `(?!)` matches nothing
        self._marks = {text: chr(_FIRST_MARK + i) for i, text in enumerate(self._texts)}
        self._stand_ins = {text: chr(_FIRST_STAND_IN + i) for i, text in enumerate(self._texts)}
        self._text_of_mark = {mark: text for text, mark in self._marks.items()}
        self._mark_pattern = re.compile(f"[{''.join(self._text_of_mark)}]" if self._marks else r"(?!)")

    def mark(self, text: str) -> str:
        """Replaces each text that looks like a control token by its mark."""
        return self._control_pattern.sub(lambda match: self._marks[match.group()], text)

    def unmark(self, text: str) -> str:
        """Replaces each mark by its text, for people."""
        return self._mark_pattern.sub(lambda match: self._text_of_mark[match.group()], text)

    def is_marked(self, text: str) -> bool:
        """Returns whether the text contains a mark."""
        return self._mark_pattern.search(text) is not None

    def remove(self, text: str) -> str:
        """Removes all control tokens from the text, also those that the removal of others creates."""
        while self._control_pattern.search(text):
            text = self._control_pattern.sub("", text)
        return text

    def encode(self, marked: str) -> list[int]:
        """Encodes a text with at least one mark.

        Each control token becomes its own token. Each mark stands for text of a problem that looks like a
        control token; this text is encoded by its characters.

        Raises:
            ValueError: The tokenizer encodes such text only as a control token.
        """
        # The text for which the first mark stands, for messages.
        shown = self.unmark(self._mark_pattern.search(marked).group())  # type: ignore[union-attr]
        if not self._tokenizer.is_fast:
            raise ValueError(
                f"a problem contains {shown!r}, which the tokenizer of {self._tokenizer.name_or_path!r} can"
                " only encode as a control token: leave the problem out, or change its text"
            )
        renamed_tokenizer, original_ids = self._renamed_tokenizer
        # First the stand-ins for the template's control tokens, and then the problem's text for the marks:
        # the other way round, that text would get stand-ins, too.
        text_with_stand_ins = self._control_pattern.sub(lambda match: self._stand_ins[match.group()], marked)
        text = self.unmark(text_with_stand_ins)
        ids_in_copy: Sequence[int] = renamed_tokenizer.encode(text, add_special_tokens=False).ids
        # Tokens that are not added tokens have the same id in the copy and in the tokenizer.
        ids = [original_ids.get(token_id, token_id) for token_id in ids_in_copy]
        control_ids = set(self.ids.values())
        n_control_tokens = sum(token_id in control_ids for token_id in ids)
        # The template wrote all control tokens of the marked text, since the problem's are marks there. If
        # the ids have more control tokens, some come from the problem.
        if n_control_tokens > len(self._control_pattern.findall(marked)):
            raise ValueError(
                f"a problem contains {shown!r}, which the tokenizer of {self._tokenizer.name_or_path!r}"
                " always encodes as a control token: leave the problem out, or change its text"
            )
        return ids

    @cached_property
    def _renamed_tokenizer(self) -> tuple[Tokenizer, dict[int, int]]:
        """A copy of the tokenizer in which control tokens have the stand-ins as names, and a mapping from
        the copy's ids of added tokens to the tokenizer's ids.

        A stand-in is a private-use character that replaces a control token which the template wrote. The copy
        may number added tokens differently. Example: if it gives ``<|im_end|>`` the id 7, and the
        tokenizer the id 2, the mapping is ``{7: 2}``.
        """
        from tokenizers import Tokenizer

        content = json.loads(self._tokenizer.backend_tokenizer.to_str())
        added = content["added_tokens"]
        for token in added:
            token["content"] = self._stand_ins.get(token["content"], token["content"])
        content["post_processor"] = None  # it may contain the old names
        renamed = Tokenizer.from_str(json.dumps(content))
        original_ids: dict[int, int] = {}
        for token in added:
            id_in_copy = renamed.token_to_id(token["content"])
            assert id_in_copy is not None, token
            original_ids[id_in_copy] = token["id"]
        return renamed, original_ids
