"""Provide the sandbox, or skip its tests with the reason why there is none."""

from __future__ import annotations

import pytest

from treetune.domains.sandbox.bubblewrap import Bubblewrap


@pytest.fixture(scope="session")
def sandbox() -> Bubblewrap:
    bubblewrap = Bubblewrap()
    for reason in bubblewrap.missing():
        pytest.skip(f"no sandbox here: {reason}")
    return bubblewrap
