r"""A grader with the same verdicts as the VinePPO paper's code on MATH, including its mistakes.

The rules for the text of an answer are those of the Minerva evaluation (Lewkowycz et al., 2022,
arXiv:2206.14858, appendix D.1) with additions. These are some of their mistakes: only the first line of a box
is read, so a matrix with several lines is lost; ``\boxed {5}`` with a space is not an answer; ``7\cdot 1``
becomes 71; "information" becomes ``\inftyormation``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import MinLen
from typing_extensions import override

from treetune.domains.graders.formulas import (
    Absurd,
    NotAFormula,
    read_expression,
    same_value,
    write_mixed_numbers_as_sums,
)
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.extraction import find_braces
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem

MOST_CHARACTERS_OF_RESPONSE = 100_000
"""The most characters of a response that is read. The paper's answers of 1,024 tokens are much shorter."""

MOST_GOLDS = 50
"""The most answers of a gold. The time for comparing them grows with the square of their number."""

_ANSWER_SEPARATOR = ", "
"""Separates the answers of a response in the extracted text. An answer never has a space itself."""

TOLERANCE = 1e-3
"""Two numbers are equal if their absolute difference is smaller: 0.0001 equals 0.0002."""

_TOO_HARD_TO_EVALUATE = re.compile(r"%|\^\{|\^\(|\^\d\d|\^\d+\^|\d{3,}!")
"""Signs of a formula that the paper's code doesn't evaluate: a percent sign, an exponent in brackets or of
two digits, a power of a power, and a factorial of a number of three digits."""
_NO_FORMULA = re.compile(r"\\[{}]|\\div(?![A-Za-z])|[÷|]|(?<!\\sqrt)\[")
"""Signs of a text that the paper's code doesn't read as a formula. For it, braces are a set and square
brackets a list, which equal no number."""
_FORMATTING_COMMAND = re.compile(
    r"\\(?:[mh]box|fbox|boxed|text[a-z]{0,2}|math(?:it|sf|tt)|emph|underline|overline|boldsymbol|bm|cancel"
    r"|operatorname|displaystyle|degree|bf|it|rm)(?![A-Za-z])"
)
"""Commands that are removed, while the text in their braces is kept."""


@Grader.register("minerva")
@dataclass(frozen=True, kw_only=True)
class Minerva(Grader):
    """Gives the same rewards as the VinePPO paper's code on MATH, so that results are comparable.

    It accepts 500 for 5 (as a percentage), 0.0002 for 0.0001, and an interval with other brackets. It rejects
    1024 for ``2^{10}``, `50%` for a half, and every matrix with several lines. If the problem's data has a
    worked ``solution``, the gold is the answer in that. A response of more than `MOST_CHARACTERS_OF_RESPONSE`
    characters, which the paper's code would read, has the outcome ``error``.
    """

    votes_by_value: ClassVar[bool] = True

    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is not part of an answer. The default also recognizes the tags of
    other models (`tasks.thoughts`). null: the whole response counts."""

    @override
    def prepare(self) -> None:
        import sympy

        sympy.simplify(sympy.Symbol("x") ** 2 - 1)  # the first call imports many modules

    @override
    def grade(self, response: str, problem: Problem) -> Grade:
        if len(response) > MOST_CHARACTERS_OF_RESPONSE:
            message = f"not read: {len(response)} characters, more than {MOST_CHARACTERS_OF_RESPONSE}"
            return Grade(reward=0.0, outcome="error", message=message)
        text = self.after_thought(response, problem)
        answers = [] if text is None else extract_answers(text, problem.prompt)
        if not answers:
            return Grade(reward=0.0, outcome="no_answer")
        correct = lists_agree(answers, _gold_answers(problem))
        return Grade(reward=float(correct), outcome="ok", extracted=_ANSWER_SEPARATOR.join(answers))

    @override
    def same_answer(self, answer: str, other: str, problem: Problem) -> bool:
        # Each text is a list of answers. Only as many of them count as the gold has, from the end.
        count = len(set(_gold_answers(problem)))
        return lists_agree(answer.split(_ANSWER_SEPARATOR)[-count:], other.split(_ANSWER_SEPARATOR)[-count:])


def _gold_answers(problem: Problem) -> list[str]:
    """Returns the answers in the problem's worked solution, or in its gold if the solution has no box."""
    text = str(problem.data.get("solution", ""))
    if "boxed" not in text:
        text = problem.gold
    # "The answer is" or "the answer is"
    if "boxed" not in text and "he answer is" not in text:
        text = f"\\boxed{{{text.strip()}}}"  # only an answer: write it in the form of a solution
    return extract_answers(text, problem.prompt)


