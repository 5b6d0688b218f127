"""Records when a process did what: spans of time, as rows of a journal.

A span has a row when it begins and one when it ends, so that a killed process leaves the spans that it had
begun. Only one process writes a file at a time, and begins with a row about itself::

    {"process": 4711, "host": "node1", "at": 1764412800.1}
    {"begin": 1, "lane": "phases", "name": "generation", "at": 1764412801.0, "iteration": 3}
    {"end": 1, "at": 1764412842.2}
    {"closed": 4711, "at": 1764412990.0}
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from treetune.exceptions import Damaged
from treetune.store.journal import Journal, unseal_line

TIMELINE_SUFFIX = ".timeline.jsonl"
"""The suffix of a timeline's file."""

LATEST_TIME = 253_402_300_800
"""The end of the year 9999 in seconds since 1970, which is the latest that Python's calendar knows."""

LOGGER = "treetune"


class Timeline:
    """Writes a timeline into a file, after the rows of earlier processes. Without a path it writes nothing.
    Thread-safe.

    If the file can't be written, there is a single warning, and the run continues: nothing depends on a
    timeline.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._journal = None if path is None else Journal(path)
        self._lock = threading.Lock()
        self._number = 0
        """The number of the last span. Spans are numbered from 1, and both rows of a span have its number."""
        self._has_begun = False
        """Whether the row about this process, the first one, has been written."""

    @contextmanager
    def span(self, lane: str, name: str, **about: Any) -> Iterator[dict[str, Any]]:
        """Records the time from here to the end of the block.

        Args:
            lane: The row of a drawing in which the span is shown.
            about: Further facts, such as the iteration's number.

        Yields:
            A dictionary to which the block may add facts.
        """
        # The end is measured by a clock that can't be set.
        start, clock_at_start = time.time(), time.perf_counter()
        number = self._next_number()
        self._write({"begin": number, "lane": lane, "name": name, "at": start, **about})
        facts_at_end: dict[str, Any] = {}
        try:
            yield facts_at_end
        finally:
            end = start + time.perf_counter() - clock_at_start
            self._write({"end": number, "at": end, **facts_at_end})

    def record_past(self, lane: str, name: str, start: float, end: float, **about: Any) -> None:
        """Records a span that is over. Its start and end are in seconds since 1970."""
        number = self._next_number()
        self._write({"begin": number, "lane": lane, "name": name, "at": start, **about})
        self._write({"end": number, "at": end})

    def close(self) -> None:
        """Records that the process ended by itself."""
        if self._has_begun:
            self._write({"closed": os.getpid(), "at": time.time()})
        if self._journal is not None:
            self._journal.close()

    def _next_number(self) -> int:
        with self._lock:
            self._number += 1
            return self._number

    def _write(self, row: dict[str, Any]) -> None:
        """Appends a row, and before the first one the row about this process. Writes nothing more after an
        error."""
        with self._lock:
            if self._journal is None:
                return
            rows = [row]
            if not self._has_begun:
                rows.insert(0, {"process": os.getpid(), "host": socket.gethostname(), "at": time.time()})
            try:
                self._journal.add(*rows)
            except OSError as error:
                logging.getLogger(LOGGER).warning(
                    "the timeline is no longer recorded: %s can't be written (%s)",
                    self._journal.path,
                    error,
                )
                self._journal = None
            self._has_begun = True


# Reading


@dataclass(frozen=True)
class Span:
    """A span of time, in seconds since 1970. `end` is None if its end wasn't written."""

    lane: str
    name: str
    start: float
    end: float | None
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ProcessRows:
    """The rows that one process wrote into a file. `last` is the time of its last row; `closed` says whether
    the process ended by itself."""

    pid: int
    host: str
    start: float
    last: float
    closed: bool
    spans: tuple[Span, ...]


def read_timeline(path: Path, damaged: list[int] | None = None) -> list[ProcessRows]:
    """Returns the processes that wrote a timeline's file, in the order of the file.

    Damaged lines and lines cut short are left out.

    Args:
        damaged: A list to which the numbers of damaged lines are added, counted from 1.

    Raises:
        FileNotFoundError: There is no such file.
    """
    processes: list[ProcessRows] = []
    # The spans of the last process so far, by number. `_finish_last_process` moves them into that process.
    spans: dict[int, Span] = {}
    for line_number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            row = json.loads(unseal_line(line))
            at = float(row.pop("at"))
            if not 0 <= at < LATEST_TIME:
                raise ValueError(f"nothing happens at {at}")
            if "process" in row:
                _finish_last_process(processes, spans)
                processes.append(
                    ProcessRows(row["process"], row["host"], start=at, last=at, closed=False, spans=())
                )
                continue
            if not processes:  # the row about the process itself is damaged
                continue
            if "begin" in row:
                number, lane, name = row.pop("begin"), row.pop("lane"), row.pop("name")
                spans[number] = Span(lane, name, start=at, end=None, about=row)
            elif "end" in row:
                number = row.pop("end")
                if number in spans:  # unless the row of its beginning is damaged
                    span = spans[number]
                    spans[number] = replace(span, end=at, about=span.about | row)
            else:  # {"closed": …}
                processes[-1] = replace(processes[-1], closed=True)
            processes[-1] = replace(processes[-1], last=max(processes[-1].last, at))
        except (Damaged, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            # The row isn't one that a `Timeline` writes.
            # A line without a newline isn't damaged: a crash cut it short.
            if damaged is not None and line.endswith(b"\n"):
                damaged.append(line_number)
    _finish_last_process(processes, spans)
    return processes


def _finish_last_process(processes: list[ProcessRows], spans: dict[int, Span]) -> None:
    """Moves the spans into the last process."""
    if processes:
        processes[-1] = replace(processes[-1], spans=tuple(spans.values()))
    spans.clear()
