"""Sums, differences, products and quotients of whole numbers, computed exactly and never evaluated.

The grammar, with nothing in it that isn't named here::

    sum     = ["-" | "−"] product { ("+" | "-" | "−" | "–") product }
    product = atom { ("*" | "×" | "·" | "⋅" | "x" | "X" | "/" | "÷") atom }
    atom    = digits | "(" sum ")"

Digits are ASCII, and ``\\times``, ``\\cdot`` and ``\\div`` are signs too, since models write them.
So there are no powers (two signs never follow each other, so neither ``**`` nor ``//``), decimals,
exponents, names or products without a sign. A minus is a number's own only where a sum begins, as one
writes on paper: ``-3+5`` and ``2*(-3+5)``, but not ``2*-3``. With positive numbers it reaches no
positive target that the four operations don't reach without it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 1000
"""Characters of an expression that are read; six numbers in brackets take forty."""

MOST_TOKENS = 200
MOST_DIGITS = 15
DEEPEST = 40
"""Open brackets at a time."""

_TOKEN = re.compile(r"\s+|(?P<number>[0-9]+)|(?P<sign>[-+*/()−–×·⋅xX÷]|\\(?:times|cdot|div)(?![A-Za-z]))")
_SAME = {
    "−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "x": "*", "X": "*", "÷": "/",
    "\\times": "*", "\\cdot": "*", "\\div": "/",
}  # fmt: skip
_NEGATED = "negated"
_PRECEDENCE = {"(": 0, "+": 1, "-": 1, _NEGATED: 1, "*": 2, "/": 2}


class NotAnExpression(ValueError):
    """The text is none of this grammar, has no value, or is larger than any answer. Says why."""


@dataclass(frozen=True)
class Expression:
    """What an expression is worth, and the numbers in it from left to right."""

    value: Fraction
    numbers: tuple[int, ...]


def read_expression(text: str) -> Expression:
    """Raises NotAnExpression, and nothing else, whatever the text; takes time linear in it.

    Two stacks in place of recursion, so that no depth of brackets overflows anything.
    """
    signs: list[str] = []
    values: list[Fraction] = []
    numbers: list[int] = []
    depth = 0
    before: str | None = None
    for kind, token in _tokens(text):
        begins = before is None or before == "("
        complete = before == "number" or before == ")"
        if kind == "number" or token == "(":
            if complete:
                raise NotAnExpression(f"no sign before {token!r}")
            if kind == "number":
                numbers.append(int(token))
                values.append(Fraction(numbers[-1]))
            else:
                depth += 1
                if depth > DEEPEST:
                    raise NotAnExpression(f"more than {DEEPEST} brackets deep")
                signs.append(token)
        elif token == "-" and begins:
            signs.append(_NEGATED)
        elif not complete:
            raise NotAnExpression(f"no number before {token!r}")
        else:
            least = _PRECEDENCE[token] if token != ")" else 1
            while signs and _PRECEDENCE[signs[-1]] >= least:
                _apply(signs.pop(), values)
            if token != ")":
                signs.append(token)
            elif not signs:
                raise NotAnExpression("a bracket is closed that was never opened")
            else:
                signs.pop()
                depth -= 1
        before = "number" if kind == "number" else token
    if before != "number" and before != ")":
        raise NotAnExpression("it ends before it is complete" if before else "it is empty")
    while signs:
        if signs[-1] == "(":
            raise NotAnExpression("a bracket is never closed")
        _apply(signs.pop(), values)
    (value,) = values
    return Expression(value, tuple(numbers))


def _tokens(text: str) -> list[tuple[str, str]]:
    if len(text) > LONGEST:
        raise NotAnExpression(f"{len(text)} characters, more than {LONGEST}")
    tokens: list[tuple[str, str]] = []
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise NotAnExpression(f"{text[position]!r} belongs to no expression")
        position = found.end()
        if found.lastgroup is None:
            continue
        if len(tokens) == MOST_TOKENS:
            raise NotAnExpression(f"more than {MOST_TOKENS} numbers and signs")
        if found.lastgroup == "number" and len(found[0]) > MOST_DIGITS:
            raise NotAnExpression(f"a number of {len(found[0])} digits, more than {MOST_DIGITS}")
        tokens.append((found.lastgroup, _SAME.get(found[0], found[0])))
    return tokens


def _apply(sign: str, values: list[Fraction]) -> None:
    right = values.pop()
    if sign == _NEGATED:
        values.append(-right)
        return
    left = values.pop()
    if sign == "/" and right == 0:
        raise NotAnExpression("a division by zero")
    values.append(
        left + right if sign == "+"
        else left - right if sign == "-"
        else left * right if sign == "*"
        else left / right
    )  # fmt: skip
