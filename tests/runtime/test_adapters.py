"""LoRA through the whole loop with a server that adds the adapters itself. (test_presets has merged ones.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.faults import Experiment
from treetune.models.lora import ADAPTER_WEIGHTS

pytestmark = [pytest.mark.server, pytest.mark.slow]

ITERATIONS = 2
LORA = """{
  iterations: %d,
  checkpoints: { every: 1, keep_every: 1 },
  engines+: { policy+: { max_concurrency: 64 } },
  credit: { type: 'group', std: false },
  trainer+: { lora: { rank: 4, alpha: 16, send: 'adapters' }, learning_rate: 1e-2, epochs: 1 },
}"""


def test_a_server_samples_from_adapters_as_the_trainer_trained_them(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path)
    experiment.run("run_iteration_loop", LORA % ITERATIONS)
    rows = experiment.directory.read_metrics()
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS))
    assert rows[0]["engine/canary_gap"] <= 1e-4 and rows[0]["engine/restarts"] == 0
    # The second iteration was sampled from the first one's adapters: stale ones would show here.
    assert rows[1]["engine/logprob_gap_max"] <= 1e-4
    assert rows[1]["train/kl"] > 1e-4, "the adapters changed nothing"
    assert not experiment.weights_folder.exists()

    first, last = (experiment.directory.checkpoint(number) for number in (1, ITERATIONS))
    adapters = load_file(last / "adapter" / ADAPTER_WEIGHTS)
    whole, before = (load_file(place / "policy" / "model.safetensors") for place in (last, first))
    name = "model.layers.0.self_attn.q_proj"
    a, b = (adapters[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
    earlier = load_file(first / "adapter" / ADAPTER_WEIGHTS)
    a0, b0 = (earlier[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
    moved = whole[f"{name}.weight"] - before[f"{name}.weight"]
    torch.testing.assert_close(moved, 4 * (b @ a - b0 @ a0), atol=1e-6, rtol=0)
    assert torch.equal(whole["lm_head.weight"], before["lm_head.weight"])
