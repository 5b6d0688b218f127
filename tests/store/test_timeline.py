"""Promises of timelines: a span is on disk while it goes on, the spans of a killed process and of its
successor are read, a damaged line is ignored, and a disk that takes nothing ends no run.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from treetune.store.timeline import Timeline, read_timeline


def test_spans_are_read_as_they_were_written_also_those_of_a_process_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.timeline.jsonl"
    killed = Timeline(path)
    with killed.span("phases", "training", iteration=0):
        assert [span.end for span in read_timeline(path)[0].spans] == [None], "it is there while it goes on"
        with killed.span("work", "checkpoint"):
            pass
    never_ended = killed.span("phases", "sync", iteration=0)
    never_ended.__enter__()
    with path.open("a") as file:
        file.write('{"crc32":"00000000","row":{"end":')  # a line that the kill has cut

    resumed = Timeline(path)
    with suppress(RuntimeError), resumed.span("server", "answers") as ended:
        ended["why"] = "closed"
        raise RuntimeError
    resumed.close()

    of_killed, of_resumed = read_timeline(path)
    assert [(span.lane, span.name, span.about) for span in of_killed.spans] == [
        ("phases", "training", {"iteration": 0}),
        ("work", "checkpoint", {}),
        ("phases", "sync", {"iteration": 0}),
    ]
    training, checkpoint, sync = of_killed.spans
    assert checkpoint.end is not None and training.end is not None and sync.end is None
    assert training.start <= checkpoint.start <= checkpoint.end <= training.end <= sync.start
    assert sync.start <= of_killed.last
    assert (of_killed.pid, of_killed.closed, of_resumed.closed) == (os.getpid(), False, True)
    (answers,) = of_resumed.spans
    assert (answers.name, answers.about) == ("answers", {"why": "closed"})
    assert answers.end is not None


def test_a_damaged_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "run.timeline.jsonl"
    timeline = Timeline(path)
    for name in ("intact", "damaged"):
        with timeline.span("work", name):
            pass
    path.write_bytes(path.read_bytes().replace(b'"damaged"', b'"DAMAGED"') + b"\xff\n[1]\n")
    [process] = read_timeline(path)
    assert [span.name for span in process.spans] == ["intact"]


def test_a_disk_that_takes_nothing_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "logs").write_text("a file where a folder should be")
    timeline = Timeline(tmp_path / "logs" / "run.timeline.jsonl")
    for _ in range(2):
        with timeline.span("phases", "training"):
            pass
    timeline.close()
    with Timeline().span("phases", "without a path"):
        pass
    warnings = [record.message for record in caplog.records if "no longer recorded" in record.message]
    assert len(warnings) <= 1
