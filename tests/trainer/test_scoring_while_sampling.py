"""The reference scores answers while others are sampled (``reference_scores: 'while_sampling'``).

These tests promise:

* The log-probs and the update have the same bits, whichever answers were scored ahead, and in any order.
* An error beside sampling is raised in training, which waits no longer than its deadline.
* Two ranks share the scores of both, and settings that can't score ahead are refused.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.tiny_trainer import are_same, assert_close, episodes, policy_trainer, weights_of
from treetune.contracts import SampledAnswers, Turns
from treetune.engine.requests import (
    ANSWER_PRIORITY,
    CONTINUATION_PRIORITY,
    Completion,
    Request,
    SamplingParams,
)
from treetune.models.lora import Lora
from treetune.objectives.mle import MaximumLikelihood
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.trainer.base import Trainer
from treetune.trainer.core import PolicyTrainer
from treetune.trainer.ranks import Ranks
from treetune.trainer.scoring import (
    SHARE_AHEAD_METRIC,
    WAITING_SECONDS_METRIC,
    ReferencePrefetch,
    rows_scored_by,
)
from treetune.trainer.tokens import Sequences
from treetune.vocabulary import Episode


def make_trainer(**settings: Any) -> PolicyTrainer:
    return policy_trainer(ClippedPolicyGradient(kl_coef=0.1), iterations=2, minibatch_size=8, **settings)


def prefetch_of(policy: PolicyTrainer) -> ReferencePrefetch:
    assert policy.prefetch is not None
    return policy.prefetch


def report_answers(ahead: ReferencePrefetch, rows: list[Episode], priority: int = ANSWER_PRIORITY) -> None:
    for row in rows:
        request = Request(row.prompt_ids, 0, 1, SamplingParams(20), priority)
        ahead.on_result(request, [Completion(row.response_ids, None, "stop", 0)])


@pytest.fixture(scope="module")
def rows() -> list[Episode]:
    return episodes(16, with_injected=False)


@pytest.fixture
def ahead() -> Any:
    policy = make_trainer(reference_scores="while_sampling")
    yield prefetch_of(policy)
    policy.close()


def test_answers_scored_ahead_in_any_order_or_not_at_all_have_the_same_bits(
    ahead: ReferencePrefetch, rows: list[Episode]
) -> None:
    """The log-probs are those of the reference in micro-batches, up to rounding."""
    sequences = Sequences.of(rows)
    scored_late = ahead.logprobs(sequences)
    assert (scored_late - make_trainer().ref_logprobs(sequences)).abs().max() < 1e-5
    assert ahead.metrics[SHARE_AHEAD_METRIC] == 0
    for seed, count in enumerate((16, 16, 7, 1)):
        some_rows = random.Random(seed).sample(rows, count)
        report_answers(ahead, some_rows)
        assert torch.equal(ahead.logprobs(sequences), scored_late)
        assert (
            ahead.metrics[SHARE_AHEAD_METRIC]
            == sum(len(row.response_ids) for row in some_rows) / sequences.n_tokens
        )


def test_continuations_and_answers_with_another_mask_are_not_taken_for_trained_answers(
    ahead: ReferencePrefetch, rows: list[Episode]
) -> None:
    changed = [  # the same tokens, of which the first one isn't trained
        dataclasses.replace(row, trained=[False, *row.trained[1:]]) if len(row.trained) > 9 else row
        for row in rows
    ]
    report_answers(ahead, rows, CONTINUATION_PRIORITY)
    ahead.logprobs(Sequences.of(rows))
    assert ahead.metrics[SHARE_AHEAD_METRIC] == 0
    report_answers(ahead, rows)
    sequences = Sequences.of(changed)
    logprobs_N = ahead.logprobs(sequences)
    trained_whole = sum(len(row.response_ids) for row in changed if all(row.trained))
    assert ahead.metrics[SHARE_AHEAD_METRIC] == trained_whole / sequences.n_tokens < 1
    assert torch.equal(logprobs_N, ahead.logprobs(sequences))


def test_an_error_beside_sampling_is_raised_when_training_asks(rows: list[Episode]) -> None:
    def broken() -> Any:
        raise RuntimeError("no memory for the reference")

    ahead = ReferencePrefetch(broken, make_trainer().scorer)
    report_answers(ahead, rows[:1])
    with pytest.raises(
        RuntimeError, match=r"sampled \(trainer.reference_scores\).*no memory for the reference"
    ):
        ahead.logprobs(Sequences.of(rows[:1]))
    ahead.close()


def test_an_error_with_an_answer_that_is_not_trained_is_raised_as_well(
    rows: list[Episode], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_trainer(reference_scores="while_sampling")
    ahead, scored = prefetch_of(policy), threading.Event()
    row_logprobs = policy.scorer.row_logprobs

    def fails_once(*arguments: Any) -> Any:
        if not scored.is_set():
            scored.set()
            raise ValueError("a token that the model doesn't have")
        return row_logprobs(*arguments)

    monkeypatch.setattr(type(policy.scorer), "row_logprobs", lambda self, *arguments: fails_once(*arguments))
    report_answers(ahead, rows[:1])
    assert scored.wait(10)
    with pytest.raises(RuntimeError, match="a token that the model doesn't have"):
        ahead.logprobs(Sequences.of(rows[1:]))
    with pytest.raises(RuntimeError, match="a token that the model doesn't have"):
        report_answers(ahead, rows[1:2])
    policy.close()


def test_training_and_the_end_of_the_run_wait_no_longer_than_the_deadline_for_scores(
    rows: list[Episode],
) -> None:
    go = threading.Event()

    def hangs() -> Any:
        go.wait(10)
        raise RuntimeError("nobody waits any more")

    scorer = make_trainer().scorer
    soon = dataclasses.replace(scorer, ranks=dataclasses.replace(scorer.ranks, deadline_s=0.05))
    ahead = ReferencePrefetch(hangs, soon)
    report_answers(ahead, rows[:1])
    with pytest.raises(TimeoutError, match="1 answers were not scored under the reference within"):
        ahead.logprobs(Sequences.of(rows[:1]))
    start = time.monotonic()
    ahead.close()
    assert time.monotonic() - start < 5, "it doesn't wait for the row that hangs"
    hanging = [thread for thread in threading.enumerate() if thread.name.startswith("reference")]
    assert hanging and all(thread.daemon for thread in hanging), "Python's exit waits for no daemon"
    go.set()


class TwoThreadRanks:
    """Exchanges values between two ranks that are threads of this process."""

    def __init__(self) -> None:
        self.meeting, self.said = threading.Barrier(2, timeout=10), [None, None]

    def ranks(self, rank: int) -> Ranks:
        return _ThreadRank(rank, 2, torch.device("cpu"), 10.0, self)


class _ThreadRank(Ranks):
    def exchange(self, name: str, value: Any) -> list[Any]:
        pair: TwoThreadRanks = self.object_group
        pair.said[self.rank] = value
        pair.meeting.wait()
        values = list(pair.said)
        pair.meeting.wait()
        return values

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(sum(self.exchange("sum", tensor.clone())))


@pytest.mark.parametrize("heard", [(range(8), range(8, 16)), (range(16), range(5)), ((), (3, 9)), ((), ())])
def test_two_ranks_use_the_scores_of_both_and_share_the_missing_ones(
    ahead: ReferencePrefetch, rows: list[Episode], heard: tuple[Sequence[int], ...]
) -> None:
    expected = ahead.logprobs(Sequences.of(rows))
    policy, pair = make_trainer(), TwoThreadRanks()
    assert policy.reference is not None

    def of_rank(rank: int) -> tuple[torch.Tensor, float]:
        ranks = pair.ranks(rank)
        assert policy.reference is not None
        prefetch = ReferencePrefetch(policy.reference, dataclasses.replace(policy.scorer, ranks=ranks))
        report_answers(prefetch, [rows[number] for number in heard[rank]])
        rows_of_rank = rows_scored_by(Sequences.of(rows, rows_with_tokens=()), ranks)
        found_N = prefetch.logprobs(Sequences.of(rows, rows_of_rank))
        prefetch.close()
        return found_N, prefetch.metrics[SHARE_AHEAD_METRIC]

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(of_rank, range(2)))
    trained = [len(rows[number].response_ids) for number in {*heard[0], *heard[1]}]
    for found_N, share in results:
        assert torch.equal(found_N, expected)
        assert share == sum(trained) / len(expected)


def test_an_update_is_the_same_whether_or_not_answers_were_scored_ahead(rows: list[Episode]) -> None:
    weights, shares = [], []
    for reported in (rows, rows[5:], []):
        policy = make_trainer(reference_scores="while_sampling")
        report_answers(prefetch_of(policy), reported)
        metrics = policy.train(0, rows)
        shares.append(metrics[SHARE_AHEAD_METRIC])
        assert metrics[WAITING_SECONDS_METRIC] > 0
        weights.append(weights_of(policy))
        policy.close()
    assert shares[0] == 1 > shares[1] > shares[2] == 0
    assert all(are_same(weights[0], other_weights) for other_weights in weights[1:])
    plain = make_trainer()
    plain.train(0, rows)
    assert_close(weights[0], plain, atol=1e-5)


def make_rollout(*gives: Any) -> Any:
    sampled = SampledAnswers() in gives
    return SimpleNamespace(
        gives=gives,
        needs_engine=sampled,
        most_answers=lambda problems: 8 * problems,
        most_problems=lambda problems: problems,
    )


def make_experiment(**changes: Any) -> Any:
    plain: dict[str, Any] = {
        "task": SimpleNamespace(size=lambda split: 64),
        "rollout": make_rollout(SampledAnswers()),
        "selection": SimpleNamespace(most_kept=lambda answers, problems: answers),
        "engines": SimpleNamespace(policy=SimpleNamespace(sleep=False)),
        "overlap": "none",
        "problems_per_iteration": 64,
        "iterations": 1,
        "restart": "never",
    }
    return SimpleNamespace(**plain | changes)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing here needs a reference": ({"objective": MaximumLikelihood(), "measure_kl": False}, {}),
    "this rollout samples nothing": ({}, {"rollout": make_rollout()}),
    "none could be scored ahead": ({}, {"rollout": make_rollout(SampledAnswers(), Turns())}),
    "sharded over the ranks": ({"zero_stage": 3}, {}),
    "ranks run each sequence together": ({"sequence_parallel_size": 2}, {}),
    "the policy without its adapters": ({"lora": Lora(rank=4)}, {}),
    "on the CPU while the engine samples": ({"offload_reference": True}, {}),
    "the engine has the trainer's memory": (
        {},
        {"engines": SimpleNamespace(policy=SimpleNamespace(sleep=True))},
    ),
    "trains on the iteration before": ({}, {"overlap": "one_step"}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_settings_that_cannot_score_ahead_are_refused(reason: str) -> None:
    settings, changes = REFUSED[reason]
    base: dict[str, Any] = {"objective": ClippedPolicyGradient(), "learning_rate": 1e-3}
    trainer = Trainer(**base | settings, reference_scores="while_sampling")
    (finding,) = trainer.check(make_experiment(**changes))
    assert (
        reason in finding.what and finding.key == "reference_scores" and "before_training" in finding.remedy
    )
    assert not list(Trainer(**base | settings).check(make_experiment(**changes)))
