"""Attention over packed rows and over prefix trees, where a token sees its own sequence or path alone.

*Packed rows.* Given sequences packed into one row, transformers builds for PyTorch's own attention a mask
with an entry for each pair of tokens: a row of 32k would have a billion. Here the boundaries of the sequences
go to the attention instead: to PyTorch's variable-length kernels on a GPU, and sequence by sequence
elsewhere.

*Prefix trees.* A tree's nodes are laid out by a depth-first walk. `subtree_last_1T` holds for each node the
last one of its subtree: node j is seen by node i if ``j <= i <= subtree_last_1T[0, j]``. What a block of
neighbouring nodes sees of the nodes before it is then the path to its first one, and nothing else. On GPUs,
FlexAttention takes such a mask by blocks. PyTorch's own attention would need it dense, and would compute all
of its pairs; so it is called block by block here, with the keys that each one sees. Neither ever holds as
many entries as there are pairs of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

PACKED, TREE = "treetune_packed", "treetune_tree"
"""The names under which transformers finds the attentions of this file."""

BLOCK = 128
"""Tokens on a side of what FlexAttention takes or leaves whole, and queries that are run at once."""


@dataclass(frozen=True)
class PackedRow:
    """The starts of the sequences of a row, its length last (int32, [S + 1]), and their lengths. `starts_S`
    None: rows that are one sequence each."""

    starts_S: Tensor | None
    lengths: tuple[int, ...] = ()

    @staticmethod
    def of(position_ids_1T: Tensor | None) -> PackedRow:
        """Reads the position ids of a row, which begin with 0 at every sequence; None: nothing is packed."""
        if position_ids_1T is None:
            return PackedRow(None)
        row_T = position_ids_1T.flatten()
        begins_S = (row_T == 0).nonzero().flatten()
        starts_S = torch.cat([begins_S, begins_S.new_tensor([len(row_T)])]).int()
        return PackedRow(starts_S, tuple(starts_S.diff().tolist()))


@dataclass(frozen=True)
class QueryBlocks:
    """A tree's nodes in blocks of neighbours: those that any of a block's nodes sees, block after block,
    how many these are, and which of its nodes sees which of them. No blocks: a row that is no tree."""

    keys_M: Tensor | None
    counts: list[int]
    masks: list[Tensor]
    """A mask of shape [Q, K] for each block."""


def attach_packed_attention(model: nn.Module) -> None:
    """Makes a model with PyTorch's attention take packed rows without a mask. Raises ValueError where it
    can't be told what a token sees."""
    from transformers import AttentionInterface

    if others := other_layers(model):
        raise ValueError(
            f"trainer.layout 'packed' with model.attention 'sdpa' needs full attention in every layer, and"
            f" {type(model).__name__} has {', '.join(sorted(others))}: set model.attention to"
            " 'flash_attention_2', or trainer.layout to 'padded'"
        )
    AttentionInterface.register(PACKED, packed_attention)
    model.set_attn_implementation(PACKED)


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
    if others := other_layers(model):
        raise ValueError(
            f"trainer.layout 'tree' needs full attention in every layer, and {type(model).__name__} has"
            f" {', '.join(sorted(others))}: set it to 'padded' or 'packed'"
        )
    if attention == "sdpa":
        AttentionInterface.register(TREE, tree_attention)
        model.set_attn_implementation(TREE)


def other_layers(model: nn.Module) -> set[str]:
    """The kinds of attention in the model's layers that are not full causal attention."""
    config: Any = model.config
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return {"sliding_attention"} if getattr(text, "sliding_window", None) else set()
    return set(kinds) - {"full_attention"}


def attention_arguments(
    backbone: nn.Module, position_ids_BT: Tensor | None, subtree_last_1T: Tensor | None
) -> dict[str, Any]:
    """The arguments that the backbone's attention needs beside tokens and positions. `subtree_last_1T` is
    None where the rows are no tree."""
    config: Any = backbone.config
    attention = config._attn_implementation
    if attention == PACKED:
        return {"packed": PackedRow.of(position_ids_BT)}
    if attention == TREE:
        last = subtree_last_1T
        return {"tree": QueryBlocks(None, [], []) if last is None else query_blocks(last[0])}
    # From a mask of four dimensions transformers makes no other, and looks for no packed sequences.
    return {} if subtree_last_1T is None else {"attention_mask": block_mask(subtree_last_1T[0])}


