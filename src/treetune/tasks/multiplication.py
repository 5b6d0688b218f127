"""Products of numbers with written partial products, which are calculated one after the other or in
threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.seeds import derived_random
from treetune.tasks.arithmetic import (
    ANSWER_AFTER_MARKER,
    MARKER,
    Operands,
    Solution,
    SolutionLine,
    WrittenArithmetic,
    WrittenLine,
    distinct_operands,
    write_lines,
)
from treetune.tasks.base import Task
from treetune.vocabulary import Problem

FACTORS = range(2, 9)

Detail = Literal["partials", "digits"]
"""Whether the product of a number and one place of the next number has one line (``partials``), or is
calculated digit by digit (``digits``)."""

_Lines = Generator[SolutionLine, int, int]
"""A generator that yields lines, receives the number that was written in each, and returns the last of these
numbers."""


@Task.register("multiplication")
@dataclass(frozen=True, kw_only=True)
class Multiplication(WrittenArithmetic):
    r"""The product of `factors` numbers of `digits` digits. The solution of ``23*47=\n`` is
    ``23*40=920\n23*7=161\n920+161=1081\n#1081``.

    The product so far is multiplied by each place of the next factor that is not zero, and each partial
    product is added to the sum so far. Each operation is a line, and each line is a step. With
    `demonstration_noise` p, a share of (1 - p)^n of the demonstrations of n lines is right. Factors of one
    digit are from 2 to 9. There are 4095 different pairs of two-digit numbers, which suffice for the default
    sizes of the splits.
    """

    factors: int | tuple[int, int] = 2
    """The number of factors, or the fewest and the most factors of a problem."""
    first_digits: Annotated[int, Ge(1), Le(9)] | None = None
    """The number of digits of the first factor, if it differs from the others'."""
    min_value: Annotated[int, Ge(0)] | None = None
    """The smallest factor, instead of `digits`."""
    max_value: Annotated[int, Ge(0)] | None = None
    """The largest factor, instead of `digits`."""
    form: Literal["sequential", "tree", "digits", "tree_digits"] = "sequential"
    """The arrangement of the lines. ``sequential`` multiplies from the left to the right, without threads.
    The other forms have a block of threads wherever two or more parts don't depend on each other. ``digits``
    also multiplies from the left to the right, with a thread for each partial product, and the sums after the
    block. Its lines and their errors are those of ``sequential``. Its outlines name the place, as in
    ``1:40``. ``tree`` multiplies factors in pairs, level by level, with a thread for each pair, as in
    ``1:23*47``. ``tree_digits`` does the same with a thread for each partial product of a level's pairs, as
    in ``1:23*40``."""
    detail: Detail = "partials"
    """With ``partials``, a partial product has one line. With ``digits``, it is calculated digit by digit in
    several lines: 23*40 is ``20*40=800``, ``3*40=120``, ``800+120=920``."""
    parallelise: Annotated[float, Ge(0), Le(1)] = 1.0
    """The probability that a possible block of threads is written in threads."""
    wording: Literal["symbols", "words"] = "symbols"
    """With ``words``, the problem is a sentence, outlines are sentences, and the response has a thought and
    then the answer in ``\\boxed{…}``. This needs another `grader`."""
    train_size: Annotated[int, Gt(0)] = 3000
    validation_size: Annotated[int, Gt(0)] = 250
    test_size: Annotated[int, Gt(0)] = 500

    operator: ClassVar[str] = "*"

    @override
    def __post_init__(self) -> None:
        fewest, most = self._factor_counts()
        if not FACTORS.start <= fewest <= most < FACTORS.stop:
            raise ValueError(
                f"factors is {self.factors}: a number from {FACTORS.start} to {FACTORS.stop - 1}, or two of "
                "them, the fewest and the most"
            )
        if (self.min_value is None) != (self.max_value is None):
            raise ValueError("min_value and max_value belong together: give both, or neither and digits")
        if not self._operands().values:  # the range from min_value to max_value is empty
            raise ValueError(f"min_value is {self.min_value}, more than max_value, {self.max_value}")
        if self.first_digits is not None and (self.min_value is not None or self.first_digits == self.digits):
            raise ValueError(
                "first_digits is for a first factor with another number of digits than the others: leave it "
                "out if digits is the same, or with min_value and max_value"
            )
        if self.form == "tree" and fewest < 4:
            raise ValueError(
                f"form 'tree' has a thread for each pair of factors, and {fewest} factors never make two "
                "pairs: ask for 4 or more, or for form 'digits' or 'tree_digits'"
            )
        if self.wording == "words" and self.grader == ANSWER_AFTER_MARKER:
            raise ValueError(
                f"with wording 'words' the answer is boxed, and this grader looks for it after {MARKER!r}: "
                "set grader to {type: 'numeric', without_marker: 'boxed'}"
            )
        super().__post_init__()

    def _factor_counts(self) -> tuple[int, int]:
        return (self.factors, self.factors) if isinstance(self.factors, int) else self.factors

    @override
    def _operands(self) -> Operands:
        """Returns the factors that a problem may have, and the fewest of them in a problem."""

        def of_digits(digits: int) -> range:
            """Returns the numbers with this number of digits; for one digit, 2 to 9."""
            return range(2 if digits == 1 else 10 ** (digits - 1), 10**digits)

        values = of_digits(self.digits)
        if self.min_value is not None and self.max_value is not None:
            values = range(self.min_value, self.max_value + 1)
        first_values = None if self.first_digits is None else of_digits(self.first_digits)
        fewest, _ = self._factor_counts()
        return Operands(values, per_problem=fewest, first_values=first_values)

    @override
    def _describe_operands(self) -> str:
        if self.min_value is not None:
            return f"{self._factor_counts()[0]} numbers from {self.min_value} to {self.max_value}"
        note_on_first = "" if self.first_digits is None else f", the first of {self.first_digits}"
        return super()._describe_operands() + note_on_first

    @override
    def generate(self, count: int) -> Sequence[tuple[int, ...]]:
        """Returns problems. The number of factors of each problem is drawn, from the fewest to the most."""
        fewest, most = self._factor_counts()
        if fewest == most:
            return super().generate(count)
        values, _, first_values = self._operands()
        generator = derived_random(self.seed, "factors", fewest, most)
        factor_counts = [generator.randint(fewest, most) for _ in range(count)]  # one for each problem
        # For each count of factors, an iterator over different problems with this many factors.
        problems_by_count = {}
        for factor_count in range(fewest, most + 1):
            needed = factor_counts.count(factor_count)
            operands = distinct_operands(values, factor_count, needed, self.seed, first_values)
            problems_by_count[factor_count] = iter(operands)
        return tuple(next(problems_by_count[factor_count]) for factor_count in factor_counts)

    @override
    def _prompt(self, numbers: Sequence[int]) -> str:
        if self.wording == "symbols":
            return super()._prompt(numbers)
        *other_numbers, last_number = map(str, numbers)
        return (
            f"What is the product of {', '.join(other_numbers)} and {last_number}? Work it out step by step,"
            " and put the final answer within \\boxed{}."
        )

    @override
    def _solution(self, numbers: Sequence[int]) -> Solution:
        if self.form in ("sequential", "digits"):
            return multiply_in_order(numbers, self.detail)
        return multiply_in_pairs(numbers, self.detail, thread_per_pair=self.form == "tree")

    @override
    def _answer(self, numbers: Sequence[int]) -> int:
        return math.prod(numbers)

    @override
    def _text(self, problem: Problem, lines: Sequence[WrittenLine], seed: int) -> str:
        """Returns the demonstration: all lines, some blocks of them in threads, and the answer."""
        # Each of `lines` is a pair: the line, and the number that is written in it. `parallelise` is the
        # probability that a block is written in threads.
        generator = derived_random(seed, problem.id, "threads")
        text = ""
        for _, lines_of_block in itertools.groupby(lines, key=lambda pair: pair[0].block):
            block = list(lines_of_block)
            several_threads = len({line.thread for line, _ in block} - {None}) > 1
            in_threads = (
                self.form != "sequential" and several_threads and generator.random() < self.parallelise
            )
            text += self._write_block(block) if in_threads else write_lines(block)
        _, answer = lines[-1]
        if self.wording == "words":
            return f"<think>\n{text}</think>\n\nThe product is \\boxed{{{answer}}}."
        return f"{text}{MARKER}{answer}"

    def _write_block(self, lines: Sequence[WrittenLine]) -> str:
        """Writes the lines of one block as threads, and after them the lines without a thread."""
        threads: dict[int, list[WrittenLine]] = {}
        for line, value in lines:
            if line.thread is not None:
                threads.setdefault(line.thread, []).append((line, value))
        lines_without_thread = write_lines([(line, value) for line, value in lines if line.thread is None])
        # These make a text in words readable. A text in symbols doesn't have them.
        newline, space = ("\n", " ") if self.wording == "words" else ("", "")
        outlines = written_threads = ""
        for number, lines_of_thread in enumerate(threads.values(), start=1):
            first_line, _ = lines_of_thread[0]
            outline = self._write_outline(first_line.topic)
            outlines += f"<Outline>{number}:{space}{outline}</Outline>{newline}"
            written_threads += f"<Thread>\n{number}:{space}{write_lines(lines_of_thread)}</Thread>"
        block = f"<Outlines>{newline}{outlines}</Outlines>\n{written_threads}"
        return f"<Parallel>{newline}{block}\n</Parallel>\n{lines_without_thread}"

    def _write_outline(self, topic: str) -> str:
        """Returns the text of a thread's outline. `topic` is the thread's calculation, such as ``23*40``."""
        a, _, b = topic.partition(self.operator)
        if self.wording == "words":
            return f"Multiply {a} by {b}."
        # In the form 'digits', all threads of a block multiply the same number: the product so far. This
        # number stands directly before the block, so an outline need only name the place.
        return b if self.form == "digits" else topic

    @override
    def sequential_demonstration(self, problem: Problem, seed: int) -> str:
        return replace(self, form="sequential").demonstration(problem, seed)

    @override
    def teacher_value(self, problem: Problem, prefix: str) -> float:
        """Returns the probability that the teacher, continuing after `prefix`, gives the right answer.

        The teacher is the writer of the demonstrations. `WrittenArithmetic.teacher_value` can compute the
        probability only for the sequential form in symbols, and only if the number of lines doesn't depend on
        errors.

        Raises:
            ValueError: The form or the wording is another one, or the number of lines depends on errors.
        """
        # An error in a product may change its number of digits, and thus the lines of the next product.
        several_products = self._factor_counts()[1] > 2
        lines_depend_on_errors = self.detail == "digits" and several_products
        if self.form != "sequential" or self.wording != "symbols" or lines_depend_on_errors:
            raise ValueError(
                "the teacher's value is only known for form 'sequential' and wording 'symbols', with detail "
                f"'partials' or two factors: these are {self.form!r}, {self.wording!r}, {self.detail!r} and "
                f"{self.factors}"
            )
        return super().teacher_value(problem, prefix)

    @override
    def alphabet(self) -> str:
        """Returns the characters without those of tags, which are tokens in the model's `added_tokens`."""
        if self.wording == "words":
            return Task.alphabet(self)  # raises ValueError, as for any task in natural language
        return "0123456789*+=#\n" + ("" if self.form == "sequential" else ":")


