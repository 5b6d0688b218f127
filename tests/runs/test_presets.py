"""Every preset, and each method of the paper made small by the smoke overlay, goes through the whole loop.

The engine is the one without a server: scripts/smoke_all.sh starts one for every experiment.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import treetune.parts  # noqa: F401  (registers them)
from tests.runs.shared_server import built, largest_move, train_with
from treetune.config.jsonnet import load
from treetune.config.layers import CONFIGS_FOLDER, find_configuration_files
from treetune.engine.settings import InProcessSettings
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import ExperimentDirectory

BASE = Path(__file__).with_name("presets.jsonnet")
SHARED_BY_THE_OTHERS = {"policy_gradient", "spo"}
PRESETS = sorted(
    {path.stem for path in find_configuration_files(CONFIGS_FOLDER / "presets")} - SHARED_BY_THE_OTHERS
)
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
    # Credits of the literature that ask for more than rewards: probabilities, a critic, one in the trainer.
    ("dr_grpo", ["credit/optimal_token_baseline"]),
    ("dr_grpo", ["credit/v0_5"]),
    ("dr_grpo", ["credit/vapo"]),
    # Credits that score texts: by the engine, and by the trainer's reference.
    ("dr_grpo", ["credit/rredcot"]),
    ("dr_grpo", ["credit/trace"]),
    ("dr_grpo", ["credit/trace_of_reference"]),
    ("spo_3_3", ["objectives/spo_mask_below", "objectives/importance_cap_2"]),
    ("spo_3_2", ["compat/spo_moving_target", "objectives/entropy_bonus"]),
]
METHODS = {
    # The experiment, and a metric that only its method has and that says that it was at work.
    "sft_rho1b_GSM8K": "episodes/count",
    "polIter_rho1bSft2_vineppo_MATH": "credit/value_states",
    "polIter_deepseekSft2_ppo_MATH": "critic/grad_norm",
    "polIter_deepseekSft2_grpo_GSM8K": "credit/advantage_std",
    "polIter_rho1bSft2_rloo_GSM8K": "credit/advantage_std",
    "polIter_rho1bSft2_dpo_positive_GSM8K": "selection/pairs",
    "polIter_rho1bSft2_restem_MATH": "selection/kept",
}


def trained(files: list[str], base: Path, *overrides: str) -> tuple[PolicyIteration, ExperimentDirectory]:
    config = load(files, list(overrides), environ={})
    experiment, directory = train_with(InProcessSettings(), built(config), config, base)
    rows = directory.read_metrics()
    assert [row["iteration"] for row in rows] == [0, 1]
    for row in rows:
        assert row["train/steps"] >= 1
        assert math.isfinite(row["train/loss"])
        # Of the second, this says that it was sampled from what the first had trained.
        if "engine/logprob_gap_max" in row:
            assert row["engine/logprob_gap_max"] <= 1e-4
    moved = largest_move(experiment, 2)
    if experiment.choose_checkpoint is None:  # else it may have chosen the weights that it began with
        assert moved > 1e-5, "the weights are as they were"
    return experiment, directory


@pytest.mark.parametrize(
    ("preset", "right"), [*((name, []) for name in PRESETS), *ADDITIONS], ids=lambda part: str(part)
)
def test_a_preset_trains_for_two_small_iterations(preset: str, right: list[str], tmp_path: Path) -> None:
    files = [str(BASE), f"presets/{preset}.jsonnet", *(f"{name}.jsonnet" for name in right)]
    trained(files, tmp_path, *([DEMONSTRATED] if preset in ON_A_CORPUS else []))


@pytest.mark.parametrize("name", ["self_distillation", "self_distillation_right_answer", "cpo"])
def test_self_distillation_trains_for_two_small_iterations(name: str, tmp_path: Path) -> None:
    """With a template of the characters that the small model has."""
    files = [str(BASE), "presets/dr_grpo.jsonnet", f"credit/{name}.jsonnet"]
    _, directory = trained(files, tmp_path, "{credit+: {template: '{context}+{prompt}'}}")
    for row in directory.read_metrics():
        assert row["credit/scored_texts"] > 0 or row["credit/without_context"] == 1.0


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_the_paper_trains_and_is_measured(name: str, tmp_path: Path) -> None:
    experiment, directory = trained([f"{name}.jsonnet", "overlays/smoke.jsonnet"], tmp_path)
    assert all(row[METHODS[name]] > 0 for row in directory.read_metrics())
    for one in experiment.evaluation.sets:
        summary = json.loads((directory.evaluation_folder(2, one.label) / "summary.json").read_text())
        assert (summary["n_problems"], summary["samples"]) == (2, 2)
