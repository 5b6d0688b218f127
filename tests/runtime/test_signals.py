"""SIGTERM and Ctrl-C end a run at once, whole, and so that the same command continues it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from tests.runtime.faults import ITERATIONS, Experiment, Running

pytestmark = [pytest.mark.server, pytest.mark.slow]


def to_the_launcher(running: Running, number: int) -> None:
    running.launcher.send_signal(number)


def to_the_rank(running: Running, number: int) -> None:
    os.kill(running.victims("rank")[0].pid, number)


def to_the_terminal(running: Running, number: int) -> None:
    """What Ctrl-C does: everyone in the foreground gets it."""
    os.killpg(running.launcher.pid, number)


@pytest.mark.parametrize(
    ("number", "send"),
    [
        pytest.param(signal.SIGTERM, to_the_launcher, id="SIGTERM to the launcher"),
        pytest.param(signal.SIGTERM, to_the_rank, id="SIGTERM to the rank"),
        pytest.param(signal.SIGINT, to_the_terminal, id="Ctrl-C in the terminal"),
        pytest.param(signal.SIGINT, to_the_rank, id="SIGINT to the rank"),
    ],
)
def test_a_signal_ends_the_run_whole_and_the_same_command_continues_it(
    number: int,
    send: Callable[[Running, int], None],
    undisturbed: Experiment,
    sampled: Experiment,
) -> None:
    running = sampled.start()
    first, last = sampled.directory.iteration(0), sampled.directory.iteration(ITERATIONS - 1)
    running.freeze(
        (first / "metrics.json").is_file, (last / "metrics.json").is_file, "the first trained iteration"
    )
    send(running, number)
    running.signal_ranks(signal.SIGCONT)
    assert running.wait() != 0
    running.assert_all_gone()
    sampled.run()
    sampled.assert_consistent(undisturbed)
