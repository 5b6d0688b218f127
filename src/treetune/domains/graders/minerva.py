r"""The verdicts of the VinePPO paper's code on MATH, quirks included.

Its rules for the text of an answer are those of the Minerva evaluation (Lewkowycz et al., 2022,
arXiv:2206.14858, appendix D.1) with additions. Among their mistakes, which this repeats: only the first line
of a box is read, so that a matrix over several lines is lost; ``\boxed {5}`` with a space is no answer;
``7\cdot 1`` becomes 71; "information" becomes ``\inftyormation``.
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
    mixed_numbers_added,
    read_expression,
    same_value,
)
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.extraction import braces
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem

LONGEST = 100_000
"""Characters of a response that are read: no sampled answer of the paper's 1,024 tokens comes near."""

MOST_ANSWERS = 50

_BETWEEN = ", "
"""Parts the answers of a response where they are kept as one text; none of them holds a space."""

CLOSE = 1e-3
"""The absolute difference below which two numbers count as equal: 0.0001 is 0.0002."""

_TOO_HARD = re.compile(r"%|\^\{|\^\(|\^\d\d|\^\d+\^|\d{3,}!")
_NO_FORMULA = re.compile(r"\\[{}]|\\div(?![A-Za-z])|[÷|]|(?<!\\sqrt)\[")
"""That code reads braces as a set and square brackets as a list, which equal no number, and no ÷ or bars."""
_DRESS = re.compile(
    r"\\(?:[mh]box|fbox|boxed|text[a-z]{0,2}|math(?:it|sf|tt)|emph|underline|overline|boldsymbol|bm|cancel"
    r"|operatorname|displaystyle|degree|bf|it|rm)(?![A-Za-z])"
)
"""Commands that it leaves out, and keeps what stands in their braces."""


