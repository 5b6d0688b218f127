"""Attention over packed rows and over prefix trees, without a dense mask, and shared out over ranks."""

from __future__ import annotations

import inspect
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from tests.models.chat_models import random_model
from tests.trainer.helpers import dense_mask, one_rank, tiny_model
from treetune.models import attention
from treetune.models.attention import (
    BLOCK,
    PACKED,
    PackedRow,
    attach_packed_attention,
    attach_tree_attention,
    block_mask,
    query_blocks,
)
from treetune.models.logprobs import CriticModule, ModelInputs, PolicyModule
from treetune.models.pretrained import PretrainedModel
from treetune.models.sequence_parallel import SequenceParallel
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.prefix_tree import PrefixTree
from treetune.trainer.base import Trainer
from treetune.trainer.deepspeed_model import ModelFactory

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
    on_meta = replace(row, starts_S=row.starts_S.to("meta"))
    result = attention.run_variable_length_kernel(query, key, key, on_meta, 0.125)
    assert (result.shape, result.dtype) == (query.shape, query.dtype)


def test_no_mask_is_made() -> None:
    model, masks = attached(tiny_model()), []

    def seen(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
        masks.append(mask)
        return attention.packed_attention(module, query, key, value, mask, **rest)

    AttentionInterface.register(PACKED, seen)
    found(model, packed_inputs())
    assert masks == [None, None]


def test_a_model_that_hands_nothing_on_and_sliding_windows_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="doesn't hand on"):
        attached(tiny_model())(input_ids=torch.zeros(1, 3, dtype=torch.long))
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
    model = ModelFactory(settings, tiny_model, ranks, 0).attach_attention(tiny_model())
    assert model.config._attn_implementation == wanted


def lasts(width: int, seed: int) -> torch.Tensor:
    """Of a forest with branches of all lengths."""
    draw = random.Random(seed)
    rows: list[list[int]] = [[]]
    while True:
        earlier = draw.choice(rows)
        row = earlier[: draw.randint(0, len(earlier))]
        row = row + [draw.randrange(3) for _ in range(draw.randint(1, 200))]
        tree = PrefixTree.of([np.array(one, np.int64) for one in [*rows, row]])
        if len(tree.subtree_last_T) >= width:
            return torch.from_numpy(tree.subtree_last_T[:width]).clamp(max=width - 1)
        rows.append(row)


