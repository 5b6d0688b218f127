r"""The text of an answer to a mathematical problem: found in a response, in one plain way of writing, and the
numbers in words and the units in it.

Dress alone (``\left``, ``\,``, ``\dfrac``, full-width digits, dollars) is taken off; content stays. Reading
it is the business of `math_answers`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from treetune.tasks.graders.extraction import boxes

LONGEST = 2000
"""Characters of an answer that are looked at: no data set has one of 500."""

_ANSWER_IS = re.compile(r"(?:answer|solution)s?\s*(?:is|are|:|=)\s*:?\s*", re.IGNORECASE)
_DISPLAY = re.compile(r"\s*(\$\$?|\\\(|\\\[)(.*?)(\$\$?|\\\)|\\\])", re.DOTALL)

_SAME = {
    "−": "-", "–": "-", "—": "-", "﹣": "-", "－": "-", "＋": "+", "．": ".", "，": ",", "％": "%", "／": "/",
    "⁄": "/", "＝": "=", "＄": "$", "（": "(", "）": ")", "［": "[", "］": "]", "×": r"\times ",
    "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ",
    "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "√": r"\sqrt ", "°": r"^\circ ", "′": "'", "’": "'", "θ": r"\theta ", "∓": r"\mp ", "⟨": r"\langle ",
    "⟩": r"\rangle ", "ℝ": r"\mathbb{R}", "½": r"\frac{1}{2}", "α": r"\alpha ", "β": r"\beta ",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "",
}  # fmt: skip
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")

_DRESS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), into)
    for pattern, into in (
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|(?:no)?limits|rm|bf|it)(?![A-Za-z])\.?", ""),
        (r"\\(?:quad|qquad|enspace|thinspace)(?![A-Za-z])|(?<!\\)\\[ ;:>]|~", " "),
        (r",\\!\s*(?=\d{3})", ","),
        (r"(?<!\\)\\!|(?<!\\)\\,(?=\d{3})", ""),
        (r"(?<!\\)\\,", " "),
        (r"\\[hv]space\*?\{[^{}]{0,20}\}|\\phantom\{[^{}]{0,20}\}|\\label\{[^{}]{0,20}\}", ""),
        (r"\\(?:[tdcs]frac|nicefrac|xfrac|flatfrac)(?![A-Za-z])", r"\\frac"),
        (r"(?<=\d)\{:\}(?=\d)", ":"),
        (r":=", "="),
        (r"\.\.\.", r"\\dots "),
        (r"(?<![A-Za-z])([aApP])\. ?[mM](?:\.|(?![A-Za-z]))", r"\1m"),
        (r"\\[td]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:leq|leqslant|leqq)(?![A-Za-z])", r"\\le"),
        (r"\\(?:geq|geqslant|geqq)(?![A-Za-z])", r"\\ge"),
        (r"\\(?:neq)(?![A-Za-z])", r"\\ne"),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
        (r"\\(?:lbrack)(?![A-Za-z])", "["),
        (r"\\(?:rbrack)(?![A-Za-z])", "]"),
        (r"\\(?:varnothing)(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset"),
        (r"\\(?:ldots|cdots|dotsc|dotsb)(?![A-Za-z])", r"\\dots"),
        (r"\\(?:mathrm|mathit|mathbf|mathsf|textbf|textit|textrm|textsf|texttt|textsc|textup|textnormal|mbox|hbox|operatorname\*?|bm|boldsymbol)(?=\s*\{)",
         r"\\text"),
        (r"\\(?:land|wedge)(?![A-Za-z])", r"\\text{ and }"),
        (r"\\(?:lor|vee)(?![A-Za-z])", r"\\text{ or }"),
        (r"\{,\}", ","),
        (r"\^\s*\{\s*\\(?:circ|degree)\s*\}|\^\s*\\(?:circ|degree)(?![A-Za-z])|\\degree(?![A-Za-z])",
        r"^\\circ "),
        (r"\\begin\{array\}\s*\{[^{}]{0,20}\}", r"\\begin{matrix}"),
        (r"\\end\{array\}", r"\\end{matrix}"),
        (r"\\(?:begin|end)\{(?:align|aligned|gather|gathered|equation|split)\*?\}", " "),
        (r"\*\*", "^"),
    )
]  # fmt: skip


def given_answer(response: str, gold_parts: int = 1) -> str | None:
    r"""Returns the answer that a response settles on, as written, or None.

    It stands in the last ``\boxed{…}``; where the gold has several parts and the last paragraph as
    many boxes, in all of these. Without a box, it is what follows the last "answer is" on its line.
    """
    in_boxes = boxes(response)
    if in_boxes:
        last = [box for box in in_boxes if "\n\n" not in response[box[1] : in_boxes[-1][0]]]
        if (
            gold_parts > 1
            and len(last) >= gold_parts
            and not re.search(r",|\\text\{|\bor\b|\band\b", in_boxes[-1][2])
        ):
            return ", ".join(content for _, _, content in last[-gold_parts:])
        return in_boxes[-1][2].strip() or None
    tail = response[-LONGEST:]
    starts = [match.end() for match in _ANSWER_IS.finditer(tail)]
    if not starts:
        return None
    rest = tail[starts[-1] :]
    display = _DISPLAY.match(rest)
    if display and not rest[display.end() :].partition("\n")[0].strip(" .*"):
        return display[2].strip() or None
    line = next((line for line in map(str.strip, rest.split("\n")) if line), "")
    end = re.search(r"\.(?=\s+[A-Z])", line)  # no full stop of a number or an abbreviation
    return (line[: end.start()] if end else line).strip() or None


def gold_answer(gold: str) -> str:
    """Returns the answer in a gold of a data set: a worked solution with a box, or a bare answer."""
    if in_boxes := boxes(gold):
        return in_boxes[-1][2].strip()
    return re.split(r"[Tt]he (?:final )?answer is:?\s*", gold)[-1].strip()


def undressed(text: str) -> str:
    """Returns one way of writing: ASCII signs, plain commands, single spaces, no dollars, no full stop."""
    if not text.isascii():
        text = _SUPERSCRIPT.sub(lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
        text = _SUBSCRIPT.sub(lambda match: "_{" + match[0].translate(_SUBSCRIPTS) + "}", text)
        text = "".join(map(_character, text))
    while (inner := boxes(text)) and len(inner) == 1 and inner[0][:2] == (0, len(text)):
        text = inner[0][2].strip()
    for pattern, into in _DRESS:
        text = pattern.sub(into, text)
    text = (
        text.replace("\\$", "USD ")
        .replace("$", " ")
        .replace("\\%", "%")
        .replace("\\(", " ")
        .replace("\\)", " ")
    )
    text = re.sub(r"\\\[(?!\d)|(?<!\\)\\\]", " ", text)
    text = re.sub(r"\\\\(?=\s*\Z)", " ", text)
    text = re.sub(r"\s+", " ", text).strip(' *`"').rstrip(" .,;:")
    # Of a blank that was written as a backslash and a space, the space is gone.
    return re.sub(r"(?<!\\)\\\Z", "", text).strip()


def _character(character: str) -> str:
    if character in _SAME:
        return _SAME[character]
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    if unicodedata.decomposition(character).startswith("<fraction>"):
        above, _, below = unicodedata.normalize("NFKC", character).partition("⁄")
        return rf"\frac{{{above}}}{{{below}}}"
    return character


# Numbers in English words

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
_SAYS_MORE = {
    "to", "or", "and", "of", "than", "more", "less", "not", "least", "most", "fewer", "minus", "plus",
    "times", "over", "by", "point", "dozen", "percent", "squared", "cubed", "way", "hundred",
    *_VALUES, *_WORD_SCALES, *_PARTS,
}  # fmt: skip
"""Words that, behind a number, change what it says: "one to one", "two or more"."""


def number_in_words(text: str) -> tuple[Fraction, str] | None:
    """Reads a number in English words in lower case ("three hundred and twelve", "two thirds") and the unit
    behind it; None without one."""
    words = re.split(r"[\s-]+", text.strip())
    if len(words) > _MOST_WORDS or not words:
        return None
    sign = -1 if words[0] in ("minus", "negative") else 1
    whole, at = _cardinal(words, 1 if sign < 0 else 0)
    value = None if whole is None else Fraction(whole)
    part = _PARTS.get(words[at].removesuffix("s").replace("halve", "half")) if at < len(words) else None
    if part is not None:
        # Without a number before it only the half is one: "third" is a place in a row.
        if value is None and part != 2:
            return None
        value, at = (value or 1) * Fraction(1, part), at + 1
    if value is None or any(word in _SAYS_MORE for word in words[at:]):
        return None
    return sign * value, " ".join(words[at:])


def _cardinal(words: list[str], at: int) -> tuple[int | None, int]:
    """Returns the value of the words from `at` on, and the index of the first word that isn't part of it."""
    whole = group = 0
    start = at
    last = ""
    while at < len(words):
        word = words[at]
        # A number below a hundred begins, or a digit stands behind its tens.
        starts = last in ("", "hundred", *_WORD_SCALES)
        if word in _VALUES and (starts or (last in _TENS and 0 < _VALUES[word] < 10)):
            group += _VALUES[word]
        elif word == "hundred" and 0 <= group < 100 and last != "hundred":
            group = (group or 1) * 100
        elif word in _WORD_SCALES and last not in _WORD_SCALES:
            whole, group = whole + (group or 1) * _WORD_SCALES[word], 0
        elif word == "and" and last in ("hundred", *_WORD_SCALES) and words[at + 1 : at + 2] != ["a"]:
            at += 1
            continue
        else:
            break
        last, at = word, at + 1
    return (whole + group if at > start else None), at


