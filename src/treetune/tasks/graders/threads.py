"""Threads that wait for a service: calls at work, none of which anybody waits for too long."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from treetune.tasks.graders.process import Work
from treetune.vocabulary import GradeOutcome

_LOST_AT_MOST = 4
"""So many times the threads may be lost in calls that don't return; then nothing is asked any more until
some have."""


class ServiceThreads:
    """Calls of `answer`, which raises nothing, with the arguments of work: `concurrency` at a time, each
    within its deadline. `settle` is given the results, and `lost` makes that of a call which was given up.

    A call can't be ended from outside. One that is overdue is left to itself and its result is
    ``unavailable``; another thread takes the place of its own. Threads end with this process.
    """

    def __init__(
        self,
        answer: Callable[..., Any],
        concurrency: int,
        settle: Callable[[Work, Any], None],
        lost: Callable[[GradeOutcome, str, float], Any],
    ) -> None:
        self._answer, self._concurrency = answer, concurrency
        self._settle, self._lost_result = settle, lost
        self._changed = threading.Condition()
        self._queue: deque[Work] = deque()
        self._running: dict[int, tuple[Work, float]] = {}
        self._idle = self._lost = self._numbers = 0
        self._closed = False
        self._watcher: threading.Thread | None = None

    def add(self, work: Work) -> None:
        with self._changed:
            self._queue.append(work)
            if self._watcher is None:
                self._watcher = _started(self._watch, "service calls")
            self._staff()
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more is asked, and nothing more is settled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _staff(self) -> None:
        """A further thread, where there is work for it. With the lock held."""
        if len(self._queue) > self._idle and self._idle + len(self._running) < self._concurrency:
            self._numbers += 1
            self._idle += 1
            number = self._numbers
            _started(lambda: self._work(number), f"service call {number}")

    def _work(self, number: int) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._closed):
                    self._changed.wait()
                self._idle -= 1
                if self._closed:
                    return
                work = self._queue.popleft()
                self._running[number] = work, time.monotonic() + work.deadline
                self._changed.notify_all()
            result = self._answer(*work.arguments)
            with self._changed:
                if self._running.pop(number, None) is None:
                    self._lost -= 1
                    return
                self._idle += 1
            if not self._closed:
                self._settle(work, result)

    def _watch(self) -> None:
        """Gives up what is overdue, and what there is nobody left to ask for."""
        while not self._closed:
            given_up: list[tuple[Work, str]] = []
            with self._changed:
                due = min((at for _, at in self._running.values()), default=None)
                self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))
                now = time.monotonic()
                for number, (work, at) in list(self._running.items()):
                    if at <= now:
                        del self._running[number]
                        self._lost += 1
                        given_up.append((work, work.too_long))
                if self._lost >= _LOST_AT_MOST * self._concurrency:
                    why = f"not asked: {self._lost} earlier calls have not returned"
                    given_up += [(work, why) for work in self._queue]
                    self._queue.clear()
                self._staff()
            for work, why in given_up:
                self._settle(work, self._lost_result("unavailable", why, 0.0))


def _started(what: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=what, name=name, daemon=True)
    thread.start()
    return thread
