"""The guard: whatever is killed, nothing of the server is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from treetune.inference import guard

from .stubs import below, none_alive, until

# A server with children: an engine, and two others, one of which has left its session.
SERVER = """
import subprocess, sys, time
sleep = ["-S", "-c", "import time; time.sleep(600)"]
engine = subprocess.Popen([sys.argv[2], *sleep], executable=sys.executable)
subprocess.Popen([sys.executable, *sleep], start_new_session=True)
with open(sys.argv[1], "w") as file:
    file.write(str(engine.pid))
time.sleep(600)
"""
PARENT = """
import os, subprocess, sys, time
guard, scratch, server, ready, engine = sys.argv[1:]
python = [sys.executable, "-I", "-S"]
process = subprocess.Popen(
    [*python, guard, str(os.getpid()), scratch, *python, server, ready, engine],
    stdin=subprocess.PIPE, start_new_session=True,
)
if os.environ.get("FORK") and os.fork() == 0:
    time.sleep(600)  # a forked worker keeps the pipe to the guard open
print(process.pid, flush=True)
time.sleep(600)
"""


class Family:
    """A parent that started a guard that runs a server that has children."""

    def __init__(self, folder: Path, fork: bool = False, engine: str = "anything") -> None:
        self.scratch, ready, self.errors = folder / "scratch", folder / "ready", folder / "errors"
        self.scratch.mkdir()
        (folder / "server.py").write_text(SERVER)
        (folder / "parent.py").write_text(PARENT)
        arguments = [guard.__file__, self.scratch, folder / "server.py", ready, engine]
        with self.errors.open("w") as errors:
            self.parent = subprocess.Popen(
                [sys.executable, "-S", folder / "parent.py", *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | ({"FORK": "1"} if fork else {}),
            )
        assert self.parent.stdout is not None
        self.guard = int(self.parent.stdout.readline())
        assert until(lambda: ready.is_file() and ready.read_text() != "")
        self.engine = int(ready.read_text())
        self.tree = below(self.guard)
        assert len(self.tree) == 3
        self.server = next(pid for pid in self.tree if below(pid))
        self.forked = [pid for pid in below(self.parent.pid) if pid not in [self.guard, *self.tree]]

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """And nothing is left."""
        os.kill(pid, number)
        assert until(lambda: none_alive([self.guard, *self.tree]))
        assert not self.scratch.exists()

    def end(self) -> None:
        for pid in [self.parent.pid, *self.forked, self.guard, *self.tree]:
            if not none_alive([pid]):
                os.kill(pid, signal.SIGKILL)
        self.parent.wait()


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Callable[..., Family]]:
    made: list[Family] = []

    def make(**settings: object) -> Family:
        made.append(Family(tmp_path, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a forked worker that lives on"])
def test_nothing_is_left_when_the_parent_is_killed(family: Callable[..., Family], fork: bool) -> None:
    found = family(fork=fork)
    assert bool(found.forked) == fork
    found.kill(found.parent.pid)


def test_children_are_ended_when_the_server_is_killed(family: Callable[..., Family]) -> None:
    found = family()
    found.kill(found.server)


def test_vllms_server_that_survives_its_engine_process_is_ended(family: Callable[..., Family]) -> None:
    """It would leave requests unanswered."""
    found = family(engine="VLLM::EngineCore")
    # The guard looks for it twice a second, and has to have seen it.
    assert not until(lambda: none_alive([found.guard]), 1.5)
    found.kill(found.engine)
    assert "is gone: its server is ended" in found.errors.read_text()


def test_the_server_is_ended_when_the_guard_is_killed(family: Callable[..., Family]) -> None:
    found = family()
    os.kill(found.guard, signal.SIGKILL)
    assert until(lambda: none_alive([found.server]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_guard_ends_everything(family: Callable[..., Family], number: signal.Signals) -> None:
    found = family()
    found.kill(found.guard, number)


def test_the_guard_reports_how_the_command_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", "-c", "raise SystemExit(7)"]
    with subprocess.Popen(
        [sys.executable, "-I", "-S", str(guard.__file__), str(os.getpid()), str(tmp_path / "no"), *command],
        stdin=subprocess.PIPE,  # stays open: an end of it would be a request to end
    ) as watched:
        assert watched.wait(timeout=20) == 7


def test_descendants_are_found_through_every_generation() -> None:
    script = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', 'input()'],"
        " stdin=subprocess.PIPE); print(p.pid, flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert {child.pid, grandchild} <= set(guard.descendants(os.getpid()))
        assert guard.descendants(child.pid) == [grandchild]
    finally:
        child.communicate(b"\n", timeout=20)
