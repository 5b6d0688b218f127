r"""Reads units after numbers, and converts between them.

A unit is a product of powers of dimensions, with a factor: ``km/h`` is length per time, with the factor 5/18,
since it is 5/18 of ``m/s``. Every noun that isn't the name of a unit ("apples") is a separate dimension, so
5 apples are not 5 pears. Text that scales, negates or comments on its number ("dozen", "squared", "is wrong")
is not a unit.

The library pint doesn't serve here: it reads ordinary nouns as units ("points", "hands"), and has no money.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from fractions import Fraction

MOST_WORDS_OF_UNIT = 6
"""The most words of a unit. A longer text is a sentence."""

LARGEST_POWER_OF_UNIT = 6
"""The largest power of a unit, such as 2 in ``s^2``."""


@dataclass(frozen=True)
class UnitOfMeasure:
    r"""A unit. Example: ``m/s^2`` is ``UnitOfMeasure((("length", 1), ("time", -2)), Fraction(1))``."""

    dimensions: tuple[tuple[str, int], ...]
    """The dimensions with their powers, in alphabetical order."""
    factor: Fraction = Fraction(1)
    """The size of the unit in basic units of its dimensions."""
    offset: Fraction = Fraction(0)
    """The value of 0 in basic units, which isn't 0 for temperatures."""


# dimension: {unit: how many of the dimension's first unit it is}
_SIZES_OF_UNITS: dict[str, dict[str, int | Fraction]] = {
    "length": {"m": 1, "mm": Fraction(1, 1000), "cm": Fraction(1, 100), "dm": Fraction(1, 10), "km": 1000,
               "um": Fraction(1, 10**6), "nm": Fraction(1, 10**9), "in": Fraction(254, 10000),
               "ft": Fraction(3048, 10000), "yd": Fraction(9144, 10000), "mi": Fraction(1609344, 1000)},
    "mass": {"g": 1, "kg": 1000, "mg": Fraction(1, 1000), "tonne": 10**6, "lb": Fraction(45359237, 100000),
             "oz": Fraction(45359237, 1600000)},
    "time": {"s": 1, "ms": Fraction(1, 1000), "min": 60, "hr": 3600, "day": 86400, "week": 604800},
    "months": {"month": 1, "year": 12, "decade": 120, "century": 1200},
    "money": {"dollar": 1, "cent": Fraction(1, 100)},
    "euro": {"euro": 1}, "sterling": {"sterling": 1, "penny": Fraction(1, 100)}, "yen": {"yen": 1},
    "rupee": {"rupee": 1}, "yuan": {"yuan": 1},
    "angle": {"degree": 1, "arcminute": Fraction(1, 60), "arcsecond": Fraction(1, 3600)},
    "radian": {"rad": 1},
    "current": {"A": 1, "mA": Fraction(1, 1000)},
    "substance": {"mol": 1},
    "data": {"bit": 1, "byte": 8},
}  # fmt: skip

_DERIVED_UNITS: dict[str, tuple[dict[str, int], Fraction]] = {
    "l": ({"length": 3}, Fraction(1, 1000)), "ml": ({"length": 3}, Fraction(1, 10**6)),
    "acre": ({"length": 2}, Fraction("4046.8564224")), "hectare": ({"length": 2}, Fraction(10000)),
    "mph": ({"length": 1, "time": -1}, Fraction(1609344, 3600000)),
    "kmh": ({"length": 1, "time": -1}, Fraction(5, 18)),
    "mps": ({"length": 1, "time": -1}, Fraction(1)),
    "Hz": ({"time": -1}, Fraction(1)),
    "N": ({"mass": 1, "length": 1, "time": -2}, Fraction(1000)),
    "Pa": ({"mass": 1, "length": -1, "time": -2}, Fraction(1000)),
    "kPa": ({"mass": 1, "length": -1, "time": -2}, Fraction(10**6)),
    "J": ({"mass": 1, "length": 2, "time": -2}, Fraction(1000)),
    "kJ": ({"mass": 1, "length": 2, "time": -2}, Fraction(10**6)),
    "W": ({"mass": 1, "length": 2, "time": -3}, Fraction(1000)),
    "kW": ({"mass": 1, "length": 2, "time": -3}, Fraction(10**6)),
    "V": ({"mass": 1, "length": 2, "time": -3, "current": -1}, Fraction(1000)),
}  # fmt: skip

