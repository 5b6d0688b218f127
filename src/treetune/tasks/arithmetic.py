"""Sums that a noisy teacher writes out, and what they have in common with products.

A problem is a few numbers. A solution is a fixed number of lines, each ending in one number that
follows from the text before it, and last the marker with the answer. The teacher slips on a
line with probability `demonstration_noise`: it then writes a number that is too large by 1 or by
10 and goes on from it.

Every number on the way is linear in every earlier one, with a positive weight that only the
problem determines. So slips never cancel out, and the chance that the teacher ends right is known
exactly at every step.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

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
"""A slip adds one of these, each as likely as the other: one too many, or one carry too many."""

_ENUMERABLE = 200_000
"""Up to so many selections are listed and shuffled, which also works when all of them are asked for;
beyond, drawing until a new one comes is quicker."""


@dataclass(frozen=True)
class SolutionLine:
    """A line of a solution: its text before the number, the right number after what was written
    so far, and by how much the answer grows with each unit by which this number is too large.

    Lines of one `block` don't all need each other: those with a `thread` need only the text before
    the block and what that thread has written, and those without one come after the threads. `topic`
    names what the thread is about.
    """

    lead: str
    value: int
    weight: int = 0
    block: int | None = None
    thread: int | None = None
    topic: str = ""


WrittenLine = tuple[SolutionLine, int]
"""A line and the number that was really written in it."""

Solution = Generator[SolutionLine, int, None]
"""Yields each line, is sent the number that was really written, and goes on from that one."""


@dataclass(frozen=True, kw_only=True)
class WrittenArithmetic(GeneratedTask):
    """Problems made on the spot, different ones in every split, whatever the sizes.

    Raises ValueError if there are fewer different problems than the splits need; the order of the
    numbers makes no difference here, since it makes none to the answer.
    """

    digits: Annotated[int, Ge(1), Le(9)] = 2
    demonstration_noise: Annotated[float, Ge(0), Le(1)] = 0.0
    """The teacher's probability of a slip on a line."""
    train_size: Annotated[int, Gt(0)] = 100_000
    validation_size: Annotated[int, Gt(0)] = 500
    test_size: Annotated[int, Gt(0)] = 1000
    seed: int = 0
    """Decides which numbers are held out. It is not the run's, so that runs with different seeds are
    measured on the same problems."""
    grader: Grader = ANSWER_AFTER_MARKER

    operator: ClassVar[str]

    @override
    def __post_init__(self) -> None:
        needed, there_are = sum(self.sizes().values()), selections(*self._operands())
        if needed > there_are:
            raise ValueError(
                f"train_size + validation_size + test_size is {needed}, but there are only {there_are} "
                f"different problems with {self._described()}: "
                "ask for fewer, or for more numbers or digits"
            )

    def _operands(self) -> tuple[range, int, range | None]:
        """Returns the values of a problem's numbers, their count, and the values of the first one where it
        has its own."""
        raise NotImplementedError

    def _described(self) -> str:
        return f"{self._operands()[1]} numbers of {self.digits} digits"

    def _prompt(self, numbers: Sequence[int]) -> str:
        return self.operator.join(map(str, numbers)) + "=\n"

    def _solution(self, numbers: Sequence[int]) -> Solution:
        raise NotImplementedError

    def _answer(self, numbers: Sequence[int]) -> int:
        raise NotImplementedError

    @override
    def generate(self, count: int) -> Sequence[tuple[int, ...]]:
        values, numbers, first = self._operands()
        return distinct_operands(values, numbers, count, self.seed, first)

    @override
    def problem(self, id: str, generated: tuple[int, ...]) -> Problem:
        gold = str(self._answer(generated))
        return Problem(id=id, prompt=self._prompt(generated), gold=gold, data={"numbers": generated})

    @override
    def examples(self, count: int) -> Sequence[Problem]:
        return super().examples(min(count, selections(*self._operands())))

    @override
    def demonstration(self, problem: Problem, seed: int) -> str:
        """Returns the teacher's solution. Slips are drawn from `seed` and the problem."""
        generator = derived_random(seed, problem.id, "demonstration")

        def write(line: SolutionLine) -> int:
            slips = generator.random() < self.demonstration_noise
            return line.value + (generator.choice(SLIPS) if slips else 0)

        return self._text(problem, self._written(problem, write), seed)

    def _text(self, problem: Problem, lines: Sequence[WrittenLine], seed: int) -> str:
        return f"{in_lines(lines)}{MARKER}{lines[-1][1]}"

    def teacher_value(self, problem: Problem, prefix: str) -> float:
        """Returns the probability that the teacher, going on from `prefix`, ends with the right answer.

        `prefix` is any number of complete lines, newlines included, written by the teacher or by
        a policy: the teacher goes on from the numbers in it, right or wrong. With n lines left it
        is ``(1 - demonstration_noise) ** n`` if the numbers so far lead to the answer, 0 if they
        lead beyond it, and, where a policy wrote too small a number, the (small) chance that
        slips make up for it. A prefix that already has its answer is worth its reward.

        Raises ValueError for a prefix that is not lines of the solution's form.
        """
        if MARKER in prefix:
            return self.grader.grade(prefix, problem).reward
        *written, rest = prefix.split("\n")
        if rest:
            raise ValueError(f"the prefix {prefix!r} ends within a line; give complete lines")
        position = iter(written)

        def form(line: str) -> str:
            return re.sub(r"[0-9]+", "0", line)

        def write(line: SolutionLine) -> int:
            text = next(position, None)
            if text is None:
                return line.value
            if form(text) != form(f"{line.lead}{line.value}"):
                raise ValueError(f"{text!r} in {prefix!r} is no step of this solution, as {line} would be")
            return int(re.split(r"[^0-9]", text)[-1])

        lines = self._written(problem, write)
        if len(written) > len(lines):
            raise ValueError(f"the prefix {prefix!r} has {len(written)} lines, the solution {len(lines)}")
        missing = self._answer(problem.data["numbers"]) - lines[-1][1]
        weights = [line.weight for line, _ in lines[len(written) :]]
        return _chance_of_slips(missing, weights, self.demonstration_noise)

    def _written(self, problem: Problem, write: Callable[[SolutionLine], int]) -> list[WrittenLine]:
        """Returns the lines of a solution with the numbers that `write` decides on."""
        solution = self._solution(problem.data["numbers"])
        lines: list[WrittenLine] = []
        try:
            line = next(solution)
            while True:
                lines.append((line, write(line)))
                line = solution.send(lines[-1][1])
        except StopIteration:
            return lines

    @override
    def alphabet(self) -> str:
        return f"0123456789{self.operator}={MARKER}\n"


