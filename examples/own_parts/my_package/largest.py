"""A task of your own: which of some numbers is the largest?"""

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
    r"""To ``17,4,52=\n`` the answer is ``17\n52\n#52``: after each further number, a line with the largest
    number so far, and at last the largest of all. There are `count` numbers, and `train_size`,
    `validation_size` and `test_size` problems."""

    count: Annotated[int, Ge(2)] = 4
    train_size: Annotated[int, Gt(0)] = 10_000
    validation_size: Annotated[int, Gt(0)] = 200
    test_size: Annotated[int, Gt(0)] = 500
    grader: Grader = FINAL_ANSWER

    def problems(self, split: Split) -> Sequence[Problem]:
        """Returns the problems of a split, the same ones in each call."""
        sizes = {"train": self.train_size, "validation": self.validation_size, "test": self.test_size}
        return [self._problem(f"{split}/{number}") for number in range(sizes[split])]

    def _problem(self, id: str) -> Problem:
        numbers = derived_random(0, "largest", id).sample(range(100), self.count)
        prompt = ",".join(map(str, numbers)) + "=\n"
        return Problem(id=id, prompt=prompt, gold=str(max(numbers)), data={"numbers": numbers})

    def demonstration(self, problem: Problem, seed: int) -> str:
        """Returns the text that supervised fine-tuning learns."""
        numbers = problem.data["numbers"]
        lines = []
        for end in range(2, self.count + 1):
            lines.append(str(max(numbers[:end])))
        return "\n".join([*lines, f"#{problem.gold}"])

    def step_boundaries(self, response: str) -> list[int]:
        """Returns where steps begin and end, in characters. A line is a step."""
        line_ends = [index + 1 for index, character in enumerate(response) if character == "\n"]
        return sorted({0, *line_ends, len(response)})

    def alphabet(self) -> str:
        """Returns all characters of prompts and answers, the vocabulary of a tiny model."""
        return "0123456789,=#\n"
