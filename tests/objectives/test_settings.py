"""Switches of objectives in the trainer: entropy, KL, groups without spread, and ratios that are too large.

These tests promise that each switch changes an update as its formula says, and none if nothing reaches it.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from tests.support.tiny_trainer import (
    are_same,
    assert_close,
    episodes,
    plain_step,
    row_logprobs,
    tiny_model,
    trained,
    weights_of,
)
from treetune.objectives.mle import MaximumLikelihood
from treetune.objectives.policy_gradient import ClippedPolicyGradient, without_skipped
from treetune.seeds import derived_random
from treetune.trainer.base import EntropyTarget, Trainer
from treetune.trainer.update import EntropyCoefficient
from treetune.vocabulary import Episode


def without_advantage(rows: list[Episode]) -> list[Episode]:
    return [dataclasses.replace(row, advantages=(0.0,) * len(row.response_ids)) for row in rows]


# Entropy


def mean_entropy(rows: list[Episode], model: torch.nn.Module) -> torch.Tensor:
    """Returns the mean entropy over trained tokens alone."""
    entropies = []
    for row in rows:
        logprobs_TV = row_logprobs(model, row)[0]
        entropies.append(-(logprobs_TV.exp() * logprobs_TV).sum(-1)[torch.tensor(row.trained)])
    return torch.cat(entropies).mean()


@pytest.mark.parametrize("coefficient", [0.3, -0.3])
def test_the_entropy_of_trained_tokens_moves_with_the_sign_of_the_coefficient(coefficient):
    rows = without_advantage(episodes(16))
    trainer, metrics = trained(ClippedPolicyGradient(entropy_coef=coefficient), rows, measure_kl=False)
    model = tiny_model()
    before = mean_entropy(rows, model)
    assert metrics["train/entropy"] == pytest.approx(float(before.detach()), abs=1e-5)
    assert metrics["train/loss"] == pytest.approx(-coefficient * float(before.detach()), abs=1e-5)
    plain_step(model, -coefficient * before)
    assert_close(model, trainer)
    assert (float(mean_entropy(rows, model).detach()) > float(before.detach())) is (coefficient > 0)


def test_the_coefficient_rises_while_entropy_is_too_low_and_stays_within_its_bounds():
    coefficient = EntropyCoefficient(0.0, EntropyTarget(target=0.5, rate=0.1, lowest=0.0, highest=0.03))
    coefficients = []
    for entropy in (0.4, 0.4, 0.1, 0.9, 0.9):
        coefficient.observe(entropy)
        coefficients.append(coefficient.value)
    assert coefficients == pytest.approx([0.01, 0.02, 0.03, 0.0, 0.0])


def test_a_resumed_run_goes_on_with_the_coefficient_that_it_had(tmp_path):
    settings = {"entropy_target": EntropyTarget(target=10.0, rate=0.01), "minibatch_size": 4, "iterations": 2}
    through, first = trained(**settings)
    assert 0 < first["train/entropy_coef"] < through.entropy_coef.value
    through.save(tmp_path)
    expected_metrics = through.train(1, episodes(16))
    resumed, _ = trained(**settings)
    resumed.train(1, episodes(16))
    resumed.load(tmp_path)
    assert resumed.train(1, episodes(16)) == expected_metrics
    (tmp_path / "entropy.json").unlink()
    with pytest.raises(RuntimeError, match="written without entropy_target"):
        resumed.load(tmp_path)


def test_an_impossible_entropy_target_is_refused():
    with pytest.raises(ValueError, match="must be below highest"):
        EntropyTarget(target=0.5, lowest=0.1, highest=0.1)
    for objective, message in (
        (MaximumLikelihood(), "this objective has none"),
        (ClippedPolicyGradient(entropy_coef=-0.1), "not between its lowest, 0, and its highest, 0.1"),
    ):
        with pytest.raises(ValueError, match=message):
            Trainer(objective=objective, learning_rate=1e-3, entropy_target=EntropyTarget(target=0.2))


# Groups without spread


def test_without_advantages_no_step_is_taken_where_the_guard_is_on():
    rows = without_advantage(episodes(16))
    guarded, _ = trained(iterations=2, skip_without_advantage=True, weight_decay=0.1)
    before = weights_of(guarded)
    metrics = guarded.train(1, rows)
    assert (metrics["train/steps"], metrics["train/skipped_steps"]) == (0, 1)
    assert are_same(guarded, before)
    moved, _ = trained(iterations=2, weight_decay=0.1)
    moved.train(1, rows)
    assert not are_same(moved, before)


def test_the_guard_sees_groups_without_spread_behind_whitening_and_penalties():
    """Advantages that credit left at 0 are no longer 0 once others are moved beside them."""
    flat = without_advantage(episodes(8))
    rows = [*flat, *(dataclasses.replace(row, group=f"q{i}") for i, row in enumerate(episodes(8, seed=3)))]
    objective = ClippedPolicyGradient(kl_coef=0.1, kl_placement="advantage")
    settings = {"skip_without_advantage": True, "advantage_normalisation": "whiten", "minibatch_size": 1}
    _, metrics = trained(objective, rows, **settings)
    assert (metrics["train/steps"], metrics["train/skipped_steps"]) == (8, 8)


# KL


def test_kl_in_the_advantage_subtracts_the_estimate_of_each_token():
    """After one step the policy has left its reference; the second step's advantages know it."""
    rows, coefficient = episodes(16), 0.7
    objective = ClippedPolicyGradient(kl_coef=coefficient, kl_estimator="k1", kl_placement="advantage")
    trainer, _ = trained(objective, iterations=2)
    policy = tiny_model()
    policy.load_state_dict(weights_of(trainer), strict=False)
    penalised = []
    with torch.no_grad():
        for row in rows:
            log_ratios_T = row_logprobs(policy, row)[1] - row_logprobs(tiny_model(), row)[1]
            advantages = [
                a - coefficient * d for a, d in zip(row.advantages, log_ratios_T.tolist(), strict=True)
            ]
            penalised.append(dataclasses.replace(row, advantages=tuple(advantages)))
    plain, _ = trained(ClippedPolicyGradient(kl_coef=coefficient, kl_placement="advantage"), iterations=2)
    plain.settings = dataclasses.replace(plain.settings, objective=ClippedPolicyGradient())
    plain.train(1, penalised)
    trainer.train(1, rows)
    assert_close(plain, trainer)


