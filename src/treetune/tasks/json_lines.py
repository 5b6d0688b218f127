"""Problems from files of rows: what the tasks in natural language have in common."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Gt, MinLen

from treetune.seeds import derived_random
from treetune.tasks.base import Split, Task
from treetune.tasks.graders.base import Grader
from treetune.tasks.sources import Row, Source, json_lines
from treetune.tasks.steps.base import StepSplitter
from treetune.vocabulary import Problem

log = logging.getLogger(__name__)

PROBLEM = "{problem}"

PROMPT = "[MATH_TASK] Problem:\n{problem}\n\nSolution:"
"""The VinePPO paper's zero-shot prompt. Nothing follows the colon: a response begins with a newline."""

STOP = ("\n\n\nProblem:",)
"""Where the paper's models would go on with a problem of their own making."""


@dataclass(frozen=True, kw_only=True)
class JsonLines(Task):
    """Problems from files with one JSON object a line, and what to ask a model about them.

    `train`, `validation` and `test` name the files of each split, relative to the working
    directory; several files are read one after the other. Where `source` is given (a Hugging Face
    data set, on disk or from the hub), all splits come from there and no file is read. With
    `validation_size`, the validation split is that many problems held out of train, chosen with
    `split_seed`, which is not the run's seed: every run is measured on the same problems. Both
    parts keep the order of the rows.

    `problem_field`, `gold_field` and `demonstration_field` name the keys of a row. The gold stays
    as it stands in the data set, a worked solution or a bare answer: graders take the answer out of
    it. Where a row has none, `gold_fallback` names another key to look at. The gold is also the
    demonstration, unless `demonstration_field` names a key. Rows may have the fields `keep`, which
    go into `Problem.data` as they are. A row without a problem or a gold answer stops the run, or
    is left out with a warning where `bad_rows` is ``skip``.

    `prompt` is the template, with ``{problem}`` where the problem goes. `stop` holds the stop
    strings that go with it; a rollout names them as its own `stop`.
    """

    train: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    source: Source | None = None
    validation_size: Annotated[int, Gt(0)] | None = None
    split_seed: int = 0
    problem_field: Annotated[str, MinLen(1)] = "question"
    gold_field: Annotated[str, MinLen(1)] = "answer"
    gold_fallback: str | None = None
    demonstration_field: str | None = None
    keep: tuple[str, ...] = ()
    bad_rows: Literal["stop", "skip"] = "stop"
    prompt: str = PROMPT
    stop: tuple[str, ...] = STOP
    grader: Grader
    steps: StepSplitter

    def __post_init__(self) -> None:
        if self.prompt.count(PROBLEM) != 1:
            raise ValueError(f"prompt needs {PROBLEM} exactly once, where the problem goes")
        if "" in self.stop:
            raise ValueError("stop has an empty string, which would end every answer at once")
        if self.validation and self.validation_size is not None:
            raise ValueError(
                "validation names files and validation_size holds problems out of the train files: "
                "leave one of them out"
            )

    def problems(self, split: Split) -> Sequence[Problem]:
        """Raises ValueError for a split that is missing or holds no problem, and for a bad row."""
        if split not in get_args(Split):
            raise ValueError(f"no split {split!r}: choose one of {', '.join(get_args(Split))}")
        return _problems(self, split)

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


@lru_cache(maxsize=16)
def _problems(task: JsonLines, split: Split) -> tuple[Problem, ...]:
    if split == "validation" and task.validation_size is not None:
        return tuple(_part(task, held_out=True))
    if split == "train" and task.validation_size is not None:
        return tuple(_part(task, held_out=False))
    return tuple(_read(task, split))


def _part(task: JsonLines, held_out: bool) -> list[Problem]:
    """The train problems that are, or are not, the validation split. Ids stay those of the row."""
    problems = _read(task, "train")
    size = task.validation_size
    assert size is not None
    if size >= len(problems):
        raise ValueError(
            f"validation_size is {size}, but the train split holds {len(problems)} problems: "
            "hold out fewer than there are"
        )
    chosen = derived_random(task.split_seed, "validation").sample(range(len(problems)), size)
    out = set(chosen)
    return [problem for index, problem in enumerate(problems) if (index in out) is held_out]


def _read(task: JsonLines, split: Split) -> list[Problem]:
    problems: list[Problem] = []
    place = ""
    for place, row in task.source.rows(split) if task.source else _from_files(task, split):
        problem = _problem(task, row, f"{split}/{len(problems)}", place)
        if problem is not None:
            problems.append(problem)
    if not problems:
        where = f"no good row up to {place}" if place else "there are no rows in it"
        raise ValueError(f"the {split} split is empty: {where}")
    return problems


def _from_files(task: JsonLines, split: Split) -> Iterator[Row]:
    names: tuple[str, ...] = {"train": task.train, "validation": task.validation, "test": task.test}[split]
    if not names:
        remedy = " or set validation_size, to hold problems out of train" if split == "validation" else ""
        raise ValueError(f"the task has no {split} split: name its files under {split!r}{remedy}")
    for name in names:
        yield from json_lines(Path(name))


def _problem(task: JsonLines, row: dict[str, Any], id: str, place: str) -> Problem | None:
    gold_field = task.gold_field
    if task.gold_fallback is not None and missing(row, gold_field) and not missing(row, task.gold_fallback):
        gold_field = task.gold_fallback
    fields = {"problem": task.problem_field, "gold answer": gold_field}
    if task.demonstration_field is not None:
        fields["demonstration"] = task.demonstration_field
    for what, key in fields.items():
        wrong = missing(row, key)
        if wrong is None:
            continue
        message = f"{place}: a row without a {what}: {wrong}"
        if task.bad_rows == "stop":
            raise ValueError(f"{message}; put it right, or set bad_rows to 'skip'")
        log.warning("%s; left out", message)
        return None
    solution = as_text(row[task.demonstration_field or gold_field])
    return Problem(
        id=id,
        prompt=task.prompted(as_text(row[task.problem_field])),
        gold=as_text(row[gold_field]),
        data={**{key: row[key] for key in task.keep if key in row}, "solution": solution},
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
