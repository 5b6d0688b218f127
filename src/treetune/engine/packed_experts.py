"""Corrects vLLM for mixtures of experts on a CPU: new weights of experts are packed whenever they come.

On a CPU, vLLM (0.32) reorders (packs) the experts' weights for its kernel, but only when the server starts.
It stores later weights in the order of their files, and its kernel then computes nonsense from them. The
canary would find that at each sync, and a new server would have to be started. A worker that imports this
module packs later weights too.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

_setup_kernel_of_vllm = UnquantizedFusedMoEMethod._setup_kernel


def _set_kernel_up_and_pack(self: Any, layer: torch.nn.Module, w13: Any, w2: Any) -> None:
    """Replaces vLLM's method `_setup_kernel`, which vLLM calls whenever it has loaded weights of experts
    (`w13`, `w2`)."""
    # A kernel exists already if these are not the first weights.
    is_update = self.moe_kernel is not None
    _setup_kernel_of_vllm(self, layer, w13, w2)
    on_cpu = layer.w13_weight.device.type == "cpu"
    # vLLM itself packs the first weights: it reorders them for its kernel on a CPU.
    if is_update and on_cpu:
        self.moe_kernel.fused_experts.process_weights_after_loading(layer)


def pack_at_each_update() -> None:
    """Replaces vLLM's method in this process by the one above. A second call changes nothing."""
    UnquantizedFusedMoEMethod._setup_kernel = _set_kernel_up_and_pack


pack_at_each_update()


class PackedExpertsExtension:
    """An empty extension of vLLM's worker. If a server names it, its worker imports this module."""
