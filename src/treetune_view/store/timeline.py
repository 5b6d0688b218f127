"""When what happened in an experiment: lanes of spans, from its timelines, or reckoned from its metrics."""

from __future__ import annotations

import bisect
import functools
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from treetune.runtime.clock import PHASES
from treetune.store.timeline import SUFFIX, Process, Span, read_timeline
from treetune_view.report.experiment import Experiment
from treetune_view.report.text import visible
from treetune_view.store.catalogue import Run, Store, stat_of

TOUCHING_S = 0.001
"""A phase and the work in it begin so near to each other."""


@dataclass(frozen=True)
class Shown:
    """A span as a page has it: seconds since 1970; `ending` says how it ended where that isn't plain:
    ``open`` goes on, ``cut`` ended with its process, nobody wrote when. `kind` chooses its colour: a phase's
    name, ``server``, ``starting``, ``process`` or ``work``."""

    name: str
    kind: str
    start: float
    end: float
    words: str = ""
    ending: str = ""
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Lane:
    """Who did it: the file's name, and what of it."""

    who: str
    what: str
    spans: Sequence[Shown]

    @property
    def name(self) -> str:
        return f"{self.who}: {self.what}"


@dataclass(frozen=True)
class Times:
    """All lanes, from `start` to `end`. Where `reckoned`, no run wrote when its phases began: they are laid
    out in their order before each iteration's end. `damaged` says which lines of files are left out."""

    lanes: Sequence[Lane]
    start: float
    end: float
    reckoned: bool = False
    damaged: Sequence[str] = ()

    @property
    def processes(self) -> list[Shown]:
        """The runs' own, in their order: the first is the beginning, the others are resumes."""
        return [span for lane in self.lanes if lane.name == "run: process" for span in lane.spans]


def files_of(run: Run) -> list[Path]:
    """The run's own first."""
    found = sorted(run.directory.logs.rglob(f"*{SUFFIX}"))
    return sorted(found, key=lambda path: path.name != f"run{SUFFIX}")


def mark_of(run: Run) -> list[object]:
    """Another one as soon as something began or ended."""
    return [(str(path), stat_of(path)) for path in files_of(run)]


def times_of(store: Store, run: Run) -> Times | None:
    """None where nothing has happened yet."""
    now = time.time()
    lanes = [lane for path in files_of(run) for lane in _lanes(run, path, now)]
    reckoned = not any(lane.who == "run" for lane in lanes)
    if reckoned:
        lanes = [*_reckoned(store.experiment(run)), *lanes]
    spans = [span for lane in lanes for span in lane.spans]
    if not spans:
        return None
    damaged = [
        f"{path.name}, line {', '.join(map(str, lines[:3]))}{', …' if len(lines) > 3 else ''}"
        for path in files_of(run)
        if (lines := _read(path, stat_of(path))[1])
    ]
    return Times(lanes, min(one.start for one in spans), max(one.end for one in spans), reckoned, damaged)


def _lanes(run: Run, path: Path, now: float) -> Iterator[Lane]:
    who = path.relative_to(run.directory.logs).as_posix().removesuffix(SUFFIX)
    processes, _ = _read(path, stat_of(path))
    alive = bool(processes) and _is_alive(run, who, processes[-1])
    lanes: dict[str, list[Shown]] = {}
    for number, process in enumerate(processes):
        goes_on = alive and number == len(processes) - 1
        end = now if goes_on else process.last
        ending = "open" if goes_on else "" if process.closed else "cut"
        resumed = f", resume {number}" if number and who == "run" else ""
        # A server's timeline is written by whoever watches it.
        watches = "watched by " * any(one.lane == "server" for one in process.spans)
        words = f"{watches}process {process.pid} on {process.host}{resumed}"
        lanes.setdefault("process", []).append(Shown(who, "process", process.start, end, words, ending))
        spans = _one_at_a_time(process.spans)
        phases = sorted((one for one in spans if one.lane == "phases"), key=lambda one: one.start)
        for span in spans:
            kind = _kind(span, phases)
            own = "" if span.end is not None else "open" if goes_on else "cut"
            last = span.end if span.end is not None else end
            about = {key: value for key, value in span.about.items() if value is not None}
            shown = Shown(span.name, kind, span.start, max(span.start, last), _words(about), own, about)
            lanes.setdefault(span.lane, []).append(shown)
    for what, shown_spans in lanes.items():
        # Half a character of a name would be no address.
        yield Lane(visible(who), visible(what), sorted(shown_spans, key=lambda one: one.start))


