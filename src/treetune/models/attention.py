"""Computes attention over packed rows and over prefix trees, in which a token sees only its own sequence, or
only its path from the root.

*Packed rows.* For sequences packed into one row, transformers gives PyTorch's own attention a mask with an
entry for each pair of tokens, which is a billion entries for a row of 32k tokens. Here the attention gets the
boundaries of the sequences instead. PyTorch's variable-length kernels take them on a GPU; elsewhere each
sequence is computed by itself.

*Prefix trees.* The nodes are numbered by a depth-first walk (`prefix_tree`). Node i sees node j if
``j <= i <= subtree_last_1T[0, j]``. A block of neighbouring nodes sees its own nodes and, among the nodes
before the block, only the path to its first node. On GPUs, FlexAttention takes this mask by blocks. PyTorch's
own attention would need a dense mask and would compute all pairs, so it is called once for each block, with
the keys that the block sees.

For the tree of the rows ``5 6 7`` and ``5 6 8 9`` (x: node i sees node j)::

              j  0 1 2 3 4        token   5 6 7 8 9
        i = 0    x                subtree_last_1T  4 4 2 4 4
            1    x x
            2    x x x
            3    x x   x
            4    x x   x x

Both ways, no tensor has an entry for each pair of tokens of a long row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

PACKED_ATTENTION, TREE_ATTENTION = "treetune_packed", "treetune_tree"
"""The names under which transformers finds the attentions of this file."""

BLOCK_TOKENS = 128
"""The number of tokens on each side of FlexAttention's blocks, and the number of queries that PyTorch's own
attention gets at once."""


@dataclass(frozen=True)
class PackedRow:
    """The boundaries of the sequences in a packed row.

    Example: sequences of 3 and 4 tokens are ``PackedRow(boundaries=[0, 3, 7], lengths=(3, 4))``.
    """

    boundaries: Tensor | None
    """The starts of the sequences and the length of the row, int32 [S + 1]; None if nothing is packed."""
    lengths: tuple[int, ...] = ()
    """The number of tokens of each sequence."""

    @staticmethod
    def of(position_ids_1T: Tensor | None) -> PackedRow:
        """Finds the boundaries from the position ids of a row, which begin with 0 at every sequence. None
        stands for rows that aren't packed."""
        if position_ids_1T is None:
            return PackedRow(None)
        row_T = position_ids_1T.flatten()
        starts_S = (row_T == 0).nonzero().flatten()
        boundaries = torch.cat([starts_S, starts_S.new_tensor([len(row_T)])]).int()
        return PackedRow(boundaries, tuple(boundaries.diff().tolist()))


@dataclass(frozen=True)
class QueryBlocks:
    """The nodes of a tree in blocks of Q neighbours, with the K nodes that a block sees."""

    keys_M: Tensor | None
    """The seen nodes of all blocks, block after block; None if the row is not a tree."""
    key_counts: list[int]
    """The number of seen nodes of each block."""
    masks: list[Tensor]
    """For each block a mask, bool [Q, K]: whether the block's node q sees the seen node k."""


def attach_packed_attention(model: nn.Module) -> None:
    """Replaces PyTorch's attention in a model by one that takes packed rows without a mask.

    Raises:
        ValueError: Some layers don't have full attention. In such a layer a token may not see all earlier
            tokens, as it would here.
    """
    from transformers import AttentionInterface

    if other_kinds := layers_without_full_attention(model):
        raise ValueError(
            f"trainer.layout 'packed' with model.attention 'sdpa' needs full attention in every layer, and"
            f" {type(model).__name__} has {', '.join(sorted(other_kinds))}: set model.attention to"
            " 'flash_attention_2', or trainer.layout to 'padded'"
        )
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    model.set_attn_implementation(PACKED_ATTENTION)


def attach_tree_attention(model: nn.Module) -> None:
    """Prepares a model's attention for prefix trees. FlexAttention needs nothing but a mask; PyTorch's own
    attention is replaced.

    Raises:
        ValueError: The model has another kind of attention, or layers without full attention.
    """
    from transformers import AttentionInterface

    config: Any = model.config
    attention = config._attn_implementation
    if attention not in ("sdpa", "flex_attention"):
        raise ValueError(
            f"trainer.layout 'tree' needs an attention that takes any mask, and {attention!r} doesn't: set"
            " model.attention to 'flex_attention' (on a GPU) or 'sdpa', or trainer.layout to 'packed'"
        )
    if other_kinds := layers_without_full_attention(model):
        raise ValueError(
            f"trainer.layout 'tree' needs full attention in every layer, and {type(model).__name__} has"
            f" {', '.join(sorted(other_kinds))}: set it to 'padded' or 'packed'"
        )
    if attention == "sdpa":
        AttentionInterface.register(TREE_ATTENTION, tree_attention)
        model.set_attn_implementation(TREE_ATTENTION)


