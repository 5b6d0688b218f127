"""Answers that were paid for are written down as they come, and found there the next time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from treetune.store.journal import Journal


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
    """A journal of answers, kept in memory where `path` is None. Answers in the files `others` are found too.

    One process at a time: another is refused with a ValueError. `count` is called for every answer that is
    found there. A row that is no answer counts as not written. Safe to use from several threads.
    """

    def __init__(
        self, path: Path | None, count: Callable[[Answer], None] | None = None, others: Sequence[Path] = ()
    ) -> None:
        self._memory: dict[str, Answer] = {}
        self._journal = None if path is None else Journal(path, others, exclusive=True)
        if self._journal is not None and count is not None:
            for key in self._journal:
                if (answer := self.get(key)) is not None:
                    count(answer)

    def get(self, key: str) -> Answer | None:
        if self._journal is None:
            return self._memory.get(key)
        row = self._journal.get(key)
        try:
            return None if row is None else Answer(**row)
        except TypeError:
            return None

    def add(self, answer: Answer) -> None:
        """From here a killed process doesn't lose it."""
        if self._journal is None:
            self._memory[answer.key] = answer
        else:
            self._journal.add(asdict(answer))

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close(durable=True)
