"""Where entropy, KL, groups without spread and ratios that are too large meet the trainer."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from tests.trainer.helpers import (
    are_same,
    assert_close,
    episodes,
    plain_step,
    row_logprobs,
    tiny_model,
    trained,
    weights_of,
)
from treetune.objectives.base import without_skipped
from treetune.objectives.mle import MaximumLikelihood
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.seeds import derived_random
from treetune.trainer.base import EntropyTarget, Trainer
from treetune.trainer.update import EntropyCoefficient
from treetune.vocabulary import Episode


def without_advantage(rows: list[Episode]) -> list[Episode]:
    return [dataclasses.replace(row, advantages=(0.0,) * len(row.response_ids)) for row in rows]


# Entropy


def mean_entropy(rows: list[Episode], model: torch.nn.Module) -> torch.Tensor:
    """Over trained tokens alone."""
    found = []
    for row in rows:
        logprobs_TV = row_logprobs(model, row)[0]
        found.append(-(logprobs_TV.exp() * logprobs_TV).sum(-1)[torch.tensor(row.trained)])
    return torch.cat(found).mean()


@pytest.mark.parametrize("coefficient", [0.3, -0.3])
def test_the_entropy_of_trained_tokens_goes_where_the_coefficients_sign_says(coefficient):
    rows = without_advantage(episodes(16))
    trainer, metrics = trained(ClippedPolicyGradient(entropy_coef=coefficient), rows, measure_kl=False)
    model = tiny_model()
    before = mean_entropy(rows, model)
    assert metrics["train/entropy"] == pytest.approx(float(before.detach()), abs=1e-5)
    assert metrics["train/loss"] == pytest.approx(-coefficient * float(before.detach()), abs=1e-5)
    plain_step(model, -coefficient * before)
    assert_close(model, trainer)
    assert (float(mean_entropy(rows, model).detach()) > float(before.detach())) is (coefficient > 0)


def test_the_coefficient_rises_while_entropy_lacks_and_stays_within_its_bounds():
    coefficient = EntropyCoefficient(0.0, EntropyTarget(target=0.5, rate=0.1, lowest=0.0, highest=0.03))
    seen = []
    for entropy in (0.4, 0.4, 0.1, 0.9, 0.9):
        coefficient.observe(entropy)
        seen.append(coefficient.value)
    assert seen == pytest.approx([0.01, 0.02, 0.03, 0.0, 0.0])


def test_a_resumed_run_goes_on_with_the_coefficient_that_it_had(tmp_path):
    settings = {"entropy_target": EntropyTarget(target=10.0, rate=0.01), "minibatch_size": 4, "iterations": 2}
    through, first = trained(**settings)
    assert 0 < first["train/entropy_coef"] < through.entropy.value
    through.save(tmp_path)
    again = through.train(1, episodes(16))
    resumed, _ = trained(**settings)
    resumed.train(1, episodes(16))
    resumed.load(tmp_path)
    assert resumed.train(1, episodes(16)) == again
    (tmp_path / "entropy.json").unlink()
    with pytest.raises(RuntimeError, match="written without entropy_target"):
        resumed.load(tmp_path)


def test_an_entropy_target_that_can_not_be_held_is_refused():
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


def test_kl_in_the_advantage_takes_each_tokens_own_estimate():
    """After one step the policy has left its reference; the second step's advantages know it."""
    rows, coefficient = episodes(16), 0.7
    objective = ClippedPolicyGradient(kl_coef=coefficient, kl_estimator="k1", kl_placement="advantage")
    trainer, _ = trained(objective, iterations=2)
    policy = tiny_model()
    policy.load_state_dict(weights_of(trainer), strict=False)
    penalised = []
    with torch.no_grad():
        for row in rows:
            apart_T = row_logprobs(policy, row)[1] - row_logprobs(tiny_model(), row)[1]
            taken = [a - coefficient * d for a, d in zip(row.advantages, apart_T.tolist(), strict=True)]
            penalised.append(dataclasses.replace(row, advantages=tuple(taken)))
    plain, _ = trained(ClippedPolicyGradient(kl_coef=coefficient, kl_placement="advantage"), iterations=2)
    plain.settings = dataclasses.replace(plain.settings, objective=ClippedPolicyGradient())
    plain.train(1, penalised)
    trainer.train(1, rows)
    assert_close(plain, trainer)


# A minibatch whose mean ratio to the old policy is above `ratio_threshold` has no loss, in value and
# gradient, and the optimiser still takes its step.

RATE, EPOCHS, SIZE, KL, THRESHOLD = 3e-3, 4, 8, 0.05, 1.02


def bounded(threshold: float | None, **settings: object):
    objective = ClippedPolicyGradient(kl_coef=KL, ratio_threshold=threshold)
    given = {"learning_rate": RATE, "minibatch_size": SIZE, "epochs": EPOCHS} | settings
    return trained(objective, advantage_normalisation="none", **given)


@cache
def reference() -> tuple[torch.nn.Module, list[float], list[float]]:
    """A plain loop: the model that it comes to, each step's ratio and each step's loss."""
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
            terms, of_tokens = [], []
            for (index,) in order[start : start + SIZE]:
                advantages = torch.tensor(rows[index].advantages[rows[index].trained], dtype=torch.float32)
                away = logprobs(rows[index]) - old[index]
                ratio, k3 = away.exp(), (-away).exp() - 1 + away
                terms.append(
                    torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)) + KL * k3
                )
                of_tokens.append(ratio.detach())
            ratios.append(float(torch.cat(of_tokens).mean()))
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
    trainer, metrics = bounded(THRESHOLD, **settings)
    assert_close(model, trainer, atol=1e-5)
    assert metrics["train/skipped_by_ratio"] == sum(skipped) / len(skipped)
    assert metrics["train/ratio"] == pytest.approx(sum(ratios) / len(ratios), abs=1e-5)
    assert metrics["train/loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_a_bound_that_nothing_reaches_changes_no_bit() -> None:
    (with_bound, metrics), (without, _) = bounded(10.0), bounded(None)
    assert metrics["train/skipped_by_ratio"] == 0.0
    assert are_same(with_bound, without)
    with pytest.raises(AssertionError):
        assert_close(reference()[0], without, atol=1e-3)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_in_bfloat16_a_skipped_step_without_momentum_leaves_the_weights(zero_stage: int) -> None:
    settings = {"precision": "bfloat16", "zero_stage": zero_stage, "minibatch_size": None}
    settings |= {"adam_betas": (0.0, 0.9)}
    once, _ = bounded(None, **settings, epochs=1)
    skipped, metrics = bounded(1.0001, **settings, epochs=2)
    moved, _ = bounded(None, **settings, epochs=2)
    assert metrics["train/skipped_by_ratio"] == 0.5
    assert are_same(once, skipped) and not are_same(once, moved)


def test_a_ratio_that_is_no_number_leaves_no_loss_and_other_objectives_know_no_ratio() -> None:
    metrics = {"train/ratio": float("nan"), "train/loss": float("nan"), "train/clip_fraction": 0.5}
    found = without_skipped(ClippedPolicyGradient(ratio_threshold=10.0), metrics)
    assert (found["train/loss"], found["train/skipped_by_ratio"], found["train/clip_fraction"]) == (0, 1, 0.5)
    assert without_skipped(MaximumLikelihood(), {"train/loss": 2.0}) == {"train/loss": 2.0}
