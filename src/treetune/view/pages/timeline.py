"""The timeline of an experiment.

It has lanes of spans that are drawn along time and summed in a table. It can be downloaded as a Chrome trace.
"""

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
from typing import Any, NamedTuple

from starlette.responses import Response

from treetune.runtime.console import PHASES
from treetune.runtime.directory import SAMPLED_TOKENS
from treetune.store.timeline import TIMELINE_SUFFIX, ProcessRows, Span, read_timeline
from treetune.view.page import Page, PageRequest
from treetune.view.store.folders import Run, short_hash, stat_of
from treetune.view.templates import in_seconds
from treetune.view.text import make_visible

TOUCHING_S = 0.001
"""The largest gap in seconds that is ignored: a span that begins this little before a phase belongs to it."""

LANE_WIDTH = 1000
"""The width of a lane in SVG units. Spans that are shorter than a unit are merged with their neighbours."""

MOST_ROWS_OF_LANE = 4
"""The most rows of a lane. A span that begins within another span is drawn in the row below."""

SHORTEST_S = 0.01
"""The shortest time, in seconds, that the page can show."""

REDRAWN_AFTER_S = 5.0
"""The seconds after which the page of a running experiment is drawn again."""


@dataclass(frozen=True)
class ShownSpan:
    """A span of time on a page.

    Example: `ShownSpan("generation", "generation", 1.7e9, 1.7e9 + 40, "iteration 3, 81,920 tokens of
    answers")`."""

    name: str
    kind: str
    """Chooses the colour: a phase's name, ``server``, ``starting``, ``process``, ``waiting`` or ``work``."""
    start: float
    """In seconds since 1970."""
    end: float
    description: str = ""
    """Further facts as a text."""
    ending: str = ""
    """``open`` if the span hasn't ended, ``cut`` if its process died, so its end is unknown, and otherwise
    empty."""
    about: dict[str, Any] = field(default_factory=dict)
    """The facts as the timeline's file has them: {"iteration": 2, …}."""


@dataclass(frozen=True)
class Lane:
    """The spans of one kind of work in one timeline's file."""

    who: str
    """The name of the timeline's file, such as "run", which stands for a process."""
    what: str
    """The kind of work, such as "phases"."""
    spans: Sequence[ShownSpan]

    @property
    def name(self) -> str:
        return f"{self.who}: {self.what}"


@dataclass(frozen=True)
class Times:
    """All lanes of a run."""

    lanes: Sequence[Lane]
    start: float
    """The begin of the first span, in seconds since 1970."""
    end: float
    """The end of the last span, in seconds since 1970."""
    damaged: Sequence[str] = ()
    """Texts that name the files and lines that can't be read."""

    @property
    def processes(self) -> list[ShownSpan]:
        """The main processes of the run: the first began it, and each further one resumed it."""
        for lane in self.lanes:
            if lane.name == "run: process":
                return list(lane.spans)
        return []


# Reading


def timeline_files(run: Run) -> list[Path]:
    """Returns the files of a run's timelines. The file of the main process comes first."""
    paths = sorted(run.directory.logs_folder.rglob(f"*{TIMELINE_SUFFIX}"))
    return sorted(paths, key=lambda path: path.name != f"run{TIMELINE_SUFFIX}")


def read_times(run: Run, sampled_by_iteration: Mapping[int, str] = MappingProxyType({})) -> Times | None:
    """Reads all timelines of a run. Returns None if there is none yet.

    `sampled_by_iteration` describes what the servers sampled in each iteration, counted from 0.
    """
    now = time.time()
    lanes: list[Lane] = []
    damaged = []
    for path in timeline_files(run):
        lanes += _read_lanes(run, path, now, sampled_by_iteration)
        # The numbers of damaged lines, from the cache: `_read_lanes` has just read the file.
        _, damaged_lines = _read_processes(path, stat_of(path))
        if damaged_lines:
            numbers = ", ".join(map(str, damaged_lines[:3])) + (", …" if len(damaged_lines) > 3 else "")
            damaged.append(f"{path.name}, line {numbers}")
    spans: list[ShownSpan] = []
    for lane in lanes:
        spans += lane.spans
    if not spans:
        return None
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    return Times(lanes, start, end, damaged)


@functools.lru_cache(maxsize=64)
def _read_processes(path: Path, stat: object) -> tuple[list[ProcessRows], list[int]]:
    """Returns (the processes of a timeline's file, the numbers of its damaged lines).

    `stat` isn't used: as a part of the cache's key, it makes a file that has changed be read again.
    """
    damaged: list[int] = []
    try:
        return read_timeline(path, damaged), damaged
    except FileNotFoundError:  # it was deleted meanwhile
        return [], []


