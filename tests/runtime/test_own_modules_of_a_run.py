"""A run remembers the user's own modules, and says so where it goes on with others."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.in_process import directory_of, small
from treetune.config import folders
from treetune.runtime.session import Session

PLAIN = {"type": "policy_iteration"}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "own" / "module_of_a_run.py"
    file.parent.mkdir()
    file.write_text("weight = 1\n")
    monkeypatch.setattr(folders, "_OWN", folders.OwnFolders())
    finders = list(sys.meta_path)
    folders.search_in([file.parent])
    importlib.import_module("module_of_a_run")
    yield file
    sys.meta_path[:] = finders
    del sys.modules["module_of_a_run"]


def opened(base: Path) -> str:
    """Opens the run as a command does; what its log says afterwards."""
    config = small(base)
    with Session.open(config, PLAIN):
        pass
    directory = directory_of(config)
    marker = directory.iteration(0) / "episodes.arrow"
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.write_bytes(b"")  # something was computed: from here on the directory binds
    return (directory.logs / "run.log").read_text()


def test_a_run_that_goes_on_with_changed_code_says_which(module: Path, tmp_path: Path) -> None:
    assert opened(tmp_path) == ""
    stored = json.loads((directory_of(small(tmp_path)).path / "manifest.json").read_text())
    assert list(stored["own_modules"]) == ["module_of_a_run"]
    assert "your own code has changed" not in opened(tmp_path)
    module.write_text("weight = 2\n")
    assert "your own code has changed since this experiment began (module_of_a_run)" in opened(tmp_path)
