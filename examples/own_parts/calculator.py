"""A tool, a calculator, and a task that needs it: products and sums for a model that can't multiply.

A conversation, without slips of the teacher:

    user        12*34+56
    assistant   <tool_call>{"name":"calculate","arguments":{"expression":"12*34"}}</tool_call>
    tool        408
    assistant   <tool_call>{"name":"calculate","arguments":{"expression":"408+56"}}</tool_call>
    tool        464
    assistant   #464
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from treetune import FinalAnswer, GeneratedTask, Grader, Message, Problem, Task, derived_random

CALL = '<tool_call>{"name":"calculate","arguments":{"expression":"%s"}}</tool_call>'
OPERATIONS = "*+"  # of the first and the second call


def calculate(expression: str) -> int:
    """Multiplies or adds two whole numbers.

    Args:
        expression: One operation, such as 12*34 or 12+34.
    """
    match = re.fullmatch(r"(\d+)([*+])(\d+)", expression)
    if match is None:
        raise ValueError("give one operation, such as 12*34")
    left, right = int(match[1]), int(match[3])
    return left * right if match[2] == "*" else left + right


@Task.register("calculations")
@dataclass(frozen=True, kw_only=True)
class Calculations(GeneratedTask):
    """Problems such as ``12*34+56``, which need two calls of the calculator and a last turn with the answer.

    With `taught`, a training problem is a conversation up to one of these three turns, and its demonstration
    is that turn. The teacher takes the wrong operation with probability `slips`.
    """

    taught: bool = False
    """Whether training problems are turns to learn from, rather than questions."""
    slips: float = 0.0
    grader: Grader = field(default_factory=FinalAnswer)

    def generate(self, count: int) -> Sequence[tuple[int, int, int]]:
        """Returns `count` different triples (a, b, c), for the problems a*b+c."""
        generator = derived_random(0, "calculations")
        triples: dict[tuple[int, int, int], None] = {}  # a set that keeps the order
        while len(triples) < count:
            triples[generator.randint(2, 99), generator.randint(2, 99), generator.randint(2, 99)] = None
        return list(triples)

    def problem(self, id: str, generated: tuple[int, int, int]) -> Problem:
        """Returns the problem of a triple."""
        a, b, c = generated
        return Problem(id=id, prompt=f"{a}*{b}+{c}", gold=str(a * b + c), data={"numbers": generated})

    def make_problems(self, split: str) -> Sequence[Problem]:
        """Returns the problems of a split."""
        questions = super().make_problems(split)
        if self.taught and split == "train":
            return [self._begin_conversation(question) for question in questions]
        return questions

    def _begin_conversation(self, question: Problem) -> Problem:
        """Returns the question with no, one or two calls that the teacher has made already, at random."""
        generator = derived_random(question.id, "turn")
        a, b, c = question.data["numbers"]
        value = a
        messages = [Message("user", question.prompt)]
        calls = generator.randrange(3)
        for call, number in enumerate((b, c)[:calls]):
            slips = generator.random() < self.slips
            expression = f"{value}{choose_operation(call, slips)}{number}"
            value = calculate(expression)
            messages += [Message("assistant", CALL % expression), Message("tool", str(value))]
        return replace(question, messages=tuple(messages), data={**question.data, "value": value})

    def demonstration(self, problem: Problem, seed: int) -> str:
        """Returns the teacher's next turn in the conversation of the problem."""
        a, b, c = problem.data["numbers"]
        value = problem.data.get("value", a)  # the result of the last call
        calls = len(problem.messages) // 2
        if calls == 2:
            return f"#{value}"
        slips = derived_random(seed, "slip").random() < self.slips
        return CALL % f"{value}{choose_operation(calls, slips)}{(b, c)[calls]}"

    def alphabet(self) -> str:
        """Returns all characters of prompts and answers: those of ASCII that are printed."""
        return "".join(map(chr, range(32, 127))) + "\n"


def choose_operation(call: int, slips: bool) -> str:
    """Returns the operation of the first call (0) or the second one (1), or with `slips` the other one's."""
    return OPERATIONS[1 - call if slips else call]
