"""Imports DeepSpeed as on a machine with eight H100 and no CUDA compiler.

It reads a list of trainers' settings from standard input, and writes what DeepSpeed makes of the accelerator
and of each of them to standard output.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import torch


def fake_eight_h100() -> None:
    h100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=85_017_624_576)
    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 8
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: h100
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.is_bf16_supported = lambda *arguments: True
    os.environ.pop("CUDA_HOME", None)


def main() -> None:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.config import DeepSpeedConfig

    from treetune.objectives.policy_gradient import ClippedPolicyGradient
    from treetune.trainer.base import Trainer
    from treetune.trainer.deepspeed_model import _make_deepspeed_config
    from treetune.trainer.ranks import Ranks

    accelerator = get_accelerator()
    builder = accelerator.create_op_builder("CPUAdamBuilder")
    results = [
        {
            "accelerator": accelerator.device_name(),
            "ranks talk by": accelerator.communication_backend_name(),
            "bfloat16": accelerator.is_bf16_supported(),
            "Adam on the CPU is built by": type(builder).__module__,
            "can be": builder.is_compatible(),
        }
    ]
    for settings in json.load(sys.stdin):
        trainer = Trainer(objective=ClippedPolicyGradient(), learning_rate=1e-3, **settings)
        config = DeepSpeedConfig(_make_deepspeed_config(trainer, Ranks(0, 1, torch.device("cuda"), 60)))
        zero = config.zero_config
        results.append(
            {
                "stage": zero.stage,
                "bfloat16": config.bfloat16_config.enabled,
                "gradients add up in": config.grad_accum_dtype,
                "fused": config.optimizer_params.get("fused", False),
                "own Adam": not config.optimizer_params["torch_adam"],
                "pinned": bool(zero.offload_optimizer and zero.offload_optimizer.pin_memory),
            }
        )
    sys.stdout.write("\n" + json.dumps(results))


if __name__ == "__main__":
    fake_eight_h100()
    main()
