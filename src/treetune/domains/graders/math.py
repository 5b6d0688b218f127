"""The default grader of MATH: on the math-verify library, with its mistakes mended."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

from annotated_types import MinLen
from typing_extensions import override

from treetune.domains.graders.formulas import (
    Absurd,
    NotAFormula,
    equal_formulas,
    exact_value,
    proportional_equations,
    read_expression,
    spaceless,
)
from treetune.domains.graders.math_answers import (
    Answer,
    BracketGroup,
    Equation,
    Matrix,
    Named,
    Qualified,
    System,
    Union,
    Words,
    read_answer,
)
from treetune.domains.graders.math_endings import LONGEST, find_answer, find_gold, json_list
from treetune.domains.graders.math_kinds import Date, Ratio, Score, TimeOfDay
from treetune.domains.graders.math_text import undressed
from treetune.domains.graders.math_units import (
    Scalar,
    bare_degrees,
    conversion,
    is_radian,
    with_short_unit,
)
from treetune.domains.graders.number_words import number_in_words
from treetune.tasks.graders.base import Grader
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem

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

    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is no part of an answer; the default knows other models' tags, too
    (`tasks.thoughts`). null: all of a response counts."""

    @override
    def prepare(self) -> None:
        import math_verify  # noqa: F401
        import sympy

        # It warns with every answer that nothing ends what hangs. The pool's deadline does.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

        sympy.simplify(sympy.Symbol("x") ** 2 - 1)  # what it imports when it is first asked

    @override
    def grade(self, response: str, problem: Problem) -> Grade:
        if len(response) > LONGEST_RESPONSE:
            return _refused(None, f"{len(response)} characters, more than {LONGEST_RESPONSE}")
        return super().grade(response, problem)

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        gold = _read_gold(problem.gold).answer
        parts = len(gold.parts) if isinstance(gold, BracketGroup) and gold.kind == "list" else 1
        return find_answer(response, parts)

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade | float:
        gold = _read_gold(problem.gold)
        if not gold.plain:
            return _refused(extracted[:100], "the gold is empty")
        if _plain(extracted) == gold.plain_as_written:
            return 1.0
        if len(extracted) > LONGEST:
            return _refused(extracted[:100] + "…", f"an answer of {len(extracted)} characters")
        text = undressed(extracted)
        if gold.is_json_list and text.startswith("[") and text.endswith("]"):
            text = text[1:-1]
        if _plain(text) == gold.plain:
            return 1.0
        try:
            return float(_says_the_same(read_answer(text), gold.answer, problem.prompt))
        except Absurd as error:
            return _refused(extracted, str(error))


def _refused(extracted: str | None, why: str) -> Grade:
    return Grade(reward=0.0, outcome="error", extracted=extracted, message=f"not computed: {why}")


@dataclass(frozen=True)
class _Gold:
    r"""A gold, read once for all answers to its problem.

    Of ``It is $\boxed{\dfrac12}$.`` `plain_as_written` is ``\dfrac12`` and `plain` is ``\frac12``.
    """

    plain_as_written: str
    plain: str
    answer: Answer
    is_json_list: bool


@lru_cache(maxsize=1024)
def _read_gold(gold: str) -> _Gold:
    as_written = find_gold(gold)
    text = undressed(as_written)
    return _Gold(_plain(as_written), _plain(text), read_answer(text), json_list(gold) is not None)


def _says_the_same(answer: Answer, gold: Answer, question: str) -> bool:
    """Returns whether an answer equals the gold, or the one value that the gold gives in several forms."""
    if equal_answers(answer, gold, question):
        return True
    value = _value_in_several_forms(gold, question)
    return value is not None and equal_answers(answer, value, question)


def _value_in_several_forms(gold: Answer, question: str) -> Answer | None:
    """Returns the one value of a gold that gives it in several forms, as a solution may:
    ``\\boxed{15\\frac{39}{40}}, or \\boxed{\\frac{639}{40}}``. None for every other gold."""
    if not isinstance(gold, BracketGroup) or gold.kind != "list" or len(gold.parts) < 2:
        return None
    value, *others = gold.parts
    return value if all(equal_answers(other, value, question) for other in others) else None


