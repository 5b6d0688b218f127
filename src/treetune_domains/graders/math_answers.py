r"""The kinds of answers: a number with its unit, words, a pair, a set, an interval, a matrix, an equation.

`read_answer` tells these apart by their brackets and signs at the top level, so that an open
interval is never a closed one, and a pair never a set; all else is a formula (`Scalar`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from treetune_domains.graders.formulas import exact_value
from treetune_domains.graders.math_text import split_unit

DEEPEST = 6
MOST_PARTS = 60


@dataclass(frozen=True)
class Scalar:
    """A formula, perhaps with a unit; `percent` where its percent sign was taken off."""

    formula: str
    unit: str = ""
    percent: bool = False


@dataclass(frozen=True)
class Words:
    """Text, in lower case and without punctuation; of a choice such as ``(B) 12`` the letter."""

    text: str


@dataclass(frozen=True)
class Group:
    """Parts in brackets. ``list``: none, or just commas; ``set``; ``tuple``: an ordered pair or an interval,
    which only its brackets tell from another."""

    kind: Literal["list", "set", "tuple"]
    parts: tuple[Answer, ...]
    left: str = "("
    right: str = ")"


@dataclass(frozen=True)
class Union:
    """Intervals, sets or rays put together."""

    parts: tuple[Answer, ...]
    named: str = ""


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple[Answer, ...], ...]


@dataclass(frozen=True)
class Named:
    """``x = 5``, ``f(x) = 2x``, ``AB = 7``."""

    name: str
    value: Answer


@dataclass(frozen=True)
class Equation:
    """``x + y = 5``; of a ``chain`` such as ``a = b = c`` the first side and the last."""

    left: str
    right: str
    chain: bool = False


Answer = Scalar | Words | Group | Union | Matrix | Named | Equation

_ABOVE_ALL, _BELOW_ALL = Scalar("\\infty"), Scalar("-\\infty")

_MATRIX = re.compile(r"\\begin\{([pbBvV]?)(?:small)?matrix\*?\}(.*)\\end\{\1(?:small)?matrix\*?\}", re.DOTALL)
_NAME = re.compile(
    r"\([a-zA-Z](?:, ?(?:[a-zA-Z]|\\[a-z]{2,6}))+\)|"
    r"\|[A-Z]{1,4}\||(?:m? ?\\angle ?)?(?:[A-Z]{1,4}|[a-z]|\\text ?\{[^{}]{1,60}\}|"
    r"\\(?:theta|alpha|beta|gamma|lambda|mu|phi|Delta|pi))'*"
    r"(?:_ ?(?:\w|\{[^{}]{1,12}\}))?(?:\^\{?-1\}?)?(?: ?\([^()=]{1,20}\))?"
)
_WORD = re.compile(r"[A-Za-z]{2,}")
_CALLED = {
    "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "arcsin", "arccos", "arctan", "sqrt",
    "pi", "max", "min", "gcd", "lcm", "mod",
}  # fmt: skip
_TEXT = re.compile(r"\\text ?\{([^{}]*)\}")
_CHOICE = re.compile(r"\(?([A-Z])(?:\)(?:[.:]?(?: .*)?)|[.:] .*|[.:]?)")
_AND = re.compile(r"\\text ?\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_SIGN = re.compile(r"\\(?:le|ge|ne)(?![A-Za-z])|[<>]")
_SIGN_NAMES = {"\\le": "<=", "\\ge": ">=", "\\ne": "!=", "<": "<", ">": ">"}
_THOUSANDS = re.compile(r"[-+]? ?(?:USD )?\d{1,3}(?:,\d{3})+(?:\.\d+)?%?")
_SCIENTIFIC = re.compile(r"\A([-+]? ?\d{1,50}(?:\.\d{0,50})?)[eE]\+?(-?\d{1,3})\Z")
_NUMBER_IN_TEXT = re.compile(
    r"\\text ?\{ ?((?:USD )?(?=[-.]?\d)[-\d.,:/ ]*(?<! )) ?([A-Za-z][A-Za-z .^/\d]{0,60})?\}"
)
"""``\\text{3 dollars}`` is ``3 \\text{ dollars}``."""
_RATIO = re.compile(r"(?<=\d) ?\\text ?\{ ?to ?\} ?(?=\d)")
_SEPARATORS = re.compile(r"(?<==)( ?\d{1,3})((?:,\d{3})+)(?=\.\d|\Z)")
_IN = re.compile(r"[A-Za-z] ?\\in(?![A-Za-z])")


def read_answer(text: str, depth: int = 0) -> Answer:
    """Reads the answer in an undressed text (`math_text.undressed`). Raises nothing."""
    text = text.strip()
    if depth > DEEPEST:
        return Scalar(text)
    inside = _IN.match(text)
    if inside:
        text = text[inside.end() :].strip()
    if text == "\\mathbb{R}":
        text = "(-\\infty, \\infty)"
    matrix = _MATRIX.fullmatch(text.strip("()[] ") if "matrix" in text else text)
    if matrix is not None:
        rows = [row for row in re.split(r"\\\\(?:\[[^\]]{0,12}\])?|\\cr", matrix[2]) if row.strip(" \\hline")]
        if len(rows) > MOST_PARTS or matrix[1] in ("v", "V"):
            return Scalar(matrix[0])  # a determinant or a norm, not a matrix
        cells = [split_at_top(row, ("&",)) for row in rows]
        return Matrix(tuple(tuple(read_answer(cell, depth + 1) for cell in row) for row in cells))
    if (number := _NUMBER_IN_TEXT.fullmatch(text)) is not None:
        text = number[1].strip(" .,") + (f"\\text{{{number[2]}}}" if number[2] else "")
    text = _RATIO.sub(":", text)
    words = _words(text)
    if words is not None:
        return words
    if "=" in text:
        answer = _equation(text, depth)
        if answer is not None:
            return answer
    if "\\cup" in text:
        parts = split_at_top(text, ("\\cup",))
        if 1 < len(parts) <= MOST_PARTS:
            return Union(tuple(read_answer(part, depth + 1) for part in parts))
    opening = _brackets(text)[0]
    if _SIGN.search(text) and opening != "{":
        region = _region(text, depth)
        if region is not None:
            return region
    several = opening == "{" or (not opening and len(split_at_top(text, (",", ";"))) > 1)
    if ("\\pm" in text or "\\mp" in text) and not several:
        plus = text.replace("\\pm", "+").replace("\\mp", "-")
        minus = text.replace("\\pm", "-").replace("\\mp", "+")
        return Group("list", (read_answer(plus, depth + 1), read_answer(minus, depth + 1)))
    thousands = _THOUSANDS.match(text)
    if thousands and not re.search(r"[\d,;]", text[thousands.end() :]) and not _AND.search(text):
        return _scalar(text.replace(",", ""))
    return _group(text, depth) or _scalar(text)


def _group(text: str, depth: int) -> Answer | None:
    opening, closing, inner = _brackets(text)
    if opening == "{":
        if re.search(r"\\mid|\\colon|:|\|", inner):
            condition = re.split(r"\\mid(?![A-Za-z])|\\colon(?![A-Za-z])|:|\|", inner, maxsplit=1)[1]
            return read_answer(condition, depth + 1)
        return Group("set", _flat(_parts(inner, depth)))
    if opening:
        parts = _parts(inner, depth)
        if len(parts) > 1:
            return Group("tuple", parts, opening, closing)
        return None
    pieces = [piece.strip() for part in split_at_top(text, (",", ";")) for piece in _and_parts(part)]
    pieces = [piece for piece in pieces if piece]
    if 1 < len(pieces) <= MOST_PARTS:
        return Group("list", _flat(tuple(read_answer(piece, depth + 1) for piece in pieces)))
    return None


def _flat(parts: tuple[Answer, ...]) -> tuple[Answer, ...]:
    r"""Dissolves lists among the parts of a list or a set (from ``0, \\pm 1``)."""
    return tuple(
        one
        for part in parts
        for one in (part.parts if isinstance(part, Group) and part.kind == "list" else (part,))
    )


def _parts(inner: str, depth: int) -> tuple[Answer, ...]:
    parts = split_at_top(inner, (",", ";"))
    return tuple(read_answer(part, depth + 1) for part in parts[:MOST_PARTS] if part.strip())


def _and_parts(text: str) -> list[str]:
    return _AND.split(text) if _AND.search(text) else [text]


def _brackets(text: str) -> tuple[str, str, str]:
    """Returns the brackets around a whole text, normalised, and their content; empty where there are none.

    An interval's may differ, and ``]0,1[`` is ``(0,1)``.
    """
    if text.startswith("\\{") and text.endswith("\\}") and len(split_at_top(text[2:-2], ())) == 1:
        return "{", "}", text[2:-2]
    if text.startswith("\\langle") and text.endswith("\\rangle"):
        return "(", ")", text[7:-7]
    if len(text) <= 2 or text[0] not in "([]" or text[-1] not in ")][" or text.endswith("\\]"):
        return "", "", ""
    inner, depth = text[1:-1], 0
    for bracket in _BRACKET.finditer(inner):
        depth += _step(bracket[0])
        if depth < 0:  # the first bracket is closed before the last character
            return "", "", ""
    if depth != 0 or (text[0] == "]" and text[-1] == ")"):
        return "", "", ""
    return text[0].replace("]", "("), text[-1].replace("[", ")"), inner


_BRACKET = re.compile(r"\\[{}]|\\langle|\\rangle|\\begin\{[a-zA-Z*]+\}|\\end\{[a-zA-Z*]+\}|\\.|[()\[\]{}]")
_OPENINGS = ("(", "[", "{", "\\{", "\\langle")
_CLOSINGS = (")", "]", "}", "\\}", "\\rangle")


def _step(sign: str) -> int:
    if sign in _OPENINGS or sign.startswith("\\begin"):
        return 1
    return -1 if sign in _CLOSINGS or sign.startswith("\\end") else 0


def split_at_top(text: str, signs: tuple[str, ...]) -> list[str]:
    """Returns the parts between signs that stand in no bracket."""
    alternatives = "|".join(re.escape(sign) for sign in signs) or r"(?!)"
    pattern = re.compile(rf"(?P<sign>{alternatives})|{_BRACKET.pattern}")
    parts: list[str] = []
    depth = start = 0
    for match in pattern.finditer(text):
        if match["sign"] is not None:
            if depth == 0:
                parts.append(text[start : match.start()])
                start = match.end()
        else:
            depth += _step(match[0])
    return [*parts, text[start:]]


def _equation(text: str, depth: int) -> Answer | None:
    text = _SEPARATORS.sub(lambda found: found[1] + found[2].replace(",", ""), text)
    sides = split_at_top(text, ("=",))
    if len(sides) == 1 or any(re.search(r"[<>!:]\Z", side.strip()) for side in sides) or _SIGN.search(text):
        return None
    if len(split_at_top(text, (",", ";"))) > 1 or _AND.search(text):
        return None  # several equations
    first, last = sides[0].strip(), sides[-1].strip()
    if not first or not last:
        return None
    if _NAME.fullmatch(first):
        name = first.replace(" ", "")
        return Named(name, read_answer(last, depth + 1))
    if _NAME.fullmatch(last) and len(sides) == 2 and "(" not in last:
        return Named(last.replace(" ", ""), read_answer(first, depth + 1))
    return Equation(first, last, chain=len(sides) > 2)


def _region(text: str, depth: int) -> Answer | None:
    r"""Reads ``x > 3``, ``1 < x \le 2``, ``x < 1 \text{ or } x > 3`` as intervals of one unknown."""
    pieces = [piece for part in split_at_top(text, (",",)) for piece in _and_parts(part)]
    meet = re.search(r"\\text ?\{\s*and\s*\}|(?<![A-Za-z\\])and(?![A-Za-z])", text) is not None
    rays: list[Answer] = []
    names: set[str] = set()
    for piece in pieces:
        signs = [_SIGN_NAMES[sign] for sign in _SIGN.findall(piece)]
        sides = [side.strip() for side in _SIGN.split(piece)]
        region = _rays(signs, sides, depth)
        if region is None:
            return None
        name, parts = region
        names.add(name)
        rays += parts
    if len(names) != 1:
        return None
    if meet and len(pieces) > 1:
        return _met(rays) or Scalar(text)
    return Union(tuple(rays), named=names.pop())


def _met(rays: list[Answer]) -> Answer | None:
    """Makes ``x > 1 and x < 2`` an interval; None unless one ray up and one down meet."""
    if len(rays) != 2 or not all(isinstance(ray, Group) for ray in rays):
        return None
    up, down = sorted(rays, key=lambda ray: ray.parts[0] == _BELOW_ALL)  # type: ignore[union-attr]
    assert isinstance(up, Group) and isinstance(down, Group)
    if up.parts[1] != _ABOVE_ALL or down.parts[0] != _BELOW_ALL:
        return None
    start, end = up.parts[0], down.parts[1]
    low, high = (exact_value(at.formula) if isinstance(at, Scalar) else None for at in (start, end))
    if low is None or high is None or low >= high:
        return None
    return Group("tuple", (start, end), up.left, down.right)


def _rays(signs: list[str], sides: list[str], depth: int) -> tuple[str, list[Answer]] | None:
    if len(signs) == 1 and not _NAME.fullmatch(sides[0]) and _NAME.fullmatch(sides[1]):
        signs = [{"<": ">", ">": "<", "<=": ">=", ">=": "<="}.get(signs[0], signs[0])]
        sides = sides[::-1]
    if len(signs) == 1 and _NAME.fullmatch(sides[0]):
        value = read_answer(sides[1], depth + 1)
        if not isinstance(value, Scalar):
            return None
        if signs[0] == "!=":
            below, above = Group("tuple", (_BELOW_ALL, value)), Group("tuple", (value, _ABOVE_ALL))
            return sides[0], [below, above]
        if signs[0] in ("<", "<="):
            return sides[0], [Group("tuple", (_BELOW_ALL, value), "(", ")" if signs[0] == "<" else "]")]
        return sides[0], [Group("tuple", (value, _ABOVE_ALL), "(" if signs[0] == ">" else "[", ")")]
    if len(signs) == 2 and _NAME.fullmatch(sides[1]) and {sign[0] for sign in signs} in ({"<"}, {">"}):
        if signs[0][0] == ">":
            signs, sides = [sign.replace(">", "<") for sign in signs[::-1]], sides[::-1]
        ends = read_answer(sides[0], depth + 1), read_answer(sides[2], depth + 1)
        return sides[1], [
            Group("tuple", ends, "(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]")
        ]
    return None


def _words(text: str) -> Words | None:
    """Returns the text, if it is words and no formula."""
    whole = _TEXT.fullmatch(text)
    plain = _TEXT.sub(lambda match: f" {match[1]} ", text)
    if re.search(r"[\\^_=<>{}]", plain):
        return None
    plain = " ".join(plain.split())
    choice = _CHOICE.fullmatch(plain)
    if choice and (whole or plain != choice[1]):
        return Words(choice[1].lower())
    if any(character.isdigit() for character in plain):
        return None
    plain_words = [word for word in _WORD.findall(plain) if word.lower() not in _CALLED]
    if whole and not plain_words and plain:
        return None
    long = any(len(word) > 3 for word in plain_words) or (whole and plain_words)
    if not long and plain.lower() not in _SHORT_WORDS:
        return None
    if "," in plain:
        return None if len(plain.split(",")) <= MOST_PARTS else Words(plain.lower())
    plain = re.sub(r"[^\w\s:/-]", "", plain.lower()).strip()
    return Words(" ".join(re.sub(r"^(?:the|a|an)\s", "", plain).split()))


_SHORT_WORDS = {
    "one", "two", "six", "ten", "yes", "no", "odd", "even", "none", "dne", "true", "all", "red", "mon", "tue",
}  # fmt: skip


def _scalar(text: str) -> Answer:
    text = text.strip()
    opening, _, inner = _brackets(text)
    if opening == "(" and text.endswith(")"):
        text = inner.strip()
    text, unit, percent = split_unit(text)
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    text = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)
    return Scalar(text, unit, percent)
