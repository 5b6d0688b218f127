r"""Reads the answers of MATH by their kinds: a number with its unit, a time, a date, a ratio, a score, words,
a pair, a set, an interval, a matrix, an equation, a system.

`read_answer` distinguishes the kinds by the brackets and signs at the top level. So an open interval is never
read as a closed one, and a pair never as a set. Everything else is a formula (`Scalar`).
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from treetune.domains.graders.formulas import exact_value
from treetune.domains.graders.math_kinds import Date, Ratio, Score, TimeOfDay
from treetune.domains.graders.math_units import Scalar, split_unit, sum_of_quantities

MOST_NESTED_PARTS = 6
"""The most levels of answers within each other, such as a number in a pair in a set. A text at a deeper level
is read as a formula."""
MOST_PARTS_OF_ANSWER = 60
"""The most parts of a list, a union or a matrix that are read."""


@dataclass(frozen=True)
class Words:
    """An answer in words, in lower case and without punctuation. Of a choice such as ``(B) 12`` only the
    letter is kept."""

    text: str


@dataclass(frozen=True)
class BracketGroup:
    """A list, a set, an ordered pair or an interval.

    Example: ``(1, 2]`` is ``BracketGroup("tuple", (Scalar("1"), Scalar("2")), "(", "]")``.
    """

    kind: Literal["list", "set", "tuple"]
    """``list``: without brackets; ``set``: in braces; ``tuple``: an ordered pair or an interval."""
    parts: tuple[MathAnswer, ...]
    left: str = "("
    right: str = ")"


@dataclass(frozen=True)
class Union:
    """A union of intervals, sets or rays."""

    parts: tuple[MathAnswer, ...]
    named: str = ""
    """The unknown, if the union comes from an inequality: ``x`` for ``x < 1 or x > 3``. Empty for any other
    union."""


@dataclass(frozen=True)
class Matrix:
    """A matrix, as the entries of each row."""

    rows: tuple[tuple[MathAnswer, ...], ...]


@dataclass(frozen=True)
class Named:
    """A value with a name: ``x = 5``, ``f(x) = 2x``, ``AB = 7``."""

    name: str
    value: MathAnswer


@dataclass(frozen=True)
class Equation:
    """An equation that doesn't name a value: ``x + y = 5``."""

    left: str
    right: str
    chain: bool = False
    """Whether it has more than two sides, as ``a = b = c``. Then `left` is the first and `right` the last."""


@dataclass(frozen=True)
class System:
    """Values of several names, in the order of the text: ``x = 1, y = 2``."""

    values: tuple[tuple[str, MathAnswer], ...]


@dataclass(frozen=True)
class Qualified:
    r"""A value with a condition: ``2^{n-1} \text{ for } n \ge 1``."""

    value: MathAnswer
    condition: str


MathAnswer = (
    Scalar
    | TimeOfDay
    | Date
    | Ratio
    | Score
    | System
    | Qualified
    | Words
    | BracketGroup
    | Union
    | Matrix
    | Named
    | Equation
)

_INFINITY, _MINUS_INFINITY = Scalar("\\infty"), Scalar("-\\infty")

