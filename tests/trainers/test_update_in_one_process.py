"""What the trainer does to weights and metrics, in one process."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.trainers.helpers import critic_of, episodes, one_rank, paired_episodes, tiny_model
from treetune.models.logprobs import ModelInputs, PolicyModule
from treetune.rollouts.credit import Gae
from treetune.trainers.base import Trainer, Warmup
from treetune.trainers.core import PolicyTrainer
from treetune.trainers.objectives.base import Objective
from treetune.trainers.objectives.mle import MaximumLikelihood
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient
from treetune.trainers.objectives.preference import DirectPreference, DpoPositive

BASE = {"learning_rate": 1e-3, "adam_eps": 1e-4}


def trained(
    objective: Objective | None = None,
    gae: Gae | None = None,
    iterations: int = 1,
    rows=None,
    restarts=False,
    **settings,
):
    trainer = PolicyTrainer(
        Trainer(objective=objective or ClippedPolicyGradient(), **BASE | settings),
        tiny_model,
        ranks=one_rank(),
        seed=0,
        temperature=0.8,
        iterations=iterations,
        **critic_of(gae),
        restarts=restarts,
    )
    return trainer, trainer.train(0, rows or episodes(16))


def weights_of(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights().items()}


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, tensor in one.items():
        assert (tensor - other[name]).abs().max() <= 1e-6, name


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize(("aggregation", "kl"), [("token", "sequence_sum"), ("sequence", "token_mean")])
def test_micro_batch_size_and_layout_do_not_change_the_update(layout, size, aggregation, kl):
    objective = ClippedPolicyGradient(
        kl_coef=0.01, kl_reduction=kl, entropy_coef=0.01, aggregation=aggregation
    )
    settings = {"minibatch_size": 8, "epochs": 2, "advantage_normalisation": "whiten"}
    whole, whole_metrics = trained(objective, **settings)
    cut, cut_metrics = trained(objective, **settings, layout=layout, sequences_per_micro_batch=size)
    assert_close(weights_of(whole), weights_of(cut))
    for name in ("train/loss", "train/grad_norm", "train/kl", "train/entropy", "engine/logprob_gap_max"):
        assert cut_metrics[name] == pytest.approx(whole_metrics[name], abs=2e-5), name


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize(
    "objective",
    [DirectPreference(), DpoPositive(positive_penalty=5.0, penalty_band=0.1)],
    ids=["dpo", "dpo_positive"],
)
def test_the_cut_does_not_change_an_update_from_pairs(objective, layout, size):
    settings = {"rows": paired_episodes(), "minibatch_size": 5, "epochs": 2}
    whole, whole_metrics = trained(objective, **settings)
    cut, cut_metrics = trained(objective, **settings, layout=layout, sequences_per_micro_batch=size)
    assert_close(weights_of(whole), weights_of(cut))
    assert whole_metrics["train/steps"] == 6, "12 pairs in minibatches of 5 pairs, twice"
    for name in ("train/loss", "train/grad_norm", "preference/margin", "preference/accuracy"):
        assert cut_metrics[name] == pytest.approx(whole_metrics[name], abs=2e-5), name


def test_a_step_from_pairs_equals_a_plain_loop_over_them():
    """Against AdamW on DPO written down once more, from a policy that is not its reference."""
    rows = paired_episodes()
    trainer, _ = trained(DirectPreference(beta=0.5), rows=rows, iterations=2)
    model = tiny_model()
    reference = tiny_model()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0)

    def logprob(of, row):
        ids = torch.tensor([[*row.prompt_ids.tolist(), *row.response_ids.tolist()]])
        logprobs = (of(ids).logits[0, len(row.prompt_ids) - 1 : -1] / 0.8).log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(row.response_ids.tolist())[:, None])[:, 0]
        return (chosen * torch.tensor(row.trained)).sum()

    def step():
        optimiser.zero_grad()
        loss = torch.zeros(())
        for better, other in zip(rows[::2], rows[1::2], strict=True):
            with torch.no_grad():
                given = logprob(reference, better) - logprob(reference, other)
            margin = logprob(model, better) - logprob(model, other) - given
            loss = loss - torch.nn.functional.logsigmoid(0.5 * margin) / (len(rows) / 2)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        return float(loss.detach())

    step()
    metrics = trainer.train(1, rows)
    assert metrics["train/loss"] == pytest.approx(step(), abs=1e-6)
    assert metrics["preference/accuracy"] > 0.5, "the first step has moved it"
    assert_close({name: p.detach() for name, p in model.named_parameters()}, weights_of(trainer))


def test_rows_that_are_no_pairs_are_refused_with_the_remedy():
    rows = paired_episodes(2)
    for wrong in (rows[:3], [rows[1], rows[0]], [rows[0], rows[3]], episodes(2)):
        with pytest.raises(ValueError, match="choose the selection 'preference_pairs'"):
            trained(DirectPreference(), rows=wrong)


def test_after_a_restart_training_is_what_it_was_at_the_very_beginning():
    settings = {"minibatch_size": 8, "schedule": Warmup(steps=2, decay="linear")}
    trainer, first = trained(MaximumLikelihood(), iterations=3, restarts=True, **settings)
    begun = weights_of(trainer)
    trainer.restart()
    assert_close(weights_of(trainer), dict(tiny_model().named_parameters()))
    again = trainer.train(0, episodes(16))
    assert again == first
    assert all(torch.equal(tensor, begun[name]) for name, tensor in weights_of(trainer).items())
    trainer.restart()
    assert trainer.train(2, episodes(16))["train/learning_rate"] == first["train/learning_rate"]


@pytest.mark.parametrize("size", [1, 3])
def test_the_critics_update_does_not_depend_on_the_cut_either(size):
    whole, whole_metrics = trained(gae=Gae(), minibatch_size=8)
    cut, cut_metrics = trained(gae=Gae(), minibatch_size=8, sequences_per_micro_batch=size)
    assert_close(whole.critic_weights(), cut.critic_weights())
    assert cut_metrics["critic/loss"] == pytest.approx(whole_metrics["critic/loss"], abs=1e-6)
    assert whole_metrics["critic/loss"] > 0


def test_a_step_equals_a_plain_loop_over_sequences():
    """Against AdamW on a loss written down once more, sequence by sequence, without any batching."""
    trainer, metrics = trained(advantage_normalisation="none")
    model = tiny_model()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0)
    rows = episodes(16)
    total = sum(sum(row.trained) for row in rows)
    loss = torch.zeros(())
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids.tolist(), *row.response_ids.tolist()]])
        logprobs = (model(ids).logits / 0.8).log_softmax(-1)
        for offset, (token, is_trained) in enumerate(zip(row.response_ids, row.trained, strict=True)):
            if is_trained:
                at = len(row.prompt_ids) + offset - 1
                logprob = logprobs[0, at, token]
                loss = loss - float(row.advantages[offset]) * (logprob - logprob.detach()).exp() / total
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    assert metrics["train/loss"] == pytest.approx(float(loss), abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), abs=1e-5)
    assert_close({name: p.detach() for name, p in model.named_parameters()}, weights_of(trainer))


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

    whole = score()
    monkeypatch.setattr("treetune.models.logprobs.LOGITS_PER_CHUNK", 24 * 3)
    for one, other in zip(whole, score(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_saved_state_continues_bit_for_bit(tmp_path):
    rows = episodes(16, seed=1)
    settings = {"minibatch_size": 8, "schedule": Warmup(steps=3, decay="linear")}
    through, _ = trained(gae=Gae(), iterations=3, **settings)
    through.save(tmp_path)
    through.train(1, rows)
    resumed, _ = trained(gae=Gae(), iterations=3, **settings)
    resumed.train(1, episodes(16, seed=2))  # away from the saved state
    resumed.load(tmp_path)
    resumed.train(1, rows)
    for one, other in (
        (weights_of(through), weights_of(resumed)),
        (through.critic_weights(), resumed.critic_weights()),
    ):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_single_update_scores_the_tokens_that_it_trains_on_once_and_reports_the_gap():
    _, metrics = trained()
    model = PolicyModule(tiny_model())
    gaps = []
    for row in episodes(16):
        ids = torch.tensor([[*row.prompt_ids.tolist(), *row.response_ids.tolist()]])
        positions = torch.arange(len(row.prompt_ids) - 1, ids.shape[1] - 1)
        logprobs, _ = model(ModelInputs(ids, positions, torch.tensor(row.response_ids.tolist())), 0.8)
        gaps += [
            abs(float(p) - b)
            for p, b, t in zip(logprobs.detach(), row.behaviour_logprobs, row.trained, strict=True)
            if t
        ]
    assert metrics["engine/logprob_gap_max"] == pytest.approx(max(gaps), abs=1e-5)
    assert metrics["engine/logprob_gap_mean"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-5)
    assert metrics["train/kl"] == pytest.approx(0.0, abs=1e-6), "the policy is its reference before step 1"


def test_maximum_likelihood_needs_no_advantages_and_lowers_its_loss():
    trainer, first = trained(MaximumLikelihood(), iterations=20, learning_rate=1e-2)
    for iteration in range(1, 10):
        last = trainer.train(iteration, episodes(16))
    assert last["train/loss"] < first["train/loss"] - 0.1


def test_episodes_without_advantages_are_refused_with_the_remedy():
    import dataclasses

    trainer, _ = trained()
    without = [dataclasses.replace(row, advantages=None) for row in episodes(4)]
    with pytest.raises(ValueError, match="choose a credit"):
        trainer.train(0, without)


def test_score_gives_the_log_probs_that_the_canary_compares():
    trainer, _ = trained()
    [[first, second]] = trainer.score([((1, 2, 3), (4, 5))], temperature=1.0)
    model = tiny_model()
    model.load_state_dict(copy.deepcopy(trainer.weights()), strict=False)
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

    ranks = one_rank()
    results = []
    for load in (tiny_model, with_dropout):
        trainer = PolicyTrainer(
            Trainer(objective=ClippedPolicyGradient(), **BASE),
            load,
            ranks=ranks,
            seed=0,
            temperature=1.0,
            iterations=1,
        )
        trainer.train(0, episodes(8))
        results.append(weights_of(trainer))
    assert_close(*results)
