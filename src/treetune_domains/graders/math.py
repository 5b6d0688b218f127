"""The default grader of MATH: on the math-verify library, with its mistakes mended."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from treetune.tasks.graders.base import Grader
from treetune.vocabulary import Grade, Problem
from treetune_domains.graders.formulas import (
    Absurd,
    NotAFormula,
    equal_formulas,
    exact_value,
    proportional_equations,
    read_expression,
    spaceless,
)
from treetune_domains.graders.math_answers import (
    Answer,
    Equation,
    Group,
    Matrix,
    Named,
    Scalar,
    Union,
    Words,
    read_answer,
)
from treetune_domains.graders.math_text import (
    LONGEST,
    given_answer,
    gold_answer,
    number_in_words,
    ratio,
    undressed,
)

LONGEST_RESPONSE = 200_000
"""Characters of a response that are searched for an answer; a sampled answer has a tenth of it."""


@Grader.register("math")
@dataclass(frozen=True, kw_only=True)
class MathGrader(Grader):
    r"""Reward 1 if the answer says what the gold says, however it is written.

    The answer stands in the last box of the response, or after its last "answer is"; without either
    the outcome is ``no_answer``. Both sides are told apart into numbers with units, words, ordered
    pairs, sets, lists, intervals, matrices and equations (`math_answers`), and compared part by part;
    formulas are compared exactly where the small grammar of `formulas` reads them, and by
    math-verify where not. A percent sign counts for nothing only where the gold has one or the problem
    speaks of percent: elsewhere 50 % is a half and never 50. Text that no answer is like (2,000 characters,
    an exponent of millions, a tower of powers) is an ``error`` before anything is computed.
    """

    votes_by_value: ClassVar[bool] = True

    def prepare(self) -> None:
        import math_verify  # noqa: F401
        import sympy

        # It warns with every answer that nothing ends what hangs. The pool's deadline does.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

        sympy.simplify(sympy.Symbol("x") ** 2 - 1)  # what it imports when it is first asked

    def grade(self, response: str, problem: Problem) -> Grade:
        if len(response) > LONGEST_RESPONSE:
            return _refused(None, f"{len(response)} characters, more than {LONGEST_RESPONSE}")
        return super().grade(response, problem)

    def extract(self, response: str, problem: Problem) -> str | None:
        _, gold = _read_gold(problem.gold)
        parts = len(gold.parts) if isinstance(gold, Group) and gold.kind == "list" else 1
        return given_answer(response, parts)

    def verdict(self, extracted: str, problem: Problem) -> Grade | float:
        gold_text, gold = _read_gold(problem.gold)
        if _plain(extracted) == _plain(gold_text):
            return 1.0
        if len(extracted) > LONGEST:
            return _refused(extracted[:100] + "…", f"an answer of {len(extracted)} characters")
        try:
            plain = undressed(extracted)
            correct = _plain(plain) == _plain(undressed(gold_text)) or equal_answers(
                read_answer(plain), gold, problem.prompt
            )
        except Absurd as error:
            return _refused(extracted, str(error))
        return float(correct)


def _refused(extracted: str | None, why: str) -> Grade:
    return Grade(reward=0.0, outcome="error", extracted=extracted, message=f"not computed: {why}")


@lru_cache(maxsize=1024)
def _read_gold(gold: str) -> tuple[str, Answer]:
    text = gold_answer(gold)
    return text, read_answer(undressed(text))


def _plain(text: str) -> str:
    return spaceless(text).rstrip(".")


# Equality

_UPRIGHT = re.compile(r"\\text ?\{ ?(\w+) ?\}")
_BASED = re.compile(r"\(?([0-9A-Za-z]+)\)? ?_ ?(?:\{ ?\(?(?:base )?(\w+)\)? ?\}|(\d)|([a-z]+))")
_PERCENT = re.compile(r"%|\bper ?cent", re.IGNORECASE)
_SHORT_UNIT = re.compile(r"(-?[\d.]+) ([mgslhL])")


def equal_answers(given: Answer, gold: Answer, question: str = "") -> bool:
    """Compares two answers by their kinds. Raises Absurd for a formula that would cost too much.

    Names and units that only one of them has don't count; a list without brackets may stand for a
    pair (in its order) or a set, but a pair never for a set, nor an open interval for a closed one.
    """
    if given == gold:
        return True
    if isinstance(given, Named) and isinstance(gold, Named):
        same_name = given.name == gold.name or "text" in given.name or "text" in gold.name
        return same_name and equal_answers(given.value, gold.value, question)
    if isinstance(given, Equation) or isinstance(gold, Equation):
        return _equal_with_equation(given, gold, question)
    if isinstance(given, Named):
        return equal_answers(given.value, gold, question)
    if isinstance(gold, Named):
        return equal_answers(given, gold.value, question)
    if isinstance(given, Words) or isinstance(gold, Words):
        return _words_of(given) == _words_of(gold) or _equal_in_words(given, gold, question)
    if isinstance(given, Union) or isinstance(gold, Union):
        return _matched(_pieces(given), _pieces(gold), question)
    if isinstance(given, Matrix) or isinstance(gold, Matrix):
        rows, others = _rows(given), _rows(gold)
        return [len(row) for row in rows] == [len(row) for row in others] and all(
            equal_answers(a, b, question) for row, other in zip(rows, others) for a, b in zip(row, other)
        )
    if isinstance(given, Group) or isinstance(gold, Group):
        given, gold = (one if isinstance(one, Group) else Group("list", (one,)) for one in (given, gold))
        return _equal_groups(given, gold, question)
    return _equal_scalars(given, gold, question)


def _words_of(answer: Answer) -> str | None:
    if isinstance(answer, Words):
        return answer.text
    if isinstance(answer, Scalar):
        return re.sub(r"[\\{}\s]|text", "", answer.formula).lower()
    return None


_EMPTY = (Scalar("\\emptyset"),)


def _equal_groups(given: Group, gold: Group, question: str) -> bool:
    kinds = {given.kind, gold.kind}
    if (given.parts == _EMPTY) != (gold.parts == _EMPTY) or (
        given.kind != gold.kind and gold.parts == _EMPTY
    ):
        return False
    if kinds == {"tuple", "set"}:
        return False
    if "tuple" not in kinds:
        return _matched(given.parts, gold.parts, question)
    if len(given.parts) != len(gold.parts):
        return False
    if given.kind == gold.kind and (given.left, given.right) != (gold.left, gold.right):
        return False
    bare = gold if given.kind == "tuple" else given
    other = given if given.kind == "tuple" else gold
    if bare.kind == "list" and (other.left, other.right) != ("(", ")"):
        return False  # an interval needs its brackets
    return all(equal_answers(a, b, question) for a, b in zip(given.parts, gold.parts))


def _pieces(answer: Answer) -> Sequence[Answer]:
    if isinstance(answer, Union):
        return answer.parts
    return answer.parts if isinstance(answer, Group) and answer.kind == "list" else (answer,)


def _matched(given: Sequence[Answer], gold: Sequence[Answer], question: str) -> bool:
    """Matches one to one, in any order; repetitions count once."""
    given, gold = list(dict.fromkeys(given)), list(dict.fromkeys(gold))
    left = list(gold)
    for answer in given:
        partner = next((other for other in left if equal_answers(answer, other, question)), None)
        if partner is not None:
            left.remove(partner)
        elif not any(equal_answers(answer, other, question) for other in gold):
            return False
    return not left


def _rows(answer: Answer) -> tuple[tuple[Answer, ...], ...]:
    """Returns the rows of a matrix; a tuple stands for a column."""
    if isinstance(answer, Matrix):
        return answer.rows
    if isinstance(answer, Group) and answer.kind == "tuple" and (answer.left, answer.right) == ("(", ")"):
        return tuple((part,) for part in answer.parts)
    return ()


def _equal_in_words(given: Answer, gold: Answer, question: str) -> bool:
    """Compares ``three dollars`` with 3, or 25 with ``twenty five``."""
    one, other = _as_scalar(given), _as_scalar(gold)
    if one is None or other is None or (one, other) == (given, gold):
        return False
    return equal_answers(one, other, question)


def _as_scalar(answer: Answer) -> Answer | None:
    if not isinstance(answer, Words):
        return answer if isinstance(answer, Scalar) else None
    if answer.text == "infinity":
        return Scalar("\\infty")
    in_words = number_in_words(answer.text)
    if in_words is None:
        return None
    value, unit = in_words
    number = read_answer(f"{value}\\text{{ {unit}}}" if unit else str(value))
    return number if isinstance(number, Scalar) else None


def _equal_with_equation(given: Answer, gold: Answer, question: str) -> bool:
    one, other = _sides(given), _sides(gold)
    if one is not None and other is not None:
        return proportional_equations(one, other)
    if isinstance(given, Equation):
        end = read_answer(given.right)
        return equal_answers(end, gold, question) and _leads_to(given, end, question)
    # A gold of 9 * 2 = 18 says 18: both of its sides must be that number.
    if not isinstance(gold, Equation) or not isinstance(given, Scalar):
        return False
    left, right = read_answer(gold.left), read_answer(gold.right)
    return equal_answers(left, right) and equal_answers(right, given)


def _leads_to(equation: Equation, end: Answer, question: str) -> bool:
    """Returns whether an equation tells the value of its left side, and not just that something holds.

    ``2 + 3 = 5``, ``x = 2 + 3 = 5``, ``P(A) = 5`` and, where x + y was asked for, ``x + y = 5`` say 5;
    ``x + 2 = 5`` says 3, and ``2 + 2 = 5`` nothing.
    """
    try:
        left = read_expression(equation.left)
    except (NotAFormula, Absurd):
        return True  # a name such as |AB| or P(A), or words
    if not left.free_symbols:
        return equal_answers(read_answer(equation.left), end, question)
    return (
        equation.chain
        or equal_answers(read_answer(equation.left), end)
        or _bare(equation.left) in _bare(question)
    )


def _bare(text: str) -> str:
    return re.sub(r"\\left|\\right|[\s{}$]", "", text)


def _sides(answer: Answer) -> tuple[str, str] | None:
    if isinstance(answer, Equation):
        return answer.left, answer.right
    if isinstance(answer, Named) and isinstance(answer.value, Scalar) and not answer.value.unit:
        return answer.name, answer.value.formula
    return None


def _equal_scalars(given: Scalar, gold: Scalar, question: str) -> bool:
    if "_" in given.formula or "_" in gold.formula:
        based = _equal_in_bases(given.formula, gold.formula, question)
        if based is not None:
            return based
    given, gold = _with_short_unit(given, gold), _with_short_unit(gold, given)
    if (given.percent and gold.unit) or (gold.percent and given.unit):
        return False  # 75 % are no 75 degrees
    factor = ratio(given.unit, gold.unit)
    if factor is None:
        return False
    if factor != 1:
        one, other = exact_value(given.formula), exact_value(gold.formula)
        return one is not None and other is not None and one * factor == other
    # A percent sign counts for nothing only where percent are asked for: 0.5 % are no half.
    asked = gold.percent or _PERCENT.search(question) is not None
    if (asked or not given.percent) and equal_formulas(given.formula, gold.formula):
        return True
    if given.percent != gold.percent:
        percent, plain = (given, gold) if given.percent else (gold, given)
        value, meant = exact_value(percent.formula), exact_value(plain.formula)
        return value is not None and meant is not None and value / 100 == meant
    return False


def _with_short_unit(answer: Scalar, other: Scalar) -> Scalar:
    """Reads ``5 m`` as a length where the other one is a number, and as a product where that is a formula."""
    match = _SHORT_UNIT.fullmatch(answer.formula)
    if match is None or answer.unit or exact_value(other.formula) is None:
        return answer
    return Scalar(match[1], match[2].lower())


def _equal_in_bases(given: str, gold: str, question: str) -> bool | None:
    """Compares numbers with their base written below; None where neither is one.

    The same digits in the same base; a base that one side leaves out is what the other says, if the
    gold says it or the problem speaks of it.
    """
    one, other = _based(given), _based(gold)
    if one is None and other is None:
        return None
    digits, base = one or (given, None)
    gold_digits, gold_base = other or (gold, None)
    if digits.lower().lstrip("0") != gold_digits.lower().lstrip("0"):
        return False
    if base == gold_base or base is None:
        return True
    return gold_base is None and (base == "10" or re.search(rf"base\W{{0,4}}{base}\b", question) is not None)


_BASES = {
    "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
    "ten": "10", "twelve": "12", "sixteen": "16",
}  # fmt: skip


def _based(formula: str) -> tuple[str, str] | None:
    match = _BASED.fullmatch(_UPRIGHT.sub(r"\1", formula.strip()))
    if match is None or not any(character.isdigit() for character in match[1]):
        return None
    base = match[2] or match[3] or match[4]
    base = _BASES.get(base.lower(), base)
    return (match[1], base) if base.isdigit() else None
