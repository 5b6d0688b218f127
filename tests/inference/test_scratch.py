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

from treetune.inference import scratch


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_next_start_takes_away_what_killed_processes_left(temporary: Path) -> None:
    program = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from treetune.inference import scratch; print(scratch.make())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(temporary)], capture_output=True, text=True, check=True
    )
    left = Path(done.stdout.strip())
    assert left.is_dir()
    (left / "socket").touch()
    strange = temporary / "treetune-engine-strange"
    strange.mkdir()
    mine = scratch.make()
    second = scratch.make()
    assert not left.exists(), "its process is gone"
    assert strange.exists(), "nobody knows whose that is"
    assert mine.exists(), "its process is there"
    assert second != mine


def test_a_servers_temporary_files_lie_in_its_folder_and_what_is_compiled_outlives_it(
    temporary: Path,
) -> None:
    folder = scratch.make()
    found = scratch.variables(folder)
    assert found["TMPDIR"] == found["VLLM_RPC_BASE_PATH"] == str(folder)
    assert not Path(found["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(folder)


def test_a_folder_whose_sockets_would_have_too_long_a_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    scratch.refuse_long_paths()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))
    with pytest.raises(ValueError, match=r"Set TMPDIR to a folder of at most \d+"):
        scratch.refuse_long_paths()


def test_the_longest_allowed_folder_holds_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 90)
    with pytest.raises(ValueError) as told:
        scratch.refuse_long_paths()
    (most,) = re.findall(r"at most (\d+)", str(told.value))
    base = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    place = base / ("y" * (int(most) - len(str(base)) - 1))
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    scratch.refuse_long_paths()
    folder = scratch.make()
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(os.fspath(folder / str(uuid4())))
    finally:
        shutil.rmtree(base)
