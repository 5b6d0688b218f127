"""Attention over prefix trees: each token sees those on its way from the root, and no others.

A tree's nodes are laid out by a depth-first walk. `lasts_BT` holds for each node the last one of its
subtree: node j is seen by node i if ``j <= i <= lasts_BT[b, j]``. Padding sees itself alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Tokens on a side of what FlexAttention takes or leaves whole."""


def check_tree_attention(model: nn.Module) -> None:
    """Raises ValueError where the model can't be told which tokens see which."""
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


def tree_mask(module: nn.Module, lasts_BT: Tensor) -> Tensor | BlockMask:
    """The mask in the form that the module's attention takes: for FlexAttention by blocks, else dense,
    boolean, of shape [B, 1, T, T].
    """
    config: Any = module.config
    return block_mask(lasts_BT) if config._attn_implementation == "flex_attention" else dense_mask(lasts_BT)


def dense_mask(lasts_BT: Tensor) -> Tensor:
    places_T = torch.arange(lasts_BT.shape[1], device=lasts_BT.device)
    return ((places_T[:, None] <= lasts_BT[:, None, :]).tril())[:, None]


def block_mask(lasts_BT: Tensor) -> BlockMask:
    """Which blocks are seen, in part or whole, follows from the least and the greatest of their nodes'
    lasts: what is stored and computed grows with the square of the number of blocks, never of tokens.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i <= lasts_BT[b, j])

    width = lasts_BT.shape[1]
    # What stands beyond the end is seen by nothing.
    blocks_BKS = nn.functional.pad(lasts_BT, (0, -width % BLOCK), value=-1).unflatten(1, (-1, BLOCK))
    begins_Q = torch.arange(blocks_BKS.shape[1], device=lasts_BT.device) * BLOCK
    before_QK = begins_Q[:, None] > begins_Q
    least_B1K, greatest_B1K = blocks_BKS.amin(-1)[:, None], blocks_BKS.amax(-1)[:, None]
    whole_BQK = before_QK & (begins_Q[:, None] + BLOCK - 1 <= least_B1K)
    seen_BQK = (before_QK & (begins_Q[:, None] <= greatest_B1K)) | torch.eye(
        len(begins_Q), dtype=torch.bool, device=lasts_BT.device
    )
    return BlockMask.from_kv_blocks(
        *_listed(seen_BQK & ~whole_BQK),
        *_listed(whole_BQK),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(width, width),
    )


def _listed(chosen_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are chosen, [B, 1, Q], and which, before all others, [B, 1, Q, K]."""
    order_BQK = chosen_BQK.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_BQK.sum(-1, dtype=torch.int32)[:, None], order_BQK.int()[:, None]
