from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.data_pipeline.scripted import KEY, Endpoint, serving


@pytest.fixture(autouse=True)
def _signals_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands take signals over; here they are the tests'."""
    monkeypatch.setattr("treetune.processes.lifetime.exit_on_signals", lambda: None)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("SCRIPTED_KEY", KEY)
    for variable in ("APP_SEED", "APP_DIRECTORY", "APP_EXPERIMENT_NAME"):
        monkeypatch.delenv(variable, raising=False)
    with serving(Endpoint()) as found:
        yield found
