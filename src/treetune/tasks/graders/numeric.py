"""Graders of numbers, such as GSM8K's answers: `Numeric` compares by value, and two others repeat the rules
of published code.

Numbers may have separators, currencies, percent signs and units, and may be fractions.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

from annotated_types import MinLen
from typing_extensions import override

from treetune.tasks.graders.base import Grader, Isolation
from treetune.tasks.graders.extraction import find_boxes
from treetune.tasks.thoughts import THINK_END, read_thoughts
from treetune.vocabulary import Grade, Problem

_NUMBER_OF_PAPER = re.compile(r"[-+]?(?:\d*\.\d+|\d+\.?)(?:[eE][-+]?\d+)?")
"""A number as the VinePPO paper's code finds it."""
_NUMBER_IN_TEXT = re.compile(
    r"(?:(?<![\d)])-)?[$€£]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/\d[\d,]*(?![\d/]))?"
    r"(?:[ ]?%|[ ]percent\b)?"
)
"""A number within a text, with its sign. A minus between two numbers isn't a sign."""
# The parts of a clause before and after a number. They may say that the number isn't the answer.
_CLAUSE_BEFORE = re.compile(r"[^.,;:\n\d]*\Z")
_CLAUSE_AFTER = re.compile(r"[^.,;:\n\d]*")


@Grader.register("numeric")
@dataclass(frozen=True, kw_only=True)
class Numeric(Grader):
    """Gives the reward 1 if the answer is the gold's number in any form: ``1,080``, ``$1080.00``,
    ``1080 eggs``, ``2160/2``. If the answer or the gold isn't a number, both must be the same text.

    The answer is the first line with text after the last `marker`. The gold may be a worked solution with the
    marker. A text that excludes a number (``not 72``) is not an answer.
    """

    votes_by_value: ClassVar[bool] = True

    marker: Annotated[str, MinLen(1)] = "####"
    """The text that precedes an answer."""
    without_marker: Literal["no_answer", "last_number", "boxed"] = "no_answer"
    """The answer of a response that has no text after a marker: none, its last number, or the content of its
    last ``\\boxed{…}``."""
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is not part of an answer. The default also recognizes the tags of
    other models (`tasks.thoughts`). null: the whole response counts."""
    require_think_end: bool = False
    """Whether a response must have a thought that ends. A response without one then counts as
    ``no_answer``."""

    def __post_init__(self) -> None:
        if self.require_think_end and self.think_end is None:
            raise ValueError("require_think_end needs think_end, the text that ends a thought: '</think>'")

    @override
    def grade(self, response: str, problem: Problem) -> Grade:
        if self._lacks_thought(response, problem):
            return Grade(reward=0.0, outcome="no_answer", message=f"no {self.think_end} in it")
        return super().grade(response, problem)

    @override
    def after_thought(self, response: str, problem: Problem) -> str | None:
        return None if self._lacks_thought(response, problem) else super().after_thought(response, problem)

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        """Returns the answer after the marker or, without one, the last number or the last box, as
        `without_marker` says. Returns None if there is no such answer, or if it excludes a number
        (``not 72``)."""
        answer = after_marker(response, self.marker)
        if answer is None and self.without_marker == "last_number":
            answer = last_number(response)
        elif answer is None and self.without_marker == "boxed":
            all_boxes = find_boxes(response)
            if all_boxes:
                answer = all_boxes[-1].content.strip() or None
        return None if answer is None or is_denial(answer) else answer

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade:
        """Compares the answer with the gold: as numbers or, if one of them can't be read as a number, as
        texts."""
        gold = after_marker(problem.gold, self.marker)
        if gold is None:  # the gold is only an answer: "72", or also "72 ####"
            gold = problem.gold.replace(self.marker, "").strip()
        number, gold_number = read_number(extracted), read_number(gold)
        if number is None or gold_number is None:
            is_same_text = extracted.lower().split() == gold.lower().split()
            return Grade(reward=float(is_same_text), outcome="ok", extracted=extracted)
        return Grade(reward=float(number.equals(gold_number)), outcome="ok", extracted=str(number))

    def _lacks_thought(self, response: str, problem: Problem) -> bool:
        """Returns whether a response needs a thought that ends, and has none."""
        if not self.require_think_end or self.think_end is None:
            return False
        reading = read_thoughts(response, self.think_end, is_open=problem.is_thought_open)
        return not reading.thought or reading.is_cut_off


@Grader.register("gsm8k_exact")
@dataclass(frozen=True, kw_only=True)
class Gsm8kExact(Grader):
    """Gives the same grades as the VinePPO paper's code on GSM8K, so that results are comparable.

    The text after the last ``####``, without commas, must be equal to the gold's text. Commas in the gold are
    kept, so the 14 test problems with a comma in their gold can't be solved. 18.0 is not 18.
    """

    votes_by_value: ClassVar[bool] = True

    original_format: bool = True
    """Whether the answer is the text after ``####``. If it is false, the answer is the response's last
    number."""
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is not part of an answer. The default also recognizes the tags of
    other models (`tasks.thoughts`). null: the whole response counts."""

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        """Returns the text after the last ``####`` if `original_format` is set, or else the last number.
        Returns None if there is none."""
        if self.original_format:
            _, marker, text = response.rpartition("####")
            return text.strip() if marker else None
        without_commas = response.replace(",", "")  # 1,080 is one number
        numbers = _NUMBER_OF_PAPER.findall(without_commas)
        return numbers[-1] if numbers else None

    @override
    def verdict(self, extracted: str, problem: Problem) -> float:
        gold = problem.gold.rpartition("####")[2].strip().lower()
        return float(extracted.replace(",", "").lower() == gold)

    @override
    def same_answer(self, answer: str, other: str, problem: Problem) -> bool:
        return answer.replace(",", "").lower() == other.replace(",", "").lower()


