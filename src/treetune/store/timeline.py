"""Timelines of processes: spans of time as rows of a journal, written as they begin and as they end.

A process that is killed leaves the spans that it had begun. One process writes a file at a time; each begins
with a row about itself.
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
from treetune.store.journal import Journal, row_of

SUFFIX = ".timeline.jsonl"
"""The suffix of a timeline's file."""

LATEST = 253_402_300_800
"""Seconds since 1970 at which the year 9999 is over: no calendar goes on."""

LOGGER = "treetune"


class Timeline:
    """A timeline that is written, behind the rows of earlier processes; none without a path. Thread-safe.

    A file that can't be written gives one warning and ends no run: nothing is computed from it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._journal = None if path is None else Journal(path)
        self._lock = threading.Lock()
        self._number = 0
        self._has_begun = False

    @contextmanager
    def span(self, lane: str, name: str, **about: Any) -> Iterator[dict[str, Any]]:
        """Records the time from here to the end of the block. `about` are further facts, such as the
        iteration's number (from 0); the block may add others to the dictionary that it gets."""
        at, clock = time.time(), time.perf_counter()
        number = self._next()
        self._write({"begin": number, "lane": lane, "name": name, "at": at, **about})
        ended: dict[str, Any] = {}
        try:
            yield ended
        finally:
            self._write({"end": number, "at": at + time.perf_counter() - clock, **ended})

    def past(self, lane: str, name: str, start: float, end: float, **about: Any) -> None:
        """Records a span that is over, in seconds since 1970."""
        number = self._next()
        self._write({"begin": number, "lane": lane, "name": name, "at": start, **about})
        self._write({"end": number, "at": end})

    def close(self) -> None:
        """Records that the process came to its own end."""
        if self._has_begun:
            self._write({"closed": os.getpid(), "at": time.time()})
        if self._journal is not None:
            self._journal.close()

    def _next(self) -> int:
        with self._lock:
            self._number += 1
            return self._number

    def _write(self, row: dict[str, Any]) -> None:
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
                    "when what is done is no longer recorded: %s can't be written (%s)",
                    self._journal.path,
                    error,
                )
                self._journal = None
            self._has_begun = True


# Reading


@dataclass(frozen=True)
class Span:
    """A span of time, in seconds since 1970. `end` is None if its end wasn't written. `about` are further
    facts."""

    lane: str
    name: str
    start: float
    end: float | None
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ProcessRows:
    """The rows of one process in a file. `last` is the time of its last row, `closed` whether it came to its
    own end."""

    pid: int
    host: str
    start: float
    last: float
    closed: bool
    spans: tuple[Span, ...]


def read_timeline(path: Path, damaged: list[int] | None = None) -> list[ProcessRows]:
    """Returns the processes of a file, in their order. Damaged and torn lines are passed over; the numbers of
    the damaged ones go to `damaged`. Raises FileNotFoundError."""
    processes: list[ProcessRows] = []
    spans: dict[int, Span] = {}
    for line_number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            row = json.loads(row_of(line))
            at = float(row.pop("at"))
            if not 0 <= at < LATEST:
                raise ValueError(f"nothing happens at {at}")
            if "process" in row:
                _settle(processes, spans)
                processes.append(ProcessRows(row["process"], row["host"], at, at, False, ()))
                continue
            if not processes:
                continue
            if "begin" in row:
                number, lane, name = row.pop("begin"), row.pop("lane"), row.pop("name")
                spans[number] = Span(lane, name, at, None, row)
            elif "end" in row:
                number = row.pop("end")
                if number in spans:
                    span = spans[number]
                    spans[number] = replace(span, end=at, about=span.about | row)
            else:
                processes[-1] = replace(processes[-1], closed=True)
            processes[-1] = replace(processes[-1], last=max(processes[-1].last, at))
        except (Damaged, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            if damaged is not None and line.endswith(b"\n"):  # else a crash tore it
                damaged.append(line_number)
    _settle(processes, spans)
    return processes


def _settle(processes: list[ProcessRows], spans: dict[int, Span]) -> None:
    if processes:
        processes[-1] = replace(processes[-1], spans=tuple(spans.values()))
    spans.clear()
