"""Graders that judge by rules, and how several files of tests call them."""

from __future__ import annotations

import json

from treetune.tasks.graders.base import Grader
from treetune.vocabulary import Grade, Problem
from treetune_domains.graders.codeio import CodeIO
from treetune_domains.graders.multiple_choice import MultipleChoice
from treetune_domains.graders.puzzles import GridGrader, OrderingGrader, ZebraGrader
from treetune_domains.graders.table import TableGrader
from treetune_domains.graders.tagged import F1, ExactMatch, OneWord

GRADERS: dict[str, Grader] = {
    "codeio": CodeIO(),
    "exact_match": ExactMatch(),
    "f1": F1(),
    "grid": GridGrader(),
    "multiple_choice": MultipleChoice(),
    "one_word": OneWord(),
    "ordering": OrderingGrader(),
    "table": TableGrader(),
    "zebra": ZebraGrader(),
}

ZEBRA = json.dumps(
    {
        "header": ["Position", "Name", "Pet"],
        "rows": [["1", "Ann", "cat"], ["2", "Bob", "dog"], ["3", "Eve", "eel"]],
    }
)


def grade(grader: Grader, response: str, gold: str, prompt: str = "?") -> Grade:
    return grader.grade(response, Problem(id="x", prompt=prompt, gold=gold))


def reward(grader: Grader, response: str, gold: str, prompt: str = "?") -> float:
    return grade(grader, response, gold, prompt).reward


def answer(text: object) -> str:
    return f"<think>so</think> <answer>{text if isinstance(text, str) else json.dumps(text)}</answer>"
