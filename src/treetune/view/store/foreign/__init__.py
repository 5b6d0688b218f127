"""Answers of other people's runs, as rows like those of an evaluation.

A file is read row by row (`files.py`), and each row is mapped by the reader of its format: Inspect's samples
(`inspect_logs.py`), rollouts of verifiers and prime-rl (`verifiers.py`), and rows that name their fields, as
verl, SkyRL, slime, TRL and W&B write them (`named_fields.py`). A row whose reader fails is shown as it
is, and counted with its reason.
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
    ENDINGS,
    UNREADABLE,
    FileRow,
    first_rows,
    json_lines,
    row_at,
    rows_of,
)
from treetune.view.store.foreign.line import line

__all__ = ["ENDINGS", "FileReport", "answer_at", "answers_in", "holds_answers", "json_lines"]

AS_IT_IS = "shown as it is"
"""The id of the problem that rows which can't be mapped are shown under."""

EXAMPLES = 3
"""Places of rows that can't be mapped which the page names, for each reason."""


@dataclass
class FileReport:
    """What became of a file's rows: `unmapped` and `unread` hold the places of rows by the reason."""

    rows: int = 0
    unmapped: dict[str, list[str]] = field(default_factory=dict)
    unread: dict[str, list[str]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    """What the file says of itself, such as that its evaluation ended with an error."""

    def note(self, name: str) -> str:
        """Says what isn't as it should be; nothing where all rows became answers."""
        parts = list[str]()
        as_they_are = sum(map(len, self.unmapped.values()))
        left_out = sum(map(len, self.unread.values()))
        if as_they_are or left_out:
            shown = self.rows - left_out
            parts.append(f"{name}: {self.rows:,} rows, {shown:,} shown")
        if as_they_are:
            parts.append(f"{as_they_are:,} of these as they are ({_reasons(self.unmapped)})")
        if left_out:
            parts.append(f"{left_out:,} not ({_reasons(self.unread)})")
        parts += [remark if parts else f"{name}: {remark}" for remark in self.remarks]
        return "; ".join(parts)


def _reasons(places: Mapping[str, list[str]]) -> str:
    told = list[str]()
    for reason, where in places.items():
        more = ", …" if len(where) > EXAMPLES else ""
        told.append(f"{reason}: {', '.join(where[:EXAMPLES])}{more}")
    return "; ".join(told)


def answers_in(path: Path, report: FileReport | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the answers of a file as lines of an evaluation, each with its place: the byte where its line
    begins, or its number. Samples of a problem are numbered as they come, where the file
    has no number, or one twice.

    What can't be mapped is counted in `report`. Raises ValueError for a file that can't be read.
    """
    report = FileReport() if report is None else report
    taken: dict[str, set[int]] = {}
    following: Counter[str] = Counter()
    for row in rows_of(path, report.remarks):
        report.rows += 1
        if row.fault:
            report.unread.setdefault(row.fault, []).append(row.where)
            continue
        answer, why = _mapped(row)
        if why:
            report.unmapped.setdefault(why, []).append(row.where)
        problem, sample = answer["problem"], answer["sample"]
        numbers = taken.setdefault(problem, set())
        if sample is None or sample in numbers:
            while following[problem] in numbers:
                following[problem] += 1
            sample = following[problem]
        numbers.add(sample)
        yield row.place, answer | {"sample": sample}


def _mapped(row: FileRow) -> tuple[dict[str, Any], str]:
    """Returns the line of a row, and why it is shown as it is, where it is."""
    try:
        return _answer_of(row), ""
    except UNREADABLE as error:
        known = isinstance(error, ValueError)  # of which NotAnAnswer is one
        why = str(error) if known else f"its fields are not as expected ({type(error).__name__}: {error})"
    try:
        shown = json.dumps(row.content, ensure_ascii=False, indent=1, default=str)
    except RecursionError:
        shown = "[its objects are nested too deep to be written]"
    return line(prompt="", text=shown, reward=None, problem=AS_IT_IS, message=f"{AS_IT_IS}: {why}"), why


def _answer_of(row: FileRow) -> dict[str, Any]:
    content = row.content
    if row.is_inspect:
        return inspect_logs.answer_of(content, row.task)
    if verifiers.is_episode(content):
        return verifiers.answer_of_episode(content)
    if verifiers.is_result(content):
        return verifiers.answer_of_result(content)
    return named_fields.answer_of(content)


def answer_at(path: Path, place: int) -> Mapping[str, Any]:
    """Returns the answer at a place that `answers_in` gave. In a .jsonl file its `sample` is the
    row's own."""
    if path.suffix == ".jsonl":
        return _mapped(row_at(path, place))[0]
    return _answers_by_place(path, stat_of(path))[place]


@functools.lru_cache(maxsize=2)
def _answers_by_place(path: Path, _: object) -> dict[int, dict[str, Any]]:
    """Is cached until the file's size or time changes."""
    return dict(answers_in(path))


def holds_answers(path: Path) -> bool:
    """Returns whether one of the first rows of a file is an answer."""
    return path.suffix in ENDINGS and _holds_answers(path, stat_of(path))


@functools.lru_cache(maxsize=16384)
def _holds_answers(path: Path, _: object) -> bool:
    try:
        return any(map(_is_answer, first_rows(path)))
    except UNREADABLE:
        return False


def _is_answer(row: FileRow) -> bool:
    if row.is_inspect:
        return True
    content = row.content
    if not isinstance(content, Mapping):
        return False
    return verifiers.is_episode(content) or verifiers.is_result(content) or named_fields.is_answer(content)