@Grader.register("minerva")
@dataclass(frozen=True, kw_only=True)
class Minerva(Grader):
    """Reward 1 if the VinePPO paper's code gives it, for numbers that can be compared with its.

    A preset: it accepts 500 for 5 (a percentage), 0.0002 for 0.0001, an interval with other brackets,
    and rejects 1024 for ``2^{10}``, `50%` for a half and every matrix over several lines. The gold is
    taken out of the worked solution where the problem has one. Responses beyond `LONGEST`
    characters, which that code would have to read, are an ``error``.
    """

    votes_by_value: ClassVar[bool] = True

    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is no part of an answer; the default knows other models' tags, too
    (`tasks.thoughts`). null: all of a response counts."""

    @override
    def prepare(self) -> None:
        import sympy

        sympy.simplify(sympy.Symbol("x") ** 2 - 1)  # what it imports when it is first asked

    @override
    def grade(self, response: str, problem: Problem) -> Grade:
        if len(response) > LONGEST:
            message = f"not read: {len(response)} characters, more than {LONGEST}"
            return Grade(reward=0.0, outcome="error", message=message)
        answer = self.behind_thought(response, problem)
        given = extract(answer or "", problem.prompt)
        gold = _gold_answers(problem)
        if not given:
            return Grade(reward=0.0, outcome="no_answer")
        correct = lists_agree(given, gold)
        return Grade(reward=float(correct), outcome="ok", extracted=_BETWEEN.join(given))

    @override
    def same_answer(self, answer: str, other: str, problem: Problem) -> bool:
        # Of each of the two as many count as the gold has.
        count = len(set(_gold_answers(problem)))
        return lists_agree(answer.split(_BETWEEN)[-count:], other.split(_BETWEEN)[-count:])


def _gold_answers(problem: Problem) -> list[str]:
    worked = str(problem.data.get("solution", ""))
    worked = worked if "boxed" in worked else problem.gold
    if "boxed" not in worked and "he answer is" not in worked:
        worked = f"\\boxed{{{worked.strip()}}}"  # a bare answer, as it would stand in a solution
    return extract(worked, problem.prompt)


# The text of an answer

LONGEST_ANSWER = 1000
"""Characters of an answer that are read: three times the longest gold. The rules are quadratic in it."""

MOST_BOXES = 50
"""Only the last ones count, as many as the gold has answers."""

_LAST_NUMBER = re.compile(r"-?\d*\.?\d+")
_OUTPUT = re.compile(r"```output\n(.*?)```", re.DOTALL)
_AND = re.compile(r"\\text\{\s*and\s*\}")

_FIRST: list[tuple[str, str]] = [
    (r"\n", ""),
    (r"\.+$", ""),
    (r"\\!", ""),
    (r"^\\text\{([^{}]*)\}$", r"\1"),
    (r"\\[tdc]frac", r"\\frac"),
    (r"\\left|\\right", ""),
]
_THEN: list[tuple[str, str]] = [
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
_LAST: list[tuple[str, str]] = [
    (r"\\mathbf|\\mathrm", ""),
    (r"\\mbox\{[^{}]*\}", ""),
]
_UNIT = re.compile(r"\\text\{.*?\}$")
_ZEROS = re.compile(r"(\d)\.0+(?!\d)")
_ROOT = re.compile(r"\\(sqrt|tan)([A-Za-z0-9]+)")
_FRAC = re.compile(r"\\frac(?:(?P<one>[^\s{}\\])(?P<two>[^\s{}\\])|(?P<first>[^\s{}\\])(?=\{))")
_SLASH = re.compile(r"(-?\d+|-?\d*\\sqrt\{\d+\})/(-?\d+|-?\d*\\sqrt\{\d+\})")


def extract(text: str, question: str) -> list[str]:
    """Returns the answers that a text gives, normalised; none where it gives none.

    `question` decides whether commas part several answers.
    """
    answers = []
    for part in _parts(text):
        line = part.strip().split("\n", 1)[0].lstrip(":").strip()[:LONGEST_ANSWER]
        answer = normalised(line.rstrip("/").rstrip(".").rstrip("/"))
        if "separated by commas" in question and not re.search(r"[()\[\]]", answer):
            answers += [part.strip() for part in answer.split(",")]
        else:
            answers += [part.strip() for part in _AND.split(answer)]
    return answers


def _parts(text: str) -> list[str]:
    _, start, rest = text.partition("final answer is $")
    if start and "$. I hope" in rest:
        return [rest.partition("$. I hope")[0]]
    if "boxed" in text:  # one that isn't closed, or has no brace at once, holds nothing
        pairs, contents = braces(text), []
        for box in list(re.finditer(r"boxed\{", text))[-MOST_BOXES:]:
            if (end := pairs.get(box.end() - 1)) is not None:
                percent = "%" if text[end + 1 : end + 2] == "%" else ""
                contents.append(text[box.end() : end] + percent)
        return contents
    _, told, rest = text.rpartition("he answer is")
    if told:
        return [rest]
    outputs = _OUTPUT.findall(text)
    if outputs:
        return [outputs[-1]]
    numbers = _LAST_NUMBER.findall(text.replace(",", ""))
    return numbers[-1:]


def normalised(text: str) -> str:
    """Returns one answer in the form that is compared: the rules, one after the other."""
    text = _applied(_FIRST, text.strip())
    without_unit = _UNIT.sub("", text).strip()
    text = _applied(_THEN, without_unit or text)
    if "\\infty" not in text:
        text = text.replace("inf", "\\infty")
    text = _applied(_LAST, text)
    if "j" in text and "i" not in text:
        text = text.replace("j", "i")
    text = _ZEROS.sub(r"\1", text)
    if text.startswith("."):
        text = "0" + text
    text = _ROOT.sub(r"\\\1{\2}", text)
    text = text.replace(" ", "")
    text = _FRAC.sub(lambda m: r"\frac" + "".join(f"{{{m[i]}}}" for i in (1, 2, 3) if m[i]), text)
    match = _SLASH.fullmatch(text)
    if match:
        text = rf"\frac{{{match[1]}}}{{{match[2]}}}"
    return text.rstrip("\\,.")


def _applied(rules: list[tuple[str, str]], text: str) -> str:
    for pattern, into in rules:
        text = re.sub(pattern, into, text).strip()
    return text


# Equality


def lists_agree(given: list[str], gold: list[str]) -> bool:
    """Returns whether each of one list has its like in the other; the last ``len(gold)`` of `given` count."""
    gold = list(dict.fromkeys(gold))
    given = list(dict.fromkeys(given))[-len(gold) :] if gold else []
    if not given or len(gold) > MOST_ANSWERS:
        return False
    same = [[agree(one, other) for other in gold] for one in given]
    return all(map(any, same)) and all(map(any, zip(*same, strict=True)))


def agree(given: str, gold: str) -> bool:
    r"""Returns whether two normalised answers count as the same. Unions of intervals agree as lists."""
    if "\\cup" in given and "\\cup" in gold:
        return lists_agree(given.split("\\cup"), gold.split("\\cup"))
    numbers = [_float(text.replace(",", "")) for text in (given, gold)]
    if numbers[0] is not None and numbers[1] is not None and abs(numbers[0] - numbers[1]) < CLOSE:
        return True
    return given == gold or _math_equal(given, gold)


def _float(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _number(text: str) -> float | None:
    text = text.replace(",", "")
    value = _float(text)
    if value is None and text.endswith("%"):
        value = _float(text.rstrip("\\%"))
        value = None if value is None else value / 100
    return value


def _math_equal(given: str, gold: str, depth: int = 0) -> bool:
    if depth > 5:
        return False
    numbers = _number(given), _number(gold)
    if numbers[0] is not None and numbers[1] is not None:
        value, meant = numbers
        assert value is not None and meant is not None
        return any(
            math.isclose(value, one, rel_tol=1e-9, abs_tol=CLOSE) for one in (meant / 100, meant, meant * 100)
        )
    if _bracketed(given) and _bracketed(gold):
        parts, others = given[1:-1].split(","), gold[1:-1].split(",")
        if len(parts) == len(others) and all(
            _math_equal(one, other, depth + 1) for one, other in zip(parts, others, strict=True)
        ):
            return True
    rows, other_rows = _matrix(given), _matrix(gold)
    if rows is not None and other_rows is not None:
        return [len(row) for row in rows] == [len(row) for row in other_rows] and all(
            _math_equal(one, other, depth + 1)
            for row, other_row in zip(rows, other_rows, strict=True)
            for one, other in zip(row, other_row, strict=True)
        )
    if given.count("=") == 1 and gold.count("=") == 1:
        sides = (f"{left}-({right})" for left, right in (given.split("="), gold.split("=")))
        one, other = sides
        return _symbolic(one, other) or _symbolic(f"-({one})", other)
    for one, other, turned in ((given, gold, False), (gold, given, True)):
        if one.count("=") == 1 and "=" not in other and len(one.split("=")[0].strip()) <= 2:
            right = one.split("=")[1]
            return _math_equal(other, right, depth + 1) if turned else _math_equal(right, other, depth + 1)
    return given == gold or _symbolic(given, gold)


def _bracketed(text: str) -> bool:
    return len(text) > 2 and text[0] in "([" and text[-1] in ")]"


def _matrix(text: str) -> list[list[str]] | None:
    match = re.fullmatch(r"\\begin\{([pb]matrix)\}(.*)\\end\{\1\}", text, re.DOTALL)
    if match is None:
        return None
    return [row.split("&") for row in match[2].split("\\\\") if row.strip()]


def _symbolic(given: str, gold: str) -> bool:
    if any(_TOO_HARD.search(text) or _NO_FORMULA.search(text) for text in (given, gold)):
        return False
    one, other = _expression(given), _expression(gold)
    if one is None or other is None:
        return False
    if len(one.free_symbols | other.free_symbols) > 2:
        return False
    return same_value(one, other, tolerance=CLOSE)


def _expression(text: str) -> Any:
    try:
        return read_expression(mixed_numbers_added(_DRESS.sub("", text)), reads_choices=False)
    except (NotAFormula, Absurd):
        return None