# Units behind a number

_KNOWN: dict[str, dict[str, int | Fraction]] = {
    # dimension: {unit: how many of the dimension's first unit it is}
    "length": {"m": 1, "mm": Fraction(1, 1000), "cm": Fraction(1, 100), "km": 1000,
               "in": Fraction(254, 10000), "ft": Fraction(3048, 10000), "yd": Fraction(9144, 10000),
               "mi": Fraction(1609344, 1000)},
    "mass": {"g": 1, "kg": 1000, "mg": Fraction(1, 1000), "lb": Fraction(45359237, 100000),
             "oz": Fraction(45359237, 1600000)},
    "time": {"s": 1, "min": 60, "hr": 3600, "day": 86400, "week": 604800},
    "money": {"dollar": 1, "cent": Fraction(1, 100)},
    "angle": {"degree": 1},
    "volume": {"l": 1, "ml": Fraction(1, 1000)},
    "speed": {"mph": 1},
    "morning": {"am": 1},
    "afternoon": {"pm": 1},
}  # fmt: skip
_NAMES = {
    "meter": "m", "metre": "m", "millimeter": "mm", "centimeter": "cm", "centimetre": "cm",
    "kilometer": "km", "kilometre": "km", "inch": "in", "inche": "in", "foot": "ft", "feet": "ft",
    "yard": "yd", "mile": "mi", "gram": "g", "kilogram": "kg", "milligram": "mg", "pound": "lb",
    "ounce": "oz", "second": "s", "sec": "s", "minute": "min", "hour": "hr", "h": "hr",
    "dollar": "dollar", "usd": "dollar", "cent": "cent", "degree": "degree", "liter": "l", "litre": "l",
    "milliliter": "ml", "day": "day", "week": "week", "milesperhour": "mph", "mileperhour": "mph",
    "deg": "degree",
}  # fmt: skip
_DIMENSION = {unit: kind for kind, units in _KNOWN.items() for unit in units}
_POWERS = [("square", 2), ("sq", 2), ("cubic", 3), ("cu", 3)]