# The text of an answer

LONGEST_ANSWER = 1000
"""The most characters of an answer that are read, three times the longest gold. There is a limit because the
rules take quadratic time."""

MOST_BOXES = 50
"""The most boxes that are read, the last ones."""

_NUMBER = re.compile(r"-?\d*\.?\d+")
_PROGRAM_OUTPUT = re.compile(r"```output\n(.*?)```", re.DOTALL)
_AND_IN_TEXT = re.compile(r"\\text\{\s*and\s*\}")

_RULES_BEFORE_UNIT: list[tuple[str, str]] = [
    (r"\n", ""),
    (r"\.+$", ""),
    (r"\\!", ""),
    (r"^\\text\{([^{}]*)\}$", r"\1"),
    (r"\\[tdc]frac", r"\\frac"),
    (r"\\left|\\right", ""),
]
_RULES_AFTER_UNIT: list[tuple[str, str]] = [
    (r"\^\\circ|\^\{\\circ\}", ""),
    (r"\{[cm]?m\}(?:\^[23])?", ""),
    (r"p\.m\.$", ""),
    (r"(\d)\s*t$", r"\1"),
    (r"\\?\$", ""),
    (r"x\\in", ""),
    (r"\\%", "%"),
    (r" \.", " 0."),
    (r"\{\.", "{0."),
    (r"\\cdot", ""),
    (r"infinity", r"\\infty"),
]
_RULES_AFTER_INFINITY: list[tuple[str, str]] = [
    (r"\\mathbf|\\mathrm", ""),
    (r"\\mbox\{[^{}]*\}", ""),
]
_UNIT_AT_END = re.compile(r"\\text\{.*?\}$")
_ZEROS_AFTER_POINT = re.compile(r"(\d)\.0+(?!\d)")
_ROOT_WITHOUT_BRACES = re.compile(r"\\(sqrt|tan)([A-Za-z0-9]+)")
_FRACTION_WITHOUT_BRACES = re.compile(
    r"\\frac(?:(?P<above>[^\s{}\\])(?P<below>[^\s{}\\])|(?P<first>[^\s{}\\])(?=\{))"
)
_FRACTION_WITH_SLASH = re.compile(r"(-?\d+|-?\d*\\sqrt\{\d+\})/(-?\d+|-?\d*\\sqrt\{\d+\})")


def extract_answers(text: str, question: str) -> list[str]:
    """Returns the normalised answers in a text.

    The question decides whether commas separate several answers. The steps and their order are those of the
    paper's code.
    """
    answers = []
    for answer_text in _find_answers(text):
        line = answer_text.strip().split("\n", 1)[0].lstrip(":").strip()[:LONGEST_ANSWER]
        answer = normalise_answer(line.rstrip("/").rstrip(".").rstrip("/"))
        # A comma within brackets belongs to a pair or an interval.
        if "separated by commas" in question and not re.search(r"[()\[\]]", answer):
            answers += [part.strip() for part in answer.split(",")]
        else:
            answers += [part.strip() for part in _AND_IN_TEXT.split(answer)]
    return answers


def _find_answers(text: str) -> list[str]:
    """Returns the texts of the answers.

    Five forms are looked for, and the first form that the text has decides: the phrase of the paper's prompt
    ("final answer is $…$. I hope"), boxes, the text after "the answer is", the output of a program, and the
    last number.
    """
    _, phrase, text_after = text.partition("final answer is $")
    if phrase and "$. I hope" in text_after:
        return [text_after.partition("$. I hope")[0]]
    if "boxed" in text:
        closing_of_opening = find_braces(text)  # the offset of each closing brace, by that of its opening
        contents = []
        for box in list(re.finditer(r"boxed\{", text))[-MOST_BOXES:]:
            end = closing_of_opening.get(box.end() - 1)
            if end is not None:  # the box is closed
                # A percent sign after the box, as in \boxed{5}%, belongs to the answer.
                percent = "%" if text[end + 1 : end + 2] == "%" else ""
                contents.append(text[box.end() : end] + percent)
        return contents
    _, marker, text_after = text.rpartition("he answer is")  # "The" or "the"
    if marker:
        return [text_after]
    outputs = _PROGRAM_OUTPUT.findall(text)
    if outputs:
        return [outputs[-1]]
    numbers = _NUMBER.findall(text.replace(",", ""))
    return numbers[-1:]


