"""The guard: whatever is killed, nothing of the server is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from treetune.inference import guard

from .stubs import below, none_alive, until

SERVER = """
import os, signal, subprocess, sys, time
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
open(sys.argv[1], "w").write("ready")
time.sleep(600)
"""
PARENT = """
import json, os, subprocess, sys, time
guard, scratch, ready, server = sys.argv[1:]
python = [sys.executable, "-I", "-S"]
process = subprocess.Popen(
    [*python, guard, str(os.getpid()), scratch, *python, server, ready],
    stdin=subprocess.PIPE, start_new_session=True,
)
if os.environ.get("FORK") and os.fork() == 0:
    time.sleep(600)  # a forked worker keeps the pipe to the guard open
print(process.pid, flush=True)
time.sleep(600)
"""


class Family:
    """A parent that started a guard that runs a server that has children."""

    def __init__(self, folder: Path, fork: bool = False) -> None:
        self.scratch, ready = folder / "scratch", folder / "ready"
        self.scratch.mkdir()
        (folder / "server.py").write_text(SERVER)
        (folder / "parent.py").write_text(PARENT)
        arguments = [str(guard.__file__), str(self.scratch), str(ready), str(folder / "server.py")]
        self.parent = subprocess.Popen(
            [sys.executable, "-S", str(folder / "parent.py"), *arguments],
            stdout=subprocess.PIPE,
            env=os.environ | ({"FORK": "1"} if fork else {}),
        )
        assert self.parent.stdout is not None
        self.guard = int(self.parent.stdout.readline())
        assert until(ready.exists)
        self.tree = below(self.guard)
        self.server = next(pid for pid in self.tree if below(pid))
        self.forked = [pid for pid in below(self.parent.pid) if pid not in [self.guard, *self.tree]]

    def end(self) -> None:
        for pid in [self.parent.pid, *self.forked, self.guard, *self.tree]:
            if not none_alive([pid]):
                os.kill(pid, signal.SIGKILL)
        self.parent.wait()


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    found = Family(tmp_path)
    yield found
    found.end()


def test_nothing_is_left_when_the_parent_is_killed(family: Family) -> None:
    assert len(family.tree) == 3
    os.kill(family.parent.pid, signal.SIGKILL)
    assert until(lambda: none_alive([family.guard, *family.tree]))
    assert not family.scratch.exists()


def test_a_forked_worker_of_the_parent_that_lives_on_does_not_keep_the_server(tmp_path: Path) -> None:
    family = Family(tmp_path, fork=True)
    try:
        assert family.forked
        os.kill(family.parent.pid, signal.SIGKILL)
        assert until(lambda: none_alive([family.guard, *family.tree]))
    finally:
        family.end()


def test_children_are_ended_when_the_server_is_killed(family: Family) -> None:
    os.kill(family.server, signal.SIGKILL)
    assert until(lambda: none_alive([family.guard, *family.tree]))


def test_the_server_is_ended_when_the_guard_is_killed(family: Family) -> None:
    os.kill(family.guard, signal.SIGKILL)
    assert until(lambda: none_alive([family.server]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_guard_ends_everything(family: Family, number: signal.Signals) -> None:
    os.kill(family.guard, number)
    assert until(lambda: none_alive([family.guard, *family.tree]))


def test_the_guard_reports_how_the_command_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", "-c", "raise SystemExit(7)"]
    with subprocess.Popen(
        [sys.executable, "-I", "-S", str(guard.__file__), str(os.getpid()), str(tmp_path / "no"), *command],
        stdin=subprocess.PIPE,  # stays open: an end of it would be a request to end
    ) as watched:
        assert watched.wait(timeout=20) == 7


def test_descendants_are_found_through_every_generation() -> None:
    script = (
        "import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', 'input()'],"
        " stdin=subprocess.PIPE); print(__import__('json').dumps([os.getpid(), p.pid]), flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        both = json.loads(child.stdout.readline())
        assert set(both) <= set(guard.descendants(os.getpid()))
        assert guard.descendants(child.pid) == both[1:]
    finally:
        child.communicate(b"\n", timeout=20)
