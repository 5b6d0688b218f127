"""The default grader of MATH: on the math-verify library, with what it gets wrong mended."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache

from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.expressions import Absurd
from treetune.tasks.graders.formulas import spaceless
from treetune.vocabulary import Grade, Problem
from treetune_domains.graders.math_answers import Answer, Group, read_answer
from treetune_domains.graders.math_equality import equal_answers
from treetune_domains.graders.math_text import LONGEST, given_answer, gold_answer, undressed

LONGEST_RESPONSE = 200_000
"""Characters of a response that are searched for an answer; a sampled answer has a tenth of it."""


@Grader.register("math")
@dataclass(frozen=True, kw_only=True)
class MathGrader(Grader):
    r"""Reward 1 if the answer says what the gold says, however it is written.

    The answer stands in the last box of the response, or after its last "answer is"; without either
    the outcome is ``no_answer``. Both sides are told apart into numbers with units, words, ordered
    pairs, sets, lists, intervals, matrices and equations (`math_answers`), and compared part by part;
    formulas are compared exactly where the small grammar of `expressions` reads them, and by
    math-verify where not. A percent sign counts for nothing only where the gold has one or the problem
    speaks of percent: elsewhere 50 % is a half and never 50. What no answer is like (2,000 characters,
    an exponent of millions, a tower of powers) is an ``error`` before anything is computed.
    """

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
        if _bare(extracted) == _bare(gold_text):
            return 1.0
        if len(extracted) > LONGEST:
            return _refused(extracted[:100] + "…", f"an answer of {len(extracted)} characters")
        try:
            plain = undressed(extracted)
            correct = _bare(plain) == _bare(undressed(gold_text)) or equal_answers(
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


def _bare(text: str) -> str:
    return spaceless(text).rstrip(".")
