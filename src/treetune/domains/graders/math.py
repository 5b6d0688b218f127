"""The default grader of MATH. It uses the library math-verify, and corrects its mistakes."""

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
    are_proportional_equations,
    equal_formulas,
    exact_value,
    read_expression,
    remove_spaces,
)
from treetune.domains.graders.math_answers import (
    BracketGroup,
    Equation,
    MathAnswer,
    Matrix,
    Named,
    Qualified,
    System,
    Union,
    Words,
    read_answer,
)
from treetune.domains.graders.math_endings import MOST_CHARACTERS_OF_ANSWER, find_answer, find_gold, json_list
from treetune.domains.graders.math_kinds import Date, Ratio, Score, TimeOfDay
from treetune.domains.graders.math_text import normalise_notation
from treetune.domains.graders.math_units import (
    Scalar,
    factor_and_offset_between,
    is_degree,
    is_radian,
    with_short_unit,
)
from treetune.domains.graders.number_words import number_in_words
from treetune.tasks.graders.base import Grader
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem

LONGEST_RESPONSE = 200_000
"""The most characters of a response that is searched for an answer. Sampled answers have a tenth of that."""


@Grader.register("math")
@dataclass(frozen=True, kw_only=True)
class MathGrader(Grader):
    r"""Gives the reward 1 if the answer has the same meaning as the gold, in whatever form.

    The answer is in the last box of the response, or after its last "answer is" (see `math_endings`). A
    response without one has the outcome ``no_answer``. Answer and gold are read as numbers with units, words,
    ordered pairs, sets, lists, intervals, matrices or equations (`math_answers`), and compared part by part.
    Formulas are compared exactly if the small grammar of `formulas` reads them, and by math-verify if it
    doesn't. A percent sign is ignored only if the gold has one or the problem mentions percent. If neither is
    so, 50 % is a half and not 50. An absurd answer (more than 2,000 characters, an exponent of millions, a
    tower of powers) is not computed, and has the outcome ``error``.
    """

    votes_by_value: ClassVar[bool] = True

    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is not part of an answer. The default also recognizes the tags of
    other models (`tasks.thoughts`). null: the whole response counts."""

    @override
    def prepare(self) -> None:
        # These are imported here, so that the time of the import doesn't count for the first answer's
        # deadline.
        import math_verify  # noqa: F401
        import sympy

        # The grader calls math_verify without a timeout, because the grader pool's deadline ends a call. The
        # library would warn of the missing timeout at every call.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

        sympy.simplify(sympy.Symbol("x") ** 2 - 1)  # the first call imports many modules

    @override
    def grade(self, response: str, problem: Problem) -> Grade:
        if len(response) > LONGEST_RESPONSE:
            return _grade_unread_answer(None, f"{len(response)} characters, more than {LONGEST_RESPONSE}")
        return super().grade(response, problem)

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        gold = _read_gold(problem.gold).answer
        # For a gold such as ``1, 2``, a response may give each answer in a separate box.
        gold_parts = len(gold.parts) if isinstance(gold, BracketGroup) and gold.kind == "list" else 1
        return find_answer(response, gold_parts)

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade | float:
        gold = _read_gold(problem.gold)
        if not gold.plain:
            return _grade_unread_answer(extracted[:100], "the gold is empty")
        # A copy of the gold as it is written is right, also if it is too long to be read below.
        if _comparable_text(extracted) == gold.plain_as_written:
            return 1.0
        if len(extracted) > MOST_CHARACTERS_OF_ANSWER:
            return _grade_unread_answer(extracted[:100] + "…", f"an answer of {len(extracted)} characters")
        text = normalise_notation(extracted)
        if gold.is_json_list and text.startswith("[") and text.endswith("]"):
            text = text[1:-1]  # the brackets of the JSON list, which the gold's answer no longer has
        if _comparable_text(text) == gold.plain:
            return 1.0
        try:
            return float(_is_same_answer(read_answer(text), gold.answer, problem.prompt))
        except Absurd as error:
            return _grade_unread_answer(extracted, str(error))


def _grade_unread_answer(extracted: str | None, reason: str) -> Grade:
    return Grade(reward=0.0, outcome="error", extracted=extracted, message=f"not computed: {reason}")


@dataclass(frozen=True)
class _Gold:
    r"""A gold, read once for all answers to its problem.

    Example: for the gold ``It is $\boxed{\dfrac12}$.``, `plain_as_written` is ``\dfrac12`` and `plain` is
    ``\frac12``.
    """

    plain_as_written: str
    """The text of its answer before `normalise_notation`, without spaces."""
    plain: str
    """The text of its answer after `normalise_notation`, without spaces."""
    answer: MathAnswer
    is_json_list: bool
    """Whether the gold is a JSON list of answers (see `json_list`)."""


@lru_cache(maxsize=1024)
def _read_gold(gold: str) -> _Gold:
    """Reads a gold. It is cached, because all answers to a problem have the same gold."""
    as_written = find_gold(gold)
    text = normalise_notation(as_written)
    return _Gold(
        plain_as_written=_comparable_text(as_written),
        plain=_comparable_text(text),
        answer=read_answer(text),
        is_json_list=json_list(gold) is not None,
    )


def _is_same_answer(answer: MathAnswer, gold: MathAnswer, question: str) -> bool:
    """Returns whether an answer equals the gold. If the gold gives one value in several forms, it is enough
    to equal this value."""
    if equal_answers(answer, gold, question):
        return True
    value = _value_in_several_forms(gold, question)
    return value is not None and equal_answers(answer, value, question)


def _value_in_several_forms(gold: MathAnswer, question: str) -> MathAnswer | None:
    """Returns the value of a gold that gives one value in several forms, as in
    ``\\boxed{15\\frac{39}{40}}, or \\boxed{\\frac{639}{40}}``. Returns None for every other gold."""
    if not isinstance(gold, BracketGroup) or gold.kind != "list" or len(gold.parts) < 2:
        return None
    value, *further_forms = gold.parts
    are_one_value = all(equal_answers(form, value, question) for form in further_forms)
    return value if are_one_value else None


def _comparable_text(text: str) -> str:
    """Returns a text without spaces and without a full stop at its end."""
    return remove_spaces(text).rstrip(".")


# Equality

_WORD_IN_TEXT_COMMAND = re.compile(r"\\text ?\{ ?(\w+) ?\}")
_NUMBER_WITH_BASE = re.compile(r"\(?([0-9A-Za-z]+)\)? ?_ ?(?:\{ ?\(?(?:base )?(\w+)\)? ?\}|(\d)|([a-z]+))")
_WORD_FOR_PERCENT = re.compile(r"%|\bper ?cent", re.IGNORECASE)


def equal_answers(answer: MathAnswer, gold: MathAnswer, question: str = "") -> bool:
    """Returns whether two answers are equal, by the rules of their kinds.

    A name or a unit that only one of them has is ignored. A list without brackets may be equal to a pair, if
    it has the same order, or to a set. A pair is never equal to a set, nor an open interval to a closed one.
    `question` is the problem's text, which may decide what an answer means. Raises Absurd for a formula that
    would be too expensive.
    """
    if answer == gold:
        return True
    # The first branch that fits decides. Kinds that contain other answers come first (a value with a
    # condition or a name, an equation), so that their contents are compared by the later branches.
    if isinstance(answer, Qualified) or isinstance(gold, Qualified):
        return _equal_with_conditions(answer, gold, question)
    # (a, b) = (1, 2) is read as one named value, but means the system a = 1, b = 2.
    are_both_by_name = _values_by_name(answer) is not None and _values_by_name(gold) is not None
    if isinstance(answer, System) or isinstance(gold, System) or are_both_by_name:
        return _equal_systems(answer, gold, question)
    if isinstance(answer, Named) and isinstance(gold, Named):
        # A name in words, such as \text{Area}, may mean the same as any name in the other answer.
        same_name = answer.name == gold.name or "text" in answer.name or "text" in gold.name
        return same_name and equal_answers(answer.value, gold.value, question)
    if isinstance(answer, Equation) or isinstance(gold, Equation):
        return _equal_with_equation(answer, gold, question)
    if isinstance(answer, Named):
        return equal_answers(answer.value, gold, question)
    if isinstance(gold, Named):
        return equal_answers(answer, gold.value, question)
    if isinstance(answer, Date) or isinstance(gold, Date):
        return False  # two equal dates were already equal at the top, and a date equals nothing else
    if isinstance(answer, TimeOfDay) or isinstance(gold, TimeOfDay):
        return _equal_times(answer, gold, question)
    if isinstance(answer, Ratio) or isinstance(gold, Ratio):
        return _equal_ratios(answer, gold)
    if isinstance(answer, Score) or isinstance(gold, Score):
        return _equal_scores(answer, gold, question)
    if isinstance(answer, Words) or isinstance(gold, Words):
        return _text_of_words(answer) == _text_of_words(gold) or _equal_in_words(answer, gold, question)
    if isinstance(answer, Union) and isinstance(gold, Union) and _have_different_unknowns(answer, gold):
        return False  # x < 5 says nothing about y
    if isinstance(answer, Union) or isinstance(gold, Union):
        return _match_in_any_order(_parts_of_union(answer), _parts_of_union(gold), question)
    if isinstance(answer, Matrix) or isinstance(gold, Matrix):
        return _equal_matrices(_matrix_rows(answer), _matrix_rows(gold), question)
    if isinstance(answer, BracketGroup) or isinstance(gold, BracketGroup):
        return _equal_groups(_as_group(answer), _as_group(gold), question)
    return _equal_scalars(answer, gold, question)


def _have_different_unknowns(answer: Union, gold: Union) -> bool:
    """Returns whether two regions have different unknowns. A region without an unknown, such as the union of
    two intervals, fits any other."""
    return answer.named != "" and gold.named != "" and answer.named != gold.named


def _equal_matrices(
    rows: Sequence[Sequence[MathAnswer]], gold_rows: Sequence[Sequence[MathAnswer]], question: str
) -> bool:
    """Compares two matrices entry by entry. Matrices of different shapes are different."""
    if [len(row) for row in rows] != [len(row) for row in gold_rows]:
        return False
    for row, gold_row in zip(rows, gold_rows):
        for entry, gold_entry in zip(row, gold_row):
            if not equal_answers(entry, gold_entry, question):
                return False
    return True


def _as_group(answer: MathAnswer) -> BracketGroup:
    """Returns a group as it is, and anything else as a list of one part."""
    return answer if isinstance(answer, BracketGroup) else BracketGroup("list", (answer,))


def _text_of_words(answer: MathAnswer) -> str | None:
    """Returns the text that is compared if one of two answers is in words: ``7apples`` for
    ``7\\text{ Apples}``. Returns None for an answer that is neither in words nor a number or formula."""
    if isinstance(answer, Words):
        return answer.text
    if isinstance(answer, Scalar):
        return re.sub(r"[\\{}\s]|text", "", answer.formula).lower()
    return None


_PARTS_OF_EMPTY_SET = (Scalar("\\emptyset"),)
"""The parts of a group that has only the empty set in it."""


def _equal_groups(answer: BracketGroup, gold: BracketGroup, question: str) -> bool:
    """Compares pairs and intervals in order and by their brackets, and sets and lists in any order."""
    kinds = {answer.kind, gold.kind}
    # ∅ is compared as a list with the single part ∅. Below, such a list would equal the set {∅}, and the list
    # ∅, ∅ would equal ∅. Neither is right.
    is_empty, is_gold_empty = answer.parts == _PARTS_OF_EMPTY_SET, gold.parts == _PARTS_OF_EMPTY_SET
    if is_empty != is_gold_empty:
        return False
    if is_empty and answer.kind != gold.kind:
        return False
    if kinds == {"tuple", "set"}:
        return False  # (1, 2) has an order, and {1, 2} has none
    if "tuple" not in kinds:
        return _match_in_any_order(answer.parts, gold.parts, question)
    if len(answer.parts) != len(gold.parts):
        return False
    if answer.kind == gold.kind and (answer.left, answer.right) != (gold.left, gold.right):
        return False
    # At least one of the two is a tuple. A list without brackets may be equal to an ordered pair, but not to
    # an interval.
    pair, partner = (answer, gold) if answer.kind == "tuple" else (gold, answer)
    if partner.kind == "list" and (pair.left, pair.right) != ("(", ")"):
        return False  # an interval needs its brackets
    return all(equal_answers(part, gold_part, question) for part, gold_part in zip(answer.parts, gold.parts))


def _parts_of_union(answer: MathAnswer) -> Sequence[MathAnswer]:
    """Returns the parts of a union, or of a list that may be meant as a union: ``(1, 2), (3, 4)``. Any other
    answer is the only part."""
    if isinstance(answer, Union):
        return answer.parts
    return answer.parts if isinstance(answer, BracketGroup) and answer.kind == "list" else (answer,)


def _match_in_any_order(answer: Sequence[MathAnswer], gold: Sequence[MathAnswer], question: str) -> bool:
    """Returns whether two lists have the same parts, in any order. Repeated parts count once.

    Parts that are written differently may be repetitions, too: in ``0.5, 1/2`` the second part has the same
    partner as the first.
    """
    distinct_gold = list(dict.fromkeys(gold))
    unmatched = list(distinct_gold)
    for part in dict.fromkeys(answer):
        partner = next(
            (candidate for candidate in unmatched if equal_answers(part, candidate, question)), None
        )
        if partner is not None:
            unmatched.remove(partner)
        elif not any(equal_answers(part, gold_part, question) for gold_part in distinct_gold):
            return False
    return not unmatched


def _matrix_rows(answer: MathAnswer) -> tuple[tuple[MathAnswer, ...], ...]:
    """Returns the rows of a matrix. ``(1, 2)`` is read as a column with two rows. Other answers have no
    rows, and so equal no matrix."""
    if isinstance(answer, Matrix):
        return answer.rows
    if (
        isinstance(answer, BracketGroup)
        and answer.kind == "tuple"
        and (answer.left, answer.right) == ("(", ")")
    ):
        return tuple((part,) for part in answer.parts)
    return ()


def _equal_in_words(answer: MathAnswer, gold: MathAnswer, question: str) -> bool:
    """Returns whether two numbers are equal, of which at least one is in words: ``three dollars`` and 3."""
    number, gold_number = _as_scalar(answer), _as_scalar(gold)
    if number is None or gold_number is None:
        return False
    # If neither was in words, `equal_answers` would call this function again for ever.
    if number == answer and gold_number == gold:
        return False
    return equal_answers(number, gold_number, question)


def _as_scalar(answer: MathAnswer) -> MathAnswer | None:
    """Returns the number that an answer is, in digits or in words; None for other answers."""
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


def _equal_with_equation(answer: MathAnswer, gold: MathAnswer, question: str) -> bool:
    """Compares two equations, or an equation with a value.

    Two equations are equal if one is a multiple of the other. A value is equal to an equation if it is the
    equation's result.
    """
    sides, gold_sides = _sides_of_equation(answer), _sides_of_equation(gold)
    if sides is not None and gold_sides is not None:
        return are_proportional_equations(sides, gold_sides)
    if isinstance(answer, Equation):  # and the gold is a value
        end = read_answer(answer.right)
        return equal_answers(end, gold, question) and _has_result(answer, end, question)
    # A gold such as 9 * 2 = 18 means 18. Both of its sides must be that number.
    if not isinstance(gold, Equation) or not isinstance(answer, Scalar):
        return False
    left, right = read_answer(gold.left), read_answer(gold.right)
    return equal_answers(left, right) and equal_answers(right, answer)


def _has_result(equation: Equation, end: MathAnswer, question: str) -> bool:
    """Returns whether the result of an equation is the value of its right side, `end`.

    The result of ``2 + 3 = 5``, ``x = 2 + 3 = 5``, ``P(A) = 5`` and, if the question asks for x + y,
    ``x + y = 5`` is 5. The result of ``x + 2 = 5`` is 3, and ``2 + 2 = 5`` has none.
    """
    try:
        left = read_expression(equation.left)
    except (NotAFormula, Absurd):
        return True  # a name such as |AB| or P(A), or words
    if not left.free_symbols:
        return equal_answers(read_answer(equation.left), end, question)  # 2 + 3 = 5, and not 2 + 2 = 5
    # The equation has an unknown. In general it still has to be solved, so its right side is not its result.
    # These are the exceptions: x = 2 + 3 = 5, x + x = 2x, and x + y = 5 if x + y is asked for.
    return (
        equation.chain
        or equal_answers(read_answer(equation.left), end)
        or _without_layout(equation.left) in _without_layout(question)
    )


def _without_layout(text: str) -> str:
    """Returns a formula without spaces, braces and signs of layout, for a search in the question."""
    return re.sub(r"\\left|\\right|[\s{}$]", "", text)


def _sides_of_equation(answer: MathAnswer) -> tuple[str, str] | None:
    """Returns both sides of ``x + y = 3`` or ``x = 3``. Returns None for any other answer, also for
    ``x = 3 cm``: a side is a formula, and a formula can't contain a unit.
    """
    if isinstance(answer, Equation):
        return answer.left, answer.right
    if isinstance(answer, Named) and isinstance(answer.value, Scalar) and not answer.value.unit:
        return answer.name, answer.value.formula
    return None


def _equal_scalars(answer: MathAnswer, gold: MathAnswer, question: str) -> bool:
    """Compares two numbers or formulas with their bases, units and percent signs."""
    if not isinstance(answer, Scalar) or not isinstance(gold, Scalar):
        return False
    if "_" in answer.formula or "_" in gold.formula:  # 101_2 is a number with its base, and a_1 a variable
        is_equal = _equal_in_bases(answer.formula, gold.formula, question)
        if is_equal is not None:
            return is_equal
    # Only now, with both answers, it is clear whether 5 m is a length or 5 times a variable.
    is_number, is_gold_number = exact_value(answer.formula) is not None, exact_value(gold.formula) is not None
    answer, gold = (
        with_short_unit(answer, gold, other_is_number=is_gold_number),
        with_short_unit(gold, answer, other_is_number=is_number),
    )
    if (answer.percent and gold.unit) or (gold.percent and answer.unit):
        return False  # 75 % are not 75 degrees
    if answer.unit is not None or gold.unit is not None:
        return _equal_quantities(answer, gold)
    # A percent sign is ignored only if percent are asked for: 0.5 % are not a half.
    are_percent_asked_for = gold.percent or _WORD_FOR_PERCENT.search(question) is not None
    if (are_percent_asked_for or not answer.percent) and equal_formulas(answer.formula, gold.formula):
        return True
    if answer.percent == gold.percent:
        return False  # their formulas were compared above
    # One has a percent sign: 50 % are 0.5, whichever of them is the gold.
    percent, number = (answer, gold) if answer.percent else (gold, answer)
    percent_value, number_value = exact_value(percent.formula), exact_value(number.formula)
    if percent_value is None or number_value is None:
        return False
    return percent_value / 100 == number_value


def _equal_quantities(answer: Scalar, gold: Scalar) -> bool:
    """Compares two numbers, at least one of which has a unit. A unit that only one of them has is ignored."""
    if answer.unit is None or gold.unit is None:
        bare, measured = (answer, gold) if answer.unit is None else (gold, answer)
        assert measured.unit is not None
        # A multiple of \pi without a unit is an angle in radians: \pi/2 equals 90°.
        if is_degree(measured.unit) and "\\pi" in bare.formula and "\\pi" not in measured.formula:
            return equal_formulas(f"({measured.formula}) \\cdot \\frac{{\\pi}}{{180}}", bare.formula)
        return equal_formulas(answer.formula, gold.formula)
    # `factor_and_offset_between` has only rational factors, so radians and degrees are compared here.
    for radians, degrees in ((answer, gold), (gold, answer)):
        assert radians.unit is not None and degrees.unit is not None
        if is_radian(radians.unit) and is_degree(degrees.unit):
            return equal_formulas(radians.formula, f"({degrees.formula}) \\cdot \\frac{{\\pi}}{{180}}")
    conversion = factor_and_offset_between(answer.unit, gold.unit)
    if conversion is None:
        return False
    factor, offset = conversion
    if (factor, offset) == (1, 0):
        return equal_formulas(answer.formula, gold.formula)
    value, gold_value = exact_value(answer.formula), exact_value(gold.formula)
    if value is not None and gold_value is not None:
        return value * factor + offset == gold_value
    # A formula such as 2\pi is converted by writing the factor after it. Temperatures also have an offset.
    # They are only compared as numbers.
    scaled = f"({answer.formula}) \\cdot \\frac{{{factor.numerator}}}{{{factor.denominator}}}"
    return offset == 0 and equal_formulas(scaled, gold.formula)


def _equal_times(answer: MathAnswer, gold: MathAnswer, question: str) -> bool:
    """Compares two answers, at least one of which is written like a time of the day.

    ``1:20`` may also be a ratio. It is compared as a time if the gold is a time (`TimeOfDay.is_time`), or if
    the answer is surely a time: it has a half of the day (``1:20 p.m.``), or a leading zero, which a ratio
    wouldn't have (``1:05``). If neither is so, it is compared as a ratio.
    """
    if isinstance(answer, TimeOfDay) and isinstance(gold, TimeOfDay):
        if gold.is_time(question) or answer.is_sure:
            return gold.equals(answer)
        return _equal_ratios(answer.ratio(), gold.ratio())
    if isinstance(gold, TimeOfDay):
        if gold.is_time(question):
            return _is_hour_of(gold, answer)
        return _equal_ratios(answer, gold.ratio())
    assert isinstance(answer, TimeOfDay), "one of them is a time"
    if answer.is_sure:
        return _is_hour_of(answer, gold)
    return _equal_ratios(answer.ratio(), gold)


def _is_hour_of(clock: TimeOfDay, answer: MathAnswer) -> bool:
    """Returns whether an answer is the hour of a time without minutes: 4 for ``4 p.m.``."""
    if clock.minute is not None or not isinstance(answer, Scalar) or answer.unit is not None:
        return False
    return exact_value(answer.formula) == clock.hour


def _equal_ratios(answer: MathAnswer, gold: MathAnswer) -> bool:
    """Compares ratios by their proportions, and a ratio of two numbers with their fraction."""
    if isinstance(answer, Ratio) and isinstance(gold, Ratio):
        if len(answer.parts) != len(gold.parts):
            return False
        pairs = list(zip(answer.parts, gold.parts))
        # 2:4 is 3:6, because 2 · 6 = 4 · 3. This must hold for every two neighbouring parts.
        for (part, gold_part), (next_part, next_gold_part) in itertools.pairwise(pairs):
            if not equal_formulas(f"({part})({next_gold_part})", f"({next_part})({gold_part})"):
                return False
        # By this rule 0:0 would equal every ratio. So zeros must be where the gold has them.
        return all(_is_zero(part) == _is_zero(gold_part) for part, gold_part in pairs)
    ratio, number = (answer, gold) if isinstance(answer, Ratio) else (gold, answer)
    if not isinstance(ratio, Ratio) or not isinstance(number, Scalar) or number.unit or number.percent:
        return False
    return len(ratio.parts) == 2 and equal_formulas(
        f"\\frac{{{ratio.parts[0]}}}{{{ratio.parts[1]}}}", number.formula
    )


def _is_zero(part: str) -> bool:
    return part.strip("0 ") == ""


def _equal_scores(answer: MathAnswer, gold: MathAnswer, question: str) -> bool:
    """Compares ``5-3`` with another score by their parts, and with a number as a difference."""
    if isinstance(answer, Score) and isinstance(gold, Score):
        return answer == gold
    score, number = (answer, gold) if isinstance(answer, Score) else (gold, answer)
    assert isinstance(score, Score)
    if not isinstance(number, Scalar):
        return False
    difference = Scalar(str(score.value()))
    return equal_answers(difference, number, question)


def _equal_systems(answer: MathAnswer, gold: MathAnswer, question: str) -> bool:
    """Compares systems, ``x = 1, y = 2``, by the values of their names. Either the answer or the gold may
    also be a pair or a list of values without names."""
    values, gold_values = _values_by_name(answer), _values_by_name(gold)
    if values is not None and gold_values is not None:
        if values.keys() != gold_values.keys():
            return False
        return all(equal_answers(values[name], gold_values[name], question) for name in gold_values)
    if values is not None:
        by_name, nameless = values, gold
    elif gold_values is not None:
        by_name, nameless = gold_values, answer
    else:
        return False
    if not isinstance(nameless, BracketGroup) or len(nameless.parts) != len(by_name):
        return False
    if nameless.kind == "set" or (nameless.left, nameless.right) != ("(", ")"):
        return False  # {1, 2} has no order, and [1, 2] is an interval (a list has round brackets by default)
    # The values of a pair are in the alphabetical order of their names: (x, y).
    orders_of_names = [sorted(by_name)]
    # Only a gold's pair with brackets has to be in this order. All other values without names may also be in
    # the order of the system: "y = 1, x = 2" equals "1, 2".
    is_pair_of_gold = nameless is gold and nameless.kind == "tuple"
    if not is_pair_of_gold:
        orders_of_names.append(list(by_name))
    for names in orders_of_names:
        if all(equal_answers(part, by_name[name], question) for part, name in zip(nameless.parts, names)):
            return True
    return False


def _values_by_name(answer: MathAnswer) -> dict[str, MathAnswer] | None:
    """Returns the values of the names in a system, or in ``(a, b) = (1, 2)``; None for other answers."""
    if isinstance(answer, System):
        return dict(answer.values)
    if not isinstance(answer, Named) or not answer.name.startswith("("):
        return None
    names = answer.name.strip("()").split(",")
    has_repetition = len(set(names)) < len(names)
    if has_repetition or not isinstance(answer.value, BracketGroup) or len(answer.value.parts) != len(names):
        return None
    return dict(zip(names, answer.value.parts))


def _equal_with_conditions(answer: MathAnswer, gold: MathAnswer, question: str) -> bool:
    r"""Compares two answers, at least one of which has a condition (``\text{for } n \ge 1``).

    If both have a condition, the conditions must agree. If only the gold has one, the answer may leave it
    out. If only the answer has one, the gold must not be a number. (It may be a formula: formulas often hold
    only for some n.)
    """
    value = answer.value if isinstance(answer, Qualified) else answer
    gold_value = gold.value if isinstance(gold, Qualified) else gold
    if isinstance(answer, Qualified):
        if isinstance(gold, Qualified):
            if _bare_condition(answer.condition) != _bare_condition(gold.condition):
                return False
        elif isinstance(gold_value, Scalar) and exact_value(gold_value.formula) is not None:
            return False  # "5 if n > 1" is not 5
    return equal_answers(value, gold_value, question)


_CONDITION_WORDS = re.compile(
    r"\b(?:for|where|if|when|with|such that|whenever|provided|that|all|any|every|each|real|numbers?"
    r"|is|an?|are)\b|forall"
)


def _bare_condition(condition: str) -> str:
    r"""Returns the form in which conditions are compared: ``inZnge1`` for
    ``\text{for all integers } n \ge 1``."""
    # The longest text comes first, so that no part of it is left over.
    for words_for_integer, integer in (
        ("an integer", "\\in Z"),
        ("integers", "\\in Z"),
        ("integer", "\\in Z"),
    ):
        condition = condition.replace(words_for_integer, integer)
    condition = re.sub(r"\\text|\\mathbb|\\left|\\right|[{}()$,.;]", " ", condition)
    return re.sub(r"[\s\\]", "", _CONDITION_WORDS.sub(" ", condition))


def _equal_in_bases(answer: str, gold: str, question: str) -> bool | None:
    """Compares numbers that may have their base as an index, as ``101_2``. Returns None if neither has one.

    The numbers are equal if they have the same digits and the same base. If only the gold has a base, the
    answer is read in that base, too. If only the answer has a base, that base must be ten, or the question
    must mention it.
    """
    number, gold_number = _read_number_with_base(answer), _read_number_with_base(gold)
    if number is None and gold_number is None:
        return None
    digits, base = number or (answer, None)
    gold_digits, gold_base = gold_number or (gold, None)
    if digits.lower().lstrip("0") != gold_digits.lower().lstrip("0"):
        return False
    if base == gold_base or base is None:
        return True
    if gold_base is not None:
        return False
    return base == "10" or re.search(rf"base\W{{0,4}}{base}\b", question) is not None  # "in base $7$"


_BASE_OF_WORD = {
    "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
    "ten": "10", "twelve": "12", "sixteen": "16",
}  # fmt: skip


def _read_number_with_base(formula: str) -> tuple[str, str] | None:
    """Reads ``101_2`` or ``(101)_{two}`` as its digits and its base, ("101", "2"). Returns None for any other
    formula."""
    match = _NUMBER_WITH_BASE.fullmatch(_WORD_IN_TEXT_COMMAND.sub(r"\1", formula.strip()))
    if match is None:
        return None
    digits = match[1]  # may have letters, too, as 1A_{16}
    if not any(character.isdigit() for character in digits):
        return None  # x_1 is a variable with an index
    base = match[2] or match[3] or match[4]  # of _{7}, _7 and _seven
    base = _BASE_OF_WORD.get(base.lower(), base)
    return (digits, base) if base.isdigit() else None