_UNIT_OF_SPELLING = {
    "meter": "m", "metre": "m", "millimeter": "mm", "millimetre": "mm", "centimeter": "cm",
    "centimetre": "cm",
    "kilometer": "km", "kilometre": "km", "decimeter": "dm", "decimetre": "dm", "inch": "in", "inche": "in",
    "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "gram": "g", "kilogram": "kg", "kilo": "kg",
    "milligram": "mg", "ton": "tonne", "pound": "lb", "lbs": "lb", "ounce": "oz", "second": "s", "sec": "s",
    "millisecond": "ms", "minute": "min", "mins": "min", "hour": "hr", "h": "hr", "hrs": "hr", "yr": "year",
    "usd": "dollar", "buck": "dollar", "¢": "cent", "eur": "euro", "gbp": "sterling", "pence": "penny",
    "jpy": "yen", "inr": "rupee", "cny": "yuan", "rmb": "yuan", "deg": "degree", "radian": "rad",
    "liter": "l", "litre": "l", "milliliter": "ml", "millilitre": "ml", "cc": "ml", "kph": "kmh",
    "hertz": "Hz", "newton": "N", "pascal": "Pa", "joule": "J", "watt": "W", "kilowatt": "kW", "volt": "V",
    "ampere": "A", "amp": "A", "mole": "mol", "centurie": "century", "kilojoule": "kJ",
}  # fmt: skip

_TEMPERATURES = {
    "celsius": (Fraction(1), Fraction("273.15")),
    "fahrenheit": (Fraction(5, 9), Fraction("459.67") * Fraction(5, 9)),
    "kelvin": (Fraction(1), Fraction(0)),
}
# degrees C, ^\circ F, degrees Celsius, fahrenheit, K, kelvins
_TEMPERATURE = re.compile(
    r"(?:degrees? |\^\\circ ?)(?P<symbol>[CF])|(?:degrees? |\^\\circ ?)?(?P<name>[Cc]elsius|[Ff]ahrenheit)"
    r"|(?P<kelvin>K|[Kk]elvins?)"
)
_POWER_OF_WORD = {"squared": 2, "cubed": 3}
_TEMPERATURE_SYMBOLS = {"C": "celsius", "F": "fahrenheit"}
_SYMBOLS_OF_MONEY = {"USD": "dollar", "€": "euro", "£": "sterling", "¥": "yen", "₹": "rupee"}

