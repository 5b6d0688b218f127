"""Units behind a number: taken off, and compared where both answers have one that is known."""

from __future__ import annotations

import re
from fractions import Fraction

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
    """(formula, unit or "", whether a percent sign stood there). The unit is normalised: ``cm^2``."""
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
    found = _TRAILING.fullmatch(text)
    if found is None or (_bare(found["unit"]) in _NO_UNITS):
        return text, unit, False
    named = _bare(found["unit"])
    if named in ("percent", "per cent"):
        return found["number"].strip(), unit, True
    for scale, factor in _SCALES.items():
        if named == scale or named.startswith(scale + " "):
            rest = named[len(scale) :].strip()
            return f"{found['number'].strip()} \\cdot {factor}", _normal(rest, 1) if rest else unit, False
    if not found["unit"].startswith("\\text") and not re.fullmatch(r"[-+.,:\d/ {}\\a-z^]*", found["number"]):
        return text, unit, False
    if re.fullmatch(r".*[a-z]", found["number"]) and not found["unit"].startswith("\\text"):
        return text, unit, False
    return found["number"].strip(), _normal(named, int(found["power"] or 1)) or unit, False


def _bare(unit: str) -> str:
    words = re.sub(r"\\text ?\{([^{}]*)\}", r" \1 ", unit).lower()
    return " ".join(re.sub(r"[^a-z/^\d ]", "", words).split())


def _normal(words: str, power: int) -> str:
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
    """How many `other` a `unit` is: 1 where one is missing or unknown, None where they can't agree."""
    if not unit or not other or unit == other:
        return Fraction(1)
    (name, power), (other_name, other_power) = _parted(unit), _parted(other)
    if name not in _DIMENSION or other_name not in _DIMENSION:
        return Fraction(1)
    kind = _DIMENSION[name]
    if kind != _DIMENSION[other_name] or power != other_power:
        return None
    return (Fraction(_KNOWN[kind][name]) / Fraction(_KNOWN[kind][other_name])) ** power


def _parted(unit: str) -> tuple[str, int]:
    name, _, power = unit.partition("^")
    return name, int(power or 1)
