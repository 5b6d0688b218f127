"""Sums with the written solutions of a noisy teacher, and the base of sums and products.

A problem consists of some numbers. A solution has a fixed number of lines, each of which ends with a number
that follows from the text before it, and then the marker and the answer. With probability
`demonstration_noise` the teacher makes an error in a line: it writes a number that is too large by 1 or by
10, and continues with this number.

Every number is a linear function of each earlier one, with a positive weight that only depends on the
problem. Therefore errors never cancel out. After every step, the probability that the teacher's answer will
be right is known exactly.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, NamedTuple

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.seeds import derived_random
from treetune.tasks.base import GeneratedTask, Task
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.vocabulary import Problem

MARKER = "#"
ANSWER_AFTER_MARKER = FinalAnswer(marker=MARKER)
SLIPS = (1, 10)
"""The numbers that an error may add, each with the same probability: one unit, or one carry, too many."""

_MOST_LISTED_SELECTIONS = 200_000
"""`distinct_operands` lists and shuffles all selections if there are at most this many. So even all of them
can be requested. If there are more, it is quicker to draw until a new one occurs."""


@dataclass(frozen=True)
class SolutionLine:
    """A line of a solution."""

    lead: str
    """The text before the number."""
    value: int
    """The right number for this line, given the numbers in the earlier lines."""
    weight: int = 0
    """The increase of the answer if this line's number is 1 too large."""
    block: int | None = None
    """The number of the line's block. The lines of a block may be written in threads."""
    thread: int | None = None
    """The number of the line's thread within the block. The lines of a thread only need the text before the
    block and each other. A line of a block that has no thread comes after the block's threads."""
    topic: str = ""
    """The calculation of the line's thread, such as ``23*40``."""


WrittenLine = tuple[SolutionLine, int]
"""A line and the written number, which may be wrong."""

Solution = Generator[SolutionLine, int, None]
"""A generator of a solution's lines. It yields a line, receives the number that was written in the line, and
continues with this number, right or wrong."""


class Operands(NamedTuple):
    """The numbers that a problem may have."""

    values: range
    """The possible values of a number."""
    per_problem: int
    """How many numbers a problem has."""
    first_values: range | None = None
    """The possible values of the first number; None if it is like the others."""