@Grader.register("gsm8k_lenient_substring")
@dataclass(frozen=True, kw_only=True)
class Gsm8kLenientSubstring(Grader):
    """Gives the same grades as the Exploring Paths code on GSM8K, so that results are comparable.

    The answer is the rest of the line after the first ``####``. If there is a ``</think>``, only the text
    after the first one is searched. An answer is right if it contains the gold's text anywhere. So if the
    gold is 18, ``118``, ``$18`` and a list of many numbers with 18 are right, too. If the gold is 1,800,
    ``1800`` is wrong.
    """

    # The grader only searches texts in linear time, so it needs no process.
    isolation: ClassVar[Isolation] = "inline"

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        _, has_thought, text_after_thought = response.partition(THINK_END)
        answer = text_after_thought if has_thought else response
        _, marker, text_after_marker = answer.partition("####")
        return text_after_marker.partition("\n")[0].strip() if marker else None

    @override
    def verdict(self, extracted: str, problem: Problem) -> float:
        return float(problem.gold.rpartition("####")[2].strip() in extracted)


def after_marker(text: str, marker: str) -> str | None:
    """Returns the first line with text after the last marker, stripped. Returns None if there is none."""
    _, separator, text_after_marker = text.rpartition(marker)
    if not separator:
        return None
    for line in text_after_marker.split("\n"):
        if line.strip():
            return line.strip()
    return None


# Reading numbers

MOST_CHARACTERS_OF_NUMBER = 2000
"""The number of characters of the longest text that is read as a number. Answers in data sets have fewer than
20 digits.

The limit bounds the time of arithmetic with numbers that a model wrote.
"""

LARGEST_EXPONENT = 1000

_TO_ASCII = str.maketrans({
    "−": "-", "–": "-", "﹣": "-", "－": "-", "＋": "+", "．": ".", "，": ",", "٫": ".", "٬": ",", "％": "%",
    "／": "/", "⁄": "/", "＝": "=", "＄": "$", "’": "'", "×": "*", "\u00a0": " ", "\u202f": " ",
    "\u2009": " ", "‐": "-", "‑": "-", "⁻": "-", "·": "*", "⋅": "*", "∙": "*", "＊": "*", "。": ".",
    "（": "(", "）": ")",
})  # fmt: skip

_CURRENCY = "$€£¥₹₩₽¢"