_TRAILING = re.compile(
    r"(?P<number>.*[\d})\]iπ]|.*\\pi|.*[^A-Za-z\\][a-z])\s*"
    r"(?P<unit>(?:\\text ?\{[^{}]{1,60}\}|(?<![A-Za-z\\])[A-Za-z]{2,}(?: [A-Za-z.]{1,20}){0,4})"
    r"(?:/(?:\\text ?\{[^{}]{1,20}\}|[a-z]{1,8}))?\.?)\s*(?:\^ ?\{?(?P<power>[23])\}?)?",
    re.DOTALL,
)
_DEGREES = re.compile(r"\^\\circ\s*(?:[CF](?![A-Za-z])|\\text ?\{ ?[CF] ?\})?\s*\Z")
_OF_AN_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_NO_UNITS = {"sin", "cos", "tan", "log", "ln", "pi", "sqrt", "mod", "and", "or", "infty"}
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


def split_unit(text: str) -> tuple[str, str, bool]:
    """Returns the formula, the unit or "", and whether a percent sign stood there. The unit is normalised:
    ``cm^2``."""
    text = text.strip()
    unit = ""
    if text.startswith(("USD ", "-USD ", "- USD ")):
        text, unit = text.replace("USD ", "", 1), "dollar"
    elif re.match(r"[€£¥₹]", text):
        text = text[1:].strip()
    if _DEGREES.search(text) and not _OF_AN_ANGLE.search(text):
        return _DEGREES.sub("", text).strip(), "degree", False
    if text.endswith("USD"):
        text, unit = text[:-3].strip(), "dollar"
    if text.endswith("%"):
        return text[:-1].strip(), unit, True
    match = _TRAILING.fullmatch(text)
    if match is None or (_bare_unit(match["unit"]) in _NO_UNITS):
        return text, unit, False
    named = _bare_unit(match["unit"])
    if named in ("percent", "per cent"):
        return match["number"].strip(), unit, True
    for scale, factor in _SCALES.items():
        if named == scale or named.startswith(scale + " "):
            rest = named[len(scale) :].strip()
            return (
                f"{match['number'].strip()} \\cdot {factor}",
                _normal_unit(rest, 1) if rest else unit,
                False,
            )
    if not match["unit"].startswith("\\text") and not re.fullmatch(r"[-+.,:\d/ {}\\a-z^]*", match["number"]):
        return text, unit, False
    if re.fullmatch(r".*[a-z]", match["number"]) and not match["unit"].startswith("\\text"):
        return text, unit, False
    return match["number"].strip(), _normal_unit(named, int(match["power"] or 1)) or unit, False