# Words that comment on a number, negate it, compare it or scale it. A noun with one of them is not a unit.
_WORDS_OUTSIDE_OF_NOUNS = """
is are was were be been isn't not no nor or and but if than to too also only just about around
nearly almost roughly approximately approx exactly maybe perhaps probably likely possibly unless
except off over under above below up down more less fewer greater larger smaller bigger least most
minus plus times divided multiplied multiply mod modulo base remainder out between from with without
for where when as because since correct incorrect wrong right false true error invalid unknown
unsure guess either neither both all none any some plus/minus vs versus before after ago later
instead however rather hence so thus then that this which who it i we you they he she my your final
answer infinity infinite undefined dozen dozens score scores gross pair pairs couple hundred
hundreds thousand thousands million millions billion billions trillion trillions lakh crore k m.n.
mn bn mil b t half halves quarter quarters third thirds fourth fourths fifth fifths sixth sixths
seventh sevenths eighth eighths ninth ninths tenth tenths percent percentage permille ppm point
squared cubed square-root root factorial inverse reciprocal squares cubes twice thrice double triple
power powers negative positive
"""
_NOT_IN_NOUNS = frozenset(_WORDS_OUTSIDE_OF_NOUNS.split())  # fmt: skip
# The parts of "3 twentieths" and "5 thirty-thousandths", which divide their number
_ORDINAL_PART = re.compile(
    r"(?:\w+-)?(?:ten|eleven|twelf|\w+teen|\w+tie|hundred|thousand|million|billion)ths?"
)
# "reduced", "doubled", but not "seeds"
_PARTICIPLE = re.compile(r"(?!(?:seed|bed|weed|steed|breed|shed|sled|thread|bead|head)s?\Z)[a-z]{2,}ed")
# m, s^2, ft^{3}, oz.
_FACTOR_OF_UNIT = re.compile(r"(?P<name>[A-Za-z'¢€£¥₹.-]+)(?:\^\(?\{?(?P<power>-?\d)\}?\)?)?")
# The end of "cups of flour"
_OF_AND_NOUN = re.compile(r"(?<=\w) of [a-z ]+\Z")


def read_unit(text: str) -> UnitOfMeasure | None:
    r"""Reads the text after a number: ``km/h``, ``kg \cdot m``, ``cups of flour``. Returns None if it isn't a
    unit."""
    temperature = _read_temperature(text)
    if temperature is not None:
        return temperature
    text = re.sub(r"\\cdot|\\times|[*·]", " ", text)
    text = re.sub(r"(?<![A-Za-z])per(?![A-Za-z])", "/", text)
    if len(text.split()) > MOST_WORDS_OF_UNIT or re.search(r"[^-A-Za-z'¢€£¥₹./^\d{}() ]", text):
        return None  # a sentence, or a sign that no unit has
    text = _OF_AND_NOUN.sub("", " ".join(text.split()))  # cups of flour are cups
    # In km/h/s the unit before the first slash is a factor, and all units after it are divisors.
    numerator, *denominators = re.sub(" ?/ ?", "/", text).split("/")
    products = [(product, -1) for product in denominators]
    if numerator or not denominators:  # "per second" has no numerator
        products.insert(0, (numerator, 1))
    powers: dict[str, int] = {}
    factor = Fraction(1)
    for product, sign in products:
        unit = _read_product(product.strip(" ()"))
        if unit is None:
            return None
        for dimension, power in unit.dimensions:
            powers[dimension] = powers.get(dimension, 0) + sign * power
        factor *= unit.factor**sign
    remaining = [(dimension, power) for dimension, power in powers.items() if power]  # m/m has no dimension
    return UnitOfMeasure(tuple(sorted(remaining)), factor)


def _read_temperature(text: str) -> UnitOfMeasure | None:
    """Reads ``degrees C``, ``fahrenheit`` or ``K``; None for any other text."""
    match = _TEMPERATURE.fullmatch(text.strip())
    if match is None:
        return None
    if match["kelvin"]:
        scale = "kelvin"
    elif match["name"]:
        scale = match["name"].lower()
    else:
        scale = _TEMPERATURE_SYMBOLS[match["symbol"]]
    factor, offset = _TEMPERATURES[scale]
    return UnitOfMeasure((("temperature", 1),), factor, offset)