@dataclass(frozen=True, kw_only=True)
class WrittenArithmetic(GeneratedTask):
    """Generated problems with written solutions. No two problems of any splits are the same.

    Problems that differ only in the order of their numbers count as the same. Raises ValueError if there are
    fewer different problems than the splits need.
    """

    digits: Annotated[int, Ge(1), Le(9)] = 2
    """The number of digits of a problem's numbers."""
    demonstration_noise: Annotated[float, Ge(0), Le(1)] = 0.0
    """The probability of an error in each line of a demonstration."""
    train_size: Annotated[int, Gt(0)] = 100_000
    validation_size: Annotated[int, Gt(0)] = 500
    test_size: Annotated[int, Gt(0)] = 1000
    seed: int = 0
    """The seed of the problems and their splits. It doesn't depend on the run's seed, so that runs with
    different seeds are evaluated on the same problems."""
    grader: Grader = ANSWER_AFTER_MARKER

    operator: ClassVar[str]

    @override
    def __post_init__(self) -> None:
        needed_problems = sum(self.sizes().values())
        available = count_selections(*self._operands())
        if needed_problems > available:
            raise ValueError(
                f"train_size + validation_size + test_size is {needed_problems}, but there are only"
                f" {available} different problems with {self._describe_operands()}: "
                "ask for fewer, or for more numbers or digits"
            )

    def _operands(self) -> Operands:
        """Returns the numbers that a problem may have."""
        raise NotImplementedError

    def _describe_operands(self) -> str:
        """Returns how many numbers of which size a problem has, for messages."""
        return f"{self._operands().per_problem} numbers of {self.digits} digits"

    def _prompt(self, numbers: Sequence[int]) -> str:
        return self.operator.join(map(str, numbers)) + "=\n"

    def _solution(self, numbers: Sequence[int]) -> Solution:
        raise NotImplementedError

    def _answer(self, numbers: Sequence[int]) -> int:
        raise NotImplementedError

    @override
    def generate(self, count: int) -> Sequence[tuple[int, ...]]:
        operands = self._operands()
        return distinct_operands(
            operands.values, operands.per_problem, count, self.seed, operands.first_values
        )

    @override
    def problem(self, id: str, generated: tuple[int, ...]) -> Problem:
        gold = str(self._answer(generated))
        return Problem(id=id, prompt=self._prompt(generated), gold=gold, data={"numbers": generated})

    @override
    def examples(self, count: int) -> Sequence[Problem]:
        return super().examples(min(count, count_selections(*self._operands())))

    @override
    def demonstration(self, problem: Problem, seed: int) -> str:
        """Returns the teacher's solution. Its errors depend on `seed` and the problem."""
        generator = derived_random(seed, problem.id, "demonstration")

        def write(line: SolutionLine) -> int:
            has_error = generator.random() < self.demonstration_noise
            return line.value + (generator.choice(SLIPS) if has_error else 0)

        return self._text(problem, self._write_lines(problem, write), seed)

    def _text(self, problem: Problem, lines: Sequence[WrittenLine], seed: int) -> str:
        return f"{write_lines(lines)}{MARKER}{lines[-1][1]}"

    def teacher_value(self, problem: Problem, prefix: str) -> float:
        """Returns the probability that the teacher, continuing after `prefix`, gives the right answer.

        `prefix` is any number of complete lines with their newlines, written by the teacher or by a policy.
        The teacher continues with the numbers in the prefix, right or wrong. An error of the teacher makes
        the answer larger, never smaller. So there are three cases. n is the number of missing lines:

        * The numbers so far lead to the right answer: ``(1 - demonstration_noise) ** n``.
        * They lead to an answer that is too large: 0.
        * They lead to an answer that is too small, as a policy's errors may: the probability that the
          teacher's errors make up for the difference.

        The value of a prefix that contains its answer is the reward.

        Raises ValueError if the prefix doesn't consist of lines of this problem's solution.
        """
        if MARKER in prefix:  # the marker begins the answer
            return self.grader.grade(prefix, problem).reward
        *prefix_lines, unfinished_line = prefix.split("\n")
        if unfinished_line:
            raise ValueError(f"the prefix {prefix!r} ends within a line; give complete lines")
        next_lines = iter(prefix_lines)

        def with_zeros(line: str) -> str:
            """Returns the line with 0 in place of each number: ``0+0=0`` for ``12+34=46``."""
            return re.sub(r"[0-9]+", "0", line)

        def number_in_prefix(line: SolutionLine) -> int:
            """Returns the number that the prefix has as the result of this line. For a line after the prefix,
            returns the right number."""
            text = next(next_lines, None)
            if text is None:  # the prefix has ended; the solution continues without errors
                return line.value
            right_text = f"{line.lead}{line.value}"
            # The numbers of a line may be wrong, but it must have the same operators as the right line.
            if with_zeros(text) != with_zeros(right_text):
                raise ValueError(
                    f"{text!r} in {prefix!r} is not a step of this solution, such as {right_text!r}"
                )
            *_, last_number = re.split(r"[^0-9]", text)
            return int(last_number)

        lines = self._write_lines(problem, number_in_prefix)
        if len(prefix_lines) > len(lines):
            raise ValueError(
                f"the prefix {prefix!r} has {len(prefix_lines)} lines, the solution {len(lines)}"
            )
        # The answer if the teacher makes no error after the prefix, and the amount by which it is too small
        _, answer_without_errors = lines[-1]
        missing_sum = self._answer(problem.data["numbers"]) - answer_without_errors
        # A line's weight is the amount by which the answer grows if the line's number is 1 too large.
        weights_of_missing_lines = [line.weight for line, _ in lines[len(prefix_lines) :]]
        return _probability_of_sum(missing_sum, weights_of_missing_lines, self.demonstration_noise)

    def _write_lines(self, problem: Problem, write: Callable[[SolutionLine], int]) -> list[WrittenLine]:
        """Returns the lines of a problem's solution, each with the number that `write` returns for it. The
        solution continues with these numbers."""
        # The generator yields a line, receives the number that was written in it, and continues with it.
        solution = self._solution(problem.data["numbers"])
        lines: list[WrittenLine] = []
        try:
            line = next(solution)
            while True:
                number = write(line)
                lines.append((line, number))
                line = solution.send(number)
        except StopIteration:
            return lines

    @override
    def alphabet(self) -> str:
        return f"0123456789{self.operator}={MARKER}\n"


