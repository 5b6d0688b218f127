"""The questions of `calculator.py` as an environment of verifiers, without anything of treetune."""

import random

import verifiers as vf
from datasets import Dataset


def calculate(expression: str) -> int:
    """Multiplies or adds two whole numbers.

    Args:
        expression: One operation, such as 12*34 or 12+34.
    """
    if "*" in expression:
        left, right = map(int, expression.split("*"))
        return left * right
    left, right = map(int, expression.split("+"))
    return left + right


def is_correct(completion, answer) -> float:
    """Returns 1 if the last message is "#" and the answer, and 0 if not."""
    return float(completion[-1].content.strip() == f"#{answer}")


def load_environment(rows: int = 1000) -> vf.Environment:
    generator = random.Random(0)
    questions = []
    for _ in range(rows):
        a, b, c = (generator.randint(2, 99) for _ in range(3))
        questions.append({"question": f"{a}*{b}+{c}", "answer": str(a * b + c)})
    return vf.ToolEnv(
        dataset=Dataset.from_list(questions), tools=[calculate], rubric=vf.Rubric([is_correct]), max_turns=4
    )
