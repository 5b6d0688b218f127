"""Each part of examples/own_parts trains: an iteration of its configuration, from random weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "examples/own_parts"
# Answers that are cut off earn the reward, so that answers differ although nothing was learnt before.
SMALL = """{
  directory: '%s',
  model: { type: 'tiny', layers: 1, hidden_size: 64, heads: 2, intermediate_size: 96, context_length: 128 },
  engines+: { policy: { type: 'in_process' } },
  iterations: 1,
  problems_per_iteration: 4,
  checkpoints: { every: 1 },
  evaluation: {},
  trainer+: { minibatch_size: null, schedule+: { may_outlast_training: true } },
}"""


SAMPLED = "{ rollout+: { samples: 2, max_tokens: 24, unfinished_reward: 1.0 } }"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(path.stem for path in TEMPLATE.glob("*.jsonnet") if path.stem != "own_rows")
)
def test_an_iteration_with_a_part_of_ones_own(name: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "src/treetune/main.py"),
        "--configs",
        str(TEMPLATE / f"{name}.jsonnet"),
    ]
    sampled = [] if name == "largest" else ["--override", SAMPLED]  # that one learns from demonstrations
    done = subprocess.run(
        [*command, "--override", SMALL % tmp_path, *sampled, "run_iteration_loop"],
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "iteration 1/1" in done.stdout + done.stderr
