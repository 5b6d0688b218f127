"""What a person sees of a run: one live line per phase on a terminal, plain lines in the log."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

LOGGER = "treetune"
SHOWN_EVERY_S = 0.2


class Console:
    """Live lines on a terminal (first rank only); everything finished goes to the log as well.

    Where standard error is no terminal, each finished phase is a plain line there.
    """

    def __init__(self, log_file: Path | None, visible: bool) -> None:
        self._live = visible and sys.stderr.isatty()
        self._progress: Any = None
        self.log = logging.getLogger(LOGGER)
        self.log.setLevel(logging.INFO)
        self.log.propagate = False
        self._handlers: list[logging.Handler] = []
        self._file: logging.Handler | None = None
        if log_file is not None:
            log_file.parent.mkdir(parents=True, exist_ok=True)
            self._file = logging.FileHandler(log_file)
            self._add(self._file, "%(asctime)s %(levelname)s %(message)s")
        if visible:
            self._add(logging.StreamHandler(sys.stderr), "%(message)s")

    def _add(self, handler: logging.Handler, layout: str) -> None:
        handler.setFormatter(logging.Formatter(layout))
        self.log.addHandler(handler)
        self._handlers.append(handler)

    def say(self, message: str) -> None:
        self.log.info(message)

    @contextmanager
    def phase(
        self, what: str, unit: str = "", words: Callable[[], str] = lambda: ""
    ) -> Iterator[Callable[[int, int], None]]:
        """A live line while inside; call what it gives with (done, total). `words` says what else
        is worth knowing just then.
        """
        if not self._live:
            yield lambda done, total: None
            return
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        last = 0.0
        with Progress(
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

    def record_failure(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """An exit callback: the traceback goes to the log file; a person gets one message elsewhere."""
        if error is None or isinstance(error, SystemExit) or self._file is None:
            return
        text = "".join(traceback.format_exception(kind, error, trace))
        record = self.log.makeRecord(self.log.name, logging.ERROR, "", 0, text, (), None)
        self._file.handle(record)

    def close(self) -> None:
        for handler in self._handlers:
            self.log.removeHandler(handler)
            handler.close()
        self._handlers = []
