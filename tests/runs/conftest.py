"""What tests of runs share: one process group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from treetune.trainer.ranks import Ranks


@pytest.fixture(scope="session", autouse=True)
def one_process() -> Iterator[None]:
    """DeepSpeed remembers a process group that was left: all runs in this process share one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "leave", lambda self: None)
        yield
