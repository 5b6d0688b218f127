"""Models run over sequences without a step: log-probs and values of an iteration, and of single answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treetune.engine.base import ANSWERS, Completion, Request
from treetune.models.logprobs import ModelInputs, Nucleus
from treetune.trainer.base import Trainer
from treetune.trainer.batches import MicroBatch, micro_batches, rows_scored_by
from treetune.trainer.deepspeed_model import Reference
from treetune.trainer.ranks import Ranks
from treetune.trainer.tokens import Sequences, likeness_of
from treetune.vocabulary import Metrics, TokenIds, joined

Forward = Callable[..., Any]
"""A `PolicyModule` or `CriticModule`, or a `DeepSpeedModel` of one."""

SHARE = "train/reference_ahead"
"""Metric: the share of an iteration's trained tokens whose reference was scored while answers were
sampled."""
SECONDS = "train/reference_seconds"
"""Metric: how long training waited for the rest."""


class PolicyScores(NamedTuple):
    """A policy's scores of every trained token: float32 of shape [N] each, of whole distributions."""

    logprobs_N: Tensor
    entropies_N: Tensor
    log_mass_N: Tensor | None
    """Log mass of the nucleus that each was sampled from, where sampling cuts distributions."""


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
        """Log-probs of every trained token, float32 of shape [N], without gradient. Collective."""
        return self._score(sequences, lambda batch: policy(batch.inputs, self.temperature)[0])

    def scored(self, policy: Forward, sequences: Sequences, nucleus: Nucleus | None) -> PolicyScores:
        """All scores that one forward pass gives of every trained token. Collective."""

        def together(batch: MicroBatch) -> Tensor:
            return torch.stack(policy(batch.inputs, self.temperature, nucleus=nucleus), dim=-1)

        columns = self._score(sequences, together, (2 if nucleus is None else 3,)).unbind(-1)
        logprobs_N, entropies_N, *mass = (column.contiguous() for column in columns)
        return PolicyScores(logprobs_N, entropies_N, mass[0] if mass else None)

    def values(self, critic: Forward, sequences: Sequences) -> Tensor:
        """Values of the state before every trained token, float32 of shape [N], without gradient.
        Collective."""
        return self._score(sequences, lambda batch: critic(batch.inputs))

    def _score(
        self, sequences: Sequences, forward: Callable[[MicroBatch], Tensor], of_token: tuple[int, ...] = ()
    ) -> Tensor:
        """Results on the CPU, computed by all ranks and known to all; each token's has the shape `of_token`.
        Rows that are alike (an answer in several pairs) are run once.
        """
        result_N = torch.zeros(sequences.n_tokens, *of_token)
        with torch.no_grad():
            units = sequences.once()
            for batch in micro_batches(sequences, units, self.settings, self.ranks, with_gradient=False):
                forwarded_N = forward(batch)
                if self.reports(batch):
                    result_N[batch.flat_index_N] = forwarded_N.float().cpu()
        # Each token was written by one rank, and is 0 elsewhere: the sum rounds nothing.
        return self.ranks.sum(result_N)[sequences.flat_index(sequences.first_alike())]

    def reports(self, batch: MicroBatch) -> bool:
        """Returns whether this rank hands its results on: of ranks that ran it together, one does."""
        return not batch.is_dummy and self.ranks.rank % self.settings.model_parallel_size == 0

    def answer_logprobs(
        self, policy: Forward, answers: Sequence[tuple[TokenIds, TokenIds]], temperature: float
    ) -> list[list[float]]:
        """Log-probs of the response tokens of some (prompt, response).

        Local to this rank, except where it doesn't hold the model alone (ZeRO-3, ranks that run it
        together): then every rank calls it, with its own.
        """
        collective = self.settings.zero_stage == 3 or self.settings.model_parallel_size > 1
        gathered = self.ranks.exchange("score", list(answers)) if collective else [answers]
        results = []
        for rank, of_rank in enumerate(gathered):
            for prompt, response in of_rank:
                ids_T = torch.from_numpy(joined([prompt, response]).astype("int64"))
                predicting = torch.arange(len(prompt) - 1, len(ids_T) - 1)
                # Where it is collective, every rank runs every rank's answers: the model takes all of them.
                logprobs_N = self.row_logprobs(policy, ids_T, predicting, temperature)
                if len(gathered) == 1 or rank == self.ranks.rank:
                    results.append(logprobs_N.tolist())
        return results

    def row_logprobs(
        self, policy: Forward, ids_T: Tensor, predicting: Tensor, temperature: float | None = None
    ) -> Tensor:
        """Log-probs of the tokens behind the positions `predicting` of one row (int64), at the rollout's
        temperature or the one given. Local to this rank, which must hold the model alone or call it as all
        do.
        """
        ids_T, predicting = ids_T.to(self.ranks.device), predicting.to(self.ranks.device)
        inputs = ModelInputs(
            input_ids_BT=ids_T[None],
            positions_N=predicting,
            labels_N=ids_T[predicting + 1],
            max_positions=len(predicting),
        )
        with torch.no_grad():
            logprobs_N, *_ = policy(inputs, self.temperature if temperature is None else temperature)
        return logprobs_N.float().cpu()


