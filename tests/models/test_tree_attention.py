from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

from tests.trainers.helpers import tiny_model
from treetune.models.logprobs import CriticModule, PolicyModule
from treetune.models.sources import PretrainedModel
from treetune.models.tree_attention import BLOCK, block_mask, check_tree_attention, dense_mask
from treetune.trainers.prefix_tree import PrefixTree


def lasts(width: int, seed: int) -> torch.Tensor:
    """Of two trees with branches of all lengths, one filled up with padding."""
    draw = random.Random(seed)
    lasts_BT = torch.arange(width).repeat(2, 1)
    for number, limit in enumerate((width, width // 2)):
        rows: list[list[int]] = [[]]
        while True:
            earlier = draw.choice(rows)
            row = earlier[: draw.randint(0, len(earlier))] + [
                draw.randrange(3) for _ in range(draw.randint(1, 200))
            ]
            tree = PrefixTree.of([np.array(one, np.int64) for one in [*rows, row]])
            if len(tree.lasts_T) > limit:
                break
            rows.append(row)
            lasts_BT[number, : len(tree.lasts_T)] = torch.from_numpy(tree.lasts_T)
    return lasts_BT


@pytest.mark.parametrize("width", [5, BLOCK, 3 * BLOCK, 5 * BLOCK + 37])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_hold_what_the_dense_mask_holds(width, seed):
    lasts_BT = lasts(width, seed)
    dense = dense_mask(lasts_BT)[:, 0]
    mask = block_mask(lasts_BT)
    assert mask.shape == (2, 1, width, width)
    assert torch.equal(create_mask(mask.mask_mod, 2, None, width, width, device="cpu")[:, 0], dense)
    padded = torch.nn.functional.pad(dense, (0, -width % BLOCK, 0, -width % BLOCK))
    blocks = padded.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK)).transpose(2, 3).flatten(3)
    whole = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    in_part = listed(mask.kv_num_blocks, mask.kv_indices)
    # The last block of a whole row of them may count as one that is seen in part: it is looked at then.
    assert not (whole & ~blocks.all(-1)).any()
    assert torch.equal(whole | in_part, blocks.any(-1))
    assert not (whole & in_part).any()
    inside = slice(0, width // BLOCK)
    assert torch.equal(whole[:, inside, inside], blocks.all(-1)[:, inside, inside])


def listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    chosen = torch.zeros(indices.shape, dtype=torch.bool)
    for place in np.ndindex(*counts.shape):
        chosen[(*place, indices[place][: counts[place]].long())] = True
    return chosen[:, 0]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_by_blocks_equals_the_dense_one():
    lasts_BT = lasts(2 * BLOCK + 11, 0)
    query, key, value = torch.randn(
        3, 2, 2, lasts_BT.shape[1], 16, generator=torch.Generator().manual_seed(0)
    )
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value, dense_mask(lasts_BT))
    by_blocks = flex_attention(query, key, value, block_mask=block_mask(lasts_BT))
    torch.testing.assert_close(by_blocks, dense, atol=1e-5, rtol=1e-5)


def test_what_a_model_says_at_a_node_is_what_it_says_of_the_way_there():
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 7], [1, 2, 3, 4, 6, 6], [9, 9]]
    tree = PrefixTree.of([np.array(row) for row in rows])
    ids, depths, lasts_T = (
        torch.from_numpy(a)[None] for a in (tree.token_ids_T, tree.depths_T, tree.lasts_T)
    )
    policy, critic = PolicyModule(tiny_model()), CriticModule(tiny_model(), seed=0)
    for row, path in zip(rows, tree.paths, strict=True):
        labels = torch.zeros(len(row), dtype=torch.long)
        places = torch.from_numpy(path)
        alone = torch.tensor([row]), None, torch.arange(len(row))
        torch.testing.assert_close(
            policy(ids, depths, places, labels, 1.0, lasts_BT=lasts_T)[0], policy(*alone, labels, 1.0)[0]
        )
        torch.testing.assert_close(critic(ids, depths, places, lasts_T), critic(*alone))


def test_models_that_take_no_such_mask_are_refused_with_the_remedy():
    model = tiny_model()
    for attention in ("flash_attention_2", "eager"):
        model.config._attn_implementation_internal = attention
        with pytest.raises(
            ValueError, match=f"'{attention}' doesn't: set model.attention to 'flex_attention'"
        ):
            check_tree_attention(model)
    model.config._attn_implementation_internal = "sdpa"
    check_tree_attention(model)
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="has sliding_attention: set it to 'padded' or 'packed'"):
        check_tree_attention(model)
    model.config.layer_types, model.config.sliding_window = None, 16
    with pytest.raises(ValueError, match="has sliding_attention"):
        check_tree_attention(model)


def test_flex_attention_needs_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("treetune.models.kernels._GPUS", ("none",))
    (tmp_path / "config.json").write_text("{}")
    model = PretrainedModel(name_or_path=str(tmp_path), attention="flex_attention")
    with pytest.raises(ValueError, match="'flex_attention' needs an NVIDIA GPU"):
        model.check(lambda: "")
