"""Log-probs and values of many sequences by models that are not being trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treetune.models.inputs import ModelInputs
from treetune.trainers.base import DeepSpeedTrainer
from treetune.trainers.batching import Unit
from treetune.trainers.micro_batches import MicroBatch, micro_batches
from treetune.trainers.tokens import Sequences

if TYPE_CHECKING:
    from treetune.models.logprobs import CriticModule, PolicyModule
    from treetune.vocabulary import TokenIds

SEQUENCES_AT_ONCE = 64


def batches(
    sequences: Sequences,
    units: Sequence[Unit],
    settings: DeepSpeedTrainer,
    device: torch.device,
    whole: bool = False,
) -> Iterator[MicroBatch]:
    """Micro-batches of units of rows, cut as in training on one rank, in the layout that any model takes."""
    alone = replace(settings, layout="padded", sequence_parallel_size=1, tensor_parallel_size=1)
    return micro_batches(sequences, units, alone, device, whole=whole)


def sweep(
    sequences: Sequences,
    forward: Callable[[MicroBatch], Tensor],
    settings: DeepSpeedTrainer,
    device: torch.device,
) -> Tensor:
    """`forward` of all trained tokens, float32 of shape [N], on the CPU, without gradient."""
    results_N = torch.zeros(sequences.n_tokens)
    with torch.no_grad():
        for batch in batches(sequences, sequences.once(), settings, device):  # one may stand in several pairs
            results_N[batch.flat_N] = forward(batch).float().cpu()
    return results_N[sequences.flat_index(sequences.first_alike())]


def logprobs_of(policy: PolicyModule, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of a micro-batch's trained tokens, shape [N] each."""
    logprobs_N, entropy_N = policy(batch.inputs, temperature)
    return logprobs_N, entropy_N


def values_of(critic: CriticModule, batch: MicroBatch) -> Tensor:
    """Values of the states before a micro-batch's trained tokens, shape [N]."""
    values_N: Tensor = critic(batch.inputs)
    return values_N


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
            found_B = critic(ModelInputs(input_ids_BT.to(device), last_B.to(device))).cpu()
            for i, value in zip(own, found_B.tolist(), strict=True):
                values[i] = value
    return values