def _plain(text: str) -> str:
    return spaceless(text).rstrip(".")


# Equality

_UPRIGHT = re.compile(r"\\text ?\{ ?(\w+) ?\}")
_BASED = re.compile(r"\(?([0-9A-Za-z]+)\)? ?_ ?(?:\{ ?\(?(?:base )?(\w+)\)? ?\}|(\d)|([a-z]+))")
_PERCENT = re.compile(r"%|\bper ?cent", re.IGNORECASE)


def equal_answers(given: Answer, gold: Answer, question: str = "") -> bool:
    """Compares two answers by their kinds. Raises Absurd for a formula that would cost too much.

    Names and units that only one of them has don't count; a list without brackets may stand for a
    pair (in its order) or a set, but a pair never for a set, nor an open interval for a closed one.
    """
    if given == gold:
        return True
    if isinstance(given, Qualified) or isinstance(gold, Qualified):
        return _equal_with_conditions(given, gold, question)
    are_both_by_name = _values_by_name(given) is not None and _values_by_name(gold) is not None
    if isinstance(given, System) or isinstance(gold, System) or are_both_by_name:
        return _equal_systems(given, gold, question)
    if isinstance(given, Named) and isinstance(gold, Named):
        same_name = given.name == gold.name or "text" in given.name or "text" in gold.name
        return same_name and equal_answers(given.value, gold.value, question)
    if isinstance(given, Equation) or isinstance(gold, Equation):
        return _equal_with_equation(given, gold, question)
    if isinstance(given, Named):
        return equal_answers(given.value, gold, question)
    if isinstance(gold, Named):
        return equal_answers(given, gold.value, question)
    if isinstance(given, Date) or isinstance(gold, Date):
        return False  # equal dates are equal by their parts
    if isinstance(given, TimeOfDay) or isinstance(gold, TimeOfDay):
        return _equal_times(given, gold, question)
    if isinstance(given, Ratio) or isinstance(gold, Ratio):
        return _equal_ratios(given, gold)
    if isinstance(given, Score) or isinstance(gold, Score):
        return _equal_scores(given, gold, question)
    if isinstance(given, Words) or isinstance(gold, Words):
        return _words_of(given) == _words_of(gold) or _equal_in_words(given, gold, question)
    if isinstance(given, Union) and isinstance(gold, Union) and {given.named, gold.named} not in (
        {given.named}, {"", given.named}, {"", gold.named}
    ):  # fmt: skip
        return False  # x < 5 says nothing about y
    if isinstance(given, Union) or isinstance(gold, Union):
        return _matched(_pieces(given), _pieces(gold), question)
    if isinstance(given, Matrix) or isinstance(gold, Matrix):
        rows, others = _rows(given), _rows(gold)
        return [len(row) for row in rows] == [len(row) for row in others] and all(
            equal_answers(a, b, question) for row, other in zip(rows, others) for a, b in zip(row, other)
        )
    if isinstance(given, BracketGroup) or isinstance(gold, BracketGroup):
        given, gold = (
            one if isinstance(one, BracketGroup) else BracketGroup("list", (one,)) for one in (given, gold)
        )
        return _equal_groups(given, gold, question)
    return _equal_scalars(given, gold, question)


def _words_of(answer: Answer) -> str | None:
    if isinstance(answer, Words):
        return answer.text
    if isinstance(answer, Scalar):
        return re.sub(r"[\\{}\s]|text", "", answer.formula).lower()
    return None


_EMPTY = (Scalar("\\emptyset"),)


def _equal_groups(given: BracketGroup, gold: BracketGroup, question: str) -> bool:
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
    return answer.parts if isinstance(answer, BracketGroup) and answer.kind == "list" else (answer,)


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
    if (
        isinstance(answer, BracketGroup)
        and answer.kind == "tuple"
        and (answer.left, answer.right) == ("(", ")")
    ):
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


