"""Where an iteration's seconds went."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from treetune.store.timeline import Timeline
from treetune.vocabulary import Metrics

PHASES = ("generation", "credit", "training", "choice", "waiting", "sync", "evaluation", "commit")
"""``waiting`` is for an engine that is still starting, ``choice`` for measuring each epoch's weights."""


class Clock:
    """Adds up seconds by phase; what no phase claims is ``other``.

    With a `timeline`, also when each phase of this `iteration` began and ended; `lane` says who is at work.
    """

    def __init__(
        self, timeline: Timeline | None = None, iteration: int | None = None, lane: str = "phases"
    ) -> None:
        self._timeline, self._iteration, self._lane = timeline or Timeline(), iteration, lane
        self._start = time.perf_counter()
        self._earlier = 0.0
        self.seconds: dict[str, float] = defaultdict(float)
        self.tokens: dict[str, int] = defaultdict(int)
        """Sampled tokens of phases, on all ranks."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        assert name in PHASES, name
        start = time.perf_counter()
        try:
            with self._timeline.span(self._lane, name, iteration=self._iteration):
                yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def give(self, name: str, to: str, stretches: Sequence[tuple[float, float]], tokens: int) -> None:
        """Counts parts of one phase with another, which was carried out in the midst of it: from when to
        when, in seconds since 1970."""
        assert name in PHASES and to in PHASES, (name, to)
        for start, end in stretches:
            self._timeline.past(self._lane, to, start, end, iteration=self._iteration)
            self.seconds[name] -= end - start
            self.seconds[to] += end - start
        self.tokens[name] -= tokens
        self.tokens[to] += tokens

    def beside(self, name: str, other: str, start: float, end: float) -> None:
        """Has the timeline tell that one phase was at work beside another, whose seconds these are."""
        self._timeline.past(f"phases beside {other}", name, start, end, iteration=self._iteration)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What happens inside is not counted."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._start += time.perf_counter() - start

    def add_earlier(self, name: str, seconds: float) -> None:
        """Counts a phase that an earlier process finished and left on disk."""
        assert name in PHASES, name
        self.seconds[name] += seconds
        self._earlier += seconds

    def metrics(self) -> Metrics:
        total = time.perf_counter() - self._start + self._earlier
        named = {f"seconds/{name}": self.seconds[name] for name in PHASES}
        return {**named, "seconds/other": total - sum(named.values()), "seconds/total": total}
