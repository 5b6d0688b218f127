"""A run on a disk that becomes full ends with one message that says so, and no traceback.

The disk is a small one of its own, in memory, which root alone can mount.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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
    with small_disk(tmp_path, size) as disk:
        done = subprocess.run(
            [sys.executable, ROOT / "src/treetune/main.py", "run", "--ranks", "1"]
            + ["--configs", ROOT / "tests/support/small_supervised.jsonnet"]
            + ["--override", "{problems_per_iteration: 200, checkpoints: {every: 6}, plan: {check: false}}"],
            env=os.environ | {"APP_DIRECTORY": str(disk), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 1, done.stderr[-2000:]
    assert "Traceback" not in done.stderr and "Logging error" not in done.stderr
    failures = [line for line in done.stderr.splitlines() if "failed:" in line]
    assert len(failures) == 1 and "no space left on the file system" in failures[0]