def normalise_answer(text: str) -> str:
    """Returns an answer in the form for comparison, by applying the rules one after the other.

    The rules and their order are those of the paper's code, with their mistakes (see the head of this file).
    """
    text = _apply_rules(_RULES_BEFORE_UNIT, text.strip())
    without_unit = _UNIT_AT_END.sub("", text).strip()
    # An answer that is all \text{…} isn't a unit.
    text = _apply_rules(_RULES_AFTER_UNIT, without_unit or text)
    if "\\infty" not in text:
        text = text.replace("inf", "\\infty")
    text = _apply_rules(_RULES_AFTER_INFINITY, text)
    if "j" in text and "i" not in text:  # 2j is another notation of 2i
        text = text.replace("j", "i")
    text = _ZEROS_AFTER_POINT.sub(r"\1", text)  # 5.00 becomes 5
    if text.startswith("."):
        text = "0" + text
    text = _ROOT_WITHOUT_BRACES.sub(r"\\\1{\2}", text)  # \sqrt3 becomes \sqrt{3}
    text = text.replace(" ", "")
    text = _FRACTION_WITHOUT_BRACES.sub(_brace_fraction, text)
    match = _FRACTION_WITH_SLASH.fullmatch(text)
    if match:  # 1/2 becomes \frac{1}{2}
        text = rf"\frac{{{match[1]}}}{{{match[2]}}}"
    return text.rstrip("\\,.")


def _brace_fraction(match: re.Match[str]) -> str:
    r"""Adds missing braces: ``\frac12`` becomes ``\frac{1}{2}``, and ``\frac1`` before a brace
    ``\frac{1}``."""
    braced = [f"{{{argument}}}" for argument in match.groups() if argument]
    return r"\frac" + "".join(braced)


def _apply_rules(rules: list[tuple[str, str]], text: str) -> str:
    """Applies replacement rules one after the other, and strips the text after each."""
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text).strip()
    return text


# Equality

MOST_NESTED_COMPARISONS = 5
"""The most brackets and equations within each other that are compared."""


def lists_agree(answers: list[str], golds: list[str]) -> bool:
    """Returns whether each answer agrees with a gold, and each gold with an answer. Only the last
    ``len(golds)`` answers count."""
    golds = list(dict.fromkeys(golds))
    if not answers or not golds or len(golds) > MOST_GOLDS:
        return False
    answers = list(dict.fromkeys(answers))[-len(golds) :]
    agreement = [[are_equal_answers(answer, gold_answer) for gold_answer in golds] for answer in answers]
    every_answer_has_a_gold = all(map(any, agreement))
    every_gold_has_an_answer = all(map(any, zip(*agreement, strict=True)))
    return every_answer_has_a_gold and every_gold_has_an_answer


def are_equal_answers(answer: str, gold: str) -> bool:
    r"""Returns whether two normalised answers are equal. Unions of intervals are compared as lists."""
    if "\\cup" in answer and "\\cup" in gold:
        return lists_agree(answer.split("\\cup"), gold.split("\\cup"))
    return answer == gold or _is_math_equal(answer, gold)


