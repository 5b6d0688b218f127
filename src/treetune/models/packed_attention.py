"""Attention over sequences packed into one row, each by itself: PyTorch's variable-length kernels on a GPU.

Given packed rows, transformers builds for PyTorch's own attention a mask with an entry for each pair of
tokens: a row of 32k would have a billion. Here the boundaries of the sequences go to the attention instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ATTENTION = "treetune_packed"
"""The name under which transformers finds the attention of this file."""


@dataclass(frozen=True)
class PackedRow:
    """Where the sequences of a row begin, its length last (int32, [S + 1]), and their lengths. None of them:
    rows that are one sequence each."""

    starts_S: Tensor | None
    lengths: tuple[int, ...] = ()

    @staticmethod
    def of(position_ids_1T: Tensor) -> PackedRow:
        """Of a row whose position ids begin with 0 at every sequence."""
        row_T = position_ids_1T.flatten()
        begins_S = (row_T == 0).nonzero().flatten()
        starts_S = torch.cat([begins_S, begins_S.new_tensor([len(row_T)])]).int()
        return PackedRow(starts_S, tuple(starts_S.diff().tolist()))


NOT_PACKED = PackedRow(None)


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
    AttentionInterface.register(ATTENTION, packed_attention)
    model.set_attn_implementation(ATTENTION)


def other_layers(model: nn.Module) -> set[str]:
    """The kinds of attention in the model's layers that are not full causal attention."""
    config: Any = model.config
    text = config.get_text_config()
    kinds: Iterable[str] | None = getattr(text, "layer_types", None)
    if kinds is None:
        return {"sliding_attention"} if getattr(text, "sliding_window", None) else set()
    return set(kinds) - {"full_attention"}


def packed_arguments(backbone: nn.Module, position_ids_BT: Tensor | None) -> dict[str, Any]:
    """What the backbone is called with beside tokens and positions."""
    config: Any = backbone.config
    if config._attn_implementation != ATTENTION:
        return {}
    return {"packed": NOT_PACKED if position_ids_BT is None else PackedRow.of(position_ids_BT)}


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
    """Whether PyTorch has kernels for sequences of different lengths there: FlashAttention's, on NVIDIA GPUs
    since Ampere, in half precision."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(query.device)[0] >= 8
    )


def variable_length(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, packed: PackedRow, scaling: float | None
) -> Tensor:
    """By ``torch.nn.attention.varlen``; K heads of keys, which divide H. Returns [T, H, D]."""
    from torch.nn.attention.varlen import varlen_attn

    starts_S, longest = packed.starts_S, max(packed.lengths)
    assert starts_S is not None, "rows of one sequence each need no such kernel"
    found = varlen_attn(
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
    assert isinstance(found, Tensor), "no second result was asked for"
    return found