@pytest.mark.parametrize("width", [5, BLOCK, 3 * BLOCK, 5 * BLOCK + 37])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_hold_what_the_dense_mask_holds(width, seed):
    subtree_last_T = lasts(width, seed)
    dense = dense_mask(subtree_last_T)
    mask = block_mask(subtree_last_T)
    assert mask.shape == (1, 1, width, width)
    assert torch.equal(create_mask(mask.mask_mod, 1, 1, width, width, device="cpu")[0, 0], dense)
    padded = torch.nn.functional.pad(dense, (0, -width % BLOCK, 0, -width % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2).flatten(2)
    whole = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    in_part = listed(mask.kv_num_blocks, mask.kv_indices)
    assert torch.equal(whole | in_part, blocks.any(-1))
    assert not (whole & in_part).any()
    assert not (whole & ~blocks.all(-1)).any()
    inside = slice(0, width // BLOCK)  # at the end, a whole one may be looked at as one seen in part
    assert torch.equal(whole[inside, inside], blocks.all(-1)[inside, inside])


ENDS_WITH_A_BLOCK = torch.tensor([BLOCK] * (BLOCK + 1) + [BLOCK + 20] * 20)
"""One path ends at the first node of the second block."""


@pytest.mark.parametrize("width", [5, BLOCK, 5 * BLOCK + 37, len(ENDS_WITH_A_BLOCK)])
def test_queries_are_given_the_keys_that_they_see(width):
    subtree_last_T = ENDS_WITH_A_BLOCK if width == len(ENDS_WITH_A_BLOCK) else lasts(width, 0)
    seen = torch.zeros(width, width, dtype=torch.bool)
    blocks = query_blocks(subtree_last_T)
    places = torch.arange(width).split(BLOCK)
    for own_Q, keys_K, mask_QK in zip(places, blocks.keys_M.split(blocks.counts), blocks.masks, strict=True):
        seen[own_Q[:, None], keys_K] = mask_QK
        assert mask_QK.any(0).all(), "no key is there for nothing"
    assert torch.equal(seen, dense_mask(subtree_last_T))


def listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    chosen = torch.zeros(indices.shape, dtype=torch.bool)
    for place in np.ndindex(*counts.shape):
        chosen[(*place, indices[place][: counts[place]].long())] = True
    return chosen[0, 0]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_by_blocks_equals_the_dense_one():
    subtree_last_T = lasts(2 * BLOCK + 11, 0)
    query, key, value = torch.randn(
        3, 1, 2, len(subtree_last_T), 16, generator=torch.Generator().manual_seed(0)
    )
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value, dense_mask(subtree_last_T))
    by_blocks = flex_attention(query, key, value, block_mask=block_mask(subtree_last_T))
    torch.testing.assert_close(by_blocks, dense, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("load", [tiny_model, lambda: random_model("qwen3", 24)], ids=["llama", "qwen3"])
def test_what_a_model_says_at_a_node_is_what_it_says_of_the_way_there(load):
    """Of more nodes than a block has; also of the row alone, once it takes trees."""
    draw = random.Random(0)
    start = [draw.randrange(24) for _ in range(100)]
    rows = [start[: 20 * i] + [draw.randrange(24) for _ in range(30)] for i in range(6)]
    tree = PrefixTree.of([np.array(row) for row in rows])
    ids, depths, subtree_last_1T = (
        torch.from_numpy(a)[None] for a in (tree.token_ids_T, tree.depths_T, tree.subtree_last_T)
    )
    assert ids.shape[1] > BLOCK
    policy, critic = PolicyModule(load()), CriticModule(load(), seed=0)
    models = load(), load()
    for model in models:
        attach_tree_attention(model)
    tree_policy, tree_critic = PolicyModule(models[0]), CriticModule(models[1], seed=0)
    for row, path in zip(rows, tree.paths, strict=True):
        labels = torch.zeros(len(row), dtype=torch.long)
        places = torch.from_numpy(path)
        alone = ModelInputs(torch.tensor([row]), torch.arange(len(row)), labels)
        in_tree = ModelInputs(ids, places, labels, depths, subtree_last_1T)
        expected = policy(alone, 1.0)[0]
        found = tree_policy(in_tree, 1.0)[0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(tree_policy(alone, 1.0)[0], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(tree_critic(in_tree), critic(alone), atol=1e-5, rtol=1e-5)


def test_a_model_that_keeps_what_it_is_called_with_to_itself_is_refused():
    model = tiny_model()
    attach_tree_attention(model)
    with pytest.raises(ValueError, match="prefix trees need: set"):
        model(torch.tensor([[1, 2]]))


def test_models_that_take_no_such_mask_are_refused_with_the_remedy():
    model = tiny_model()
    for other in ("flash_attention_2", "eager"):
        model.config._attn_implementation_internal = other
        with pytest.raises(ValueError, match=f"'{other}' doesn't: set model.attention to 'flex_attention'"):
            attach_tree_attention(model)
    model.config._attn_implementation_internal = "sdpa"
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="has sliding_attention: set it to 'padded' or 'packed'"):
        attach_tree_attention(model)
    model.config.layer_types, model.config.sliding_window = None, 16
    with pytest.raises(ValueError, match="has sliding_attention"):
        attach_tree_attention(model)


def test_flex_attention_needs_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("treetune.models.pretrained._GPU_DEVICES", ("none",))
    (tmp_path / "config.json").write_text("{}")
    model = PretrainedModel(name_or_path=str(tmp_path), attention="flex_attention")
    with pytest.raises(ValueError, match="'flex_attention' needs an NVIDIA GPU"):
        model.require()


def parallel(size: int, rank: int = 0) -> SequenceParallel:
    return SequenceParallel(group=None, rank=rank, size=size)


@pytest.mark.parametrize(
    ("size", "attention", "layers", "told"),
    [
        (3, "sdpa", None, "doesn't divide the 2 attention heads"),
        (2, "sdpa", ["full_attention", "sliding_attention"], "needs full attention in every layer"),
        (2, "eager", None, "'sdpa' and 'flash_attention_2'"),
    ],
)
def test_attention_that_ranks_cannot_share_is_refused(
    size: int, attention: str, layers: list[str] | None, told: str
) -> None:
    model = tiny_model()
    model.set_attn_implementation(attention)
    model.config.layer_types = layers
    with pytest.raises(ValueError, match=told):
        parallel(size).attach(model)


def test_heads_of_keys_that_ranks_cannot_share_are_refused() -> None:
    model = tiny_model()
    model.config.num_attention_heads, model.config.num_key_value_heads = 6, 3
    with pytest.raises(ValueError, match=r"the 6 attention heads \(of 3 keys and values\)"):
        parallel(2).attach(model)


def test_what_is_written_of_a_shared_model_does_not_say_so() -> None:
    model = tiny_model()
    parallel(2).attach(model)
    assert "ulysses" not in str(model.config.to_dict())


@pytest.mark.parametrize("width", [6, 7])
def test_every_position_is_one_ranks_own(width: int) -> None:
    positions_N = torch.arange(3 * width)
    found = []
    for rank in range(2):
        mine_M, places_M = parallel(2, rank).own_positions(positions_N, width)
        found += mine_M.tolist()
        part = (width + 1) // 2
        for at, place in zip(mine_M.tolist(), places_M.tolist(), strict=True):
            assert (at // width, at % width) == (place // part, place % part + rank * part)
    assert sorted(found) == positions_N.tolist()
