"""A paused terminal, or a pipe that nobody reads, holds no run up: what stands here would wait for ever. What
it took no more of is written later, in order, and the run's log has all of it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from treetune.processes import standard_error
from treetune.processes.standard_error import ERASE_LINE, SHOW_CURSOR, LiveStream, PatientStream

RUN = """
import sys
from pathlib import Path
from treetune import main
from treetune.runtime import console as console_module
from treetune.runtime.console import Console

try:
    main.main(["--help"])  # the command line puts the patient stream in place
except SystemExit:
    pass
console_module.PRINT_EVERY_S = 0.01
console = Console(Path(sys.argv[1]), visible=True)
with console.phase("training", "steps") as show:
    for number in range(2000):
        show(number, 2000)
        console.say(f"line {number} " + 100 * "x")
console.close()
print("the end of main", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture(params=["pipe", "paused terminal"])
def unread(request: pytest.FixtureRequest) -> Iterator[int]:
    """A file descriptor that takes no more output after a while."""
    if request.param == "pipe":
        reader, writer = os.pipe()
    else:
        reader, writer = pty.openpty()
        termios.tcflow(writer, termios.TCOOFF)  # as Ctrl-S does
    yield writer
    os.close(reader)
    os.close(writer)


def test_a_run_whose_messages_nobody_reads_goes_on_and_ends(unread: int, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    run = subprocess.run(
        [sys.executable, "-c", RUN, str(log)],
        stdout=subprocess.DEVNULL,
        stderr=unread,
        stdin=subprocess.DEVNULL,
        timeout=90,
        check=False,
    )
    assert run.returncode == 7
    text = log.read_text()
    assert all(f"line {number} x" in text for number in (0, 1000, 1999))
    assert text.splitlines()[-1].endswith("the last messages may be only here")


def test_what_nobody_read_comes_later_in_order_and_too_much_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(standard_error, "MOST_TEXTS", 20)
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as unbuffered:
        stream = PatientStream(unbuffered)
        lines = [f"{number:03d} {4000 * 'x'}\n" for number in range(60)]
        start = time.monotonic()
        for line in lines:
            stream.write(line)
        assert time.monotonic() - start < 10 * standard_error.WAIT_S
        assert stream.is_behind
        received: list[str] = []

        def read() -> None:
            with os.fdopen(reader) as pipe:
                received.extend(pipe)

        reading = threading.Thread(target=read)
        reading.start()
        stream.finish()
        assert not stream.is_behind
        stream.write("the end\n")
    reading.join(60)
    *taken, missing, end = received
    assert taken == lines[: len(taken)] and len(taken) >= 30
    assert missing == f"({60 - len(taken)} lines or parts of lines are missing here: nothing read them)\n"
    assert end == "the end\n"


def test_a_live_line_that_was_left_out_is_removed_and_leaves_the_cursor_visible() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as pipe, os.fdopen(writer, "w") as unread_pipe:
        stream = PatientStream(unread_pipe)
        live = LiveStream(stream)
        live.write("frame 1")
        filling = 100_000 * "x"  # more than a pipe takes
        stream.write(filling)
        live.write("frame 2")
        live.end()
        expected = "frame 1" + filling + ERASE_LINE + SHOW_CURSOR
        assert pipe.read(len(expected)).decode() == expected


def test_a_reader_that_has_ended_raises_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        stream = PatientStream(pipe)
        stream.write("nobody\n")
        stream.write("reads this\n")
        assert not stream.is_behind
