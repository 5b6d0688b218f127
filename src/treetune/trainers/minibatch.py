"""One minibatch: which of its sequences run, what each token weighs, a micro-batch's part of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treetune.models.nucleus import Nucleus
from treetune.trainers.batching import Unit
from treetune.trainers.micro_batches import MicroBatch
from treetune.trainers.objectives.base import Objective, TokenBatch
from treetune.trainers.preparation.tensors import IterationTensors
from treetune.trainers.tokens import Sequences


@dataclass(frozen=True)
class Minibatch:
    """What a step is taken on, the same on every rank. `weights_N` are over all of the iteration's tokens.

    `units` are the rows that are run, sequence by sequence or pair by pair: sequences without weight add
    nothing to the loss. None are left where there is nothing to learn, and no step is taken then.
    `keep_units` says whether a unit's rows have to run together.
    """

    units: list[Unit]
    keep_units: bool
    weights_N: Tensor
    weight_sum: float
    sequence_weight: float
    pair_weight: float

    @staticmethod
    def of(sequences: Sequences, units: Sequence[Unit], objective: Objective) -> Minibatch:
        indices = [index for unit in units for index in unit]
        weights = objective.sequence_weights(
            [sequences.trained_tokens(index) for index in indices],
            [sequences.scores[index] for index in indices],
        )
        weights_N = torch.zeros(sequences.n_tokens)
        for index, weight in zip(indices, weights, strict=True):
            weights_N[sequences.starts[index] : sequences.starts[index + 1]] = weight
        weighing = {index for index, weight in zip(indices, weights, strict=True) if weight != 0}
        return Minibatch(
            units=[sequences.rows_of(unit) for unit in units if weighing.intersection(unit)],
            keep_units=objective.needs_whole_sequences,
            weights_N=weights_N,
            weight_sum=float(weights_N.double().sum()),
            sequence_weight=1 / len(indices),
            pair_weight=1 / len(units),
        )

    def tokens(
        self, batch: MicroBatch, tensors: IterationTensors, terms: Sequence[Tensor], device: torch.device
    ) -> TokenBatch:
        def at(tensor_N: Tensor) -> Tensor:
            return tensor_N[batch.flat_index_N].to(device)

        def maybe_at(tensor_N: Tensor | None) -> Tensor | None:
            return None if tensor_N is None else at(tensor_N)

        return TokenBatch(
            weights_N=at(self.weights_N) * batch.loss_scale,
            lengths=batch.trained_tokens if self.keep_units else (),
            weight_sum=self.weight_sum,
            sequence_weight=self.sequence_weight * batch.loss_scale,
            pair_weight=self.pair_weight * batch.loss_scale,
            advantages_N=maybe_at(tensors.advantages_N),
            old_logprobs_N=maybe_at(tensors.old_logprobs_N),
            ref_logprobs_N=maybe_at(tensors.ref_logprobs_N),
            behaviour_logprobs_N=maybe_at(tensors.behaviour_logprobs_N),
            terms=tuple(terms),
        )


@dataclass(frozen=True)
class MicroBatchLoss:
    """What a micro-batch adds to the minibatch's loss and metrics; its tokens' log-probs, entropies."""

    loss: Tensor
    metrics: dict[str, Tensor]
    logprobs_N: Tensor
    entropies_N: Tensor
    tokens: TokenBatch
    log_mass_N: Tensor | None = None


def micro_batch_loss(
    policy: Callable[..., Any],
    objective: Objective,
    minibatch: Minibatch,
    batch: MicroBatch,
    tensors: IterationTensors,
    *,
    temperature: float,
    entropy_coef: float,
    device: torch.device,
    nucleus: Nucleus | None = None,
) -> MicroBatchLoss:
    """Runs the policy on a micro-batch. The entropy's part of the loss is the same for every objective."""
    logprobs_N, entropy_N, *terms = policy(
        batch.inputs,
        temperature,
        entropy_gradient=entropy_coef != 0,
        with_terms=objective.has_terms,
        nucleus=nucleus,
    )
    log_mass_N = None if nucleus is None else terms.pop()
    tokens = minibatch.tokens(batch, tensors, terms, device)
    loss, metrics = objective.loss(tokens, logprobs_N)
    if entropy_coef:
        loss = loss - entropy_coef * (tokens.weights_N * entropy_N).sum()
    metrics = {"train/loss": loss.detach(), "train/entropy": tokens.mean(entropy_N), **metrics}
    return MicroBatchLoss(loss, metrics, logprobs_N, entropy_N, tokens, log_mass_N)
