"""One undisturbed run of the small experiment, shared by all who compare with it or measure it."""

from __future__ import annotations

from pathlib import Path

import pytest

from treetune.testing.faults import Experiment


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """Finished. Not to be changed: take a copy."""
    experiment = Experiment(tmp_path_factory.mktemp("undisturbed"))
    experiment.run()
    return experiment


@pytest.fixture
def sampled(undisturbed: Experiment, tmp_path: Path) -> Experiment:
    """Everything is sampled and nothing trained: the same command needs no engine to finish it."""
    experiment = undisturbed.copy(tmp_path)
    experiment.forget_training()
    return experiment
