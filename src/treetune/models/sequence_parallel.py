"""Long sequences over several ranks: DeepSpeed-Ulysses (Jacobs et al. 2023, section 3).

Each rank of a group runs the model on its own stretch of every sequence. Attention alone needs the
whole: before it, an all-to-all trades tokens for heads, so that each rank attends over all tokens
with a share of the heads, and a second one trades back. Everything else stays where it is, and so do
the activations: a group of P ranks holds sequences P times as long.

Written here and not taken from DeepSpeed, whose wrapper of transformers' attention asks for one
micro-batch size, drops the mask that keeps packed sequences apart (unless FlashAttention does), and
takes the place of the wrapped attention for every model in the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from treetune.models.attention import PACKED, PackedRow

ATTENTION = "treetune_ulysses"
"""The name under which transformers finds the attention of this file."""


@dataclass(frozen=True)
class SequenceParallel:
    """A group of `size` ranks that share every sequence; this one is number `rank` of them.

    All of them are given the same micro-batches and make the same calls, in one order.
    """

    group: Any
    rank: int
    size: int

    def attach(self, model: nn.Module) -> None:
        """Makes the model attend over the group. From here on it only runs through `hidden`.

        Raises ValueError where the model's attention can't be shared out.
        """
        from transformers import AttentionInterface

        config: Any = model.config
        text = config.get_text_config()
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        if heads % self.size or (kv_heads % self.size and self.size % kv_heads):
            raise ValueError(
                f"trainer.sequence_parallel_size {self.size} doesn't divide the {heads} attention heads (of"
                f" {kv_heads} keys and values) of {type(model).__name__}: take a divisor of both"
            )
        others = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
        if others:
            raise ValueError(
                f"trainer.sequence_parallel_size needs full attention in every layer, and"
                f" {type(model).__name__} has {', '.join(sorted(others))}: set it to 1"
            )
        inner = config._attn_implementation
        if inner not in ("sdpa", "flash_attention_2", PACKED):
            raise ValueError(
                f"trainer.sequence_parallel_size works with model.attention 'sdpa' and 'flash_attention_2',"
                f" and this model has {inner!r}"
            )
        AttentionInterface.register(ATTENTION, _attention)
        model.set_attn_implementation(ATTENTION)
        model.base_model.treetune_inner_attention = inner
        for layer in model.modules():
            if hasattr(layer, "num_key_value_groups"):  # what is left of the heads here, and of their keys
                layer.num_key_value_groups = (heads // self.size) // max(1, kv_heads // self.size)

    def hidden(self, backbone: nn.Module, ids_BT: Tensor, positions_BT: Tensor | None) -> Tensor:
        """The last hidden states of this rank's stretch of every row, shape [B, t, D].

        Rows are padded to a multiple of `size`; t is the `size`-th part of that.
        """
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        missing = -ids_BT.shape[1] % self.size
        packed = positions_BT is not None
        if positions_BT is None:
            positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        # The padding is to the right of what counts; where rows are packed it is a sequence of its own.
        tail_T = torch.arange(missing, device=ids_BT.device) + (0 if packed else ids_BT.shape[1])
        positions_BT = torch.cat([positions_BT, tail_T.expand(len(ids_BT), -1)], dim=1)
        ids_BT = nn.functional.pad(ids_BT, (0, missing))
        inner: str = backbone.treetune_inner_attention
        mask_B1TT = None
        if packed and inner == "sdpa":
            # True where a token may look: back, in its own sequence.
            sequence_BT = (positions_BT == 0).cumsum(-1)
            mask_B1TT = (sequence_BT[:, :, None] == sequence_BT[:, None, :]).tril()[:, None]
        attend = partial(
            ALL_ATTENTION_FUNCTIONS[inner],
            attention_mask=mask_B1TT,
            position_ids=positions_BT,
            **({"packed": PackedRow.of(positions_BT if packed else None)} if inner == PACKED else {}),
        )
        stretch = ids_BT.shape[1] // self.size
        mine = slice(self.rank * stretch, (self.rank + 1) * stretch)
        return backbone(
            input_ids=ids_BT[:, mine],
            position_ids=positions_BT[:, mine],
            use_cache=False,
            shared=(self, attend),  # handed on to `_attention` in every layer
        ).last_hidden_state

    def own_positions(self, positions_N: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Finds the positions (in flattened rows of `width` tokens) that lie in this rank's stretch: their
        indices in `positions_N`, and their places in its flattened hidden states.
        """
        part = -(-width // self.size)
        row_N, column_N = positions_N // width, positions_N % width
        mine_M = (column_N // part == self.rank).nonzero().squeeze(-1)
        return mine_M, (row_N * part + column_N % part)[mine_M]

    def gather(self, values_KM: Tensor, mine_M: Tensor, count: int) -> Tensor:
        """Everyone's values at their places among `count`, known to all; shape [K, count].

        A gradient goes back to the rank that made the value: the sum of what all ranks say of it.
        """
        values_KN = values_KM.new_zeros(len(values_KM), count).index_copy(1, mine_M, values_KM)
        return _Sum.apply(values_KN, self.group)


def _attention(
    module: nn.Module,
    query_BHtD: Tensor,
    key_BHtD: Tensor,
    value_BHtD: Tensor,
    attention_mask: Tensor | None,
    *,
    shared: tuple[SequenceParallel, Callable[..., tuple[Tensor, Any]]] | None = None,
    position_ids: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention of all tokens with this rank's heads, between two exchanges; see transformers'
    ``AttentionInterface``. Returns [B, t, H, D].
    """
    if shared is None:
        raise ValueError(
            f"{type(module).__name__} doesn't hand on to its attention what its model was called with, which"
            " sequence parallelism needs: set trainer.sequence_parallel_size to 1"
        )
    parallel, attend = shared
    size, group = parallel.size, parallel.group
    parts = []
    for heads_BHtD in (query_BHtD, key_BHtD, value_BHtD):
        # Fewer heads of keys than ranks: each is given to several.
        copies = max(size // heads_BHtD.shape[1], 1)
        parts.append(heads_BHtD.repeat_interleave(copies, dim=1).unflatten(1, (size, -1)).transpose(0, 1))
    counts = [part.shape[2] for part in parts]
    traded_PBhtD = _AllToAll.apply(torch.cat(parts, dim=2), group)
    whole_BhTD = traded_PBhtD.permute(1, 2, 0, 3, 4).flatten(2, 3)
    query, key, value = whole_BhTD.split(counts, dim=1)
    result_BThD, _ = attend(module, query, key, value, **settings)
    pieces_PBthD = result_BThD.unflatten(1, (size, -1)).transpose(0, 1)
    back_PBthD = _AllToAll.apply(pieces_PBthD, group)
    return back_PBthD.permute(1, 2, 0, 3, 4).flatten(2, 3), None


class _AllToAll(torch.autograd.Function):
    """Sends part i of the first dimension to rank i, and puts rank i's part into its place."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _AllToAll.forward(ctx, gradients[0], ctx.group), None  # gradients go back as they came


class _Sum(torch.autograd.Function):
    """The sum over the group, on every rank of it; each rank's loss has a share of the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Sum.forward(ctx, gradients[0], ctx.group), None