def _read_product(text: str) -> UnitOfMeasure | None:
    """Reads ``kg m``, ``square feet``, ``meters squared`` or a noun ("red balls").

    ``square feet`` and ``feet squared`` both are ``UnitOfMeasure((("length", 2),), …)``.
    """
    symbols = text.split()
    if not symbols:
        return None
    powers: dict[str, int] = {}
    factor = Fraction(1)
    next_power = 1  # 2 after "square", and 3 after "cubic"
    index = 0
    while index < len(symbols):
        symbol = symbols[index]
        index += 1
        if symbol.lower().rstrip(".") in ("square", "sq", "cubic", "cu"):
            next_power = 2 if symbol.lower().startswith("s") else 3
            continue
        match = _FACTOR_OF_UNIT.fullmatch(symbol)
        unit = None if match is None else _look_up_unit(match["name"])
        if match is None or unit is None:  # as in "red balls": not a product of units, but perhaps a noun
            return _read_noun(text)
        power = int(match["power"]) if match["power"] else next_power
        next_power = 1
        if index < len(symbols) and symbols[index].lower() in _POWER_OF_WORD:
            power = _POWER_OF_WORD[symbols[index].lower()]
            index += 1
        if abs(power) > LARGEST_POWER_OF_UNIT:
            return None
        for dimension, exponent in unit.dimensions:
            powers[dimension] = powers.get(dimension, 0) + exponent * power
        factor *= unit.factor**power
    if next_power != 1:
        return None  # "square" without a unit after it
    return UnitOfMeasure(tuple(sorted(powers.items())), factor)


def _look_up_unit(name: str) -> UnitOfMeasure | None:
    """Finds a unit by its symbol, name or plural. The case of letters matters for symbols: ``mA``, ``Pa``."""
    name = name.rstrip(".")
    lower = name.lower()
    # A single capital isn't read as a small letter: 5 M is 5 million, and not 5 metres. But L is a litre.
    spellings = (name, lower, lower.removesuffix("s")) if len(name) > 1 or name == "L" else (name,)
    for spelling in spellings:
        spelling = _UNIT_OF_SPELLING.get(spelling, spelling)
        for dimension, sizes in _SIZES_OF_UNITS.items():
            if spelling in sizes:
                return UnitOfMeasure(((dimension, 1),), Fraction(sizes[spelling]))
        if spelling in _DERIVED_UNITS:
            powers, factor = _DERIVED_UNITS[spelling]
            return UnitOfMeasure(tuple(sorted(powers.items())), factor)
    if name in _SYMBOLS_OF_MONEY:
        return _look_up_unit(_SYMBOLS_OF_MONEY[name])
    return None


def _read_noun(text: str) -> UnitOfMeasure | None:
    """Reads a noun such as ``red balls``: as a unit whose only dimension is the noun in the singular. Returns
    None for other texts, and if a part of the noun comments on the number."""
    match = re.fullmatch(r"([-A-Za-z' ]+?)\.?(?:\^\{?([23])\}?)?", text)
    if match is None:
        return None
    parts = match[1].lower().split()
    if any(part in _NOT_IN_NOUNS or _ORDINAL_PART.fullmatch(part) for part in parts):
        return None
    if _PARTICIPLE.fullmatch(parts[-1]) or parts[-1].endswith("ly"):
        return None  # "reduced", "doubled", "roughly" comment on the number
    if len(match[1]) == 1:
        return None  # a single letter is a variable, or k for a thousand
    # In the singular, so that 1 apple and 2 apples have the same unit. A short noun that ends in s, such as
    # "gas" or "bus", is not a plural.
    noun = " ".join(part.removesuffix("s") if len(part) > 3 else part for part in parts)
    return UnitOfMeasure(((noun, int(match[2] or 1)),))


def is_degree(unit: UnitOfMeasure) -> bool:
    """Returns whether the unit is a degree, which may be one of an angle or of a temperature."""
    return unit.dimensions == (("angle", 1),) and unit.factor == 1


def is_temperature(unit: UnitOfMeasure) -> bool:
    return unit.dimensions == (("temperature", 1),)


def is_radian(unit: UnitOfMeasure) -> bool:
    return unit.dimensions == (("radian", 1),)


# Numbers with their units


@dataclass(frozen=True)
class Scalar:
    r"""A number or formula with its unit. Example: ``3 \text{ cm}`` is ``Scalar("3", read_unit("cm"))``."""

    formula: str
    unit: UnitOfMeasure | None = None
    percent: bool = False
    """Whether it has a percent sign."""


