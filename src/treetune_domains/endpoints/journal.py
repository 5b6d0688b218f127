"""Answers that were paid for are written down as they come, and found there the next time."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from treetune.store.checksums import row_of, sealed_line


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
    """A file of JSON lines, one per answer. Only where they stand is kept in memory.

    One process at a time: another is refused with a ValueError. `count` is called for every answer that is
    found there. A last line that a crash cut short is cut off; a line that is no answer (a crash of the
    machine can leave such) counts as not written.
    """

    def __init__(self, path: Path, count: Callable[[Answer], None]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(
                f"another process is at work in {path.parent}: wait for it, or name another output"
            ) from error
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                answer = read_answer(line)
                if answer is not None and answer.key not in self._places:
                    self._places[answer.key] = (end, len(line))
                    count(answer)
                end += len(line)
        self._file.truncate(end)
        self._end = end

    def get(self, key: str) -> Answer | None:
        place = self._places.get(key)
        if place is None:
            return None
        answer = read_answer(os.pread(self._file.fileno(), place[1], place[0]))
        assert answer is not None and answer.key == key
        return answer

    def add(self, answer: Answer) -> None:
        """From here a killed process doesn't lose it."""
        line = sealed_line(json.dumps(asdict(answer), separators=(",", ":"))).encode()
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self._places[answer.key] = (self._end, len(line))
        self._end += len(line)

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def read_answer(line: bytes) -> Answer | None:
    """None for a line that is none."""
    try:
        return Answer(**json.loads(row_of(line)))
    except (ValueError, TypeError):
        return None