def packed_attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedRow | None = None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence, [B, T, H, D]; see transformers' ``AttentionInterface``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if packed is None:
        raise ValueError(
            f"{type(module).__name__} doesn't hand on to its attention what its model was called with, which"
            " packed rows need: set trainer.layout to 'padded', or model.attention to 'flash_attention_2'"
        )
    assert attention_mask is None, "transformers makes none for an attention that it doesn't know"
    inner = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if packed.starts_S is None:
        return inner(module, query_BHTD, key_BHTD, value_BHTD, None, scaling=scaling, **settings)
    if has_kernel(query_BHTD):
        query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query_BHTD, key_BHTD, value_BHTD))
        return variable_length(query, key, value, packed, scaling)[None], None
    # Sequence by sequence: as many entries of scores as there are pairs, and never those between sequences.
    lengths = list(packed.lengths)
    parts = [
        inner(module, query, key, value, None, scaling=scaling, **settings)[0]
        for query, key, value in zip(
            *(x.split(lengths, dim=2) for x in (query_BHTD, key_BHTD, value_BHTD)), strict=True
        )
    ]
    return torch.cat(parts, dim=1), None


def has_kernel(query: Tensor) -> bool:
    """Returns whether PyTorch has kernels for sequences of different lengths there: FlashAttention's, on
    NVIDIA GPUs since Ampere, in half precision."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(query.device)[0] >= 8
    )


def variable_length(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, packed: PackedRow, scaling: float | None
) -> Tensor:
    """Runs ``torch.nn.attention.varlen``; K heads of keys, which divide H. Returns [T, H, D]."""
    from torch.nn.attention.varlen import varlen_attn

    starts_S, longest = packed.starts_S, max(packed.lengths)
    assert starts_S is not None, "rows of one sequence each need no such kernel"
    result = varlen_attn(
        query_THD,
        key_TKD,
        value_TKD,
        starts_S,
        starts_S,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0),  # causal
        enable_gqa=query_THD.shape[1] != key_TKD.shape[1],
    )
    assert isinstance(result, Tensor), "no second result was asked for"
    return result


def tree_attention(
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


def query_blocks(subtree_last_T: Tensor) -> QueryBlocks:
    keys, masks = [], []
    for block_Q in torch.arange(len(subtree_last_T), device=subtree_last_T.device).split(BLOCK):
        start = int(block_Q[0])
        ancestors_K = (subtree_last_T[:start] >= start).nonzero().squeeze(-1)
        keys_K = torch.cat([ancestors_K, block_Q])
        keys.append(keys_K)
        masks.append((keys_K <= block_Q[:, None]) & (block_Q[:, None] <= subtree_last_T[keys_K]))
    return QueryBlocks(torch.cat(keys), [len(keys_K) for keys_K in keys], masks)


def block_mask(subtree_last_T: Tensor) -> BlockMask:
    """The mask for FlexAttention. Which blocks are seen, in part or whole, follows from the least and the
    greatest of their nodes' lasts.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i <= subtree_last_T[j])

    def listed(chosen_QK: Tensor) -> tuple[Tensor, Tensor]:
        """Counts the chosen blocks of each row, [1, 1, Q], and lists them before all others, [1, 1, Q, K]."""
        order_QK = chosen_QK.int().argsort(dim=-1, descending=True, stable=True)
        return chosen_QK.sum(-1, dtype=torch.int32)[None, None], order_QK.int()[None, None]

    width = len(subtree_last_T)
    # What stands beyond the end is seen by nothing.
    blocks_KS = nn.functional.pad(subtree_last_T, (0, -width % BLOCK), value=-1).unflatten(0, (-1, BLOCK))
    begins_Q = torch.arange(len(blocks_KS), device=subtree_last_T.device) * BLOCK
    before_QK = begins_Q[:, None] > begins_Q
    whole_QK = before_QK & (begins_Q[:, None] + BLOCK - 1 <= blocks_KS.amin(-1))
    seen_QK = before_QK & (begins_Q[:, None] <= blocks_KS.amax(-1))
    seen_QK.fill_diagonal_(True)
    return BlockMask.from_kv_blocks(
        *listed(seen_QK & ~whole_QK),
        *listed(whole_QK),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(width, width),
    )
