"""Compare normalised MATH answers as the VinePPO paper's code does: a plain reference for the preset.

It was written from a description of that code, and by other means than the grader: formulas become plain
text, which sympy's own parser reads. That parser runs its text as Python, so this is only for answers that
tests make.
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

TRANSFORMATIONS = (*standard_transformations, implicit_multiplication_application)
REFUSED = ("^{", "^(", "%")
REFUSED_PATTERNS = (r"\^[0-9]+\^", r"\^[0-9][0-9]+", r"[0-9]{3}!")
SIGNS = {
    "\\pi": " pi ", "\\times": "*", "\\div": "÷", "\\infty": "oo", "\\{": "{", "\\}": "}", "\\le": "≤",
    "\\pm": "±",
}  # fmt: skip


def equal_lists(answers: list[str], gold: list[str]) -> bool:
    gold = list(dict.fromkeys(gold))
    answers = list(dict.fromkeys(answers))[-len(gold) :]
    pairs = [(a, b) for a in answers for b in gold if equal(a, b)]
    return {a for a, _ in pairs} == set(answers) and {b for _, b in pairs} == set(gold) and bool(answers)


def equal(answer: str, gold: str) -> bool:
    if "\\cup" in answer and "\\cup" in gold:
        return equal_lists(answer.split("\\cup"), gold.split("\\cup"))
    number_of_answer, number_of_gold = number(answer, percent=False), number(gold, percent=False)
    if (
        number_of_answer is not None
        and number_of_gold is not None
        and abs(number_of_answer - number_of_gold) < 1e-3
    ):
        return True
    return answer == gold or equal_mathematics(answer, gold)


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


def equal_mathematics(answer: str, gold: str) -> bool:
    number_of_answer, number_of_gold = number(answer), number(gold)
    if number_of_answer is not None and number_of_gold is not None:
        return any(
            math.isclose(number_of_answer, expected, rel_tol=1e-9, abs_tol=1e-3)
            for expected in (number_of_gold / 100, number_of_gold, number_of_gold * 100)
        )
    if (
        answer[:1] in list("([")
        and answer[-1:] in list(")]")
        and gold[:1] in list("([")
        and gold[-1:] in list(")]")
    ):
        parts, gold_parts = answer[1:-1].split(","), gold[1:-1].split(",")
        if len(parts) == len(gold_parts) and all(map(equal_mathematics, parts, gold_parts)):
            return True
    if answer.count("=") == 1 and gold.count("=") == 1:
        (a, b), (c, d) = answer.split("="), gold.split("=")
        return equal_symbols(f"{a}-({b})", f"{c}-({d})") or equal_symbols(f"-({a}-({b}))", f"{c}-({d})")
    if answer.count("=") == 1 and len(answer.split("=")[0]) <= 2 and "=" not in gold:
        return equal_mathematics(answer.split("=")[1], gold)
    if gold.count("=") == 1 and len(gold.split("=")[0]) <= 2 and "=" not in answer:
        return equal_mathematics(answer, gold.split("=")[1])
    return equal_symbols(answer, gold)


def equal_symbols(answer: str, gold: str) -> bool:
    if any(sign in text for sign in REFUSED for text in (answer, gold)):
        return False
    if any(re.search(pattern, text) for pattern in REFUSED_PATTERNS for text in (answer, gold)):
        return False
    try:
        formula, gold_formula = parse_latex(answer), parse_latex(gold)
        if len(formula.free_symbols | gold_formula.free_symbols) > 2:
            return False
        difference = formula - gold_formula
        return bool(simplify(difference) == 0 or abs(complex(difference)) < 1e-3)
    except Exception:
        return False  # the paper's code takes a text for unequal, whichever exception sympy raises on it


def parse_latex(text: str) -> Any:
    return parse_expr(latex_as_text(text).replace("^", "**"), transformations=TRANSFORMATIONS)


def latex_as_text(text: str) -> str:
    """Write LaTeX as plain text: fractions, roots and signs are kept, and all other commands are left out."""
    text = re.sub(r"(\d)\\frac", r"\1+\\frac", text)  # a mixed number
    while (match := re.search(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", text)) or (
        match := re.search(r"\\sqrt\{([^{}]*)\}", text)
    ):
        inside = f"(({match[1]})/({match[2]}))" if match.re.groups == 2 else f"sqrt({match[1]})"
        text = text[: match.start()] + inside + text[match.end() :]
    return re.sub(r"\\[A-Za-z]+|\\[{}]|[{}]", lambda match: SIGNS.get(match[0], ""), text)