@Task.register("addition_chain")
@dataclass(frozen=True, kw_only=True)
class AdditionChain(WrittenArithmetic):
    r"""Add `count` numbers of `digits` digits, e.g. ``12+34+56+78=\n`` with the solution
    ``12+34=46\n46+56=102\n102+78=180\n#180``: count - 1 running totals, one step each, and the
    answer. Each line repeats what it adds, so that a small model can learn lines one at a time.

    A teacher with `demonstration_noise` p is right in (1 - p)^(count - 1) of its solutions.
    """

    count: Annotated[int, Ge(2), Le(64)] = 4

    operator: ClassVar[str] = "+"

    @override
    def _operands(self) -> tuple[range, int, range | None]:
        return range(10 ** (self.digits - 1), 10**self.digits), self.count, None

    @override
    def _solution(self, numbers: Sequence[int]) -> Solution:
        total = numbers[0]
        for number in numbers[1:]:
            total = yield SolutionLine(lead=f"{total}+{number}=", value=total + number, weight=1)

    @override
    def _answer(self, numbers: Sequence[int]) -> int:
        return sum(numbers)


def in_lines(lines: Sequence[WrittenLine]) -> str:
    return "".join(f"{line.lead}{value}\n" for line, value in lines)


def _chance_of_slips(missing: int, weights: Sequence[int], noise: float) -> float:
    """Returns the probability that slips on lines of these weights add up to exactly `missing`.

    Sums that overshoot, or that the lines left cannot reach, are dropped; large weights go first,
    so that few sums are ever alive.
    """
    chances = {missing: 1.0}
    reach = max(SLIPS) * sum(weights)
    outcomes = [(0, 1 - noise), *((slip, noise / len(SLIPS)) for slip in SLIPS)]
    for weight in sorted(weights, reverse=True):
        reach -= max(SLIPS) * weight
        following: dict[int, float] = defaultdict(float)
        for still_missing, chance in chances.items():
            for slip, probability in outcomes:
                remaining = still_missing - slip * weight
                if 0 <= remaining <= reach:
                    following[remaining] += chance * probability
        chances = following
    return chances.get(0, 0.0)


def selections(values: range, count: int, first: range | None = None) -> int:
    """Returns how many different selections `distinct_operands` can choose from."""
    if first is None:
        return math.comb(len(values) + count - 1, count)
    return len(first) * selections(values, count - 1)


@lru_cache(maxsize=16)
def distinct_operands(
    values: range, count: int, total: int, seed: int, first: range | None = None
) -> Sequence[tuple[int, ...]]:
    """Returns `total` selections of `count` numbers from `values`, no two of them equal up to order.

    With `first`, which has no number in common with `values`, the first number is from there. The first
    selections do not depend on `total`, so that a larger request extends a smaller one.
    """
    space = selections(values, count, first)
    assert total <= space, f"{total} of only {space} selections"
    generator = derived_random(seed, "operands", values.start, values.stop, count)
    drawn_operands = count if first is None else count - 1
    chosen: list[tuple[int, ...]] = []
    if space <= _ENUMERABLE:
        unordered = itertools.combinations_with_replacement(values, drawn_operands)
        heads: list[tuple[int, ...]] = [()] if first is None else [(number,) for number in first]
        listed = list(itertools.product(heads, unordered))
        generator.shuffle(listed)
        for head, selection in listed:
            order = list(selection)
            generator.shuffle(order)
            chosen.append((*head, *order))
        return tuple(chosen[:total])
    seen: set[tuple[int, ...]] = set()
    while len(chosen) < total:
        head = () if first is None else (generator.choice(first),)
        numbers = tuple(generator.choices(values, k=drawn_operands))
        key = (*head, *sorted(numbers))
        if key not in seen:
            seen.add(key)
            chosen.append((*head, *numbers))
    return tuple(chosen)