_LATEX_REPLACEMENTS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\\[dtc]?frac\s?\{([^{}]{1,50})\}\s?\{([^{}]{1,50})\}"), r" \1/\2 "),  # \frac{1}{2}
    (re.compile(r"\\[dtc]?frac\s?(\d)\s?(\d)"), r" \1/\2 "),  # \frac12
    (re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf|boxed|fbox)\s?\{"), " "),  # 72 \text{ eggs}
    (re.compile(r"\{,\}|(?<=,)\\!"), lambda match: "," if match[0] == "{,}" else ""),  # 1{,}080 and 1,\!080
    (re.compile(r"\\[$%]"), lambda match: match[0][1]),  # 50\%
    (re.compile(r"\^\s?\{?\s?(?:\\circ|°)\s?\}?"), "°"),  # 90^{\circ}
    (re.compile(r"\\[,;:! ()\[\]]|~|\\(?:left|right|quad|displaystyle)\b"), " "),  # spaces and brackets
    (re.compile(r"\\approx"), "="),
]
"""Patterns of LaTeX and the texts that replace them in an answer, in this order. Braces that remain become
spaces."""

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺", "0123456789+")
_TIMES_SIGN = r"\s?(?:\*|\\times(?![A-Za-z])|\\cdot(?![A-Za-z])|[xX](?=\s?10))\s?"
# 2.5 \times 10^6, 2.5 x 10^{-3}, 2.5*10⁶
_POWER_OF_TEN = re.compile(
    rf"(?P<factor>\d){_TIMES_SIGN}10\s?"
    r"(?:\^\s?\{?\s?(?P<exponent>[-+]?\d{1,4})(?![\d.^])\s?\}?|(?P<raised>-?[⁰¹²³⁴-⁹⁺]{1,4}))"
)
_THIN_SPACES = re.compile(r"(?<=\d)(?:[\u00a0\u202f\u2009]|\\,|\{,\}|,\\!)(?=\d{3}(?!\d))")

_WHOLE_NUMBER = (
    r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:,\d{2})+,\d{3}|\d{1,3}(?:'\d{3})+|\d{1,3}(?: \d{3})+(?![\d/])|\d+)"
)
"""A whole number, also with separators: ``1,234,567``, ``12,34,567`` (India), ``1'234``, ``1 234``."""
_NUMBER_IN_DIGITS = re.compile(
    rf"(?P<whole>\d+) +(?P<rest_numerator>\d+) ?/ ?(?P<rest_denominator>\d+)"  # 1 1/2
    rf"|(?P<numerator>{_WHOLE_NUMBER}) ?/ ?(?P<denominator>{_WHOLE_NUMBER})"  # 3/4
    rf"|(?P<decimal>(?:{_WHOLE_NUMBER}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"  # 1,200.5 or 2.5e6
)
# The texts that may be before and after the only number: anything without a digit or an operator. Directly
# before the number there must be neither a letter nor a separator, since it would be a part of the number
# (x2, .5).
_ALLOWED_BEFORE = re.compile(r"(?:[^\d+*/^<>≠≤≥]*[^\d+*/^<>≠≤≥\w.,'-])?")
_ALLOWED_AFTER = re.compile(r"[^\d+*^<>=]*")
_DENIAL = re.compile(
    r"(?:\b(?:not|never|neither|nor|cannot|(?:any(?:thing)?|other|less|more|rather) (?:but|than))\b|n't\b"
    r"|!=|≠|\\neq?\b)[^\d]*\d|\d[^\d]*\b(?:is|was|are)(?: not\b|n't\b| (?:wrong|incorrect|false)\b)",
    re.IGNORECASE,
)
_UNIT_POWER = re.compile(r"(?<=[^\W\d_])(?:\s?\}?\s?(?:\^\s?\{?\s?[23]\s?\}?|[²³])|[23](?!\d))")
"""The exponent of a unit, which doesn't count as a number: ``m^2``, ``m²``, ``m2``."""
_UNIT_POWER_IN_A_TEXT = re.compile(rf"(?<!\d[eE]){_UNIT_POWER.pattern}")
"""The same within a longer text, where the exponent of a number, such as 1.5e3, must not match."""
_SCALE_AFTER_NUMBER = re.compile(
    r"\s?(?:(?P<word>hundred|thousand|million|billion|trillion)s?\b|(?P<kilo>[kK])(?![^\W_]))"
)
_POWERS_OF_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}


@dataclass(frozen=True)
class WrittenNumber:
    """A number, and whether it has a percent sign: 50 % is ``WrittenNumber(Fraction(50), percent=True)``."""

    value: Fraction
    percent: bool = False

    @override
    def __str__(self) -> str:
        return write_exactly(self.value) + ("%" if self.percent else "")

    def equals(self, other: WrittenNumber) -> bool:
        """Returns whether two values are equal.

        If only one of the values has a percent sign, the sign may be a unit (50 % equals 50), or it may mean
        a hundredth (50 % equals 0.5). Both readings are accepted.
        """
        if self.value == other.value:
            return True
        if self.percent == other.percent:
            return False
        plain, percent = (other, self) if self.percent else (self, other)
        return plain.value == percent.value / 100


