"""`treetune view` in a process of its own, as a person starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENDS_WITHIN_S = 20.0


@contextmanager
def started_viewer(folders: Sequence[Path], cache: Path) -> Iterator[str]:
    """The address that it prints, with its token. Its own files go to `cache`. Ends with the block.

    Raises ValueError with what it said where it prints no address.
    """
    environment = os.environ | {"TREETUNE_VIEWER_CACHE": str(cache), "PYTHONPATH": str(ROOT / "src")}
    line = [sys.executable, "-m", "treetune.main", "view", *map(str, folders), "--port", "0"]
    process = subprocess.Popen(
        line, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=None, text=True
    )
    assert process.stdout is not None
    try:
        said = process.stdout.readline().strip()
        if "?token=" not in said:
            raise ValueError(f"the viewer printed no address but {said!r}")
        yield said[said.index("http") :]
    finally:
        process.terminate()
        try:
            process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
