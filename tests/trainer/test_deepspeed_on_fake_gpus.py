"""DeepSpeed's reading of our settings on a machine with NVIDIA GPUs, as far as a CPU can test it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("fake_gpus_program.py")
OFFLOADED = {"offload_optimizer": True}
SETTINGS: list[dict[str, Any]] = [
    {"zero_stage": 0},
    {"zero_stage": 1, "precision": "bfloat16"},
    {"zero_stage": 2, "precision": "bfloat16", **OFFLOADED},
    {"zero_stage": 3, "precision": "bfloat16"},
    {"zero_stage": 3, "precision": "bfloat16", **OFFLOADED, "offload_parameters": True},
]


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    # An earlier test may have declared this machine to have no GPU.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES")
    }
    process = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps(SETTINGS), capture_output=True, text=True, timeout=300, check=False, env=environment,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_deepspeed_takes_the_gpus_and_needs_no_cuda_compiler(results: list[dict[str, Any]]) -> None:
    assert results[0] == {
        "accelerator": "cuda",
        "ranks talk by": "nccl",
        "bfloat16": True,
        # This is not the builder that compares the version of nvcc with PyTorch's.
        "Adam on the CPU is built by": "deepspeed.ops.op_builder.cpu.cpu_adam",
        "can be": True,
    }


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_deepspeed_reads_each_setting_as_it_is_meant(number: int, results: list[dict[str, Any]]) -> None:
    settings = SETTINGS[number]
    on_the_cpu = "offload_optimizer" in settings
    assert results[1 + number] == {
        "stage": settings["zero_stage"],
        "bfloat16": "precision" in settings,
        "gradients add up in": "fp32",
        "fused": not on_the_cpu,
        "own Adam": on_the_cpu,
        "pinned": on_the_cpu,
    }
