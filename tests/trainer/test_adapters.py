"""LoRA in the trainer.

These tests promise that the update is that of a plain loop over peft's own model, and that a saved state
continues bit for bit.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_trainer import (
    are_same,
    assert_close,
    episodes,
    plain_step,
    policy_trainer,
    row_logprobs,
    tiny_model,
)
from treetune.models.lora import Lora
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.trainer.base import Warmup
from treetune.trainer.core import PolicyTrainer


def make_trainer(**settings: object) -> PolicyTrainer:
    return policy_trainer(
        ClippedPolicyGradient(kl_coef=0.1, kl_reduction="token_mean"),
        **{"learning_rate": 1e-2, "lora": Lora(rank=4, alpha=8.0), "iterations": 3} | settings,
    )


def test_two_steps_equal_a_plain_loop_with_peft_and_a_reference_of_its_own() -> None:
    from peft import LoraConfig, get_peft_model

    ours, rows = make_trainer(), episodes(16)
    start = {name: weight.clone() for name, weight in ours.adapters().items()}
    for iteration in range(2):
        metrics = ours.train(iteration, rows)
    assert metrics["train/kl"] > 0, "the second step begins away from the reference"

    reference = tiny_model()
    model = get_peft_model(
        tiny_model(), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(start[name.replace(".default.", ".")])
    adapters = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(adapters, lr=1e-2, eps=1e-4, weight_decay=0.0)
    total = sum(sum(row.trained) for row in rows)
    for _ in range(2):
        loss = torch.zeros(())
        for row in rows:
            new, old = row_logprobs(model, row)[1], row_logprobs(reference, row)[1].detach()
            gap = old - new
            per_token = -torch.tensor(row.advantages.tolist()) * (new - new.detach()).exp()
            per_token = per_token + 0.1 * (gap.exp() - gap - 1)
            loss = loss + (torch.tensor(row.trained) * per_token).sum() / total
        norm = plain_step(model, loss, optimiser)
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(norm, abs=1e-5)
    trained = {n.replace(".default.", "."): w for n, w in model.named_parameters() if "lora_" in n}
    assert_close(trained, ours.adapters())
    assert_close(model.merge_and_unload().state_dict(), ours)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_sharding_changes_no_adapter_and_a_saved_state_continues_bit_for_bit(tmp_path, zero_stage) -> None:
    plain, sharded = make_trainer(), make_trainer(zero_stage=zero_stage)
    for lora_trainer in (plain, sharded):
        lora_trainer.train(0, episodes(16))
    assert_close(plain.adapters(), sharded.adapters())
    settings = {"zero_stage": zero_stage, "schedule": Warmup(steps=2), "minibatch_size": 8}
    through, resumed = make_trainer(**settings), make_trainer(**settings)
    through.train(0, episodes(16))
    through.save(tmp_path)
    resumed.load(tmp_path)
    for lora_trainer in (through, resumed):
        lora_trainer.train(1, episodes(16, seed=1))
    assert are_same(through, resumed)


def test_the_optimiser_holds_the_adapters_alone() -> None:
    lora_trainer = make_trainer()
    parameters = [p for group in lora_trainer.policy.engine.optimizer.param_groups for p in group["params"]]
    assert sum(p.numel() for p in parameters) == sum(
        weight.numel() for weight in lora_trainer.adapters().values()
    )


def test_a_reference_that_is_the_policy_itself_is_not_offloaded() -> None:
    with pytest.raises(ValueError, match="nothing to offload"):
        make_trainer(offload_reference=True)
