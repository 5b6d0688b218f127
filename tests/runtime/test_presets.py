"""Every preset trains a tiny model for two iterations against a real server."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

import treetune.parts  # noqa: F401  (registers them)
from tests.runtime.shared_server import SharedServer, largest_move, shared_server
from treetune.config.jsonnet import CONFIGS, configurations, load

pytestmark = [pytest.mark.server, pytest.mark.slow]

BASE = Path(__file__).with_name("presets.jsonnet")
SHARED_BY_THE_OTHERS = {"policy_gradient", "spo"}
PRESETS = sorted({path.stem for path in configurations(CONFIGS / "presets")} - SHARED_BY_THE_OTHERS)
ON_A_CORPUS = {"greedy_jsd"}
DEMONSTRATED = "{rollout: {type: 'demonstrations'}}"
ADDITIONS = [
    # What a preset may be combined with, in as few runs as have all of it.
    ("dapo", ["objectives/dual_clip", "objectives/importance_cap_2"]),
    (
        "dr_grpo",
        ["objectives/kl_in_advantage", "objectives/entropy_target", "objectives/skip_without_advantage"],
    ),
    ("grpo_as_published", ["hardware/lora"]),
    ("spo_3_3", ["objectives/spo_mask_below", "objectives/importance_cap_2"]),
    ("spo_3_2", ["compat/spo_moving_target", "objectives/entropy_bonus"]),
]


@pytest.fixture(scope="module")
def server() -> Iterator[SharedServer]:
    with shared_server() as shared:
        yield shared


@pytest.mark.parametrize(
    ("preset", "right"), [*((name, []) for name in PRESETS), *ADDITIONS], ids=lambda part: str(part)
)
def test_a_preset_trains_for_two_small_iterations(
    preset: str, right: list[str], server: SharedServer, tmp_path: Path
) -> None:
    files = [str(BASE), f"presets/{preset}.jsonnet", *(f"{name}.jsonnet" for name in right)]
    config = load(files, [DEMONSTRATED] if preset in ON_A_CORPUS else [], environ={})
    experiment, directory = server.train(config, tmp_path)
    rows = directory.read_metrics()
    assert [row["iteration"] for row in rows] == [0, 1]
    for row in rows:
        assert row["train/steps"] >= 1
        assert math.isfinite(row["train/loss"])
        # Of the second, this says that it was sampled from what the first had trained.
        if "engine/logprob_gap_max" in row:
            assert row["engine/logprob_gap_max"] <= 1e-4
    assert largest_move(experiment, directory, 2) > 1e-5, "the weights are as they were"