def multiply_in_order(numbers: Sequence[int], detail: Detail) -> Solution:
    """Multiplies the product so far by the next factor, from the left to the right.

    The lines of each multiplication are a block, with a thread for each of the next factor's `place_values`:
    for the factor 407, there is a thread for 400 and a thread for 7.
    """
    product = numbers[0]
    for position, factor in enumerate(numbers[1:], start=1):
        # If this product is 1 too large, the answer is too large by the product of the later factors.
        weight = math.prod(numbers[position + 1 :])
        threads = itertools.count()
        product = yield from _multiply(
            product, factor, detail, block=position, threads=threads, weight=weight
        )


def multiply_in_pairs(numbers: Sequence[int], detail: Detail, *, thread_per_pair: bool) -> Solution:
    """Multiplies factors in pairs, then their products in pairs, and so on.

    Each round of pairs is a block. If a round has an odd number of factors, the last factor is left for the
    next round. With `thread_per_pair`, each pair has a thread. Without it, each place of a pair's second
    factor has a thread.
    """
    level = 0
    while len(numbers) > 1:
        threads = itertools.count()
        products = []
        for a, b in zip(numbers[::2], numbers[1::2], strict=False):
            lines = _multiply(a, b, detail, block=level, threads=threads)
            if thread_per_pair:
                lines = _put_in_one_thread(lines, a, b, threads)
            product = yield from lines
            products.append(product)
        unpaired = numbers[-1:] if len(numbers) % 2 else ()
        numbers = [*products, *unpaired]
        level += 1


