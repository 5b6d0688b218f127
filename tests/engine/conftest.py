"""The stub server, as a fixture: `stub` closes the engine that a test has started on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stubs import Stub


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    servers = Stub(tmp_path)
    yield servers
    if servers.engine is not None:
        servers.engine.close()
