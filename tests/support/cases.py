"""Cases and texts of tests that stand in files beside them."""

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


def texts(file: Path) -> dict[str, str]:
    """Returns the texts of a file by their names, each under a line of the form ``=== name``."""
    parts = f"\n{file.read_text(encoding='utf-8')}".split("\n=== ")[1:]
    return {name: f"{text.rstrip()}\n" for name, _, text in (part.partition("\n") for part in parts)}
