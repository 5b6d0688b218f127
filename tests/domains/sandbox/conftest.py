"""Tests of the sandbox run where there is one, and say elsewhere why they don't."""

from __future__ import annotations

import pytest

from treetune.domains.sandbox.bubblewrap import Bubblewrap


@pytest.fixture(scope="session")
def sandbox() -> Bubblewrap:
    found = Bubblewrap()
    for reason in found.missing():
        pytest.skip(f"no sandbox here: {reason}")
    return found
