"""Countdown: reach a target from a few numbers with + − × ÷, each number used once."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, MinLen
from typing_extensions import override

from treetune.exceptions import BadRow
from treetune.seeds import derived_random
from treetune.tasks.base import GeneratedTask, Task
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.countdown import MOST_DIGITS, CountdownGrader, gold_of
from treetune.tasks.rows import RowsTask
from treetune.tasks.steps import Lines, StepSplitter
from treetune.vocabulary import Problem

Operator = Literal["+", "-", "*", "/"]
Puzzle = tuple[tuple[int, ...], int]
"""The numbers, in the order in which a prompt lists them, and the target."""

NUMBERS, TARGET = "{numbers}", "{target}"
GRADER = CountdownGrader()
STEPS = Lines(answer_marker="<answer>")

PROMPT = (
    "Using the numbers {numbers}, write an expression that equals {target}. You may use +, -, *, / and "
    "brackets, and each number exactly once. Think first, and end with the expression between <answer> "
    "and </answer>, such as <answer>(1 + 2) * 3</answer>."
)
"""Asks a model that was trained to follow instructions; the chat template goes around it."""

_MOST_REPEATED = 20_000
"""Known problems between two new ones after which there are taken to be no more: of a shape with 1,000
problems of equal chances, the last one is missed by so many with a probability of 2e-9."""

_MOST_VAIN = 200_000
"""Draws between two new problems, most of them of no value within `targets`, after which the search is
given up: it would take minutes."""


def prompted(template: str, numbers: Sequence[int], target: int) -> str:
    """Returns the template with the numbers in it, such as ``19, 36, 55``, and the target."""
    return template.replace(NUMBERS, ", ".join(map(str, numbers))).replace(TARGET, str(target))


def check_template(template: str) -> None:
    """Raises ValueError for a template without a place for the numbers and one for the target."""
    if template.count(NUMBERS) != 1 or template.count(TARGET) != 1:
        raise ValueError(f"prompt needs {NUMBERS} and {TARGET} exactly once, where the problem's go")


@Task.register("countdown")
@dataclass(frozen=True, kw_only=True)
class Countdown(GeneratedTask):
    r"""Problems made on the spot, each from an expression that solves it; different ones in every split.

    Two problems are the same if target and numbers are, in any order. Raises ValueError where the shape
    doesn't hold as many problems as the splits need.

    **Demonstrations** are a search, for problems of sums and differences: sign after sign is tried,
    in an order that the seed draws, each with its running totals, until one hits the target:
    ``12+34=46+7=53\n12+34=46-7=39\n`` and the grader's opening with ``12+34-7``. With ``+`` alone
    there is one sum to try.
    """

    numbers: tuple[Annotated[int, Ge(2), Le(6)], Annotated[int, Ge(2), Le(6)]] = (3, 4)
    """The fewest and the most numbers of a problem."""
    operands: tuple[Annotated[int, Ge(1)], Annotated[int, Le(10_000)]] = (1, 99)
    """The smallest and the largest number."""
    targets: tuple[Annotated[int, Ge(1)], Annotated[int, Le(1_000_000)]] = (10, 99)
    """The smallest and the largest target."""
    operators: Annotated[tuple[Operator, ...], MinLen(1)] = ("+", "-", "*", "/")
    """The operators of the expressions that problems are made from."""
    natural: bool = True
    """Each step of that expression gives a positive whole number, so that no fraction and nothing negative is
    needed on the way."""
    demonstration_noise: Annotated[float, Ge(0), Le(1)] = 0.0
    """The teacher's probability of giving a try that missed for the answer, each time."""
    train_size: Annotated[int, Gt(0)] = 20_000
    validation_size: Annotated[int, Gt(0)] = 500
    test_size: Annotated[int, Gt(0)] = 1000
    seed: int = 0
    """Decides which problems are held out, and is not the run's."""
    prompt: str = PROMPT
    """The template, with ``{numbers}`` and ``{target}`` in it."""
    grader: CountdownGrader = GRADER

    ranges: ClassVar[tuple[str, ...]] = ("numbers", "operands", "targets")

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        check_template(self.prompt)
        if len(set(self.operators)) != len(self.operators):
            raise ValueError(f"operators {list(self.operators)} names one of them twice")

    @override
    def generate(self, count: int) -> Sequence[Puzzle]:
        return _distinct(
            self.numbers, self.operands, self.targets, self.operators, self.natural, count, self.seed
        )

    @override
    def problem(self, id: str, generated: Puzzle) -> Problem:
        numbers, target = generated
        prompt, data = prompted(self.prompt, numbers, target), {"numbers": numbers, "target": target}
        return Problem(id=id, prompt=prompt, gold=gold_of(target, numbers), data=data)

    @override
    def check_demonstrations(self) -> None:
        # Without + some differences need brackets, which signed sums don't have.
        if set(self.operators) not in ({"+"}, {"+", "-"}):
            raise ValueError(
                "task countdown has demonstrations for sums and differences alone, and its operators are"
                f" {list(self.operators)}: set task.operators to ['+', '-'] or ['+'], or choose a rollout"
                " that samples, such as 'single_turn'"
            )

    @override
    def demonstration(self, problem: Problem, seed: int) -> str:
        """Returns the teacher's search. Order and mistakes are drawn from `seed` and the problem.

        Raises ValueError where there is none (`check_demonstrations`).
        """
        self.check_demonstrations()
        generator = derived_random(seed, problem.id, "demonstration")
        numbers, target = problem.data["numbers"], problem.data["target"]
        tries = list(signed_sums(numbers, self.operators))
        generator.shuffle(tries)
        text = ""
        for expression, running, value in tries:
            text += running + "\n"
            if value == target or generator.random() < self.demonstration_noise:
                # A line's end that closes the answer is left to the end of the text.
                return f"{text}{self.grader.opening}{expression}{self.grader.closing}".rstrip("\n")
        raise AssertionError(f"{problem.gold} has no solution among {len(tries)} sums")

    @override
    def alphabet(self) -> str:
        """Returns the characters of prompts and demonstrations."""
        template = self.prompt.replace(NUMBERS, ", ").replace(TARGET, "")
        written = template + self.grader.opening + self.grader.closing + "".join(self.operators)
        return "".join(sorted(set("0123456789=()\n" + written)))


