"""Grades a file of answers: JSON lines in, JSON lines out."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from treetune.findings import missing_requirements
from treetune.store.files import write_atomically
from treetune.tasks.base import Task
from treetune.tasks.graders.pool import GraderPool
from treetune.tasks.mixed import task_of
from treetune.tasks.row_values import text_of_value
from treetune.tasks.rows import JsonLines, fault_of_text
from treetune.tasks.sources import read_json_lines
from treetune.vocabulary import CORRECT_SCORE, Grade, Problem

ROW_FIELDS = ("problem", "gold", "response")

_ROWS_IN_FLIGHT = 256
"""Answers that are being graded at a time: enough for all workers, and few to grade again after a kill."""


@dataclass
class ScoredRows:
    """The result of `score_responses`: the number of rows in the output (`rows`), of those that an earlier
    run graded (`resumed`), and of each outcome. `why` is the message of the first row that failed."""

    rows: int = 0
    resumed: int = 0
    correct: int = 0
    no_answer: int = 0
    failed: int = 0
    unavailable: int = 0
    why: str = ""

    def count(self, row: dict[str, Any]) -> None:
        """Counts a row of the output."""
        self.rows += 1
        reward = row["reward"]  # None if the row could not be graded
        self.correct += reward is not None and reward >= CORRECT_SCORE
        self.unavailable += row["outcome"] == "unavailable"
        self.no_answer += row["outcome"] == "no_answer"
        if row["outcome"] in ("timeout", "error"):
            self.failed += 1
            self.why = self.why or row.get("message", row["outcome"])

    @override
    def __str__(self) -> str:
        graded = self.rows - self.unavailable
        share = self.correct / graded if graded else 0.0
        note_on_unavailable = (
            f", {self.unavailable} that could not be graded and don't count" if self.unavailable else ""
        )
        why = f" (the first: {self.why})" if self.why else ""
        return (
            f"{self.rows} responses ({self.resumed} graded before): {self.correct} correct "
            f"({share:.2%}), {self.no_answer} without an answer, {self.failed} timeouts and"
            f" errors{why}{note_on_unavailable}"
        )


def score_responses(
    task: Task,
    source: Path,
    output: Path,
    *,
    steps: bool = False,
    workers: int | None = None,
    deadline: float = 10.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ScoredRows:
    """Grades the rows of `source` with the task's grader and writes them to `output` in their order.

    A row has a `problem`, a `gold` (the reference answer as in the data set) and a `response`; for a mixture
    also its `domain`, and for rows of many data sets its `data_source`. `reward`, `extracted`, `outcome` and
    `seconds` are added, a `message` if something went wrong, and with `steps` also `step_boundaries`. A row
    without one of the three fields gets the outcome ``error``. The reward of a row that could not be graded
    is null.

    If the output exists, the work continues: a torn last line is dropped, graded rows are kept, and rows that
    could not be graded are graded again.

    Args:
        steps: Whether the offsets of step boundaries are added.
        workers: The number of grader processes; None for the default of `GraderPool`.
        deadline: Seconds for the grade of one row.
        progress: Called with the number of rows in the output, and the number of all rows.

    Raises:
        ValueError: The output belongs to another input, an input line isn't a JSON object, or something is
        missing here that the grader needs.
    """
    if absent := missing_requirements(task.grader.parts()):
        raise ValueError(f"answers can't be graded here: {'; '.join(absent)}")
    if source.resolve() == output.resolve():
        raise ValueError(f"--input and --output are the same file, {source}")
    scored = ScoredRows()
    todo = read_json_lines(source)
    total = _count_lines(source)
    # The rows of an earlier run, and the bytes that they take in the file.
    output_rows, length = _read_output(output)
    ungraded: dict[int, dict[str, Any]] = {}
    # For each row of the output, the input's row is taken from the iterator `todo`. After this loop, the
    # iterator has only the input's rows that the output lacks.
    for number, row in enumerate(output_rows):
        input_row = _check_same_row(output, row, next(todo, None), number, steps)
        if row["outcome"] == "unavailable":
            ungraded[number] = input_row
    output.parent.mkdir(parents=True, exist_ok=True)
    with GraderPool(task.grader, workers=workers, deadline=deadline) as pool:
        if ungraded:
            # All rows are submitted before this waits for the first grade, so that the workers are busy.
            submitted = {number: _submit(task, pool, row, number) for number, row in ungraded.items()}
            for number, waiting in submitted.items():
                output_rows[number] = _wait_for_grade(waiting, steps)
            with write_atomically(output, "wb") as file:
                file.writelines(map(_encode_line, output_rows))
            length = output.stat().st_size
        for row in output_rows:
            scored.count(row)
        scored.resumed = len(output_rows) - len(ungraded)
        with output.open("r+b" if output.exists() else "w+b") as file:
            file.truncate(length)  # drops a torn last line
            file.seek(length)
            for row in _grade_rows(task, pool, todo, first_number=len(output_rows), steps=steps):
                file.write(_encode_line(row))
                file.flush()
                scored.count(row)
                progress(scored.rows, total)
            os.fsync(file.fileno())
    return scored


def _grade_rows(
    task: Task, pool: GraderPool, rows: Iterator[tuple[str, dict[str, Any]]], first_number: int, steps: bool
) -> Iterator[dict[str, Any]]:
    """Yields the output's rows for rows of the input, in their order. `_ROWS_IN_FLIGHT` of them are graded at
    a time.

    `rows` are the rows with their locations (``file:line``), and `first_number` is the number of the first
    one.
    """
    waiting: deque[_Waiting] = deque()
    for number, (_, row) in enumerate(rows, start=first_number):
        waiting.append(_submit(task, pool, row, number))
        if len(waiting) >= _ROWS_IN_FLIGHT:
            yield _wait_for_grade(waiting.popleft(), steps)
    while waiting:
        yield _wait_for_grade(waiting.popleft(), steps)


def _encode_line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _count_lines(source: Path) -> int:
    """Counts the lines with content. Wrong rows are reported when they are read."""
    if not source.is_file():
        return 0
    with source.open("rb") as file:
        return sum(1 for line in file if line.strip())


class _Waiting(NamedTuple):
    """A row that is being graded."""

    row: dict[str, Any]
    task_of_row: Task | None
    """In a mixture the task of the row's domain; None if the row can't be graded."""
    grade: Future[Grade]


def _submit(task: Task, pool: GraderPool, row: dict[str, Any], number: int) -> _Waiting:
    """Begins to grade a row. A row without problem, gold or response, or without a grader, gets the outcome
    ``error`` at once."""
    try:
        problem = _make_problem(task, row, number)
        # Graders may be chosen by the row's domain or data source. This raises ValueError if none fits.
        task.grader.of(problem)
    except ValueError as error:
        future: Future[Grade] = Future()
        future.set_result(Grade(reward=0.0, outcome="error", message=f"not graded: {error}"))
        return _Waiting(row, task_of_row=None, grade=future)
    task_of_row = task_of(task, problem)
    return _Waiting(row, task_of_row, grade=pool.submit(row["response"], problem))


def _make_problem(task: Task, row: dict[str, Any], number: int) -> Problem:
    """Returns the problem of a row, with the row's domain and further fields, which graders may read. Raises
    ValueError for a row without problem, gold or response."""
    for key in ("problem", "gold"):
        fault = fault_of_text(row, key)
        if fault:
            raise ValueError(fault)
    if not isinstance(row.get("response"), str):  # unlike the others, it may be empty
        raise ValueError("it has no text under 'response'")
    query = text_of_value(row["problem"])
    prompt = task.fill_prompt(query) if isinstance(task, JsonLines) else query  # other tasks have no template
    data = {key: value for key, value in row.items() if key not in ROW_FIELDS}
    return Problem(
        f"row/{number}", prompt, text_of_value(row["gold"]), data, domain=str(row.get("domain", ""))
    )


def _wait_for_grade(waiting: _Waiting, steps: bool) -> dict[str, Any]:
    """Waits for the grade of a row, and returns the row of the output."""
    row, task_of_row, grade = waiting.row, waiting.task_of_row, waiting.grade.result()
    result = {
        **row,
        "reward": grade.reward if grade.is_known else None,
        "extracted": grade.extracted,
        "outcome": grade.outcome,
        "seconds": round(grade.seconds, 6),
    }
    if grade.message is not None:
        result["message"] = grade.message
    if steps:
        result["step_boundaries"] = None
        if task_of_row is not None:
            result["step_boundaries"] = task_of_row.step_boundaries(row["response"])
    return result


def _read_output(output: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the whole rows of the output so far, and the position in the file at which they end."""
    if not output.exists():
        return [], 0
    output_rows: list[dict[str, Any]] = []
    length = 0
    with output.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break  # torn by the end of an earlier run
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{output}:{len(output_rows) + 1} is not a line of JSON ({error})"
                ) from error
            if not isinstance(row, dict) or not {"reward", "outcome"} <= row.keys():
                raise ValueError(f"{output}:{len(output_rows) + 1} isn't a graded row: name another output")
            output_rows.append(row)
            length += len(line)
    return output_rows, length


def _check_same_row(
    output: Path,
    output_row: dict[str, Any],
    line_and_row_of_input: tuple[str, dict[str, Any]] | None,
    index: int,
    steps: bool,
) -> dict[str, Any]:
    """Returns the input's row that a row of the output grades.

    Raises ValueError if `output_row` grades another row, or has no step boundaries although `steps` asks for
    them.

    Args:
        output_row: The output's row with the number `index`.
        line_and_row_of_input: The place (``file:line``) and the content of the input's row with this number;
            None if the input has fewer rows.
    """
    output_line = f"{output}:{index + 1}"
    if line_and_row_of_input is None:
        raise ValueError(f"{output_line}: more rows than the input has: name another output")
    input_line, input_row = line_and_row_of_input
    if any(output_row.get(key) != input_row.get(key) for key in ROW_FIELDS):
        raise ValueError(f"{output_line} is another answer than {input_line}: name another output")
    if steps and "step_boundaries" not in output_row:
        raise ValueError(
            f"{output_line} was written without --steps: name another output, or leave --steps out"
        )
    return input_row
