"""Packed rows are attended over sequence by sequence, without a mask, and as a GPU's kernel asks for it."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainers.helpers import one_rank, tiny_model
from treetune.models import attention
from treetune.models.attention import PACKED, PackedRow, attach_packed_attention
from treetune.models.logprobs import ModelInputs, PolicyModule
from treetune.trainers.base import Trainer
from treetune.trainers.deepspeed_model import ModelFactory
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient

LENGTHS = (5, 1, 7, 3)


def packed_inputs() -> ModelInputs:
    generator = torch.Generator().manual_seed(0)
    ids_1T = torch.randint(0, 24, (1, sum(LENGTHS)), generator=generator)
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    positions_N = torch.tensor([t for t in range(sum(LENGTHS)) if t not in ends.tolist()])
    return ModelInputs(
        input_ids_BT=ids_1T,
        positions_N=positions_N,
        labels_N=ids_1T[0, positions_N + 1],
        position_ids_BT=torch.cat([torch.arange(length) for length in LENGTHS])[None],
    )


def padded_inputs() -> ModelInputs:
    return packed_inputs()._replace(position_ids_BT=None)


def found(model: nn.Module, inputs: ModelInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs and the gradient of their weighted sum."""
    logprobs_N, *_ = PolicyModule(model)(inputs, 1.0)
    (logprobs_N * torch.arange(1, len(logprobs_N) + 1)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logprobs_N.detach(), gradients


def attached(model: nn.Module) -> nn.Module:
    attach_packed_attention(model)
    return model


def same(one: tuple[Tensor, dict[str, Tensor]], two: tuple[Tensor, dict[str, Tensor]]) -> bool:
    return torch.allclose(one[0], two[0], atol=1e-5) and all(
        torch.allclose(one[1][name], two[1][name], atol=2e-4) for name in one[1]
    )


def kernel(calls: list[dict[str, Any]]) -> Any:
    """What PyTorch's kernel computes, by its own signature, where no such kernel runs."""
    from torch.nn.attention.varlen import varlen_attn

    asked = inspect.signature(varlen_attn)

    def stand_in(*given: Any, **named: Any) -> Tensor:
        call = asked.bind(*given, **named)
        call.apply_defaults()
        calls.append(call.arguments)
        query, key, value, starts, of_keys, longest, longest_key = list(call.arguments.values())[:7]
        assert starts.dtype == torch.int32 and torch.equal(starts, of_keys)
        assert longest == longest_key == int(starts.diff().max())
        assert call.arguments["window_size"] == (-1, 0), "causal"
        parts = []
        for begin, end in zip(starts.tolist(), starts[1:].tolist(), strict=False):
            q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
            parts.append(
                nn.functional.scaled_dot_product_attention(
                    q[None], k[None], v[None], is_causal=True, scale=call.arguments["scale"], enable_gqa=True
                )[0].transpose(0, 1)
            )
        return torch.cat(parts)

    return stand_in


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("inputs", [packed_inputs, padded_inputs], ids=["packed", "one sequence"])
def test_rows_are_attended_over_as_with_a_mask(kv_heads: int, inputs: Any) -> None:
    plain = found(tiny_model(kv_heads=kv_heads), inputs())
    assert same(found(attached(tiny_model(kv_heads=kv_heads)), inputs()), plain)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_kernel_on_a_gpu_is_asked_for_the_same(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(attention, "has_kernel", lambda query: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel(calls))
    plain = found(tiny_model(kv_heads=kv_heads), packed_inputs())
    assert same(found(attached(tiny_model(kv_heads=kv_heads)), packed_inputs()), plain)
    assert len(calls) == 2, "one of each layer"
    assert calls[0]["enable_gqa"] is (kv_heads == 1)


def test_pytorchs_kernel_takes_the_shapes_and_types_that_it_is_given() -> None:
    """By its own rule for tensors without memory."""
    row = PackedRow.of(torch.cat([torch.arange(length) for length in LENGTHS])[None])
    assert row.lengths == LENGTHS
    tokens = sum(LENGTHS)
    query = torch.empty(tokens, 4, 64, dtype=torch.bfloat16, device="meta")
    key = torch.empty(tokens, 2, 64, dtype=torch.bfloat16, device="meta")
    assert row.starts_S is not None
    on_meta = replace(row, starts_S=row.starts_S.to("meta"))
    result = attention.variable_length(query, key, key, on_meta, 0.125)
    assert (result.shape, result.dtype) == (query.shape, query.dtype)


def test_no_mask_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, masks = attached(tiny_model()), []
    real = attention.packed_attention

    def seen(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
        masks.append(mask)
        return real(module, query, key, value, mask, **rest)

    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, seen)
    found(model, packed_inputs())
    assert masks == [None, None]


def test_a_model_that_hands_nothing_on_is_refused() -> None:
    with pytest.raises(ValueError, match="doesn't hand on"):
        attached(tiny_model())(input_ids=torch.zeros(1, 3, dtype=torch.long))


def test_sliding_windows_are_refused_with_the_remedy() -> None:
    model = tiny_model()
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="sliding_attention: set"):
        attach_packed_attention(model)


@pytest.mark.parametrize(
    ("device", "layout", "wanted"),
    [("cuda", "packed", PACKED), ("cuda", "padded", "sdpa"), ("cpu", "packed", "sdpa")],
)
def test_packing_on_a_gpu_takes_it_unasked(device: str, layout: Any, wanted: str) -> None:
    settings = Trainer(objective=ClippedPolicyGradient(), learning_rate=1e-3, layout=layout)
    ranks = replace(one_rank(), device=torch.device(device))
    model = ModelFactory(settings, tiny_model, ranks, 0).attached(tiny_model())
    assert model.config._attn_implementation == wanted