def _equal_scalars(given: Answer, gold: Answer, question: str) -> bool:
    if not isinstance(given, Scalar) or not isinstance(gold, Scalar):
        return False
    if "_" in given.formula or "_" in gold.formula:
        based = _equal_in_bases(given.formula, gold.formula, question)
        if based is not None:
            return based
    given, gold = (
        with_short_unit(given, gold, exact_value(gold.formula) is not None),
        with_short_unit(gold, given, exact_value(given.formula) is not None),
    )
    if (given.percent and gold.unit) or (gold.percent and given.unit):
        return False  # 75 % are no 75 degrees
    if given.unit is not None or gold.unit is not None:
        return _equal_quantities(given, gold)
    # A percent sign counts for nothing only where percent are asked for: 0.5 % are no half.
    asked = gold.percent or _PERCENT.search(question) is not None
    if (asked or not given.percent) and equal_formulas(given.formula, gold.formula):
        return True
    if given.percent != gold.percent:
        percent, plain = (given, gold) if given.percent else (gold, given)
        value, meant = exact_value(percent.formula), exact_value(plain.formula)
        return value is not None and meant is not None and value / 100 == meant
    return False


def _equal_quantities(given: Scalar, gold: Scalar) -> bool:
    """Compares numbers of which at least one has a unit. A unit that one side lacks counts for nothing."""
    if given.unit is None or gold.unit is None:
        bare, measured = (given, gold) if given.unit is None else (gold, given)
        assert measured.unit is not None
        if bare_degrees(measured.unit) and "\\pi" in bare.formula and "\\pi" not in measured.formula:
            return equal_formulas(f"({measured.formula}) \\cdot \\frac{{\\pi}}{{180}}", bare.formula)
        return equal_formulas(given.formula, gold.formula)
    for radians, degrees in ((given, gold), (gold, given)):
        assert radians.unit is not None and degrees.unit is not None
        if is_radian(radians.unit) and bare_degrees(degrees.unit):
            return equal_formulas(radians.formula, f"({degrees.formula}) \\cdot \\frac{{\\pi}}{{180}}")
    converted = conversion(given.unit, gold.unit)
    if converted is None:
        return False
    factor, summand = converted
    if (factor, summand) == (1, 0):
        return equal_formulas(given.formula, gold.formula)
    value, meant = exact_value(given.formula), exact_value(gold.formula)
    if value is not None and meant is not None:
        return value * factor + summand == meant
    scaled = f"({given.formula}) \\cdot \\frac{{{factor.numerator}}}{{{factor.denominator}}}"
    return summand == 0 and equal_formulas(scaled, gold.formula)


def _equal_times(given: Answer, gold: Answer, question: str) -> bool:
    """Compares times of the day; what may be a ratio is one unless the question asks for a time."""
    clocks = [answer for answer in (gold, given) if isinstance(answer, TimeOfDay)]
    is_time = clocks[0].is_time(question) if isinstance(gold, TimeOfDay) else clocks[0].is_sure
    if len(clocks) == 2:
        if is_time or clocks[1].is_sure:
            return clocks[0].equals(clocks[1])
        return _equal_ratios(clocks[1].ratio(), clocks[0].ratio())
    if is_time:
        number = given if isinstance(gold, TimeOfDay) else gold
        is_hour = clocks[0].minute is None and isinstance(number, Scalar) and number.unit is None
        return is_hour and isinstance(number, Scalar) and exact_value(number.formula) == clocks[0].hour
    given = given.ratio() if isinstance(given, TimeOfDay) else given
    gold = gold.ratio() if isinstance(gold, TimeOfDay) else gold
    return _equal_ratios(given, gold)


