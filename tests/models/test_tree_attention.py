from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

from tests.trainers.helpers import dense_mask, tiny_model
from treetune.models.attention import BLOCK, attach_tree_attention, block_mask, query_blocks
from treetune.models.logprobs import CriticModule, ModelInputs, PolicyModule
from treetune.models.pretrained import PretrainedModel
from treetune.prefix_tree import PrefixTree


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


@pytest.mark.parametrize("width", [5, BLOCK, 5 * BLOCK + 37])
def test_queries_are_given_the_keys_that_they_see(width):
    subtree_last_T = lasts(width, 0)
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


def qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config).float()


@pytest.mark.parametrize("load", [tiny_model, qwen3])
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
    modules = [], []
    for made in modules:
        for of in (PolicyModule, lambda model: CriticModule(model, seed=0)):
            model = load()
            if made is modules[1]:
                attach_tree_attention(model)
            made.append(of(model))
    (policy, critic), (tree_policy, tree_critic) = modules
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
    for attention in ("flash_attention_2", "eager"):
        model.config._attn_implementation_internal = attention
        with pytest.raises(
            ValueError, match=f"'{attention}' doesn't: set model.attention to 'flex_attention'"
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
    monkeypatch.setattr("treetune.models.pretrained._GPUS", ("none",))
    (tmp_path / "config.json").write_text("{}")
    model = PretrainedModel(name_or_path=str(tmp_path), attention="flex_attention")
    with pytest.raises(ValueError, match="'flex_attention' needs an NVIDIA GPU"):
        model.require()