_SCALE_OF_WORD: dict[str, int | Fraction] = {
    "dozen": 12, "score": 20, "gross": 144, "pair": 2, "pairs": 2, "k": 10**3, "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6, "billion": 10**9, "trillion": 10**12, "bn": 10**9, "tenths": Fraction(1, 10),
    "hundredths": Fraction(1, 100), "thousandths": Fraction(1, 1000), "halves": Fraction(1, 2),
    "thirds": Fraction(1, 3), "quarters": Fraction(1, 4),
}  # fmt: skip
# USD 5, -€5, £-5, or \frac after the symbol
_MONEY_FIRST = re.compile(r"(?P<sign>- ?)?(?P<symbol>USD|€|£|¥|₹) ?(?P<rest>-?[\d.\\].*)", re.DOTALL)
# ^\circ and ^\circ C at the end
_DEGREE_SIGN_AT_END = re.compile(r"\^\\circ ?(?P<scale>[CF])?\s*\Z")
_OF_AN_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_TEXT_COMMAND = re.compile(r"\\text ?\{([^{}]*)\}")
# A number's or formula's end before its unit: a digit, a bracket, 2i, 3\pi, 5!, 3x
_END_OF_NUMBER = re.compile(r"(?:[\d})\]iπ!]|\\pi|(?<![A-Za-z\\])[a-z])\Z")
# The " cm^2", " square feet" or "€" after a digit or a bracket
_PLAIN_UNIT = re.compile(
    r"(?<=[\d})!])(?P<gap> ?)(?P<unit>(?<![A-Za-z\\])[A-Za-z]{2,}[A-Za-z /^\d.{}-]{0,60}|[¢€£¥₹])\Z"
)
# 5 m, 3.2 m/s, 10 m/s^2: a letter that is a unit or a variable
_SHORT_UNIT = re.compile(r"(?P<number>-?[\d.]+) (?P<unit>[mgslhLNJWV](?:/[a-z]{1,3}(?:\^\{?\d\}?)?)?)")
_NOT_UNITS = {
    "sin", "cos", "tan", "log", "ln", "pi", "sqrt", "mod", "and", "or", "infty", "exp", "gcd", "lcm", "max",
    "min",
}  # fmt: skip
# "1 hour ", "30 minutes, ", "USD 2 and " in a sum of quantities
_QUANTITY_IN_SUM = re.compile(
    r"(?P<number>USD ?\d+(?:\.\d+)?|\d+(?:\.\d+)?) ?(?P<unit>[A-Za-z]{1,12}\.?)?"
    r"(?:\s*(?:,|and|, and)\s*|\s+|\Z)"
)


def split_unit(text: str) -> Scalar:
    """Separates a number from its unit, currency or percent sign.

    ``5 cm`` is ``Scalar("5", read_unit("cm"))``, ``€5`` is ``Scalar("5", read_unit("euro"))`` and ``50%`` is
    ``Scalar("50", percent=True)``. Text that isn't a unit stays in the formula (``5 is wrong``). Such a
    formula can't be read, and only equals the same text.
    """
    text = text.strip()
    money = _MONEY_FIRST.fullmatch(text)
    if money is not None:
        return _read_money(money) or Scalar(text)
    degrees = _DEGREE_SIGN_AT_END.search(text)
    # In \sin 30^\circ the sign of degrees belongs to the sine's argument, and the sine itself has no unit.
    if degrees is not None and not _OF_AN_ANGLE.search(text):
        number = text[: degrees.start()].strip()
        scale = degrees["scale"]  # the C of ^\circ C
        return Scalar(number, read_unit(f"^\\circ {scale}" if scale else "degree"))
    if text.endswith("%"):
        return Scalar(text[:-1].strip(), percent=True)
    if text.endswith("USD"):
        return Scalar(text[:-3].strip(), read_unit("dollar"))
    number, unit_text = _split_text(text)
    if not number or not unit_text:
        return Scalar(text)
    return _read_measured(number, unit_text) or Scalar(text)


