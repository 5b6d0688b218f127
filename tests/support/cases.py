"""Cases of a test that stand in a file beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def cases(file: Path, name: str) -> list[list[Any]]:
    """Returns the cases under the heading ``# name`` of a file: a list in JSON on each line."""
    _, found, rest = f"\n{file.read_text(encoding='utf-8')}".partition(f"\n# {name}\n")
    assert found, f"{file.name} has no cases with the name {name!r}"
    lines = rest.partition("\n# ")[0].splitlines()
    return [json.loads(line) for line in lines]
