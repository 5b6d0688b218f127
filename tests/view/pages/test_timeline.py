"""The timeline of a run: its processes, phases and servers.

Promises that these tests hold:

* Every span has its lane, start and end, also of a run that goes on, was killed or resumed.
* The page and its trace for Chrome and Perfetto show the same spans; thousands of spans stay a small page.
* A damaged line is named on the page.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.view.conftest import Viewer
from tests.view.recorded import begin_run, record_iteration
from treetune.runtime.directory import ExperimentDirectory
from treetune.store.journal import sealed_line
from treetune.view.pages.timeline import chrome_trace, format_clock, read_times
from treetune.view.store import Store

BEGAN = 1_700_000_000.0


def write_timeline(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(sealed_line(json.dumps(row | {"at": BEGAN + row["at"]})) for row in rows))


def begin_of_span(number: int, lane: str, name: str, at: float, **more: Any) -> dict[str, Any]:
    return {"begin": number, "lane": lane, "name": name, "at": at, **more}


@pytest.fixture
def timed(folder: Path) -> Path:
    """The times of a run that was killed in the training of iteration 1 and resumed, and of its server."""
    run = begin_run(folder / "run")
    phase = {"lane": "phases", "iteration": 0}
    write_timeline(
        run.logs_folder / "run.timeline.jsonl",
        {"process": 11, "host": "here", "at": 0.0},
        begin_of_span(1, name="generation", at=1.0, **phase),
        begin_of_span(2, "work", "iteration 1: <b>sampling</b>", 1.0),
        {"end": 2, "at": 4.0},
        {"end": 1, "at": 4.0},
        begin_of_span(3, name="training", at=4.0, **phase),
        {"process": 12, "host": "here", "at": 100.0},
        begin_of_span(1, name="training", at=101.0, **phase),
        {"end": 1, "at": 109.0},
        {"closed": 12, "at": 110.0},
    )
    write_timeline(
        run.logs_folder / "engine.timeline.jsonl",
        {"process": 11, "host": "here", "at": 0.5},
        begin_of_span(1, "server", "starts", 0.5, weights="start"),
        {"end": 1, "at": 1.0},
        begin_of_span(2, "server", "answers", 1.0, start=1, pid=77),
        {"end": 2, "at": 3.0, "why": "its process ended with code -9"},
        {"closed": 11, "at": 5.0},
    )
    return run.logs_folder / "run.timeline.jsonl"


@pytest.mark.usefixtures("timed")
def test_lanes_have_the_spans_of_each_process_and_which_were_cut_off(viewer: Viewer) -> None:
    times = read_times(viewer.store.run("run"))
    assert (times.start, times.end) == (BEGAN, BEGAN + 110)
    spans_by_lane = {}
    for lane in times.lanes:
        spans_by_lane[lane.name] = [
            (span.name, span.start - BEGAN, span.end - BEGAN, span.ending) for span in lane.spans
        ]
    assert spans_by_lane == {
        "run: process": [("run", 0, 4, "cut"), ("run", 100, 110, "")],
        "run: phases": [("generation", 1, 4, ""), ("training", 4, 4, "cut"), ("training", 101, 109, "")],
        "run: work": [("iteration 1: <b>sampling</b>", 1, 4, "")],
        "engine: process": [("engine", 0.5, 5, "")],
        "engine: server": [("starts", 0.5, 1, ""), ("answers", 1, 3, "")],
    }
    record_iteration(ExperimentDirectory(viewer.folder / "run"), 0)
    assert "9,000 tokens a second" in viewer.page("/timeline?run=run"), (
        "the speed of the servers in this time"
    )
    # A span of a server has the pid of the server, and names the process that watches it.
    page = viewer.page("/timeline?run=run")
    assert "start 1, pid 77: its process ended" in page and "watched by process 11 on here" in page


def test_credit_during_generation_is_a_span_of_its_own_between_those_of_generation(
    store: Store, folder: Path
) -> None:
    """Times of credit that ran during generation are written afterwards, behind the end of generation."""
    run = begin_run(folder / "run")
    spans = [("generation", 1, 11), ("credit", 3, 5), ("credit", 7, 11), ("credit", 11, 12)]
    rows: list[dict[str, Any]] = [{"process": 11, "host": "here", "at": 0.0}]
    for number, (name, start, end) in enumerate(spans):
        rows += [begin_of_span(number, "phases", name, start, iteration=0), {"end": number, "at": end}]
    rows.append(begin_of_span(9, "phases", "training", 12.0, iteration=0))
    write_timeline(run.logs_folder / "run.timeline.jsonl", *rows)
    [phases] = [lane for lane in read_times(store.run("run")).lanes if lane.what == "phases"]
    assert [(span.name, span.start - BEGAN, span.end - BEGAN) for span in phases.spans] == [
        ("generation", 1, 3), ("credit", 3, 5), ("generation", 5, 7), ("credit", 7, 11), ("credit", 11, 12),
        ("training", 12, 12),
    ]  # fmt: skip


def test_the_trace_has_the_format_of_chrome_and_perfetto(viewer: Viewer, timed: Path) -> None:
    (viewer.folder / "a").mkdir()
    timed.parents[1].rename(viewer.folder / "a" / "run 1")
    answer = viewer.get("/timeline/trace", run="a/run 1")
    assert 'filename="a-run-1.trace.json"' in answer.headers["content-disposition"]
    events = answer.json()["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(names.values()) == {"run", "engine"}
    spans = [event for event in events if event["ph"] == "X"]
    times = [event[key] for event in spans for key in ("ts", "dur", "pid", "tid")]
    assert len(spans) == 9 and all(isinstance(time, int | float) and time >= 0 for time in times)
    [answers] = [event for event in spans if event["name"] == "answers"]
    assert (answers["ts"], answers["dur"], names[answers["pid"]]) == (1e6, 2e6, "engine")
    assert answers["args"]["why"] == "its process ended with code -9"
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in spans} == threads
    assert chrome_trace("none", None)["traceEvents"] == []


@pytest.mark.usefixtures("timed")
def test_the_page_shows_the_interval_and_the_lane_of_its_address(viewer: Viewer) -> None:
    whole = viewer.page("/timeline?run=run")
    assert "process 12 on here, resume 1" in whole
    assert '<rect class="generation "' in whole and '<rect class="work' not in whole, (
        "work is coloured as its phase"
    )
    assert "&lt;b&gt;sampling&lt;/b&gt;" in whole and "<b>sampling" not in whole
    assert "its process died; the end was not recorded" in whole
    part = viewer.page("/timeline?run=run&from=100.5&to=105")
    assert part.count('<tr id="span-') < whole.count('<tr id="span-') and "1:40.5" in part
    lane = viewer.page("/timeline", run="run", lane="engine: server")
    assert "this interval in engine: server" in lane and "its process ended with code -9" in lane
    for wrong, message in (
        ("from=soon", "must be a number of seconds"),
        ("from=nan", "must be a number of seconds"),
        ("from=9&to=9", "to must be later"),
        ("lane=gpu", "there is no lane"),
    ):
        assert message in viewer.refusal(f"/timeline?run=run&{wrong}", 400)


def test_a_damaged_line_is_named_on_the_page(viewer: Viewer, timed: Path) -> None:
    assert "damaged" not in viewer.page("/timeline?run=run")
    timed.write_text(timed.read_text().replace("sampling", "sampLing") + "torn by a cra")
    assert "run.timeline.jsonl, line 3 is damaged" in viewer.page("/timeline?run=run")


def test_a_run_that_wrote_no_times_has_no_timeline(viewer: Viewer) -> None:
    begin_run(viewer.folder / "new")
    assert "Nothing has been recorded yet" in viewer.page("/timeline?run=new")


def test_an_open_span_ends_now_and_thousands_of_spans_stay_a_small_page(viewer: Viewer) -> None:
    run, store = begin_run(viewer.folder / "run"), viewer.store
    rows: list[dict[str, Any]] = [{"process": os.getpid(), "host": "elsewhere", "at": 0.0}]
    for number in range(5000):
        rows += [begin_of_span(number, "phases", "sync", float(number)), {"end": number, "at": number + 0.5}]
    rows.append(begin_of_span(5000, "phases", "training", 5000.0, iteration=7))
    write_timeline(run.logs_folder / "run.timeline.jsonl", *rows)
    with run.locked():
        lanes = read_times(store.run("run")).lanes
        last = next(lane for lane in lanes if lane.what == "phases").spans[-1]
        assert last.ending == "open" and last.end > BEGAN + 10_000
        page = viewer.page("/timeline?run=run&from=0&to=5001")
    assert "so far" in page and page.count('<tr id="span-') == 3, "one row for all spans of a name"
    assert re.search(r"count\">5000</td><td[^>]*>2[\u2009,]?500 s<", page)
    assert page.count("<rect class=") < 1200 and "more here" in page


@pytest.mark.parametrize(
    ("seconds", "length", "expected"),
    [(3723.4, 9000, "1:02:03"), (62.54, 10, "1:02.5"), (0.0625, 0.1, "0:00.062"), (59.99, 60, "1:00")],
)
def test_times_are_as_precise_as_the_shown_interval(seconds: float, length: float, expected: str) -> None:
    assert format_clock(seconds, length) == expected
