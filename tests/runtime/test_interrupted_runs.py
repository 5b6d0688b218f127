"""Whatever is killed, whenever: the same command ends with the weights of an undisturbed run.

Here one run is struck in every phase, once by each kind of death or more; `tests/endurance/fault_matrix.py`
tries all fifteen points, each in a run of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.faults import Experiment

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_a_run_killed_in_every_phase_ends_with_the_weights_of_an_undisturbed_one(
    undisturbed: Experiment, tmp_path: Path
) -> None:
    experiment = Experiment(tmp_path)

    # The engine's death is the run's own business: it goes on, until its launcher dies.
    running = experiment.start()
    running.reach("generation", 0)
    answered = experiment.journals()["0000/rollout-0.jsonl"]
    running.kill("engine")
    running.reach("credit", 1)
    assert experiment.journals()["0000/rollout-0.jsonl"][: len(answered)] == answered
    running.kill("launcher")
    assert running.wait() != 0
    running.assert_all_gone()
    assert experiment.directory.resumable() is None

    # Begins anew with what was sampled, and goes on sampling where that ends.
    answered = experiment.journals()["0001/credit-0.jsonl"]
    running = experiment.start()
    running.reach("training", 2)
    assert experiment.journals()["0001/credit-0.jsonl"][: len(answered)] == answered
    running.kill("rank")
    assert running.wait() != 0
    running.assert_all_gone()
    assert experiment.directory.resumable() == 2

    # Begins at the checkpoint. The engine dies with new weights on their way into it.
    running = experiment.start()
    running.reach("sync", 2)
    running.kill("engine")
    running.reach("commit", 3)
    record = json.loads((experiment.directory.iteration(2) / "metrics.json").read_text())
    assert record["engine/restarts"] == 1
    running.kill("rank")
    assert running.wait() != 0
    running.assert_all_gone()
    assert experiment.directory.resumable() == 2

    experiment.run()
    experiment.assert_consistent(undisturbed)


def test_a_finished_run_is_left_as_it_is(undisturbed: Experiment) -> None:
    before = undisturbed.directory.metrics.read_bytes()
    assert "is finished" in undisturbed.run()
    assert undisturbed.directory.metrics.read_bytes() == before