def _multiply(a: int, b: int, detail: Detail, block: int, threads: Iterator[int], weight: int = 0) -> _Lines:
    """Multiplies `a` by each place of `b` in a thread, and adds each product to the sum so far.

    It yields a line, receives the number that was written in the line, and continues with that number, right
    or wrong.

    Args:
        a: The first factor.
        b: The second factor. It gives a thread for each of its places.
        detail: Whether a product by one place has one line, or several.
        block: The number of the block. The lines of a block may be written in threads.
        threads: Gives the numbers of new threads.
        weight: The increase of the whole answer if a number in these lines is 1 too large. It is 0
            in `multiply_in_pairs`, where nothing reads it.
    """
    total = None
    for place_value in place_values(b):
        template = SolutionLine(
            lead="", value=0, weight=weight, block=block, thread=next(threads), topic=f"{a}*{place_value}"
        )
        partial = yield from _multiply_by_place(a, place_value, detail, template)
        if total is None:
            total = partial
        else:
            # A sum needs the products of several threads, so its line belongs to no thread.
            lead = f"{total}+{partial}="
            total = yield replace(template, lead=lead, value=total + partial, thread=None, topic="")
    assert total is not None, "every number has a place"
    return total


def _multiply_by_place(a: int, place_value: int, detail: Detail, template: SolutionLine) -> _Lines:
    """Yields the lines of `a` times `place_value`, a digit with zeros after it such as 40; returns the
    product.

    The lines are copies of the template with other numbers. Each `yield` gives a line away and receives the
    number that was written in the line. This number may be wrong, and the next lines continue with it.
    """
    factors = place_values(a) if detail == "digits" else [a]
    total = None
    for factor in factors:
        product = yield replace(template, lead=f"{factor}*{place_value}=", value=factor * place_value)
        if total is None:
            total = product
        else:
            total = yield replace(template, lead=f"{total}+{product}=", value=total + product)
    assert total is not None, "every number has a place"
    return total


def _put_in_one_thread(lines: _Lines, a: int, b: int, threads: Iterator[int]) -> _Lines:
    """Yields the lines of a pair's product, all of them with the same thread; returns the product.

    The loop receives the number that was written in a line, and passes it on to the generator `lines`. A
    ``yield from`` would do that, too, but it can't change the lines.
    """
    thread = next(threads)
    try:
        line = next(lines)
        while True:
            written_number = yield replace(line, thread=thread, topic=f"{a}*{b}")
            line = lines.send(written_number)
    except StopIteration as end:
        return int(end.value)


def place_values(number: int) -> list[int]:
    """Returns the values of a number's digits that aren't 0: ``[400, 7]`` for 407. Returns ``[0]`` for 0."""
    digits = str(number)
    values = []
    for index, digit in enumerate(digits):
        if digit != "0":
            values.append(int(digit) * 10 ** (len(digits) - 1 - index))
    return values or [0]
