"""Equality of normalised MATH answers, once more and plainly: what the VinePPO paper's code is known to do.

Made from a description of that code, not from it, and by other means than the grader's: formulas become
plain text, which sympy's own parser reads. It runs what it is given as Python: only for answers made here.
"""

from __future__ import annotations

import math
import re
from typing import Any

from sympy import simplify
from sympy.parsing.sympy_parser import (
    implicit_multiplication_application,
    parse_expr,
    standard_transformations,
)

READ = (*standard_transformations, implicit_multiplication_application)
REFUSED = ("^{", "^(", "%")
REFUSED_PATTERNS = (r"\^[0-9]+\^", r"\^[0-9][0-9]+", r"[0-9]{3}!")
SIGNS = {
    "\\pi": " pi ", "\\times": "*", "\\div": "÷", "\\infty": "oo", "\\{": "{", "\\}": "}", "\\le": "≤",
    "\\pm": "±",
}  # fmt: skip


def equal_lists(given: list[str], gold: list[str]) -> bool:
    gold = list(dict.fromkeys(gold))
    given = list(dict.fromkeys(given))[-len(gold) :]
    pairs = [(a, b) for a in given for b in gold if equal(a, b)]
    return {a for a, _ in pairs} == set(given) and {b for _, b in pairs} == set(gold) and bool(given)


def equal(given: str, gold: str) -> bool:
    if "\\cup" in given and "\\cup" in gold:
        return equal_lists(given.split("\\cup"), gold.split("\\cup"))
    one, other = number(given, percent=False), number(gold, percent=False)
    if one is not None and other is not None and abs(one - other) < 1e-3:
        return True
    return given == gold or equal_mathematics(given, gold)


def number(text: str, percent: bool = True) -> float | None:
    text = text.replace(",", "")
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return float(text.rstrip("%").rstrip("\\")) / 100 if percent and text.endswith("%") else None
    except ValueError:
        return None


def equal_mathematics(given: str, gold: str) -> bool:
    one, other = number(given), number(gold)
    if one is not None and other is not None:
        return any(
            math.isclose(one, meant, rel_tol=1e-9, abs_tol=1e-3)
            for meant in (other / 100, other, other * 100)
        )
    if (
        given[:1] in list("([")
        and given[-1:] in list(")]")
        and gold[:1] in list("([")
        and gold[-1:] in list(")]")
    ):
        parts, others = given[1:-1].split(","), gold[1:-1].split(",")
        if len(parts) == len(others) and all(map(equal_mathematics, parts, others)):
            return True
    if given.count("=") == 1 and gold.count("=") == 1:
        (a, b), (c, d) = given.split("="), gold.split("=")
        return equal_symbols(f"{a}-({b})", f"{c}-({d})") or equal_symbols(f"-({a}-({b}))", f"{c}-({d})")
    if given.count("=") == 1 and len(given.split("=")[0]) <= 2 and "=" not in gold:
        return equal_mathematics(given.split("=")[1], gold)
    if gold.count("=") == 1 and len(gold.split("=")[0]) <= 2 and "=" not in given:
        return equal_mathematics(given, gold.split("=")[1])
    return equal_symbols(given, gold)


def equal_symbols(given: str, gold: str) -> bool:
    if any(sign in text for sign in REFUSED for text in (given, gold)):
        return False
    if any(re.search(pattern, text) for pattern in REFUSED_PATTERNS for text in (given, gold)):
        return False
    try:
        one, other = read(given), read(gold)
        if len(one.free_symbols | other.free_symbols) > 2:
            return False
        difference = one - other
        return bool(simplify(difference) == 0 or abs(complex(difference)) < 1e-3)
    except Exception:
        return False  # whatever sympy makes of what is no formula: that code takes all of it for unequal


def read(text: str) -> Any:
    return parse_expr(plain(text).replace("^", "**"), transformations=READ)


def plain(text: str) -> str:
    """LaTeX as text: fractions and roots by their arguments, signs, all other commands left out."""
    text = re.sub(r"(\d)\\frac", r"\1+\\frac", text)  # a mixed number
    while (found := re.search(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", text)) or (
        found := re.search(r"\\sqrt\{([^{}]*)\}", text)
    ):
        inside = f"(({found[1]})/({found[2]}))" if found.re.groups == 2 else f"sqrt({found[1]})"
        text = text[: found.start()] + inside + text[found.end() :]
    return re.sub(r"\\[A-Za-z]+|\\[{}]|[{}]", lambda found: SIGNS.get(found[0], ""), text)
