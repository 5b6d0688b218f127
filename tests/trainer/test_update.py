"""Updates of a trainer in one process.

These tests promise:

* A step equals a plain loop over sequences or pairs, and no cut of the work changes it.
* Saved states continue bit for bit, also after a restart.
* Rows from which an objective can't learn are refused with the remedy.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.tiny_trainer import (
    are_same,
    assert_close,
    episodes,
    paired_episodes,
    plain_step,
    policy_trainer,
    row_logprobs,
    tiny_model,
    trained,
    weights_of,
)
from treetune.credit.gae import Gae
from treetune.models.logprobs import ModelInputs, PolicyModule
from treetune.objectives.covariance import ClipCovariance, KlCovariance
from treetune.objectives.mle import MaximumLikelihood
from treetune.objectives.other_ratios import ClippedImportance, GeometricMean, SequencePolicyGradient
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.objectives.preference import DirectPreference, DpoPositive, SimplePreference
from treetune.objectives.spo import CorrectPaths
from treetune.trainer.base import Warmup

KL = {"kl_coef": 0.01, "entropy_coef": 0.01}
CUTS = [
    {"layout": layout, "sequences_per_micro_batch": size}
    for layout in ("padded", "packed")
    for size in (1, 3)
]
PACKED = CUTS[-1:]
WHITENED = {"minibatch_size": 8, "advantage_normalisation": "whiten"}
PAIRS = {"rows": paired_episodes(), "minibatch_size": 5}
UNMEASURED = {"minibatch_size": 8, "measure_kl": False}
CLIP_COV = ClipCovariance(share=0.3, least_covariance=0.0, largest_covariance=100.0)


@pytest.mark.parametrize(
    ("objective", "settings", "cuts"),
    [
        (ClippedPolicyGradient(**KL, kl_reduction="sequence_sum"), WHITENED, CUTS),
        (ClippedPolicyGradient(**KL, kl_reduction="token_mean", aggregation="sequence"), WHITENED, CUTS),
        (DirectPreference(), PAIRS, CUTS),
        (DpoPositive(positive_penalty=5.0, penalty_band=0.1), PAIRS, CUTS),
        (SimplePreference(), PAIRS | {"measure_kl": False}, PACKED),
        (SequencePolicyGradient(clip_low=0.01, clip_high=0.01), UNMEASURED, PACKED),
        (ClippedImportance(), UNMEASURED, PACKED),
        (GeometricMean(clip_low=0.01, clip_high=0.01), UNMEASURED, PACKED),
        (CLIP_COV, UNMEASURED, PACKED),
        (KlCovariance(share=0.3), UNMEASURED, PACKED),
        (
            ClippedPolicyGradient(aggregation="constant", constant_length=20, dual_clip=3.0),
            UNMEASURED,
            PACKED,
        ),
        (
            ClippedPolicyGradient(kl_coef=0.1, kl_estimator="k1", kl_placement="reward"),
            UNMEASURED,
            PACKED,
        ),
        (CorrectPaths(normalise_by="batch"), {"minibatch_size": 8}, PACKED),
        (CorrectPaths(detach_target=False, entropy_coef=-0.5), {"minibatch_size": 8}, PACKED),
        (CorrectPaths(target="fixed", mask="above"), {"minibatch_size": 8}, PACKED),
        (
            CorrectPaths(target="rank", divergence="jsd", importance_cap=2.0),
            {"minibatch_size": 8},
            PACKED,
        ),
        (
            CorrectPaths(
                target="rank", divergence="jsd", loss_on="all", normalise_by="batch", cross_entropy=0.5
            ),
            {"minibatch_size": 8},
            PACKED,
        ),
    ],
)
def test_neither_layout_nor_micro_batches_change_an_update(objective, settings, cuts):
    """There are two epochs of several steps, so that log-probs become old."""
    uncut, uncut_metrics = trained(objective, **settings, epochs=2)
    assert uncut_metrics["train/steps"] == (6 if "rows" in settings else 4)
    for cut in cuts:
        cut_trainer, metrics = trained(objective, **settings, **cut, epochs=2)
        assert_close(uncut, cut_trainer)
        different = {"train/computed_tokens", "train/micro_batches"}
        assert metrics.keys() == uncut_metrics.keys()
        for name in metrics.keys() - different:
            assert metrics[name] == pytest.approx(uncut_metrics[name], abs=2e-5), name


def test_in_a_single_step_tokens_are_marked_by_the_log_probs_of_the_engine():
    uncut, metrics = trained(CLIP_COV, measure_kl=False)
    cut, _ = trained(CLIP_COV, measure_kl=False, sequences_per_micro_batch=3, layout="packed")
    assert metrics["train/steps"] == 1
    assert 0 < metrics["train/clip_fraction"] <= 0.3
    assert_close(uncut, cut)


@pytest.mark.parametrize("size", [1, 3])
def test_the_update_of_the_critic_does_not_depend_on_the_cut(size):
    uncut, uncut_metrics = trained(credit=Gae(), minibatch_size=8)
    cut, cut_metrics = trained(credit=Gae(), minibatch_size=8, sequences_per_micro_batch=size)
    assert_close(uncut.critic_weights(), cut.critic_weights())
    assert cut_metrics["critic/loss"] == pytest.approx(uncut_metrics["critic/loss"], abs=1e-6)
    assert uncut_metrics["critic/loss"] > 0


def test_a_step_equals_a_plain_loop_over_sequences():
    """The loss is written out again, token by token, without any batching; so is the gap to the engine."""
    trainer, metrics = trained(advantage_normalisation="none")
    model, rows = tiny_model(), episodes(16)
    total = sum(sum(row.trained) for row in rows)
    loss, gaps = torch.zeros(()), []
    for row in rows:
        logprobs_T = row_logprobs(model, row)[1]
        for position, is_trained in enumerate(row.trained):
            if is_trained:
                ratio = (logprobs_T[position] - logprobs_T[position].detach()).exp()
                loss = loss - float(row.advantages[position]) * ratio / total
                gaps.append(abs(float(logprobs_T[position].detach()) - row.behaviour_logprobs[position]))
    norm = plain_step(model, loss)
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(norm, abs=1e-5)
    assert_close(model, trainer)
    assert metrics["engine/logprob_gap_max"] == pytest.approx(max(gaps), abs=1e-5)
    assert metrics["engine/logprob_gap_mean"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-5)
    assert metrics["train/kl"] == pytest.approx(0.0, abs=1e-6), "the policy is its reference before step 1"


def test_a_step_from_pairs_equals_a_plain_loop_over_them():
    """DPO is written out again, from a policy that is not its reference."""
    rows = paired_episodes()
    trainer, _ = trained(DirectPreference(beta=0.5), rows=rows, iterations=2)
    model, reference = tiny_model(), tiny_model()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0)

    def logprob(model_or_reference, row):
        return (row_logprobs(model_or_reference, row)[1] * torch.tensor(row.trained)).sum()

    for _ in range(2):
        loss = torch.zeros(())
        for better, worse in zip(rows[::2], rows[1::2], strict=True):
            reference_margin = (logprob(reference, better) - logprob(reference, worse)).detach()
            margin = logprob(model, better) - logprob(model, worse) - reference_margin
            loss = loss - torch.nn.functional.logsigmoid(0.5 * margin) / (len(rows) / 2)
        plain_step(model, loss, optimiser)
    metrics = trainer.train(1, rows)
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert metrics["preference/accuracy"] > 0.5, "the first step has moved it"
    assert_close(model, trainer)


def test_rows_that_an_objective_cannot_learn_from_are_refused_with_the_remedy():
    rows = paired_episodes(2)
    for wrong in (rows[:3], [rows[1], rows[0]], [rows[0], rows[3]], episodes(2)):
        with pytest.raises(ValueError, match="choose the selection 'preference_pairs'"):
            trained(DirectPreference(), rows=wrong)
    with pytest.raises(ValueError, match="choose a credit"):
        trained(rows=[dataclasses.replace(row, advantages=None) for row in episodes(4)])


@pytest.mark.parametrize("objective", [MaximumLikelihood(), ClippedPolicyGradient(), DirectPreference()])
@pytest.mark.parametrize("minibatch_size", [None, 4])
def test_an_iteration_without_episodes_trains_nothing_and_counts_no_steps(objective, minibatch_size):
    trainer = policy_trainer(objective, minibatch_size=minibatch_size)
    before = weights_of(trainer)
    metrics = trainer.train(0, [])
    assert metrics == {"train/steps": 0.0, "train/tokens": 0.0, "train/computed_tokens": 0.0}
    assert are_same(trainer, before)


def test_after_a_restart_training_repeats_the_very_beginning():
    settings = {"minibatch_size": 8, "schedule": Warmup(steps=2, decay="linear")}
    trainer, first = trained(MaximumLikelihood(), iterations=3, restarts=True, **settings)
    after_first = weights_of(trainer)
    trainer.restart()
    assert_close(trainer, tiny_model())
    assert trainer.train(0, episodes(16)) == first
    assert are_same(trainer, after_first)
    trainer.restart()
    assert trainer.train(2, episodes(16))["train/learning_rate"] == first["train/learning_rate"]


@pytest.mark.parametrize("tied", [False, True])
def test_log_probs_in_chunks_equal_those_of_the_whole_block(monkeypatch, tied):
    model = PolicyModule(tiny_model(tied=tied))
    ids = torch.randint(0, 24, (3, 9), generator=torch.Generator().manual_seed(0))
    positions, labels = torch.arange(20), torch.arange(20) % 24

    def score():
        model.zero_grad()
        logprobs, entropy = model(ModelInputs(ids, positions, labels), 0.7, entropy_gradient=True)
        (logprobs.sum() + entropy.square().sum()).backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        return [logprobs.detach(), entropy.detach(), *gradients]

    in_one_chunk = score()
    monkeypatch.setattr("treetune.models.logprobs.LOGITS_PER_CHUNK", 24 * 3)
    for tensor, chunked in zip(in_one_chunk, score(), strict=True):
        torch.testing.assert_close(tensor, chunked, atol=1e-5, rtol=1e-5)


def test_saved_state_continues_bit_for_bit(tmp_path):
    rows = episodes(16, seed=1)
    settings = {"credit": Gae(), "minibatch_size": 8, "schedule": Warmup(steps=3, decay="linear")}
    through, _ = trained(iterations=3, **settings)
    through.save(tmp_path)
    through.train(1, rows)
    resumed, _ = trained(iterations=3, **settings)
    resumed.train(1, episodes(16, seed=2))  # away from the saved state
    resumed.load(tmp_path)
    resumed.train(1, rows)
    assert are_same(through, resumed)
    assert are_same(through.critic_weights(), resumed.critic_weights())


def test_maximum_likelihood_needs_no_advantages_and_lowers_its_loss():
    rows = [dataclasses.replace(row, advantages=None) for row in episodes(16)]
    trainer, first = trained(MaximumLikelihood(), rows=rows, iterations=20, learning_rate=1e-2)
    for iteration in range(1, 10):
        last = trainer.train(iteration, rows)
    assert last["train/loss"] < first["train/loss"] - 0.1


def test_score_gives_the_log_probs_that_the_canary_compares():
    trainer, _ = trained()
    [[first, second]] = trainer.score([((1, 2, 3), (4, 5))], temperature=1.0)
    model = tiny_model()
    model.load_state_dict(weights_of(trainer), strict=False)
    logits = model(torch.tensor([[1, 2, 3, 4, 5]])).logits.log_softmax(-1)
    assert first == pytest.approx(float(logits[0, 2, 4]), abs=1e-5)
    assert second == pytest.approx(float(logits[0, 3, 5]), abs=1e-5)


def test_dropout_is_off_in_training():
    def with_dropout():
        model = tiny_model()
        model.config.attention_dropout = 0.5
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        return model

    assert_close(trained(rows=episodes(8))[0], trained(rows=episodes(8), load=with_dropout)[0])
