"""With ``reference_scores: 'while_sampling'`` answers get their log-probs under the reference as they
come; when they came, beside what, and whether they did at all changes no bit."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainers.helpers import episodes, one_rank, tiny_model
from treetune.inference.base import ANSWERS, CONTINUATIONS, Completion, Request, SamplingParams
from treetune.models.lora import Lora
from treetune.trainers.base import Trainer
from treetune.trainers.core import PolicyTrainer
from treetune.trainers.objectives.mle import MaximumLikelihood
from treetune.trainers.objectives.ppo import ClippedPolicyGradient
from treetune.trainers.reference_ahead import SHARE, ReferenceAhead
from treetune.trainers.tokens import Sequences
from treetune.vocabulary import Episode

SAMPLING = SamplingParams(20)


def trainer(**settings: Any) -> PolicyTrainer:
    objective = ClippedPolicyGradient(kl_coef=0.1)
    one = Trainer(objective=objective, learning_rate=1e-3, adam_eps=1e-4, minibatch_size=8, **settings)
    return PolicyTrainer(one, tiny_model, ranks=one_rank(), seed=0, temperature=0.8, iterations=2, gae=None)


def ahead_of(one: PolicyTrainer) -> ReferenceAhead:
    assert one.ahead is not None
    return one.ahead


def request(row: Episode, priority: int = ANSWERS) -> Request:
    return Request(row.prompt_ids, 0, 1, SAMPLING, priority)


def hear(ahead: ReferenceAhead, rows: list[Episode], priority: int = ANSWERS) -> None:
    for row in rows:
        ahead.hear(request(row, priority), [Completion(row.response_ids, None, "stop", 0)])


@pytest.fixture(scope="module")
def rows() -> list[Episode]:
    return episodes(16, with_injected=False)


@pytest.fixture
def ahead() -> Any:
    one = trainer(reference_scores="while_sampling")
    yield ahead_of(one)
    one.close()


def test_what_is_heard_in_any_order_or_not_at_all_has_the_same_bits(
    ahead: ReferenceAhead, rows: list[Episode]
) -> None:
    sequences = Sequences.of(rows)
    unheard = ahead.logprobs(sequences)
    assert ahead.share == 0
    for seed, count in enumerate((16, 16, 7, 1)):
        some = random.Random(seed).sample(rows, count)
        hear(ahead, some)
        assert torch.equal(ahead.logprobs(sequences), unheard)
        assert ahead.share == sum(len(row.response_ids) for row in some) / sequences.n_tokens


def test_its_log_probs_are_those_of_the_reference_in_micro_batches(
    ahead: ReferenceAhead, rows: list[Episode]
) -> None:
    sequences = Sequences.of(rows)
    together = trainer()
    assert (ahead.logprobs(sequences) - together.ref_logprobs(sequences)).abs().max() < 1e-5


def test_continuations_and_answers_that_training_sees_otherwise_are_not_taken_for_answers(
    ahead: ReferenceAhead, rows: list[Episode]
) -> None:
    changed = [  # the same tokens, of which the first one isn't trained
        dataclasses.replace(row, trained=[False, *row.trained[1:]]) if len(row.trained) > 9 else row
        for row in rows
    ]
    hear(ahead, rows, CONTINUATIONS)
    ahead.logprobs(Sequences.of(rows))
    assert ahead.share == 0
    hear(ahead, rows)
    sequences = Sequences.of(changed)
    found = ahead.logprobs(sequences)
    whole = sum(len(row.response_ids) for row in changed if all(row.trained))
    assert ahead.share == whole / sequences.n_tokens < 1
    assert torch.equal(found, ahead.logprobs(sequences))


def test_what_goes_wrong_beside_sampling_is_raised_when_training_asks(rows: list[Episode]) -> None:
    def broken() -> Any:
        raise RuntimeError("no memory for the reference")

    ahead = ReferenceAhead(broken, trainer().scorer)
    hear(ahead, rows[:3])
    with pytest.raises(RuntimeError, match="no memory for the reference"):
        ahead.logprobs(Sequences.of(rows))
    ahead.close()


def test_an_update_is_the_same_whether_answers_were_heard_of(rows: list[Episode]) -> None:
    weights, shares = [], []
    for heard in (rows, rows[5:], []):
        one = trainer(reference_scores="while_sampling")
        hear(ahead_of(one), heard)
        shares.append(one.train(0, rows)[SHARE])
        weights.append(one.weights())
        one.close()
    assert shares[0] == 1 > shares[1] > shares[2] == 0
    for other in weights[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in weights[0].items())
    plain = trainer()
    plain.train(0, rows)
    assert all((t - weights[0][n]).abs().max() < 1e-5 for n, t in plain.weights().items())


def experiment(**changes: Any) -> Any:
    plain: dict[str, Any] = {
        "task": SimpleNamespace(size=lambda split: 64),
        "rollout": SimpleNamespace(needs_engine=True, most_answers=lambda problems: 8 * problems),
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
    "this rollout samples nothing": (
        {},
        {"rollout": SimpleNamespace(needs_engine=False, most_answers=lambda problems: problems)},
    ),
    "dealt out over the ranks": ({"zero_stage": 3}, {}),
    "ranks run each sequence together": ({"sequence_parallel_size": 2}, {}),
    "the policy without its adapters": ({"lora": Lora(rank=4)}, {}),
    "on the CPU while the engine samples": ({"offload_reference": True}, {}),
    "the engine has the trainer's memory": (
        {},
        {"engines": SimpleNamespace(policy=SimpleNamespace(sleep=True))},
    ),
    "at work on the iteration before": ({}, {"overlap": "one_step"}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_where_it_cant_be_the_configuration_is_refused(said: str) -> None:
    settings, changes = REFUSED[said]
    base: dict[str, Any] = {"objective": ClippedPolicyGradient(), "learning_rate": 1e-3}
    one = Trainer(**base | settings, reference_scores="while_sampling")
    (found,) = one.check(experiment(**changes))
    assert said in found.what and found.key == "reference_scores" and "before_training" in found.remedy
    assert not list(Trainer(**base | settings).check(experiment(**changes)))
