"""On a CPU, a server packs the experts of a mixture again each time that it reads weights, and only then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from treetune.engine.launch import PACKED_EXPERTS


class Kernel:
    def __init__(self) -> None:
        self.packed = 0
        self.fused_experts = self

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.packed += 1


@pytest.mark.parametrize(("device", "packed"), [("cpu", 2), ("meta", 0)])
def test_each_load_after_the_first_packs_the_experts_and_only_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, device: str, packed: int
) -> None:
    from treetune.engine import packed_experts

    def set_kernel_up(self: Any, layer: nn.Module, w13: Any, w2: Any) -> None:
        self.moe_kernel = self.moe_kernel or Kernel()

    monkeypatch.setattr(packed_experts, "_setup_kernel_of_vllm", set_kernel_up)
    layer = nn.Module()
    layer.w13_weight = nn.Parameter(torch.zeros(2, device=device))
    method: Any = SimpleNamespace(moe_kernel=None)
    for _ in range(3):  # the start, which packs by itself, and two syncs
        packed_experts._set_kernel_up_and_pack(method, layer, None, None)
    assert method.moe_kernel.packed == packed


def test_the_worker_imports_the_extension_and_vllms_method_is_replaced() -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.utils.import_utils import resolve_obj_by_qualname

    assert resolve_obj_by_qualname(PACKED_EXPERTS).__name__ == "PackedExpertsExtension"
    assert UnquantizedFusedMoEMethod._setup_kernel.__module__ == "treetune.engine.packed_experts"
