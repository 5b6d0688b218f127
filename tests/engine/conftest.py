from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .stubs import Stub


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    found = Stub(tmp_path)
    yield found
    if found.engine is not None:
        found.engine.close()