def _one_at_a_time(spans: Sequence[Span]) -> list[Span]:
    """With phases cut where another one of their lane was carried out in their midst, whose time that is."""
    found: list[Span] = []
    newest: dict[str, int] = {}
    for span in sorted(spans, key=lambda one: one.start):
        found.append(span)
        if span.name not in PHASES:
            continue
        number, newest[span.lane] = newest.get(span.lane), len(found) - 1
        around = None if number is None else found[number]
        if number is None or around is None or (around.end is not None and around.end <= span.start):
            continue
        found[number] = replace(around, end=span.start)
        if span.end is not None and (around.end is None or around.end - span.end > TOUCHING_S):
            found.append(replace(around, start=span.end))
            newest[span.lane] = len(found) - 1
    return found


def _kind(span: Span, phases: Sequence[Span]) -> str:
    """What is done inside of a phase has its colour."""
    if span.lane == "server":
        return "starting" if span.name == "starts" else "server"
    if span.name in PHASES:
        return span.name
    at = bisect.bisect_right(phases, span.start + TOUCHING_S, key=lambda one: one.start) - 1
    if at >= 0 and ((end := phases[at].end) is None or end > span.start):
        return phases[at].name
    return "waiting" if span.name.startswith("waiting") else "work"


@functools.lru_cache(maxsize=64)
def _read(path: Path, stat: object) -> tuple[list[Process], list[int]]:
    """With the damaged lines' numbers."""
    damaged: list[int] = []
    try:
        return read_timeline(path, damaged), damaged
    except FileNotFoundError:  # it went meanwhile
        return [], []


def _is_alive(run: Run, who: str, process: Process) -> bool:
    """Whether what the newest process has begun goes on. One elsewhere is known by the run's lock."""
    if process.closed:
        return False
    if who == "run":
        return run.directory.is_running()
    if process.host != socket.gethostname():
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _words(about: dict[str, Any]) -> str:
    iteration = about.get("iteration")
    told = [f"iteration {iteration + 1}"] if isinstance(iteration, int) else []
    told += [f"{key} {value}" for key, value in about.items() if key not in ("iteration", "why")]
    return ": ".join(filter(None, (", ".join(told), str(about.get("why", "")))))


def _reckoned(one: Experiment) -> Iterator[Lane]:
    """One lane: each iteration's phases in the loop's order; the last ends when its line was written."""
    spans = []
    for row in one.metrics:
        seconds = {phase: row.get(f"seconds/{phase}", 0.0) for phase in (*PHASES, "other")}
        at = row.get("wall_time", 0.0) - sum(seconds.values())
        for phase, taken in seconds.items():
            if taken > 0:
                words, about = f"iteration {row['iteration'] + 1}", {"iteration": row["iteration"]}
                spans.append(Shown(phase, phase, at, at + taken, words, about=about))
                at += taken
    if spans:
        yield Lane("run", "phases", spans)


def chrome_trace(name: str, times: Times | None) -> dict[str, Any]:
    """For chrome://tracing and Perfetto: complete events in microseconds since the experiment began, a
    process for each that wrote, a thread for each of its lanes. What goes on ends where it was asked for.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    events: list[dict[str, Any]] = []
    lanes = times.lanes if times is not None else ()
    pids = {who: number + 1 for number, who in enumerate(dict.fromkeys(lane.who for lane in lanes))}
    for who, pid in pids.items():
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": who}})
    for tid, lane in enumerate(lanes, 1):
        pid = pids[lane.who]
        events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": lane.what}})
        for span in lane.spans:
            assert times is not None
            about = dict(span.about) | {"words": span.words, "ending": span.ending}
            events.append(
                {
                    "name": span.name,
                    "cat": span.kind,
                    "ph": "X",
                    "ts": round(1e6 * (span.start - times.start), 1),
                    "dur": round(1e6 * (span.end - span.start), 1),
                    "pid": pid,
                    "tid": tid,
                    "args": {key: value for key, value in about.items() if value not in ("", None)},
                }
            )
    began = times.start if times is not None else None
    about_it = {"experiment": name, "began": began, "reckoned": times.reckoned if times else False}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about_it}
