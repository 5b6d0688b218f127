"""The task Countdown: reach a target from a few numbers with + − × ÷, using each number once."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, MinLen
from typing_extensions import override

from treetune.contracts import TaskDemonstrations
from treetune.exceptions import BadRow
from treetune.seeds import derived_random
from treetune.tasks.base import GeneratedTask, Task
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.countdown import MOST_DIGITS_OF_A_NUMBER, CountdownGrader, write_gold
from treetune.tasks.rows import RowsTask
from treetune.tasks.steps import Lines, StepSplitter
from treetune.vocabulary import Problem

Operator = Literal["+", "-", "*", "/"]
CountdownPuzzle = tuple[tuple[int, ...], int]
"""The numbers in the order of the prompt, and the target: ``((12, 34, 7), 39)``."""

NUMBERS_PLACEHOLDER, TARGET_PLACEHOLDER = "{numbers}", "{target}"
GRADER = CountdownGrader()
STEPS = Lines(answer_marker="<answer>")

PROMPT = (
    "Using the numbers {numbers}, write an expression that equals {target}. You may use +, -, *, / and "
    "brackets, and each number exactly once. Think first, and end with the expression between <answer> "
    "and </answer>, such as <answer>(1 + 2) * 3</answer>."
)
"""A prompt for a model that follows instructions. The chat template is put around it."""

_MOST_REPEATED_DRAWS = 20_000
"""If this many draws since the last new problem gave known problems, there are assumed to be no others.
Suppose that the settings allow 1,000 equally probable problems: the last one is then missed with a
probability of 2e-9."""

_MOST_VAIN_DRAWS = 200_000
"""The search ends after this many draws without a new problem, most of which have no value within `targets`.
It would take minutes to go on."""


def fill_template(template: str, numbers: Sequence[int], target: int) -> str:
    """Returns the template with the numbers in it, such as ``19, 36, 55``, and the target."""
    with_numbers = template.replace(NUMBERS_PLACEHOLDER, ", ".join(map(str, numbers)))
    return with_numbers.replace(TARGET_PLACEHOLDER, str(target))


def check_template(template: str) -> None:
    """Raises ValueError for a template without a placeholder for the numbers and one for the target."""
    if template.count(NUMBERS_PLACEHOLDER) != 1 or template.count(TARGET_PLACEHOLDER) != 1:
        raise ValueError(f"prompt needs {NUMBERS_PLACEHOLDER} and {TARGET_PLACEHOLDER} exactly once")


@Task.register("countdown")
@dataclass(frozen=True, kw_only=True)
class Countdown(GeneratedTask):
    r"""Generated problems, each from an expression that solves it. All splits have different problems.

    Two problems are the same if they have the same target and the same numbers, in any order. Raises
    ValueError if the settings allow fewer problems than the splits need.

    **Demonstrations** exist for sums and differences, and show a search. It tries one combination of signs
    after the other, in an order drawn by the seed, and writes the running totals, until a sum is the target:
    ``12+34=46+7=53\n12+34=46-7=39\n``. Then it writes the answer ``12+34-7`` in the grader's tags. If ``+``
    is the only operator, there is one sum to try.
    """

    numbers: tuple[Annotated[int, Ge(2), Le(6)], Annotated[int, Ge(2), Le(6)]] = (3, 4)
    """The smallest and the largest count of numbers in a problem."""
    operands: tuple[Annotated[int, Ge(1)], Annotated[int, Le(10_000)]] = (1, 99)
    """The smallest and the largest number."""
    targets: tuple[Annotated[int, Ge(1)], Annotated[int, Le(1_000_000)]] = (10, 99)
    """The smallest and the largest target."""
    operators: Annotated[tuple[Operator, ...], MinLen(1)] = ("+", "-", "*", "/")
    """The operators of the expressions from which problems are made."""
    natural: bool = True
    """Whether each step of the expressions from which problems are made gives a positive whole number. If it
    does, each problem has a solution without fractions and negative numbers."""
    demonstration_noise: Annotated[float, Ge(0), Le(1)] = 0.0
    """The probability that a demonstration gives a wrong sum as the answer, after each wrong sum."""
    train_size: Annotated[int, Gt(0)] = 20_000
    validation_size: Annotated[int, Gt(0)] = 500
    test_size: Annotated[int, Gt(0)] = 1000
    seed: int = 0
    """Decides which problems are generated and held out. It is independent of the run's seed."""
    prompt: str = PROMPT
    """The template, with ``{numbers}`` and ``{target}`` in it."""
    grader: CountdownGrader = GRADER

    ranges: ClassVar[tuple[str, ...]] = ("numbers", "operands", "targets")

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        check_template(self.prompt)
        if len(set(self.operators)) != len(self.operators):
            raise ValueError(f"operators {list(self.operators)} names an operator twice")

    @override
    def generate(self, count: int) -> Sequence[CountdownPuzzle]:
        return _draw_distinct_puzzles(
            self.numbers, self.operands, self.targets, self.operators, self.natural, count, self.seed
        )

    @override
    def problem(self, id: str, generated: CountdownPuzzle) -> Problem:
        numbers, target = generated
        prompt, data = fill_template(self.prompt, numbers, target), {"numbers": numbers, "target": target}
        return Problem(id=id, prompt=prompt, gold=write_gold(target, numbers), data=data)

    @property
    @override
    def gives(self) -> tuple[TaskDemonstrations]:
        # Demonstrations are sums without brackets. With "-" alone, 9 - (5 - 2) would need brackets or "+".
        if set(self.operators) in ({"+"}, {"+", "-"}):
            return (TaskDemonstrations(),)
        return (
            TaskDemonstrations(
                why_none=f"task.operators is {list(self.operators)}, and countdown has them only for sums and"
                " differences: set it to ['+', '-'] or ['+']"
            ),
        )

    @override
    def demonstration(self, problem: Problem, seed: int) -> str:
        """Returns a search for the target: it tries sums, and gives the last one as the answer.

        The search ends at the first sum whose value is the target. At each wrong sum, the search also ends
        with the probability `demonstration_noise`, and the answer is wrong. The order of the sums and the
        wrong answers depend on `seed` and the problem.

        Raises ValueError if the task has no demonstrations with these operators.
        """
        (demonstrations,) = self.gives  # says why there are no demonstrations, if there are none
        if demonstrations.why_none:
            raise ValueError(f"there are no demonstrations, since {demonstrations.why_none}")
        generator = derived_random(seed, problem.id, "demonstration")
        numbers, target = problem.data["numbers"], problem.data["target"]
        tries = list(signed_sums(numbers, self.operators))
        generator.shuffle(tries)
        text = ""
        for expression, with_totals, value in tries:  # such as ("34+7-12", "34+7=41-12=29", 29)
            text += with_totals + "\n"
            if value == target or generator.random() < self.demonstration_noise:
                # If the closing tag is a newline, the end of the text takes its place.
                return f"{text}{self.grader.opening}{expression}{self.grader.closing}".rstrip("\n")
        raise AssertionError(f"{problem.gold} has no solution among {len(tries)} sums")

    @override
    def alphabet(self) -> str:
        """Returns the characters of prompts and demonstrations."""
        # ", " separates the numbers in a prompt (`fill_template`).
        template = self.prompt.replace(NUMBERS_PLACEHOLDER, ", ").replace(TARGET_PLACEHOLDER, "")
        characters = template + self.grader.opening + self.grader.closing + "".join(self.operators)
        return "".join(sorted(set("0123456789=()\n" + characters)))


