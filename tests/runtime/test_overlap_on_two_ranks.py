"""Two ranks sample together in one thread each while they train together in another."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from treetune.episode_generators.storage import read_trajectories
from treetune.testing.faults import Experiment

OVERLAPPING = """{
  overlap: 'one_step',
  iterations: 3,
  problems_per_iteration: 5,
  checkpoints: { every: 3 },
  trainer+: { epochs: 1, objective+: { importance_cap: 2 } },
}"""
DEADLINE_S = 600


def test_two_ranks_overlap_and_both_have_their_part_of_every_iteration(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    group = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "treetune.testing.forked", str(tmp_path), OVERLAPPING]
    ranks = [
        subprocess.Popen(command, env=group | {"RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE)
        for rank in "01"
    ]
    try:
        for process in ranks:
            _, said = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, said.decode()[-3000:]
    finally:
        for process in ranks:
            process.kill()
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
