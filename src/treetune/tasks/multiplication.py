"""Multiply numbers, with the partial products written out, one after the other or in threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from treetune.seeds import derived_random
from treetune.tasks.arithmetic import (
    ANSWER_AFTER_MARKER,
    MARKER,
    Solution,
    WrittenArithmetic,
    WrittenLine,
)
from treetune.tasks.base import Task
from treetune.tasks.operands import distinct_operands, selections
from treetune.tasks.products import Detail, folded, paired
from treetune.vocabulary import Problem

FACTORS = range(2, 9)


@Task.register("multiplication")
@dataclass(frozen=True, kw_only=True)
class Multiplication(WrittenArithmetic):
    r"""Multiply `factors` numbers of `digits` digits, e.g. ``23*47=\n`` with the solution
    ``23*40=920\n23*7=161\n920+161=1081\n#1081``.

    The product so far is multiplied by each place of the next factor that is not zero, and the
    partial products are added as they come: one operation, one line, one step. A teacher with
    `demonstration_noise` p is right in (1 - p)^n of its n-line solutions. Single-digit factors
    are 2 to 9. There are 4095 different pairs of two-digit numbers, which the default sizes fit.

    `factors` may be two numbers, the fewest and the most; `min_value` and `max_value` say in place of
    `digits` between what factors lie; the first factor alone may have `first_digits`. With `detail`
    ``digits`` a partial product isn't one line but multiplied and added up digit by digit, so that 23*40
    is ``20*40=800\n3*40=120\n800+120=920``.

    `form` says how the lines are arranged. ``sequential`` is the left fold above. The others open a
    block of threads wherever two or more parts don't need each other, or in a share `parallelise` of
    these places:

    * ``digits``: the fold with a thread for each partial product, and the sums behind the block. The lines
      are those of the sequential form, slips included. Outlines name the place: ``1:40``.
    * ``tree``: factors in pairs, level by level, a thread for each pair. Outlines name it: ``1:23*47``.
    * ``tree_digits``: the same, with a thread for each partial product of all pairs of a level, which
      outlines name: ``1:23*40``.

    With `wording` ``words`` the problem is put in words, the answer thinks and then stands in
    ``\boxed{…}``, which asks for another `grader`, and outlines are sentences.
    """

    factors: int | tuple[int, int] = 2
    first_digits: Annotated[int, Ge(1), Le(9)] | None = None
    min_value: Annotated[int, Ge(0)] | None = None
    max_value: Annotated[int, Ge(0)] | None = None
    form: Literal["sequential", "tree", "digits", "tree_digits"] = "sequential"
    detail: Detail = "partials"
    parallelise: Annotated[float, Ge(0), Le(1)] = 1.0
    wording: Literal["symbols", "words"] = "symbols"
    train_size: Annotated[int, Gt(0)] = 3000
    validation_size: Annotated[int, Gt(0)] = 250
    test_size: Annotated[int, Gt(0)] = 500

    operator: ClassVar[str] = "*"

    def __post_init__(self) -> None:
        fewest, most = self._factor_counts()
        if not FACTORS.start <= fewest <= most < FACTORS.stop:
            raise ValueError(
                f"factors is {self.factors}: a number from {FACTORS.start} to {FACTORS.stop - 1}, or two of "
                "them, the fewest and the most"
            )
        if (self.min_value is None) != (self.max_value is None):
            raise ValueError("min_value and max_value belong together: give both, or neither and digits")
        if not self._operand_range():
            raise ValueError(f"min_value is {self.min_value}, more than max_value, {self.max_value}")
        if self.first_digits is not None and (self.min_value is not None or self.first_digits == self.digits):
            raise ValueError(
                "first_digits is for a first factor with other digits than the others: leave it out where "
                "digits is the same, or beside min_value and max_value"
            )
        if self.form == "tree" and fewest < 4:
            raise ValueError(
                f"form 'tree' has a thread for each pair of factors, and {fewest} factors never make two "
                "pairs: ask for 4 or more, or for form 'digits' or 'tree_digits'"
            )
        if self.wording == "words" and self.grader == ANSWER_AFTER_MARKER:
            raise ValueError(
                f"with wording 'words' the answer is boxed, and this grader looks for it behind {MARKER!r}: "
                "set grader to {type: 'numeric', without_marker: 'boxed'}"
            )
        super().__post_init__()

    def _factor_counts(self) -> tuple[int, int]:
        return (self.factors, self.factors) if isinstance(self.factors, int) else self.factors

    def _operand_count(self) -> int:
        return self._factor_counts()[0]

    def _operand_range(self) -> range:
        if self.min_value is not None and self.max_value is not None:
            return range(self.min_value, self.max_value + 1)
        return _of_digits(self.digits)

    def _first_range(self) -> range | None:
        return None if self.first_digits is None else _of_digits(self.first_digits)

    def _space(self) -> int:
        return selections(self._operand_range(), self._operand_count(), self._first_range())

    def _operands_in_words(self) -> str:
        if self.min_value is None:
            first = "" if self.first_digits is None else f", the first of {self.first_digits}"
            return super()._operands_in_words() + first
        return f"{self._operand_count()} numbers from {self.min_value} to {self.max_value}"

    def _operands(self, wanted: int) -> Sequence[tuple[int, ...]]:
        fewest, most = self._factor_counts()
        values, first = self._operand_range(), self._first_range()
        if fewest == most:
            return distinct_operands(values, fewest, wanted, self.seed, first)
        generator = derived_random(self.seed, "factors", fewest, most)
        counts = [generator.randint(fewest, most) for _ in range(wanted)]
        of_count = {
            count: iter(distinct_operands(values, count, counts.count(count), self.seed, first))
            for count in range(fewest, most + 1)
        }
        return tuple(next(of_count[count]) for count in counts)

    def _prompt(self, numbers: Sequence[int]) -> str:
        if self.wording == "symbols":
            return super()._prompt(numbers)
        *first, last = map(str, numbers)
        return (
            f"What is the product of {', '.join(first)} and {last}? Work it out step by step, and put the "
            "final answer within \\boxed{}."
        )

    def _solution(self, numbers: Sequence[int]) -> Solution:
        if self.form in ("sequential", "digits"):
            return folded(numbers, self.detail)
        return paired(numbers, self.detail, thread_per_pair=self.form == "tree")

    def _answer(self, numbers: Sequence[int]) -> int:
        return math.prod(numbers)

    def _text(self, problem: Problem, lines: Sequence[WrittenLine], seed: int) -> str:
        generator = derived_random(seed, problem.id, "threads")
        text = ""
        for _, together in groupby(lines, key=lambda written: written[0].block):
            block = list(together)
            several = len({line.thread for line, _ in block} - {None}) > 1
            threads = self.form != "sequential" and several and generator.random() < self.parallelise
            text += self._block(block) if threads else _in_lines(block)
        answer = lines[-1][1]
        if self.wording == "words":
            return f"<think>\n{text}</think>\n\nThe product is \\boxed{{{answer}}}."
        return f"{text}{MARKER}{answer}"

    def _block(self, lines: Sequence[WrittenLine]) -> str:
        """Lines of one block as its threads, and the others behind it."""
        threads: dict[int, list[WrittenLine]] = {}
        others = []
        for line, value in lines:
            if line.thread is None:
                others.append((line, value))
            else:
                threads.setdefault(line.thread, []).append((line, value))
        newline, space = ("\n", " ") if self.wording == "words" else ("", "")
        outlines = threaded = ""
        for number, of_thread in enumerate(threads.values(), start=1):
            about = self._outline(of_thread[0][0].topic)
            outlines += f"<Outline>{number}:{space}{about}</Outline>{newline}"
            threaded += f"<Thread>\n{number}:{space}{_in_lines(of_thread)}</Thread>"
        return (
            f"<Parallel>{newline}<Outlines>{newline}{outlines}</Outlines>\n"
            f"{threaded}\n</Parallel>\n{_in_lines(others)}"
        )

    def _outline(self, topic: str) -> str:
        a, _, b = topic.partition(self.operator)
        if self.wording == "words":
            return f"Multiply {a} by {b}."
        # All threads of a fold multiply the same number, which stands right before the block.
        return b if self.form == "digits" else topic

    def sequential_demonstration(self, problem: Problem, seed: int) -> str:
        return replace(self, form="sequential").demonstration(problem, seed)

    def teacher_value(self, problem: Problem, prefix: str) -> float:
        """See `WrittenArithmetic`. Known for lines one after the other, in symbols, whose number doesn't
        depend on slips; ValueError for any other form."""
        several = self._factor_counts()[1] > FACTORS.start
        if self.form != "sequential" or self.wording != "symbols" or (self.detail == "digits" and several):
            raise ValueError(
                "the teacher's value is only known for form 'sequential' and wording 'symbols', with detail "
                f"'partials' or two factors: these are {self.form!r}, {self.wording!r}, {self.detail!r} and "
                f"{self.factors}"
            )
        return super().teacher_value(problem, prefix)

    def alphabet(self) -> str:
        """Without the tags of threads, which are tokens that a model's `added_tokens` names."""
        if self.wording == "words":
            return Task.alphabet(self)
        return "0123456789*+=#\n" + ("" if self.form == "sequential" else ":")


def _in_lines(lines: Sequence[WrittenLine]) -> str:
    return "".join(f"{line.lead}{value}\n" for line, value in lines)


def _of_digits(digits: int) -> range:
    return range(2 if digits == 1 else 10 ** (digits - 1), 10**digits)
