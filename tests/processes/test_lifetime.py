"""A process ends when any of its launcher's processes does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from treetune.processes.lifetime import ProcessIdentity, launcher_processes

RANK = """
import sys, time
from pathlib import Path
from treetune.processes import lifetime
lifetime.exit_on_signals()
lifetime.end_with_launcher()
out = Path(sys.argv[1])
try:
    (out / "rank.pid").write_text(str(__import__("os").getpid()))
    time.sleep(60)
finally:
    (out / "left").write_text("in order")
"""

LATE = """
import os, sys, time
from pathlib import Path
(Path(sys.argv[1]) / "early.pid").write_text(str(os.getpid()))
while not (Path(sys.argv[1]) / "go").exists():
    time.sleep(0.02)
"""

LAUNCHER = """
import os, subprocess, sys
from pathlib import Path
out, depth = Path(sys.argv[1]), int(sys.argv[2])
(out / f"launcher-{depth}.pid").write_text(str(os.getpid()))
again = [sys.executable, __file__, str(out), str(depth - 1)]
subprocess.run(again if depth else [sys.executable, str(out / "rank.py"), str(out)])
"""

DEADLINE_S = 60.0


@contextmanager
def launched(folder: Path, rank: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher, its second half, whose file has the name of DeepSpeed's, and a rank below it."""
    (folder / "rank.py").write_text(rank)
    lower, upper = folder / "deepspeed.launcher.launch.py", folder / "deepspeed_launcher.py"
    lower.write_text(LAUNCHER)
    upper.write_text(LAUNCHER.replace("__file__", repr(str(lower))))
    top = subprocess.Popen(
        [sys.executable, str(upper), str(folder), "1"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), **environment},
    )
    try:
        yield top
    finally:
        top.kill()
        top.wait()


def pid_in(path: Path) -> int:
    return int(path.read_text() or 0) if path.is_file() else 0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def process_in(path: Path) -> ProcessIdentity:
    """The one whose id will come to stand there."""
    wait_for(lambda: pid_in(path) > 0)
    found = ProcessIdentity.of(pid_in(path))
    assert found is not None and found.is_alive()
    return found


@pytest.mark.parametrize("killed", ["launcher-1.pid", "launcher-0.pid"])
def test_a_rank_leaves_in_order_when_a_process_of_its_launcher_is_killed(killed: str, tmp_path: Path) -> None:
    with launched(tmp_path, RANK):
        rank = process_in(tmp_path / "rank.pid")
        os.kill(pid_in(tmp_path / killed), signal.SIGKILL)
        wait_for(lambda: not rank.is_alive())
    assert (tmp_path / "left").read_text() == "in order"


@pytest.mark.parametrize("killed", ["launcher-1.pid", "launcher-0.pid"])
def test_a_rank_whose_launcher_was_gone_before_it_looked_begins_nothing(killed: str, tmp_path: Path) -> None:
    """It was importing, say, while that was killed, and has become init's child or grandchild."""
    with launched(tmp_path, LATE + RANK, CROSS_SIZE="1") as top:
        rank = process_in(tmp_path / "early.pid")
        os.kill(pid_in(tmp_path / killed), signal.SIGKILL)
        top.wait()
        (tmp_path / "go").touch()
        wait_for(lambda: not rank.is_alive())
    assert not (tmp_path / "rank.pid").exists()


def test_a_process_id_that_was_used_again_is_another_process() -> None:
    me = ProcessIdentity.of(os.getpid())
    assert me is not None
    assert me.is_alive()
    assert not ProcessIdentity(me.pid, str(int(me.started) - 1)).is_alive()
    child = subprocess.Popen([sys.executable, "-c", ""])
    gone = ProcessIdentity.of(child.pid)
    child.wait()
    assert gone is None or not gone.is_alive()


def test_an_ancestor_that_is_hidden_from_this_user_is_no_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(process: psutil.Process) -> None:
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil.Process, "parent", hidden)
    assert launcher_processes() == []


def run_program(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python program, which may import treetune, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)


KILLED_AFTER_THE_FORK = """
import ctypes, os, signal, sys, time
from treetune.processes import lifetime

parent = os.getpid()

class LibraryOfALateChild:
    def prctl(self, option, number):
        os.kill(parent, signal.SIGKILL)
        while os.getppid() == parent:
            time.sleep(0.01)

ctypes.CDLL = lambda *arguments, **options: LibraryOfALateChild()
with lifetime.start_process_group([sys.executable, "-c", "print('begun')"], {}, sys.stdout) as process:
    process.wait()
"""


def test_a_child_whose_parent_is_killed_before_it_is_set_up_begins_nothing() -> None:
    finished = run_program(KILLED_AFTER_THE_FORK)  # waits for the child, too, which has the same output
    assert finished.returncode == -signal.SIGKILL, finished.stderr
    assert finished.stdout == ""


SIGNAL_IN_A_CALLBACK = """
import os, signal, sys, time, weakref
from treetune.processes import lifetime

class Thing:
    if sys.argv[1] == "finalizer":
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)
            sum(range(1000))  # the signal's handler runs here at the latest

def callback(reference):
    os.kill(os.getpid(), signal.SIGINT)
    sum(range(1000))

lifetime.exit_on_signals()
thing = Thing()
reference = weakref.ref(thing, callback) if sys.argv[1] == "weak reference" else None
del thing
time.sleep(30)
print("the signal was lost")
"""


@pytest.mark.parametrize("where", ["weak reference", "finalizer"])
def test_a_signal_during_a_callback_whose_exceptions_python_ignores_ends_the_process(where: str) -> None:
    finished = run_program(SIGNAL_IN_A_CALLBACK, where)
    assert finished.stdout == ""
    assert finished.returncode == 128 + signal.SIGINT, finished.stderr


SIGNAL_THAT_IS_DROPPED = """
import contextlib, os, signal
from treetune.processes import lifetime

lifetime.exit_on_signals()
with lifetime.stopping_gracefully(lifetime.GracefulStop(grace_s=10)) as stop:
    stop.begin("the end of iteration 1", None, None)
    with contextlib.suppress(BaseException):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))
    print(stop.asked_by)
"""


def test_a_loop_ends_at_its_boundary_if_other_code_drops_the_signals_exception() -> None:
    finished = run_program(SIGNAL_THAT_IS_DROPPED)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == [str(int(signal.SIGINT))]


SIGNAL_WHILE_PYTHON_ENDS = """
import os, signal
from treetune.processes import lifetime

class LastObject:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

lifetime.exit_on_signals()
alive_until_the_end = LastObject()
os.kill(os.getpid(), signal.SIGINT)
sum(range(1000))
"""


def test_another_signal_while_python_ends_leaves_the_first_ones_exit_code() -> None:
    finished = run_program(SIGNAL_WHILE_PYTHON_ENDS)
    assert finished.returncode == 128 + signal.SIGINT, finished.stderr
