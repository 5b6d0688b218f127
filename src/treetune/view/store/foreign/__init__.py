"""Reads answers that other programs stored, and gives them the form of lines of an evaluation's file.

A file is read row by row (`files.py`), and each row is mapped by the reader of its format: Inspect's samples
(`inspect_logs.py`), rollouts of verifiers and prime-rl (`verifiers.py`), and rows that name their fields, as
verl, SkyRL, slime, TRL and W&B write them (`named_fields.py`). A row that can't be mapped is shown as
JSON, and counted with the reason.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treetune.view.store.folders import stat_of
from treetune.view.store.foreign import inspect_logs, named_fields, verifiers
from treetune.view.store.foreign.files import (
    ANSWER_FILE_ENDINGS,
    READING_ERRORS,
    FileRow,
    first_rows,
    json_lines,
    read_rows,
    row_at,
)
from treetune.view.store.foreign.line import make_line

__all__ = [
    "ANSWER_FILE_ENDINGS",
    "FileReport",
    "MappedRow",
    "answer_at",
    "answers_in",
    "holds_answers",
    "json_lines",
    "read_mapped_rows",
]

PROBLEM_OF_UNMAPPED = "shown as JSON"
"""The name of the problem under which rows that can't be mapped are shown."""

MOST_EXAMPLES = 3
"""The most rows that a message names for each reason."""


@dataclass
class FileReport:
    """A report on the rows of a file: how many there are, and which of them are not answers.

    Example: `FileReport(rows=3, unread={"can't be read as JSON": ["line 2"]})`.
    """

    rows: int = 0
    """The number of all rows."""
    unmapped: dict[str, list[str]] = field(default_factory=dict)
    """The names of the rows that are shown as JSON, by the reason."""
    unread: dict[str, list[str]] = field(default_factory=dict)
    """The names of the rows that are left out, by the reason."""
    remarks: list[str] = field(default_factory=list)
    """Remarks on the whole file, such as that its evaluation ended with an error."""

    def note(self, name: str) -> str:
        """Returns a message about the file `name`, which is empty if there is nothing to say.

        It says how many rows did not become answers, and why, and ends with the remarks.
        """
        parts = list[str]()
        unmapped = sum(map(len, self.unmapped.values()))
        unread = sum(map(len, self.unread.values()))
        if unmapped or unread:
            parts.append(f"{name}: {self.rows:,} rows, {self.rows - unread:,} shown")
        if unmapped:
            parts.append(f"{unmapped:,} of these as JSON ({_format_reasons(self.unmapped)})")
        if unread:
            parts.append(f"{unread:,} not ({_format_reasons(self.unread)})")
        parts += [remark if parts else f"{name}: {remark}" for remark in self.remarks]
        return "; ".join(parts)


def _format_reasons(rows_by_reason: Mapping[str, list[str]]) -> str:
    """Formats reasons with examples: "has no prompt: line 3, line 7"."""
    texts = list[str]()
    for reason, rows in rows_by_reason.items():
        ellipsis = ", …" if len(rows) > MOST_EXAMPLES else ""
        texts.append(f"{reason}: {', '.join(rows[:MOST_EXAMPLES])}{ellipsis}")
    return "; ".join(texts)


@dataclass(frozen=True)
class MappedRow:
    """A row of a file, and the line of an evaluation that was made from it."""

    row: FileRow
    line: dict[str, Any]
    why_unmapped: str
    """The reason why the line shows the row as JSON; empty if the row could be mapped."""


