"""What tests of runs share: one process group, and one undisturbed run of the small experiment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import Experiment
from treetune.trainers.ranks import Ranks


@pytest.fixture(scope="session", autouse=True)
def one_process() -> Iterator[None]:
    """DeepSpeed remembers a process group that was left: all runs in this process share one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "leave", lambda self: None)
        yield


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
