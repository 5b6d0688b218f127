"""A task of one's own: which of some numbers is the largest?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from treetune import FinalAnswer, Grader, Problem, Split, Task, derived_random

FINAL_ANSWER = FinalAnswer()


@Task.register("largest")
@dataclass(frozen=True, kw_only=True)
class Largest(Task):
    r"""``17,4,52=\n`` is answered by the largest number so far, one a line, and by ``#52``. There are `count`
    numbers, and `train_size`, `validation_size` and `test_size` problems."""

    count: Annotated[int, Ge(2)] = 4
    train_size: Annotated[int, Gt(0)] = 10_000
    validation_size: Annotated[int, Gt(0)] = 200
    test_size: Annotated[int, Gt(0)] = 500
    grader: Grader = FINAL_ANSWER

    def problems(self, split: Split) -> Sequence[Problem]:
        size = {"train": self.train_size, "validation": self.validation_size, "test": self.test_size}[split]
        return [self._problem(f"{split}/{number}") for number in range(size)]

    def _problem(self, id: str) -> Problem:
        numbers = derived_random(0, "largest", id).sample(range(100), self.count)
        prompt = ",".join(map(str, numbers)) + "=\n"
        return Problem(id=id, prompt=prompt, gold=str(max(numbers)), data={"numbers": numbers})

    def demonstration(self, problem: Problem, seed: int) -> str:
        numbers = problem.data["numbers"]
        lines = [str(max(numbers[: place + 1])) for place in range(1, self.count)]
        return "\n".join([*lines, f"#{problem.gold}"])

    def step_boundaries(self, response: str) -> list[int]:
        ends = {place + 1 for place, letter in enumerate(response) if letter == "\n"}
        return sorted({0, *ends, len(response)})

    def alphabet(self) -> str:
        return "0123456789,=#\n"