# A minibatch whose mean ratio to the old policy is above `ratio_threshold` has no loss, in value and
# gradient, and the optimiser still takes its step.

RATE, EPOCHS, SIZE, KL, THRESHOLD = 3e-3, 4, 8, 0.05, 1.02


def train_with_threshold(threshold: float | None, **settings: object):
    objective = ClippedPolicyGradient(kl_coef=KL, ratio_threshold=threshold)
    trainer_settings = {"learning_rate": RATE, "minibatch_size": SIZE, "epochs": EPOCHS} | settings
    return trained(objective, advantage_normalisation="none", **trainer_settings)


@cache
def reference() -> tuple[torch.nn.Module, list[float], list[float]]:
    """Trains in a plain loop; returns the model, and the ratio and loss of each step."""
    model, rows = tiny_model(), episodes(16)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-4, weight_decay=0.0)

    def logprobs(row: Episode) -> torch.Tensor:
        return row_logprobs(model, row)[1][torch.tensor(row.trained)]

    old = [logprobs(row).detach() for row in rows]
    ratios, losses = [], []
    for epoch in range(EPOCHS):
        order = [(index,) for index in range(16)]
        derived_random(0, 0, "minibatches", epoch).shuffle(order)
        for start in range(0, 16, SIZE):
            terms, token_ratios = [], []
            for (index,) in order[start : start + SIZE]:
                advantages = torch.tensor(rows[index].advantages[rows[index].trained], dtype=torch.float32)
                log_ratio = logprobs(rows[index]) - old[index]
                ratio, k3 = log_ratio.exp(), (-log_ratio).exp() - 1 + log_ratio
                terms.append(
                    torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)) + KL * k3
                )
                token_ratios.append(ratio.detach())
            ratios.append(float(torch.cat(token_ratios).mean()))
            loss = torch.cat(terms).mean() * (0.0 if ratios[-1] > THRESHOLD else 1.0)
            losses.append(float(loss.detach()))
            plain_step(model, loss, optimiser)
    return model, ratios, losses


@pytest.mark.parametrize(
    "settings",
    [{}, {"sequences_per_micro_batch": 3}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}],
    ids=str,
)
def test_a_skipped_step_equals_a_plain_loop_with_no_loss(settings: dict[str, int]) -> None:
    model, ratios, losses = reference()
    skipped = [ratio > THRESHOLD for ratio in ratios]
    assert 0 < sum(skipped) < len(skipped), ratios
    trainer, metrics = train_with_threshold(THRESHOLD, **settings)
    assert_close(model, trainer, atol=1e-5)
    assert metrics["train/skipped_by_ratio"] == sum(skipped) / len(skipped)
    assert metrics["train/ratio"] == pytest.approx(sum(ratios) / len(ratios), abs=1e-5)
    assert metrics["train/loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_a_bound_that_nothing_reaches_changes_no_bit() -> None:
    (with_bound, metrics), (without, _) = train_with_threshold(10.0), train_with_threshold(None)
    assert metrics["train/skipped_by_ratio"] == 0.0
    assert are_same(with_bound, without)
    with pytest.raises(AssertionError):
        assert_close(reference()[0], without, atol=1e-3)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_in_bfloat16_a_skipped_step_without_momentum_leaves_the_weights(zero_stage: int) -> None:
    settings = {"precision": "bfloat16", "zero_stage": zero_stage, "minibatch_size": None}
    settings |= {"adam_betas": (0.0, 0.9)}
    once, _ = train_with_threshold(None, **settings, epochs=1)
    skipped, metrics = train_with_threshold(1.0001, **settings, epochs=2)
    moved, _ = train_with_threshold(None, **settings, epochs=2)
    assert metrics["train/skipped_by_ratio"] == 0.5
    assert are_same(once, skipped) and not are_same(once, moved)


def test_a_ratio_that_is_not_a_number_leaves_no_loss_and_other_objectives_have_no_ratio() -> None:
    metrics = {"train/ratio": float("nan"), "train/loss": float("nan"), "train/clip_fraction": 0.5}
    metrics_without_loss = without_skipped(ClippedPolicyGradient(ratio_threshold=10.0), metrics)
    assert (
        metrics_without_loss["train/loss"],
        metrics_without_loss["train/skipped_by_ratio"],
        metrics_without_loss["train/clip_fraction"],
    ) == (0, 1, 0.5)
    assert without_skipped(MaximumLikelihood(), {"train/loss": 2.0}) == {"train/loss": 2.0}
