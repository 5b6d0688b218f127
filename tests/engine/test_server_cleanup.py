"""The processes and files of a server end with it, whichever process is killed.

Promises that these tests hold:

* A guard beside each server ends the server and all below it when the trainer, the server or its engine dies.
* The folder of a server and the memory that it shared are deleted, at the latest when the next server starts.
* Folders of live processes, and files that are nobody's, stay.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.engine.test_launch import launch
from tests.support.stubs import below, none_alive, until
from treetune.engine import guard
from treetune.engine.launch import make_scratch_folder, refuse_long_paths

# A server with two children: an engine, and a process in a session of its own.
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
    """A parent process that started a guard, which runs a server with children."""

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
        """Sends a signal to one process and checks that nothing below the guard is left."""
        os.kill(pid, number)
        assert until(lambda: none_alive([self.guard, *self.tree]))
        assert not self.scratch.exists()

    def end(self) -> None:
        for pid in [self.parent.pid, *self.forked, self.guard, *self.tree]:
            if not none_alive([pid]):
                os.kill(pid, signal.SIGKILL)
        self.parent.wait()


@pytest.fixture
def start_family(tmp_path: Path) -> Iterator[Callable[..., Family]]:
    families: list[Family] = []

    def start(**settings: object) -> Family:
        families.append(Family(tmp_path, **settings))  # type: ignore[arg-type]
        return families[-1]

    yield start
    for start_family in families:
        start_family.end()


@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a forked worker that lives on"])
def test_nothing_is_left_when_the_parent_is_killed(start_family: Callable[..., Family], fork: bool) -> None:
    family = start_family(fork=fork)
    assert bool(family.forked) == fork
    family.kill(family.parent.pid)


def test_children_are_ended_when_the_server_is_killed(start_family: Callable[..., Family]) -> None:
    family = start_family()
    family.kill(family.server)


def test_vllms_server_that_survives_its_engine_process_is_ended(start_family: Callable[..., Family]) -> None:
    """Without its engine process, the server would accept requests and never answer them."""
    family = start_family(engine="VLLM::EngineCore")
    # The guard looks for it twice a second, and has to have seen it.
    assert not until(lambda: none_alive([family.guard]), 1.5)
    family.kill(family.engine)
    assert "is gone: its server is ended" in family.errors.read_text()


def test_the_server_is_ended_when_the_guard_is_killed(start_family: Callable[..., Family]) -> None:
    family = start_family()
    os.kill(family.guard, signal.SIGKILL)
    assert until(lambda: none_alive([family.server]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_guard_ends_everything(
    start_family: Callable[..., Family], number: signal.Signals
) -> None:
    family = start_family()
    family.kill(family.guard, number)


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
        assert {child.pid, grandchild} <= set(guard.find_descendants(os.getpid()))
        assert guard.find_descendants(child.pid) == [grandchild]
    finally:
        child.communicate(b"\n", timeout=20)


# Shared memory

SHARING = """
import os, signal, sys, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=128)
from multiprocessing import resource_tracker
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)  # it would delete the memory
with open(sys.argv[1] + ".new", "w") as file:
    file.write(memory.name)
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


@pytest.mark.parametrize("killed", ["server", "guard and server"])
def test_memory_that_a_killed_server_shared_is_deleted(killed: str, temporary: Path) -> None:
    scratch, ready, program = temporary / "treetune-engine-a", temporary / "ready", temporary / "program.py"
    scratch.mkdir()
    (scratch / "held").touch()  # nobody locks it
    program.write_text(SHARING)
    command = [sys.executable, "-I", "-S", program, ready]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), scratch, *command],
        stdin=subprocess.PIPE,
    )
    notes = scratch / guard.NOTES_OF_SHARED_MEMORY
    assert until(ready.is_file)
    memory, others = Path("/dev/shm", ready.read_text()), Path("/dev/shm", f"psm_{uuid4().hex}")
    others.touch()
    try:
        assert until(lambda: notes.is_file() and memory.name in notes.read_text())
        with notes.open("a") as file:
            file.write(f"{others.name} 0\n../{others.name} 0\n")  # another inode
        server = min(guard.find_descendants(process.pid))
        if killed == "guard and server":
            process.kill()
        os.kill(server, signal.SIGKILL)
        process.wait(timeout=60)
        if killed == "guard and server":
            assert until(lambda: none_alive([server]))
            assert memory.exists()
            make_scratch_folder()
        assert not memory.exists()
        assert others.exists()
    finally:
        process.kill()
        process.communicate()
        memory.unlink(missing_ok=True)
        others.unlink(missing_ok=True)


