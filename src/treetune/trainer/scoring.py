"""Runs models over sequences without training: log-probs and values of an iteration, and of single
answers.

`Scorer` runs in the thread that calls it. `ReferencePrefetch` has a thread of its own, on each rank::

    the thread that samples, then trains               thread "reference"
    ──────────────────────────────────────────         ──────────────────────────────────
    on_result(answer)  ──────────submit──────────►     scores the row, sets its future
    on_result(answer)  ──────────submit──────────►     …
    …
    training begins
    logprobs(sequences):
      cancels waiting rows that are not trained
      learns which rows each rank has submitted
      scores this rank's share of the others           scores the rows that remain
      wait(futures, rank_deadline)  ◄────────────      the last future is set
      sums over all ranks

Two steps of `logprobs` wait for the other ranks, `rank_deadline` each: the one that learns which rows each
rank has submitted, and the sum. If scoring a row fails, the next `on_result` or `logprobs` raises. `close`
waits for the row that the thread has begun, `rank_deadline` at most, and not at all if `logprobs` has given
up on the thread.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treetune.engine.requests import ANSWER_PRIORITY, Completion, Request
from treetune.models.logprobs import ModelInputs, Nucleus, squared_probabilities
from treetune.trainer.base import Trainer
from treetune.trainer.batches import MicroBatch, micro_batches, rows_scored_by
from treetune.trainer.deepspeed_model import Reference
from treetune.trainer.ranks import Ranks
from treetune.trainer.tokens import Sequences, content_hash_of
from treetune.vocabulary import Metrics, TokenIds, concatenate

Forward = Callable[..., Any]
"""A `PolicyModule` or `CriticModule`, or a `DeepSpeedModel` of one.

A policy returns, for each trained token of a micro-batch, the log-prob, the entropy, and what the function
`statistics` computes from the logits of its position, if there is one. A critic returns the values.
"""

SHARE_AHEAD_METRIC = "train/reference_ahead"
"""The metric of the share of an iteration's trained tokens that the reference scored during sampling."""
WAITING_SECONDS_METRIC = "train/reference_seconds"
"""The metric of the seconds that training waited for the scores of the other tokens."""


class PolicyScores(NamedTuple):
    """A policy's scores of every trained token, under distributions that are not cut: float32 [N] each."""

    logprobs_N: Tensor
    entropies_N: Tensor
    log_mass_N: Tensor | None
    """The log of the mass that top-p and top-k leave of each distribution; None if they cut nothing."""


def _whole_logprobs(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor]:
    """Returns the log-probs of the whole vocabulary, [C, V]. They are in a tuple of one, since this function
    is passed to a policy as `statistics`, which may return several tensors."""
    return (logits_CV.log_softmax(-1),)


