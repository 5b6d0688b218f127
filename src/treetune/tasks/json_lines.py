"""Problems from files of rows: what the tasks in natural language have in common."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import MinLen

from treetune.tasks.graders.base import Grader
from treetune.tasks.rows import BadRow, RowsTask
from treetune.tasks.steps.base import StepSplitter
from treetune.vocabulary import Problem

PROBLEM = "{problem}"

PROMPT = "[MATH_TASK] Problem:\n{problem}\n\nSolution:"
"""The VinePPO paper's zero-shot prompt. Nothing follows the colon: a response begins with a newline."""

STOP = ("\n\n\nProblem:",)
"""Where the paper's models would go on with a problem of their own making."""


@dataclass(frozen=True, kw_only=True)
class JsonLines(RowsTask):
    """Problems with a text and a gold answer, and what to ask a model about them. Where they come
    from, and what is held out, is said in `RowsTask`.

    `problem_field`, `gold_field` and `demonstration_field` name the keys of a row. The gold stays
    as it stands in the data set, a worked solution or a bare answer: graders take the answer out of
    it. Where a row has none, `gold_fallback` names another key to look at. The gold is also the
    demonstration, unless `demonstration_field` names a key. Rows may have the fields `keep`, which
    go into `Problem.data` as they are.

    `prompt` is the template, with ``{problem}`` where the problem goes. `stop` holds the stop
    strings that go with it; a rollout names them as its own `stop`.
    """

    problem_field: Annotated[str, MinLen(1)] = "question"
    gold_field: Annotated[str, MinLen(1)] = "answer"
    gold_fallback: str | None = None
    demonstration_field: str | None = None
    keep: tuple[str, ...] = ()
    prompt: str = PROMPT
    stop: tuple[str, ...] = STOP
    grader: Grader
    steps: StepSplitter

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt.count(PROBLEM) != 1:
            raise ValueError(f"prompt needs {PROBLEM} exactly once, where the problem goes")
        if "" in self.stop:
            raise ValueError("stop has an empty string, which would end every answer at once")

    def prompted(self, problem: str) -> str:
        """The problem in the template. (Not `str.format`: problems are full of braces.)"""
        return self.prompt.replace(PROBLEM, problem.strip())

    def demonstration(self, problem: Problem, seed: int) -> str:
        """The data set's own solution, on the line below the prompt; the seed changes nothing."""
        return "\n" + self.solution(str(problem.data["solution"]).strip())

    def solution(self, text: str) -> str:
        """The data set's solution as a model should write it."""
        return text

    def step_boundaries(self, response: str) -> list[int]:
        return self.steps.boundaries(response)

    def answer_boundaries(self, response: str) -> list[int]:
        return self.steps.answer_boundaries(response)

    def problem_of(self, row: dict[str, Any], id: str) -> Problem:
        gold_field, other = self.gold_field, self.gold_fallback
        if other is not None and missing(row, gold_field) and not missing(row, other):
            gold_field = other
        fields = {"problem": self.problem_field, "gold answer": gold_field}
        if self.demonstration_field is not None:
            fields["demonstration"] = self.demonstration_field
        for what, key in fields.items():
            wrong = missing(row, key)
            if wrong is not None:
                raise BadRow(f"a row without a {what}: {wrong}")
        solution = as_text(row[self.demonstration_field or gold_field])
        return Problem(
            id=id,
            prompt=self.prompted(as_text(row[self.problem_field])),
            gold=as_text(row[gold_field]),
            data={**{key: row[key] for key in self.keep if key in row}, "solution": solution},
        )


def missing(row: dict[str, Any], key: str) -> str | None:
    """What is wrong with a row's text under `key`, or None: numbers count as text."""
    if key not in row:
        return f"it has no {key!r} (it has {', '.join(map(repr, sorted(row))) or 'nothing'})"
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return f"its {key!r} is {type(value).__name__}, not text"
    return None if str(value).strip() else f"its {key!r} is empty"


def as_text(value: str | int | float) -> str:
    return value if isinstance(value, str) else json.dumps(value)