class ReferencePrefetch:
    """Scores each answer under the reference as it comes, in a thread, while others are sampled, and the rest
    when training asks.

    A row is always run by itself. So its log-probs depend neither on when it came, nor on what came beside
    it, on which rank or after how many restarts, and nothing need be kept for a run that is resumed. They
    differ from those of micro-batches in the last bits, by which kernels round.

    A row is known by its tokens and those of them that are trained. Answers that are left out of training
    have been scored in vain; those that training sees otherwise than the engine (turns, injected text) are
    scored when it asks.

    A failure in the thread ends the run when the next answer comes, or when training asks: also that of an
    answer which would not have been trained on.
    """

    def __init__(self, reference: Reference, scorer: Scorer) -> None:
        self._reference, self._scorer = reference, scorer
        self._thread = ThreadPoolExecutor(1, "reference")
        self._pending: dict[bytes, Future[Tensor]] = {}
        self._failed: Exception | None = None
        self.metrics: Metrics = {SHARE: 0.0, SECONDS: 0.0}
        """Metrics of the last iteration that was asked for."""

    def on_result(self, request: Request, answers: Sequence[Completion]) -> None:
        """Has the answers to a prompt scored, in every token; not continuations. Returns at once."""
        self._refuse_failed()
        if request.priority != ANSWERS:
            return
        for answer in answers:
            token_ids = joined([request.prompt_ids, answer.token_ids])
            predicting = np.arange(len(request.prompt_ids) - 1, len(token_ids) - 1)
            likeness = likeness_of(token_ids, predicting)
            if len(predicting) and likeness not in self._pending:
                ids_T = torch.from_numpy(token_ids.astype(np.int64))
                self._pending[likeness] = self._thread.submit(
                    self._score_in_thread, ids_T, torch.from_numpy(predicting)
                )

    def logprobs(self, sequences: Sequences) -> Tensor:
        """Log-probs of every trained token, float32 of shape [N]: those that were begun, once they are there,
        and the rest. Forgets the answers. Collective."""
        ranks, began = self._scorer.ranks, time.perf_counter()
        trained = {row.likeness for row in sequences.rows}
        for likeness in self._pending.keys() - trained:
            self._pending.pop(likeness).cancel()
        mine, self._pending = self._pending, {}
        # A row that several ranks have scored is taken from the first of them, so that the sum below counts
        # it once.
        rank_of: dict[bytes, int] = {}
        for rank, likenesses in enumerate(ranks.exchange("reference ahead", list(mine))):
            for likeness in likenesses:
                rank_of.setdefault(likeness, rank)
        result_N = torch.zeros(sequences.n_tokens)
        first = sequences.first_alike()
        rows = {number: sequences.rows[number] for number in first}
        # Rows that nobody has scored are shared out by their numbers, which every rank knows.
        share = rows_scored_by(sequences, ranks)
        for number, row in rows.items():
            if row.likeness not in rank_of and number in share:
                result_N[row.start : row.end] = self._score(row.token_ids, row.predicting)
        # Waited for after this rank's share: both run at the same time.
        late = wait(mine.values(), ranks.deadline_s).not_done
        self._refuse_failed()
        if late:
            raise TimeoutError(
                f"{len(late)} answers were not scored under the reference within {ranks.deadline_s:.0f} s"
                " (rank_deadline) of training's beginning"
            )
        for row in rows.values():
            if rank_of.get(row.likeness) == ranks.rank:
                result_N[row.start : row.end] = mine[row.likeness].result()
        prefetched = sum(row.trained for row in sequences.rows if row.likeness in rank_of)
        logprobs_N = ranks.sum(result_N)[sequences.flat_index(first)]
        seconds = time.perf_counter() - began
        self.metrics = {SHARE: prefetched / max(1, sequences.n_tokens), SECONDS: seconds}
        return logprobs_N

    def close(self) -> None:
        """Cancels the pending scoring."""
        self._thread.shutdown(cancel_futures=True)

    def _refuse_failed(self) -> None:
        if (error := self._failed) is not None:
            raise RuntimeError(
                "an answer could not be scored under the reference while others were sampled"
                f" (trainer.reference_scores): {type(error).__name__}: {error}"
            ) from error

    def _score_in_thread(self, ids_T: Tensor, predicting: Tensor) -> Tensor:
        try:
            return self._score(ids_T, predicting)
        except Exception as error:
            self._failed = self._failed or error
            raise

    def _score(self, ids_T: Tensor, predicting: Tensor) -> Tensor:
        with self._reference() as reference:
            return self._scorer.row_logprobs(reference, ids_T, predicting)
