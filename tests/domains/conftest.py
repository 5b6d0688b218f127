"""Share one pool of environments among the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from treetune.domains.environments.pool import EnvironmentPool


@pytest.fixture(scope="module")
def environments() -> Iterator[EnvironmentPool]:
    with EnvironmentPool() as pool:
        yield pool
