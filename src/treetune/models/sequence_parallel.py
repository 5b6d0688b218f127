"""Splits long sequences over several ranks: DeepSpeed-Ulysses (Jacobs et al. 2023, section 3).

Each rank of a group computes a part of every sequence. Only attention needs whole sequences, so an all-to-all
before it exchanges tokens for heads, and another one after it exchanges them back. For two ranks, a sequence
of 4 tokens and 2 heads::

                 embedding, MLP, norms        attention                   MLP, norms
    rank 0       tokens 0 1, heads a b   ──►  tokens 0 1 2 3, head a  ──►  tokens 0 1, heads a b
    rank 1       tokens 2 3, heads a b   ──►  tokens 0 1 2 3, head b  ──►  tokens 2 3, heads a b
                                    all-to-all                   all-to-all

Activations are split in the same way, so that a group of P ranks can train sequences P times as long.

DeepSpeed's own wrapper isn't used: it needs a single micro-batch size, drops the mask that keeps packed
sequences apart (unless FlashAttention does), and replaces the attention of every model in the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from treetune.models.attention import PACKED_ATTENTION, PackedRow

ULYSSES_ATTENTION = "treetune_ulysses"
"""The name under which transformers finds the attention of this file."""


@dataclass(frozen=True)
class SequenceParallel:
    """A group of `size` ranks that split every sequence; this rank is number `rank` of them.

    All ranks of the group get the same micro-batches and make the same calls in the same order.
    """

    group: Any
    rank: int
    size: int

    def attach(self, model: nn.Module) -> None:
        """Replaces the model's attention. From here on, the model must be run by `hidden`.

        Raises:
            ValueError: The model's heads can't be split over the group, or its attention isn't supported.
        """
        from transformers import AttentionInterface

        config: Any = model.config
        text_config = config.get_text_config()
        heads = text_config.num_attention_heads
        kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
        # Each rank gets some heads of keys. If there are fewer heads than ranks, several ranks share a head.
        can_split_kv_heads = kv_heads % self.size == 0 or self.size % kv_heads == 0
        if heads % self.size or not can_split_kv_heads:
            raise ValueError(
                f"trainer.sequence_parallel_size {self.size} doesn't divide the {heads} attention heads (of"
                f" {kv_heads} keys and values) of {type(model).__name__}: take a divisor of both"
            )
        other_kinds = set(getattr(text_config, "layer_types", None) or ()) - {"full_attention"}
        if other_kinds:
            raise ValueError(
                f"trainer.sequence_parallel_size needs full attention in every layer, and"
                f" {type(model).__name__} has {', '.join(sorted(other_kinds))}: set it to 1"
            )
        inner = config._attn_implementation
        if inner not in ("sdpa", "flash_attention_2", PACKED_ATTENTION):
            raise ValueError(
                f"trainer.sequence_parallel_size works with model.attention 'sdpa' and 'flash_attention_2',"
                f" and this model has {inner!r}"
            )
        AttentionInterface.register(ULYSSES_ATTENTION, _compute_attention)
        model.set_attn_implementation(ULYSSES_ATTENTION)
        # `hidden` passes this attention on to `_compute_attention`, which calls it.
        model.base_model.treetune_inner_attention = inner
        heads_of_rank = heads // self.size
        kv_heads_of_rank = max(1, kv_heads // self.size)
        for layer in model.modules():
            if hasattr(layer, "num_key_value_groups"):  # the number of heads of queries for each head of keys
                layer.num_key_value_groups = heads_of_rank // kv_heads_of_rank

    def hidden_states(self, backbone: nn.Module, ids_BT: Tensor, positions_BT: Tensor | None) -> Tensor:
        """Computes the last hidden states of this rank's part of every row, shape [B, t, D].

        Rows are padded to a multiple of `size`; t is the padded length divided by `size`.

        Args:
            positions_BT: The position ids of packed rows; None if each row is a single sequence.
        """
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        is_packed = positions_BT is not None
        ids_BT, positions_BT = _pad(ids_BT, positions_BT, multiple=self.size)
        inner_attention: str = backbone.treetune_inner_attention
        mask_B1TT = None
        if is_packed and inner_attention == "sdpa":
            # Other attentions find the sequences by the positions or boundaries that they get below. In the
            # mask, a token sees itself and earlier tokens of its own sequence.
            sequence_BT = (positions_BT == 0).cumsum(-1)
            mask_B1TT = (sequence_BT[:, :, None] == sequence_BT[:, None, :]).tril()[:, None]
        attend = partial(
            ALL_ATTENTION_FUNCTIONS[inner_attention], attention_mask=mask_B1TT, position_ids=positions_BT
        )
        if inner_attention == PACKED_ATTENTION:
            attend = partial(attend, packed=PackedRow.of(positions_BT if is_packed else None))
        part_length = ids_BT.shape[1] // self.size
        part = slice(self.rank * part_length, (self.rank + 1) * part_length)
        return backbone(
            input_ids=ids_BT[:, part],
            position_ids=positions_BT[:, part],
            use_cache=False,
            shared=(self, attend),  # the backbone passes it on to `_compute_attention` in every layer
        ).last_hidden_state

    def own_positions(self, positions_N: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Finds those M of N positions that lie in this rank's part of the rows.

        Args:
            positions_N: Positions in flattened rows of `width` tokens.

        Returns:
            The indices of the M positions among the N, and the M positions in this rank's flattened hidden
            states, [M] each.
        """
        part_length = -(-width // self.size)  # rounded up
        row_N, column_N = positions_N // width, positions_N % width
        index_M = (column_N // part_length == self.rank).nonzero().squeeze(-1)
        # This rank has `part_length` tokens of each row.
        position_in_part_N = row_N * part_length + column_N % part_length
        return index_M, position_in_part_N[index_M]

    def gather(self, values_KM: Tensor, index_M: Tensor, count: int) -> Tensor:
        """Returns the values of all ranks in the group, on every rank, shape [K, count].

        Every rank computes the whole loss from these values, and scales the loss by 1 / `size` (see
        ``MicroBatch.loss_scale``). So the backward pass sums the gradients of a value over all ranks. The sum
        goes on to the rank that has computed the value.

        Args:
            values_KM: This rank's values: K numbers, such as log-prob and entropy, at each of M positions.
            index_M: The indices of the M positions among all `count` positions.
        """
        # Each position belongs to a single rank, and has 0 on the others. So the sum over the ranks is the
        # value itself.
        values_KN = values_KM.new_zeros(len(values_KM), count).index_copy(1, index_M, values_KM)
        return _Sum.apply(values_KN, self.group)


def _pad(ids_BT: Tensor, positions_BT: Tensor | None, multiple: int) -> tuple[Tensor, Tensor]:
    """Pads rows to a multiple of `multiple` tokens, on the right, where no other token sees the padding.

    Returns:
        The token ids and the position ids. In packed rows, the positions of the padding begin with 0, so that
        it is a sequence of its own. In other rows, they continue those of the row.
    """
    width = ids_BT.shape[1]
    padding_T = torch.arange(-width % multiple, device=ids_BT.device)
    if positions_BT is None:
        positions_BT = torch.arange(width, device=ids_BT.device).expand_as(ids_BT)
        padding_T = padding_T + width
    positions_BT = torch.cat([positions_BT, padding_T.expand(len(ids_BT), -1)], dim=1)
    return nn.functional.pad(ids_BT, (0, len(padding_T))), positions_BT


def _compute_attention(
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
    """Computes the attention of all tokens with this rank's heads, between two exchanges.

    The first exchange gives each rank all tokens of some heads. The second one gives each rank all heads of
    its own tokens again. H are all heads, h the heads of a rank, D their size, t the tokens of this rank, T
    all tokens, P the ranks of the group.

    Args:
        shared: The group, and the attention function that the model had before `SequenceParallel.attach`.
            The other arguments are those of transformers' ``AttentionInterface``.

    Returns:
        The result for this rank's tokens, [B, t, H, D]. None stands for the attention weights.
    """
    if shared is None:
        raise ValueError(
            f"{type(module).__name__} doesn't pass the arguments of the model's call on to its attention, but"
            " sequence parallelism needs them: set trainer.sequence_parallel_size to 1"
        )
    parallel, attend = shared
    size, group = parallel.size, parallel.group
    parts = []
    for heads_BHtD in (query_BHtD, key_BHtD, value_BHtD):
        # There may be fewer heads of keys than ranks. Then each head is copied, and several ranks get it.
        copies_of_head = max(size // heads_BHtD.shape[1], 1)
        heads_BHtD = heads_BHtD.repeat_interleave(copies_of_head, dim=1)
        parts.append(heads_BHtD.unflatten(1, (size, -1)).transpose(0, 1))  # [P, B, h, t, D]
    head_counts = [part.shape[2] for part in parts]
    # Queries, keys and values in a single exchange: all heads of some tokens become some heads of all tokens.
    exchanged_PBhtD = _AllToAll.apply(torch.cat(parts, dim=2), group)
    all_tokens_BhTD = exchanged_PBhtD.permute(1, 2, 0, 3, 4).flatten(2, 3)
    query, key, value = all_tokens_BhTD.split(head_counts, dim=1)
    result_BThD, _ = attend(module, query, key, value, **settings)
    parts_PBthD = result_BThD.unflatten(1, (size, -1)).transpose(0, 1)
    exchanged_PBthD = _AllToAll.apply(parts_PBthD, group)
    return exchanged_PBthD.permute(1, 2, 0, 3, 4).flatten(2, 3), None


class _AllToAll(torch.autograd.Function):
    """Sends part i of the first dimension to rank i, and replaces it by the part that rank i has sent."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # The exchange is its own inverse.
        return _AllToAll.forward(ctx, gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    """Sums over the group, on every rank; the gradients of all ranks are summed as well."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Sum.forward(ctx, gradients[0], ctx.group), None
