"""Countdown: reach the target from the given numbers with + − × ÷ and brackets, computed exactly and never
evaluated.

The grammar of an expression, with nothing in it that isn't named here::

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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, MinLen
from typing_extensions import override

from treetune.exceptions import NotAnExpression
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.extraction import ANSWER, ANSWER_END, last_between
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem

LONGEST = 1000
"""Characters of an expression that are read; six numbers in brackets take forty."""

MOST_TOKENS = 200
MOST_DIGITS = 15
DEEPEST = 40
"""Open brackets at a time."""

LONGEST_SHOWN = 200
"""Characters of a malformed answer that are kept in its grade."""

_NUMBER = rf"[0-9]{{1,{MOST_DIGITS}}}"
_GOLD = re.compile(rf"(-?{_NUMBER}) from ({_NUMBER}(?: {_NUMBER})*)")


@dataclass(frozen=True, kw_only=True)
class CountdownScores:
    """The rewards of the four verdicts.

    `correct` is at least 1 and the others are less: that is how everything else, pass@1 above all, tells
    correct from wrong.
    """

    no_answer: float = 0.0
    """Of a response without an answer."""
    malformed: float = 0.0
    """Of an answer that is no expression of the given numbers."""
    wrong: float = 0.0
    """Of an expression of the given numbers with another value."""
    correct: Annotated[float, Ge(1)] = 1.0

    def __post_init__(self) -> None:
        for name in ("no_answer", "malformed", "wrong"):
            if getattr(self, name) >= 1:
                raise ValueError(
                    f"scores.{name} is {getattr(self, name)}, and what earns 1 or more counts as correct: "
                    "choose less than 1"
                )


@Grader.register("countdown")
@dataclass(frozen=True, kw_only=True)
class CountdownGrader(Grader):
    r"""Right is an expression of the given numbers whose value, in exact rational arithmetic, is the
    target. The gold says both: ``39 from 12 34 7``.

    Numbers are compared as multisets. Nothing is evaluated. LaTeX is read no further than three signs, so
    that ``$62+70+71$`` and ``\frac{62}{70}+71`` are malformed, and so is a leading plus.

    The answer stands between the last `closing` and the last `opening` before it, across newlines; earlier
    answers don't count. The outcome is ``no_answer`` or ``ok``; the message says what was wrong with a
    malformed answer, and `extracted` is the answer.
    """

    votes_by_value: ClassVar[bool] = True

    opening: Annotated[str, MinLen(1)] = ANSWER
    closing: Annotated[str, MinLen(1)] = ANSWER_END
    unclosed: bool = False
    """Takes what follows the last `opening`, up to a `closing` if there is one: for answers that a stop
    string ends, which graders don't see."""
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is no part of an answer; the default knows other models' tags, too
    (`tasks.thoughts`). null: all of a response counts."""
    equation: Literal["left", "refused"] = "left"
    """Reads the left side of an answer with ``=`` (the right-hand side is not looked at), or counts it as
    malformed."""
    require_all: bool = True
    """Each given number must be used exactly once, else at most once."""
    scores: CountdownScores = field(default_factory=CountdownScores)
    """The rewards of the four verdicts."""

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        read_gold(problem.gold)  # one that is none is told whatever the response says
        return last_between(response, self.opening, self.closing, unclosed=self.unclosed)

    @override
    def without_answer(self, problem: Problem) -> Grade:
        return Grade(reward=self.scores.no_answer, outcome="no_answer")

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade:
        target, given_numbers = read_gold(problem.gold)
        text, equals, _ = extracted.partition("=")
        try:
            if equals and self.equation == "refused":
                raise NotAnExpression("it is an equation")
            expression = read_expression(text)
            used_numbers = Counter(expression.numbers)
            if too_many := used_numbers - given_numbers:
                raise NotAnExpression(f"{_in_one_line(too_many)} not given, or used too often")
            if self.require_all and (unused := given_numbers - used_numbers):
                raise NotAnExpression(f"{_in_one_line(unused)} not used")
        except NotAnExpression as error:
            shown = extracted if len(extracted) <= LONGEST_SHOWN else extracted[:LONGEST_SHOWN] + "…"
            return Grade(reward=self.scores.malformed, outcome="ok", extracted=shown, message=str(error))
        reward = self.scores.correct if expression.value == target else self.scores.wrong
        return Grade(reward=reward, outcome="ok", extracted=text.strip())

    @override
    def same_answer(self, answer: str, other: str, problem: Problem) -> bool:
        """Returns whether two expressions have one value, as all right ones have."""
        try:
            return read_expression(answer).value == read_expression(other).value
        except NotAnExpression:
            return False


def gold_of(target: int, numbers: Sequence[int]) -> str:
    """Writes the gold of a problem: all that the grader has to know, in one text."""
    return f"{target} from {' '.join(map(str, numbers))}"


@lru_cache(maxsize=1024)
def read_gold(gold: str) -> tuple[int, Counter[int]]:
    """Reads the target and the given numbers. Raises ValueError for another text."""
    match = _GOLD.fullmatch(gold.strip())
    if match is None:
        raise ValueError(f"the gold {gold[:100]!r} is none of Countdown, such as '39 from 12 34 7'")
    return int(match[1]), Counter(map(int, match[2].split()))


def _in_one_line(numbers: Counter[int]) -> str:
    return ", ".join(map(str, sorted(numbers.elements())))


# Expressions

_TOKEN = re.compile(r"\s+|(?P<number>[0-9]+)|(?P<sign>[-+*/()−–×·⋅xX÷]|\\(?:times|cdot|div)(?![A-Za-z]))")
_SAME = {
    "−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "x": "*", "X": "*", "÷": "/",
    "\\times": "*", "\\cdot": "*", "\\div": "/",
}  # fmt: skip
_NEGATED = "negated"
_PRECEDENCE = {"(": 0, "+": 1, "-": 1, _NEGATED: 1, "*": 2, "/": 2}


@dataclass(frozen=True)
class Expression:
    """The value of an expression, and the numbers in it from left to right."""

    value: Fraction
    numbers: tuple[int, ...]


def read_expression(text: str) -> Expression:
    """Reads and computes an expression, in time linear in the text. Raises nothing but NotAnExpression.

    ``(3 + 4) * 2`` is ``Expression(Fraction(14), (3, 4, 2))``. Two stacks in place of recursion (Dijkstra's
    shunting yard), so that no depth of brackets overflows anything.
    """
    signs: list[str] = []
    values: list[Fraction] = []
    numbers: list[int] = []
    depth = 0
    previous: str | None = None  # "number", or the sign that was read last
    for kind, token in _tokens(text):
        is_at_start = previous is None or previous == "("
        follows_value = previous == "number" or previous == ")"
        if kind == "number" or token == "(":
            if follows_value:
                raise NotAnExpression(f"no sign before {token!r}")
            if kind == "number":
                numbers.append(int(token))
                values.append(Fraction(numbers[-1]))
            else:
                depth += 1
                if depth > DEEPEST:
                    raise NotAnExpression(f"more than {DEEPEST} brackets deep")
                signs.append(token)
        elif token == "-" and is_at_start:
            signs.append(_NEGATED)
        elif not follows_value:
            raise NotAnExpression(f"no number before {token!r}")
        else:
            # Computes what binds at least as strongly; a closing bracket ends all up to its opening one.
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
        previous = "number" if kind == "number" else token
    if previous != "number" and previous != ")":
        raise NotAnExpression("it ends before it is complete" if previous else "it is empty")
    while signs:
        if signs[-1] == "(":
            raise NotAnExpression("a bracket is never closed")
        _apply(signs.pop(), values)
    (value,) = values
    return Expression(value, tuple(numbers))


def _tokens(text: str) -> list[tuple[str, str]]:
    """Returns kinds and tokens, ("number", "3") and ("sign", "*") of ``3×``. Raises NotAnExpression."""
    if len(text) > LONGEST:
        raise NotAnExpression(f"{len(text)} characters, more than {LONGEST}")
    tokens: list[tuple[str, str]] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotAnExpression(f"{text[position]!r} belongs to no expression")
        position = match.end()
        if match.lastgroup is None:
            continue
        if len(tokens) == MOST_TOKENS:
            raise NotAnExpression(f"more than {MOST_TOKENS} numbers and signs")
        if match.lastgroup == "number" and len(match[0]) > MOST_DIGITS:
            raise NotAnExpression(f"a number of {len(match[0])} digits, more than {MOST_DIGITS}")
        tokens.append((match.lastgroup, _SAME.get(match[0], match[0])))
    return tokens


def _apply(sign: str, values: list[Fraction]) -> None:
    """Replaces the last values on the stack by what the sign makes of them."""
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