def signed_sums(
    numbers: Sequence[int], operators: Sequence[Operator] = ("+", "-")
) -> Iterator[tuple[str, str, int]]:
    """Yields every different sum of the numbers with signs whose value is positive.

    Each is the expression, the same with its running totals, and the value: ("34+7-12", "34+7=41-12=29", 29).
    Added numbers come before subtracted ones, so that no total on the way is negative. Nothing is subtracted
    where `operators` lack ``-``.
    """
    seen: set[str] = set()
    # Bit i of the mask says that number i is subtracted; at least one is added.
    masks = range(2 ** len(numbers) - 1 if "-" in operators else 1)
    for mask in masks:
        subtracted = [number for index, number in enumerate(numbers) if mask >> index & 1]
        added = [number for index, number in enumerate(numbers) if not mask >> index & 1]
        total = added[0]
        expression = running = str(total)
        signed = [("+", number) for number in added[1:]] + [("-", number) for number in subtracted]
        for sign, number in signed:
            total += number if sign == "+" else -number
            expression += f"{sign}{number}"
            running += f"{sign}{number}={total}"
        if total > 0 and expression not in seen:
            seen.add(expression)
            yield expression, running, total


@lru_cache(maxsize=4)
def _distinct(
    numbers: tuple[int, int],
    operands: tuple[int, int],
    targets: tuple[int, int],
    operators: tuple[Operator, ...],
    natural: bool,
    count: int,
    seed: int,
) -> Sequence[Puzzle]:
    """Returns `count` problems, no two with the same target and the same numbers up to order.

    The first ones do not depend on `count`. Raises ValueError where so many cannot be found.
    """
    generator = derived_random(seed, "countdown", *map(repr, (numbers, operands, targets)))
    puzzles: list[Puzzle] = []
    seen: set[Puzzle] = set()
    draws = 0
    vain = repeated = 0  # draws since the last new problem, and those among them that had a target
    while len(puzzles) < count:
        draws += 1
        drawn = tuple(generator.randint(*operands) for _ in range(generator.randint(*numbers)))
        value = _random_value(generator, drawn, operators, natural)
        target: int | None = None
        if value is not None and value.denominator == 1 and targets[0] <= value <= targets[1]:
            target = int(value)
        if target is not None:
            key = (tuple(sorted(drawn)), target)
            if key not in seen:
                vain = repeated = 0
                seen.add(key)
                puzzles.append((drawn, target))
                continue
            repeated += 1
        vain += 1
        gives_up = repeated == _MOST_REPEATED or vain == _MOST_VAIN
        if gives_up and not puzzles:
            raise ValueError(
                f"none of {draws:,} expressions drawn of this shape has a value within targets: it has no"
                " solvable problem, or next to none; widen numbers, operands, targets or operators"
            )
        if gives_up:
            raise ValueError(
                f"{count} problems are asked for (train_size + validation_size + test_size), and {draws:,}"
                f" expressions drawn of this shape gave {len(puzzles)}, the last {vain:,} draws no new one:"
                " ask for fewer, or widen numbers, operands, targets or operators"
            )
    return tuple(puzzles)


