"""Where a minibatch's mean ratio to the old policy is above `ratio_threshold`, it has no loss, in value and
gradient, and the optimiser still takes its step."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.trainers.helpers import episodes, one_rank, tiny_model
from treetune.seeds import derived_random
from treetune.trainers.base import Trainer
from treetune.trainers.core import PolicyTrainer
from treetune.trainers.objectives.base import without_skipped
from treetune.trainers.objectives.mle import MaximumLikelihood
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient
from treetune.vocabulary import Metrics

RATE, EPS, EPOCHS, SIZE, KL, TEMPERATURE = 3e-3, 1e-4, 4, 8, 0.05, 0.8


def trained(threshold: float | None, **settings: object) -> tuple[dict[str, torch.Tensor], Metrics]:
    trainer = PolicyTrainer(
        Trainer(
            objective=ClippedPolicyGradient(kl_coef=KL, ratio_threshold=threshold),
            learning_rate=RATE,
            adam_eps=EPS,
            advantage_normalisation="none",
            **{"minibatch_size": SIZE, "epochs": EPOCHS} | settings,
        ),
        lambda: tiny_model().to(getattr(torch, str(settings.get("precision", "float32")))),
        ranks=one_rank(),
        seed=0,
        temperature=TEMPERATURE,
        iterations=1,
    )
    metrics = trainer.train(0, episodes(16))
    return {name: tensor.clone() for name, tensor in trainer.weights().items()}, metrics


def logprobs(model: torch.nn.Module) -> list[torch.Tensor]:
    """Of each episode's trained tokens."""
    found = []
    for row in episodes(16):
        ids = torch.tensor([[*row.prompt_ids.tolist(), *row.response_ids.tolist()]])
        of_all = (model(ids).logits[0] / TEMPERATURE).log_softmax(-1)
        at = [len(row.prompt_ids) + place - 1 for place, is_trained in enumerate(row.trained) if is_trained]
        found.append(torch.stack([of_all[place, ids[0, place + 1]] for place in at]))
    return found


@cache
def reference(threshold: float) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """A plain loop: the weights that it comes to, each step's ratio and each step's loss."""
    model = tiny_model()
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPS, weight_decay=0.0)
    old = [one.detach() for one in logprobs(model)]
    ratios, losses = [], []
    for epoch in range(EPOCHS):
        order = [(index,) for index in range(16)]
        derived_random(0, 0, "minibatches", epoch).shuffle(order)
        for start in range(0, 16, SIZE):
            now = logprobs(model)
            terms, of_tokens = [], []
            for (index,) in order[start : start + SIZE]:
                row = episodes(16)[index]
                advantages = torch.tensor(row.advantages[row.trained], dtype=torch.float32)
                away = now[index] - old[index]
                ratio = away.exp()
                k3 = (-away).exp() - 1 + away
                terms.append(
                    torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)) + KL * k3
                )
                of_tokens.append(ratio.detach())
            ratios.append(float(torch.cat(of_tokens).mean()))
            loss = torch.cat(terms).mean() * (0.0 if ratios[-1] > threshold else 1.0)
            losses.append(float(loss.detach()))
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
    return {name: p.detach() for name, p in model.named_parameters()}, ratios, losses


@pytest.mark.parametrize(
    "settings",
    [{}, {"sequences_per_micro_batch": 3}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}],
    ids=str,
)
def test_a_skipped_step_equals_a_plain_loop_with_no_loss(settings: dict[str, int]) -> None:
    threshold = 1.02
    expected, ratios, losses = reference(threshold)
    skipped = [ratio > threshold for ratio in ratios]
    assert 0 < sum(skipped) < len(skipped), ratios
    weights, metrics = trained(threshold, **settings)
    for name, tensor in expected.items():
        assert (tensor - weights[name]).abs().max() <= 1e-5, name
    assert metrics["train/skipped_by_ratio"] == sum(skipped) / len(skipped)
    assert metrics["train/ratio"] == pytest.approx(sum(ratios) / len(ratios), abs=1e-5)
    assert metrics["train/loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_a_bound_that_nothing_reaches_changes_no_bit() -> None:
    with_bound, metrics = trained(10.0)
    without, _ = trained(None)
    assert metrics["train/skipped_by_ratio"] == 0.0
    assert all((without[name] == tensor).all() for name, tensor in with_bound.items())
    assert max((without[name] - tensor).abs().max() for name, tensor in reference(1.02)[0].items()) > 1e-3


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_in_bfloat16_a_skipped_step_without_momentum_leaves_the_weights(zero_stage: int) -> None:
    settings = {
        "precision": "bfloat16",
        "zero_stage": zero_stage,
        "minibatch_size": None,
        "adam_betas": (0.0, 0.9),
    }
    once, _ = trained(None, **settings, epochs=1)
    skipped, metrics = trained(1.0001, **settings, epochs=2)
    moved, _ = trained(None, **settings, epochs=2)
    assert metrics["train/skipped_by_ratio"] == 0.5
    assert all((once[name] == tensor).all() for name, tensor in skipped.items())
    assert any((once[name] != tensor).any() for name, tensor in moved.items())


def test_a_ratio_that_is_no_number_leaves_no_loss_and_other_objectives_know_no_ratio() -> None:
    metrics = {"train/ratio": float("nan"), "train/loss": float("nan"), "train/clip_fraction": 0.5}
    found = without_skipped(ClippedPolicyGradient(ratio_threshold=10.0), metrics)
    assert (found["train/loss"], found["train/skipped_by_ratio"], found["train/clip_fraction"]) == (0, 1, 0.5)
    assert without_skipped(MaximumLikelihood(), {"train/loss": 2.0}) == {"train/loss": 2.0}
