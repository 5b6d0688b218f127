"""Answers that were paid for are written down as they come, and found there the next time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treetune.store.journal import Journal, row_of


@dataclass(frozen=True)
class Answer:
    """An answered request. `key` is the hash of what was asked; `complete`, whether the answer came to its
    end; `estimated`, whether the tokens are."""

    key: str
    step: str
    text: str
    complete: bool
    input_tokens: int
    output_tokens: int
    estimated: bool


class AnswerJournal:
    """A journal of answers. Only their positions are kept in memory.

    One process at a time: another is refused with a ValueError. `count` is called for every answer that is
    found there. A row that is no answer counts as not written.
    """

    def __init__(self, path: Path, count: Callable[[Answer], None]) -> None:
        self._journal = Journal(path, exclusive=True)
        for key in self._journal:
            if (answer := self.get(key)) is not None:
                count(answer)

    def get(self, key: str) -> Answer | None:
        return _answer(self._journal.get(key))

    def add(self, answer: Answer) -> None:
        """From here a killed process doesn't lose it."""
        self._journal.add(asdict(answer))

    def close(self) -> None:
        self._journal.close(durable=True)


def read_answer(line: bytes) -> Answer | None:
    """None for a line that is none."""
    try:
        return _answer(json.loads(row_of(line)))
    except ValueError:
        return None


def _answer(row: Any) -> Answer | None:
    try:
        return Answer(**row)
    except TypeError:
        return None
