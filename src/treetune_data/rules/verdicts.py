"""Grades that outlive a killed process."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from treetune.vocabulary import Grade
from treetune_data.lines import whole_lines


class VerdictJournal:
    """A file of JSON lines: what was asked, by a hash, and how it ended. A line that a crash cut short is
    cut off."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, dict[str, Any]] = {
            row["key"]: row for row in whole_lines(path, repair=True) if "key" in row
        }
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def get(self, key: str) -> dict[str, Any] | None:
        return self._known.get(key)

    def add(self, key: str, grade: Grade) -> dict[str, Any]:
        """From here a killed process doesn't lose it. Raises RuntimeError for a grade that says nothing of
        the answer, because what grades isn't there."""
        if grade.outcome == "unavailable":
            raise RuntimeError(
                f"answers can't be graded: {grade.message}. What was graded is kept: the same command goes on"
            )
        words = f"{grade.reward:g} ({grade.outcome})" + (f": {grade.message[:200]}" if grade.message else "")
        row = {"key": key, "correct": grade.correct, "words": words}
        self._known[key] = row
        self._file.write(json.dumps(row).encode() + b"\n")
        return row
