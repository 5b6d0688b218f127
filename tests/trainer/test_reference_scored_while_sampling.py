"""With ``reference_scores: 'while_sampling'`` answers get their log-probs under the reference as they
come; when they came, beside what, and whether they did at all changes no bit."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainer.helpers import are_same, assert_close, episodes, policy_trainer, weights_of
from treetune.contracts import SampledAnswers, Turns
from treetune.engine.requests import ANSWERS, CONTINUATIONS, Completion, Request, SamplingParams
from treetune.models.lora import Lora
from treetune.objectives.mle import MaximumLikelihood
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.trainer.base import Trainer
from treetune.trainer.core import PolicyTrainer
from treetune.trainer.ranks import Ranks
from treetune.trainer.scoring import AHEAD, SECONDS, ReferencePrefetch, rows_scored_by
from treetune.trainer.tokens import Sequences
from treetune.vocabulary import Episode


def trainer(**settings: Any) -> PolicyTrainer:
    return policy_trainer(ClippedPolicyGradient(kl_coef=0.1), iterations=2, minibatch_size=8, **settings)


def ahead_of(one: PolicyTrainer) -> ReferencePrefetch:
    assert one.prefetch is not None
    return one.prefetch


def hear(ahead: ReferencePrefetch, rows: list[Episode], priority: int = ANSWERS) -> None:
    for row in rows:
        asked = Request(row.prompt_ids, 0, 1, SamplingParams(20), priority)
        ahead.on_result(asked, [Completion(row.response_ids, None, "stop", 0)])


@pytest.fixture(scope="module")
def rows() -> list[Episode]:
    return episodes(16, with_injected=False)


@pytest.fixture
def ahead() -> Any:
    one = trainer(reference_scores="while_sampling")
    yield ahead_of(one)
    one.close()


def test_what_is_heard_in_any_order_or_not_at_all_has_the_same_bits(
    ahead: ReferencePrefetch, rows: list[Episode]
) -> None:
    """And the log-probs are those of the reference in micro-batches, but for rounding."""
    sequences = Sequences.of(rows)
    unheard = ahead.logprobs(sequences)
    assert (unheard - trainer().ref_logprobs(sequences)).abs().max() < 1e-5
    assert ahead.metrics[AHEAD] == 0
    for seed, count in enumerate((16, 16, 7, 1)):
        some = random.Random(seed).sample(rows, count)
        hear(ahead, some)
        assert torch.equal(ahead.logprobs(sequences), unheard)
        assert ahead.metrics[AHEAD] == sum(len(row.response_ids) for row in some) / sequences.n_tokens


def test_continuations_and_answers_that_training_sees_otherwise_are_not_taken_for_answers(
    ahead: ReferencePrefetch, rows: list[Episode]
) -> None:
    changed = [  # the same tokens, of which the first one isn't trained
        dataclasses.replace(row, trained=[False, *row.trained[1:]]) if len(row.trained) > 9 else row
        for row in rows
    ]
    hear(ahead, rows, CONTINUATIONS)
    ahead.logprobs(Sequences.of(rows))
    assert ahead.metrics[AHEAD] == 0
    hear(ahead, rows)
    sequences = Sequences.of(changed)
    found = ahead.logprobs(sequences)
    whole = sum(len(row.response_ids) for row in changed if all(row.trained))
    assert ahead.metrics[AHEAD] == whole / sequences.n_tokens < 1
    assert torch.equal(found, ahead.logprobs(sequences))


def test_what_goes_wrong_beside_sampling_is_raised_when_training_asks(rows: list[Episode]) -> None:
    def broken() -> Any:
        raise RuntimeError("no memory for the reference")

    ahead = ReferencePrefetch(broken, trainer().scorer)
    hear(ahead, rows[:1])
    with pytest.raises(
        RuntimeError, match=r"sampled \(trainer.reference_scores\).*no memory for the reference"
    ):
        ahead.logprobs(Sequences.of(rows[:1]))
    ahead.close()


def test_what_goes_wrong_with_an_answer_that_is_not_trained_on_is_raised_all_the_same(
    rows: list[Episode], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer(reference_scores="while_sampling")
    ahead, scored = ahead_of(one), threading.Event()
    right = one.scorer.row_logprobs

    def fails_once(*arguments: Any) -> Any:
        if not scored.is_set():
            scored.set()
            raise ValueError("a token that the model doesn't have")
        return right(*arguments)

    monkeypatch.setattr(type(one.scorer), "row_logprobs", lambda self, *arguments: fails_once(*arguments))
    hear(ahead, rows[:1])
    assert scored.wait(10)
    with pytest.raises(RuntimeError, match="a token that the model doesn't have"):
        ahead.logprobs(Sequences.of(rows[1:]))
    with pytest.raises(RuntimeError, match="a token that the model doesn't have"):
        hear(ahead, rows[1:2])
    one.close()


def test_training_does_not_wait_for_ever_for_what_is_scored_beside_it(rows: list[Episode]) -> None:
    go = threading.Event()

    def hangs() -> Any:
        go.wait(10)
        raise RuntimeError("nobody waits any more")

    scorer = trainer().scorer
    soon = dataclasses.replace(scorer, ranks=dataclasses.replace(scorer.ranks, deadline_s=0.05))
    ahead = ReferencePrefetch(hangs, soon)
    hear(ahead, rows[:1])
    with pytest.raises(TimeoutError, match="1 answers were not scored under the reference within"):
        ahead.logprobs(Sequences.of(rows[:1]))
    go.set()
    ahead.close()


class Together:
    """What two ranks that are threads of one process say to each other."""

    def __init__(self) -> None:
        self.meeting, self.said = threading.Barrier(2, timeout=10), [None, None]

    def ranks(self, rank: int) -> Ranks:
        return _OfTwo(rank, 2, torch.device("cpu"), 10.0, self)


class _OfTwo(Ranks):
    def exchange(self, name: str, own: Any) -> list[Any]:
        together: Together = self.objects
        together.said[self.rank] = own
        together.meeting.wait()
        everyones = list(together.said)
        together.meeting.wait()
        return everyones

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(sum(self.exchange("sum", tensor.clone())))


@pytest.mark.parametrize("heard", [(range(8), range(8, 16)), (range(16), range(5)), ((), (3, 9)), ((), ())])
def test_two_ranks_know_what_either_has_heard_of_and_share_out_the_rest(
    ahead: ReferencePrefetch, rows: list[Episode], heard: tuple[Sequence[int], ...]
) -> None:
    expected = ahead.logprobs(Sequences.of(rows))
    one, together = trainer(), Together()
    assert one.reference is not None

    def of_rank(rank: int) -> tuple[torch.Tensor, float]:
        ranks = together.ranks(rank)
        assert one.reference is not None
        own = ReferencePrefetch(one.reference, dataclasses.replace(one.scorer, ranks=ranks))
        hear(own, [rows[place] for place in heard[rank]])
        kept = rows_scored_by(Sequences.of(rows, rows_with_tokens=()), ranks)
        found_N = own.logprobs(Sequences.of(rows, kept))
        own.close()
        return found_N, own.metrics[AHEAD]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(of_rank, range(2)))
    trained = [len(rows[place].response_ids) for place in {*heard[0], *heard[1]}]
    for found_N, share in found:
        assert torch.equal(found_N, expected)
        assert share == sum(trained) / len(expected)


def test_an_update_is_the_same_whether_answers_were_heard_of(rows: list[Episode]) -> None:
    weights, shares = [], []
    for heard in (rows, rows[5:], []):
        one = trainer(reference_scores="while_sampling")
        hear(ahead_of(one), heard)
        metrics = one.train(0, rows)
        shares.append(metrics[AHEAD])
        assert metrics[SECONDS] > 0
        weights.append(weights_of(one))
        one.close()
    assert shares[0] == 1 > shares[1] > shares[2] == 0
    assert all(are_same(weights[0], other) for other in weights[1:])
    plain = trainer()
    plain.train(0, rows)
    assert_close(weights[0], plain, atol=1e-5)


def rollout(*gives: Any) -> Any:
    sampled = SampledAnswers() in gives
    return SimpleNamespace(gives=gives, needs_engine=sampled, most_answers=lambda problems: 8 * problems)


def experiment(**changes: Any) -> Any:
    plain: dict[str, Any] = {
        "task": SimpleNamespace(size=lambda split: 64),
        "rollout": rollout(SampledAnswers()),
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
    "this rollout samples nothing": ({}, {"rollout": rollout()}),
    "none could be scored ahead": ({}, {"rollout": rollout(SampledAnswers(), Turns())}),
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


@pytest.mark.parametrize("said", REFUSED)
def test_where_it_cant_be_the_configuration_is_refused(said: str) -> None:
    settings, changes = REFUSED[said]
    base: dict[str, Any] = {"objective": ClippedPolicyGradient(), "learning_rate": 1e-3}
    one = Trainer(**base | settings, reference_scores="while_sampling")
    (found,) = one.check(experiment(**changes))
    assert said in found.what and found.key == "reference_scores" and "before_training" in found.remedy
    assert not list(Trainer(**base | settings).check(experiment(**changes)))