def _read_lanes(run: Run, path: Path, now: float, sampled_by_iteration: Mapping[int, str]) -> Iterator[Lane]:
    """Yields the lanes of a timeline's file.

    The file may have the spans of several processes that ran one after the other.

    `sampled_by_iteration` describes what the servers sampled in each iteration, counted from 0.
    """
    # The file's name without its ending: "run" for the file of the run's main process.
    file_name = path.relative_to(run.directory.logs_folder).as_posix().removesuffix(TIMELINE_SUFFIX)
    processes, _ = _read_processes(path, stat_of(path))
    is_last_alive = bool(processes) and _is_process_alive(run, file_name, processes[-1])
    lanes: dict[str, list[ShownSpan]] = {}
    for number, process in enumerate(processes):
        # The processes ran one after the other, so only the last one can be alive.
        is_alive = is_last_alive and number == len(processes) - 1
        process_end = now if is_alive else process.last
        if is_alive:
            ending = "open"  # drawn as still running
        else:
            ending = "" if process.closed else "cut"  # "cut": the process died, so its true end is unknown
        description = f"process {process.pid} on {process.host}"
        if any(span.lane == "server" for span in process.spans):
            description = f"watched by {description}"  # a server's timeline is written by another process
        if file_name == "run" and number > 0:  # each process of the run after the first one resumed it
            description += f", resume {number}"
        process_span = ShownSpan(file_name, "process", process.start, process_end, description, ending)
        lanes.setdefault("process", []).append(process_span)
        spans = _without_overlaps(process.spans)
        phases = sorted((span for span in spans if span.lane == "phases"), key=lambda span: span.start)
        for span in spans:
            shown_span = _shown_span(
                span, _kind_of_span(span, phases), process_end, is_alive, sampled_by_iteration
            )
            lanes.setdefault(span.lane, []).append(shown_span)
    for lane_name, shown_spans in lanes.items():
        # These names become part of addresses, which can't contain lone surrogates (halves of characters).
        # `make_visible` replaces them.
        yield Lane(
            make_visible(file_name), make_visible(lane_name), sorted(shown_spans, key=lambda span: span.start)
        )


def _shown_span(
    span: Span, kind: str, process_end: float, is_alive: bool, sampled_by_iteration: Mapping[int, str]
) -> ShownSpan:
    """Returns a span as the page shows it.

    A span without an end lasts until now if its process is alive, and otherwise until the last time that the
    process recorded (`process_end` in both cases). `sampled_by_iteration` describes what the servers sampled
    in each iteration, counted from 0.
    """
    if span.end is not None:
        end, ending = span.end, ""
    else:
        end = process_end
        ending = "open" if is_alive else "cut"
    about = {key: value for key, value in span.about.items() if value is not None}
    facts = []
    iteration = about.get("iteration")
    if isinstance(iteration, int):
        facts.append(f"iteration {iteration + 1}")
        if span.name == "generation" and iteration in sampled_by_iteration:
            facts.append(sampled_by_iteration[iteration])
    facts += [f"{key} {value}" for key, value in about.items() if key not in ("iteration", "why")]
    # "why" tells why the span ended, such as why a server was lost. It comes after a colon.
    texts = [", ".join(facts), str(about.get("why", ""))]
    description = ": ".join(text for text in texts if text)
    return ShownSpan(span.name, kind, span.start, max(span.start, end), description, ending, about)


def _without_overlaps(spans: Sequence[Span]) -> list[Span]:
    """Returns the spans with each phase cut where another phase of its lane began within it.

    A phase from 0 to 10 s, in which another lasted from 4 to 6 s, becomes two: from 0 to 4 s, and from 6 to
    10 s. Phases that begin within the same phase don't overlap each other.
    """
    result: list[Span] = []
    last_to_end: dict[str, int] = {}  # by lane, the position in the result of the phase that ends last
    for span in sorted(spans, key=lambda span: span.start):
        result.append(span)
        # Only phases are cut. Spans of other work lie within them, and are drawn over them.
        if span.name not in PHASES:
            continue
        outer_position = last_to_end.get(span.lane)
        last_to_end[span.lane] = len(result) - 1
        if outer_position is None:
            continue
        outer = result[outer_position]
        ends_before = outer.end is not None and outer.end <= span.start
        if ends_before:
            continue
        # The outer phase ends where this one begins …
        result[outer_position] = replace(outer, end=span.start)
        # … and continues where this one ends, unless both end there.
        if span.end is not None and (outer.end is None or outer.end - span.end > TOUCHING_S):
            result.append(replace(outer, start=span.end))
            last_to_end[span.lane] = len(result) - 1
    return result


