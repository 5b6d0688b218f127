"""Tasks whose answer is a short program, which tiny models can learn to write and a sandbox executes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, ClassVar, NamedTuple

from annotated_types import Ge, Le
from typing_extensions import override

from treetune.domains.graders.code import Code
from treetune.domains.puzzles.base import Puzzle, Puzzles
from treetune.seeds import derived_random
from treetune.tasks.base import Task
from treetune.tasks.graders.base import Grader
from treetune.vocabulary import Problem

INPUTS = (-7, 0, 2, 5, 13, 40)
"""The inputs with which programs are tested. Any two different steps, as the first step of a program, give
different values for at least one of these inputs."""


class Step(NamedTuple):
    """A step of a program: its description in symbols and in words, its line of Python, and its function."""

    symbols: str
    words: str
    line: str
    apply: Callable[[int], int]


def _steps_with_number(number: int) -> tuple[Step, ...]:
    """Returns the steps that add, subtract and multiply by a number."""
    # Each step in symbols, in words, as a line of Python and as a function.
    return (
        Step(f"add {number}", f"add {number}", f"x=x+{number}", lambda x: x + number),
        Step(f"take {number}", f"take away {number}", f"x=x-{number}", lambda x: x - number),
        Step(f"times {number}", f"multiply by {number}", f"x=x*{number}", lambda x: x * number),
    )


STEPS = (
    *chain.from_iterable(map(_steps_with_number, range(2, 10))),
    Step("square", "square it", "x=x*x", lambda x: x * x),
    Step("negate", "change its sign", "x=-x", lambda x: -x),
    Step("halve", "halve it, rounding down", "x=x//2", lambda x: x // 2),
    Step("last digit", "take the remainder of a division by ten", "x=x%10", lambda x: x % 10),
)

_STEP_OF_SYMBOLS = {step.symbols: step for step in STEPS}
GRADER = Code()
_INPUT_LINE, _OUTPUT_LINE = "x=int(input())", "print(x)"


@Task.register("short_programs")
@dataclass(frozen=True, kw_only=True)
class ShortPrograms(Puzzles):
    r"""The answer is a program that reads an integer, takes some steps and prints the result. Any code is
    right whose output is right for six inputs. With the wording ``symbols``, a prompt is
    ``add 3,square,halve:\n``, and the program doesn't read the number, which is already in ``x``.

    **Demonstrations** have a line for each step: ``x=x+3\nx=x*x\nx=x//2\nprint(x)``. At an error, the line is
    that of another step. With probability 0.5 this is the same operation with another number.
    """

    steps: tuple[Annotated[int, Ge(1), Le(9)], Annotated[int, Ge(1), Le(9)]] = (2, 4)
    """The fewest and the most steps."""
    grader: Grader = GRADER  # type: ignore[assignment]

    kind: ClassVar[str] = "short programs"
    ranges: ClassVar[tuple[str, ...]] = ("steps",)

    @override
    def draw_puzzle(self, generator: random.Random) -> Puzzle:
        program = generator.choices(STEPS, k=generator.randint(*self.steps))
        symbols = tuple(step.symbols for step in program)  # "add 3", "square"
        prompt = ",".join(symbols) + ":\n"
        if self.wording == "words":
            described_steps = "; then ".join(step.words for step in program)
            prompt = (
                "Write a Python program that reads a whole number and prints what becomes of it by these"
                f" steps: {described_steps}. End with the program in a block of code."
            )
        # With the wording "symbols", an answer has no line that reads the number. The grader puts the line
        # `_INPUT_LINE` before such an answer.
        data = {"steps": symbols} | ({"prefix": _INPUT_LINE} if self.wording == "symbols" else {})
        return Puzzle(prompt, write_gold(program), symbols, data)

    @override
    def demonstration(self, problem: Problem, seed: int) -> str:
        generator = derived_random(seed, problem.id, "demonstration")
        *lines, answer = self.solution(problem, generator)
        program = "".join(f"{line}\n" for line in lines) + answer
        return program if self.wording == "symbols" else f"```python\n{_INPUT_LINE}\n{program}\n```"

    @override
    def solution(self, problem: Problem, generator: random.Random) -> Iterator[str]:
        for symbols in problem.data["steps"]:
            step = _STEP_OF_SYMBOLS[symbols]
            if self.draws_error(generator):
                step = _draw_other_step(step, generator)
            yield step.line
        yield _OUTPUT_LINE

    @override
    def alphabet(self) -> str:
        if self.wording == "words":
            return super().alphabet()
        characters = "".join(step.symbols + step.line for step in STEPS) + _OUTPUT_LINE
        return "".join(sorted(set(characters + ",:\n")))


def _draw_other_step(step: Step, generator: random.Random) -> Step:
    """Returns another step: with probability 0.5 the same operation with another number, if there is one."""
    operation = step.symbols.split()[0]  # "add" of "add 3"
    same_operation: list[Step] = []
    other_operations: list[Step] = []
    for other_step in STEPS:
        if other_step.symbols.split()[0] != operation:
            other_operations.append(other_step)
        elif other_step != step:
            same_operation.append(other_step)
    if same_operation and generator.random() < 0.5:
        return generator.choice(same_operation)
    return generator.choice(other_operations)


def write_gold(program: Sequence[Step]) -> str:
    """Returns the program's output for each input, in the form that the grader `code` reads."""
    outputs = [str(run_steps(program, value)) for value in INPUTS]
    return json.dumps({"inputs": [str(value) for value in INPUTS], "outputs": outputs})


def run_steps(program: Sequence[Step], value: int) -> int:
    """Returns what becomes of a number by the steps of a program."""
    for step in program:
        value = step.apply(value)
    return value
