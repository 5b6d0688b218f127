"""Distributions that the trainer computes for the credit.

These tests promise that they are those of a plain forward pass, in every layout and every cut into
micro-batches and chunks.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.tiny_trainer import episodes, policy_trainer, row_logprobs, threaded_episodes, tiny_model
from treetune.models import logprobs
from treetune.models.lora import Lora
from treetune.trainer.tokens import Sequences

CUTS = [
    {"layout": "padded", "sequences_per_micro_batch": 3},
    {"layout": "packed", "tokens_per_micro_batch": 60},
    {"layout": "tree", "tokens_per_micro_batch": 60},
]
TEMPERATURE = 0.8


def make_reference():
    return tiny_model(seed=1)


@pytest.fixture(params=CUTS, ids=lambda cut: cut["layout"])
def trainer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", 5 * 24)  # chunks of five positions
    return policy_trainer(
        temperature=TEMPERATURE, load_reference=make_reference, measure_kl=True, **request.param
    )


def test_entropies_and_squares_are_those_of_a_plain_forward_pass(trainer) -> None:
    rows, model = episodes(16), tiny_model()
    sequences = Sequences.of(rows)
    squares_N, entropies_N = trainer.distributions(sequences)
    for number, row in enumerate(rows):
        tokens_of_row = slice(sequences.starts[number], sequences.starts[number + 1])
        with torch.no_grad():
            logprobs_TV = row_logprobs(model, row, TEMPERATURE)[0][torch.from_numpy(row.trained)]
        chances_TV = logprobs_TV.exp()
        assert squares_N[tokens_of_row].tolist() == pytest.approx(
            chances_TV.square().sum(-1).tolist(), abs=1e-5
        )
        expected = -(chances_TV * logprobs_TV).sum(-1)
        assert entropies_N[tokens_of_row].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_distances_compare_whole_distributions_with_the_reference(trainer) -> None:
    rows, model, reference = episodes(16), tiny_model(), make_reference()
    sequences = Sequences.of(rows)
    distances_N, entropies_N = trainer.reference_distances(sequences)
    for number, row in enumerate(rows):
        tokens_of_row = slice(sequences.starts[number], sequences.starts[number + 1])
        trained = torch.from_numpy(row.trained)
        with torch.no_grad():
            ours_TV = row_logprobs(model, row, TEMPERATURE)[0][trained].exp()
            theirs_TV = row_logprobs(reference, row, TEMPERATURE)[0][trained].exp()
        expected = 1 - (ours_TV * theirs_TV).sqrt().sum(-1)
        assert expected.min() > 1e-5
        assert distances_N[tokens_of_row].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
        entropies = -(ours_TV * ours_TV.log()).sum(-1) / math.log(24)
        assert entropies_N[tokens_of_row].tolist() == pytest.approx(entropies.tolist(), abs=1e-5)


def test_divergences_compare_each_distribution_with_the_mean_of_its_group(trainer) -> None:
    rows, model = episodes(16), tiny_model()
    sequences = Sequences.of(rows)
    chances_by_row = []
    for row in rows:
        with torch.no_grad():
            chances_by_row.append(row_logprobs(model, row, TEMPERATURE)[0].exp())
    positions_N = torch.cat([torch.from_numpy(row.trained).nonzero()[:, 0] for row in rows])
    divergences_N = trainer.group_divergences(sequences, positions_N)
    has_group = False
    for number, (row, chances_TV) in enumerate(zip(rows, chances_by_row, strict=True)):
        expected = []
        for position in row.trained.nonzero()[0]:
            chances_of_group = [
                other_TV[position]
                for other, other_TV in zip(rows, chances_by_row, strict=True)
                if other.group == row.group and len(other.trained) > position and other.trained[position]
            ]
            has_group |= len(chances_of_group) > 1
            mean_V, chances_V = torch.stack(chances_of_group).mean(0), chances_TV[position]
            mixture_V = (mean_V + chances_V) / 2
            kl_of_chances = (chances_V * (chances_V / mixture_V).log()).sum()
            kl_of_mean = (mean_V * (mean_V / mixture_V).log()).sum()
            expected.append(float(kl_of_chances + kl_of_mean) / 2)
        tokens_of_row = slice(sequences.starts[number], sequences.starts[number + 1])
        assert divergences_N[tokens_of_row].tolist() == pytest.approx(expected, abs=2e-6)
    assert has_group and divergences_N.max() > 1e-4


def test_threads_have_the_distributions_from_which_they_were_sampled(trainer) -> None:
    episode, calls = threaded_episodes()[0]
    sequences = Sequences.of([episode])
    _, entropies_N = trainer.distributions(sequences)
    model, expected = tiny_model(), []
    for call in calls:
        if call.trained:
            ids = torch.tensor([[*call.context, *call.token_ids]])
            with torch.no_grad():
                logits_TV = model(ids).logits[0, len(call.context) - 1 : -1] / TEMPERATURE
            chances_TV = logits_TV.softmax(-1)
            expected += (-(chances_TV * chances_TV.log()).sum(-1)).tolist()
    assert entropies_N.tolist() == pytest.approx(expected, abs=1e-5)


def test_with_adapters_the_reference_is_the_policy_without_them() -> None:
    trainer = policy_trainer(lora=Lora(rank=4), learning_rate=1e-2, temperature=TEMPERATURE)
    sequences = Sequences.of(episodes(16))
    before_N, _ = trainer.reference_distances(sequences)
    assert before_N.abs().max() < 1e-6
    trainer.train(0, episodes(16))
    after_N, _ = trainer.reference_distances(sequences)
    assert after_N.max() > 1e-6


def test_the_kl_to_the_reference_is_that_of_whole_distributions(trainer) -> None:
    rows, model, reference = episodes(16), tiny_model(), make_reference()
    sequences = Sequences.of(rows)
    kl_N = trainer.reference_kl(sequences)
    for number, row in enumerate(rows):
        tokens_of_row = slice(sequences.starts[number], sequences.starts[number + 1])
        trained = torch.from_numpy(row.trained)
        with torch.no_grad():
            ours_TV = row_logprobs(model, row, TEMPERATURE)[0][trained]
            theirs_TV = row_logprobs(reference, row, TEMPERATURE)[0][trained]
        expected = (ours_TV.exp() * (ours_TV - theirs_TV)).sum(-1)
        assert kl_N[tokens_of_row].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
