"""Promises of attention over packed rows, over prefix trees, and divided among ranks:

* log-probs and gradients equal those of attention with a dense mask, and no dense mask is made;
* the blocks of a tree's mask hold exactly what the dense mask holds;
* the log-probs at a node of a tree are those of the path to the node alone;
* models and settings that can't be computed so are refused with the remedy;
* every position belongs to exactly one rank.
"""

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

from tests.support.chat_models import random_model
from tests.support.tiny_trainer import dense_mask, one_rank, tiny_model
from treetune.models import attention
from treetune.models.attention import (
    BLOCK_TOKENS,
    PACKED_ATTENTION,
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


def logprobs_and_gradients(model: nn.Module, inputs: ModelInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute log-probs, and the gradients of their weighted sum."""
    logprobs_N, *_ = PolicyModule(model)(inputs, 1.0)
    (logprobs_N * torch.arange(1, len(logprobs_N) + 1)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logprobs_N.detach(), gradients


def attach(model: nn.Module) -> nn.Module:
    attach_packed_attention(model)
    return model


def are_close(result: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> bool:
    logprobs_N, gradients = result
    expected_logprobs_N, expected_gradients = expected
    if not torch.allclose(logprobs_N, expected_logprobs_N, atol=1e-5):
        return False
    return all(torch.allclose(gradients[name], expected_gradients[name], atol=2e-4) for name in gradients)


def reference_kernel(calls: list[dict[str, Any]]) -> Any:
    """Make a stand-in with the signature of PyTorch's kernel that computes the same on any machine."""
    signature = inspect.signature(varlen_attn)

    def stand_in(*arguments: Any, **named: Any) -> Tensor:
        call = signature.bind(*arguments, **named)
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
    with_mask = logprobs_and_gradients(tiny_model(kv_heads=kv_heads), inputs())
    assert are_close(logprobs_and_gradients(attach(tiny_model(kv_heads=kv_heads)), inputs()), with_mask)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_kernel_of_a_gpu_gets_arguments_for_the_same_result(
    kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(attention, "has_kernel", lambda query: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", reference_kernel(calls))
    with_mask = logprobs_and_gradients(tiny_model(kv_heads=kv_heads), packed_inputs())
    assert are_close(
        logprobs_and_gradients(attach(tiny_model(kv_heads=kv_heads)), packed_inputs()), with_mask
    )
    assert len(calls) == 2, "one of each layer"
    assert calls[0]["enable_gqa"] is (kv_heads == 1)


def test_pytorchs_kernel_takes_the_shapes_and_types_that_it_is_given() -> None:
    """The check is the kernel's rule for tensors without memory."""
    row = PackedRow.of(torch.cat([torch.arange(length) for length in LENGTHS])[None])
    assert row.lengths == LENGTHS
    tokens = sum(LENGTHS)
    query = torch.empty(tokens, 4, 64, dtype=torch.bfloat16, device="meta")
    key = torch.empty(tokens, 2, 64, dtype=torch.bfloat16, device="meta")
    on_meta = replace(row, boundaries=row.boundaries.to("meta"))
    result = attention.run_variable_length_kernel(query, key, key, on_meta, 0.125)
    assert (result.shape, result.dtype) == (query.shape, query.dtype)


def test_no_mask_is_made() -> None:
    model, masks = attach(tiny_model()), []

    def record_mask(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Any:
        masks.append(mask)
        return attention.packed_attention(module, query, key, value, mask, **options)

    AttentionInterface.register(PACKED_ATTENTION, record_mask)
    logprobs_and_gradients(model, packed_inputs())
    assert masks == [None, None]


def test_a_model_that_hands_on_no_positions_and_sliding_windows_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="packed rows need them: set"):
        attach(tiny_model())(input_ids=torch.zeros(1, 3, dtype=torch.long))
    model = tiny_model()
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="sliding_attention: set"):
        attach_packed_attention(model)


@pytest.mark.parametrize(
    ("device", "layout", "implementation"),
    [("cuda", "packed", PACKED_ATTENTION), ("cuda", "padded", "sdpa"), ("cpu", "packed", "sdpa")],
)
def test_packing_on_a_gpu_uses_packed_attention_by_default(
    device: str, layout: Any, implementation: str
) -> None:
    settings = Trainer(objective=ClippedPolicyGradient(), learning_rate=1e-3, layout=layout)
    ranks = replace(one_rank(), device=torch.device(device))
    model = ModelFactory(settings, tiny_model, ranks, 0).attach_attention(tiny_model())
    assert model.config._attn_implementation == implementation


def random_subtree_lasts(width: int, seed: int) -> torch.Tensor:
    """Grow a random forest with branches of all lengths, and return the last node of each node's subtree."""
    rng = random.Random(seed)
    rows: list[list[int]] = [[]]
    while True:
        earlier = rng.choice(rows)
        row = earlier[: rng.randint(0, len(earlier))]
        row = row + [rng.randrange(3) for _ in range(rng.randint(1, 200))]
        tree = PrefixTree.of([np.array(tokens, np.int64) for tokens in [*rows, row]])
        if len(tree.subtree_last_T) >= width:
            return torch.from_numpy(tree.subtree_last_T[:width]).clamp(max=width - 1)
        rows.append(row)


@pytest.mark.parametrize("width", [5, BLOCK_TOKENS, 3 * BLOCK_TOKENS, 5 * BLOCK_TOKENS + 37])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_hold_what_the_dense_mask_holds(width, seed):
    subtree_last_T = random_subtree_lasts(width, seed)
    dense = dense_mask(subtree_last_T)
    mask = block_mask(subtree_last_T)
    assert mask.shape == (1, 1, width, width)
    assert torch.equal(create_mask(mask.mask_mod, 1, 1, width, width, device="cpu")[0, 0], dense)
    padded = torch.nn.functional.pad(dense, (0, -width % BLOCK_TOKENS, 0, -width % BLOCK_TOKENS))
    blocks = (
        padded.unflatten(1, (-1, BLOCK_TOKENS)).unflatten(0, (-1, BLOCK_TOKENS)).transpose(1, 2).flatten(2)
    )
    full_blocks = chosen_blocks(mask.full_kv_num_blocks, mask.full_kv_indices)
    partial_blocks = chosen_blocks(mask.kv_num_blocks, mask.kv_indices)
    assert torch.equal(full_blocks | partial_blocks, blocks.any(-1))
    assert not (full_blocks & partial_blocks).any()
    assert not (full_blocks & ~blocks.all(-1)).any()
    without_last = slice(0, width // BLOCK_TOKENS)  # a full block at the end may count as a partial one
    assert torch.equal(full_blocks[without_last, without_last], blocks.all(-1)[without_last, without_last])


ENDS_WITH_A_BLOCK = torch.tensor([BLOCK_TOKENS] * (BLOCK_TOKENS + 1) + [BLOCK_TOKENS + 20] * 20)
"""One path ends at the first node of the second block."""


@pytest.mark.parametrize("width", [5, BLOCK_TOKENS, 5 * BLOCK_TOKENS + 37, len(ENDS_WITH_A_BLOCK)])
def test_the_queries_of_a_block_get_exactly_the_keys_that_they_see(width):
    subtree_last_T = ENDS_WITH_A_BLOCK if width == len(ENDS_WITH_A_BLOCK) else random_subtree_lasts(width, 0)
    visible = torch.zeros(width, width, dtype=torch.bool)
    blocks = query_blocks(subtree_last_T)
    queries_of_blocks = torch.arange(width).split(BLOCK_TOKENS)
    for queries_Q, keys_K, mask_QK in zip(
        queries_of_blocks, blocks.keys_M.split(blocks.key_counts), blocks.masks, strict=True
    ):
        visible[queries_Q[:, None], keys_K] = mask_QK
        assert mask_QK.any(0).all(), "a query sees each key"
    assert torch.equal(visible, dense_mask(subtree_last_T))


def chosen_blocks(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    chosen = torch.zeros(indices.shape, dtype=torch.bool)
    for index in np.ndindex(*counts.shape):
        chosen[(*index, indices[index][: counts[index]].long())] = True
    return chosen[0, 0]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_by_blocks_equals_the_dense_one():
    subtree_last_T = random_subtree_lasts(2 * BLOCK_TOKENS + 11, 0)
    query, key, value = torch.randn(
        3, 1, 2, len(subtree_last_T), 16, generator=torch.Generator().manual_seed(0)
    )
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value, dense_mask(subtree_last_T))
    by_blocks = flex_attention(query, key, value, block_mask=block_mask(subtree_last_T))
    torch.testing.assert_close(by_blocks, dense, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("load", [tiny_model, lambda: random_model("qwen3", 24)], ids=["llama", "qwen3"])
def test_logprobs_and_values_at_a_node_are_those_of_the_path_to_it(load):
    """The tree has more nodes than a block, and a model that takes trees still computes a single row."""
    rng = random.Random(0)
    start = [rng.randrange(24) for _ in range(100)]
    rows = [start[: 20 * i] + [rng.randrange(24) for _ in range(30)] for i in range(6)]
    tree = PrefixTree.of([np.array(row) for row in rows])
    ids, depths, subtree_last_1T = (
        torch.from_numpy(a)[None] for a in (tree.token_ids_T, tree.depths_T, tree.subtree_last_T)
    )
    assert ids.shape[1] > BLOCK_TOKENS
    policy, critic = PolicyModule(load()), CriticModule(load(), seed=0)
    models = load(), load()
    for model in models:
        attach_tree_attention(model)
    tree_policy, tree_critic = PolicyModule(models[0]), CriticModule(models[1], seed=0)
    for row, path in zip(rows, tree.paths, strict=True):
        labels = torch.zeros(len(row), dtype=torch.long)
        positions = torch.from_numpy(path)
        alone = ModelInputs(torch.tensor([row]), torch.arange(len(row)), labels)
        in_tree = ModelInputs(ids, positions, labels, depths, subtree_last_1T)
        expected = policy(alone, 1.0)[0]
        at_nodes = tree_policy(in_tree, 1.0)[0]
        torch.testing.assert_close(at_nodes, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(tree_policy(alone, 1.0)[0], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(tree_critic(in_tree), critic(alone), atol=1e-5, rtol=1e-5)


def test_a_model_that_does_not_hand_arguments_to_its_layers_is_refused():
    model = tiny_model()
    attach_tree_attention(model)
    with pytest.raises(ValueError, match="prefix trees need them: set"):
        model(torch.tensor([[1, 2]]))


def test_models_that_take_no_such_mask_are_refused_with_the_remedy():
    model = tiny_model()
    for implementation in ("flash_attention_2", "eager"):
        model.config._attn_implementation_internal = implementation
        with pytest.raises(
            ValueError, match=f"'{implementation}' doesn't: set model.attention to 'flex_attention'"
        ):
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
        model.check_at_start()


def parallel(size: int, rank: int = 0) -> SequenceParallel:
    return SequenceParallel(group=None, rank=rank, size=size)


@pytest.mark.parametrize(
    ("size", "attention", "layers", "message"),
    [
        (3, "sdpa", None, "doesn't divide the 2 attention heads"),
        (2, "sdpa", ["full_attention", "sliding_attention"], "needs full attention in every layer"),
        (2, "eager", None, "'sdpa' and 'flash_attention_2'"),
    ],
)
def test_attention_that_ranks_cannot_share_is_refused(
    size: int, attention: str, layers: list[str] | None, message: str
) -> None:
    model = tiny_model()
    model.set_attn_implementation(attention)
    model.config.layer_types = layers
    with pytest.raises(ValueError, match=message):
        parallel(size).attach(model)


def test_heads_of_keys_that_ranks_cannot_share_are_refused() -> None:
    model = tiny_model()
    model.config.num_attention_heads, model.config.num_key_value_heads = 6, 3
    with pytest.raises(ValueError, match=r"the 6 attention heads \(of 3 keys and values\)"):
        parallel(2).attach(model)


def test_the_configuration_in_the_files_does_not_name_the_division_among_ranks() -> None:
    model = tiny_model()
    parallel(2).attach(model)
    assert "ulysses" not in str(model.config.to_dict())


@pytest.mark.parametrize("width", [6, 7])
def test_every_position_belongs_to_exactly_one_rank(width: int) -> None:
    positions_N = torch.arange(3 * width)
    of_all_ranks = []
    columns_per_rank = (width + 1) // 2
    for rank in range(2):
        own_M, local_M = parallel(2, rank).own_positions(positions_N, width)
        of_all_ranks += own_M.tolist()
        for position, local in zip(own_M.tolist(), local_M.tolist(), strict=True):
            row, column = divmod(local, columns_per_rank)
            assert divmod(position, width) == (row, column + rank * columns_per_rank)
    assert sorted(of_all_ranks) == positions_N.tolist()
