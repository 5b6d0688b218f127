"""Graders that are services, at work: what they are lent, and what they tell."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from treetune.vocabulary import Grade, Problem
from treetune_domains.endpoints.journal import Answer, AnswerJournal, read_answer
from treetune_domains.endpoints.settings import Asking, Place

if TYPE_CHECKING:
    from treetune.tasks.base import Task
    from treetune.tasks.graders.base import Grader

Counts = dict[str, tuple[float, float | None]]
"""Sums by the names of metrics, each with what it is divided by; None: the sum is what is told."""

GradeBy = Callable[["Grader", str, Problem], Grade]
"""Another grader's grade of an answer, which is called where that grader wants to be."""


class Service(Protocol):
    """A grader at work."""

    @property
    def concurrency(self) -> int:
        """Calls at a time."""

    def grade(self, response: str, problem: Problem) -> Grade:
        """As `Grader.grade`; called from several threads."""

    def counted(self) -> Counts:
        """What it has done since this was last asked."""

    def close(self) -> None:
        """Nothing is asked any more."""


@dataclass
class Plain:
    """A grader that needs nothing to be at work."""

    grader: Grader

    @property
    def concurrency(self) -> int:
        return self.grader.concurrency

    def grade(self, response: str, problem: Problem) -> Grade:
        return self.grader.grade(response, problem)

    def counted(self) -> Counts:
        return {}

    def close(self) -> None:
        """It holds nothing."""


@dataclass(frozen=True)
class ServedModel:
    """A language model that the run serves: how it is asked, where it is (which may wait for it), and what it
    is called there. `identity` says which model it is; `failed`, of a place, and `succeeded` tell whoever
    serves it."""

    asking: Asking
    place: Callable[[], Place]
    name: str
    identity: str
    failed: Callable[[Place, str], None] = lambda place, reason: None
    succeeded: Callable[[], None] = lambda: None
    refuse_unusable: Callable[[Task, Sequence[Problem]], None] = lambda task, problems: None
    """Raises ValueError where it can't be asked about answers to the task's problems."""


@dataclass
class Surroundings:
    """What a run lends to services.

    `folder` is where they write down what they were answered, under this process's `name`; None: nowhere.
    `judge` is the model that the run serves to judge answers. One for all graders of a process: close it
    when they are done.
    """

    folder: Path | None = None
    name: str = "0"
    judge: ServedModel | None = None
    _journal: Answers | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def answers(self) -> Answers:
        """What was answered so far, by this process and all earlier ones."""
        with self._lock:
            if self._journal is None:
                self._journal = Answers(self.folder, self.name)
            return self._journal

    def close(self) -> None:
        with self._lock:
            if self._journal is not None:
                self._journal.close()


class Answers:
    """A journal that several threads use, and that knows what other processes had written before it."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._lock = threading.Lock()
        self._others: dict[str, Answer] = {}
        self._own: AnswerJournal | None = None
        if folder is not None:
            path = folder / f"{name}.jsonl"
            self._own = AnswerJournal(path, lambda answer: None)
            for other in sorted(folder.glob("*.jsonl")):
                if other != path:
                    self._others |= _read(other)

    def get(self, key: str) -> Answer | None:
        with self._lock:
            own = None if self._own is None else self._own.get(key)
            return self._others.get(key) if own is None else own

    def add(self, answer: Answer) -> None:
        with self._lock:
            if self._own is None:
                self._others[answer.key] = answer
            else:
                self._own.add(answer)

    def close(self) -> None:
        with self._lock:
            if self._own is not None:
                self._own.close()


def _read(path: Path) -> Mapping[str, Answer]:
    found = {}
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            answer = read_answer(line)
            if answer is not None:
                found[answer.key] = answer
    return found
