"""The timeline of an experiment: lanes of spans, drawn along true time, added up in a table, and as a Chrome
trace."""

from __future__ import annotations

import bisect
import functools
import json
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from starlette.responses import Response

from treetune.runtime.console import PHASES
from treetune.runtime.directory import SAMPLED_TOKENS
from treetune.store.timeline import SUFFIX, ProcessRows, Span, read_timeline
from treetune.view.page import Page, PageRequest
from treetune.view.store.folders import Run, digest, stat_of
from treetune.view.templates import in_seconds
from treetune.view.text import visible

TOUCHING_S = 0.001
"""A phase and the work in it begin so near to each other."""

WIDTH = 1000
"""Units of a lane's drawing: what is shorter than one of them is drawn with its neighbours."""

DEEPEST = 4
"""Rows of a lane: what began within something else stands below it."""

SHORTEST_S = 0.01
"""Shortest time that is shown at once."""

LIVE_S = 5.0
"""How often what goes on is drawn anew."""


@dataclass(frozen=True)
class ShownSpan:
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
    """Spans of one kind of work of `who`, named after the file of its timeline."""

    who: str
    what: str
    spans: Sequence[ShownSpan]

    @property
    def name(self) -> str:
        return f"{self.who}: {self.what}"


@dataclass(frozen=True)
class Times:
    """All lanes, from `start` to `end`. `damaged` says which lines of files are left out."""

    lanes: Sequence[Lane]
    start: float
    end: float
    damaged: Sequence[str] = ()

    @property
    def processes(self) -> list[ShownSpan]:
        """The runs' own, in their order: the first is the beginning, the others are resumes."""
        return [span for lane in self.lanes if lane.name == "run: process" for span in lane.spans]


# Reading


def files_of(run: Run) -> list[Path]:
    """Returns the files of timelines, the run's own first."""
    paths = sorted(run.directory.logs.rglob(f"*{SUFFIX}"))
    return sorted(paths, key=lambda path: path.name != f"run{SUFFIX}")


def times_of(run: Run, load: Mapping[int, str] = MappingProxyType({})) -> Times | None:
    """Reads all timelines of a run; None where nothing has happened yet. `load` is what its servers did in
    each iteration (from 0), in words."""
    now, files = time.time(), files_of(run)
    lanes = [lane for path in files for lane in _lanes(run, path, now, load)]
    spans = [span for lane in lanes for span in lane.spans]
    if not spans:
        return None
    damaged = [
        f"{path.name}, line {', '.join(map(str, lines[:3]))}{', …' if len(lines) > 3 else ''}"
        for path in files
        if (lines := _read(path, stat_of(path))[1])
    ]
    return Times(lanes, min(one.start for one in spans), max(one.end for one in spans), damaged)


@functools.lru_cache(maxsize=64)
def _read(path: Path, stat: object) -> tuple[list[ProcessRows], list[int]]:
    """Reads a timeline, and the numbers of its damaged lines."""
    damaged: list[int] = []
    try:
        return read_timeline(path, damaged), damaged
    except FileNotFoundError:  # it went meanwhile
        return [], []


