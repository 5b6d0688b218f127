"""Each method of the paper, made small by the smoke overlay, goes through the whole loop.

One server serves them all, each run beginning with its own start weights loaded into it, since starting
one costs more than a run. scripts/smoke_all.sh starts one for every experiment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import treetune.parts  # noqa: F401  (registers them)
from tests.runtime.shared_server import SharedServer, largest_move, shared_server
from treetune.config.jsonnet import load

pytestmark = [pytest.mark.server, pytest.mark.slow]

RUNS = {
    # The experiment, and a metric that only its method has and that says that it was at work.
    "sft_rho1b_GSM8K": "episodes/count",
    "polIter_rho1bSft2_vineppo_MATH": "credit/value_states",
    "polIter_deepseekSft2_ppo_MATH": "critic/grad_norm",
    "polIter_deepseekSft2_grpo_GSM8K": "credit/advantage_std",
    "polIter_rho1bSft2_rloo_GSM8K": "credit/advantage_std",
    "polIter_rho1bSft2_dpo_positive_GSM8K": "selection/pairs",
    "polIter_rho1bSft2_restem_MATH": "selection/kept",
}


@pytest.fixture(scope="module")
def server() -> Iterator[SharedServer]:
    with shared_server() as shared:
        yield shared


@pytest.mark.parametrize("name", RUNS)
def test_a_method_trains_for_two_small_iterations(name: str, server: SharedServer, tmp_path: Path) -> None:
    config = load([f"{name}.jsonnet", "overlays/smoke.jsonnet"], environ={})
    experiment, directory = server.train(config, tmp_path)
    rows = directory.read_metrics()
    assert [row["iteration"] for row in rows] == [0, 1]
    for row in rows:
        assert row["train/steps"] >= 1
        assert row[RUNS[name]] > 0
    for one in experiment.evaluation.sets:
        summary = json.loads((directory.evaluation(2, one.label) / "summary.json").read_text())
        assert (summary["n_problems"], summary["samples"]) == (2, 2)

    moved = largest_move(experiment, directory, 2)
    if experiment.choose_checkpoint is None:  # else it may have chosen the weights that it began with
        assert moved > 1e-5, "the weights are as they were"