def _kind_of_span(span: Span, phases: Sequence[Span]) -> str:
    """Returns the kind of a span, which chooses its colour.

    Work within a phase has the kind of the phase. `phases` are sorted by their start.
    """
    if span.lane == "server":
        return "starting" if span.name == "starts" else "server"
    if span.name in PHASES:
        return span.name
    # A span that begins a moment (`TOUCHING_S`) before a phase still belongs to the phase.
    last_begun = bisect.bisect_right(phases, span.start + TOUCHING_S, key=lambda phase: phase.start) - 1
    if last_begun >= 0:
        phase = phases[last_begun]
        if phase.end is None or phase.end > span.start:
            return phase.name
    return "waiting" if span.name.startswith("waiting") else "work"


def _is_process_alive(run: Run, file_name: str, process: ProcessRows) -> bool:
    """Returns whether the newest process of a timeline still runs."""
    if process.closed:
        return False
    if file_name == "run":
        return run.directory.is_running()
    if process.host != socket.gethostname():  # nothing is known about processes of other machines
        return False
    try:
        os.kill(process.pid, 0)  # sends no signal, and only tests whether the process exists
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
    return True


def chrome_trace(name: str, times: Times | None) -> dict[str, Any]:
    """Returns the content of a file for chrome://tracing and Perfetto.

    Each timeline's file is a process of the trace, and each of its lanes a thread. Times are in microseconds
    since the experiment began. A span that hasn't ended ends at the present time. The format is described in
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    events: list[dict[str, Any]] = []
    lanes, began = (times.lanes, times.start) if times is not None else ((), None)
    processes = dict.fromkeys(lane.who for lane in lanes)  # a dictionary as an ordered set
    pids = {who: pid for pid, who in enumerate(processes, 1)}
    # In the format, "M" events have the names of processes and threads, and "X" events are spans.
    for who, pid in pids.items():
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": who}})
    for tid, lane in enumerate(lanes, 1):
        pid = pids[lane.who]
        events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": lane.what}})
        for span in lane.spans:
            assert began is not None
            about = dict(span.about) | {"description": span.description, "ending": span.ending}
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
    """A rectangle of a lane, which shows a span or several short ones.

    `x` and `width` are in SVG units, `row` counts from the top of the lane, and `start` and `end` are in
    seconds since the experiment began.
    """

    x: float
    width: float
    row: int
    kind: str
    ending: str
    description: str
    start: float
    end: float


@dataclass(frozen=True)
class Window:
    """The part of the time that is shown, in seconds since the experiment began.

    `whole` is the length of the whole time.
    """

    start: float
    end: float
    whole: float

    @property
    def length(self) -> float:
        return self.end - self.start

    def moved_bounds(self, lengths: float) -> tuple[str, str]:
        """Returns the bounds, for an address, of a window of the same length that is `lengths` lengths later.

        It stays within the whole time.
        """
        start = min(max(0.0, self.start + lengths * self.length), max(0.0, self.whole - self.length))
        return _format_bound(start), _format_bound(start + self.length)

    def scaled_bounds(self, factor: float) -> tuple[str, str]:
        """Returns the bounds, for an address, of a window with the same middle that is `factor` times as
        long.

        What is outside of the whole time is cut off.
        """
        half = max(SHORTEST_S, factor * self.length) / 2
        middle = (self.start + self.end) / 2
        return _format_bound(max(0.0, middle - half)), _format_bound(min(self.whole, middle + half))


def show(view: PageRequest) -> Response:
    """Shows the timeline.

    The address has `?run=`, `?from=` and `?to=` (in seconds since the beginning) and `?lane=` (the name of
    the only lane that is shown).
    """
    times = read_times(view.run, _describe_sampling(view))
    if times is None:
        return view.render("timeline.html", times=None)
    began, window = times.start, _choose_window(view, times)
    lanes = [lane for lane in times.lanes if view.text("lane") in ("", lane.name)]
    if not lanes:
        names = ", ".join(lane.name for lane in times.lanes)
        raise ValueError(f"there is no lane {view.text('lane')!r}; choose one of {names}")
    drawn_lanes = []
    drawn_bars: list[TimelineBar] = []
    for lane in lanes:
        bars = _make_bars(lane, window, began)
        bar_rows = 1 + max((bar.row for bar in bars), default=0)
        drawn_lanes.append((lane, bars, bar_rows))
        drawn_bars += bars
    shares = (0, 0.25, 0.5, 0.75, 1)
    return view.render(
        "timeline.html",
        times=times,
        window=window,
        drawn=drawn_lanes,
        endings={bar.ending for bar in drawn_bars},
        # The legend's texts, each with the name of its colour. Both are the kind: {"training": "training"}.
        kinds={bar.kind: bar.kind for bar in drawn_bars},
        ticks=[format_clock(window.start + share * window.length, window.length) for share in shares],
        listed=_rows_of_table(lanes, window, began),
        clock=lambda at: format_clock(at - began, window.length),
        date=lambda at: time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at)),
        zoomed=lambda span: _bounds_around(span.start - began, span.end - began),
        bar_zoomed=lambda bar: _bounds_around(bar.start, bar.end),
        took=describe_length,
        in_all=in_seconds,
        width=LANE_WIDTH,
    )


class _WorkRow(NamedTuple):
    """A kind of work in a lane: a row of the table below the drawing."""

    lane: str
    kind: str
    longest: ShownSpan
    n_spans: int
    seconds: float
    """The seconds of all its spans together."""


def _rows_of_table(lanes: Sequence[Lane], window: Window, began: float) -> list[_WorkRow]:
    """Returns a row for each kind of work in each lane, over the spans in the window."""
    spans_by_lane_and_kind: dict[tuple[str, str], list[ShownSpan]] = {}
    for lane in lanes:
        for span in lane.spans:
            if _is_in_window(span, window, began):
                # Without its iteration, the name is the same for the same work of all iterations.
                kind = re.sub(r"iteration \d+: | after iteration \d+", "", span.name)
                spans_by_lane_and_kind.setdefault((lane.name, kind), []).append(span)
    rows = []
    for (lane_name, kind), spans in spans_by_lane_and_kind.items():
        longest = max(spans, key=lambda span: span.end - span.start)
        seconds = sum(span.end - span.start for span in spans)
        rows.append(_WorkRow(lane_name, kind, longest, len(spans), seconds))
    return rows


def _describe_sampling(view: PageRequest) -> dict[int, str]:
    """Returns a description of what all servers together sampled, for each iteration, counted from 0.

    Example: {2: "81,920 tokens of answers, 4,096 tokens a second"}.
    """
    sampled_by_iteration = {}
    for row in view.store.experiment(view.run).metrics:
        speed, tokens = row.get("engine/tokens_per_second"), row.get(SAMPLED_TOKENS)
        facts = []
        if tokens:
            facts.append(f"{tokens:,.0f} tokens of answers")
        if speed:
            facts.append(f"{speed:,.0f} tokens a second")
        if facts:
            sampled_by_iteration[row["iteration"]] = ", ".join(facts)
    return sampled_by_iteration


def download_trace(view: PageRequest) -> Response:
    """Returns the whole timeline of the run in `?run=` as a file for chrome://tracing or Perfetto."""
    chrome_events = chrome_trace(view.run.name, read_times(view.run, _describe_sampling(view)))
    name = re.sub(r"[^\w.-]+", "-", view.run.name, flags=re.ASCII).strip("-.") or "experiment"
    return Response(
        json.dumps(chrome_events),
        media_type="application/json",
        headers={"Content-Disposition": f'attachment; filename="{name}.trace.json"'},
    )


