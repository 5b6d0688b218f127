"""Log-probs and values of many sequences by models that are not being trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treetune.trainers.base import DeepSpeedTrainer
from treetune.trainers.batching import Unit, cut
from treetune.trainers.tokens import MicroBatch, Sequences, micro_batch

if TYPE_CHECKING:
    from treetune.models.logprobs import CriticModule, PolicyModule
    from treetune.vocabulary import TokenIds

SEQUENCES_AT_ONCE = 64


def batches(
    sequences: Sequences, units: Sequence[Unit], settings: DeepSpeedTrainer, device: torch.device
) -> list[MicroBatch]:
    """Micro-batches of some sequences, cut as in training on one rank."""
    (pieces,) = cut(
        sequences.lengths,
        units,
        ranks=1,
        tokens=settings.tokens_per_micro_batch,
        sequences=settings.sequences_per_micro_batch,
        layout="padded",
    )
    return [micro_batch(sequences, piece.indices, "padded", piece.real, device) for piece in pieces]


def sweep(
    sequences: Sequences,
    forward: Callable[[MicroBatch], Tensor],
    settings: DeepSpeedTrainer,
    device: torch.device,
) -> Tensor:
    """`forward` of all trained tokens, float32 of shape [N], on the CPU, without gradient."""
    results_N = torch.zeros(sequences.n_tokens)
    first = sequences.first_alike()  # an answer may stand in several pairs
    with torch.no_grad():
        for batch in batches(sequences, [(i,) for i in sorted(set(first))], settings, device):
            results_N[batch.flat_N] = forward(batch).float().cpu()
    return results_N[sequences.flat_index(first)]


def logprobs_of(policy: PolicyModule, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of a micro-batch's trained tokens, shape [N] each."""
    return policy(batch.input_ids_BT, batch.position_ids_BT, batch.positions_N, batch.labels_N, temperature)


def values_of(critic: CriticModule, batch: MicroBatch) -> Tensor:
    """Values of the states before a micro-batch's trained tokens, shape [N]."""
    return critic(batch.input_ids_BT, batch.position_ids_BT, batch.positions_N)


def state_values(critic: CriticModule, device: torch.device, states: Sequence[TokenIds]) -> list[float]:
    """The critic's value of each state, given as all tokens up to it (prompt included)."""
    order = sorted(range(len(states)), key=lambda i: len(states[i]))
    values = [0.0] * len(states)
    with torch.no_grad():
        for start in range(0, len(order), SEQUENCES_AT_ONCE):
            own = order[start : start + SEQUENCES_AT_ONCE]
            rows = [torch.tensor(states[i]) for i in own]
            # Padded on the right: under causal attention no state sees what stands behind it.
            input_ids_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            lengths_B = torch.tensor([len(row) for row in rows])
            last_B = torch.arange(len(rows)) * input_ids_BT.shape[1] + lengths_B - 1
            found_B = critic(input_ids_BT.to(device), None, last_B.to(device)).cpu()
            for i, value in zip(own, found_B.tolist(), strict=True):
                values[i] = value
    return values