def _equal_ratios(given: Answer, gold: Answer) -> bool:
    """Compares ratios by their proportions, and a ratio of two with the fraction that it is."""
    if isinstance(given, Ratio) and isinstance(gold, Ratio):
        if len(given.parts) != len(gold.parts):
            return False
        pairs = list(zip(given.parts, gold.parts))
        return all(
            equal_formulas(f"({part})({other_meant})", f"({other_part})({meant})")
            for (part, meant), (other_part, other_meant) in itertools.pairwise(pairs)
        ) and not any((part.strip("0 ") == "") != (meant.strip("0 ") == "") for part, meant in pairs)
    ratio, number = (given, gold) if isinstance(given, Ratio) else (gold, given)
    if not isinstance(ratio, Ratio) or not isinstance(number, Scalar) or number.unit or number.percent:
        return False
    return len(ratio.parts) == 2 and equal_formulas(
        f"\\frac{{{ratio.parts[0]}}}{{{ratio.parts[1]}}}", number.formula
    )


def _equal_scores(given: Answer, gold: Answer, question: str) -> bool:
    """Compares ``5-3`` with a score by its parts, and with a number by the difference."""
    if isinstance(given, Score) and isinstance(gold, Score):
        return given == gold
    score, other = (given, gold) if isinstance(given, Score) else (gold, given)
    assert isinstance(score, Score)
    difference = Scalar(str(score.value()))
    return equal_answers(difference, other, question) if isinstance(other, Scalar) else False


def _equal_systems(given: Answer, gold: Answer, question: str) -> bool:
    """Compares the values of names; a pair or a list without names stands for them, in order."""
    values, meant = _values_by_name(given), _values_by_name(gold)
    if values is not None and meant is not None:
        return values.keys() == meant.keys() and all(
            equal_answers(values[name], meant[name], question) for name in meant
        )
    if values is None and meant is None:
        return False
    bare, by_name = (gold, values) if values is not None else (given, meant)
    assert by_name is not None
    if (
        not isinstance(bare, BracketGroup)
        or len(bare.parts) != len(by_name)
        or (bare.left, bare.right) != ("(", ")")
    ):
        return False
    if bare.kind == "set":
        return False
    # A pair has the order of the alphabet: (x, y). A list may also have that in which the names stand.
    orders = [sorted(by_name), list(by_name)]
    return any(
        all(equal_answers(part, by_name[name], question) for part, name in zip(bare.parts, order))
        for order in orders[: 1 if bare is gold and bare.kind == "tuple" else 2]
    )


def _values_by_name(answer: Answer) -> dict[str, Answer] | None:
    """Returns the values that a system, or ``(a, b) = (1, 2)``, gives to its names."""
    if isinstance(answer, System):
        return dict(answer.values)
    if not isinstance(answer, Named) or not answer.name.startswith("("):
        return None
    names = answer.name.strip("()").split(",")
    if (
        not isinstance(answer.value, BracketGroup)
        or len(answer.value.parts) != len(names)
        or len(set(names)) < len(names)
    ):
        return None
    return dict(zip(names, answer.value.parts))


def _equal_with_conditions(given: Answer, gold: Answer, question: str) -> bool:
    r"""Compares answers of which at least one has a condition (``\text{for } n \ge 1``). Two must agree;
    one that the gold doesn't have must be about a letter of the gold."""
    value = given.value if isinstance(given, Qualified) else given
    meant = gold.value if isinstance(gold, Qualified) else gold
    if isinstance(given, Qualified) and isinstance(gold, Qualified):
        if _bare_condition(given.condition) != _bare_condition(gold.condition):
            return False
    elif (
        isinstance(given, Qualified) and isinstance(meant, Scalar) and exact_value(meant.formula) is not None
    ):
        return False  # 5 if n > 1: the gold is 5 and nothing else
    return equal_answers(value, meant, question)


_CONDITION_WORDS = re.compile(
    r"\b(?:for|where|if|when|with|such that|whenever|provided|that|all|any|every|each|real|numbers?"
    r"|is|an?|are)\b|forall"
)


def _bare_condition(condition: str) -> str:
    for written, integer in (("an integer", "\\in Z"), ("integers", "\\in Z"), ("integer", "\\in Z")):
        condition = condition.replace(written, integer)
    condition = re.sub(r"\\text|\\mathbb|\\left|\\right|[{}()$,.;]", " ", condition)
    return re.sub(r"[\s\\]", "", _CONDITION_WORDS.sub(" ", condition))


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