def _lanes(run: Run, path: Path, now: float, load: Mapping[int, str]) -> Iterator[Lane]:
    who = path.relative_to(run.directory.logs).as_posix().removesuffix(SUFFIX)
    processes, _ = _read(path, stat_of(path))
    alive = bool(processes) and _is_alive(run, who, processes[-1])
    lanes: dict[str, list[ShownSpan]] = {}
    for number, process in enumerate(processes):
        goes_on = alive and number == len(processes) - 1
        end = now if goes_on else process.last
        ending = "open" if goes_on else "" if process.closed else "cut"
        resumed = f", resume {number}" if number and who == "run" else ""
        # A server's timeline is written by whoever watches it.
        watches = "watched by " * any(one.lane == "server" for one in process.spans)
        words = f"{watches}process {process.pid} on {process.host}{resumed}"
        lanes.setdefault("process", []).append(ShownSpan(who, "process", process.start, end, words, ending))
        spans = _one_at_a_time(process.spans)
        phases = sorted((one for one in spans if one.lane == "phases"), key=lambda one: one.start)
        for span in spans:
            own_ending = "" if span.end is not None else "open" if goes_on else "cut"
            last = max(span.start, span.end if span.end is not None else end)
            about = {key: value for key, value in span.about.items() if value is not None}
            iteration = about.get("iteration")
            facts = [f"iteration {iteration + 1}"] if isinstance(iteration, int) else []
            if isinstance(iteration, int) and span.name == "generation":
                facts += filter(None, [load.get(iteration)])
            facts += [f"{key} {value}" for key, value in about.items() if key not in ("iteration", "why")]
            words = ": ".join(filter(None, (", ".join(facts), str(about.get("why", "")))))
            kind = _kind(span, phases)
            shown = ShownSpan(span.name, kind, span.start, last, words, own_ending, about)
            lanes.setdefault(span.lane, []).append(shown)
    for what, shown_spans in lanes.items():
        # Half a character of a name would be no address.
        yield Lane(visible(who), visible(what), sorted(shown_spans, key=lambda one: one.start))


def _one_at_a_time(spans: Sequence[Span]) -> list[Span]:
    """Cuts phases where another one of their lane was carried out in their midst, whose time that is."""
    cut: list[Span] = []
    newest: dict[str, int] = {}
    for span in sorted(spans, key=lambda one: one.start):
        cut.append(span)
        if span.name not in PHASES:
            continue
        number, newest[span.lane] = newest.get(span.lane), len(cut) - 1
        around = None if number is None else cut[number]
        if number is None or around is None or (around.end is not None and around.end <= span.start):
            continue
        cut[number] = replace(around, end=span.start)
        if span.end is not None and (around.end is None or around.end - span.end > TOUCHING_S):
            cut.append(replace(around, start=span.end))
            newest[span.lane] = len(cut) - 1
    return cut


def _kind(span: Span, phases: Sequence[Span]) -> str:
    """Returns the kind of a span: what is done inside of a phase has its colour."""
    if span.lane == "server":
        return "starting" if span.name == "starts" else "server"
    if span.name in PHASES:
        return span.name
    at = bisect.bisect_right(phases, span.start + TOUCHING_S, key=lambda one: one.start) - 1
    if at >= 0 and ((end := phases[at].end) is None or end > span.start):
        return phases[at].name
    return "waiting" if span.name.startswith("waiting") else "work"


def _is_alive(run: Run, who: str, process: ProcessRows) -> bool:
    """Returns whether what the newest process has begun goes on. One elsewhere is known by the run's lock."""
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


