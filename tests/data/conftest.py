"""Run commands in the test's process, and serve the scripted endpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.data.scripted import KEY, Endpoint, serving


@pytest.fixture(autouse=True, scope="module")
def _commands_run_in_this_process() -> Iterator[None]:
    """Leave signals to pytest, and let no variable of the environment be a setting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treetune.processes.lifetime.exit_on_signals", lambda: None)
        for variable in ("APP_SEED", "APP_DIRECTORY", "APP_EXPERIMENT_NAME"):
            patch.delenv(variable, raising=False)
        yield


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("SCRIPTED_KEY", KEY)
    with serving(Endpoint()) as scripted:
        yield scripted