def _read_money(money: re.Match[str]) -> Scalar | None:
    """Reads an amount of money after its currency. Returns None for ``€5 \\text{ cm}`` and ``€5%``, which are
    no amounts of money."""
    currency = _look_up_unit(_SYMBOLS_OF_MONEY[money["symbol"]])
    amount = split_unit(money["rest"])
    if amount.percent:
        return None
    # A unit after the number may repeat the currency (USD 5 dollars), or be a part of it (cents).
    if amount.unit is not None and (currency is None or amount.unit.dimensions != currency.dimensions):
        return None
    sign = "-" if money["sign"] else ""
    return Scalar(sign + amount.formula, currency)


def _split_text(text: str) -> tuple[str, str]:
    r"""Returns a number and the text after the number.

    ``5 \text{ red balls}`` is ("5", "red balls"): the text begins with the first ``\text``. ``5cm^2`` is
    ("5", "cm^2"): without ``\text``, the text is the words after the number, if these are not variables or a
    function. Both are "" if there is no number with such a text.
    """
    text_command = _TEXT_COMMAND.search(text)
    if text_command is not None:
        number = text[: text_command.start()].rstrip(" (~")  # 5 for 5 (\text{cm}) and 5~\text{cm}
        if not _END_OF_NUMBER.search(number):
            return "", ""
        unit_text = _TEXT_COMMAND.sub(r" \1 ", text[text_command.start() :])  # \text{cm} becomes cm
        unit_text = " ".join(re.sub(r"[{}~]", "", unit_text).split())
        unit_text = re.sub(r"\s*\^\s*", "^", unit_text).strip("()")  # cm ^2 becomes cm^2
        return number, unit_text
    plain = _PLAIN_UNIT.search(text)
    if plain is None:
        return "", ""
    number, unit_text = text[: plain.start()].strip(), plain["unit"].strip()
    first_word = re.split(r"[ /^.]", unit_text)[0]
    if _is_product(first_word, unit_text, plain["gap"]):
        return "", ""
    if first_word in _NOT_UNITS or not re.fullmatch(r"[-+.,:\d/ {}()!\\a-z^]*", number):
        return "", ""  # a function (sin), or the text before is neither a number nor a simple formula
    return number, unit_text.replace("{", "").replace("}", "")


_WRITTEN_WITHOUT_SPACE = {"cm", "mm", "km", "kg", "mg", "ft", "in", "lb", "oz", "hr", "mi", "ml", "yd"}


def _is_product(first_word: str, unit_text: str, gap: str) -> bool:
    """Returns whether letters after a number are variables, as in ``5nb``, and not a unit or noun.

    Two letters directly after the number are a product of two variables, except for units that are often
    written without a space (``5cm``). Other words of up to three letters that aren't units are variables,
    too, as in ``5 abc``. A longer word is a noun.

    Args:
        first_word: The first word of `unit_text`.
        unit_text: The text after the number.
        gap: The space between the number and `unit_text`, or "".
    """
    if len(first_word) == 2 and not gap:
        return first_word.lower() not in _WRITTEN_WITHOUT_SPACE
    if _look_up_unit(first_word) is not None:
        return False
    return all(len(letters) <= 3 for letters in re.findall(r"[A-Za-z]+", unit_text))