def chrome_trace(name: str, times: Times | None) -> dict[str, Any]:
    """Returns complete events for chrome://tracing and Perfetto, in microseconds since the experiment began:
    a process for each that wrote, a thread for each of its lanes. What goes on ends where it was asked for.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    events: list[dict[str, Any]] = []
    lanes, began = (times.lanes, times.start) if times is not None else ((), None)
    pids = {who: number + 1 for number, who in enumerate(dict.fromkeys(lane.who for lane in lanes))}
    for who, pid in pids.items():
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": who}})
    for tid, lane in enumerate(lanes, 1):
        pid = pids[lane.who]
        events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": lane.what}})
        for span in lane.spans:
            assert began is not None
            about = dict(span.about) | {"words": span.words, "ending": span.ending}
            events.append(
                {
                    "name": span.name,
                    "cat": span.kind,
                    "ph": "X",
                    "ts": round(1e6 * (span.start - began), 1),
                    "dur": round(1e6 * (span.end - span.start), 1),
                    "pid": pid,
                    "tid": tid,
                    "args": {key: value for key, value in about.items() if value not in ("", None)},
                }
            )
    about_it = {"experiment": name, "began": began}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about_it}


# The page


@dataclass(frozen=True)
class TimelineBar:
    """A rectangle: its left edge and width in units, its row, what it stands for and when that was."""

    x: float
    width: float
    row: int
    kind: str
    ending: str
    words: str
    start: float
    end: float


@dataclass(frozen=True)
class Window:
    """The part that is shown, in seconds since the experiment began; `whole` is how long it is."""

    start: float
    end: float
    whole: float

    @property
    def length(self) -> float:
        return self.end - self.start

    def moved(self, by: float) -> tuple[str, str]:
        """Returns the part so many of its lengths later, not beyond the ends."""
        start = min(max(0.0, self.start + by * self.length), max(0.0, self.whole - self.length))
        return _written(start), _written(start + self.length)

    def scaled(self, by: float) -> tuple[str, str]:
        """Returns a longer or shorter part around its middle, not beyond the ends."""
        half = max(SHORTEST_S, by * self.length) / 2
        middle = (self.start + self.end) / 2
        return _written(max(0.0, middle - half)), _written(min(self.whole, middle + half))


def show(view: PageRequest) -> Response:
    """`?run=`, `?from=` and `?to=` in seconds since the beginning, `?lane=` (its spans alone)."""
    times = times_of(view.run, _load(view))
    if times is None:
        return view.render("timeline.html", times=None)
    began, window = times.start, _window(view, times)
    lanes = [lane for lane in times.lanes if view.text("lane") in ("", lane.name)]
    if not lanes:
        there = ", ".join(lane.name for lane in times.lanes)
        raise ValueError(f"there is no lane {view.text('lane')!r}: there are {there}")
    alike: dict[tuple[str, str], list[ShownSpan]] = {}
    for lane in lanes:
        for span in lane.spans:
            if _meets(span, window, began):
                kind = re.sub(r"iteration \d+: | after iteration \d+", "", span.name)
                alike.setdefault((lane.name, kind), []).append(span)
    drawn = [(lane, _bars(lane, window, began)) for lane in lanes]
    shares = (0, 0.25, 0.5, 0.75, 1)
    return view.render(
        "timeline.html",
        times=times,
        window=window,
        drawn=[(lane, bars, 1 + max((bar.row for bar in bars), default=0)) for lane, bars in drawn],
        endings={bar.ending for _, bars in drawn for bar in bars},
        kinds={bar.kind: bar.kind for _, bars in drawn for bar in bars},
        ticks=[clock(window.start + share * window.length, window.length) for share in shares],
        listed=[
            (*kind, max(own, key=lambda s: s.end - s.start), len(own), sum(s.end - s.start for s in own))
            for kind, own in alike.items()
        ],
        clock=lambda at: clock(at - began, window.length),
        date=lambda at: time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at)),
        zoomed=lambda span: _around(span.start - began, span.end - began),
        bar_zoomed=lambda bar: _around(bar.start, bar.end),
        took=took,
        in_all=in_seconds,
        width=WIDTH,
    )


def _load(view: PageRequest) -> dict[int, str]:
    """Returns what servers sampled in each iteration, as its metrics have it: of all servers together."""
    load = {}
    for row in view.store.experiment(view.run).metrics:
        speed, tokens = row.get("engine/tokens_per_second"), row.get(SAMPLED_TOKENS)
        said = [f"{tokens:,.0f} tokens of answers"] if tokens else []
        load[row["iteration"]] = ", ".join([*said, *([f"{speed:,.0f} tokens a second"] if speed else [])])
    return {iteration: words for iteration, words in load.items() if words}


def trace(view: PageRequest) -> Response:
    """`?run=`: the whole timeline for chrome://tracing or Perfetto."""
    made = chrome_trace(view.run.name, times_of(view.run, _load(view)))
    name = re.sub(r"[^\w.-]+", "-", view.run.name, flags=re.ASCII).strip("-.") or "experiment"
    return Response(
        json.dumps(made),
        media_type="application/json",
        headers={"Content-Disposition": f'attachment; filename="{name}.trace.json"'},
    )