def _bare_unit(unit: str) -> str:
    words = re.sub(r"\\text ?\{([^{}]*)\}", r" \1 ", unit).lower()
    return " ".join(re.sub(r"[^a-z/^\d ]", "", words).split())


def _normal_unit(words: str, power: int) -> str:
    for word, exponent in _POWERS:
        if words.startswith(word + " "):
            words, power = words[len(word) + 1 :], exponent
    if (written := re.fullmatch(r"(.*?) ?\^ ?([23])", words)) is not None:
        words, power = written[1], int(written[2])
    if words.endswith((" squared", " cubed")):
        words, power = words.rsplit(" ", 1)[0], 2 if words.endswith("squared") else 3
    words = words.replace(" ", "")
    single = words[:-1] if words.endswith("s") and words not in _DIMENSION else words
    name = _NAMES.get(words) or _NAMES.get(single) or (single if single in _DIMENSION else words)
    return name if power == 1 else f"{name}^{power}"


def ratio(unit: str, other: str) -> Fraction | None:
    """Returns how many `other` a `unit` is: 1 if one is missing or unknown, None if they can't agree."""
    if not unit or not other or unit == other:
        return Fraction(1)
    (name, power), (other_name, other_power) = (
        (name, int(power or 1)) for name, _, power in (unit.partition("^"), other.partition("^"))
    )
    if name not in _DIMENSION or other_name not in _DIMENSION:
        return Fraction(1)
    kind = _DIMENSION[name]
    if kind != _DIMENSION[other_name] or power != other_power:
        return None
    return (Fraction(_KNOWN[kind][name]) / Fraction(_KNOWN[kind][other_name])) ** power
