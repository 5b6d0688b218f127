"""Kernels of a GPU, compared in value and gradient with plain computations on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gpu.conftest import ON_A_GPU
from tests.models.test_attention import LENGTHS, packed_inputs
from tests.support.chat_models import random_model
from tests.support.tiny_trainer import tiny_model
from treetune.engine.settings import VllmSettings
from treetune.models import logprobs
from treetune.models.attention import (
    PackedRow,
    attach_packed_attention,
    attach_tree_attention,
    run_variable_length_kernel,
)
from treetune.models.logprobs import ModelInputs, Nucleus, PolicyModule
from treetune.prefix_tree import PrefixTree
from treetune.trainer.deepspeed_model import cast_parameters

FLOAT32 = 1e-4
"""The relative error between two orders of float32 sums in these models."""


def on(device: torch.device, inputs: ModelInputs) -> ModelInputs:
    moved = [value.to(device) if isinstance(value, Tensor) else value for value in inputs]
    return ModelInputs(*moved)


def results(model: nn.Module, inputs: ModelInputs, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Computes log-probs and the gradients of their weighted sum, and returns them in float32 on the CPU."""
    model = model.to(device)
    logprobs_N = PolicyModule(model)(on(device, inputs), 1.0)[0].cpu()
    (logprobs_N * torch.linspace(0.5, 1.5, len(logprobs_N))).sum().backward()
    gradients = [p.grad.float().cpu() for p in model.parameters() if p.grad is not None]
    return logprobs_N.detach(), gradients


def assert_close(
    computed: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]], rtol: float
) -> None:
    """Asserts that log-probs and each gradient agree within `rtol` of the largest entry."""
    (logprobs_N, gradients), (expected_logprobs_N, expected_gradients) = computed, expected
    pairs = [(logprobs_N, expected_logprobs_N), *zip(gradients, expected_gradients, strict=True)]
    for tensor, expected_tensor in pairs:
        atol = rtol * float(expected_tensor.abs().max())
        torch.testing.assert_close(tensor, expected_tensor, atol=atol, rtol=0)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, FLOAT32), (torch.bfloat16, 0.1)], ids=str)
def test_attention_over_packed_rows_is_attention_with_a_mask(
    device: torch.device, dtype: torch.dtype, rtol: float, kv_heads: int
) -> None:
    packed = tiny_model(kv_heads=kv_heads)
    cast_parameters(packed, dtype)
    attach_packed_attention(packed)
    plain = results(tiny_model(kv_heads=kv_heads), packed_inputs(), torch.device("cpu"))
    assert_close(results(packed, packed_inputs(), device), plain, rtol)