# Folders


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_next_start_deletes_the_folders_of_killed_processes(temporary: Path) -> None:
    program = (
        "import sys, tempfile, time; tempfile.tempdir = sys.argv[1]\n"
        "from treetune.engine.launch import make_scratch_folder; print(make_scratch_folder())\n"
        "from treetune.store.held_folders import SHARED_MEMORY, hold_folder\n"
        "shared = SHARED_MEMORY / sys.argv[2]; shared.mkdir(); hold_folder(shared)\n"
        "print(shared, flush=True)\n"
        "time.sleep(600)"
    )
    weights = f"treetune-test-{uuid4().hex}"
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(temporary), weights], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    left = Path(process.stdout.readline().strip())
    in_memory = Path(process.stdout.readline().strip())
    # Both are checked while their process lives: after it has ended, any other test that starts a server may
    # delete what lies in memory.
    assert left.is_dir()
    assert in_memory.is_dir()
    (left / "socket").touch()
    process.kill()
    process.communicate()
    strange = temporary / "treetune-engine-strange"
    strange.mkdir()
    mine = make_scratch_folder()
    second = make_scratch_folder()
    assert not left.exists(), "its process is gone"
    assert strange.exists(), "no process has marked it as its own"
    assert not in_memory.exists(), "it lies elsewhere, and is swept by every start"
    assert mine.exists(), "its process is there"
    assert second != mine


PLANTED: dict[str, Callable[[Path], object]] = {
    # Another user, or a flipped bit, may leave these in place of the lock.
    "text": lambda lock: lock.write_text("no number"),
    "nothing": Path.touch,
    "bytes": lambda lock: lock.write_bytes(bytes(range(256))),
    "fifo": os.mkfifo,
    "link": lambda lock: lock.symlink_to("/dev/tty"),
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("owner", ["mine", "another's"])
def test_a_server_starts_whatever_lies_in_the_folder_for_temporary_files(
    temporary: Path, kind: str, owner: str
) -> None:
    planted = temporary / "treetune-engine-planted"
    planted.mkdir()
    PLANTED[kind](planted / "held")
    (temporary / "treetune-engine-file").write_text("no folder")
    (temporary / "treetune-engine-link").symlink_to(planted)
    if owner == "another's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(planted, 65534, 65534)
    assert make_scratch_folder().is_dir()
    # An unlocked file of this user is what a dead process leaves, so the folder is deleted; all else stays.
    assert planted.exists() == (owner == "another's" or kind in ("fifo", "link", "folder"))


def test_a_live_process_of_another_pid_namespace_keeps_its_folder(temporary: Path) -> None:
    program = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from treetune.engine.launch import make_scratch_folder\n"
        "print(make_scratch_folder(), flush=True); sys.stdin.read()"
    )
    inside = ["unshare", "--pid", "--fork", "--user", "--map-root-user"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespace can be made here")
    command = [*inside, sys.executable, "-c", program, str(temporary)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        make_scratch_folder()
        assert theirs.is_dir()
        process.communicate("")
    make_scratch_folder()
    assert not theirs.exists()


def test_a_servers_temporary_files_lie_in_its_folder_and_what_is_compiled_outlives_it(
    temporary: Path,
) -> None:
    folder = make_scratch_folder()
    variables = launch().environment(folder)
    assert variables["TMPDIR"] == variables["VLLM_RPC_BASE_PATH"] == str(folder)
    assert not Path(variables["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(folder)


def test_a_temporary_folder_with_too_long_a_path_for_sockets_is_refused_and_the_longest_allowed_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    refuse_long_paths()
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 90)
    with pytest.raises(ValueError, match=r"set TMPDIR to a folder whose path has at most \d+") as refusal:
        refuse_long_paths()
    (longest,) = re.findall(r"at most (\d+)", str(refusal.value))
    base = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    deepest = base / ("y" * (int(longest) - len(str(base)) - 1))
    deepest.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deepest))
    refuse_long_paths()
    folder = make_scratch_folder()
    try:
        with socket.socket(socket.AF_UNIX) as unix_socket:
            unix_socket.bind(os.fspath(folder / str(uuid4())))
    finally:
        shutil.rmtree(base)
