"""Treetune: research experiments in reinforcement learning of language-model reasoning."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from treetune.waiting import wait_briefly

# Here, since nothing of treetune can import PyTorch earlier: commands, the ranks of any launcher, servers,
# workers, and programs that use treetune as a library.
wait_briefly()

__version__ = "0.2.0"


def open(directory: str | Path) -> Any:
    """Opens a run's directory to read: a `treetune.runtime.frames.RunFrames` with `metrics`, `answers`,
    `episodes` and `values` as pandas data frames. Raises ValueError where there is no run."""
    # By name, since all that it needs imports this package.
    return import_module("treetune.runtime.frames").RunFrames(Path(directory))
