"""What DeepSpeed makes of our settings where it sees NVIDIA GPUs, as far as it goes without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("faked_accelerator_program.py")
OFFLOADED = {"offload_optimizer": True}
SETTINGS: list[dict[str, Any]] = [
    {"zero_stage": 0},
    {"zero_stage": 1, "precision": "bfloat16"},
    {"zero_stage": 2, "precision": "bfloat16", **OFFLOADED},
    {"zero_stage": 3, "precision": "bfloat16"},
    {"zero_stage": 3, "precision": "bfloat16", **OFFLOADED, "offload_parameters": True},
]


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    # A test before this one may have said that it is a CPU's machine.
    here = {
        key: one for key, one in os.environ.items() if key not in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES")
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps(SETTINGS), capture_output=True, text=True, timeout=300, check=False, env=here,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_it_takes_the_gpus_and_needs_no_cuda_compiler(told: list[dict[str, Any]]) -> None:
    assert told[0] == {
        "accelerator": "cuda",
        "ranks talk by": "nccl",
        "bfloat16": True,
        # Not the builder that compares nvcc's version with PyTorch's.
        "Adam on the CPU is built by": "deepspeed.ops.op_builder.cpu.cpu_adam",
        "can be": True,
    }


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_it_reads_our_settings_as_they_are_meant(number: int, told: list[dict[str, Any]]) -> None:
    settings = SETTINGS[number]
    on_the_cpu = "offload_optimizer" in settings
    assert told[1 + number] == {
        "stage": settings["zero_stage"],
        "bfloat16": "precision" in settings,
        "gradients add up in": "fp32",
        "fused": not on_the_cpu,
        "own Adam": on_the_cpu,
        "pinned": on_the_cpu,
    }