def signed_sums(
    numbers: Sequence[int], operators: Sequence[Operator] = ("+", "-")
) -> Iterator[tuple[str, str, int]]:
    """Yields the sums in which each number is added or subtracted once, if their value is positive.

    Each item has an expression, the expression with its running totals, and its value:
    ("34+7-12", "34+7=41-12=29", 29). Added numbers come first, so no running total of an expression with a
    positive value is negative. If `operators` has no ``-``, nothing is subtracted.
    """
    seen_expressions: set[str] = set()
    # If bit i of the mask is set, number i is subtracted. The mask with all bits is left out, since at
    # least one number must be added.
    n_masks = 2 ** len(numbers) - 1 if "-" in operators else 1
    for mask in range(n_masks):
        subtracted = [number for index, number in enumerate(numbers) if mask & (1 << index)]
        added = [number for index, number in enumerate(numbers) if not mask & (1 << index)]
        total = added[0]
        expression = running = str(total)
        signed_numbers = [("+", number) for number in added[1:]] + [("-", number) for number in subtracted]
        for sign, number in signed_numbers:
            total += number if sign == "+" else -number
            expression += f"{sign}{number}"
            running += f"{sign}{number}={total}"
        if total > 0 and expression not in seen_expressions:
            seen_expressions.add(expression)
            yield expression, running, total


