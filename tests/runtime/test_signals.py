"""SIGTERM and Ctrl-C end a run at once, whole, and so that the same command continues it."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.faults import ITERATIONS, Experiment, Running

pytestmark = [pytest.mark.server, pytest.mark.slow]


def to_the_launcher(running: Running, number: int) -> None:
    running.launcher.send_signal(number)


def to_the_rank(running: Running, number: int) -> None:
    os.kill(running.victims("rank")[0].pid, number)


def to_the_terminal(running: Running, number: int) -> None:
    """What Ctrl-C does: everyone in the foreground gets it."""
    os.killpg(running.launcher.pid, number)


def test_a_signal_ends_a_run_whole_and_the_same_command_continues_it(
    undisturbed: Experiment, sampled: Experiment
) -> None:
    first, last = sampled.directory.iteration(0), sampled.directory.iteration(ITERATIONS - 1)
    for number, send in (
        (signal.SIGTERM, to_the_launcher),
        (signal.SIGTERM, to_the_rank),
        (signal.SIGINT, to_the_terminal),
        (signal.SIGINT, to_the_rank),
    ):
        running = sampled.start()
        running.freeze(
            (first / "metrics.json").is_file, (last / "metrics.json").is_file, "the first trained iteration"
        )
        send(running, number)
        running.signal_ranks(signal.SIGCONT)
        code = running.wait()
        assert code != 0, f"{signal.Signals(number).name} {send.__name__}: exit code 0"
        if number == signal.SIGINT:
            said = running.tail()
            # Frozen ranks may have the launcher's SIGTERM beside the terminal's SIGINT when they go on.
            ended = send is to_the_terminal and "ended by SIGTERM in iteration 1" in said
            assert ended or "; the same command continues" in said
            assert "aiohttp" not in said and "Unclosed" not in said
        if (number, send) == (signal.SIGINT, to_the_rank):
            assert code == 130 and "Traceback" not in said
        running.assert_all_gone()
        if send is not to_the_rank:
            # A launcher's death is noticed within half a second, in which this run may train to its end.
            sampled.forget_training()
        else:
            assert sampled.directory.resumable() is None
            (first / "metrics.json").unlink()
    sampled.run()
    sampled.assert_consistent(undisturbed)
