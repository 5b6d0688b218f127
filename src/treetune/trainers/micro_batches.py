"""What a model runs on at once: rows of a minibatch as tensors, whatever layout they are in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treetune.trainers.base import DeepSpeedTrainer
from treetune.trainers.batching import Layout, Unit, cut
from treetune.trainers.tokens import Sequences


@dataclass(frozen=True)
class MicroBatch:
    """What a model runs on at once.

    `flat_N` are the places of its trained tokens in the iteration's flat tensors. A dummy
    (`real` false) repeats rows of its rank's so that all ranks run equally often; its
    results are dropped and its loss weighs nothing.
    """

    input_ids_BT: Tensor
    position_ids_BT: Tensor | None
    positions_N: Tensor
    labels_N: Tensor
    flat_N: Tensor
    trained_tokens: tuple[int, ...]
    """How many each of its sequences has, of which it may hold a part."""
    computed_tokens: int
    """Tokens that a model runs over, padding left out."""
    real: bool = True
    most_positions: int = 0
    """The largest number of trained tokens that any rank has at this turn."""
    share: float = 1.0
    """What this rank's loss on it counts: one over the ranks that run it together; 0 of a dummy's."""


def micro_batches(
    sequences: Sequences,
    units: Sequence[Unit],
    settings: DeepSpeedTrainer,
    device: torch.device,
    *,
    rank: int = 0,
    ranks: int = 1,
    whole: bool = False,
    scale: int = 1,
) -> Iterator[MicroBatch]:
    """This rank's micro-batches of the `units`, which are of rows: as many as every other rank's.

    Where they need not be `whole`, any row may run apart from the others of its unit. `scale`
    multiplies the limit of tokens.
    """
    if not whole:
        units = [(row,) for unit in units for row in unit]
    together = settings.ranks_together
    shares = cut(
        sequences.lengths,
        units,
        ranks=ranks // together,
        tokens=settings.tokens_per_micro_batch * scale * settings.sequence_parallel_size,
        sequences=settings.sequences_per_micro_batch,
        layout=settings.layout,
    )
    for turn, piece in enumerate(shares[rank // together]):
        most = max(sum(len(sequences.rows[i].predicting) for i in share[turn].indices) for share in shares)
        yield micro_batch(sequences, piece.indices, settings.layout, piece.real, device, together, most)


def micro_batch(
    sequences: Sequences,
    indices: Sequence[int],
    layout: Layout,
    real: bool,
    device: torch.device,
    ranks: int = 1,
    most_positions: int = 0,
) -> MicroBatch:
    """The tensors of one micro-batch of these rows, which so many `ranks` run together, while others
    have others.

    ``padded``: right padding and no attention mask. Under causal attention no real token sees a
    token to its right, so the padding never matters. ``packed``: one row, with position ids that
    start again at every one of ours, from which transformers keeps them apart.
    """
    rows = [sequences.rows[i] for i in indices]
    tokens = [row.token_ids for row in rows]
    lengths = torch.tensor([len(ids) for ids in tokens])
    if layout == "padded":
        input_ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        position_ids = None
        offsets = torch.arange(len(rows)) * input_ids.shape[1]
    else:
        input_ids = torch.cat(tokens)[None]
        position_ids = torch.cat([torch.arange(len(ids)) for ids in tokens])[None]
        offsets = lengths.cumsum(0) - lengths
    positions = [row.predicting + offset for row, offset in zip(rows, offsets, strict=True)]
    of_sequences = itertools.groupby(rows, key=lambda row: row.sequence)
    return MicroBatch(
        input_ids_BT=input_ids.to(device),
        position_ids_BT=None if position_ids is None else position_ids.to(device),
        positions_N=torch.cat(positions).to(device),
        labels_N=torch.cat([row.token_ids[row.predicting + 1] for row in rows]).to(device),
        flat_N=sequences.flat_index(indices),
        trained_tokens=tuple(sum(len(row.predicting) for row in own) for _, own in of_sequences),
        computed_tokens=int(lengths.sum()),
        real=real,
        most_positions=most_positions,
        share=real / ranks,
    )