@lru_cache(maxsize=4)
def _draw_distinct_puzzles(
    numbers: tuple[int, int],
    operands: tuple[int, int],
    targets: tuple[int, int],
    operators: tuple[Operator, ...],
    natural: bool,
    count: int,
    seed: int,
) -> Sequence[CountdownPuzzle]:
    """Returns `count` different problems. Raises ValueError if `count` problems can't be found.

    The problems for a smaller `count` are the first ones of those for a larger `count`.

    Args:
        numbers: The smallest and the largest count of numbers in a problem.
        operands: The smallest and the largest number.
        targets: The smallest and the largest target.
        operators: The operators of the expressions from which problems are made.
        natural: Whether each step of such an expression must give a positive whole number.
        count: The number of problems.
        seed: The seed of the draws.
    """
    # `derived_random` takes numbers and texts, so the pairs are written as texts.
    generator = derived_random(seed, "countdown", repr(numbers), repr(operands), repr(targets))
    puzzles: list[CountdownPuzzle] = []
    seen_puzzles: set[CountdownPuzzle] = set()
    draws = 0
    vain_draws = 0  # the number of draws since the last new problem
    repeated_draws = 0  # how many of these draws gave a problem that is among `puzzles`
    while len(puzzles) < count:
        draws += 1
        drawn_numbers = tuple(generator.randint(*operands) for _ in range(generator.randint(*numbers)))
        value = _draw_value(generator, drawn_numbers, operators, natural)
        target: int | None = None
        if value is not None and value.denominator == 1 and targets[0] <= value <= targets[1]:
            target = int(value)
        if target is not None:
            key = (tuple(sorted(drawn_numbers)), target)
            if key not in seen_puzzles:
                vain_draws = repeated_draws = 0
                seen_puzzles.add(key)
                puzzles.append((drawn_numbers, target))
                continue
            repeated_draws += 1
        vain_draws += 1
        has_all_problems = repeated_draws == _MOST_REPEATED_DRAWS  # only the same problems are drawn again
        problems_are_too_rare = vain_draws == _MOST_VAIN_DRAWS  # hardly any draw gives a problem
        gives_up = has_all_problems or problems_are_too_rare
        if gives_up and not puzzles:
            raise ValueError(
                f"none of {draws:,} random expressions has a value within targets: there are no solvable"
                " problems, or hardly any; widen numbers, operands, targets or operators"
            )
        if gives_up:
            raise ValueError(
                f"the splits need {count} problems (train_size + validation_size + test_size), and {draws:,}"
                f" random expressions gave {len(puzzles)}, the last {vain_draws:,} of them no new one:"
                " ask for fewer, or widen numbers, operands, targets or operators"
            )
    return tuple(puzzles)


