"""What all tests share."""

from __future__ import annotations

import pytest
from hypothesis import settings

# No test is about time: on a busy machine hypothesis' own 200 ms fail examples that are right.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)  # before xdist, which reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What one worker of several (`-n 2 --dist loadgroup`) runs: a file's tests, which share what they set
    up; or all that start servers or share a run that did. These go first: they wait the longest, and two
    servers at a time would have to share memory and cores.
    """
    if not hasattr(config, "workerinput"):
        return
    with_server = {item for item in items if _has_server(item)}
    for item in items:
        group = "server" if item in with_server else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item not in with_server)


def _has_server(item: pytest.Item) -> bool:
    shared = {"undisturbed", "sampled"} & set(getattr(item, "fixturenames", ()))
    return item.get_closest_marker("server") is not None or bool(shared)
