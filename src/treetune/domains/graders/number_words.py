"""Numbers in English words: "three hundred and twelve", "two thirds"."""

from __future__ import annotations

import re
from fractions import Fraction

_ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_VALUES = {word: value for value, word in enumerate(_ONES)} | {
    word: 20 + 10 * index for index, word in enumerate(_TENS)
}
_WORD_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = {
    "half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10, "twelfth": 12, "hundredth": 100,
}  # fmt: skip
_MOST_WORDS = 20
"""The most words of a text in which a number is read."""
_SAYS_MORE = {
    "to", "or", "and", "of", "than", "more", "less", "not", "least", "most", "fewer", "minus", "plus",
    "times", "over", "by", "point", "dozen", "percent", "squared", "cubed", "way", "hundred",
    *_VALUES, *_WORD_SCALES, *_PARTS,
}  # fmt: skip
"""Words that change the meaning of a number before them, as in "one to one" or "two or more"."""


def number_in_words(text: str) -> tuple[Fraction, str] | None:
    """Reads a number in English words in lower case ("three hundred and twelve", "two thirds"), and the unit
    after it. Returns None if there is no number."""
    words = re.split(r"[\s-]+", text.strip())
    if len(words) > _MOST_WORDS or not words:
        return None
    sign = -1 if words[0] in ("minus", "negative") else 1
    whole, at = _cardinal(words, 1 if sign < 0 else 0)
    value = None if whole is None else Fraction(whole)
    # The denominator of "two thirds" or "three halves"
    part = _PARTS.get(words[at].removesuffix("s").replace("halve", "half")) if at < len(words) else None
    if part is not None:
        # Without a number before it only "half" is a number. "third" would be an ordinal.
        if value is None and part != 2:
            return None
        value, at = (value or 1) * Fraction(1, part), at + 1
    if value is None or any(word in _SAYS_MORE for word in words[at:]):
        return None
    return sign * value, " ".join(words[at:])


def _cardinal(words: list[str], at: int) -> tuple[int | None, int]:
    """Returns the whole number in the words from `at` on, and the index of the first word after it. The
    number is None if the first word isn't part of one."""
    # "two thousand three hundred": `whole` is 2,000, and `group`, the number since the last scale, 300.
    whole = group = 0
    start = at
    last = ""
    while at < len(words):
        word = words[at]
        # A word of `_VALUES` may begin a number below a hundred, or be a digit after tens ("twenty two").
        may_begin_below_hundred = last in ("", "hundred", *_WORD_SCALES)
        is_digit_after_tens = last in _TENS and 0 < _VALUES.get(word, 0) < 10
        if word in _VALUES and (may_begin_below_hundred or is_digit_after_tens):
            group += _VALUES[word]
        elif word == "hundred" and 0 <= group < 100 and last != "hundred":
            group = (group or 1) * 100
        elif word in _WORD_SCALES and last not in _WORD_SCALES:
            whole, group = whole + (group or 1) * _WORD_SCALES[word], 0
        elif word == "and" and last in ("hundred", *_WORD_SCALES) and words[at + 1 : at + 2] != ["a"]:
            # "two hundred and six". The number of "a hundred and a bit" ends before the "and".
            at += 1
            continue
        else:
            break
        last, at = word, at + 1
    return (whole + group if at > start else None), at