# (1, 2)^T, \begin{pmatrix} … \end{pmatrix}^{\top}
_TRANSPOSED_VECTOR = re.compile(
    r"(?P<inner>.*[)\]}]) ?\^ ?(?:\{ ?)?(?:T|\\top|\\intercal|\\text ?\{ ?T ?\})(?: ?\})?", re.DOTALL
)
# \begin{cases} x = 1 \\ y = 2 \end{cases}, also as \{ \begin{matrix} … \end{matrix}
_CASES_ENVIRONMENT = re.compile(
    r"(?:\\\{ ?)?\\begin\{(?:cases|matrix)\}(?P<rows>.*)\\end\{(?:cases|matrix)\}", re.DOTALL
)
# \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
_MATRIX_ENVIRONMENT = re.compile(
    r"\\begin\{(?P<bracket>[pbBvV]?)(?:small)?matrix\*?\}(?P<rows>.*)\\end\{(?P=bracket)(?:small)?matrix\*?\}",
    re.DOTALL,
)
# \\ and \\[2pt] between the rows of cases; of a matrix \cr, too
_ROW_END = re.compile(r"\\\\(?:\[[^\]]{0,12}\])?")
_MATRIX_ROW_END = re.compile(r"\\\\(?:\[[^\]]{0,12}\])?|\\cr")
# The name of a value, before an equals sign
_NAME_OF_VALUE = re.compile(
    r"""\( [a-zA-Z] (?: , [ ]? (?: [a-zA-Z] | \\[a-z]{2,6} ) )+ \)      # (a, b)
    | \| [A-Z]{1,4} \|                                                  # |AB|
    | (?: m?[ ]? \\angle[ ]? )?                                         # \angle ABC
      (?: [A-Z]{1,4} | [a-z] | \\text[ ]?\{[^{}]{1,60}\}                # AB, x, \text{Area}
        | \\(?:theta|alpha|beta|gamma|lambda|mu|phi|Delta|pi) )
      '*                                                                # f'
      (?: _[ ]? (?: \w | \{[^{}]{1,12}\} ) )?                           # a_1, a_{10}
      (?: \^\{?-1\}? )?                                                 # f^{-1}
      (?: [ ]? \([^()=]{1,20}\) )?                                      # f(x), P(A)
    """,
    re.VERBOSE,
)
_WORD_OF_LETTERS = re.compile(r"[A-Za-z]{2,}")
_FUNCTION_NAMES = {
    "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "arcsin", "arccos", "arctan", "sqrt",
    "pi", "max", "min", "gcd", "lcm", "mod",
}  # fmt: skip
_TEXT_COMMAND = re.compile(r"\\text ?\{([^{}]*)\}")
# (B), B., (B) 12, B: Paris
_CHOSEN_OPTION = re.compile(r"\(?([A-Z])(?:\)(?:[.:]?(?: .*)?)|[.:] .*|[.:]?)")
# 1 \text{ and } 2, 1 \text{, or } 2, 1 or 2
_AND_OR_OR = re.compile(r"\\text ?\{\s*(?:,\s*)?(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_AND_OF_INTERSECTION = re.compile(r"\\text ?\{\s*and\s*\}|(?<![A-Za-z\\])and(?![A-Za-z])")
# x \le 1, x < 1
_INEQUALITY_SIGN = re.compile(r"\\(?:le|ge|ne)(?![A-Za-z])|[<>]")
_NAME_OF_INEQUALITY_SIGN = {"\\le": "<=", "\\ge": ">=", "\\ne": "!=", "<": "<", ">": ">"}
# -1,234,567.8 and USD 12,000
_NUMBER_WITH_THOUSANDS = re.compile(r"[-+]? ?(?:USD )?\d{1,3}(?:,\d{3})+(?:\.\d+)?%?")
# 1.2e5, 3E-4
_SCIENTIFIC_NUMBER = re.compile(r"\A([-+]? ?\d{1,50}(?:\.\d{0,50})?)[eE]\+?(-?\d{1,3})\Z")
# \text{3 dollars} is 3 \text{ dollars}; \text{4:30} and \text{2024-01-02} are bare.
_NUMBER_IN_TEXT = re.compile(
    r"\\text ?\{ ?(?P<number>(?:USD )?(?=[-.]?\d)[-\d.,:/ ]*(?<! ))"
    r" ?(?P<unit>[A-Za-z][A-Za-z .^/\d]{0,60})?\}"
)
# 3 \text{ to } 4
_RATIO_IN_WORDS = re.compile(r"(?<=\d) ?\\text ?\{ ?to ?\} ?(?=\d)")
# x = 12,000 at the end or before a decimal point: the commas part thousands
_THOUSANDS_OF_A_SIDE = re.compile(r"(?<==)( ?\d{1,3})((?:,\d{3})+)(?=\.\d|\Z)")
# x \in
_NAME_AND_MEMBERSHIP_SIGN = re.compile(r"[A-Za-z] ?\\in(?![A-Za-z])")


def read_answer(text: str, depth: int = 0) -> MathAnswer:
    """Reads the answer in a normalised text (`math_text.normalise_notation`). Raises nothing.

    `depth` is the number of answers that contain this one: 1 for a number in a pair, and 2 for a number in a
    pair in a set.
    """
    text = text.strip()
    if depth > MOST_NESTED_PARTS:
        return Scalar(text)
    membership = _NAME_AND_MEMBERSHIP_SIGN.match(text)
    if membership:  # x \in [1, 2] is read as [1, 2]
        text = text[membership.end() :].strip()
    # The order matters: each reader returns None for other kinds, and the next one is tried.
    answer = _read_reals(text)
    if answer is None and depth == 0:  # a condition belongs to the whole answer, and not to a part of it
        answer = _read_qualified(text)
    if answer is None:
        answer = _read_table(text, depth)
    if answer is not None:
        return answer
    text = _take_number_out_of_text(text)
    return (
        _read_special_number(text)
        or sum_of_quantities(text)
        or _read_words(text)
        or _read_equation_or_region(text, depth)
        or _read_both_signs(text, depth)
        or _read_number_with_thousands(text)
        or _read_group(text, depth)
        or _read_ratio(text)
        or _read_scalar(text)
    )


def _read_table(text: str, depth: int) -> MathAnswer | None:
    """Reads cases, a matrix, or a matrix or vector that is transposed."""
    # Cases may also be written as a matrix after a brace: \{ \begin{matrix} … \end{matrix}.
    if "\\begin" in text and ("cases" in text or text.startswith("\\{")):
        cases = _CASES_ENVIRONMENT.fullmatch(text)
        if cases is not None:
            return _read_cases(cases["rows"], depth)
    if "^" in text and (transposed := _read_transposed(text, depth)) is not None:
        return transposed
    # A matrix without brackets of its own may have brackets around it.
    matrix = _MATRIX_ENVIRONMENT.fullmatch(text.strip("()[] ")) if "matrix" in text else None
    if matrix is None:
        return None
    without_lines = matrix["rows"].replace("\\hline", " ")
    rows = [row for row in _MATRIX_ROW_END.split(without_lines) if row.strip()]
    if not rows or len(rows) > MOST_PARTS_OF_ANSWER or matrix["bracket"] in ("v", "V"):
        return Scalar(matrix[0])  # empty, too large to read, or a determinant or a norm
    cells = [split_at_top(row, ("&",)) for row in rows]
    return Matrix(tuple(tuple(read_answer(cell, depth + 1) for cell in row) for row in cells))


def _take_number_out_of_text(text: str) -> str:
    r"""Turns ``\text{3 dollars}`` into ``3\text{dollars}``, and ``3 \text{ to } 4`` into ``3:4``."""
    if "\\text" not in text:
        return text
    number = _NUMBER_IN_TEXT.fullmatch(text)
    if number is not None:
        unit = f"\\text{{{number['unit']}}}" if number["unit"] else ""
        text = number["number"].strip(" .,") + unit
    return _RATIO_IN_WORDS.sub(":", text)


def _read_special_number(text: str) -> TimeOfDay | Date | Score | None:
    """Reads a time, a date or a score, which look like arithmetic: ``4:30``, ``2024-01-02``, ``5-3``."""
    plain = _remove_text_commands(text)
    if plain is None:  # the text has other commands than \text
        return None
    return TimeOfDay.read(plain) or Date.read(plain) or Score.read(plain)


def _read_equation_or_region(text: str, depth: int) -> MathAnswer | None:
    r"""Reads ``x = 5``, ``(1,2) \cup (3,4)`` or ``x > 3``."""
    if "=" in text and (equation := _read_equation(text, depth)) is not None:
        return equation
    if "\\cup" in text:
        parts = split_at_top(text, ("\\cup",))
        if 1 < len(parts) <= MOST_PARTS_OF_ANSWER:
            return Union(tuple(read_answer(part, depth + 1) for part in parts))
    # The set {x | x > 3} is read by `_read_group`, which removes what is before the condition.
    is_set = _split_brackets(text)[0] == "{"
    return _read_region(text, depth) if not is_set and _INEQUALITY_SIGN.search(text) else None


def _read_both_signs(text: str, depth: int) -> MathAnswer | None:
    r"""Reads ``1 \pm \sqrt{2}`` as two answers. In a set or a list, this is done for each part later."""
    if "\\pm" not in text and "\\mp" not in text:
        return None
    opening = _split_brackets(text)[0]
    has_parts = opening == "{" or (not opening and len(split_at_top(text, (",", ";"))) > 1)
    if has_parts:
        return None
    plus = text.replace("\\pm", "+").replace("\\mp", "-")
    minus = text.replace("\\pm", "-").replace("\\mp", "+")
    return BracketGroup("list", (read_answer(plus, depth + 1), read_answer(minus, depth + 1)))


def _read_number_with_thousands(text: str) -> MathAnswer | None:
    r"""Reads ``12,000 \text{ km}``, whose comma doesn't separate the parts of a list."""
    thousands = _NUMBER_WITH_THOUSANDS.match(text)
    if thousands is None or re.search(r"[\d,;]", text[thousands.end() :]) or _AND_OR_OR.search(text):
        return None  # not such a number, or a list: 12,000, 5
    return _read_scalar(text.replace(",", ""))


def _remove_text_commands(text: str) -> str | None:
    r"""Returns a text without ``\text``; None if it has other commands or signs of LaTeX."""
    plain = " ".join(_TEXT_COMMAND.sub(r" \1 ", text).split()).strip(" .,")
    return None if re.search(r"[\\{}^_$]", plain) else plain


# \setminus \{1, 2\}, after \mathbb{R}
_SUBTRACTED_SET = re.compile(
    r"(?:\\(?:setminus|backslash|smallsetminus)|-) ?\\\{(?P<holes>[^{}]*(?:\{[^{}]*\}[^{}]*)*)\\\}"
)
# all real numbers x, except for 1 and 2
_REALS_IN_WORDS = re.compile(
    r"(?:the )?(?:set of )?(?:all |any )?(?:the )?real(?:s| numbers?)(?: \w)?"
    r"(?:,? (?:except|excluding|other than|but)(?: for)? (?P<holes>.+))?",
    re.IGNORECASE,
)
_SETS_IN_WORDS = {
    "all integers": "\\mathbb{Z}", "integers": "\\mathbb{Z}", "any integer": "\\mathbb{Z}",
    "all rational numbers": "\\mathbb{Q}", "all positive integers": "\\mathbb{Z}^+",
    "all natural numbers": "\\mathbb{N}",
}  # fmt: skip


def _read_reals(text: str) -> MathAnswer | None:
    r"""Reads the set of all real numbers, which may exclude some: ``\mathbb{R} \setminus \{0\}``."""
    all_reals = BracketGroup("tuple", (_MINUS_INFINITY, _INFINITY))
    if text.startswith("\\mathbb{R}"):
        exclusion = text[len("\\mathbb{R}") :].strip()
        if not exclusion:
            return all_reals
        match = _SUBTRACTED_SET.fullmatch(exclusion)
    elif "real" in text.lower():
        plain = " ".join(_TEXT_COMMAND.sub(r" \1 ", text).split()).rstrip(".")
        match = _REALS_IN_WORDS.fullmatch(plain)
        if match is not None and not match["holes"]:
            return all_reals
    else:
        return None
    if match is None:
        return None
    holes = re.sub(r"\A[a-zA-Z] ?= ?", "", match["holes"].strip())  # all real numbers except x = 0
    return _intervals_between(_split_values(holes))


def _split_values(text: str) -> list[str]:
    r"""Returns the numbers of a list such as ``1, 2``, ``1 \text{ and } 2`` or ``\pm 2``."""
    values: list[str] = []
    for part in split_at_top(text, (",",)):
        for piece in _split_at_and(part):
            piece = piece.strip()
            if "\\pm" in piece:
                values += [piece.replace("\\pm", "").strip(), piece.replace("\\pm", "-").strip()]
            elif piece:
                values.append(piece)
    return values


def _intervals_between(holes: list[str]) -> MathAnswer | None:
    """Returns the union of the intervals between the numbers `holes`, which are excluded. Returns None if
    their order isn't known."""
    numbers: list[tuple[Fraction, str]] = []
    for hole in holes:
        number = exact_value(hole)
        if number is None:  # e.g. \sqrt{2}, which can't be put in order with other holes
            return None if len(holes) > 1 else _rays_around(Scalar(hole))
        numbers.append((number, hole))
    if not numbers:
        return None
    in_order = [Scalar(hole) for _, hole in sorted(set(numbers))]
    ends = [_MINUS_INFINITY, *in_order, _INFINITY]
    return Union(tuple(BracketGroup("tuple", pair) for pair in itertools.pairwise(ends)))


def _rays_around(hole: Scalar) -> Union:
    """Returns the numbers below and above a hole."""
    return Union((BracketGroup("tuple", (_MINUS_INFINITY, hole)), BracketGroup("tuple", (hole, _INFINITY))))


def _read_cases(rows: str, depth: int) -> MathAnswer:
    r"""Reads ``\begin{cases}``: a system of equations, or the pieces of a function with their conditions."""
    cells = [split_at_top(row, ("&",)) for row in _ROW_END.split(rows) if row.strip()]
    if len(cells) > MOST_PARTS_OF_ANSWER:
        return Scalar(rows)
    if all(len(row) == 2 and "=" not in row[0] for row in cells):
        # The pieces of a function, as a set of pairs: they may be in any order.
        return BracketGroup("set", tuple(_read_piece(row, depth) for row in cells))
    equations = ["".join(row).strip(" ,;") for row in cells]
    return _make_system(tuple(read_answer(equation, depth + 1) for equation in equations))


def _read_piece(row: list[str], depth: int) -> MathAnswer:
    r"""Reads ``["x^2", "\text{if } x > 0"]``, a piece of a function, as the pair of its value and its
    condition."""
    value, condition = row
    condition = re.sub(r"\\text ?\{ ?,? ?(?:if|for|when|where) ?\}|\b(?:if|for|when)\b", "", condition)
    parts = read_answer(value.strip(" ,"), depth + 1), read_answer(condition.strip(" ,.;"), depth + 1)
    return BracketGroup("tuple", parts)


def _make_system(parts: tuple[MathAnswer, ...]) -> MathAnswer:
    """Returns a system if there are several parts and each is a value with a different name; otherwise a
    list."""
    named = [part for part in parts if isinstance(part, Named)]
    names = {part.name for part in named}
    are_all_named = len(named) == len(parts)
    if len(parts) > 1 and are_all_named and len(names) == len(parts):
        return System(tuple((part.name, part.value) for part in named))
    return BracketGroup("list", _flatten_lists(parts))


def _read_transposed(text: str, depth: int) -> MathAnswer | None:
    r"""Reads ``\begin{pmatrix} 1 & 2 \end{pmatrix}^T`` or ``(1, 2)^T``; None for any other text."""
    match = _TRANSPOSED_VECTOR.fullmatch(text)
    if match is None:
        return None
    inner = read_answer(match["inner"], depth + 1)
    if isinstance(inner, Matrix):
        lengths = {len(row) for row in inner.rows}
        return Matrix(tuple(zip(*inner.rows, strict=True))) if len(lengths) == 1 else None
    if isinstance(inner, BracketGroup) and inner.kind == "tuple":
        # A column may be written as (1, 2)^T, as [1, 2]^T or only as (1, 2). It always gets round brackets.
        return BracketGroup("tuple", inner.parts)
    return None


# \mathbb{Z}, \mathbb{Z}^+, \mathbb{R}_{>0}
_NUMBER_SETS = r"\\mathbb ?\{ ?[ZNQRC] ?\}(?:\^?[+*]|_[^ ]{1,8}|\^\{\+\})?"
# \text{for } n \ge 1, \text{ (where n is an integer)}, \forall n, for all n
_CONDITION_IN_WORDS = re.compile(
    r"\\text ?\{ ?,? ?\(?(?:for|where|if|when|with|such that|whenever|provided)\b"
    r"|\\forall(?![a-z])|(?<![A-Za-z\\])(?:for (?:all|any|every|each)|where|whenever)\b"
)
# 3k, k \in \mathbb{Z} and 2^n (n > 1)
_CONDITION_IN_SIGNS = re.compile(
    r"(?P<value>[^,]*[^,\s])(?: ?[,;] ?| ?\()(?P<condition>\(?[a-zA-Z] ?(?:\\in ?"
    + _NUMBER_SETS
    + r"|(?:\\ge|\\le|\\ne|[<>])[^,()]{1,20})\)?)",
    re.DOTALL,
)
_HAS_A_SIGN_OF_A_CONDITION = re.compile(r"\\(?:in|ge|le|ne)|[<>]")
# Words by which a text says more than a condition: 5 if and only if …, 5 unless …
_NO_MERE_CONDITION = re.compile(r"\b(?:only|not|except|unless|or|otherwise|else|but|maybe)\b")
_LETTER_ALONE = re.compile(r"(?<![A-Za-z\\])[a-zA-Z](?![A-Za-z])")


def _read_qualified(text: str) -> Qualified | None:
    r"""Reads an answer with a condition, such as ``n = 3k, k \in \mathbb{Z}``; None without a condition."""
    parts = _split_condition(text)
    if parts is None:
        return None
    value, condition = parts
    if not value or any(value.count(left) != value.count(right) for left, right in _PAIRS_OF_BRACKETS):
        return None  # the text was split within brackets, as in \{x \text{ where } x > 1\}
    # A condition about letters that the value doesn't have is not split off: "5 for n > 1" is a different
    # answer than 5.
    condition_letters = set(_LETTER_ALONE.findall(_TEXT_COMMAND.sub(" ", condition)))
    value_without_words = _TEXT_COMMAND.sub(" ", value)
    value_letters = set(re.sub(r"\\[A-Za-z]+", " ", value_without_words))
    if condition_letters and not condition_letters & value_letters:
        return None
    # At depth 1 no further condition is read: a condition belongs to the whole answer.
    return Qualified(read_answer(value, depth=1), condition)


_SUCH_THAT = re.compile(r"\\(?:mid|vert|colon)(?![A-Za-z])|:|\|")
"""The sign before the condition of a set."""
_PAIRS_OF_BRACKETS = (("(", ")"), ("\\{", "\\}"), ("{", "}"))


def _split_condition(text: str) -> tuple[str, str] | None:
    """Splits a text into the value before a condition, and the condition.

    Returns None if the text has no condition, or if the condition does more than restrict letters (it has a
    word such as "unless" or "otherwise").
    """
    in_words = _CONDITION_IN_WORDS.search(text, 1)  # from 1, because a value has to come before it
    if in_words is not None:
        value, condition = text[: in_words.start()], text[in_words.start() :]
        only_restricts_letters = not _NO_MERE_CONDITION.search(condition)
        return (value.strip(" ,;("), condition) if only_restricts_letters else None
    if not _HAS_A_SIGN_OF_A_CONDITION.search(text):  # a quick test: every condition in signs has such a sign
        return None
    in_signs = _CONDITION_IN_SIGNS.fullmatch(text)
    if in_signs is None or _NO_MERE_CONDITION.search(in_signs["condition"]):
        return None
    if _INEQUALITY_SIGN.search(in_signs["value"]):
        return None  # x > 2, x \ne 3 is one region
    return in_signs["value"].strip(" ,;("), in_signs["condition"]


def _read_ratio(text: str) -> MathAnswer | None:
    """Reads ``1:2:3``. Returns None for a text without a colon, and for words, equations and inequalities."""
    parts = split_at_top(text, (":",))
    if len(parts) < 2 or _TEXT_COMMAND.search(text) or re.search(r"[=<>]", text):
        return None
    return Ratio.read(parts)


def _read_group(text: str, depth: int) -> MathAnswer | None:
    """Reads a set, a pair, an interval, or a list without brackets, such as ``1, 2 and 3``. Returns None for
    any other text."""
    opening, closing, inner = _split_brackets(text)
    if opening == "{":
        such_that = _SUCH_THAT.search(inner)
        # Without a letter before it, the sign belongs to an absolute value or a ratio, as in {2|x|, 3}.
        if such_that is not None and re.search("[A-Za-z]", inner[: such_that.start()]):
            return read_answer(inner[such_that.end() :], depth + 1)  # {x | x > 3} is read as x > 3
        return BracketGroup("set", _flatten_lists(_read_parts(inner, depth)))
    if opening:
        parts = _read_parts(inner, depth)
        if len(parts) > 1:
            return BracketGroup("tuple", parts, opening, closing)
        return None  # (5) is a number in brackets, which `_read_scalar` reads
    # A list without brackets: "1, 2 and 3".
    pieces: list[str] = []
    for part in split_at_top(text, (",", ";")):
        pieces += [piece.strip() for piece in _split_at_and(part) if piece.strip()]
    if 1 < len(pieces) <= MOST_PARTS_OF_ANSWER:
        return _make_system(tuple(read_answer(piece, depth + 1) for piece in pieces))
    return None


def _flatten_lists(parts: tuple[MathAnswer, ...]) -> tuple[MathAnswer, ...]:
    r"""Replaces each part that is a list by the parts of that list. In ``0, \pm 1`` the part ``\pm 1`` is the
    list 1, -1. So the result is 0, 1, -1."""
    flat: list[MathAnswer] = []
    for part in parts:
        if isinstance(part, BracketGroup) and part.kind == "list":
            flat += part.parts
        else:
            flat.append(part)
    return tuple(flat)


def _read_parts(inner: str, depth: int) -> tuple[MathAnswer, ...]:
    parts = split_at_top(inner, (",", ";"))
    return tuple(read_answer(part, depth + 1) for part in parts[:MOST_PARTS_OF_ANSWER] if part.strip())


def _split_at_and(text: str) -> list[str]:
    return _AND_OR_OR.split(text) if _AND_OR_OR.search(text) else [text]


def _split_brackets(text: str) -> tuple[str, str, str]:
    """Splits a text into the opening bracket around it, the closing one, and their content. Returns three
    empty texts if there are no brackets around the whole text.

    The brackets of an interval may differ, and ``]0,1[`` is read as ``(0,1)``.
    """
    if text.startswith("\\{") and text.endswith("\\}"):
        inner = text[2:-2]
        return ("", "", "") if _is_closed_before_end(inner, "\\{", "\\}") else ("{", "}", inner)
    if text.startswith("\\langle") and text.endswith("\\rangle"):
        inner = text[7:-7]
        return ("", "", "") if _is_closed_before_end(inner, "\\langle", "\\rangle") else ("(", ")", inner)
    if len(text) <= 2 or text[0] not in "([]" or text[-1] not in ")][":
        return "", "", ""
    if text.endswith("\\]"):
        return "", "", ""  # \] is a command, which ends a formula, and not a bracket
    inner, depth = text[1:-1], 0
    for bracket in _BRACKET.finditer(inner):
        depth += _depth_change(bracket[0])
        if depth < 0:  # the first bracket is closed before the last character
            return "", "", ""
    # Intervals with reversed brackets are written as ]0,1[, ]0,1] and [0,1[, but never as ]0,1).
    if depth != 0 or (text[0] == "]" and text[-1] == ")"):
        return "", "", ""
    return text[0].replace("]", "("), text[-1].replace("[", ")"), inner


def _is_closed_before_end(inner: str, opening: str, closing: str) -> bool:
    r"""Returns whether a bracket directly before `inner` is closed within it. So ``1\}, \{2`` is not the
    content of one pair of braces."""
    depth = 0
    for bracket in re.findall(f"{re.escape(opening)}|{re.escape(closing)}", inner):
        depth += 1 if bracket == opening else -1
        if depth < 0:
            return True
    return False


_BRACKET = re.compile(r"\\[{}]|\\langle|\\rangle|\\begin\{[a-zA-Z*]+\}|\\end\{[a-zA-Z*]+\}|\\.|[()\[\]{}]")
_OPENINGS = ("(", "[", "{", "\\{", "\\langle")
_CLOSINGS = (")", "]", "}", "\\}", "\\rangle")


def _depth_change(sign: str) -> int:
    """Returns 1 for an opening bracket, -1 for a closing one, and 0 for other signs."""
    if sign in _OPENINGS or sign.startswith("\\begin"):
        return 1
    return -1 if sign in _CLOSINGS or sign.startswith("\\end") else 0


def split_at_top(text: str, signs: tuple[str, ...]) -> list[str]:
    """Splits a text at those `signs` that aren't within brackets."""
    if not any(sign in text for sign in signs):  # a quick test: most texts have none of the signs
        return [text]
    parts: list[str] = []
    depth = start = 0
    for match in _signs_and_brackets(signs).finditer(text):
        if match["sign"] is not None:
            if depth == 0:
                parts.append(text[start : match.start()])
                start = match.end()
        else:
            depth += _depth_change(match[0])
    return [*parts, text[start:]]


@lru_cache(maxsize=16)
def _signs_and_brackets(signs: tuple[str, ...]) -> re.Pattern[str]:
    alternatives = "|".join(re.escape(sign) for sign in signs)
    return re.compile(rf"(?P<sign>{alternatives})|{_BRACKET.pattern}")


def _read_equation(text: str, depth: int) -> MathAnswer | None:
    """Reads ``x = 5`` as a named value, and ``x + y = 5`` as an equation. Returns None for other texts, and
    for several equations."""
    # x = 12,000 becomes x = 12000
    text = _THOUSANDS_OF_A_SIDE.sub(lambda side: side[1] + side[2].replace(",", ""), text)
    sides = split_at_top(text, ("=",))
    if len(sides) == 1:
        return None  # no equals sign, or only within brackets
    has_longer_sign = any(re.search(r"[<>!:]\Z", side.strip()) for side in sides)  # such as <=, != or :=
    if has_longer_sign or _INEQUALITY_SIGN.search(text):
        return None
    if len(split_at_top(text, (",", ";"))) > 1 or _AND_OR_OR.search(text):
        return None  # several equations
    first, last = sides[0].strip(), sides[-1].strip()
    if not first or not last:
        return None
    if _NAME_OF_VALUE.fullmatch(first):
        name = first.replace(" ", "")
        return Named(name, read_answer(last, depth + 1))
    if _NAME_OF_VALUE.fullmatch(last) and len(sides) == 2 and "(" not in last:
        return Named(last.replace(" ", ""), read_answer(first, depth + 1))
    return Equation(first, last, chain=len(sides) > 2)


# x \ne 1
_UNEQUAL_VALUES = re.compile(r"(?P<name>[a-zA-Z]) ?\\ne(?![a-z])(?P<values>.+)")
# |x - 1|, \lvert x \rvert
_ABSOLUTE_VALUE = re.compile(
    r"(?:\\[lr]?vert|\|) ?(?P<name>[a-zA-Z])(?: ?(?P<sign>[-+]) ?(?P<centre>[\d./]+))? ?(?:\\[lr]?vert|\|)"
)


def _read_bounded_distance(sign: str, sides: list[str]) -> tuple[str, list[MathAnswer]] | None:
    """Reads ``|x - 1| > 2`` as the points whose distance from 1 is larger than 2: ("x", [(-∞, -1), (3, ∞)]).

    Returns None for any other inequality, and for one whose radius isn't positive, such as ``|x| > 0``.
    """
    left_side, right_side = sides
    match = _ABSOLUTE_VALUE.fullmatch(left_side)
    radius = exact_value(right_side)
    if match is None or radius is None or radius <= 0 or sign == "!=":
        return None
    centre = exact_value(match["centre"]) if match["centre"] else Fraction(0)
    if centre is None:
        return None
    centre = -centre if match["sign"] == "+" else centre  # |x + 1| is the distance from -1
    low, high = Scalar(str(centre - radius)), Scalar(str(centre + radius))
    opening, closing = ("[", "]") if sign.endswith("=") else ("(", ")")
    if sign.startswith("<"):
        return match["name"], [BracketGroup("tuple", (low, high), opening, closing)]
    below = BracketGroup("tuple", (_MINUS_INFINITY, low), "(", closing)
    above = BracketGroup("tuple", (high, _INFINITY), opening, ")")
    return match["name"], [below, above]


def _read_region(text: str, depth: int) -> MathAnswer | None:
    r"""Reads ``x > 3``, ``1 < x \le 2``, ``x < 1 \text{ or } x > 3`` as intervals of one unknown."""
    # x \ne 1, 2: one exclusion of several values
    exclusion = _UNEQUAL_VALUES.fullmatch(text)
    if exclusion is not None and not _INEQUALITY_SIGN.search(exclusion["values"]):
        return _name_region({exclusion["name"]}, _intervals_between(_split_values(exclusion["values"])))
    pieces: list[str] = []
    for part in split_at_top(text, (",",)):
        pieces += _split_at_and(part)
    # x \ne 1, x \ne 2: every piece is an exclusion
    matches = [_UNEQUAL_VALUES.fullmatch(piece.strip()) for piece in pieces]
    exclusions = [match for match in matches if match is not None]
    if len(pieces) > 1 and len(exclusions) == len(pieces):
        values = [match["values"].strip() for match in exclusions]
        return _name_region({match["name"] for match in exclusions}, _intervals_between(values))
    # ``x > 1 and x < 3`` is an intersection. "or" or a comma makes a union.
    is_intersection = _AND_OF_INTERSECTION.search(text) is not None
    intervals: list[MathAnswer] = []
    names: set[str] = set()  # of the unknowns: a region has one
    for piece in pieces:
        signs = [_NAME_OF_INEQUALITY_SIGN[sign] for sign in _INEQUALITY_SIGN.findall(piece)]
        sides = [side.strip() for side in _INEQUALITY_SIGN.split(piece)]
        region = _read_inequality(signs, sides, depth)
        if region is None:
            return None
        name, intervals_of_piece = region
        names.add(name)
        intervals += intervals_of_piece
    if len(names) != 1:
        return None
    if is_intersection and len(pieces) > 1:
        # Only the overlap of two rays is computed. Any other intersection is compared as a text.
        return _intersect(intervals) or Scalar(text)
    return Union(tuple(intervals), named=names.pop())


def _name_region(names: set[str], allowed: MathAnswer | None) -> Union | None:
    """Returns the union `allowed` with the name of its unknown. Returns None if there are several names, or
    if `allowed` isn't a union."""
    if len(names) != 1 or not isinstance(allowed, Union):
        return None
    return Union(allowed.parts, named=next(iter(names)))


def _intersect(rays: list[MathAnswer]) -> MathAnswer | None:
    """Returns the overlap of two rays: for ``x > 1 and x < 2``, whose rays are (1, ∞) and (-∞, 2), it is
    (1, 2). Returns None unless one ray goes upwards, the other goes downwards, and they overlap."""
    if len(rays) != 2 or not all(isinstance(ray, BracketGroup) for ray in rays):
        return None
    # x > 1 begins at 1 and comes first. x < 2 begins below all numbers and comes second.
    up, down = sorted(rays, key=lambda ray: ray.parts[0] == _MINUS_INFINITY)  # type: ignore[union-attr]
    assert isinstance(up, BracketGroup) and isinstance(down, BracketGroup)
    if up.parts[1] != _INFINITY or down.parts[0] != _MINUS_INFINITY:
        return None
    start, end = up.parts[0], down.parts[1]
    if not isinstance(start, Scalar) or not isinstance(end, Scalar):
        return None
    low, high = exact_value(start.formula), exact_value(end.formula)
    if low is None or high is None or low >= high:
        return None
    return BracketGroup("tuple", (start, end), up.left, down.right)


def _read_inequality(signs: list[str], sides: list[str], depth: int) -> tuple[str, list[MathAnswer]] | None:
    """Reads one inequality as the name of its unknown and the intervals where it holds.

    ``x > 3`` has the sides x and 3, and gives ("x", [(3, ∞)]). ``3 < x`` gives the same, ``x != 3`` two rays,
    and ``1 < x <= 2``, which has two signs, ("x", [(1, 2]]). Returns None if no side is only an unknown.
    """
    if len(signs) == 1:
        bounded_distance = _read_bounded_distance(signs[0], sides)  # such as |x - 2| < 5
        if bounded_distance is not None:
            return bounded_distance
        return _read_inequality_of_one_sign(signs[0], sides, depth)
    directions = {sign[0] for sign in signs}
    have_one_direction = directions in ({"<"}, {">"})
    if len(signs) == 2 and have_one_direction and _NAME_OF_VALUE.fullmatch(sides[1]):
        if directions == {">"}:  # 2 >= x > 1 is read as 1 < x <= 2
            sides = sides[::-1]
            signs = [_MIRRORED_SIGN[sign] for sign in signs[::-1]]
        ends = read_answer(sides[0], depth + 1), read_answer(sides[2], depth + 1)
        left = "(" if signs[0] == "<" else "["
        right = ")" if signs[1] == "<" else "]"
        return sides[1], [BracketGroup("tuple", ends, left, right)]
    return None


_MIRRORED_SIGN = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
"""The sign after both sides are exchanged: ``3 < x`` is ``x > 3``."""


def _read_inequality_of_one_sign(
    sign: str, sides: list[str], depth: int
) -> tuple[str, list[MathAnswer]] | None:
    """Reads an inequality with one sign. One of its sides has to be only an unknown (see
    `_read_inequality`)."""
    name, bound = sides
    if not _NAME_OF_VALUE.fullmatch(name):  # 3 < x is read as x > 3
        name, bound = bound, name
        sign = _MIRRORED_SIGN[sign]
        if not _NAME_OF_VALUE.fullmatch(name):
            return None
    value = read_answer(bound, depth + 1)
    if not isinstance(value, Scalar):
        return None
    if sign == "!=":
        return name, list(_rays_around(value).parts)
    if sign in ("<", "<="):
        closing = ")" if sign == "<" else "]"
        return name, [BracketGroup("tuple", (_MINUS_INFINITY, value), "(", closing)]
    opening = "(" if sign == ">" else "["
    return name, [BracketGroup("tuple", (value, _INFINITY), opening, ")")]


# ABC, AB': points of a figure, or a Roman number
_CAPITAL_LETTERS = re.compile(r"[A-Z]{2,8}'?")
# \triangle ABC, \overline{AB}
_GEOMETRIC_FIGURE = re.compile(
    r"\\(?P<kind>triangle|angle|overline|overleftrightarrow|overrightarrow|vec|odot)"
    r" ?\{? ?(?P<letters>[A-Z]{1,4}) ?\}?"
)
# Yes, because 7 is prime. The reason must not have a word that may say the contrary (`_CONTRARY_WORDS`).
_VERDICT_WITH_REASON = re.compile(
    r"(yes|no|true|false)(?:[,;:.!]| because| since| -) *(?P<reason>.+)", re.IGNORECASE
)
_CONTRARY_WORDS = {
    "yes": r"\b(?:no|not|false|or|but|maybe|if|unless|impossible|cannot|never)\b|n't\b",
    "true": r"\b(?:no|not|false|or|but|maybe|if|unless)\b|n't\b",
    "no": r"\b(?:yes|true|or|but|maybe|unless)\b"
    r"|^(?:it|this|that|they) (?:is|are|can|does)\b(?! (?:not|im)|'t|n't)",
    "false": r"\b(?:yes|true|or|but|maybe|unless)\b",
}
# there are no real solutions, none, the empty set
_NO_SOLUTION = re.compile(
    r"(?:there (?:is|are) )?(?:no (?:real |such |integer |possible |valid |positive )?"
    r"(?:solutions?|values?|numbers?|integers?|roots?)"
    r"(?: exists?)?|none|(?:the )?empty set|does not have (?:any )?solutions?)"
)


def _read_figure(text: str) -> Words | None:
    r"""Reads a triangle, an angle or a line by its points: ``\angle ABC`` is ``\angle CBA``."""
    match = _GEOMETRIC_FIGURE.fullmatch(text)
    if match is None:
        return None
    letters = match["letters"].lower()
    # The points of a triangle or a line may be in any order, and those of an angle may be reversed. The order
    # of a ray's or a vector's points matters.
    if match["kind"] in ("triangle", "overline", "overleftrightarrow"):
        letters = "".join(sorted(letters))
    elif match["kind"] == "angle":
        letters = min(letters, letters[::-1])
    return Words(f"{match['kind']} {letters}")


def _read_words(text: str) -> Words | Scalar | None:
    """Reads an answer in words. Returns None for a formula. "No solution" is read as the formula of the empty
    set, and "all integers" as the formula of the set of integers."""
    figure = _read_figure(text)
    if figure is not None:
        return figure
    is_only_text = _TEXT_COMMAND.fullmatch(text) is not None
    plain = _TEXT_COMMAND.sub(lambda match: f" {match[1]} ", text)
    # "yes, because …" is read as "yes", unless the reason has a word that may contradict it.
    verdict = _VERDICT_WITH_REASON.fullmatch(" ".join(plain.split()))
    if verdict is not None and not re.search(_CONTRARY_WORDS[verdict[1].lower()], verdict["reason"].lower()):
        return Words(verdict[1].lower())
    if re.search(r"[\\^_=<>{}]", plain):
        return None  # signs of a formula
    plain = " ".join(plain.split())
    if _CAPITAL_LETTERS.fullmatch(plain):
        return Words(plain.lower())  # AB or IV: as formulas, AB would equal BA, and IV would equal VI
    without_full_stop = plain.lower().rstrip(".")
    if _NO_SOLUTION.fullmatch(without_full_stop):
        return Scalar("\\emptyset")
    if without_full_stop in _SETS_IN_WORDS:
        return Scalar(_SETS_IN_WORDS[without_full_stop])
    choice = _CHOSEN_OPTION.fullmatch(plain)
    if choice and (is_only_text or plain != choice[1]):  # \text{B} and (B) are choices, and B is a variable
        return Words(choice[1].lower())
    if any(character.isdigit() for character in plain):
        return None  # a number with its unit
    # `_FUNCTION_NAMES` has names of functions, such as sin.
    plain_words = [word for word in _WORD_OF_LETTERS.findall(plain) if word.lower() not in _FUNCTION_NAMES]
    if is_only_text and not plain_words and plain:
        return None  # \text{x} or \text{sin}, a formula in an upright font
    # abc may be a product of three letters, but "even" is a word, and so is any text within \text.
    are_words = any(len(word) > 3 for word in plain_words) or (is_only_text and len(plain_words) > 0)
    if not are_words and plain.lower() not in _SHORT_WORDS:
        return None
    if "," in plain:  # a list of words, which `_read_group` splits unless it has too many parts
        return None if len(plain.split(",")) <= MOST_PARTS_OF_ANSWER else Words(plain.lower())
    plain = re.sub(r"[^\w\s:/-]", "", plain.lower()).strip()
    return Words(" ".join(re.sub(r"^(?:the|a|an)\s", "", plain).split()))


_SHORT_WORDS = {
    "one", "two", "six", "ten", "yes", "no", "odd", "even", "none", "dne", "true", "all", "red", "mon", "tue",
}  # fmt: skip


def _read_scalar(text: str) -> MathAnswer:
    r"""Reads a number or formula with its unit, also in brackets: ``(1{,}200 \text{ cm})``."""
    text = text.strip()
    opening, _, inner = _split_brackets(text)
    # `_split_brackets` also returns "(" for ]5[ and for \langle 5 \rangle.
    is_in_round_brackets = opening == "(" and text.endswith(")")
    if is_in_round_brackets:
        text = inner.strip()
    measured = split_unit(text)
    formula = measured.formula
    if _NUMBER_WITH_THOUSANDS.fullmatch(formula):
        formula = formula.replace(",", "")
    formula = _SCIENTIFIC_NUMBER.sub(r"\1 \\cdot 10^{\2}", formula)  # 1.2e5
    return Scalar(formula, measured.unit, measured.percent)