@ON_A_GPU
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(32, 32, 64), (14, 2, 64), (32, 8, 128)])
def test_the_kernel_for_packed_rows_is_right_at_the_widths_of_real_models(
    heads: int, kv_heads: int, width: int
) -> None:
    lengths = (700, 1, 129, 1024)
    row = PackedRow.of(torch.cat([torch.arange(length) for length in lengths])[None].cuda())
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(count: int) -> Tensor:
        shape = (sum(lengths), count, width)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()

    tensors = [draw(heads), draw(kv_heads), draw(kv_heads)]
    plain_tensors = [tensor.detach().float().requires_grad_() for tensor in tensors]
    computed = run_variable_length_kernel(*tensors, row, width**-0.5)
    parts = []
    # PyTorch's attention takes [batch, heads, tokens, width], and the kernel [tokens, heads, width].
    for sequence in zip(*(tensor.split(lengths) for tensor in plain_tensors), strict=True):
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in sequence)
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        parts.append(attended[0].transpose(0, 1))
    expected = torch.cat(parts)
    weight = torch.randn(expected.shape, device="cuda", generator=generator)
    (computed.float() * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(computed.float(), expected, atol=2e-2, rtol=2e-2)
    for tensor, plain_tensor in zip(tensors, plain_tensors, strict=True):
        assert tensor.grad is not None and plain_tensor.grad is not None
        error = (tensor.grad.float() - plain_tensor.grad).norm()
        assert error <= 0.02 * plain_tensor.grad.norm()


@pytest.mark.parametrize(
    "kernel", ["sdpa", pytest.param("flex_attention", marks=ON_A_GPU)], ids=["by blocks", "flex"]
)
def test_a_prefix_tree_has_the_log_probs_of_its_paths(
    device: torch.device, kernel: str, request: pytest.FixtureRequest
) -> None:
    if kernel == "flex_attention" and device.type == "cpu":
        pytest.skip("FlexAttention has no gradient on a CPU")
    start = [i % 24 for i in range(100)]
    rows = [start[: 20 * i] + [(7 * i + j) % 24 for j in range(30)] for i in range(6)]
    tree = PrefixTree.of([torch.tensor(row).numpy() for row in rows])
    columns = (tree.token_ids_T, tree.depths_T, tree.subtree_last_T)
    ids, depths, lasts = (torch.from_numpy(column)[None] for column in columns)
    model = random_model("qwen3", 24, num_attention_heads=4, num_key_value_heads=2)
    model.set_attn_implementation(kernel)
    attach_tree_attention(model)
    policy = PolicyModule(model.to(device))
    plain = PolicyModule(random_model("qwen3", 24, num_attention_heads=4, num_key_value_heads=2))
    for row, path in zip(rows, tree.paths, strict=True):
        labels, positions = torch.zeros(len(row), dtype=torch.long), torch.from_numpy(path)
        alone = plain(ModelInputs(torch.tensor([row]), torch.arange(len(row)), labels), 1.0)[0]
        inside = policy(on(device, ModelInputs(ids, positions, labels, depths, lasts)), 1.0)[0]
        torch.testing.assert_close(inside.cpu(), alone, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_head_in_chunks_computes_the_same_as_at_once(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    results_of_sizes = []
    for entries in (24 * 3, 24 * 10_000):  # chunks of 3 tokens, and one chunk
        for name in ("LOGITS_PER_CHUNK", "LOGITS_PER_CHUNK_ON_A_GPU"):
            monkeypatch.setattr(logprobs, name, entries)
        model = tiny_model()
        cast_parameters(model, dtype)
        results_of_sizes.append(results(model, packed_inputs()._replace(position_ids_BT=None), device))
    # The head's gradient is rounded to the model's precision once for each chunk.
    assert_close(*results_of_sizes, FLOAT32 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("nucleus", [Nucleus(0.9), Nucleus(0.5, 10), Nucleus(1.0, 3)], ids=str)
def test_the_mass_of_a_nucleus_is_that_of_a_plain_loop(device: torch.device, nucleus: Nucleus) -> None:
    logits_CV = 3 * torch.randn(64, 5000, generator=torch.Generator().manual_seed(0))
    labels_C = logits_CV.argmax(-1)
    log_mass_C = nucleus.log_mass(logits_CV.to(device), labels_C.to(device)).cpu()
    for logits_V, log_mass in zip(logits_CV.double(), log_mass_C.tolist(), strict=True):
        probs = sorted(logits_V.softmax(-1).tolist(), reverse=True)
        probs = probs[: nucleus.top_k] if nucleus.top_k > 0 else probs
        mass, total = 0.0, sum(probs)
        for prob in probs:
            if mass >= nucleus.top_p * total:
                break
            mass += prob
        assert log_mass == pytest.approx(math.log(mass), abs=2e-3), "a token at the boundary at most"


def test_rotary_embeddings_keep_their_precision_at_position_2000(device: torch.device) -> None:
    model: Any = random_model("llama", 24, max_position_embeddings=4096)
    cast_parameters(model, torch.bfloat16)
    model = model.to(device)
    rotary = model.model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32
    positions = torch.arange(4096, device=device)[None]
    cosine, _ = rotary(torch.zeros(1, device=device), positions)
    angles = positions[0].double().cpu()[:, None] * rotary.inv_freq.double().cpu()
    assert (cosine[0, :, : angles.shape[1]].double().cpu() - angles.cos()).abs().max() < 1e-3


def test_fused_adamw_takes_the_steps_of_the_plain_one(device: torch.device) -> None:
    weights = []
    for fused in (False, True):
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(n, 7, generator=generator).to(device)) for n in (3, 1000)]
        optimiser = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), fused=fused)
        for step in range(5):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 0.1 * (step - 2)) * parameter.detach()
            optimiser.step()
        weights.append([parameter.detach() for parameter in parameters])
    for plain, fused in zip(*weights, strict=True):
        torch.testing.assert_close(plain, fused, atol=1e-6, rtol=1e-5)


def test_float32_products_are_not_rounded_to_tf32(device: torch.device) -> None:
    left, right = torch.randn(2, 256, 512, generator=torch.Generator().manual_seed(0))
    exact = left.double() @ right.double().T
    product = left.to(device) @ right.to(device).T
    assert (product.double().cpu() - exact).abs().max() < 1e-3


def test_a_float32_model_has_the_log_probs_of_the_cpu(device: torch.device) -> None:
    inputs = packed_inputs()._replace(position_ids_BT=None)
    expected = results(random_model("qwen2", 24), inputs, torch.device("cpu"))
    assert_close(results(random_model("qwen2", 24), inputs, device), expected, 1e-3)


def test_the_rounding_of_bfloat16_is_within_the_tolerance_of_the_canary(device: torch.device) -> None:
    logprobs_of_dtypes = []
    for dtype, device_of_dtype in ((torch.float32, torch.device("cpu")), (torch.bfloat16, device)):
        model = random_model("qwen3", 24)
        with torch.no_grad():
            model.lm_head.weight.mul_(20.0)  # as far from uniform as a language model is
        cast_parameters(model, dtype)
        inputs = packed_inputs()._replace(position_ids_BT=None)
        logprobs_of_dtypes.append(results(model, inputs, device_of_dtype)[0])
    gaps = (logprobs_of_dtypes[0] - logprobs_of_dtypes[1]).abs()
    tolerance = VllmSettings().tolerance("cuda")
    assert gaps.mean() <= tolerance.mean and gaps.max() <= tolerance.largest
    assert len(gaps) == sum(LENGTHS) - len(LENGTHS)


@ON_A_GPU
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_ligers_kernels_compute_the_same(architecture: str) -> None:
    from treetune.models.pretrained import _apply_liger

    inputs = packed_inputs()._replace(position_ids_BT=None)
    plain = results(random_model(architecture, 24), inputs, torch.device("cuda"))
    fused = random_model(architecture, 24).cuda()
    _apply_liger(fused)
    assert_close(results(fused, inputs, torch.device("cuda")), plain, 1e-3)
