"""Files of JSON lines that a killed process may have left in the middle of a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def whole_lines(path: Path, *, repair: bool = False) -> Iterator[dict[str, Any]]:
    """The objects in a file, none where there is no file. A last line without its end doesn't count, and is
    cut off with `repair`; nor does a line that is no object (a crash of the machine can leave such)."""
    if not path.is_file():
        return
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row
    if repair and end < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(end)
