"""Two ranks sample together in one thread each while they train together in another."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.faults import Experiment
from treetune.rollouts.storage import read_trajectories

OVERLAPPING = """{
  overlap: 'one_step',
  iterations: 3,
  problems_per_iteration: 5,
  checkpoints: { every: 3 },
  trainer+: { epochs: 1, objective+: { importance_cap: 2 } },
}"""
DEADLINE_S = 600


@contextmanager
def held_port() -> Iterator[int]:
    """One that the first rank can listen on, as it too lets others bind it, and that the kernel gives to
    nobody else meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.mark.slow
def test_two_ranks_overlap_and_both_have_their_part_of_every_iteration(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.forked", str(tmp_path), OVERLAPPING]
    with held_port() as port, contextlib.ExitStack() as stack:
        group = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
        ranks = []
        for rank, log in enumerate(logs):
            own = group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("wb") as file:
                ranks.append(subprocess.Popen(command, env=own, stderr=file))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        for process, log in zip(ranks, logs, strict=True):
            assert process.wait(DEADLINE_S) == 0, log.read_text()[-3000:]
    directory = Experiment(tmp_path).directory
    assert [row["overlap/staleness"] for row in directory.read_metrics()] == [0, 1, 1]
    for iteration, version in enumerate([0, 0, 1]):
        folder = directory.iteration(iteration)
        answers = read_trajectories(folder / "trajectories.arrow")
        assert len(answers) == 10
        assert {part.policy_version for one in answers for part in one.segments} == {version}
        assert {path.name for path in (folder / "journal").glob("rollout-*.jsonl")} == {
            "rollout-0.jsonl",
            "rollout-1.jsonl",
        }
