"""Promises of code that only runs on a GPU, tested in bfloat16 on tensors without memory: results and
gradients have their shapes and types, and each layer calls PyTorch's kernel as often as it should.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.peak_memory import config_of
from treetune.models import attention, logprobs
from treetune.models.attention import PackedRow, attach_packed_attention
from treetune.models.logprobs import CriticModule, ModelInputs, Nucleus, PolicyModule
from treetune.models.shapes import PUBLISHED, shape_of

LENGTHS = (1500, 2048, 548)
POSITIONS = 3000
LAYERS = 3
KERNEL, ITS_GRADIENT = "torch_attn._varlen_attn.default", "torch_attn._varlen_attn_backward.default"


class Counting(TorchDispatchMode):
    """Count how often each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.times: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.times[str(operation)] += 1
        return operation(*arguments, **(named or {}))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    row_of = PackedRow.of

    def starts_on_meta(position_ids_1T: torch.Tensor) -> PackedRow:
        assert position_ids_1T.is_meta
        row = row_of(torch.cat([torch.arange(length) for length in LENGTHS])[None])
        assert row.boundaries is not None
        return replace(row, boundaries=row.boundaries.to("meta"))

    monkeypatch.setattr(PackedRow, "of", starts_on_meta)
    monkeypatch.setattr(attention, "has_kernel", lambda query: query.dtype == torch.bfloat16)
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", logprobs.LOGITS_PER_CHUNK_ON_A_GPU)


def model_of(name: str, checkpointing: bool = False) -> Any:
    """Make a model of a published width with few layers."""
    import transformers

    shape = shape_of(PUBLISHED[name], name)
    assert shape is not None
    config = config_of(replace(shape, layers=LAYERS))
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config).to(torch.bfloat16)
    attach_packed_attention(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def packed_row() -> ModelInputs:
    ids_1T = torch.zeros(1, sum(LENGTHS), dtype=torch.long, device="meta")
    places_N = torch.zeros(POSITIONS, dtype=torch.long, device="meta")
    return ModelInputs(ids_1T, places_N, places_N, position_ids_BT=ids_1T)


def assert_all_have_gradients(module: torch.nn.Module) -> None:
    for name, weight in module.named_parameters():
        assert weight.grad is not None, name
        assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, torch.bfloat16), name


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("name", ["microsoft/rho-math-1b-v0.1", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-8B"])
def test_a_policys_packed_row_goes_through_the_kernel_in_both_directions(
    name: str, checkpointing: bool
) -> None:
    policy = PolicyModule(model_of(name, checkpointing))
    with Counting() as counted:
        results = policy(packed_row(), 0.6, entropy_gradient=True, nucleus=Nucleus(0.9))
        assert [(result.shape, result.dtype) for result in results] == [((POSITIONS,), torch.float32)] * 3
        logprobs_N, entropy_N, log_mass_N = results
        assert not log_mass_N.requires_grad
        (logprobs_N.sum() + entropy_N.sum()).backward()
    assert_all_have_gradients(policy)
    assert counted.times[KERNEL] == LAYERS * (2 if checkpointing else 1)
    assert counted.times[ITS_GRADIENT] == LAYERS
    entries = logprobs.LOGITS_PER_CHUNK_ON_A_GPU // policy.model.config.vocab_size
    assert counted.times["aten.sort.stable"] >= math.ceil(POSITIONS / entries), "each chunk's nucleus"


def test_a_critics_packed_row_goes_through_the_kernel_in_both_directions() -> None:
    critic = CriticModule(model_of("Qwen/Qwen2.5-0.5B"), seed=0).to("meta")
    with Counting() as counted:
        values_N = critic(packed_row())
        values_N.sum().backward()
    assert (values_N.shape, values_N.dtype) == ((POSITIONS,), torch.float32)
    assert_all_have_gradients(critic)
    assert (counted.times[KERNEL], counted.times[ITS_GRADIENT]) == (LAYERS, LAYERS)
