"""The words of a text and runs of them, as rules compare them."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator, Sequence

import regex

_NO_SPACES = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
"""Letters of scripts that put no spaces between words."""

# A number with its point is one word, and so is each sign of mathematics: 2 + 3 is not 2 * 3.
_WORD = regex.compile(
    rf"\p{{Nd}}+(?:\.\p{{Nd}}+)?|{_NO_SPACES}\p{{M}}*|(?:(?!{_NO_SPACES})\p{{L}}\p{{M}}*)+|[+\-*/^=<>%]"
)
_CHARACTER = regex.compile(rf"{_NO_SPACES}\p{{M}}*")
# NFKC would make 102 of 10², and 31/2 of 3½.
_POWER = regex.compile(r"[\u00b9\u00b2\u00b3\u2070\u2074-\u2079]+")
_FRACTION = regex.compile(r"[\u00bc-\u00be\u2150-\u215f\u2189]")
_INVISIBLE = regex.compile(r"\p{Cf}+")


def word_list(text: str) -> list[str]:
    """Returns the words of a text in small letters, without punctuation and characters of no width.

    Letters are compared by what they mean (NFKC): fullwidth ones are plain ones. In scripts without spaces
    between words (Chinese, Japanese, Thai, Lao, Khmer, Burmese) each character counts as a word of its own.
    A text of signs alone is cut at its spaces.
    """
    text = _FRACTION.sub(r" \g<0>", _POWER.sub(r"^\g<0>", _INVISIBLE.sub("", text)))
    text = unicodedata.normalize("NFKC", text).casefold()
    text = unicodedata.normalize("NFKC", text).replace("\u2044", "/")
    return _WORD.findall(text) or text.split()


def length_of(words: Sequence[str]) -> float:
    """Returns the length of a text in words; a character of a script without spaces is half a word."""
    return sum(0.5 if not word.isascii() and _CHARACTER.fullmatch(word) else 1.0 for word in words)


def runs(words: Sequence[str], length: float) -> Iterator[str]:
    """Returns from each word on the shortest run of at least this length (see `length_of`). A text that is
    shorter is one run."""
    weights = [length_of((word,)) for word in words] or [0.0]
    end, total = 0, 0.0
    for start, weight in enumerate(weights):
        while end < len(words) and total < length:
            total += weights[end]
            end += 1
        if total < length and start:
            return
        yield " ".join(words[start:end])
        total -= weight


def hashed(run: str, size: int) -> int:
    """Returns a hash of `size` bytes as a number."""
    return int.from_bytes(
        hashlib.blake2b(run.encode(errors="surrogatepass"), digest_size=size).digest(), "big"
    )