def layers_without_full_attention(model: nn.Module) -> set[str]:
    """Returns the kinds of attention in the model's layers that are not full causal attention."""
    config: Any = model.config
    text_config = config.get_text_config()
    kinds = getattr(text_config, "layer_types", None)
    if kinds is None:  # all layers have the same kind
        return {"sliding_attention"} if getattr(text_config, "sliding_window", None) else set()
    return set(kinds) - {"full_attention"}


def attention_arguments(
    backbone: nn.Module, position_ids_BT: Tensor | None, subtree_last_1T: Tensor | None
) -> dict[str, Any]:
    """Returns further arguments for a call of the backbone, besides tokens and positions. The backbone must
    pass them on to its attention.

    Args:
        subtree_last_1T: For each node of a prefix tree, which is one row, the last node of its subtree; None
            if the rows are not a tree.
    """
    config: Any = backbone.config
    attention = config._attn_implementation
    if attention == PACKED_ATTENTION:
        return {"packed": PackedRow.of(position_ids_BT)}
    if attention == TREE_ATTENTION:
        if subtree_last_1T is None:
            # The argument is empty, but it is there: if it were missing, `tree_attention` would report that
            # the model doesn't hand it on.
            return {"tree": QueryBlocks(None, [], [])}
        return {"tree": query_blocks(subtree_last_1T[0])}
    # transformers takes a mask of four dimensions as it is, and doesn't look for packed sequences.
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
    """Computes causal attention within each sequence, [B, T, H, D]; see transformers'
    ``AttentionInterface``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if packed is None:
        raise ValueError(
            f"{type(module).__name__} doesn't pass the arguments of the model's call on to its attention, but"
            " packed rows need them: set trainer.layout to 'padded', or model.attention to"
            " 'flash_attention_2'"
        )
    assert attention_mask is None, "transformers makes none for an attention that it doesn't know"
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if packed.boundaries is None:  # each row is a single sequence, for which sdpa is causal without a mask
        return sdpa(module, query_BHTD, key_BHTD, value_BHTD, None, scaling=scaling, **settings)
    if has_kernel(query_BHTD):
        # The kernel takes a single row, with its tokens in the first dimension: [T, H, D].
        query, key, value = (
            tensor_1HTD.squeeze(0).transpose(0, 1) for tensor_1HTD in (query_BHTD, key_BHTD, value_BHTD)
        )
        return run_variable_length_kernel(query, key, value, packed, scaling)[None], None
    # Attention is computed for each sequence by itself, so that no scores between sequences are computed.
    lengths = list(packed.lengths)
    queries = query_BHTD.split(lengths, dim=2)
    keys = key_BHTD.split(lengths, dim=2)
    values = value_BHTD.split(lengths, dim=2)
    results = []
    for query, key, value in zip(queries, keys, values, strict=True):
        result, _ = sdpa(module, query, key, value, None, scaling=scaling, **settings)
        results.append(result)
    return torch.cat(results, dim=1), None


def has_kernel(query: Tensor) -> bool:
    """Returns whether PyTorch's variable-length kernels (FlashAttention) can run on this tensor: on NVIDIA
    GPUs since Ampere, in half precision."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(query.device)[0] >= 8
    )