def format_clock(seconds: float, length: float) -> str:
    """Formats a time since the beginning, such as ``1:02:03`` or ``0:02.5``.

    It has as many decimals as times in a window of `length` seconds need.
    """
    if length >= 20:
        digits = 0
    elif length >= 2:
        digits = 1
    else:
        digits = 2 if length >= 0.2 else 3
    whole = round(seconds, digits)
    total_minutes, seconds_left = divmod(whole, 60)
    hours, minutes = divmod(int(total_minutes), 60)
    # The seconds have two digits before the point ("02.5"). The width also counts the point and the decimals.
    width = 2 + (1 + digits if digits else 0)
    seconds_text = f"{seconds_left:0{width}.{digits}f}"
    return f"{hours}:{minutes:02d}:{seconds_text}" if hours else f"{minutes}:{seconds_text}"


def describe_length(span: ShownSpan) -> str:
    """Returns how long a span took as a text: "12.3 s", or from 100 s on "1:40" (1 min 40 s)."""
    seconds = span.end - span.start
    if span.ending == "cut":
        return "its process died; the end was not recorded"
    length = in_seconds(seconds) if seconds < 100 else format_clock(seconds, seconds)
    return f"{length} so far" if span.ending == "open" else length


def _choose_window(view: PageRequest, times: Times) -> Window:
    """Returns the window that the address names, or the whole time if it names none.

    Raises ValueError for bounds that are not numbers, and if the end is not later than the beginning.
    """
    whole = max(times.end - times.start, SHORTEST_S)
    bounds = []
    for name, default in (("from", 0.0), ("to", whole)):
        text = view.text(name)
        try:
            value = float(text) if text else default
        except ValueError:
            value = math.nan
        if not (0 <= value < 1e10):  # also refuses NaN and infinity; 1e10 s are 300 years
            raise ValueError(f"{name} is {text!r} and must be a number of seconds since the beginning")
        bounds.append(value)
    start, end = bounds
    if end <= start:
        raise ValueError(
            f"to is {end:g} and from is {start:g}: to must be later, in seconds since the beginning"
        )
    return Window(start, max(end, start + SHORTEST_S), whole)


