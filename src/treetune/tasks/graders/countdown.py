"""The grader of Countdown. It reads an expression with its own grammar, and computes it exactly.

The grammar, which allows nothing else::

    sum     = ["-" | "−"] product { ("+" | "-" | "−" | "–") product }
    product = atom { ("*" | "×" | "·" | "⋅" | "x" | "X" | "/" | "÷") atom }
    atom    = digits | "(" sum ")"

Digits are ASCII. ``\\times``, ``\\cdot`` and ``\\div`` are signs, too, since models write them. There are no
powers (two signs never follow each other, so neither ``**`` nor ``//``), decimals, exponents, names, or
products without a sign. A negative number is only allowed at the beginning of a sum: ``-3+5`` and
``2*(-3+5)``, but not ``2*-3``. With positive numbers, it makes no further positive targets reachable.
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
from treetune.tasks.graders.extraction import CLOSING_TAG, OPENING_TAG, last_between
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem

MOST_CHARACTERS_OF_EXPRESSION = 1000
"""The number of characters of the longest expression that is read. Six numbers in brackets need about 40."""

MOST_TOKENS = 200
MOST_DIGITS_OF_A_NUMBER = 15
MOST_NESTED_BRACKETS = 40
"""The largest depth of brackets within each other."""

LONGEST_SHOWN = 200
"""The number of characters of a malformed answer that are kept in its grade."""

_NUMBER = rf"[0-9]{{1,{MOST_DIGITS_OF_A_NUMBER}}}"
_GOLD = re.compile(rf"(-?{_NUMBER}) from ({_NUMBER}(?: {_NUMBER})*)")


@dataclass(frozen=True, kw_only=True)
class CountdownScores:
    """The rewards of the four verdicts.

    `correct` must be at least 1 and the other rewards less than 1, since all metrics, such as pass@1, count
    an answer as correct if it earns 1 or more.
    """

    no_answer: float = 0.0
    """Reward of a response without an answer."""
    malformed: float = 0.0
    """Reward of an answer that isn't an expression of the given numbers."""
    wrong: float = 0.0
    """Reward of an expression of the given numbers with another value."""
    correct: Annotated[float, Ge(1)] = 1.0
    """Reward of an expression of the given numbers with the target as its value."""

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
    r"""A right answer is an expression of the given numbers with the target as its exact value. The gold
    contains both: ``39 from 12 34 7``.

    Numbers are compared as multisets. The answer is never executed. Of LaTeX, only the signs ``\times``,
    ``\cdot`` and ``\div`` are read, so ``$62+70+71$`` and ``\frac{62}{70}+71`` are malformed. An answer with
    a leading plus is malformed, too.

    The answer is the text between the last `closing` and the last `opening` before it, which may have several
    lines. The outcome is ``no_answer`` or ``ok``. The message of a malformed answer says what is wrong with
    it.
    """

    votes_by_value: ClassVar[bool] = True

    opening: Annotated[str, MinLen(1)] = OPENING_TAG
    closing: Annotated[str, MinLen(1)] = CLOSING_TAG
    unclosed: bool = False
    """Whether the answer may end without `closing`. Set it if `closing` is a stop string, since graders don't
    see stop strings. The answer is then the text after the last `opening`, up to a `closing` if there is
    one."""
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is not part of an answer. The default also recognizes the tags of
    other models (`tasks.thoughts`). null: the whole response counts."""
    equation: Literal["left", "refused"] = "left"
    """The treatment of an answer with ``=``. ``left``: only the left side is read. ``refused``: the answer is
    malformed."""
    require_all: bool = True
    """Whether each given number must be used exactly once. If it is false, each may be used at most once."""
    scores: CountdownScores = field(default_factory=CountdownScores)
    """The rewards of the four verdicts."""

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        read_gold(problem.gold)  # raises for a wrong gold, even if the response has no answer
        return last_between(response, self.opening, self.closing, unclosed=self.unclosed)

    @override
    def without_answer(self, problem: Problem) -> Grade:
        return Grade(reward=self.scores.no_answer, outcome="no_answer")

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade:
        """Grades an expression as malformed, wrong or correct."""
        target, given_numbers = read_gold(problem.gold)
        text, equals_sign, _ = extracted.partition("=")  # of `3+4=7`, only `3+4` is read
        try:
            if equals_sign and self.equation == "refused":
                raise NotAnExpression("it is an equation")
            expression = read_expression(text)
            used_numbers = Counter(expression.numbers)
            too_many = used_numbers - given_numbers
            if too_many:
                raise NotAnExpression(f"{_in_one_line(too_many)} not given, or used too often")
            unused = given_numbers - used_numbers
            if self.require_all and unused:
                raise NotAnExpression(f"{_in_one_line(unused)} not used")
        except NotAnExpression as error:
            shown_answer = extracted if len(extracted) <= LONGEST_SHOWN else extracted[:LONGEST_SHOWN] + "…"
            return Grade(
                reward=self.scores.malformed, outcome="ok", extracted=shown_answer, message=str(error)
            )
        reward = self.scores.correct if expression.value == target else self.scores.wrong
        return Grade(reward=reward, outcome="ok", extracted=text.strip())

    @override
    def same_answer(self, answer: str, other: str, problem: Problem) -> bool:
        """Returns whether two expressions have the same value."""
        try:
            return read_expression(answer).value == read_expression(other).value
        except NotAnExpression:
            return False


def write_gold(target: int, numbers: Sequence[int]) -> str:
    """Returns the gold of a problem, such as ``39 from 12 34 7``: the target, and the given numbers."""
    return f"{target} from {' '.join(map(str, numbers))}"


@lru_cache(maxsize=1024)
def read_gold(gold: str) -> tuple[int, Counter[int]]:
    """Returns the target and the given numbers of a gold. Raises ValueError for any other text."""
    match = _GOLD.fullmatch(gold.strip())
    if match is None:
        raise ValueError(f"the gold {gold[:100]!r} is not one of Countdown, such as '39 from 12 34 7'")
    return int(match[1]), Counter(map(int, match[2].split()))


def _in_one_line(numbers: Counter[int]) -> str:
    return ", ".join(map(str, sorted(numbers.elements())))


# Expressions

_TOKEN = re.compile(r"\s+|(?P<number>[0-9]+)|(?P<sign>[-+*/()−–×·⋅xX÷]|\\(?:times|cdot|div)(?![A-Za-z]))")
_SIGN_OF_SPELLING = {
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
    """Reads and computes an expression: ``(3 + 4) * 2`` gives ``Expression(Fraction(14), (3, 4, 2))``.

    This is Dijkstra's shunting yard algorithm, with two stacks in place of recursion. The time is linear in
    the text. The only exception is NotAnExpression.
    """
    signs: list[str] = []
    values: list[Fraction] = []
    numbers: list[int] = []
    depth = 0
    previous: str | None = None  # "number", or the sign that was read last
    for kind, token in _split_into_tokens(text):
        begins_sum = previous is None or previous == "("
        follows_value = previous == "number" or previous == ")"
        if kind == "number" or token == "(":
            if follows_value:
                raise NotAnExpression(f"no sign before {token!r}")
            if kind == "number":
                numbers.append(int(token))
                values.append(Fraction(numbers[-1]))
            else:
                depth += 1
                if depth > MOST_NESTED_BRACKETS:
                    raise NotAnExpression(f"more than {MOST_NESTED_BRACKETS} brackets deep")
                signs.append(token)
        elif token == "-" and begins_sum:
            signs.append(_NEGATED)
        elif not follows_value:
            raise NotAnExpression(f"no number before {token!r}")
        else:
            # Compute the earlier signs that bind at least as strongly as this one. At a closing bracket,
            # compute all signs back to its opening bracket, which is the only one with a precedence below 1.
            least_precedence = _PRECEDENCE[token] if token != ")" else 1
            while signs and _PRECEDENCE[signs[-1]] >= least_precedence:
                _apply_sign(signs.pop(), values)
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
        _apply_sign(signs.pop(), values)
    (value,) = values
    return Expression(value, tuple(numbers))


def _split_into_tokens(text: str) -> list[tuple[str, str]]:
    """Returns the tokens of an expression with their kinds: ``("number", "3")`` and ``("sign", "*")`` for
    ``3×``. Raises NotAnExpression for a text that is too long or has other characters."""
    if len(text) > MOST_CHARACTERS_OF_EXPRESSION:
        raise NotAnExpression(f"{len(text)} characters, more than {MOST_CHARACTERS_OF_EXPRESSION}")
    tokens: list[tuple[str, str]] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotAnExpression(f"{text[position]!r} is not allowed in an expression")
        position = match.end()
        if match.lastgroup is None:  # white space
            continue
        if len(tokens) == MOST_TOKENS:
            raise NotAnExpression(f"more than {MOST_TOKENS} numbers and signs")
        if match.lastgroup == "number" and len(match[0]) > MOST_DIGITS_OF_A_NUMBER:
            raise NotAnExpression(f"a number of {len(match[0])} digits, more than {MOST_DIGITS_OF_A_NUMBER}")
        # `_SIGN_OF_SPELLING` gives the sign for another spelling of it, such as * for ×.
        tokens.append((match.lastgroup, _SIGN_OF_SPELLING.get(match[0], match[0])))
    return tokens


def _apply_sign(sign: str, values: list[Fraction]) -> None:
    """Replaces the last one or two values on the stack by the result of the sign's operation."""
    right = values.pop()
    if sign == _NEGATED:
        values.append(-right)
        return
    left = values.pop()
    if sign == "/" and right == 0:
        raise NotAnExpression("a division by zero")
    if sign == "+":
        values.append(left + right)
    elif sign == "-":
        values.append(left - right)
    elif sign == "*":
        values.append(left * right)
    else:
        values.append(left / right)