def write_exactly(value: Fraction) -> str:
    """Writes a fraction as a decimal if that has at most 50 places: ``0.125``, but ``1/3``."""
    # A fraction is a finite decimal if its denominator has no prime factors but 2 and 5.
    other_factors = value.denominator
    twos = fives = 0
    while other_factors % 2 == 0:
        other_factors, twos = other_factors // 2, twos + 1
    while other_factors % 5 == 0:
        other_factors, fives = other_factors // 5, fives + 1
    places = max(twos, fives)
    if other_factors != 1 or places > 50:
        return f"{value.numerator}/{value.denominator}"
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    decimal = f"{digits[:-places]}.{digits[-places:]}" if places else digits
    return f"-{decimal}" if value < 0 else decimal


def is_denial(text: str) -> bool:
    """Returns whether a text excludes a number: ``not 72``, ``x != 72``, ``72 is wrong``."""
    return _DENIAL.search(text[:MOST_CHARACTERS_OF_NUMBER].replace("’", "'")) is not None


def read_number(text: str) -> WrittenNumber | None:
    """Reads the only number in a short text.

    ``$1,200 per month`` is ``WrittenNumber(Fraction(1200), False)``, and ``-5 %`` is
    ``WrittenNumber(Fraction(-5), True)``. Returns None if the text has no number or several, or if the text
    denies its number (``not 72``). No text raises an error, and the time is linear in the text.
    """
    text = _words_to_digits(_simplify(_shorten_powers_of_ten(text.strip())))
    # A command of LaTeX that `_simplify` has left means more than a number.
    if len(text) > MOST_CHARACTERS_OF_NUMBER or is_denial(text) or "\\" in text:
        return None
    _, equals, right = text.rpartition("=")  # 9 * 2 = 18 means 18
    if equals:
        text = right
    match = _NUMBER_IN_DIGITS.search(text)
    if match is None:
        return None
    text_before, text_after = text[: match.start()], text[match.end() :]
    power = _UNIT_POWER.search(text_after)
    if power is not None:  # the 2 of 72 m^2 is not a second number
        text_after = text_after[: power.start()] + text_after[power.end() :]
    # The sign may be before the currency: -$5
    up_to_sign = text_before.rstrip(f" \t({_CURRENCY}")
    ends_in_minus_word = re.search(r"\b(?:minus|negative)$", up_to_sign.lower()) is not None
    is_negative = up_to_sign.endswith("-") or ends_in_minus_word
    if up_to_sign.endswith(("-", "+")):
        text_before = up_to_sign[:-1]
    if not _ALLOWED_BEFORE.fullmatch(text_before) or not _ALLOWED_AFTER.fullmatch(text_after):
        return None
    # If the number continues after the match (2,5; 3/; 4!; 5²), its value isn't that of the match.
    if re.match(r"[,.'/:-]\d|\s?/\s?$|-\s?$|\s?[!(^]|[⁰¹²³⁴-⁹]", text_after):
        return None
    value = _value_of_match(match)
    if value is None:
        return None
    scale = _SCALE_AFTER_NUMBER.match(text_after)
    if scale is not None:  # "5k" or "5 million"
        power_of_ten = 3 if scale["kilo"] else _POWERS_OF_SCALES[scale["word"]]
        value *= 10**power_of_ten
    percent = re.match(r"\s?(?:%|percent\b|per cent\b)", text_after) is not None
    return WrittenNumber(-value if is_negative else value, percent)


