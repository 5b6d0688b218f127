"""Plans of shipped configurations, and published runs to compare plans with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

from tests.support.shipped import ROOT, experiment_of
from treetune.cluster.commands import find_shape
from treetune.runtime.base import PolicyIteration
from treetune.runtime.machine import Machine, make_described_machine
from treetune.runtime.planning import report
from treetune.runtime.planning.plan import Plan


def experiment(name: str, *overrides: str | dict[str, Any]) -> PolicyIteration:
    texts = [override if isinstance(override, str) else json.dumps(override) for override in overrides]
    return experiment_of(f"{ROOT}/configs/{name}", *texts)


def plan(name: str, *overrides: str | dict[str, Any], machine: Machine | None = None) -> Plan:
    """Plans a shipped experiment, by default on a machine with eight GPUs of 80 GiB."""
    root = experiment(name, *overrides)
    return Plan.of(root, machine or make_described_machine(8, 80), shape_of=find_shape)


RHO, DEEPSEEK = "polIter_rho1bSft2_vineppo_MATH", "polIter_deepseekSft2_vineppo_MATH"
IN_PROCESS = {"max_num_seqs": 256, "async_scheduling": False, "gpu_memory_utilization": 0.45}
IN_TURN = {"max_num_seqs": 512, "gpu_memory_utilization": 0.5}
BESIDE = {"sleep": False, "servers": "one", "tensor_parallel_size": 4, "devices": [4, 5, 6, 7]}


def by_rows(rows: int, checkpointing: bool, **engine: Any) -> str:
    """Returns an override: micro-batches of `rows` rows, and the engine's settings."""
    trainer = {"sequences_per_micro_batch": rows, "gradient_checkpointing": checkpointing}
    engines = json.dumps(IN_PROCESS | engine)
    return f"{{trainer+: {json.dumps(trainer)}, engines+: {{policy+: {engines}}}}}"


PUBLISHED_RUNS: Mapping[str, tuple[str, str, int, int, dict[str, float]]] = {
    "Rho-1B, one GPU, rows alone": (
        RHO, by_rows(1, True), 1, 250, {"answers": 4, "continuations": 152, "training": 69, "in all": 237},
    ),
    "Rho-1B, terminal reward": (
        "polIter_rho1bSft2_grpo_MATH", by_rows(1, True), 1, 250, {"answers": 4, "training": 74, "in all": 90},
    ),
    "Rho-1B with a critic, 8 rows at once": (
        "polIter_rho1bSft2_grpo_MATH", by_rows(8, False), 1, 250, {"answers": 5, "training": 17},
    ),
    "Rho-1B, two GPUs, 4 rows at once": (
        RHO, by_rows(4, False), 2, 250, {"continuations": 78.2, "training": 19.2, "in all": 118.2},
    ),
    "DeepSeekMath-7B, 4 GPUs train, 4 sample": (
        DEEPSEEK, by_rows(2, True, **BESIDE), 4, 250,
        {"answers": 6.1, "continuations": 220.7, "training": 33.2, "in all": 277},
    ),
    "DeepSeekMath-7B, 8 GPUs in turn": (
        DEEPSEEK, by_rows(2, True, **IN_TURN), 8, 250, {"scoring": 3.3, "training": 22.1, "in all": 338},
    ),
}  # fmt: skip
"""CASPO's runs on H100s (its README and docs/disaggregated_topology_plan.md, April 2026), 512 answers of MATH
an iteration, K = 9. Each entry has an experiment of ours, an override with their settings, GPUs, tokens of an
answer, and their seconds by phase.

For eight GPUs in turn only the sum is published; scoring and training are those of eight ranks beside one
engine of eight GPUs. They give no lengths of answers: 152 s at 6.6 ms a continuation are 5 states an
answer, or 250 tokens at 50 a step. Their engine is in the trainer's process."""


def seconds_of_published(name: str) -> dict[str, tuple[float, float]]:
    """Returns planned and published seconds by phase.

    The plan has no costs of HTTP and files, and no phases that the published run didn't have.
    """
    configuration, override, gpus, tokens, published = PUBLISHED_RUNS[name]
    root = experiment(configuration, override)
    machine = replace(make_described_machine(gpus, 80), gpus=8)
    with (
        mock.patch.object(report, "HTTP_TOKEN_S", 0.0),
        mock.patch.object(report, "HTTP_SAMPLE_S", 0.0),
        mock.patch.object(report, "FILE_BYTES_PER_S", math.inf),
    ):
        estimates = report.estimate_phases(Plan.of(root, machine, tokens, find_shape))
    planned = {}
    for estimate in estimates:
        if estimate.phase not in ("evaluation", "checkpoints"):
            planned[estimate.phase] = estimate.seconds
    planned["in all"] = sum(planned.values())
    return {phase: (planned[phase], seconds) for phase, seconds in published.items()}
