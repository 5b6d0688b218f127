"""Attention over prefix trees: each token sees those on its way from the root, and no others.

A tree's nodes are laid out by a depth-first walk. `subtree_last_1T` holds for each node the last one of
its subtree: node j is seen by node i if ``j <= i <= subtree_last_1T[0, j]``. What a block of neighbouring
nodes sees of the nodes before it is then the way to its first one, and nothing else.

On GPUs, FlexAttention takes such a mask by blocks. PyTorch's own attention would need it dense, and would
compute all of its pairs; so it is called block by block here, with the keys that each one sees. Neither
ever holds as many entries as there are pairs of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

ATTENTION = "treetune_tree"
"""The name under which transformers finds the attention of this file."""

BLOCK = 128
"""Tokens on a side of what FlexAttention takes or leaves whole, and queries that are run at once."""


def attach_tree_attention(model: nn.Module) -> None:
    """Makes the model take prefix trees. Raises ValueError where it can't be told which tokens see which."""
    from transformers import AttentionInterface

    config: Any = model.config
    attention = config._attn_implementation
    if attention not in ("sdpa", "flex_attention"):
        raise ValueError(
            f"trainer.layout 'tree' needs an attention that takes any mask, and {attention!r} doesn't: set"
            " model.attention to 'flex_attention' (on a GPU) or 'sdpa', or trainer.layout to 'packed'"
        )
    text = config.get_text_config()
    others = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if getattr(text, "layer_types", None) is None and getattr(text, "sliding_window", None):
        others = {"sliding_attention"}
    if others:
        raise ValueError(
            f"trainer.layout 'tree' needs full attention in every layer, and {type(model).__name__} has"
            f" {', '.join(sorted(others))}: set it to 'padded' or 'packed'"
        )
    if attention == "sdpa":
        AttentionInterface.register(ATTENTION, _attention)
        model.set_attn_implementation(ATTENTION)


def tree_arguments(backbone: nn.Module, subtree_last_1T: Tensor | None) -> dict[str, Any]:
    """What the backbone is called with beside tokens and positions; `subtree_last_1T` None: rows as ever."""
    config: Any = backbone.config
    attention = config._attn_implementation
    if attention == ATTENTION:
        return {"tree": NO_TREE if subtree_last_1T is None else query_blocks(subtree_last_1T[0])}
    # From a mask of four dimensions transformers makes no other, and looks for no packed sequences.
    return {} if subtree_last_1T is None else {"attention_mask": block_mask(subtree_last_1T[0])}


@dataclass(frozen=True)
class QueryBlocks:
    """A tree's nodes in blocks of neighbours: those that any of a block's nodes sees, block after block,
    how many these are, and which of its nodes sees which of them. No blocks: a row that is no tree."""

    keys_M: Tensor | None
    counts: list[int]
    masks: list[Tensor]
    """Of each block, [Q, K]."""


NO_TREE = QueryBlocks(None, [], [])


def query_blocks(subtree_last_T: Tensor) -> QueryBlocks:
    keys, masks = [], []
    for own_Q in torch.arange(len(subtree_last_T), device=subtree_last_T.device).split(BLOCK):
        start = int(own_Q[0])
        way_K = (subtree_last_T[:start] >= start).nonzero().squeeze(-1)
        keys_K = torch.cat([way_K, own_Q])
        keys.append(keys_K)
        masks.append((keys_K <= own_Q[:, None]) & (own_Q[:, None] <= subtree_last_T[keys_K]))
    return QueryBlocks(torch.cat(keys), [len(keys_K) for keys_K in keys], masks)


def _attention(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: QueryBlocks | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """PyTorch's attention block by block; see transformers' ``AttentionInterface``. Returns [1, T, H, D]."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if tree is None:
        raise ValueError(
            f"{type(module).__name__} doesn't hand on to its attention what its model was called with, which"
            " prefix trees need: set trainer.layout to 'padded' or 'packed'"
        )
    inner = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if tree.keys_M is None:
        return inner(module, query_1HTD, key_1HTD, value_1HTD, attention_mask, **settings)
    # Gathered at once and then split: a gradient of the whole length for each block would be quadratic.
    blocks = zip(
        query_1HTD.split(BLOCK, dim=2),
        key_1HTD.index_select(2, tree.keys_M).split(tree.counts, dim=2),
        value_1HTD.index_select(2, tree.keys_M).split(tree.counts, dim=2),
        tree.masks,
        strict=True,
    )
    parts = [
        inner(module, query, key, value, mask_QK[None, None], **settings)[0]
        for query, key, value, mask_QK in blocks
    ]
    return torch.cat(parts, dim=1), None


def block_mask(subtree_last_T: Tensor) -> BlockMask:
    """For FlexAttention. Which blocks are seen, in part or whole, follows from the least and the greatest
    of their nodes' lasts.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i <= subtree_last_T[j])

    width = len(subtree_last_T)
    # What stands beyond the end is seen by nothing.
    blocks_KS = nn.functional.pad(subtree_last_T, (0, -width % BLOCK), value=-1).unflatten(0, (-1, BLOCK))
    begins_Q = torch.arange(len(blocks_KS), device=subtree_last_T.device) * BLOCK
    before_QK = begins_Q[:, None] > begins_Q
    whole_QK = before_QK & (begins_Q[:, None] + BLOCK - 1 <= blocks_KS.amin(-1))
    seen_QK = before_QK & (begins_Q[:, None] <= blocks_KS.amax(-1))
    seen_QK.fill_diagonal_(True)
    return BlockMask.from_kv_blocks(
        *_listed(seen_QK & ~whole_QK),
        *_listed(whole_QK),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(width, width),
    )


def _listed(chosen_QK: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are chosen, [1, 1, Q], and which, before all others, [1, 1, Q, K]."""
    order_QK = chosen_QK.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_QK.sum(-1, dtype=torch.int32)[None, None], order_QK.int()[None, None]
