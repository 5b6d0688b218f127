"""Whatever is killed, whenever, and on however many ranks: the same command ends with the weights of an
undisturbed run, and nothing is left behind.

Here a run is struck where its server is busy and where it trains; `test_interrupted_runs.py` strikes at every
function of a run without a server, and `tests/endurance/fault_matrix.py` tries all fifteen points here.
Later starts of the same run are forks (`Experiment.forked`).
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load

from tests.support.experiment_runs import ITERATIONS, Experiment

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    experiment = Experiment(tmp_path_factory.mktemp("undisturbed"), forked=True)
    experiment.run()
    return experiment


def test_a_run_killed_where_its_server_is_busy_ends_with_the_weights_of_an_undisturbed_one(
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
    assert experiment.directory.newest_resumable() is None

    # Begins anew with what was sampled, and goes on sampling where that ends. The engine dies with new
    # weights on their way into it.
    answered = experiment.journals()["0001/credit-0.jsonl"]
    running = replace(experiment, forked=True).start()
    running.reach("sync", 1)
    assert experiment.journals()["0001/credit-0.jsonl"][: len(answered)] == answered
    running.kill("engine")
    assert running.wait() == 0, running.tail()
    running.assert_all_gone()
    rows = experiment.directory.read_metrics()[1:]
    # Where this process is late with its blow, the server has the weights already, and dies with them; two
    # iterations follow that need it.
    assert sum(row.get("engine/restarts", 0) for row in rows) == 1
    experiment.assert_consistent(undisturbed)


def test_a_signal_ends_a_run_that_trains_whole_and_the_same_command_continues_it(
    undisturbed: Experiment, tmp_path: Path
) -> None:
    """The signal comes while the first iteration's metrics have just been written, and before its checkpoint:
    none is due, and still nothing is done again. Everything is sampled and nothing trained: no server has to
    come up for it. Other ends, and the exit codes of them: test_exit_codes.py."""
    experiment = replace(undisturbed.copy(tmp_path), forked=False)
    first_metrics = experiment.directory.iteration_folder(0) / "metrics.json"
    last_metrics = experiment.directory.iteration_folder(ITERATIONS - 1) / "metrics.json"
    experiment.forget_training()
    running = experiment.start()
    running.freeze(first_metrics.is_file, last_metrics.is_file, "the first trained iteration")
    os.killpg(running.launcher.pid, signal.SIGTERM)
    running.signal_ranks(signal.SIGCONT)
    assert running.wait() == 128 + signal.SIGTERM, running.tail()
    printed = running.tail()
    # The ranks hear it before the iteration's last line, or as soon as the next one begins.
    assert "ended by SIGTERM after iteration 1" in printed or "ended by SIGTERM in iteration 2" in printed
    assert not any(word in printed for word in ("aiohttp", "Unclosed", "Traceback"))
    assert "again" not in printed.splitlines()[-1], "nothing is done again"
    assert experiment.directory.resumable_checkpoints() == [1]
    running.assert_all_gone()
    replace(experiment, forked=True).run()
    experiment.assert_consistent(undisturbed)


def test_two_ranks_and_one_server_end_with_the_weights_of_one(
    undisturbed: Experiment, tmp_path: Path
) -> None:
    """After two iterations. The second one samples from weights that both ranks have trained."""
    two = Experiment(tmp_path, ranks=2, deepspeed=True)
    two.run("run_iteration_loop", "{ iterations: 2 }")
    weights_of_one, weights_of_two = load(undisturbed.policy(2)), load(two.policy(2))
    assert weights_of_one.keys() == weights_of_two.keys()
    for name, weights in weights_of_one.items():
        assert (weights - weights_of_two[name]).abs().max() <= TOLERANCE, name
    later_weights = load(undisturbed.policy()).items()
    moved = max(float((weights_of_one[name] - weights).abs().max()) for name, weights in later_weights)
    assert moved > 100 * TOLERANCE, "the comparison says nothing: training moves no weight"
    assert [row["iteration"] for row in two.directory.read_metrics()] == [0, 1]
    assert {name.split("/")[1] for name in two.journals()} == {
        f"{phase}-{rank}.jsonl" for phase in ("rollout", "credit") for rank in (0, 1)
    }
