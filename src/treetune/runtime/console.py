"""Shows a run's progress on standard error and in its log file, and measures the time of its phases.

On a terminal, a live line shows the present phase. Elsewhere there are plain lines, such as::

    iteration 3: sampling  120 of 512 answers  900 tokens/s  for 2 min  7 min left
"""

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
from typing import IO, TYPE_CHECKING, cast

from typing_extensions import override

from treetune.processes.standard_error import LiveStream, patient_stream
from treetune.store.timeline import Timeline
from treetune.vocabulary import Metrics

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress as RichProgress

LOGGER_NAME = "treetune"
REFRESH_EVERY_S = 0.2
"""The seconds between two updates of the live line on a terminal."""
PRINT_EVERY_S = 60.0
"""The seconds between two plain lines on the progress of a phase, without a terminal."""

Progress = Callable[[int, int], None]
"""Called with (done, total)."""


class Console:
    """Shows phases and messages on standard error (on the first rank) and writes messages to the log file.

    On a terminal, a live line shows the present phase. Elsewhere, a plain line is printed every
    `PRINT_EVERY_S` while a phase lasts. The `timeline` records when each phase began and ended.
    """

    def __init__(self, log_file: Path | None, visible: bool, timeline: Timeline | None = None) -> None:
        self.timeline = timeline or Timeline()
        self._lane = "work"
        """The row of the timeline's drawing in which phases are shown."""
        self._visible = visible
        self._live = visible and sys.stderr.isatty()
        self.log = logging.getLogger(LOGGER_NAME)
        self.log.setLevel(logging.INFO)
        # Handlers of the root logger, which libraries may add, would otherwise print each message again.
        self.log.propagate = False
        self._handlers: list[logging.Handler] = []
        self._file_handler: logging.Handler | None = None
        if log_file is not None:
            log_file.parent.mkdir(parents=True, exist_ok=True)
            self._file_handler = LogFile(log_file)
            self._add(self._file_handler, "%(asctime)s %(levelname)s %(message)s")
        if visible:
            self._add(logging.StreamHandler(sys.stderr), "%(message)s")

    def _add(self, handler: logging.Handler, layout: str) -> None:
        handler.setFormatter(logging.Formatter(layout))
        self.log.addHandler(handler)
        self._handlers.append(handler)

    def say(self, message: str) -> None:
        self.log.info(message)

    def note(self, message: str) -> None:
        """Writes a message to the log file only."""
        if self._file_handler is not None:
            # The message goes to the file's handler directly: the logger would also pass it to standard
            # error.
            record = self.log.makeRecord(self.log.name, logging.INFO, "", 0, message, (), None)
            self._file_handler.handle(record)

    def for_thread(self) -> Console:
        """Returns a console for a second thread, which shows messages but no phases, since the first thread's
        phase has the live line."""
        quiet = copy.copy(self)
        # This hides phases only: messages go to the handlers of the logger, which both consoles share.
        quiet._visible = quiet._live = False
        quiet._lane = "work during training"
        return quiet

    @contextmanager
    def phase(
        self, title: str, unit: str = "", describe: Callable[[], str] = lambda: ""
    ) -> Iterator[Progress]:
        """Shows the progress of a block.

        Args:
            title: The name of the phase, such as "iteration 3: training".
            unit: The unit of its progress, such as "steps".
            describe: Returns further text for the line, such as the engine's speed.

        Yields:
            A function that the block calls with (done, total).
        """
        with self.timeline.span(self._lane, title):
            if self._live:
                with _live_line(title, unit, describe) as show:
                    yield show
            elif self._visible:
                with self._print_regularly(PhaseStatus(title, unit, describe)) as show:
                    yield show
            else:
                yield lambda done, total: None

    @contextmanager
    def _print_regularly(self, status: PhaseStatus) -> Iterator[Progress]:
        """Prints the status every `PRINT_EVERY_S` until the block ends, from a thread."""
        is_over = threading.Event()

        def print_status() -> None:
            while not is_over.wait(PRINT_EVERY_S):
                self.say(str(status))

        printer = threading.Thread(target=print_status, name="console", daemon=True)
        printer.start()
        try:
            yield status.set
        finally:
            is_over.set()
            printer.join()

    def record_failure(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Writes the traceback of a failure to the log file; standard error shows only its message. An exit
        and a Ctrl-C are no failures. The arguments are those of ``__exit__``."""
        if error is None or isinstance(error, SystemExit | KeyboardInterrupt) or self._file_handler is None:
            return
        text = "".join(traceback.format_exception(error_type, error, trace))
        record = self.log.makeRecord(self.log.name, logging.ERROR, "", 0, text, (), None)
        self._file_handler.handle(record)

    def close(self) -> None:
        """Closes the log file and the timeline. The logger is global, so its handlers are removed, too."""
        stream = patient_stream()  # stands in for standard error, and never waits long; None if not in use
        if self._visible and stream is not None and stream.is_behind:
            self.note(
                "standard error takes no output at present, since its terminal is paused or nothing reads the"
                " pipe: the last messages may be only here"
            )
        for handler in self._handlers:
            self.log.removeHandler(handler)
            # Closing writes what is still buffered, which fails on a full disk; `LogFile` has reported that.
            with contextlib.suppress(OSError):
                handler.close()
        self._handlers = []
        self.timeline.close()


class LogFile(logging.FileHandler):
    """A run's log file. If it can't be written, it prints one message, and the run continues.

    Python's logging would print a traceback for each line, and the error that ends the run would be hard to
    find among them.
    """

    _has_printed = False

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not self._has_printed:
            self._has_printed = True
            print(f"{self.baseFilename} can't be written ({error}): its lines end here", file=sys.stderr)


@dataclass
class PhaseStatus:
    """The state of a phase, in one line."""

    title: str
    unit: str
    describe: Callable[[], str]
    done: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        self._started = time.monotonic()

    def set(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    @override
    def __str__(self) -> str:
        elapsed_s = time.monotonic() - self._started
        parts = [self.title]
        if self.total:
            parts.append(f"{self.done} of {self.total} {self.unit}".rstrip())
        if details := self.describe():
            parts.append(details)
        parts.append(f"for {format_duration(elapsed_s)}")
        if 0 < self.done < self.total:
            parts.append(f"{format_duration(elapsed_s * (self.total - self.done) / self.done)} left")
        return "  ".join(parts)


@contextmanager
def _live_line(title: str, unit: str, describe: Callable[[], str]) -> Iterator[Progress]:
    """Shows a line with a progress bar on the terminal until the block ends. Yields the function that updates
    it. The arguments are those of `Console.phase`."""
    from rich.console import Console as RichConsole

    stream = patient_stream()  # stands in for standard error, and never waits long; None if not in use
    console = RichConsole(stderr=True)
    with contextlib.ExitStack() as stack:
        if stream is not None:
            # If the terminal is paused, the line's states are dropped.
            live_stream = LiveStream(stream)
            stack.callback(live_stream.end)
            console.file = cast(IO[str], live_stream)
        progress = stack.enter_context(_progress_bar(console, unit))
        yield _LiveLine(progress, title, describe).show


def _progress_bar(console: RichConsole, unit: str) -> RichProgress:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn(unit),
        TextColumn("{task.fields[details]}"),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
    )


class _LiveLine:
    """A line with a progress bar, which is updated at most every `REFRESH_EVERY_S`."""

    def __init__(self, progress: RichProgress, title: str, describe: Callable[[], str]) -> None:
        self._progress, self._describe = progress, describe
        self._bar = progress.add_task(title, total=None, details=describe())
        self._last_shown = 0.0

    def show(self, done: int, total: int) -> None:
        now = time.monotonic()
        # The last state is always shown; states in between at most every `REFRESH_EVERY_S`.
        if done == total or now - self._last_shown >= REFRESH_EVERY_S:
            self._last_shown = now
            self._progress.update(self._bar, completed=done, total=total, details=self._describe())


def name_iterations(first: int, last: int) -> str:
    """Returns ``iteration 3``, or ``iterations 3 to 5``."""
    return f"iteration {first}" if first == last else f"iterations {first} to {last}"


def format_duration(seconds: float) -> str:
    """Returns seconds in a suitable unit: ``40 s``, ``12 min``, ``3.5 h``.

    A number that would be rounded to 100 is given in the next larger unit.
    """
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


PHASES = ("generation", "credit", "training", "choice", "waiting", "sync", "evaluation", "commit")
"""The phases of an iteration. ``waiting`` is the wait for an engine that is still starting, ``choice`` the
measurement of each epoch's weights."""


class Clock:
    """Adds up the seconds of an iteration by phase; those outside of all phases are ``other``.

    Records each phase in the `timeline`, in the row `lane` of its drawing.
    """

    def __init__(
        self, timeline: Timeline | None = None, iteration: int | None = None, lane: str = "phases"
    ) -> None:
        self._timeline, self._iteration, self._lane = timeline or Timeline(), iteration, lane
        self._start = time.perf_counter()
        self._earlier = 0.0
        """The seconds of phases that earlier processes finished. They passed before `_start`."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.tokens: dict[str, int] = defaultdict(int)
        """The tokens sampled in each phase, on all ranks."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds of a block to a phase, also if the block raises."""
        assert name in PHASES, name
        start = time.perf_counter()
        try:
            with self._timeline.span(self._lane, name, iteration=self._iteration):
                yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def move(self, name: str, to: str, spans: Sequence[tuple[float, float]], tokens: int) -> None:
        """Moves spans of time (in seconds since 1970) and tokens from the phase `name` to the phase `to`,
        whose work was done in these spans."""
        assert name in PHASES and to in PHASES, (name, to)
        for start, end in spans:
            self._timeline.record_past(self._lane, to, start, end, iteration=self._iteration)
            self.seconds[name] -= end - start
            self.seconds[to] += end - start
        self.tokens[name] -= tokens
        self.tokens[to] += tokens

    def record_overlap(self, name: str, other: str, start: float, end: float) -> None:
        """Records in the timeline a span of the phase `name` that ran within the phase `other`. Its seconds
        count towards `other`."""
        self._timeline.record_past(f"phases during {other}", name, start, end, iteration=self._iteration)

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
        """Returns the seconds of each phase, those outside of all phases (``other``), and the total.

        The seconds of phases that earlier processes finished are included.
        """
        total = time.perf_counter() - self._start + self._earlier
        seconds_by_phase = {f"seconds/{name}": self.seconds[name] for name in PHASES}
        return {
            **seconds_by_phase,
            "seconds/other": total - sum(seconds_by_phase.values()),
            "seconds/total": total,
        }