def last_number(text: str) -> str | None:
    """Returns the last number of a text, with its sign, its denominator and its percent sign.

    Returns None if there is no number, or if its clause excludes it (``it is not 72``). Exponents of units
    don't count (``72 m^2``). A number in words counts only if the text has no number in digits.
    """
    text = text.translate({ord("−"): "-", ord("－"): "-"})  # minus signs, also those in exponents
    text = _THIN_SPACES.sub(",", text)  # "1 080" with a thin space becomes "1,080"
    text = _shorten_powers_of_ten(text).translate(_TO_ASCII)
    if not text.isascii():
        text = "".join(map(_digit_to_ascii, text))
    for pattern, replacement in _LATEX_REPLACEMENTS_IN_A_TEXT:
        text = pattern.sub(replacement, text)
    text = _UNIT_POWER_IN_A_TEXT.sub("", text)
    numbers = list(_NUMBER_IN_TEXT.finditer(text))
    if not numbers:
        number_in_words = _last_number_in_words(text)
        return None if number_in_words is None else str(number_in_words)
    number = numbers[-1]
    clause_before = _CLAUSE_BEFORE.search(
        text, max(number.start() - MOST_CHARACTERS_OF_NUMBER, 0), number.start()
    )
    clause_after = _CLAUSE_AFTER.match(text, number.end(), number.end() + MOST_CHARACTERS_OF_NUMBER)
    clause = number[0]
    if clause_before:
        clause = clause_before[0] + clause
    if clause_after:
        clause += clause_after[0]
    # The pattern of a number allows commas between digits, and so also takes a comma after the number.
    return None if is_denial(clause) else number[0].rstrip(",")


_LATEX_REPLACEMENTS_IN_A_TEXT: list[tuple[re.Pattern[str], str]] = [
    (re.compile(r"\\[dtc]?frac\s?\{(\d{1,50})\}\s?\{(\d{1,50})\}"), r" \1/\2 "),
    (re.compile(r"\\[dtc]?frac\s?(\d)\s?(\d)"), r" \1/\2 "),
    (re.compile(r"\\(?=[$%])"), ""),
    (re.compile(r"(?<=[A-Za-z])\}(?=\s?\^)"), ""),  # 72 \text{m}^2
]
"""Patterns of LaTeX and the texts that replace them before the last number of a text is searched. Other LaTeX
stays, since it is not a part of a number."""


def _shorten_powers_of_ten(text: str) -> str:
    """Writes scientific notation as programs do: ``2.5 \\times 10^6`` becomes ``2.5e6``."""

    def shorten(match: re.Match[str]) -> str:
        exponent = match["exponent"] or match["raised"].translate(_SUPERSCRIPTS)
        return f"{match['factor']}e{exponent}"

    if "10" not in text:
        return text
    # A longer text stays as it is, so that the time is bounded. The limit is 50 times as long as a number,
    # since the text may be a whole solution.
    if len(text) > 50 * MOST_CHARACTERS_OF_NUMBER:
        return text
    for times in "×·⋅":
        text = text.replace(times, "*")
    for minus in "−⁻":
        text = text.replace(minus, "-")
    return _POWER_OF_TEN.sub(shorten, text)


# Numbers in words

