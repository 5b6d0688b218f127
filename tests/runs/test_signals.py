"""A run that a signal ends loses no finished iteration, says what it does, and goes on to the same bits.

The signals are real ones, sent to real processes. Ranks are stopped (SIGSTOP) while the signal is sent, so
that it comes at the same point every time. Runs of one rank are forks (`Experiment.forked`), but for the one
that hears Ctrl-C twice. Two ranks are only forked where no signal comes; otherwise `treetune run` and its
launcher start them. `test_killed_runs.py` has SIGTERM to a run by the command line.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.experiment_runs import ROOT, Experiment, Running

SUPERVISED = ROOT / "tests/support/small_supervised.jsonnet"
SAMPLED = ROOT / "tests/support/small.jsonnet"
ITERATIONS = 5

SPARSE = (
    f"{{iterations: {ITERATIONS}, checkpoints: {{every: {ITERATIONS}}}, evaluation+: {{sets: []}},"
    " trainer+: {epochs: 20}}"
)
IN_PROCESS = "{engines: {policy: {type: 'in_process'}}}"
LONGER = "{trainer+: {epochs: 80}}"


@dataclass(frozen=True)
class Kind:
    """A kind of run: its configuration, its ranks, and what goes on its right."""

    config: Path
    ranks: int
    overrides: tuple[str, ...]

    def experiment(self, base: Path) -> Experiment:
        return Experiment(base, "small", self.ranks, self.config, forked=self.ranks == 1)


KINDS = {
    "supervised, one rank": Kind(SUPERVISED, 1, (SPARSE,)),
    "supervised, two ranks": Kind(SUPERVISED, 2, (SPARSE,)),
    "sampled, one rank": Kind(SAMPLED, 1, (SPARSE, IN_PROCESS)),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Experiment]:
    """Returns, by its kind, a run that no signal ended."""
    runs: dict[str, Experiment] = {}

    def run_of_kind(kind: str) -> Experiment:
        if kind not in runs:
            experiment = KINDS[kind].experiment(tmp_path_factory.mktemp("undisturbed"))
            runs[kind] = replace(experiment, forked=True)
            runs[kind].run("run_iteration_loop", *KINDS[kind].overrides)
        return runs[kind]

    return run_of_kind


def start_and_signal(experiment: Experiment, number: int, *overrides: str, iteration: int = 3) -> Running:
    """Starts a run and sends it a signal while it trains an iteration, by default the third."""
    running = experiment.start("run_iteration_loop", *overrides)
    episodes = experiment.directory.iteration_folder(iteration - 1) / "episodes.arrow"
    last_metrics = experiment.directory.iteration_folder(ITERATIONS - 1) / "metrics.json"

    # A signal that comes before training has begun ends the run at once, after the iteration before. Nothing
    # on disk shows that training has begun, so a signal comes 0.2 s after the episodes.
    def is_training() -> bool:
        return episodes.is_file() and time.time() - episodes.stat().st_mtime > 0.2

    running.freeze(is_training, last_metrics.is_file, f"the training of iteration {iteration}")
    if number == signal.SIGINT:
        os.killpg(running.launcher.pid, number)  # as Ctrl-C in a terminal
    else:
        os.kill(running.launcher.pid, number)
    running.signal_ranks(signal.SIGCONT)
    return running


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "signals"),
    [
        # By the iteration in which a signal comes. Between the two, an iteration ends that would be lost.
        ("supervised, one rank", {2: signal.SIGTERM, 4: signal.SIGHUP}),
        ("supervised, two ranks", {2: signal.SIGINT}),
        ("sampled, one rank", {2: signal.SIGUSR1}),
    ],
)
def test_a_signal_writes_a_checkpoint_from_which_the_run_ends_with_the_same_bits(
    kind: str, signals: dict[int, signal.Signals], tmp_path: Path, undisturbed: Callable[[str], Experiment]
) -> None:
    overrides = KINDS[kind].overrides
    experiment = KINDS[kind].experiment(tmp_path / "stopped")
    for iteration, number in signals.items():
        running = start_and_signal(experiment, number, *overrides, iteration=iteration)
        assert running.wait() == 128 + number, running.tail()
        running.assert_all_gone()
        assert experiment.directory.checkpoints()[-1] == iteration
        assert f"stopping with a checkpoint at the end of iteration {iteration}" in running.tail()
        ended = "stopped" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
        assert f"\n{ended} after iteration {iteration}" in running.tail()

    printed = replace(experiment, forked=True).run("run_iteration_loop", *overrides)
    assert f"continuing after iteration {iteration} of {ITERATIONS}\n" in printed, "nothing is done again"
    assert experiment.policy(ITERATIONS) == undisturbed(kind).policy(ITERATIONS)
    rows = [row["iteration"] for row in experiment.directory.read_metrics()]
    assert rows == list(range(ITERATIONS))


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_and_the_next_start_says_what_is_done_again(tmp_path: Path) -> None:
    kind = KINDS["supervised, one rank"]
    # Iterations are long enough that the second signal comes in the midst of one.
    experiment = replace(kind.experiment(tmp_path), forked=False)
    running = start_and_signal(experiment, signal.SIGINT, *kind.overrides, LONGER)
    running.until(lambda: "once more ends at once" in running.tail(), 60, "the answer to the first Ctrl-C")
    os.kill(running.launcher.pid, signal.SIGINT)
    assert running.wait() == 128 + signal.SIGINT
    last_line = running.tail().splitlines()[-1]
    assert "the last checkpoint, and does iterations 1 to 2 again" in last_line
    assert experiment.directory.checkpoints() == []

    again = replace(experiment, forked=True).start("run_iteration_loop", *kind.overrides, LONGER)
    repeated = "iterations 1 to 2 had been finished after it and are"
    again.until(lambda: repeated in again.tail(), 60, "line about the iterations that are done again")
    again.kill_everything()


@pytest.mark.slow
def test_where_the_iteration_does_not_end_within_the_grace_the_run_ends_then(tmp_path: Path) -> None:
    kind = KINDS["supervised, two ranks"]
    impatient = "{trainer+: {epochs: 60}, checkpoints+: {grace: 0.05}}"
    experiment = kind.experiment(tmp_path)
    running = start_and_signal(experiment, signal.SIGTERM, *kind.overrides, impatient, iteration=2)
    assert running.wait() == 128 + signal.SIGTERM
    running.assert_all_gone()
    assert "stopping now" in running.tail()
    assert experiment.directory.checkpoints() == []


@pytest.mark.slow
def test_checkpoints_by_time_change_no_bits_and_are_deleted_when_newer_ones_are_there(
    tmp_path: Path, undisturbed: Callable[[str], Experiment]
) -> None:
    kind = KINDS["supervised, one rank"]
    experiment = kind.experiment(tmp_path / "by-time")
    often = "{checkpoints+: {at_risk_minutes: 1e-6}}"
    running = experiment.start("run_iteration_loop", *kind.overrides, often)
    assert running.wait() == 0, running.tail()
    numbers = experiment.directory.checkpoints()
    assert numbers[-1] == ITERATIONS and len(numbers) <= 2
    assert experiment.directory.regular_checkpoints() == [ITERATIONS]
    assert experiment.policy(ITERATIONS) == undisturbed("supervised, one rank").policy(ITERATIONS)
