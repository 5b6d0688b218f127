"""What a process began is on disk before it ends, and what it left is read whatever happened to it."""

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
        file.write('{"crc32":"00000000","row":{"end":')  # torn in the midst of a line

    resumed = Timeline(path)
    with suppress(RuntimeError), resumed.span("server", "answers") as ended:
        ended["why"] = "closed"
        raise RuntimeError
    resumed.close()

    first, second = read_timeline(path)
    assert [(one.lane, one.name, one.about) for one in first.spans] == [
        ("phases", "training", {"iteration": 0}),
        ("work", "checkpoint", {}),
        ("phases", "sync", {"iteration": 0}),
    ]
    training, checkpoint, sync = first.spans
    assert checkpoint.end is not None and training.end is not None and sync.end is None
    assert training.start <= checkpoint.start <= checkpoint.end <= training.end <= sync.start <= first.last
    assert (first.pid, first.closed, second.closed) == (os.getpid(), False, True)
    assert [(one.name, one.about, one.end is None) for one in second.spans] == [
        ("answers", {"why": "closed"}, False)
    ]


def test_a_damaged_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "run.timeline.jsonl"
    written = Timeline(path)
    for name in ("one", "two"):
        with written.span("work", name):
            pass
    path.write_bytes(path.read_bytes().replace(b'"two"', b'"owt"') + b"\xff\n[1]\n")
    [process] = read_timeline(path)
    assert [one.name for one in process.spans] == ["one"]


def test_a_disk_that_takes_nothing_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "logs").write_text("a file where a folder should be")
    timeline = Timeline(tmp_path / "logs" / "run.timeline.jsonl")
    for _ in range(2):
        with timeline.span("phases", "training"):
            pass
    timeline.close()
    with Timeline().span("phases", "without a path"):
        pass
    told = [record.message for record in caplog.records if "no longer recorded" in record.message]
    assert len(told) <= 1
