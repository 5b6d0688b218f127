"""A task's problems as rows that others can train on: verl's schema, in Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treetune.tasks.base import Split, Task
from treetune.vocabulary import Problem
from treetune_domains.domain import DomainTask
from treetune_domains.domain_rows import (
    ABILITY,
    DATA_SOURCE,
    HIGH_PASS_RATE,
    LOW_PASS_RATE,
    domain_row,
    write_parquet,
)

RATES = (LOW_PASS_RATE, HIGH_PASS_RATE)


def export_rows(task: Task, split: Split, path: Path) -> int:
    """Writes a split of any task to a Parquet file, one row a problem in their order; how many.

    A row's ``data_source`` is the problem's, or else its domain and the type of its task
    (``logic__countdown``). What a problem's `data` holds is in ``extra_info``, with its ``split``, ``index``
    and ``id``. Raises ValueError for a split that the task doesn't have.
    """
    rows = [row_of(task, one, split, index) for index, one in enumerate(task.problems(split))]
    write_parquet(path, rows)
    return len(rows)


def row_of(task: Task, problem: Problem, split: Split, index: int) -> dict[str, Any]:
    data = dict(problem.data)
    source = data.pop(DATA_SOURCE, None) or f"{problem.domain or 'task'}__{_type_name(task.of(problem))}"
    ability = data.pop(ABILITY, "") or problem.domain
    rates = {name: data.pop(name) for name in RATES if name in data}
    messages = [vars(message) for message in problem.messages]
    row = domain_row(
        source,
        messages or problem.prompt,
        problem.gold,
        ability=ability,
        extra_info={**data, "split": split, "index": index, "id": problem.id},
        raw_prompt=problem.prompt if problem.as_is else "",
        apply_chat_template=not problem.as_is,
    )
    return {**row, **rates}


def _type_name(task: Task) -> str:
    own = task.task if isinstance(task, DomainTask) else task
    return next(name for name, part in Task.registered().items() if part is type(own))
