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
        one, other = map(int, expression.split("*"))
        return one * other
    one, other = map(int, expression.split("+"))
    return one + other


def right(completion, answer) -> float:
    return float(completion[-1].content.strip() == f"#{answer}")


def load_environment(rows: int = 1000) -> vf.Environment:
    numbers = random.Random(0)
    asked = []
    for _ in range(rows):
        a, b, c = (numbers.randint(2, 99) for _ in range(3))
        asked.append({"question": f"{a}*{b}+{c}", "answer": str(a * b + c)})
    return vf.ToolEnv(
        dataset=Dataset.from_list(asked), tools=[calculate], rubric=vf.Rubric([right]), max_turns=4
    )