def run_variable_length_kernel(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, packed: PackedRow, scaling: float | None
) -> Tensor:
    """Runs PyTorch's variable-length kernel, and returns [T, H, D]. Queries have H heads; keys and values
    have K heads."""
    from torch.nn.attention.varlen import varlen_attn

    boundaries, longest = packed.boundaries, max(packed.lengths)
    assert boundaries is not None, "rows of one sequence each need no such kernel"
    result = varlen_attn(
        query_THD,
        key_TKD,
        value_TKD,
        # The sequences of queries are those of keys.
        cu_seq_q=boundaries,
        cu_seq_k=boundaries,
        max_q=longest,
        max_k=longest,
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
    """Computes PyTorch's attention block by block, and returns [1, T, H, D].

    The arguments except `tree` are those of transformers' ``AttentionInterface``.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if tree is None:
        raise ValueError(
            f"{type(module).__name__} doesn't pass the arguments of the model's call on to its attention, but"
            " prefix trees need them: set trainer.layout to 'padded' or 'packed'"
        )
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if tree.keys_M is None:  # the rows are not a tree, as in `PolicyModule._whole_forward`
        return sdpa(module, query_1HTD, key_1HTD, value_1HTD, attention_mask, **settings)
    # The keys of all blocks are selected at once and then split. Selecting them block by block would give
    # each block a gradient as long as the row.
    queries = query_1HTD.split(BLOCK_TOKENS, dim=2)
    keys = key_1HTD.index_select(2, tree.keys_M).split(tree.key_counts, dim=2)
    values = value_1HTD.index_select(2, tree.keys_M).split(tree.key_counts, dim=2)
    results = []
    for query, key, value, mask_QK in zip(queries, keys, values, tree.masks, strict=True):
        result, _ = sdpa(module, query, key, value, mask_QK[None, None], **settings)
        results.append(result)
    return torch.cat(results, dim=1), None


def query_blocks(subtree_last_T: Tensor) -> QueryBlocks:
    """Cuts the nodes of a tree into blocks, and finds the nodes that each block sees.

    A node sees its ancestors and itself. A subtree is a range of numbers. So if an ancestor of some node of
    the block lies before the block, its subtree contains the block's first node, too.

    Args:
        subtree_last_T: The last node of each node's subtree. Nodes are numbered depth-first.
    """
    keys, masks = [], []
    for block_Q in torch.arange(len(subtree_last_T), device=subtree_last_T.device).split(BLOCK_TOKENS):
        start = int(block_Q[0])
        ancestors_of_start_A = (subtree_last_T[:start] >= start).nonzero().squeeze(-1)
        keys_K = torch.cat([ancestors_of_start_A, block_Q])
        keys.append(keys_K)
        # Query q is in the subtree of key k if k <= q <= the last node of the subtree.
        query_Q1 = block_Q[:, None]
        masks.append((keys_K <= query_Q1) & (query_Q1 <= subtree_last_T[keys_K]))
    return QueryBlocks(torch.cat(keys), [len(keys_K) for keys_K in keys], masks)


def block_mask(subtree_last_T: Tensor) -> BlockMask:
    """Returns FlexAttention's mask of a prefix tree.

    Query i sees key j if ``j <= i <= subtree_last_T[j]``. For a block of queries and an earlier block of
    keys, there are three cases:

    * The subtree of every key reaches the last query. Then all queries see all keys.
    * The subtree of some key reaches the first query. Then `sees` decides for each pair.
    * No subtree reaches the first query. Then the block of keys is skipped.

    Args:
        subtree_last_T: The last node of each node's subtree. Nodes are numbered depth-first.
    """
    from torch.nn.attention.flex_attention import BlockMask

    # FlexAttention calls this function with the indices of a row, a head, a query and a key.
    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i <= subtree_last_T[j])

    def list_blocks(chosen_QK: Tensor) -> tuple[Tensor, Tensor]:
        """Returns two tensors that FlexAttention wants for each block of queries: how many blocks of keys are
        chosen, [1, 1, Q], and the indices of all blocks of keys, the chosen ones first, [1, 1, Q, K]."""
        counts_Q = chosen_QK.sum(-1, dtype=torch.int32)
        chosen_first_QK = chosen_QK.int().argsort(dim=-1, descending=True, stable=True)
        return counts_Q[None, None], chosen_first_QK.int()[None, None]

    width = len(subtree_last_T)
    # The padding has the value -1: the subtree of such a node ends before the node, so no query sees it.
    padded = nn.functional.pad(subtree_last_T, (0, -width % BLOCK_TOKENS), value=-1)
    subtree_last_KS = padded.unflatten(0, (-1, BLOCK_TOKENS))
    first_key_K = torch.arange(len(subtree_last_KS), device=subtree_last_T.device) * BLOCK_TOKENS
    first_query_Q1 = first_key_K[:, None]
    last_query_Q1 = first_query_Q1 + BLOCK_TOKENS - 1
    is_earlier_QK = first_key_K < first_query_Q1
    whole_QK = is_earlier_QK & (last_query_Q1 <= subtree_last_KS.amin(-1))
    seen_QK = is_earlier_QK & (first_query_Q1 <= subtree_last_KS.amax(-1))
    seen_QK.fill_diagonal_(True)  # a block sees itself in part
    partial_counts, partial_indices = list_blocks(seen_QK & ~whole_QK)
    whole_counts, whole_indices = list_blocks(whole_QK)
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_indices,
        whole_counts,
        whole_indices,
        BLOCK_SIZE=BLOCK_TOKENS,
        mask_mod=sees,
        seq_lengths=(width, width),
    )
