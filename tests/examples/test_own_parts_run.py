"""Each configuration of examples/own_parts trains for an iteration, from random weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.many_runs import ROOT, run_each

TEMPLATE = ROOT / "examples/own_parts"
# Answers that are cut off earn the reward, so that rewards differ although the model has learnt nothing.
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

WITH_NATIVE_CALLS = ("calculator_sft", "calculator_grpo", "calculator_vineppo", "calculator_in_verifiers")
"""Native calls need another model: see `tests/domains/environments/test_native_tools.py`."""


@pytest.mark.slow
def test_every_template_of_a_users_part_trains_for_an_iteration(tmp_path: Path) -> None:
    names = {path.stem for path in TEMPLATE.glob("*.jsonnet")} - {"own_rows", *WITH_NATIVE_CALLS}
    commands = []
    for name in sorted(names):
        (tmp_path / name).mkdir()
        command = ["--configs", str(TEMPLATE / f"{name}.jsonnet"), "--override", SMALL % (tmp_path / name)]
        sampled = [] if name == "largest" else ["--override", SAMPLED]  # it learns from demonstrations
        commands.append([*command, *sampled, "run_iteration_loop"])
    printed = run_each(*commands, cwd=tmp_path)
    assert len(names) > 5 and printed.count("iteration 1/1") == len(names), printed[-3000:]