class _ChunkComparison:
    """Compares the distributions of a model with those of another model.

    The log-probs of the other model are there for all positions. The head of the model calls this object with
    its logits of one chunk of positions after the other.

    Args:
        logprobs_NV: The other model's log-probs.
        compare: Computes a number for each position, from the other model's log-probs and this one's.
    """

    def __init__(self, logprobs_NV: Tensor, compare: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._logprobs_NV, self._compare = logprobs_NV, compare
        self._positions_done = 0

    def __call__(self, logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor]:
        """Compares the next chunk of positions, and returns one number for each position of the chunk."""
        # The pass has no gradient: a backward pass would compute each chunk a second time.
        assert not torch.is_grad_enabled(), "a backward pass would call this again, with an earlier chunk"
        start, end = self._positions_done, self._positions_done + len(labels_C)
        assert end <= len(self._logprobs_NV), "both models run over the same positions"
        self._positions_done = end
        compared_C = self._compare(self._logprobs_NV[start:end], logits_CV.log_softmax(-1))
        return (compared_C,)  # in a tuple, since a policy's `statistics` may return several tensors

    @property
    def has_all_positions(self) -> bool:
        return self._positions_done == len(self._logprobs_NV)


def _affinity(logprobs_CV: Tensor, other_logprobs_CV: Tensor) -> Tensor:
    """Returns the Bhattacharyya coefficient ``Σ_v sqrt(p(v)·q(v))``, [C]."""
    return ((logprobs_CV + other_logprobs_CV) / 2).exp().sum(-1)


def _kl(logprobs_CV: Tensor, other_logprobs_CV: Tensor) -> Tensor:
    """Returns ``Σ_v p(v)·(log p(v) - log q(v))``, [C]."""
    return (logprobs_CV.exp() * (logprobs_CV - other_logprobs_CV)).sum(-1)


DIVERGENCE_BY_ROUNDING = 1e-6
"""Divergences up to it count as 0: rounding gives equal distributions such divergences, and a credit that
takes the tokens with the largest ones would choose among equal tokens by chance."""


class _GroupComparison:
    """Computes the Jensen-Shannon divergence of each distribution from the mean of its group.

    The members of a group are neighbouring positions. The model's head calls it with one chunk of positions
    after the other; a group that a chunk divides waits for the next chunk.

    Args:
        sizes: The number of positions of each group, in their order.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)  # the number of positions of each group
        self._groups_done = 0
        self._waiting_CV: Tensor | None = None
        """The probabilities of the incomplete group with which the last chunk ended; empty if it ended with a
        whole group, and None before the first chunk."""
        self._divergences: list[Tensor] = []

    def __call__(self, logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, ...]:
        """Takes the next chunk of positions, and computes the divergences of the groups that it completes."""
        # The pass has no gradient: a backward pass would compute each chunk a second time.
        assert not torch.is_grad_enabled(), "a backward pass would call this again, with an earlier chunk"
        chances_CV = logits_CV.softmax(-1)
        if self._waiting_CV is not None:
            chances_CV = torch.cat([self._waiting_CV, chances_CV])
        # The sizes of the groups that are complete now, and the number of their positions.
        sizes = []
        n_positions = 0
        for size in self._sizes[self._groups_done :]:
            if n_positions + size > len(chances_CV):
                break
            sizes.append(size)
            n_positions += size
        self._groups_done += len(sizes)
        # The positions of the group that isn't complete. `clone` makes a copy, so that the chunk is freed.
        self._waiting_CV = chances_CV[n_positions:].clone()
        if sizes:
            self._divergences.append(_divergences_from_means(chances_CV[:n_positions], sizes))
        return ()  # `divergences` returns the results of all chunks

    def divergences(self) -> Tensor:
        """Returns the divergences of all positions, [N]."""
        assert self._groups_done == len(self._sizes), "the head has scored each position once"
        return torch.cat(self._divergences)


def _divergences_from_means(chances_CV: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns the Jensen-Shannon divergence of each distribution from the mean of its group, [C]:
    ``H((p + m) / 2) - (H(p) + H(m)) / 2`` with the entropy H.

    Args:
        chances_CV: The probabilities of C distributions. Those of a group are neighbours.
        sizes: The number of distributions of each group; the sum of the sizes is C.
    """
    device = chances_CV.device
    sizes_G = torch.tensor(sizes, device=device)
    first_G = sizes_G.cumsum(0) - sizes_G
    # This adds the groups' first members, then their second ones, and so on. `index_add_` would add them in
    # another order each time on a GPU.
    sums_GV = chances_CV.new_zeros(len(sizes), chances_CV.shape[-1])
    for member in range(max(sizes)):
        has_member_G = sizes_G > member
        sums_GV[has_member_G] += chances_CV[first_G[has_member_G] + member]
    means_GV = sums_GV / sizes_G[:, None]
    group_C = torch.arange(len(sizes), device=device).repeat_interleave(sizes_G)
    means_CV = means_GV[group_C]
    entropy_of_mixture_C = torch.special.entr((chances_CV + means_CV) / 2).sum(-1)
    entropy_C = torch.special.entr(chances_CV).sum(-1)
    entropy_of_mean_C = torch.special.entr(means_GV).sum(-1)[group_C]
    divergence_C = entropy_of_mixture_C - (entropy_C + entropy_of_mean_C) / 2
    # By rounding, equal distributions have a tiny divergence, which counts as 0.
    return divergence_C.where(divergence_C > DIVERGENCE_BY_ROUNDING, 0.0)


@dataclass(frozen=True)
class Scorer:
    """Runs models in micro-batches that are distributed over the ranks.

    The `temperature` is the rollout's: log-probs are those of the distribution that was sampled from, before
    top-p and top-k cut it.
    """

    settings: Trainer
    ranks: Ranks
    temperature: float

    def logprobs(self, policy: Forward, sequences: Sequences) -> Tensor:
        """Returns the log-probs of every trained token, float32 [N], without gradient. Collective."""
        return self._score(sequences, lambda batch: policy(batch.inputs, self.temperature)[0])

    def all_scores(self, policy: Forward, sequences: Sequences, nucleus: Nucleus | None) -> PolicyScores:
        """Returns all scores of every trained token, from one forward pass. Collective."""

        def forward(batch: MicroBatch) -> Tensor:
            return torch.stack(policy(batch.inputs, self.temperature, nucleus=nucleus), dim=-1)

        n_scores = 2 if nucleus is None else 3
        columns = self._score(sequences, forward, token_shape=(n_scores,)).unbind(-1)
        # `mass` has the log of the mass that the nucleus (top-p and top-k) leaves. Without a nucleus, `mass`
        # is empty. `unbind` returns views with gaps between their numbers, and `contiguous` makes copies
        # without gaps.
        logprobs_N, entropies_N, *mass = (column.contiguous() for column in columns)
        return PolicyScores(logprobs_N, entropies_N, mass[0] if mass else None)

    def distributions(self, policy: Forward, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Returns Σ_v π(v)² and the entropy of the distribution of every trained token, float32 [N] each.
        Collective."""

        def forward(batch: MicroBatch) -> Tensor:
            _, entropies_N, squares_N = policy(
                batch.inputs, self.temperature, statistics=squared_probabilities
            )
            return torch.stack([squares_N, entropies_N], dim=-1)

        # `forward` returns two numbers for each token. `unbind` returns views with gaps between their
        # numbers, and `contiguous` makes copies without gaps.
        squares_N, entropies_N = self._score(sequences, forward, token_shape=(2,)).unbind(-1)
        return squares_N.contiguous(), entropies_N.contiguous()

    def reference_distances(
        self, policy: Forward, reference: Reference, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """Returns the policy's distance from the reference and the policy's entropy for every trained token.

        The distance of the two distributions is ``1 - Σ_v sqrt(π(v)·π_ref(v))``. The entropy is divided by
        log V, where V is the size of the vocabulary. Both are float32 [N]. Collective.

        The policy's log-probs of the whole vocabulary are kept until the reference has run over the same
        micro-batch.
        """

        def forward(batch: MicroBatch) -> Tensor:
            """Returns the distance and the divided entropy of each token of the micro-batch, [N, 2]."""
            _, entropies_N, logprobs_NV = policy(batch.inputs, self.temperature, statistics=_whole_logprobs)
            # The affinity of two distributions is ``Σ_v sqrt(π(v)·π_ref(v))``.
            comparison = _ChunkComparison(logprobs_NV, _affinity)
            affinities_N = self._compare_reference(reference, batch, comparison)
            distances_N = (1 - affinities_N).clamp(min=0)  # rounding could make a distance negative
            return torch.stack([distances_N, entropies_N / math.log(logprobs_NV.shape[-1])], dim=-1)

        # `forward` returns two numbers for each token. `unbind` returns views with gaps between their
        # numbers, and `contiguous` makes copies without gaps.
        distances_N, entropies_N = self._score(sequences, forward, token_shape=(2,)).unbind(-1)
        return distances_N.contiguous(), entropies_N.contiguous()

    def reference_kl(self, policy: Forward, reference: Reference, sequences: Sequences) -> Tensor:
        """Returns for every trained token the KL divergence ``Σ_v π(v)·log(π(v)/π_ref(v))`` of the policy's
        distribution from the reference's, float32 [N]. Collective.

        The policy's log-probs of the whole vocabulary are kept until the reference has run over the same
        micro-batch.
        """

        def forward(batch: MicroBatch) -> Tensor:
            # The first two results are the log-probs and entropies, which are not needed here.
            _, _, logprobs_NV = policy(batch.inputs, self.temperature, statistics=_whole_logprobs)
            comparison = _ChunkComparison(logprobs_NV, _kl)
            return self._compare_reference(reference, batch, comparison)

        return self._score(sequences, forward)

    def group_divergences(self, policy: Forward, sequences: Sequences, positions_N: Tensor) -> Tensor:
        """Returns the divergence of every trained token's distribution from its group's mean, float32 [N].

        A group has the tokens at one position in all answers to a problem. The divergence is the
        Jensen-Shannon divergence, and is 0 if no other answer has a token at this position. Collective.

        All answers to a problem are in one micro-batch, which may therefore exceed `tokens_per_micro_batch`.

        Args:
            positions_N: The position of every trained token in its answer, int64.
        """
        assert self.settings.sequence_parallel_size == 1, "refused before the run"
        rows_by_problem: dict[str, list[int]] = {}
        for sequence, problem in enumerate(sequences.groups):  # `groups` has the problem of each sequence
            rows_by_problem.setdefault(problem, []).extend(sequences.rows_of((sequence,)))
        units = [tuple(rows) for rows in rows_by_problem.values()]  # the rows of each problem
        problem_N = torch.zeros(sequences.n_tokens, dtype=torch.int64)
        for number, unit in enumerate(units):
            problem_N[sequences.flat_index(unit)] = number
        # Tokens of the same problem and position are a group. This gives each group a number.
        n_positions = int(positions_N.max()) + 1
        group_N = problem_N * n_positions + positions_N
        divergences_N = torch.zeros(sequences.n_tokens)
        with torch.no_grad():
            for batch in micro_batches(
                sequences, units, self.settings, self.ranks, keep_units=True, with_gradient=False
            ):
                # The model runs over the rows as they are. Then the head gets their tokens ordered by group,
                # and not by answer. So the distributions of a group are computed together, and can then be
                # freed.
                order_N = group_N[batch.flat_index_N].argsort(stable=True)
                index_N = batch.flat_index_N[order_N]  # the indices of these tokens in the iteration
                _, sizes = group_N[index_N].unique_consecutive(return_counts=True)
                comparison = _GroupComparison(sizes.tolist())
                order_on_device_N = order_N.to(self.ranks.device)
                assert batch.inputs.labels_N is not None
                inputs = batch.inputs._replace(
                    positions_N=batch.inputs.positions_N[order_on_device_N],
                    labels_N=batch.inputs.labels_N[order_on_device_N],
                )
                policy(inputs, self.temperature, statistics=comparison)
                if self.reports(batch):
                    divergences_N[index_N] = comparison.divergences().cpu()
        # Only one rank has written a token's result. It is 0 on the other ranks, so the sum is exact.
        return self.ranks.sum(divergences_N)

    def _compare_reference(
        self, reference: Reference, batch: MicroBatch, comparison: _ChunkComparison
    ) -> Tensor:
        """Runs the reference over a micro-batch and returns the comparison of each position, [N]."""
        # With adapters, the reference is the policy without its adapters. So policy and reference take turns.
        with reference() as reference_model:
            *_, compared_N = reference_model(batch.inputs, self.temperature, statistics=comparison)
        assert comparison.has_all_positions, "the reference has scored each position once"
        return compared_N

    def values(self, critic: Forward, sequences: Sequences) -> Tensor:
        """Returns the value of the state before every trained token, float32 [N], without gradient.
        Collective."""
        return self._score(sequences, lambda batch: critic(batch.inputs))

    def _score(
        self,
        sequences: Sequences,
        forward: Callable[[MicroBatch], Tensor],
        token_shape: tuple[int, ...] = (),
    ) -> Tensor:
        """Returns the results of `forward` for every trained token, on the CPU of every rank, shape
        [N, *token_shape]. Equal rows are computed once: an answer may be in several pairs of a
        preference objective. Collective.
        """
        result_N = torch.zeros(sequences.n_tokens, *token_shape)
        with torch.no_grad():
            units = sequences.distinct_rows()
            for batch in micro_batches(sequences, units, self.settings, self.ranks, with_gradient=False):
                batch_N = forward(batch)
                # If several ranks compute a micro-batch together, only one of them reports the results.
                if self.reports(batch):
                    result_N[batch.flat_index_N] = batch_N.float().cpu()
        # Only one rank has written a token's result. It is 0 on the other ranks, so the sum is exact.
        all_N = self.ranks.sum(result_N)
        # Rows that were left out get the results of the first row that equals them.
        return all_N[sequences.flat_index(sequences.first_equal_rows())]

    def reports(self, batch: MicroBatch) -> bool:
        """Returns whether the results of this rank count. Of the ranks that compute a micro-batch together,
        one reports the results. No rank reports those of a dummy."""
        return not batch.is_dummy and self.ranks.rank % self.settings.sequence_parallel_size == 0

    def answer_logprobs(
        self, policy: Forward, answers: Sequence[tuple[TokenIds, TokenIds]], temperature: float
    ) -> list[list[float]]:
        """Returns the log-probs of the response tokens of this rank's pairs (prompt, response).

        Collective if a rank alone can't run the model (ZeRO-3, sequence parallelism); else local.
        """
        is_collective = self.settings.zero_stage == 3 or self.settings.sequence_parallel_size > 1
        # Every rank must then run the model on the answers of all ranks.
        answers_by_rank = self.ranks.exchange("score", list(answers)) if is_collective else [answers]
        results = []
        for rank, answers_of_rank in enumerate(answers_by_rank):
            is_of_this_rank = not is_collective or rank == self.ranks.rank
            for prompt, response in answers_of_rank:
                ids_T = torch.from_numpy(concatenate([prompt, response]).astype("int64"))
                predicting = torch.arange(len(prompt) - 1, len(ids_T) - 1)
                logprobs_N = self.row_logprobs(policy, ids_T, predicting, temperature)
                if is_of_this_rank:
                    results.append(logprobs_N.tolist())
        return results

    def row_logprobs(
        self, policy: Forward, ids_T: Tensor, predicting: Tensor, temperature: float | None = None
    ) -> Tensor:
        """Returns the log-probs of some tokens of a row.

        Local, if this rank alone can run the model; else every rank must call it with the same row.

        Args:
            predicting: The positions whose *next* tokens are scored, int64.
            temperature: None for the rollout's.
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
    """Scores each answer under the reference model in a thread, while other answers are sampled.

    The head of this file draws both threads.

    A row always has a forward pass of its own. Its log-probs therefore don't depend on when it was sampled,
    with which other rows, on which rank, or whether the run was restarted in between, and need not be stored
    for a restart. They differ in the last bits from those of micro-batches, since kernels round differently.

    A row is identified by its tokens and its trained tokens (`content_hash_of`). Scores of answers that are
    not trained are dropped. Rows that differ from what the engine sampled (several turns, injected text) are
    scored when training begins.

    An exception in the thread ends the run at the next `on_result` or `logprobs`, even if its answer would
    not have been trained.
    """

    def __init__(self, reference: Reference, scorer: Scorer) -> None:
        self._reference, self._scorer = reference, scorer
        self._work: queue.SimpleQueue[tuple[Future[Tensor], Tensor, Tensor] | None] = queue.SimpleQueue()
        """The arguments of `_score_in_thread` for each submitted row; None ends the thread."""
        self._pending: dict[bytes, Future[Tensor]] = {}
        """The submitted rows of this iteration, by their hash."""
        self._first_error: BaseException | None = None
        """The first exception of the thread; None if there was none."""
        self._has_hung = False
        """Whether the thread has failed to score its rows in time."""
        self._is_closed = False
        self.metrics: Metrics = {SHARE_AHEAD_METRIC: 0.0, WAITING_SECONDS_METRIC: 0.0}
        """The metrics of the last `logprobs`."""
        # A daemon, since Python's exit waits for all other threads, also for one whose forward pass hangs.
        self._thread = threading.Thread(target=self._run_thread, name="reference", daemon=True)
        self._thread.start()

    def on_result(self, request: Request, answers: Sequence[Completion]) -> None:
        """Submits the answers to a prompt for scoring, and returns at once.

        All tokens of an answer are scored. Continuations are not submitted.
        """
        self._refuse_failed()
        if request.priority != ANSWER_PRIORITY:  # only requests for answers have this priority
            return
        for answer in answers:
            token_ids = concatenate([request.prompt_ids, answer.token_ids])
            predicting = np.arange(len(request.prompt_ids) - 1, len(token_ids) - 1)
            content_hash = content_hash_of(token_ids, predicting)
            if len(predicting) and content_hash not in self._pending:
                ids_T = torch.from_numpy(token_ids.astype(np.int64))
                future = self._pending[content_hash] = Future()
                self._work.put((future, ids_T, torch.from_numpy(predicting)))

    def logprobs(self, sequences: Sequences) -> Tensor:
        """Returns the log-probs of every trained token, float32 [N], and forgets the submitted answers.
        Collective."""
        ranks, start = self._scorer.ranks, time.perf_counter()
        # Submitted answers that are not trained need not be scored.
        trained_hashes = {row.content_hash for row in sequences.rows}
        for content_hash in self._pending.keys() - trained_hashes:
            self._pending.pop(content_hash).cancel()
        submitted, self._pending = self._pending, {}

        # If several ranks have submitted a row, only the result of the first of these ranks counts, since the
        # results of all ranks are summed below.
        submitted_by_rank = ranks.exchange("reference ahead", list(submitted))
        rank_of_hash: dict[bytes, int] = {}
        for rank, content_hashes in enumerate(submitted_by_rank):
            for content_hash in content_hashes:
                rank_of_hash.setdefault(content_hash, rank)

        # Each rank computes its share of the rows that no rank has submitted. Equal rows are scored once.
        result_N = torch.zeros(sequences.n_tokens)
        first_equal = sequences.first_equal_rows()
        distinct_rows = {number: sequences.rows[number] for number in first_equal}
        share_of_rank = rows_scored_by(sequences, ranks)
        for number, row in distinct_rows.items():
            if row.content_hash not in rank_of_hash and number in share_of_rank:
                result_N[row.start : row.end] = self._score(row.token_ids, row.predicting)

        # Meanwhile the thread has scored submitted rows. This waits for those that remain.
        not_done = wait(submitted.values(), ranks.deadline_s).not_done
        self._refuse_failed()
        if not_done:
            self._has_hung = True
            raise TimeoutError(
                f"{len(not_done)} answers were not scored under the reference within {ranks.deadline_s:.0f} s"
                " (rank_deadline) after training began"
            )
        for row in distinct_rows.values():
            if rank_of_hash.get(row.content_hash) == ranks.rank:
                result_N[row.start : row.end] = submitted[row.content_hash].result()

        # Rows that were left out get the log-probs of the first row that equals them.
        logprobs_N = ranks.sum(result_N)[sequences.flat_index(first_equal)]
        tokens_scored_before = sum(row.trained for row in sequences.rows if row.content_hash in rank_of_hash)
        self.metrics = {
            SHARE_AHEAD_METRIC: tokens_scored_before / max(1, sequences.n_tokens),
            WAITING_SECONDS_METRIC: time.perf_counter() - start,
        }
        return logprobs_N

    def close(self) -> None:
        """Ends the thread, which drops the rows that it has not begun. Waits for the row that it has begun,
        `rank_deadline` at most, unless `logprobs` has given up on the thread."""
        self._is_closed = True
        self._work.put(None)
        if not self._has_hung:
            self._thread.join(self._scorer.ranks.deadline_s)

    def _refuse_failed(self) -> None:
        """Raises RuntimeError if the thread has failed."""
        if (error := self._first_error) is not None:
            raise RuntimeError(
                "an answer could not be scored under the reference while others were sampled"
                f" (trainer.reference_scores): {type(error).__name__}: {error}"
            ) from error

    def _run_thread(self) -> None:
        while not self._is_closed and (row := self._work.get()) is not None:
            self._score_in_thread(*row)

    def _score_in_thread(self, future: Future[Tensor], ids_T: Tensor, predicting: Tensor) -> None:
        """Scores a row, and keeps the first exception for the main thread, which may never ask for the result
        of this row."""
        if not future.set_running_or_notify_cancel():
            return  # `logprobs` has cancelled the row
        try:
            future.set_result(self._score(ids_T, predicting))
        except BaseException as error:
            self._first_error = self._first_error or error
            future.set_exception(error)

    def _score(self, ids_T: Tensor, predicting: Tensor) -> Tensor:
        with self._reference() as reference:
            return self._scorer.row_logprobs(reference, ids_T, predicting)
