"""What an experiment did when: lanes of phases along true time, a table of them, and a Chrome trace."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.responses import Response

from treetune_view.page import Page, View, digest, in_seconds
from treetune_view.store.timeline import Lane, Shown, Times, chrome_trace, mark_of, times_of

WIDTH = 1000
"""Units of a lane's drawing: what is shorter than one of them is drawn with its neighbours."""

DEEPEST = 4
"""Rows of a lane: what began within something else stands below it."""

LISTED = 50
"""Rows of the table on one page."""

SHORTEST_S = 0.01
"""Of time that is shown at once."""

LIVE_S = 5.0
"""How often what goes on is drawn anew."""


@dataclass(frozen=True)
class Bar:
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
class Drawn:
    lane: Lane
    bars: Sequence[Bar]
    rows: int


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
        """By so many of its lengths, not beyond the ends."""
        start = min(max(0.0, self.start + by * self.length), max(0.0, self.whole - self.length))
        return _written(start), _written(start + self.length)

    def scaled(self, by: float) -> tuple[str, str]:
        """Around its middle, not beyond the ends."""
        half = max(SHORTEST_S, by * self.length) / 2
        middle = (self.start + self.end) / 2
        return _written(max(0.0, middle - half)), _written(min(self.whole, middle + half))


def show(view: View) -> Response:
    """`?run=`, `?from=` and `?to=` in seconds since the beginning, `?lane=` (its spans alone), `?page=`."""
    times = times_of(view.store, view.run)
    if times is None:
        return view.render("timeline.html", times=None)
    window = _window(view, times)
    lanes = [lane for lane in times.lanes if view.text("lane") in ("", lane.name)]
    if not lanes:
        there = ", ".join(lane.name for lane in times.lanes)
        raise ValueError(f"there is no lane {view.text('lane')!r}: there are {there}")
    inside = sorted(
        ((lane, span) for lane in lanes for span in lane.spans if _meets(span, window, times)),
        key=lambda one: one[1].start,
    )
    page = view.integer("page", 1, least=1)
    drawn = [_drawn(lane, window, times) for lane in lanes]
    return view.render(
        "timeline.html",
        times=times,
        window=window,
        drawn=drawn,
        endings={bar.ending for one in drawn for bar in one.bars},
        kinds={bar.kind: bar.kind for one in drawn for bar in one.bars},
        ticks=[
            clock(window.start + share * window.length, window.length) for share in (0, 0.25, 0.5, 0.75, 1)
        ],
        listed=inside[(page - 1) * LISTED : page * LISTED],
        total=len(inside),
        number=page,
        pages=max(1, -(-len(inside) // LISTED)),
        clock=lambda at: clock(at - times.start, window.length),
        date=lambda at: time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at)),
        zoomed=lambda span: _around(span.start - times.start, span.end - times.start),
        bar_zoomed=lambda bar: _around(bar.start, bar.end),
        took=took,
        width=WIDTH,
    )


def trace(view: View) -> Response:
    """`?run=`: the whole timeline for chrome://tracing or Perfetto."""
    made = chrome_trace(view.run.name, times_of(view.store, view.run))
    name = re.sub(r"[^\w.-]+", "-", view.run.name, flags=re.ASCII).strip("-.") or "experiment"
    return Response(
        json.dumps(made),
        media_type="application/json",
        headers={"Content-Disposition": f'attachment; filename="{name}.trace.json"'},
    )


def clock(seconds: float, length: float) -> str:
    """Since the beginning, as exact as a stretch of that length needs it: ``1:02:03``, ``0:02.5``."""
    digits = 0 if length >= 20 else 1 if length >= 2 else 2 if length >= 0.2 else 3
    whole = round(seconds, digits)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(int(minutes), 60)
    second = f"{rest:0{3 + digits if digits else 2}.{digits}f}"
    return f"{hours}:{minutes:02d}:{second}" if hours else f"{minutes}:{second}"


def _window(view: View, times: Times) -> Window:
    whole = max(times.end - times.start, SHORTEST_S)
    start, end = _seconds(view, "from", 0.0), _seconds(view, "to", whole)
    if end <= start:
        raise ValueError(
            f"to is {end:g} and from {start:g}: to must be later, both in seconds since the beginning"
        )
    return Window(start, max(end, start + SHORTEST_S), whole)


def _seconds(view: View, name: str, default: float) -> float:
    text = view.text(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 <= value < 1e10):
        raise ValueError(f"{name} is {text!r} and must be a number of seconds since the beginning")
    return value


def _meets(span: Shown, window: Window, times: Times) -> bool:
    return span.end - times.start >= window.start and span.start - times.start <= window.end


def _drawn(lane: Lane, window: Window, times: Times) -> Drawn:
    """Rectangles of what lies in the window; of what is shorter than a unit the longest stands for all."""
    unit = window.length / WIDTH
    bars: list[Bar] = []
    short: dict[tuple[int, int], list[Bar]] = {}
    ends: list[float] = []
    for span in lane.spans:
        ends = [end for end in ends if end > span.start][: DEEPEST - 1]
        row = len(ends)
        ends.append(span.end)
        if not _meets(span, window, times):
            continue
        start, end = span.start - times.start, span.end - times.start
        left, right = max(start, window.start), min(end, window.end)
        x, width = (left - window.start) / unit, (right - left) / unit
        words = f"{span.name}, {clock(start, end - start)}, {took(span)}" + f" ({span.words})" * bool(
            span.words
        )
        bar = Bar(round(x, 2), max(1.0, round(width, 2)), row, span.kind, span.ending, words, start, end)
        if width < 1:
            short.setdefault((min(int(x), WIDTH - 1), row), []).append(bar)
        else:
            bars.append(bar)
    for (x, row), own in short.items():
        longest = max(own, key=lambda bar: bar.end - bar.start)
        others = f" and {len(own) - 1} more here" if len(own) > 1 else ""
        first, last = min(bar.start for bar in own), max(bar.end for bar in own)
        bars.append(Bar(x, 1.0, row, longest.kind, longest.ending, longest.words + others, first, last))
    return Drawn(lane, bars, 1 + max((bar.row for bar in bars), default=0))


def took(span: Shown) -> str:
    seconds = span.end - span.start
    if span.ending == "cut":
        return "cut off with its process, nobody wrote when"
    length = in_seconds(seconds) if seconds < 100 else clock(seconds, seconds)
    return f"{length} so far" if span.ending == "open" else length


def _around(start: float, end: float) -> tuple[str, str]:
    """A stretch with a little room on both sides."""
    room = max(0.05 * (end - start), SHORTEST_S / 2)
    return _written(max(0.0, start - room)), _written(end + room)


def _written(seconds: float) -> str:
    return f"{seconds:.3f}".rstrip("0").rstrip(".")


def mark(view: View) -> str:
    running = view.run.directory.is_running()
    now = int(time.time() / LIVE_S) if running else 0
    return digest(view.store.mark([view.run]), mark_of(view.run), now)


PAGE = Page("/timeline", "Timeline", show, place="run", key="t", mark=mark)
TRACE = Page("/timeline/trace", "Chrome trace", trace)