def _draw_value(
    generator: random.Random, numbers: Sequence[int], operators: Sequence[Operator], natural: bool
) -> int | Fraction | None:
    """Returns the value of a random expression of all the numbers.

    Returns None if a step isn't allowed: a division by zero, or with `natural` a step whose result isn't a
    positive whole number.
    """
    values: list[int | Fraction] = list(numbers)
    while len(values) > 1:
        generator.shuffle(values)
        left, right = values.pop(), values.pop()
        operator = generator.choice(operators)
        if operator == "/" and (right == 0 or (natural and left % right)):
            return None
        value: int | Fraction
        if operator == "+":
            value = left + right
        elif operator == "-":
            value = left - right
        elif operator == "*":
            value = left * right
        else:
            value = Fraction(left, right)
        if natural:
            if value <= 0:
                return None
            value = int(value)  # arithmetic is much faster with int than with Fraction
        values.append(value)
    return values[0]


@Task.register("countdown_rows")
@dataclass(frozen=True, kw_only=True)
class CountdownRows(RowsTask):
    """Countdown from published data sets. `RowsTask` explains where rows come from and how some are held
    out."""

    numbers_field: Annotated[str, MinLen(1)] = "nums"
    """The key of a row's numbers, a list of whole numbers."""
    target_field: Annotated[str, MinLen(1)] = "target"
    """The key of the target, a whole number."""
    prompt_field: Annotated[str, MinLen(1)] = "messages"
    """The key of the row's own prompt, which is used if `prompt` is null. The row's prompt is a text, or a
    chat with one message of the user, perhaps after a system message. A chat needs a model with a chat
    template (`model.chat`), which also adds the system message."""
    prompt: str | None = None
    """A template with ``{numbers}`` and ``{target}``; null: each row has its own prompt."""
    system: str | None = None
    """The system message that rows may have. A row with another system message is a bad row."""
    grader: Grader = GRADER
    steps: StepSplitter = STEPS

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is not None:
            check_template(self.prompt)

    @override
    def problem_of(self, row: dict[str, Any], id: str) -> Problem:
        numbers, target = self._read_value(row, self.numbers_field), self._read_value(row, self.target_field)

        def is_whole_number(value: Any) -> bool:
            return (
                isinstance(value, int)
                and not isinstance(value, bool)
                and abs(value) < 10**MOST_DIGITS_OF_A_NUMBER  # the grader reads no longer numbers
            )

        if not isinstance(numbers, list | tuple) or not numbers:
            raise BadRow(f"its {self.numbers_field!r} is not a list of numbers")
        for number in numbers:
            if not is_whole_number(number) or number < 0:
                raise BadRow(
                    f"its {self.numbers_field!r} contains {number!r}, which is not a whole number from 0 up"
                )
        if not is_whole_number(target):
            raise BadRow(f"its {self.target_field!r} is {target!r}, which is not a whole number")
        prompt = (
            self._read_prompt(row) if self.prompt is None else fill_template(self.prompt, numbers, target)
        )
        data = {"numbers": tuple(numbers), "target": target}
        return Problem(id=id, prompt=prompt, gold=write_gold(target, numbers), data=data)

    def _read_value(self, row: Mapping[str, Any], key: str) -> Any:
        if key not in row:
            raise BadRow(f"it has no {key!r} (it has {', '.join(map(repr, sorted(row))) or 'nothing'})")
        return row[key]

    def _read_prompt(self, row: Mapping[str, Any]) -> str:
        """Returns the row's own prompt: a text, or the user's message of a chat. Raises BadRow for any
        other."""
        prompt = self._read_value(row, self.prompt_field)
        if isinstance(prompt, str):
            return prompt
        turns: list[Mapping[Any, Any]] = []
        if isinstance(prompt, list):
            turns = [turn for turn in prompt if isinstance(turn, Mapping)]
        roles = [turn.get("role") for turn in turns]
        if roles not in (["user"], ["system", "user"]) or not isinstance(turns[-1].get("content"), str):
            raise BadRow(
                f"its {self.prompt_field!r} is neither a text nor a chat with one message of the user, with "
                "or without a system message: give a prompt of your own"
            )
        if len(turns) == 2 and turns[0].get("content") != self.system:
            raise BadRow(
                f"its system message is {turns[0].get('content')!r}, and the task's is {self.system!r}: set "
                "`system` to it, and also model.chat.system, which is the message that the model reads"
            )
        return str(turns[-1]["content"])
