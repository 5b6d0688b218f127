"""Numbers as people write them, read by value: separators, currencies, percent, units, fractions."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 2000
"""Characters of an answer that are looked at, and digits of a number: beyond it nothing is one.

It bounds the time of arithmetic on what a model wrote; answers in data sets have under 20 digits.
"""

LARGEST_EXPONENT = 1000

_SAME = str.maketrans({
    "−": "-", "–": "-", "﹣": "-", "－": "-", "＋": "+", "．": ".", "，": ",", "٫": ".", "٬": ",", "％": "%",
    "／": "/", "⁄": "/", "＝": "=", "＄": "$", "’": "'", "×": "*", "\u00a0": " ", "\u202f": " ",
    "\u2009": " ",
})  # fmt: skip

_CURRENCY = "$€£¥₹₩₽¢"

_LATEX: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\\[dtc]?frac\s?\{([^{}]{1,50})\}\s?\{([^{}]{1,50})\}"), r" \1/\2 "),
    (re.compile(r"\\[dtc]?frac\s?(\d)\s?(\d)"), r" \1/\2 "),
    (re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf|boxed|fbox)\s?\{"), " "),
    (re.compile(r"\{,\}|(?<=,)\\!"), lambda match: "," if match[0] == "{,}" else ""),
    (re.compile(r"\\[$%]"), lambda match: match[0][1]),
    (re.compile(r"\^\s?\{?\s?(?:\\circ|°)\s?\}?"), "°"),
    (re.compile(r"\\[,;:! ()\[\]]|~|\\(?:left|right|quad|displaystyle)\b"), " "),
    (re.compile(r"\\approx"), "="),
]

_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:,\d{2})+,\d{3}|\d{1,3}(?:'\d{3})+|\d{1,3}(?: \d{3})+(?![\d/])|\d+)"
_NUMBER = re.compile(
    rf"(?P<mixed>\d+) +(?P<above>\d+) ?/ ?(?P<below>\d+)"
    rf"|(?P<top>{_WHOLE}) ?/ ?(?P<bottom>{_WHOLE})"
    rf"|(?P<decimal>(?:{_WHOLE}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"
)
_BEFORE = re.compile(r"(?:[^\d+*/^<>≠≤≥]*[^\d+*/^<>≠≤≥\w.,'-])?")
_DENIED = re.compile(
    r"(?:\b(?:not|never|neither|nor|cannot|(?:any(?:thing)?|other|less|more|rather) (?:but|than))\b|n't\b"
    r"|!=|≠|\\neq?\b)[^\d]*\d|\d[^\d]*\b(?:is|was|are)(?: not\b|n't\b| (?:wrong|incorrect|false)\b)",
    re.IGNORECASE,
)
_AFTER = re.compile(r"[^\d+*^<>=]*")
_UNIT_POWER = re.compile(r"(?<=[^\W\d_])(?:\s?\}?\s?(?:\^\s?\{?\s?[23]\s?\}?|[²³])|[23](?!\d))")
_SCALE = re.compile(r"\s?(?:(hundred|thousand|million|billion|trillion)s?\b|([kK])(?![^\W_]))")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}


@dataclass(frozen=True)
class Number:
    """A value as it was written, and whether a percent sign stood behind it (50 % is 50 and percent)."""

    value: Fraction
    percent: bool = False

    def __str__(self) -> str:
        return exactly(self.value) + ("%" if self.percent else "")

    def equals(self, other: Number) -> bool:
        """By value. A percent sign on one side only is a unit, or a hundredth: both readings are right."""
        if self.value == other.value or self.percent == other.percent:
            return self.value == other.value
        plain, percent = (other, self) if self.percent else (self, other)
        return plain.value == percent.value / 100


def exactly(value: Fraction) -> str:
    """A decimal where there is one that ends, else a fraction."""
    below = value.denominator
    twos = fives = 0
    while below % 2 == 0:
        below, twos = below // 2, twos + 1
    while below % 5 == 0:
        below, fives = below // 5, fives + 1
    places = max(twos, fives)
    if below != 1 or places > 50:
        return f"{value.numerator}/{value.denominator}"
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    whole = f"{digits[:-places]}.{digits[-places:]}" if places else digits
    return f"-{whole}" if value < 0 else whole


def denied(text: str) -> bool:
    """Whether a text says what a number is not: ``not 72``, ``x != 72``, ``72 is wrong``."""
    return _DENIED.search(text[:LONGEST].replace("’", "'")) is not None


def read_number(text: str) -> Number | None:
    """The one number that a short text says, or None where it says none, several, or what it is not.

    Raises nothing, whatever the text, and takes time linear in it.
    """
    text = _plain(text.strip())
    if len(text) > LONGEST or denied(text) or "\\" in text:  # what is left of LaTeX says more than a number
        return None
    _, equals, right = text.rpartition("=")  # 9 * 2 = 18 says 18
    if equals:
        text = right
    found = _NUMBER.search(text)
    if found is None:
        return None
    before, after = text[: found.start()], text[found.end() :]
    power = _UNIT_POWER.search(after)
    if power is not None:
        after = after[: power.start()] + after[power.end() :]
    before = before.rstrip(f" \t({_CURRENCY}")
    negative = before.endswith("-") or re.search(r"\b(?:minus|negative)$", before.lower()) is not None
    before = before[:-1] if before.endswith(("-", "+")) else text[: found.start()]
    if not _BEFORE.fullmatch(before) or not _AFTER.fullmatch(after):
        return None
    if re.match(r"[,.'/:-]\d|\s?/\s?$|-\s?$|\s?[!(^]|[⁰¹²³⁴-⁹]", after):
        return None
    value = _value(found)
    if value is None:
        return None
    if scale := _SCALE.match(after):
        value *= 10 ** (3 if scale[2] else _SCALES[scale[1]])
    percent = re.match(r"\s?(?:%|percent\b|per cent\b)", after) is not None
    return Number(-value if negative else value, percent)


def _plain(text: str) -> str:
    """The same in ASCII digits and signs, without LaTeX's dress."""
    if len(text) > LONGEST:
        return text
    text = text.translate(_SAME)
    if not text.isascii():
        text = "".join(map(_character, text))
    if "\\" in text or "{,}" in text:
        for pattern, into in _LATEX:
            text = pattern.sub(into, text)
        text = text.replace("{", " ").replace("}", " ")
    # "$18$" is a formula; "$18" is money. Both are the number.
    return text.strip(' \t*_`"').rstrip(" .;,!$*_`)")


def _character(character: str) -> str:
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    if unicodedata.decomposition(character).startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", character).replace("⁄", "/") + " "
    return character


def _value(found: re.Match[str]) -> Fraction | None:
    if found["mixed"]:
        below = int(found["below"])
        return int(found["mixed"]) + Fraction(int(found["above"]), below) if below else None
    if found["top"]:
        top, bottom = (int(re.sub(r"[^\d]", "", found[name])) for name in ("top", "bottom"))
        return Fraction(top, bottom) if bottom else None
    decimal, _, exponent = found["decimal"].lower().partition("e")
    if exponent and (len(exponent) > 5 or abs(int(exponent)) > LARGEST_EXPONENT):
        return None
    whole, _, fraction = re.sub(r"[, ']", "", decimal).partition(".")
    return Fraction(int(whole + fraction or "0"), 10 ** len(fraction)) * Fraction(10) ** int(exponent or 0)
