"""A run on a disk that becomes full ends with one message that says so, and no traceback.

The disk is a small one of its own, in memory, which root alone can mount.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.fork_server import ROOT, start_forked


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mounts a disk of this size; skips the test where that isn't allowed."""
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")
@pytest.mark.parametrize("size", ["120k", "300k", "700k"])
def test_a_run_on_a_full_disk_says_so_once(tmp_path: Path, size: str) -> None:
    arguments = ["run", "--ranks", "1", "--configs", str(ROOT / "tests/support/small_supervised.jsonnet")]
    arguments += [
        "--override",
        "{problems_per_iteration: 200, checkpoints: {every: 6}, plan: {check: false}}",
    ]
    output = tmp_path / "output"
    with small_disk(tmp_path, size) as disk, output.open("wb") as file:
        environment = os.environ | {"APP_DIRECTORY": str(disk), "OMP_NUM_THREADS": "1"}
        run = start_forked(arguments, cwd=ROOT, environment=environment, output=file)
        try:
            code = run.wait(600)
        finally:
            run.kill()  # or the disk can't be taken away
    printed = output.read_text()
    assert code == 1, printed[-2000:]
    assert "Traceback" not in printed and "Logging error" not in printed
    failures = [line for line in printed.splitlines() if "failed:" in line]
    assert len(failures) == 1 and "no space left on the file system" in failures[0]
