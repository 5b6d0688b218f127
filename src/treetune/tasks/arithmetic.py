"""Sums and products that a noisy teacher writes out: what the embedded tasks have in common.

A problem is a few numbers. A solution is a fixed number of lines, each ending in one number that
follows from what stands before it, and last the marker with the answer. The teacher slips on a
line with probability `demonstration_noise`: it then writes a number that is too large by 1 or by
10 and goes on from it.

Every number on the way is linear in every earlier one, with a positive weight that only the
problem determines. So slips never cancel out, and the chance that the teacher ends right is known
exactly at every step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, get_args

from annotated_types import Ge, Gt, Le

from treetune.seeds import derived_random
from treetune.tasks.base import Split, Task
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.tasks.operands import distinct_operands, selections
from treetune.tasks.steps.lines import ends_of_lines
from treetune.vocabulary import Problem

MARKER = "#"
ANSWER_AFTER_MARKER = FinalAnswer(marker=MARKER)
SLIPS = (1, 10)
"""A slip adds one of these, each as likely as the other: one too many, or one carry too many."""


@dataclass(frozen=True)
class Line:
    """A line of a solution: its text before the number, the right number after what was written
    so far, and by how much the answer grows with each unit by which this number is too large.

    Lines of one `block` don't all need each other: those with a `thread` need only what stands before
    the block and what that thread has written, and those without one come after the threads. `topic`
    says what the thread is about.
    """

    lead: str
    value: int
    weight: int = 0
    block: int | None = None
    thread: int | None = None
    topic: str = ""


WrittenLine = tuple[Line, int]
"""A line and the number that was really written in it."""

Solution = Generator[Line, int, None]
"""Yields each line, is sent the number that was really written, and goes on from that one."""


@dataclass(frozen=True, kw_only=True)
class WrittenArithmetic(Task):
    """Problems made on the spot, different ones in every split, whatever the sizes.

    `seed` decides which numbers are held out and is not the run's, so that runs with different
    seeds are measured on the same problems. The test split does not change with `train_size`.

    Raises ValueError if there are fewer different problems than the splits need; the order of the
    numbers makes no difference here, since it makes none to the answer.
    """

    digits: Annotated[int, Ge(1), Le(9)] = 2
    demonstration_noise: Annotated[float, Ge(0), Le(1)] = 0.0
    train_size: Annotated[int, Gt(0)] = 100_000
    validation_size: Annotated[int, Gt(0)] = 500
    """Problems of the validation split."""
    test_size: Annotated[int, Gt(0)] = 1000
    """Problems of the test split."""
    seed: int = 0
    grader: Grader = ANSWER_AFTER_MARKER

    operator: ClassVar[str]

    def __post_init__(self) -> None:
        needed, there_are = sum(self._sizes().values()), self._space()
        if needed > there_are:
            raise ValueError(
                f"train_size + validation_size + test_size is {needed}, but there are only {there_are} "
                f"different problems with {self._operands_in_words()}: "
                "ask for fewer, or for more numbers or digits"
            )

    def _operand_count(self) -> int:
        raise NotImplementedError

    def _operand_range(self) -> range:
        raise NotImplementedError

    def _operands_in_words(self) -> str:
        return f"{self._operand_count()} numbers of {self.digits} digits"

    def _operands(self, wanted: int) -> Sequence[tuple[int, ...]]:
        """The numbers of the first `wanted` problems of all splits together."""
        return distinct_operands(self._operand_range(), self._operand_count(), wanted, seed=self.seed)

    def _prompt(self, numbers: Sequence[int]) -> str:
        return self.operator.join(map(str, numbers)) + "=\n"

    def _solution(self, numbers: Sequence[int]) -> Solution:
        raise NotImplementedError

    def _answer(self, numbers: Sequence[int]) -> int:
        raise NotImplementedError

    def _sizes(self) -> dict[Split, int]:
        return {"test": self.test_size, "validation": self.validation_size, "train": self.train_size}

    def _space(self) -> int:
        return selections(self._operand_range(), self._operand_count())

    def problems(self, split: Split) -> Sequence[Problem]:
        if split not in get_args(Split):
            raise ValueError(f"no split {split!r}: choose one of {', '.join(get_args(Split))}")
        return _problems(self, split)

    def size(self, split: Split) -> int:
        return self._sizes()[split]

    def examples(self, count: int) -> Sequence[Problem]:
        return _made(self, "example", self._operands(min(count, self._space())))

    def demonstration(self, problem: Problem, seed: int) -> str:
        """The teacher's solution. Slips are drawn from `seed` and the problem."""
        generator = derived_random(seed, problem.id, "demonstration")

        def write(line: Line) -> int:
            slips = generator.random() < self.demonstration_noise
            return line.value + (generator.choice(SLIPS) if slips else 0)

        lines = self._written(problem, write)
        return self._text(problem, lines, seed)

    def _text(self, problem: Problem, lines: Sequence[WrittenLine], seed: int) -> str:
        """A solution's lines and the answer, as text."""
        text = "".join(f"{line.lead}{value}\n" for line, value in lines)
        return f"{text}{MARKER}{lines[-1][1]}"

    def teacher_value(self, problem: Problem, prefix: str) -> float:
        """The probability that the teacher, going on from `prefix`, ends with the right answer.

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

        def write(line: Line) -> int:
            text = next(position, None)
            if text is None:
                return line.value
            if _form(text) != _form(f"{line.lead}{line.value}"):
                raise ValueError(f"{text!r} in {prefix!r} is no step of this solution, as {line} would be")
            return int(re.split(r"[^0-9]", text)[-1])

        lines = self._written(problem, write)
        if len(written) > len(lines):
            raise ValueError(f"the prefix {prefix!r} has {len(written)} lines, the solution {len(lines)}")
        missing = self._answer(problem.data["numbers"]) - lines[-1][1]
        weights = [line.weight for line, _ in lines[len(written) :]]
        return _chance_of_slips(missing, weights, self.demonstration_noise)

    def _written(self, problem: Problem, write: Callable[[Line], int]) -> list[WrittenLine]:
        """The lines of a solution with the numbers that `write` decides on."""
        solution = self._solution(problem.data["numbers"])
        lines: list[WrittenLine] = []
        try:
            line = next(solution)
            while True:
                lines.append((line, write(line)))
                line = solution.send(lines[-1][1])
        except StopIteration:
            return lines

    def step_boundaries(self, response: str) -> list[int]:
        """A step is a line with the newline that ends it."""
        return ends_of_lines(response)

    def alphabet(self) -> str:
        return f"0123456789{self.operator}={MARKER}\n"


def _form(line: str) -> str:
    return re.sub(r"[0-9]+", "0", line)


def _chance_of_slips(missing: int, weights: Sequence[int], noise: float) -> float:
    """The probability that slips on lines of these weights add up to exactly `missing`.

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
                left = still_missing - slip * weight
                if 0 <= left <= reach:
                    following[left] += chance * probability
        chances = following
    return chances.get(0, 0.0)


@lru_cache(maxsize=16)
def _problems(task: WrittenArithmetic, split: Split) -> tuple[Problem, ...]:
    sizes = task._sizes()
    operands = task._operands(sum(sizes.values()))
    # The order of `_sizes` puts the held-out splits first: they stay when train_size changes.
    start = sum(size for name, size in sizes.items() if list(sizes).index(name) < list(sizes).index(split))
    return _made(task, split, operands[start : start + sizes[split]])


def _made(task: WrittenArithmetic, place: str, operands: Sequence[tuple[int, ...]]) -> tuple[Problem, ...]:
    return tuple(
        Problem(
            id=f"{place}/{index}",
            prompt=task._prompt(numbers),
            gold=str(task._answer(numbers)),
            data={"numbers": numbers},
        )
        for index, numbers in enumerate(operands)
    )
