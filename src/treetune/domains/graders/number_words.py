"""Numbers in English words: "three hundred and twelve", "two thirds"."""

from __future__ import annotations

import re
from fractions import Fraction

_WORDS_BELOW_TWENTY = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_WORDS_OF_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_VALUE_OF_WORD = {word: value for value, word in enumerate(_WORDS_BELOW_TWENTY)} | {
    word: 20 + 10 * index for index, word in enumerate(_WORDS_OF_TENS)
}
_SCALE_OF_WORD = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_DENOMINATOR_OF_WORD = {
    "half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10, "twelfth": 12, "hundredth": 100,
}  # fmt: skip
_MOST_WORDS_OF_TEXT = 20
"""The most words of a text in which a number is read."""
_WORDS_THAT_CHANGE_NUMBER = {
    "to", "or", "and", "of", "than", "more", "less", "not", "least", "most", "fewer", "minus", "plus",
    "times", "over", "by", "point", "dozen", "percent", "squared", "cubed", "way", "hundred",
    *_VALUE_OF_WORD, *_SCALE_OF_WORD, *_DENOMINATOR_OF_WORD,
}  # fmt: skip
"""Words that change the meaning of a number before them, as in "one to one" or "two or more"."""


def number_in_words(text: str) -> tuple[Fraction, str] | None:
    """Reads a number in English words in lower case ("three hundred and twelve", "two thirds"), and the unit
    after it. Returns None if there is no number."""
    words = re.split(r"[\s-]+", text.strip())
    if len(words) > _MOST_WORDS_OF_TEXT:
        return None
    sign = -1 if words[0] in ("minus", "negative") else 1
    whole, position = _read_whole_number(words, 1 if sign < 0 else 0)
    value = None if whole is None else Fraction(whole)
    # The denominator of "two thirds" or "three halves"
    next_word = words[position] if position < len(words) else ""
    denominator = _DENOMINATOR_OF_WORD.get(next_word.removesuffix("s").replace("halve", "half"))
    if denominator is not None:
        # Without a number before it only "half" is a number. "third" would be an ordinal.
        if value is None and denominator != 2:
            return None
        value = (1 if value is None else value) * Fraction(1, denominator)
        position += 1
    if value is None or any(word in _WORDS_THAT_CHANGE_NUMBER for word in words[position:]):
        return None
    return sign * value, " ".join(words[position:])


def _read_whole_number(words: list[str], position: int) -> tuple[int | None, int]:
    """Returns the whole number in the words from `position` on, and the index of the first word after it. The
    number is None if the first word isn't part of one."""
    # "two thousand three hundred": `whole` is 2,000, and `group`, the number since the last scale, 300.
    whole = group = 0
    start = position
    last_word = ""
    while position < len(words):
        word = words[position]
        # A word of `_VALUE_OF_WORD` may begin a number below a hundred, or be a digit after tens ("twenty
        # two").
        may_begin_below_hundred = last_word in ("", "hundred", *_SCALE_OF_WORD)
        is_digit_after_tens = last_word in _WORDS_OF_TENS and 0 < _VALUE_OF_WORD.get(word, 0) < 10
        # "two hundred and six". The "a" of "a hundred and a bit" isn't a 1 of the number, which ends before
        # the "and".
        is_and_within_number = (
            word == "and"
            and last_word in ("hundred", *_SCALE_OF_WORD)
            and words[position + 1 : position + 2] != ["a"]
        )
        if word in _VALUE_OF_WORD and (may_begin_below_hundred or is_digit_after_tens):
            group += _VALUE_OF_WORD[word]
        elif word == "hundred" and group < 100 and last_word != "hundred":
            factor = 0 if last_word == "zero" else group or 1  # "hundred" alone is 100
            group = factor * 100
        elif word in _SCALE_OF_WORD and last_word not in _SCALE_OF_WORD:
            factor = 0 if last_word == "zero" else group or 1  # "thousand" alone is 1,000
            whole, group = whole + factor * _SCALE_OF_WORD[word], 0
        elif is_and_within_number:
            position += 1
            continue
        else:
            break
        last_word, position = word, position + 1
    return (whole + group if position > start else None), position
