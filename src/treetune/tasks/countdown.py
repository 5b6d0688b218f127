"""Countdown: reach a target from a few numbers with + − × ÷, each number used once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, get_args

from annotated_types import Ge, Gt, Le, MinLen

from treetune.seeds import derived_random
from treetune.tasks.base import Split, Task
from treetune.tasks.countdown_problems import Operator, Shape, distinct_problems
from treetune.tasks.graders.countdown import CountdownGrader, gold_of
from treetune.tasks.steps.lines import ends_of_lines
from treetune.vocabulary import Problem

NUMBERS, TARGET = "{numbers}", "{target}"
GRADER = CountdownGrader()

PROMPT = (
    "Using the numbers {numbers}, write an expression that equals {target}. You may use +, -, *, / and "
    "brackets, and each number exactly once. Think first, and end with the expression between <answer> "
    "and </answer>, such as <answer>(1 + 2) * 3</answer>."
)
"""Asks a model that was trained to follow instructions; the chat template goes around it."""


def prompted(template: str, numbers: Sequence[int], target: int) -> str:
    """The template with the numbers in it, such as ``19, 36, 55``, and the target."""
    return template.replace(NUMBERS, ", ".join(map(str, numbers))).replace(TARGET, str(target))


def check_template(template: str) -> None:
    """Raises ValueError for a template without a place for the numbers and one for the target."""
    if template.count(NUMBERS) != 1 or template.count(TARGET) != 1:
        raise ValueError(f"prompt needs {NUMBERS} and {TARGET} exactly once, where the problem's go")


@Task.register("countdown")
@dataclass(frozen=True, kw_only=True)
class Countdown(Task):
    r"""Problems made on the spot, each from an expression that solves it; different ones in every split.

    A problem is `numbers` (fewest and most) numbers out of `operands` (smallest and largest) and a
    target within `targets`, which some expression of them all with the `operators` has for its value.
    With `natural` each step of that expression gives a positive whole number, so that no fraction and
    nothing negative is needed on the way. Two problems are the same if target and numbers are, in
    any order. `seed` decides which are held out, and is not the run's; the held-out ones don't
    change with `train_size`. Raises ValueError where the shape doesn't hold as many problems as the
    splits ask for.

    `prompt` is the template, with ``{numbers}`` and ``{target}`` in it.

    **Demonstrations** are a search, for problems of sums and differences: sign after sign is tried,
    in an order that the seed draws, each with its running totals, until one hits the target:
    ``12+34=46+7=53\n12+34=46-7=39\n`` and the grader's opening with ``12+34-7``. With ``+`` alone
    there is one sum to try. A teacher with `demonstration_noise` p gives a try that missed for the
    answer with probability p each time.
    """

    numbers: tuple[Annotated[int, Ge(2), Le(6)], Annotated[int, Ge(2), Le(6)]] = (3, 4)
    operands: tuple[Annotated[int, Ge(1)], Annotated[int, Le(10_000)]] = (1, 99)
    targets: tuple[Annotated[int, Ge(1)], Annotated[int, Le(1_000_000)]] = (10, 99)
    operators: Annotated[tuple[Operator, ...], MinLen(1)] = ("+", "-", "*", "/")
    natural: bool = True
    demonstration_noise: Annotated[float, Ge(0), Le(1)] = 0.0
    train_size: Annotated[int, Gt(0)] = 20_000
    validation_size: Annotated[int, Gt(0)] = 500
    """Problems of the validation split."""
    test_size: Annotated[int, Gt(0)] = 1000
    """Problems of the test split."""
    seed: int = 0
    prompt: str = PROMPT
    grader: CountdownGrader = GRADER

    def __post_init__(self) -> None:
        check_template(self.prompt)
        for name in ("numbers", "operands", "targets"):
            least, most = getattr(self, name)
            if least > most:
                raise ValueError(f"{name} is [{least}, {most}]: give the smaller one first")
        if len(set(self.operators)) != len(self.operators):
            raise ValueError(f"operators {list(self.operators)} names one of them twice")

    def problems(self, split: Split) -> Sequence[Problem]:
        if split not in get_args(Split):
            raise ValueError(f"no split {split!r}: choose one of {', '.join(get_args(Split))}")
        return _problems(self, split)

    def size(self, split: Split) -> int:
        return self._sizes()[split]

    def _sizes(self) -> dict[Split, int]:
        """The held-out splits come first: they stay when train_size changes."""
        return {"test": self.test_size, "validation": self.validation_size, "train": self.train_size}

    def examples(self, count: int) -> Sequence[Problem]:
        return _made(self, "example", 0, count)

    def check_demonstrations(self) -> None:
        # Without + some differences need brackets, which signed sums don't have.
        if set(self.operators) not in ({"+"}, {"+", "-"}):
            raise ValueError(
                "task countdown has demonstrations for sums and differences alone, and its operators are"
                f" {list(self.operators)}: set task.operators to ['+', '-'] or ['+'], or choose a rollout"
                " that samples, such as 'single_turn'"
            )

    def demonstration(self, problem: Problem, seed: int) -> str:
        """The teacher's search. Order and mistakes are drawn from `seed` and the problem.

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

    def step_boundaries(self, response: str) -> list[int]:
        """A step is a line with the newline that ends it."""
        return ends_of_lines(response)

    def alphabet(self) -> str:
        """What prompts and demonstrations are written in."""
        template = self.prompt.replace(NUMBERS, ", ").replace(TARGET, "")
        written = template + self.grader.opening + self.grader.closing + "".join(self.operators)
        return "".join(sorted(set("0123456789=()\n" + written)))


def signed_sums(
    numbers: Sequence[int], operators: Sequence[Operator] = ("+", "-")
) -> Iterator[tuple[str, str, int]]:
    """Every different sum of the numbers with signs whose value is positive: the expression, the same with
    its running totals (``34+7=41-12=29``), and the value. What is added comes before what is taken
    away, so that no total on the way is negative. Nothing is taken away where `operators` lack ``-``."""
    seen: set[str] = set()
    for signs in range(2 ** len(numbers) - 1 if "-" in operators else 1):
        taken = [number for place, number in enumerate(numbers) if signs >> place & 1]
        added = [number for place, number in enumerate(numbers) if not signs >> place & 1]
        total = added[0]
        expression = running = str(total)
        for sign, number in [*(("+", n) for n in added[1:]), *(("-", n) for n in taken)]:
            total += number if sign == "+" else -number
            expression += f"{sign}{number}"
            running += f"{sign}{number}={total}"
        if total > 0 and expression not in seen:
            seen.add(expression)
            yield expression, running, total


@lru_cache(maxsize=16)
def _problems(task: Countdown, split: Split) -> tuple[Problem, ...]:
    sizes = task._sizes()
    start = sum(size for name, size in sizes.items() if list(sizes).index(name) < list(sizes).index(split))
    return _made(task, split, start, sizes[split], sum(sizes.values()))


def _made(
    task: Countdown, place: str, start: int, count: int, wanted: int | None = None
) -> tuple[Problem, ...]:
    """Problems ``[start, start + count)`` of `wanted` that are made, by default up to there."""
    shape = Shape(task.numbers, task.operands, task.targets, task.operators, task.natural)
    made = distinct_problems(shape, wanted or start + count, task.seed)
    return tuple(
        Problem(
            id=f"{place}/{index}",
            prompt=prompted(task.prompt, numbers, target),
            gold=gold_of(target, numbers),
            data={"numbers": numbers, "target": target},
        )
        for index, (numbers, target) in enumerate(made[start : start + count])
    )