def clock(seconds: float, length: float) -> str:
    """Writes a time since the beginning as exactly as a stretch of that length needs it: ``1:02:03``,
    ``0:02.5``."""
    digits = 0 if length >= 20 else 1 if length >= 2 else 2 if length >= 0.2 else 3
    whole = round(seconds, digits)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(int(minutes), 60)
    second = f"{rest:0{3 + digits if digits else 2}.{digits}f}"
    return f"{hours}:{minutes:02d}:{second}" if hours else f"{minutes}:{second}"


def took(span: ShownSpan) -> str:
    seconds = span.end - span.start
    if span.ending == "cut":
        return "cut off with its process, nobody wrote when"
    length = in_seconds(seconds) if seconds < 100 else clock(seconds, seconds)
    return f"{length} so far" if span.ending == "open" else length


def _window(view: PageRequest, times: Times) -> Window:
    whole = max(times.end - times.start, SHORTEST_S)
    bounds = []
    for name, default in (("from", 0.0), ("to", whole)):
        text = view.text(name)
        try:
            value = float(text) if text else default
        except ValueError:
            value = math.nan
        if not (0 <= value < 1e10):
            raise ValueError(f"{name} is {text!r} and must be a number of seconds since the beginning")
        bounds.append(value)
    start, end = bounds
    if end <= start:
        raise ValueError(
            f"to is {end:g} and from {start:g}: to must be later, both in seconds since the beginning"
        )
    return Window(start, max(end, start + SHORTEST_S), whole)


def _meets(span: ShownSpan, window: Window, began: float) -> bool:
    return span.end - began >= window.start and span.start - began <= window.end


def _bars(lane: Lane, window: Window, began: float) -> list[TimelineBar]:
    """Returns rectangles of what lies in the window; of what is shorter than a unit the longest stands for
    all."""
    unit = window.length / WIDTH
    bars: list[TimelineBar] = []
    short: dict[tuple[int, int], list[TimelineBar]] = {}
    ends: list[float] = []
    for span in lane.spans:
        ends = [end for end in ends if end > span.start][: DEEPEST - 1]
        row = len(ends)
        ends.append(span.end)
        if not _meets(span, window, began):
            continue
        start, end = span.start - began, span.end - began
        left, right = max(start, window.start), min(end, window.end)
        x, width = (left - window.start) / unit, (right - left) / unit
        remark = f" ({span.words})" if span.words else ""
        words = f"{span.name}, {clock(start, end - start)}, {took(span)}{remark}"
        bar = TimelineBar(
            round(x, 2), max(1.0, round(width, 2)), row, span.kind, span.ending, words, start, end
        )
        if width < 1:
            short.setdefault((min(int(x), WIDTH - 1), row), []).append(bar)
        else:
            bars.append(bar)
    for (x, row), own in short.items():
        longest = max(own, key=lambda bar: bar.end - bar.start)
        others = f" and {len(own) - 1} more here" if len(own) > 1 else ""
        first, last = min(bar.start for bar in own), max(bar.end for bar in own)
        bars.append(
            TimelineBar(x, 1.0, row, longest.kind, longest.ending, longest.words + others, first, last)
        )
    return bars


def _around(start: float, end: float) -> tuple[str, str]:
    """Returns a stretch with a little room on both sides."""
    room = max(0.05 * (end - start), SHORTEST_S / 2)
    return _written(max(0.0, start - room)), _written(end + room)


def _written(seconds: float) -> str:
    return f"{seconds:.3f}".rstrip("0").rstrip(".")


def mark(view: PageRequest) -> str:
    now = int(time.time() / LIVE_S) if view.run.directory.is_running() else 0
    files = [(str(path), stat_of(path)) for path in files_of(view.run)]
    return digest(view.store.mark([view.run]), files, now)


PAGES = (
    Page("/timeline", "Timeline", show, place="run", key="t", mark=mark),
    Page("/timeline/trace", "Chrome trace", trace),
)