def _is_in_window(span: ShownSpan, window: Window, began: float) -> bool:
    """Returns whether a part of a span is in the window."""
    return span.end - began >= window.start and span.start - began <= window.end


def _make_bars(lane: Lane, window: Window, began: float) -> list[TimelineBar]:
    """Returns the rectangles of a lane's spans in the window.

    If several spans that are shorter than an SVG unit fall into the same unit, they are drawn as one
    rectangle, which has the description of the longest.
    """
    unit = window.length / LANE_WIDTH
    bars: list[TimelineBar] = []
    short_bars: dict[tuple[int, int], list[TimelineBar]] = {}  # by unit and row
    ends_of_open: list[float] = []
    for span in lane.spans:
        # A span is drawn below the rows of the spans that haven't ended when it begins. There are at most
        # `MOST_ROWS_OF_LANE` rows: all deeper spans are drawn in the last one.
        ends_of_open = [end for end in ends_of_open if end > span.start][: MOST_ROWS_OF_LANE - 1]
        row = len(ends_of_open)
        ends_of_open.append(span.end)
        if not _is_in_window(span, window, began):
            continue
        start, end = span.start - began, span.end - began
        left, right = max(start, window.start), min(end, window.end)
        x, width = (left - window.start) / unit, (right - left) / unit
        remark = f" ({span.description})" if span.description else ""
        description = f"{span.name}, {format_clock(start, end - start)}, {describe_length(span)}{remark}"
        # A bar is at least one unit wide, so that it can be seen.
        bar = TimelineBar(
            round(x, 2), max(1.0, round(width, 2)), row, span.kind, span.ending, description, start, end
        )
        if width < 1:
            unit_number = min(int(x), LANE_WIDTH - 1)  # at the window's very end, x is LANE_WIDTH
            short_bars.setdefault((unit_number, row), []).append(bar)
        else:
            bars.append(bar)
    for (x, row), bars_of_unit in short_bars.items():
        longest = max(bars_of_unit, key=lambda bar: bar.end - bar.start)
        others = f" and {len(bars_of_unit) - 1} more here" if len(bars_of_unit) > 1 else ""
        first, last = min(bar.start for bar in bars_of_unit), max(bar.end for bar in bars_of_unit)
        bars.append(
            TimelineBar(x, 1.0, row, longest.kind, longest.ending, longest.description + others, first, last)
        )
    return bars


def _bounds_around(start: float, end: float) -> tuple[str, str]:
    """Returns the bounds, for an address, of a window around a span, with some room on both sides."""
    room = max(0.05 * (end - start), SHORTEST_S / 2)
    return _format_bound(max(0.0, start - room)), _format_bound(end + room)


def _format_bound(seconds: float) -> str:
    """Returns seconds as they are written in an address: "2.5"."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".")


def fingerprint_of_timeline(view: PageRequest) -> str:
    """Returns a text that changes whenever the timeline does, and every `REDRAWN_AFTER_S` seconds while it
    grows."""
    # The spans of a running process that haven't ended grow without any change of a file.
    now = int(time.time() / REDRAWN_AFTER_S) if view.run.directory.is_running() else 0
    files = [(str(path), stat_of(path)) for path in timeline_files(view.run)]
    return short_hash(view.store.fingerprint([view.run]), files, now)


PAGES = (
    Page("/timeline", "Timeline", show, navigation="run", key="t", fingerprint=fingerprint_of_timeline),
    Page("/timeline/trace", "Chrome trace", download_trace),
)