def answers_in(path: Path, report: FileReport | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (place, line) for each answer of a file, where the line has the form of an evaluation's line.

    The place is the byte where the answer's line begins in the file or, if the file doesn't have lines, the
    number of its row. `report` and errors are those of `read_mapped_rows`.
    """
    for mapped in read_mapped_rows(path, FileReport() if report is None else report):
        yield mapped.row.place, mapped.line


def read_mapped_rows(path: Path, report: FileReport) -> Iterator[MappedRow]:
    """Yields the rows of a file that can be read, each as the line of an evaluation.

    An answer without a sample number gets the next free number of its problem, and so does an answer whose
    number an earlier answer to the problem has. Rows that can't be read or mapped are counted in `report`.
    Raises ValueError for a file that can't be read.
    """
    used_numbers: dict[str, set[int]] = {}  # by problem
    next_number: Counter[str] = Counter()
    for row in read_rows(path, report.remarks):
        report.rows += 1
        if row.fault:
            report.unread.setdefault(row.fault, []).append(row.name)
            continue
        answer, why_unmapped = _map_row(row)
        if why_unmapped:
            report.unmapped.setdefault(why_unmapped, []).append(row.name)
        problem, sample = answer["problem"], answer["sample"]
        numbers_in_use = used_numbers.setdefault(problem, set())
        if sample is None or sample in numbers_in_use:
            while next_number[problem] in numbers_in_use:
                next_number[problem] += 1
            sample = next_number[problem]
        numbers_in_use.add(sample)
        yield MappedRow(row, answer | {"sample": sample}, why_unmapped)


def _map_row(row: FileRow) -> tuple[dict[str, Any], str]:
    """Returns (line, reason) for a row. The reason why the line shows the row as JSON is empty if the row
    could be mapped."""
    try:
        return _map_answer(row), ""
    except READING_ERRORS as error:
        if isinstance(error, ValueError):  # such as NotAnAnswer, whose message is for people
            reason = str(error)
        else:
            reason = f"its fields are not as expected ({type(error).__name__}: {error})"
    try:
        text = json.dumps(row.content, ensure_ascii=False, indent=1, default=str)
    except RecursionError:
        text = "[its objects are nested too deeply to be written]"
    unmapped = make_line(
        prompt="",
        text=text,
        reward=None,
        problem=PROBLEM_OF_UNMAPPED,
        message=f"{PROBLEM_OF_UNMAPPED}: {reason}",
    )
    return unmapped, reason


def _map_answer(row: FileRow) -> dict[str, Any]:
    """Returns a row in the form of a line of an evaluation, from the reader of the row's format.

    `named_fields` comes last, because it accepts every row that has fields such as a prompt and an answer. It
    would also accept a row of the library verifiers, and lose the fields that only verifiers writes.
    """
    content = row.content
    if row.is_inspect:
        return inspect_logs.answer_of(content, row.task)
    if verifiers.is_episode(content):
        return verifiers.answer_of_episode(content)
    if verifiers.is_result(content):
        return verifiers.answer_of_result(content)
    return named_fields.answer_of(content)


def answer_at(path: Path, place: int) -> Mapping[str, Any]:
    """Returns the answer at a place that `answers_in` yielded.

    Of a .jsonl file, only this row is read. So the answer has the sample number of the row, or none, where
    `answers_in` may have given it a new number.
    """
    if path.suffix == ".jsonl":
        answer, _ = _map_row(row_at(path, place))
        return answer
    return _answers_by_place(path, stat_of(path))[place]


@functools.lru_cache(maxsize=2)
def _answers_by_place(path: Path, stat: object) -> dict[int, dict[str, Any]]:
    """Returns all answers of a file by their places, which are the numbers of their rows.

    `stat` is only a part of the cache's key, so that a changed file is read again.
    """
    return dict(answers_in(path))


def holds_answers(path: Path) -> bool:
    """Returns whether one of the first rows of a file is an answer."""
    return path.suffix in ANSWER_FILE_ENDINGS and _holds_answers(path, stat_of(path))


@functools.lru_cache(maxsize=16384)
def _holds_answers(path: Path, stat: object) -> bool:
    """Returns whether one of the first rows is an answer.

    `stat` is only a part of the cache's key, so that a changed file is read again.
    """
    try:
        return any(map(_is_answer, first_rows(path)))
    except READING_ERRORS:
        return False


def _is_answer(row: FileRow) -> bool:
    """Returns whether a row has the form of an answer that one of the readers maps."""
    if row.is_inspect:
        return True
    content = row.content
    if not isinstance(content, Mapping):
        return False
    return verifiers.is_episode(content) or verifiers.is_result(content) or named_fields.is_answer(content)
