"""Packs a mixture's experts anew when a server on a CPU is given new weights.

On a CPU, vLLM (0.32) puts the experts' weights into the order in which its kernel reads them, once, at the
server's start. New weights come in the order of their files, and would be read in that of the kernel: the
canary finds nonsense at each sync, and a new server has to be started for it. Importing this module in the
server's worker has them packed at each reading.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

_set_kernel_up = UnquantizedFusedMoEMethod._setup_kernel


def _set_kernel_up_and_pack(self: Any, layer: torch.nn.Module, w13: Any, w2: Any) -> None:
    is_update = self.moe_kernel is not None
    _set_kernel_up(self, layer, w13, w2)
    on_cpu = layer.w13_weight.device.type == "cpu"
    if is_update and on_cpu:  # at the start, vLLM has done it
        self.moe_kernel.fused_experts.process_weights_after_loading(layer)


def pack_at_each_reading() -> None:
    """Changes vLLM in this process. Asked for again, it does nothing more."""
    UnquantizedFusedMoEMethod._setup_kernel = _set_kernel_up_and_pack


pack_at_each_reading()


class PackedExpertsExtension:
    """Naming it has this module imported in vLLM's worker."""
