"""What a server leaves on the disk goes with it, or with the next start; paths too long are told before."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from uuid import uuid4

import pytest

from treetune.inference.launch import refuse_long_paths, scratch_folder

from .test_launch import launch


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_next_start_takes_away_what_killed_processes_left(temporary: Path) -> None:
    program = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from treetune.inference.launch import scratch_folder; print(scratch_folder())\n"
        "from treetune.store.held_folders import MEMORY, hold\n"
        "place = MEMORY / sys.argv[2]; place.mkdir(); hold(place); print(place)"
    )
    weights = f"treetune-test-{uuid4().hex}"
    done = subprocess.run(
        [sys.executable, "-c", program, str(temporary), weights], capture_output=True, text=True, check=True
    )
    left = Path(done.stdout.split()[0])
    assert left.is_dir()
    (left / "socket").touch()
    in_memory = Path(done.stdout.split()[1])
    assert in_memory.is_dir()
    strange = temporary / "treetune-engine-strange"
    strange.mkdir()
    mine = scratch_folder()
    second = scratch_folder()
    assert not left.exists(), "its process is gone"
    assert strange.exists(), "nobody knows whose that is"
    assert not in_memory.exists(), "it lies elsewhere, and is swept by every start"
    assert mine.exists(), "its process is there"
    assert second != mine


def plant(folder: Path, kind: str) -> None:
    """What another user, or a flipped bit, may leave in place of the lock."""
    folder.mkdir()
    lock = folder / "held"
    if kind == "text":
        lock.write_text("no number")
    elif kind == "nothing":
        lock.touch()
    elif kind == "bytes":
        lock.write_bytes(bytes(range(256)))
    elif kind == "fifo":
        os.mkfifo(lock)
    elif kind == "link":
        lock.symlink_to("/dev/tty")
    elif kind == "folder":
        lock.mkdir()


@pytest.mark.parametrize("kind", ["text", "nothing", "bytes", "fifo", "link", "folder"])
@pytest.mark.parametrize("owner", ["mine", "another's"])
def test_whatever_lies_in_the_folder_for_temporary_files_a_start_goes_on(
    temporary: Path, kind: str, owner: str
) -> None:
    planted = temporary / "treetune-engine-planted"
    plant(planted, kind)
    (temporary / "treetune-engine-file").write_text("no folder")
    (temporary / "treetune-engine-link").symlink_to(planted)
    if owner == "another's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(planted, 65534, 65534)
    assert scratch_folder().is_dir()
    # A file of this user's that nobody has locked is what a dead process leaves; all else is left alone.
    assert planted.exists() == (owner == "another's" or kind in ("fifo", "link", "folder"))


def test_a_live_process_of_another_pid_namespace_keeps_its_folder(temporary: Path) -> None:
    program = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from treetune.inference.launch import scratch_folder\n"
        "print(scratch_folder(), flush=True); sys.stdin.read()"
    )
    inside = ["unshare", "--pid", "--fork", "--user", "--map-root-user"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespace can be made here")
    command = [*inside, sys.executable, "-c", program, str(temporary)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        scratch_folder()
        assert theirs.is_dir()
        process.communicate("")
    scratch_folder()
    assert not theirs.exists()


def test_a_servers_temporary_files_lie_in_its_folder_and_what_is_compiled_outlives_it(
    temporary: Path,
) -> None:
    folder = scratch_folder()
    found = launch().environment(folder)
    assert found["TMPDIR"] == found["VLLM_RPC_BASE_PATH"] == str(folder)
    assert not Path(found["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(folder)


def test_a_folder_whose_sockets_would_have_too_long_a_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    refuse_long_paths()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))
    with pytest.raises(ValueError, match=r"Set TMPDIR to a folder of at most \d+"):
        refuse_long_paths()


def test_the_longest_allowed_folder_holds_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 90)
    with pytest.raises(ValueError) as told:
        refuse_long_paths()
    (most,) = re.findall(r"at most (\d+)", str(told.value))
    base = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    place = base / ("y" * (int(most) - len(str(base)) - 1))
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    refuse_long_paths()
    folder = scratch_folder()
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(os.fspath(folder / str(uuid4())))
    finally:
        shutil.rmtree(base)
