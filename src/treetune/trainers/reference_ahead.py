"""Log-probs of the reference of answers that are there, computed while others are still sampled."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from torch import Tensor

from treetune.inference.base import ANSWERS, Completion, Request
from treetune.trainers.model_factory import Reference
from treetune.trainers.ranks import Ranks
from treetune.trainers.scoring import Scorer
from treetune.trainers.tokens import Sequences, likeness_of
from treetune.vocabulary import Metrics, joined

SHARE = "train/reference_ahead"
"""Of an iteration's trained tokens, those whose reference was scored while answers were sampled."""
SECONDS = "train/reference_seconds"
"""For how long training waited for the rest."""


class ReferenceAhead:
    """Scores each answer as it comes, in a thread, and whatever else is trained on when it is asked for.

    A row is always run by itself. So its log-probs depend neither on when it came, nor on what came beside
    it, on which rank or after how many restarts, and nothing need be kept for a run that is resumed. They
    differ from those of micro-batches in the last bits, by which kernels round.

    What is known of a row is known by its tokens and those of them that are trained. Answers that are left
    out of training have been scored in vain; those that training sees otherwise than the engine (turns,
    injected text) are scored like others that nobody heard of.

    A failure in the thread ends the run when the next answer comes, or when training asks: also that of an
    answer which would not have been trained on.
    """

    def __init__(self, reference: Reference, scorer: Scorer) -> None:
        self._reference, self._scorer = reference, scorer
        self._thread = ThreadPoolExecutor(1, "reference")
        self._heard: dict[bytes, Future[Tensor]] = {}
        self._failed: Exception | None = None
        self.share = self.seconds = 0.0
        """See `SHARE` and `SECONDS`; of the last iteration that was asked for."""

    @property
    def metrics(self) -> Metrics:
        return {SHARE: self.share, SECONDS: self.seconds}

    def hear(self, request: Request, answers: Sequence[Completion]) -> None:
        """Has the answers to a prompt scored, in every token; not continuations. Returns at once."""
        self._refuse_failed()
        if request.priority != ANSWERS:
            return
        for answer in answers:
            token_ids = joined([request.prompt_ids, answer.token_ids])
            predicting = np.arange(len(request.prompt_ids) - 1, len(token_ids) - 1)
            likeness = likeness_of(token_ids, predicting)
            if len(predicting) and likeness not in self._heard:
                ids = torch.from_numpy(token_ids.astype(np.int64))
                positions = torch.from_numpy(predicting)
                self._heard[likeness] = self._thread.submit(self._score_ahead, ids, positions)

    def logprobs(self, sequences: Sequences) -> Tensor:
        """Of every trained token, float32 of shape [N]: what was heard of, when it is scored, and the rest.
        Forgets what was heard. Collective."""
        ranks, began = self._scorer.ranks, time.perf_counter()
        wanted = {row.likeness for row in sequences.rows}
        own = {likeness: one for likeness, one in self._heard.items() if likeness in wanted}
        for likeness, one in self._heard.items():
            if likeness not in own:
                one.cancel()
        self._heard = {}
        by: dict[bytes, int] = {}
        for rank, theirs in enumerate(ranks.exchange("reference ahead", list(own))):
            for likeness in theirs:
                by.setdefault(likeness, rank)
        result_N = torch.zeros(sequences.n_tokens)
        first = sequences.first_alike()
        rows = {number: sequences.rows[number] for number in first}
        mine = rows_scored_by(sequences, ranks)
        for number, row in rows.items():
            if row.likeness not in by and number in mine:
                result_N[row.start : row.end] = self._score(row.token_ids, row.predicting)
        self._wait_for(own.values())
        for row in rows.values():
            if by.get(row.likeness) == ranks.rank:
                result_N[row.start : row.end] = own[row.likeness].result()
        ahead = sum(row.trained for row in sequences.rows if row.likeness in by)
        self.share = ahead / max(1, sequences.n_tokens)
        found_N = ranks.sum(result_N)[sequences.flat_index(first)]
        self.seconds = time.perf_counter() - began
        return found_N

    def close(self) -> None:
        """What is not scored yet will not be."""
        self._thread.shutdown(cancel_futures=True)

    def _wait_for(self, scores: Collection[Future[Tensor]]) -> None:
        deadline_s = self._scorer.ranks.deadline_s
        late = wait(scores, deadline_s).not_done
        self._refuse_failed()
        if late:
            raise TimeoutError(
                f"{len(late)} answers were not scored under the reference within {deadline_s:.0f} s"
                " (rank_deadline) of training's beginning"
            )

    def _refuse_failed(self) -> None:
        if (error := self._failed) is not None:
            raise RuntimeError(
                "an answer could not be scored under the reference while others were sampled"
                f" (trainer.reference_scores): {type(error).__name__}: {error}"
            ) from error

    def _score_ahead(self, token_ids: Tensor, predicting: Tensor) -> Tensor:
        try:
            return self._score(token_ids, predicting)
        except Exception as error:
            self._failed = self._failed or error
            raise

    def _score(self, token_ids: Tensor, predicting: Tensor) -> Tensor:
        with self._reference() as reference:
            return self._scorer.row_logprobs(reference, token_ids, predicting)


def rows_scored_by(sequences: Sequences, ranks: Ranks) -> set[int]:
    """The rows that this rank scores, where nobody has scored them ahead."""
    return set(range(ranks.rank, len(sequences.rows), ranks.world_size))