def _read_float(text: str) -> float | None:
    """Returns the finite number that a text is; None for other texts."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _read_number(text: str) -> float | None:
    r"""Returns the number that a text is, such as ``1,200``, or 0.5 for ``50%`` and ``50\%``. None for other
    texts."""
    text = text.replace(",", "")
    value = _read_float(text)
    if value is None and text.endswith("%"):
        value = _read_float(text.rstrip("\\%"))
        value = None if value is None else value / 100
    return value


def _is_math_equal(answer: str, gold: str, depth: int = 0) -> bool:
    """Compares two normalised answers: as numbers, pairs, matrices, equations or formulas, in this order."""
    if depth > MOST_NESTED_COMPARISONS:
        return False
    number, gold_number = _read_number(answer), _read_number(gold)
    if number is not None and gold_number is not None:
        return _are_equal_numbers(number, gold_number)
    if _is_bracketed(answer) and _is_bracketed(gold):
        parts, gold_parts = answer[1:-1].split(","), gold[1:-1].split(",")
        if _are_math_equal(parts, gold_parts, depth + 1):
            return True  # if not, they may still be equal formulas, as (x + 1)(x - 1) and (x - 1)(x + 1)
    rows, gold_rows = _read_matrix(answer), _read_matrix(gold)
    if rows is not None and gold_rows is not None:
        return _are_equal_matrices(rows, gold_rows, depth)
    if answer.count("=") == 1 and gold.count("=") == 1:
        return _are_equal_equations(answer, gold)
    if _is_named_value(answer) and "=" not in gold:
        return _is_math_equal(answer.split("=")[1], gold, depth + 1)
    if _is_named_value(gold) and "=" not in answer:
        return _is_math_equal(answer, gold.split("=")[1], depth + 1)
    return answer == gold or _are_equal_formulas(answer, gold)


def _are_equal_numbers(number: float, gold: float) -> bool:
    # A percentage equals the number without its sign: 50% (which is 0.5) equals 50, and 50 equals 50%.
    accepted = (gold / 100, gold, gold * 100)
    return any(math.isclose(number, value, rel_tol=1e-9, abs_tol=TOLERANCE) for value in accepted)


def _are_equal_matrices(rows: list[list[str]], gold_rows: list[list[str]], depth: int) -> bool:
    if len(rows) != len(gold_rows):
        return False
    pairs = zip(rows, gold_rows, strict=True)
    return all(_are_math_equal(row, gold_row, depth + 1) for row, gold_row in pairs)


def _are_equal_equations(answer: str, gold: str) -> bool:
    """Compares the differences of left and right, such as ``x-(3)``, of two equations."""
    difference, gold_difference = _left_minus_right(answer), _left_minus_right(gold)
    if _are_equal_formulas(difference, gold_difference):
        return True
    # x = 3 also equals 3 = x, whose difference has the other sign.
    return _are_equal_formulas(f"-({difference})", gold_difference)


def _are_math_equal(parts: list[str], gold_parts: list[str], depth: int) -> bool:
    """Compares two lists part by part. Lists of different lengths are different."""
    if len(parts) != len(gold_parts):
        return False
    return all(
        _is_math_equal(part, gold_part, depth) for part, gold_part in zip(parts, gold_parts, strict=True)
    )


def _left_minus_right(equation: str) -> str:
    """Writes ``x=3`` as ``x-(3)``."""
    left, right = equation.split("=")
    return f"{left}-({right})"


def _is_named_value(text: str) -> bool:
    """Returns whether a text is ``x=3``, with at most two characters on the left, as in the paper's code."""
    return text.count("=") == 1 and len(text.split("=")[0].strip()) <= 2


def _is_bracketed(text: str) -> bool:
    return len(text) > 2 and text[0] in "([" and text[-1] in ")]"


def _read_matrix(text: str) -> list[list[str]] | None:
    """Returns the rows of cells of a ``pmatrix`` or ``bmatrix``; None for any other text."""
    match = re.fullmatch(r"\\begin\{([pb]matrix)\}(.*)\\end\{\1\}", text, re.DOTALL)
    if match is None:
        return None
    return [row.split("&") for row in match[2].split("\\\\") if row.strip()]


def _are_equal_formulas(answer: str, gold: str) -> bool:
    """Compares two formulas by their values. Returns False for formulas that the paper's code can't read."""
    if any(_TOO_HARD_TO_EVALUATE.search(text) or _NO_FORMULA.search(text) for text in (answer, gold)):
        return False
    expression, gold_expression = _read_expression_or_none(answer), _read_expression_or_none(gold)
    if expression is None or gold_expression is None:
        return False
    if len(expression.free_symbols | gold_expression.free_symbols) > 2:
        return False  # the paper's code compares formulas of at most two unknowns
    return same_value(expression, gold_expression, tolerance=TOLERANCE)


def _read_expression_or_none(text: str) -> Any:
    """Returns a text as an expression of sympy; None if it isn't a formula, or would be too expensive."""
    # `_FORMATTING_COMMAND` finds commands such as \text: they are removed, and the text in their braces is
    # kept. With `reads_choices=False`, C(10,3) is a variable before a pair, and not a binomial coefficient.
    formula = write_mixed_numbers_as_sums(_FORMATTING_COMMAND.sub("", text))
    try:
        return read_expression(formula, reads_choices=False)
    except (NotAFormula, Absurd):
        return None
