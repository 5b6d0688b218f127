"""Models run over sequences without a step: log-probs and values of an iteration, and of single answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treetune.models.inputs import ModelInputs
from treetune.models.nucleus import Nucleus
from treetune.trainers.base import Trainer
from treetune.trainers.batching import Unit
from treetune.trainers.micro_batches import MicroBatch, micro_batches
from treetune.trainers.ranks import Ranks
from treetune.trainers.tokens import Sequences
from treetune.vocabulary import TokenIds, joined

Forward = Callable[..., Any]
"""A `PolicyModule` or `CriticModule`, or a `TrainableModel` of one."""


class Scored(NamedTuple):
    """What a policy says of every trained token: float32 of shape [N] each, of whole distributions."""

    logprobs_N: Tensor
    entropies_N: Tensor
    log_mass_N: Tensor | None
    """Of the nucleus that each was sampled from, where sampling cuts distributions."""


@dataclass(frozen=True)
class Scorer:
    """Runs models in the micro-batches that the settings ask for, shared out over the ranks.

    `temperature` is the rollout's: log-probs are those of the distribution that was sampled, before top-p and
    top-k cut it.
    """

    settings: Trainer
    ranks: Ranks
    temperature: float

    def logprobs(self, policy: Forward, sequences: Sequences) -> Tensor:
        """Of every trained token, float32 of shape [N], without gradient. Collective."""
        return self._score(sequences, lambda batch: policy(batch.inputs, self.temperature)[0])

    def scored(self, policy: Forward, sequences: Sequences, nucleus: Nucleus | None) -> Scored:
        """All that one forward pass says of every trained token. Collective."""

        def together(batch: MicroBatch) -> Tensor:
            return torch.stack(policy(batch.inputs, self.temperature, nucleus=nucleus), dim=-1)

        columns = self._score(sequences, together, (2 if nucleus is None else 3,)).unbind(-1)
        logprobs_N, entropies_N, *mass = (column.contiguous() for column in columns)
        return Scored(logprobs_N, entropies_N, mass[0] if mass else None)

    def values(self, critic: Forward, sequences: Sequences) -> Tensor:
        """Of the state before every trained token, float32 of shape [N], without gradient. Collective."""
        return self._score(sequences, lambda batch: critic(batch.inputs))

    def _score(
        self, sequences: Sequences, forward: Callable[[MicroBatch], Tensor], of_token: tuple[int, ...] = ()
    ) -> Tensor:
        """On the CPU, computed by all ranks and known to all; each token's has the shape `of_token`. Rows
        that are alike (an answer in several pairs) are run once.
        """
        result_N = torch.zeros(sequences.n_tokens, *of_token)
        with torch.no_grad():
            for batch in self.micro_batches(sequences, sequences.once(), with_gradient=False):
                found_N = forward(batch)
                if self.reports(batch):
                    result_N[batch.flat_index_N] = found_N.float().cpu()
        return self.ranks.sum(result_N)[sequences.flat_index(sequences.first_alike())]

    def micro_batches(
        self,
        sequences: Sequences,
        units: Sequence[Unit],
        *,
        keep_units: bool = False,
        with_gradient: bool = True,
    ) -> Iterator[MicroBatch]:
        """This rank's; see `micro_batches`."""
        return micro_batches(
            sequences,
            units,
            self.settings,
            self.ranks.device,
            rank=self.ranks.rank,
            ranks=self.ranks.world_size,
            keep_units=keep_units,
            with_gradient=with_gradient,
        )

    def reports(self, batch: MicroBatch) -> bool:
        """Whether this rank hands its results on: of ranks that ran it together, one does."""
        return not batch.is_dummy and self.ranks.rank % self.settings.model_parallel_size == 0

    def answer_logprobs(
        self, policy: Forward, answers: Sequence[tuple[TokenIds, TokenIds]], temperature: float
    ) -> list[list[float]]:
        """Log-probs of the response tokens of some (prompt, response).

        Local to this rank, except where it doesn't hold the model alone (ZeRO-3, ranks that run it
        together): then every rank calls it, with what it has.
        """
        collective = self.settings.zero_stage == 3 or self.settings.model_parallel_size > 1
        gathered = self.ranks.exchange("score", list(answers)) if collective else [answers]
        results = []
        for rank, of_rank in enumerate(gathered):
            for prompt, response in of_rank:
                ids_T = torch.from_numpy(joined([prompt, response]).astype("int64"))
                predicting = torch.arange(len(prompt) - 1, len(ids_T) - 1)
                logprobs_N = self._of_row(policy, ids_T, predicting, temperature)
                if len(gathered) == 1 or rank == self.ranks.rank:
                    results.append(logprobs_N.tolist())
        return results

    def row_logprobs(self, policy: Forward, token_ids: Tensor, predicting: Tensor) -> Tensor:
        """Of the tokens behind the positions `predicting` of one row (int64), float32, on the CPU. Local to
        this rank, which must hold the model alone."""
        return self._of_row(policy, token_ids, predicting, self.temperature).float().cpu()

    def _of_row(self, policy: Forward, ids_T: Tensor, predicting: Tensor, temperature: float) -> Tensor:
        ids_T, predicting = ids_T.to(self.ranks.device), predicting.to(self.ranks.device)
        inputs = ModelInputs(
            input_ids_BT=ids_T[None],
            positions_N=predicting,
            labels_N=ids_T[predicting + 1],
            max_positions=len(predicting),
        )
        with torch.no_grad():
            logprobs_N, *_ = policy(inputs, temperature)
        return logprobs_N
