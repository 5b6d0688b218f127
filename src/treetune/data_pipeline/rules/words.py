"""The words of a text, as rules compare them."""

from __future__ import annotations

import re

# A number with its sign or point is one word, and so is each sign of mathematics: 2 + 3 is not 2 * 3.
_WORD = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+|[+\-*/^=<>%]")


def word_list(text: str) -> list[str]:
    """In small letters, without punctuation."""
    return _WORD.findall(text.casefold())
