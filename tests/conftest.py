"""What all tests share."""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# No test is about time: on a busy machine hypothesis' own 200 ms fail examples that are right.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with servers go first, which one worker has; then those with slow tests, so that what is begun
    last is short."""
    files = {item: item.nodeid.partition("::")[0] for item in items}
    items.sort(key=lambda item: (not _has(files[item], "server"), not _has(files[item], "slow")))


def pytest_collection_finish() -> None:
    """Tells the garbage collector to leave what is imported and collected alone, and to run less often.

    The modules and the ten thousand tests live until the end. Looking through them again and again took about
    4 % of the CPU time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # in Python 3.11, 700, 10, 10


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What one worker of several runs: a file's tests, which share what they set up; or all files that start
    servers, since two servers at a time would have to share memory and cores.

    (The groups of ``--dist loadgroup`` would say the same, but xdist 3.8 loses them under pytest 9.2.)
    """
    from xdist.scheduler import LoadFileScheduling

    class ServersInOneWorker(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "files with servers" if _has(file, "server") else file

    return ServersInOneWorker(config, log)


@cache
def _has(file: str, mark: str) -> bool:
    """Whether a file of tests, named from the root, has any with this mark."""
    return f"mark.{mark}" in (Path(__file__).parents[1] / file).read_text()