# fmt: off
_WORDS_BELOW_TWENTY = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]
_WORDS_OF_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
# fmt: on
_VALUE_OF_CARDINAL = {word: value for value, word in enumerate(_WORDS_BELOW_TWENTY)}
_VALUE_OF_CARDINAL |= {word: 10 * tens for tens, word in enumerate(_WORDS_OF_TENS, start=2)}
_VALUE_OF_MULTIPLE = {
    "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
_NUMBER_WORD = "|".join([*_VALUE_OF_CARDINAL, *_VALUE_OF_MULTIPLE])
_NUMBER_IN_WORDS = re.compile(
    rf"(?<![\w-])(?:{_NUMBER_WORD})(?:(?:[ ]?-[ ]?|[ ]and[ ]|,?[ ]+)(?:{_NUMBER_WORD}))*(?![\w-])",
    re.IGNORECASE,
)
_UNIT_AND_END = re.compile(r"(?:\s+[^\W\d]+)?[\s.!*_$`)}]*\Z")


def _words_to_digits(text: str) -> str:
    """Replaces numbers in words by digits: ``twenty-one eggs`` by ``21 eggs``. A long text, or one with
    digits, stays as it is."""
    if len(text) > MOST_CHARACTERS_OF_NUMBER or re.search(r"\d", text):
        return text

    def to_digits(match: re.Match[str]) -> str:
        value = _value_of_words(match[0])
        return match[0] if value is None else str(value)

    return _NUMBER_IN_WORDS.sub(to_digits, text)


def _last_number_in_words(text: str) -> int | None:
    """Returns the number in words at the end of a text. It may be followed by a unit of one word. Returns
    None if there is none, or if its clause excludes it."""
    ending = text[-MOST_CHARACTERS_OF_NUMBER:]
    matches = list(_NUMBER_IN_WORDS.finditer(ending))
    if not matches or not _UNIT_AND_END.fullmatch(ending, matches[-1].end()):
        return None
    last_match = matches[-1]
    value = _value_of_words(last_match[0])
    if value is None:
        return None
    # `is_denial` looks for a word such as "not" and a digit after it, so the number is written in digits.
    clause_before = _CLAUSE_BEFORE.search(ending, 0, last_match.start())
    clause = (clause_before[0] if clause_before else "") + str(value)
    return None if is_denial(clause) else value


def _value_of_words(text: str) -> int | None:
    """Returns the value of cardinal words in the order of English: 2021 for ``two thousand twenty-one``.

    Returns None for any other order, such as two numbers in a row (``two three``).
    """
    # The words consist of groups. A group is a number below 1000 that "thousand", "million", … or the end
    # follows.
    total = group = 0
    # The multiples ("million", "thousand") become smaller from left to right. This is more than the largest.
    least_multiple = 10**15
    upper_bound = 1000  # the value of the group's next word must be smaller than this
    for word in re.findall(r"[a-z]+", text.lower()):
        if word == "and":
            continue
        if word in _VALUE_OF_CARDINAL:
            value = _VALUE_OF_CARDINAL[word]
            if value >= upper_bound or (value == 0 and (group or total)):
                return None
            group += value
            # "one" to "nine" may follow "twenty". Nothing may follow "three".
            upper_bound = 10 if value >= 20 else 1
        elif word == "hundred":
            if not 0 < group < 100:
                return None
            group, upper_bound = 100 * group, 100
        else:
            if group == 0 or _VALUE_OF_MULTIPLE[word] >= least_multiple:
                return None
            least_multiple = _VALUE_OF_MULTIPLE[word]
            total, group, upper_bound = total + group * least_multiple, 0, 1000
    return total + group


def _simplify(text: str) -> str:
    """Returns a text with ASCII digits and signs, and without LaTeX commands that don't change a number.

    Returns a text that is too long for a number unchanged. The caller refuses such a text.
    """
    if len(text) > MOST_CHARACTERS_OF_NUMBER:
        return text
    text = text.translate(_TO_ASCII)
    if not text.isascii():
        text = "".join(map(_digit_to_ascii, text))
    if "\\" in text or "{,}" in text:
        for pattern, replacement in _LATEX_REPLACEMENTS:
            text = pattern.sub(replacement, text)
        text = text.replace("{", " ").replace("}", " ")
    # A "$" is removed only at the end, where it closes a formula ("$18$"). At the beginning it stays, as the
    # caller accepts it as a currency ("$18").
    return text.strip(' \t*_`"').rstrip(" .;,!$*_`)")


def _digit_to_ascii(character: str) -> str:
    """Returns a digit of any script, or a fraction such as ½, in ASCII. Returns other characters
    unchanged."""
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    if unicodedata.decomposition(character).startswith("<fraction>"):
        # The spaces keep the fraction apart from other digits: ``2½`` becomes ``2 1/2``.
        return " " + unicodedata.normalize("NFKC", character).replace("⁄", "/") + " "
    return character


def _value_of_match(match: re.Match[str]) -> Fraction | None:
    """Returns the value of a number without its sign: ``1 1/2``, ``3/4``, ``1,200.5`` or ``2.5e6``.

    Returns None for a division by zero, and for an exponent beyond `LARGEST_EXPONENT`.
    """
    if match["whole"]:
        denominator = int(match["rest_denominator"])
        if not denominator:
            return None
        return int(match["whole"]) + Fraction(int(match["rest_numerator"]), denominator)
    if match["numerator"]:
        numerator = int(_without_separators(match["numerator"]))
        denominator = int(_without_separators(match["denominator"]))
        return Fraction(numerator, denominator) if denominator else None
    decimal, _, exponent = match["decimal"].lower().partition("e")
    # The exponent's length is checked first, since `int` takes long for thousands of digits.
    if exponent and (len(exponent) > 5 or abs(int(exponent)) > LARGEST_EXPONENT):
        return None
    whole_digits, _, fraction = _without_separators(decimal).partition(".")
    digits = whole_digits + fraction or "0"  # "0" if there is only a point
    return Fraction(int(digits), 10 ** len(fraction)) * Fraction(10) ** int(exponent or 0)


def _without_separators(number: str) -> str:
    return re.sub(r"[, ']", "", number)
