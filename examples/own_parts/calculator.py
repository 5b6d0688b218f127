"""A tool, and a task that needs it: products and sums for a model that can't multiply."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from treetune import FinalAnswer, GeneratedTask, Grader, Message, Problem, Task, derived_random

CALL = '<tool_call>{"name":"calculate","arguments":{"expression":"%s"}}</tool_call>'


def calculate(expression: str) -> int:
    """Multiplies or adds two whole numbers.

    Args:
        expression: One operation, such as 12*34 or 12+34.
    """
    parts = re.fullmatch(r"(\d+)([*+])(\d+)", expression)
    if parts is None:
        raise ValueError("give one operation, such as 12*34")
    one, other = int(parts[1]), int(parts[3])
    return one * other if parts[2] == "*" else one + other


@Task.register("calculations")
@dataclass(frozen=True, kw_only=True)
class Calculations(GeneratedTask):
    """``12*34+56``, which two calls of a calculator and a last turn answer.

    A demonstration is the next turn of a conversation that is in its middle: a training problem is each of
    the three turns. The teacher takes the wrong operation with probability `slips`.
    """

    taught: bool = False
    """Whether training problems are turns to learn from, rather than questions."""
    slips: float = 0.0
    grader: Grader = field(default_factory=FinalAnswer)

    def generate(self, count: int) -> Sequence[tuple[int, int, int]]:
        numbers = derived_random(0, "calculations")
        found: dict[tuple[int, int, int], None] = {}
        while len(found) < count:
            found[numbers.randint(2, 99), numbers.randint(2, 99), numbers.randint(2, 99)] = None
        return list(found)

    def problem(self, id: str, generated: tuple[int, int, int]) -> Problem:
        a, b, c = generated
        return Problem(id=id, prompt=f"{a}*{b}+{c}", gold=str(a * b + c), data={"numbers": generated})

    def make_problems(self, split: str) -> Sequence[Problem]:
        questions = super().make_problems(split)
        return [self._turn(one) for one in questions] if self.taught and split == "train" else questions

    def _turn(self, question: Problem) -> Problem:
        """One of the three turns, with the conversation before it."""
        chance = derived_random(question.id, "turn")
        a, b, c = question.data["numbers"]
        messages, value = [Message("user", question.prompt)], a
        for turn, other in enumerate((b, c)[: chance.randrange(3)]):
            operation = "*+"[turn ^ (chance.random() < self.slips)]
            call = f"{value}{operation}{other}"
            value = calculate(call)
            messages += [Message("assistant", CALL % call), Message("tool", str(value))]
        return replace(question, messages=tuple(messages), data={**question.data, "value": value})

    def demonstration(self, problem: Problem, seed: int) -> str:
        made = len(problem.messages) // 2
        a, b, c = problem.data["numbers"]
        value = problem.data.get("value", a)
        if made == 2:
            return f"#{value}"
        slips = derived_random(seed, "slip").random() < self.slips
        return CALL % f"{value}{'*+'[made ^ slips]}{(b, c)[made]}"

    def alphabet(self) -> str:
        return "".join(map(chr, range(32, 127))) + "\n"