def _read_measured(number: str, unit_text: str) -> Scalar | None:
    r"""Reads a number and the text after it. The text is a scale such as "dozen", a unit, "percent", or a
    scale and then a unit or "percent". Returns None for any other text.

    For "5" and "dozen eggs" the formula is ``\frac{12}{1} \cdot (5)``, and the unit is eggs.
    """
    if not unit_text.endswith("m."):  # "p.m." must not become a unit
        unit_text = unit_text.rstrip(" .").strip()
    first_word, _, other_words = unit_text.partition(" ")
    if first_word.lower() in _POWER_OF_WORD:
        # "5 squared" is 25, and in "5 feet squared" the word belongs to the unit.
        number = f"({number})^{_POWER_OF_WORD[first_word.lower()]}"
        unit_text = other_words.strip()
    elif first_word.lower() in _SCALE_OF_WORD:
        scale = Fraction(_SCALE_OF_WORD[first_word.lower()])
        number = f"\\frac{{{scale.numerator}}}{{{scale.denominator}}} \\cdot ({number})"
        unit_text = other_words.strip().removeprefix("of ").strip()
    if not unit_text:
        return Scalar(number)
    if unit_text.lower() in ("percent", "per cent"):
        return Scalar(number, percent=True)
    unit = read_unit(unit_text)
    return None if unit is None else Scalar(number, unit)


def with_short_unit(answer: Scalar, other: Scalar, other_is_number: bool) -> Scalar:
    """Reads ``5 m`` as a length if the other answer is a number or has a unit. If not, returns `answer` as it
    is: 5 times a variable."""
    match = _SHORT_UNIT.fullmatch(answer.formula)
    if match is None or answer.unit is not None:
        return answer
    if not other_is_number and other.unit is None:
        return answer
    return Scalar(match["number"], read_unit(match["unit"]))


_SUMMABLE_DIMENSIONS = [
    ((name, 1),) for name in ("time", "money", "length", "mass", "months", "angle", "sterling")
]


def sum_of_quantities(text: str) -> Scalar | None:
    """Reads ``1 hour 30 minutes``, ``2 dollars and 50 cents`` or ``5 ft 6 in`` as one quantity.

    Each part has to be smaller than one unit of the previous part, as 30 minutes are smaller than an hour. If
    it isn't, the text states several answers, and the result is None.
    """
    # \text{ cm} becomes its content.
    text = " ".join(_TEXT_COMMAND.sub(r" \1 ", text).split())
    position = 0
    parts: list[tuple[Fraction, UnitOfMeasure]] = []
    while position < len(text):
        match = _QUANTITY_IN_SUM.match(text, position)
        if match is None:
            return None
        number = match["number"].removeprefix("USD").strip()
        has_dollars = match["number"].startswith("USD")  # "USD 2" has its unit before the number
        unit = read_unit("dollar" if has_dollars else match["unit"] or "")
        if unit is None or unit.dimensions not in _SUMMABLE_DIMENSIONS:
            return None
        parts.append((Fraction(number), unit))
        position = match.end()
    if len(parts) < 2:
        return None
    for (_, larger), (value, smaller) in itertools.pairwise(parts):
        if larger.dimensions != smaller.dimensions or value * smaller.factor >= larger.factor:
            return None
    smallest = parts[-1][1]
    total = sum((value * unit.factor for value, unit in parts), Fraction(0)) / smallest.factor
    if total.denominator == 1:
        return Scalar(str(total.numerator), smallest)
    return Scalar(f"\\frac{{{total.numerator}}}{{{total.denominator}}}", smallest)


def factor_and_offset_between(unit: UnitOfMeasure, other: UnitOfMeasure) -> tuple[Fraction, Fraction] | None:
    """Returns the factor and the summand that convert a number of `unit` to `other`.

    Example: from °C to K they are 1 and 273.15. Returns None if the units have different dimensions. A degree
    without a scale gets the scale of the other temperature: 5° compared with °C is 5 °C.
    """
    only_other_has_scale = is_degree(unit) and is_temperature(other)
    only_unit_has_scale = is_temperature(unit) and is_degree(other)
    if unit == other or only_other_has_scale or only_unit_has_scale:
        return Fraction(1), Fraction(0)
    if unit.dimensions != other.dimensions:
        return None
    return unit.factor / other.factor, (unit.offset - other.offset) / other.factor