@Task.register("addition_chain")
@dataclass(frozen=True, kw_only=True)
class AdditionChain(WrittenArithmetic):
    r"""The sum of `count` numbers of `digits` digits. The solution of ``12+34+56+78=\n`` is
    ``12+34=46\n46+56=102\n102+78=180\n#180``. It has count - 1 lines with the sum so far, and then the
    answer. Each line repeats its summands, so that a small model can learn a line without the others.

    With `demonstration_noise` p, a share of (1 - p)^(count - 1) of demonstrations is right.
    """

    count: Annotated[int, Ge(2), Le(64)] = 4
    """How many numbers are added."""

    operator: ClassVar[str] = "+"

    @override
    def _operands(self) -> Operands:
        return Operands(values=range(10 ** (self.digits - 1), 10**self.digits), per_problem=self.count)

    @override
    def _solution(self, numbers: Sequence[int]) -> Solution:
        total = numbers[0]
        for number in numbers[1:]:
            total = yield SolutionLine(lead=f"{total}+{number}=", value=total + number, weight=1)

    @override
    def _answer(self, numbers: Sequence[int]) -> int:
        return sum(numbers)


def write_lines(lines: Sequence[WrittenLine]) -> str:
    return "".join(f"{line.lead}{value}\n" for line, value in lines)


def _probability_of_sum(missing: int, weights: Sequence[int], noise: float) -> float:
    """Returns the probability that errors in some lines make the answer larger by exactly `missing`.

    A line's weight is the increase of the answer if the line's number is 1 too large. With probability
    `noise` a line has an error: its number is too large by one of `SLIPS`.

    Sums of errors that exceed `missing`, or from which the remaining lines can't reach it, are dropped. Lines
    with large weights come first, so that few sums remain at any time.
    """
    probabilities = {missing: 1.0}  # by the sum that is still missing after the lines so far
    reach = max(SLIPS) * sum(weights)  # the most that the remaining lines can add
    outcomes = [(0, 1 - noise), *((slip, noise / len(SLIPS)) for slip in SLIPS)]
    for weight in sorted(weights, reverse=True):
        reach -= max(SLIPS) * weight
        after_line: dict[int, float] = defaultdict(float)
        for missing_before, probability in probabilities.items():
            for slip, probability_of_slip in outcomes:
                still_missing = missing_before - slip * weight
                if 0 <= still_missing <= reach:
                    after_line[still_missing] += probability * probability_of_slip
        probabilities = after_line
    return probabilities.get(0, 0.0)


def count_selections(values: range, count: int, first_values: range | None = None) -> int:
    """Returns the number of different selections that `distinct_operands` can choose from."""
    if first_values is None:
        return math.comb(len(values) + count - 1, count)
    return len(first_values) * count_selections(values, count - 1)


@lru_cache(maxsize=16)
def distinct_operands(
    values: range, count: int, total: int, seed: int, first_values: range | None = None
) -> Sequence[tuple[int, ...]]:
    """Returns `total` selections of `count` numbers from `values`. No two of them differ only in their order.

    If `first_values` is given, the first number is from `first_values`, which must have no number in common
    with `values`. The selections for a smaller `total` are the first ones of those for a larger `total`.
    """
    available = count_selections(values, count, first_values)
    assert total <= available, f"{total} of only {available} selections"
    generator = derived_random(seed, "operands", values.start, values.stop, count)
    count_from_values = count if first_values is None else count - 1
    operands: list[tuple[int, ...]] = []
    # If there are few enough selections, all are listed and shuffled. So even all of them can be requested.
    if available <= _MOST_LISTED_SELECTIONS:
        unordered = itertools.combinations_with_replacement(values, count_from_values)
        first_numbers: list[tuple[int, ...]] = [()]
        if first_values is not None:
            first_numbers = [(number,) for number in first_values]
        all_selections = list(itertools.product(first_numbers, unordered))
        generator.shuffle(all_selections)
        for first_number, selection in all_selections:
            shuffled_numbers = list(selection)  # sorted so far, by `combinations_with_replacement`
            generator.shuffle(shuffled_numbers)
            operands.append((*first_number, *shuffled_numbers))
        return tuple(operands[:total])
    # If there are more selections, it is quicker to draw until a new one occurs.
    seen_selections: set[tuple[int, ...]] = set()
    while len(operands) < total:
        first_number = () if first_values is None else (generator.choice(first_values),)
        numbers = tuple(generator.choices(values, k=count_from_values))
        key = (*first_number, *sorted(numbers))  # the same for selections that differ only in their order
        if key not in seen_selections:
            seen_selections.add(key)
            operands.append((*first_number, *numbers))
    return tuple(operands)
