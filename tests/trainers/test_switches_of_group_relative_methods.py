"""Where KL, entropy and groups without spread meet the trainer."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.trainers.helpers import episodes, tiny_model
from tests.trainers.test_update_in_one_process import assert_close, trained, weights_of
from treetune.models.logprobs import ModelInputs, PolicyModule
from treetune.trainers.base import EntropyTarget, Trainer
from treetune.trainers.objectives.mle import MaximumLikelihood
from treetune.trainers.objectives.policy_gradient import (
    ClippedImportance,
    ClippedPolicyGradient,
    SequencePolicyGradient,
)
from treetune.trainers.update import EntropyCoefficient
from treetune.vocabulary import Episode


def without_advantage(rows: list[Episode]) -> list[Episode]:
    return [dataclasses.replace(row, advantages=(0.0,) * len(row.response_ids)) for row in rows]


def mean_entropy(rows: list[Episode], model: torch.nn.Module) -> torch.Tensor:
    """Over trained tokens alone, at the trainer's temperature."""
    found = []
    for row in rows:
        logits = model(torch.tensor([[*row.prompt_ids.tolist(), *row.response_ids.tolist()]])).logits
        logprobs = (logits[0, len(row.prompt_ids) - 1 : -1] / 0.8).log_softmax(-1)
        found.append(-(logprobs.exp() * logprobs).sum(-1)[torch.tensor(row.trained)])
    return torch.cat(found).mean()


@pytest.mark.parametrize("coefficient", [0.3, -0.3])
def test_the_entropy_of_trained_tokens_goes_where_the_coefficients_sign_says(coefficient):
    rows = without_advantage(episodes(16))
    objective = ClippedPolicyGradient(entropy_coef=coefficient)
    trainer, metrics = trained(objective, rows=rows, measure_kl=False)
    model = tiny_model()
    before = mean_entropy(rows, model)
    assert metrics["train/entropy"] == pytest.approx(float(before.detach()), abs=1e-5)
    assert metrics["train/loss"] == pytest.approx(-coefficient * float(before.detach()), abs=1e-5)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0)
    (-coefficient * before).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    assert_close({name: p.detach() for name, p in model.named_parameters()}, weights_of(trainer))
    assert (float(mean_entropy(rows, model).detach()) > float(before.detach())) is (coefficient > 0)


def test_the_coefficient_rises_while_entropy_lacks_and_stays_within_its_bounds():
    coefficient = EntropyCoefficient(0.0, EntropyTarget(target=0.5, rate=0.1, lowest=0.0, highest=0.03))
    seen = []
    for entropy in (0.4, 0.4, 0.1, 0.9, 0.9):
        coefficient.observe(entropy)
        seen.append(coefficient.value)
    assert seen == pytest.approx([0.01, 0.02, 0.03, 0.0, 0.0])
    with pytest.raises(ValueError, match="must be below highest"):
        EntropyTarget(target=0.5, lowest=0.1, highest=0.1)


def test_a_resumed_run_goes_on_with_the_coefficient_that_it_had(tmp_path):
    settings = {"entropy_target": EntropyTarget(target=10.0, rate=0.01), "minibatch_size": 4}
    through, first = trained(iterations=2, **settings)
    assert 0 < first["train/entropy_coef"] < through.entropy.value
    through.save(tmp_path)
    again = through.train(1, episodes(16))
    resumed, _ = trained(iterations=2, **settings)
    resumed.train(1, episodes(16))
    resumed.load(tmp_path)
    assert resumed.train(1, episodes(16)) == again
    (tmp_path / "entropy.json").unlink()
    with pytest.raises(RuntimeError, match="written without entropy_target"):
        resumed.load(tmp_path)


def test_without_advantages_no_step_is_taken_where_the_guard_is_on():
    rows = without_advantage(episodes(16))
    settings = {"iterations": 2, "skip_without_advantage": True, "weight_decay": 0.1}
    guarded, _ = trained(**settings)
    before = weights_of(guarded)
    metrics = guarded.train(1, rows)
    assert (metrics["train/steps"], metrics["train/skipped_steps"]) == (0, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(guarded).items())

    moved, _ = trained(**settings | {"skip_without_advantage": False})
    moved.train(1, rows)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights_of(moved).items())


def test_kl_in_the_advantage_takes_each_tokens_own_estimate():
    """After one step the policy has left its reference; the second step's advantages know it."""
    rows, coefficient = episodes(16), 0.7
    objective = ClippedPolicyGradient(kl_coef=coefficient, kl_estimator="k1", kl_placement="advantage")
    trainer, _ = trained(objective, iterations=2)
    policy, reference = trainer.policy.module, PolicyModule(tiny_model())
    penalised = []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([[*row.prompt_ids.tolist(), *row.response_ids.tolist()]])
            positions = torch.arange(len(row.prompt_ids) - 1, ids.shape[1] - 1)
            inputs = ModelInputs(ids, positions, torch.tensor(row.response_ids.tolist()))
            apart = policy(inputs, 0.8)[0] - reference(inputs, 0.8)[0]
            taken = [a - coefficient * d for a, d in zip(row.advantages, apart.tolist(), strict=True)]
            penalised.append(dataclasses.replace(row, advantages=tuple(taken)))
    plain, _ = trained(ClippedPolicyGradient(kl_coef=coefficient, kl_placement="advantage"), iterations=2)
    plain.settings = dataclasses.replace(plain.settings, objective=ClippedPolicyGradient())
    plain.train(1, penalised)
    trainer.train(1, rows)
    assert_close(weights_of(plain), weights_of(trainer))


@pytest.mark.parametrize(
    "objective",
    [
        SequencePolicyGradient(clip_low=0.01, clip_high=0.01),
        ClippedImportance(),
        ClippedPolicyGradient(aggregation="constant", constant_length=20, dual_clip=3.0),
        ClippedPolicyGradient(kl_coef=0.1, kl_estimator="k1", kl_placement="reward"),
    ],
)
def test_the_cut_does_not_change_the_update(objective):
    settings = {"minibatch_size": 8, "epochs": 2, "measure_kl": False}
    whole, whole_metrics = trained(objective, **settings)
    cut, cut_metrics = trained(objective, **settings, layout="packed", sequences_per_micro_batch=3)
    assert_close(weights_of(whole), weights_of(cut))
    for name in ("train/loss", "train/grad_norm", "train/entropy", "train/clip_fraction", "train/ratio"):
        assert math.isclose(cut_metrics[name], whole_metrics[name], abs_tol=2e-5), name


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (MaximumLikelihood(), "this objective has none"),
        (ClippedPolicyGradient(entropy_coef=-0.1), "not between its lowest, 0, and its highest, 0.1"),
    ],
)
def test_an_entropy_target_that_can_not_be_held_is_refused(objective, message):
    with pytest.raises(ValueError, match=message):
        Trainer(objective=objective, learning_rate=1e-3, entropy_target=EntropyTarget(target=0.2))


def test_the_guard_sees_groups_without_spread_behind_whitening_and_penalties():
    """Advantages that credit left at 0 are no longer 0 once others are moved beside them."""
    flat = without_advantage(episodes(8))
    rows = [*flat, *(dataclasses.replace(row, group=f"q{i}") for i, row in enumerate(episodes(8, seed=3)))]
    objective = ClippedPolicyGradient(kl_coef=0.1, kl_placement="advantage")
    settings = {"skip_without_advantage": True, "advantage_normalisation": "whiten", "minibatch_size": 1}
    _, metrics = trained(objective, rows=rows, **settings)
    assert (metrics["train/steps"], metrics["train/skipped_steps"]) == (8, 8)
