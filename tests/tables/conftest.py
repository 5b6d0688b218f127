"""Fixtures that tests of running tables share: a stand-in for the launcher, and its configurations."""

from __future__ import annotations

import os

import pytest

from tests.tables.small_table import ROOT, evaluated


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    for variable in ("APP_SEED", "APP_DIRECTORY", "APP_EXPERIMENT_NAME", "APP_FAKE", "APP_FAKE_SHARES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("APP_FAKE_CONFIGS", str(tmp_path_factory.getbasetemp() / "evaluated.json"))
    monkeypatch.setattr("treetune.tables.runs.load", evaluated)
    # Figures take a second each, and have tests of their own.
    monkeypatch.setattr("treetune.tables.write.draw_table", lambda _, path: path.touch())
    monkeypatch.setattr(
        "treetune.tables.write.draw_curves", lambda *arguments: [path.touch() for path in arguments[-1]]
    )
    # This process must not keep the handler that `reproduce` puts in its own.
    monkeypatch.setattr("treetune.processes.lifetime.exit_on_signals", lambda: None)
