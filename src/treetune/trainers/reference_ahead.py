"""Log-probs of the reference of answers that are there, computed while others are still sampled."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from treetune.inference.base import ANSWERS, Completion, Request
from treetune.trainers.model_factory import Reference
from treetune.trainers.ranks import Ranks
from treetune.trainers.scoring import Scorer
from treetune.trainers.tokens import Sequences, likeness_of
from treetune.vocabulary import joined

SHARE = "train/reference_ahead"
"""Of an iteration's trained tokens, those whose reference was scored while answers were sampled."""


class ReferenceAhead:
    """Scores each answer as it comes, in a thread, and whatever else is trained on when it is asked for.

    A row is always run by itself. So its log-probs depend neither on when it came, nor on what came beside
    it, on which rank or after how many restarts, and nothing need be kept for a run that is resumed. They
    differ from those of micro-batches in the last bits, by which kernels round.

    What is known of a row is known by its tokens and those of them that are trained. Answers that are left
    out of training have been scored in vain; those that training sees otherwise than the engine (turns,
    injected text) are scored like others that nobody heard of.
    """

    def __init__(self, reference: Reference, scorer: Scorer) -> None:
        self._reference, self._scorer = reference, scorer
        self._thread = ThreadPoolExecutor(1, "reference")
        self._heard: dict[bytes, Future[Tensor]] = {}
        self.share = 0.0
        """See `SHARE`; of the last iteration that was asked for."""

    def hear(self, request: Request, answers: Sequence[Completion]) -> None:
        """Has the answers to a prompt scored, in every token; not continuations. Returns at once."""
        if request.priority != ANSWERS:
            return
        for answer in answers:
            token_ids = joined([request.prompt_ids, answer.token_ids])
            predicting = np.arange(len(request.prompt_ids) - 1, len(token_ids) - 1)
            likeness = likeness_of(token_ids, predicting)
            if len(predicting) and likeness not in self._heard:
                ids = torch.from_numpy(token_ids.astype(np.int64))
                positions = torch.from_numpy(predicting)
                self._heard[likeness] = self._thread.submit(self._score, ids, positions)

    def logprobs(self, sequences: Sequences) -> Tensor:
        """Of every trained token, float32 of shape [N]: what was heard of, when it is scored, and the rest.
        Whatever went wrong in the thread is raised here. Forgets what was heard. Collective."""
        ranks = self._scorer.ranks
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
        mine = rows_scored_by(sequences, ranks)
        for number in dict.fromkeys(first):
            row = sequences.rows[number]
            if by.get(row.likeness) == ranks.rank:
                result_N[row.start : row.end] = own[row.likeness].result()
            elif row.likeness not in by and number in mine:
                result_N[row.start : row.end] = self._score(row.token_ids, row.predicting)
        ahead = sum(row.trained for row in sequences.rows if row.likeness in by)
        self.share = ahead / max(1, sequences.n_tokens)
        return ranks.sum(result_N)[sequences.flat_index(first)]

    def close(self) -> None:
        """What is not scored yet will not be."""
        self._thread.shutdown(cancel_futures=True)

    def _score(self, token_ids: Tensor, predicting: Tensor) -> Tensor:
        with self._reference() as reference:
            return self._scorer.row_logprobs(reference, token_ids, predicting)


def rows_scored_by(sequences: Sequences, ranks: Ranks) -> set[int]:
    """The rows that this rank scores, where nobody has scored them ahead."""
    return set(range(ranks.rank, len(sequences.rows), ranks.world_size))