def _random_value(
    generator: random.Random, numbers: Sequence[int], operators: Sequence[Operator], natural: bool
) -> int | Fraction | None:
    """Returns the value of a random expression of all the numbers; None where it breaks off."""
    values: list[int | Fraction] = list(numbers)
    while len(values) > 1:
        generator.shuffle(values)
        left, right = values.pop(), values.pop()
        operator = generator.choice(operators)
        if operator == "/" and (right == 0 or (natural and left % right)):
            return None
        value = (
            left + right if operator == "+"
            else left - right if operator == "-"
            else left * right if operator == "*"
            else Fraction(left, right)
        )  # fmt: skip
        if natural:
            if value <= 0:
                return None
            value = int(value)  # whole numbers are much quicker than fractions
        values.append(value)
    return values[0]


@Task.register("countdown_rows")
@dataclass(frozen=True, kw_only=True)
class CountdownRows(RowsTask):
    """Countdown from the published data sets. `RowsTask` explains where rows come from and how some are held
    out."""

    numbers_field: Annotated[str, MinLen(1)] = "nums"
    """The key of a row's given numbers, a list of whole ones."""
    target_field: Annotated[str, MinLen(1)] = "target"
    """The key of the whole number to reach."""
    prompt_field: Annotated[str, MinLen(1)] = "messages"
    """The key of the row's own prompt, where there is no template: a text, or the messages of a chat that end
    with the user's. These need a model that is asked in its chat template (`model.chat`), which adds the
    system message too."""
    prompt: str | None = None
    """A template with ``{numbers}`` and ``{target}``."""
    system: str | None = None
    """The system message that rows may have; a row with another one is bad."""
    grader: Grader = GRADER
    steps: StepSplitter = STEPS

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is not None:
            check_template(self.prompt)

    @override
    def problem_of(self, row: dict[str, Any], id: str) -> Problem:
        numbers, target = self._value(row, self.numbers_field), self._value(row, self.target_field)

        def is_whole(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**MOST_DIGITS

        if not isinstance(numbers, list | tuple) or not numbers:
            raise BadRow(f"its {self.numbers_field!r} is no list of numbers")
        for number in numbers:
            if not is_whole(number) or number < 0:
                raise BadRow(
                    f"its {self.numbers_field!r} holds {number!r}, which is no whole number from 0 up"
                )
        if not is_whole(target):
            raise BadRow(f"its {self.target_field!r} is {target!r}, no whole number")
        prompt = self._prompt_of(row) if self.prompt is None else prompted(self.prompt, numbers, target)
        data = {"numbers": tuple(numbers), "target": target}
        return Problem(id=id, prompt=prompt, gold=gold_of(target, numbers), data=data)

    def _value(self, row: Mapping[str, Any], key: str) -> Any:
        if key not in row:
            raise BadRow(f"it has no {key!r} (it has {', '.join(map(repr, sorted(row))) or 'nothing'})")
        return row[key]

    def _prompt_of(self, row: Mapping[str, Any]) -> str:
        prompt = self._value(row, self.prompt_field)
        if isinstance(prompt, str):
            return prompt
        turns = [turn for turn in prompt if isinstance(turn, Mapping)] if isinstance(prompt, list) else []
        roles = [turn.get("role") for turn in turns]
        if roles not in (["user"], ["system", "user"]) or not isinstance(turns[-1].get("content"), str):
            raise BadRow(
                f"its {self.prompt_field!r} is neither a text nor a chat of the user's one message, with or "
                "without a system message: give a prompt of your own"
            )
        if len(turns) == 2 and turns[0].get("content") != self.system:
            raise BadRow(
                f"its system message is {turns[0].get('content')!r}, and the task's is {self.system!r}: set "
                "`system` to it, and model.chat.system, which is what the model is told"
            )
        return str(turns[-1]["content"])
