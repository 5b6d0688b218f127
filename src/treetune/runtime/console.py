"""Shows a run to people (one live line on a terminal, plain lines elsewhere and in the log), and keeps its
time."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from typing_extensions import override

from treetune.store.timeline import Timeline
from treetune.vocabulary import Metrics

LOGGER = "treetune"
SHOWN_EVERY_S = 0.2
SAID_EVERY_S = 60.0
"""Without a terminal, a phase that goes on says how far it is as often as this."""

Progress = Callable[[int, int], None]
"""Called with (done, total)."""


class Console:
    """Live lines on a terminal (first rank only); everything finished goes to the log as well.

    Where standard error is no terminal, each finished phase is a plain line there, and so is one that goes
    on for long, every `SAID_EVERY_S`. `timeline` keeps when each phase began and ended.
    """

    def __init__(self, log_file: Path | None, visible: bool, timeline: Timeline | None = None) -> None:
        self.timeline, self._lane = timeline or Timeline(), "work"
        self._visible, self._live = visible, visible and sys.stderr.isatty()
        self.log = logging.getLogger(LOGGER)
        self.log.setLevel(logging.INFO)
        self.log.propagate = False
        self._handlers: list[logging.Handler] = []
        self._file: logging.Handler | None = None
        if log_file is not None:
            log_file.parent.mkdir(parents=True, exist_ok=True)
            self._file = LogFile(log_file)
            self._add(self._file, "%(asctime)s %(levelname)s %(message)s")
        if visible:
            self._add(logging.StreamHandler(sys.stderr), "%(message)s")

    def _add(self, handler: logging.Handler, layout: str) -> None:
        handler.setFormatter(logging.Formatter(layout))
        self.log.addHandler(handler)
        self._handlers.append(handler)

    def say(self, message: str) -> None:
        self.log.info(message)

    def for_thread(self) -> Console:
        """Returns a console for a thread beside a phase that is shown: it says its lines, and shows no
        progress."""
        quiet = copy.copy(self)
        quiet._visible = quiet._live = False
        quiet._lane = "work beside training"
        return quiet

    @contextmanager
    def phase(self, what: str, unit: str = "", words: Callable[[], str] = lambda: "") -> Iterator[Progress]:
        """Shows the progress of a block, which calls what it is given with (done, total). `words` returns
        what else is worth knowing just then."""
        with self.timeline.span(self._lane, what):
            if self._live:
                with _live_line(what, unit, words) as show:
                    yield show
            elif self._visible:
                with self._printed_now_and_then(PhaseStatus(what, unit, words)) as show:
                    yield show
            else:
                yield lambda done, total: None

    @contextmanager
    def _printed_now_and_then(self, status: PhaseStatus) -> Iterator[Progress]:
        over = threading.Event()

        def speak() -> None:
            while not over.wait(SAID_EVERY_S):
                self.say(str(status))

        speaker = threading.Thread(target=speak, name="console", daemon=True)
        speaker.start()
        try:
            yield status.set
        finally:
            over.set()
            speaker.join()

    def record_failure(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Writes a traceback to the log file, as an exit callback; a person gets one message elsewhere."""
        if error is None or isinstance(error, SystemExit | KeyboardInterrupt) or self._file is None:
            return
        text = "".join(traceback.format_exception(kind, error, trace))
        record = self.log.makeRecord(self.log.name, logging.ERROR, "", 0, text, (), None)
        self._file.handle(record)

    def close(self) -> None:
        for handler in self._handlers:
            self.log.removeHandler(handler)
            with contextlib.suppress(OSError):  # what a full disk kept from being written
                handler.close()
        self._handlers = []
        self.timeline.close()


class LogFile(logging.FileHandler):
    """A run's log. Where it can't be written, people are told once, and the run goes on: what failed on the
    same disk has a message of its own, which logging's tracebacks would bury."""

    _was_told = False

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not self._was_told:
            self._was_told = True
            print(f"{self.baseFilename} can't be written ({error}): its lines end here", file=sys.stderr)


@dataclass
class PhaseStatus:
    """The state of a phase, in one line."""

    what: str
    unit: str
    words: Callable[[], str]
    done: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        self._started = time.monotonic()

    def set(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    @override
    def __str__(self) -> str:
        passed = time.monotonic() - self._started
        parts = [self.what]
        if self.total:
            parts.append(f"{self.done} of {self.total} {self.unit}".rstrip())
        if more := self.words():
            parts.append(more)
        parts.append(f"for {duration(passed)}")
        if 0 < self.done < self.total:
            parts.append(f"{duration(passed * (self.total - self.done) / self.done)} left")
        return "  ".join(parts)


@contextmanager
def _live_line(what: str, unit: str, words: Callable[[], str]) -> Iterator[Progress]:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    last = 0.0
    with RichProgress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn(unit),
        TextColumn("{task.fields[words]}"),
        TimeRemainingColumn(compact=True),
        console=RichConsole(stderr=True),
        transient=True,
    ) as progress:
        bar = progress.add_task(what, total=None, words=words())

        def show(done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if done == total or now - last >= SHOWN_EVERY_S:
                last = now
                progress.update(bar, completed=done, total=total, words=words())

        yield show


def duration(seconds: float) -> str:
    """Returns seconds in the unit that says it best: ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


PHASES = ("generation", "credit", "training", "choice", "waiting", "sync", "evaluation", "commit")
"""``waiting`` is for an engine that is still starting, ``choice`` for measuring each epoch's weights."""


class Clock:
    """Adds up seconds by phase; the seconds of no phase are ``other``.

    A `timeline` gets the beginning and end of each phase of this `iteration`; `lane` says who is at work.
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

    def move(self, name: str, to: str, stretches: Sequence[tuple[float, float]], tokens: int) -> None:
        """Counts stretches of one phase, from when to when in seconds since 1970, as another's, which was
        carried out in the midst of it."""
        assert name in PHASES and to in PHASES, (name, to)
        for start, end in stretches:
            self._timeline.past(self._lane, to, start, end, iteration=self._iteration)
            self.seconds[name] -= end - start
            self.seconds[to] += end - start
        self.tokens[name] -= tokens
        self.tokens[to] += tokens

    def beside(self, name: str, other: str, start: float, end: float) -> None:
        """Draws one phase in the timeline beside another, whose seconds these are."""
        self._timeline.past(f"phases beside {other}", name, start, end, iteration=self._iteration)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops the clock for a block."""
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
