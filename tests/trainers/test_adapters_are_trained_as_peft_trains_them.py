"""LoRA in the trainer: the update of a plain loop over peft's own model, and a state that continues."""

from __future__ import annotations

import pytest
import torch

from tests.trainers.helpers import episodes, one_rank, tiny_model
from treetune.models.lora import Lora
from treetune.trainers.base import Trainer, Warmup
from treetune.trainers.core import PolicyTrainer
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient

LORA = Lora(rank=4, alpha=8.0)


def trainer(**settings: object) -> PolicyTrainer:
    return PolicyTrainer(
        Trainer(
            objective=ClippedPolicyGradient(kl_coef=0.1, kl_reduction="token_mean"),
            **{"learning_rate": 1e-2, "adam_eps": 1e-4, "lora": LORA} | settings,  # type: ignore[arg-type]
        ),
        tiny_model,
        ranks=one_rank(),
        seed=0,
        temperature=0.8,
        iterations=3,
    )


def test_two_steps_equal_a_plain_loop_with_peft_and_a_reference_of_its_own() -> None:
    from peft import LoraConfig, get_peft_model

    ours = trainer()
    start = {name: weight.clone() for name, weight in ours.adapters().items()}
    rows = episodes(16)
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
            ids = torch.tensor([[*row.prompt_ids.tolist(), *row.response_ids.tolist()]])
            places = slice(len(row.prompt_ids) - 1, -1)
            chosen = torch.tensor(row.response_ids.tolist())[:, None]
            new, old = (
                (of(ids).logits[0, places] / 0.8).log_softmax(-1).gather(1, chosen)[:, 0]
                for of in (model, reference)
            )
            gap = old.detach() - new
            per_token = -torch.tensor(row.advantages.tolist()) * (new - new.detach()).exp()
            loss = loss + (torch.tensor(row.trained) * per_token).sum() / total
            loss = loss + (torch.tensor(row.trained) * 0.1 * (gap.exp() - gap - 1)).sum() / total
        optimiser.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(adapters, 1.0)
        optimiser.step()
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), abs=1e-5)
    trained = ours.adapters()
    for name, weight in model.named_parameters():
        if "lora_" in name:
            assert (trained[name.replace(".default.", ".")] - weight).abs().max() <= 1e-6, name
    merged = model.merge_and_unload().state_dict()
    assert ours.weights().keys() == merged.keys()
    assert all((merged[name] - weight).abs().max() <= 1e-6 for name, weight in ours.weights().items())


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_sharding_changes_no_adapter_and_a_saved_state_continues_bit_for_bit(tmp_path, zero_stage) -> None:
    plain = trainer()
    plain.train(0, episodes(16))
    settings = {"zero_stage": zero_stage, "schedule": Warmup(steps=2), "minibatch_size": 8}
    sharded = trainer(zero_stage=zero_stage)
    sharded.train(0, episodes(16))
    for name, weight in plain.adapters().items():
        assert (sharded.adapters()[name] - weight).abs().max() <= 1e-6, name
    through = trainer(**settings)
    through.train(0, episodes(16))
    through.save(tmp_path)
    through.train(1, episodes(16, seed=1))
    resumed = trainer(**settings)
    resumed.load(tmp_path)
    resumed.train(1, episodes(16, seed=1))
    found = resumed.weights()
    assert all(torch.equal(weight, found[name]) for name, weight in through.weights().items())


def test_the_optimiser_holds_the_adapters_alone() -> None:
    held = [p for group in trainer().policy.engine.optimizer.param_groups for p in group["params"]]
    wanted = sum(weight.numel() for weight in trainer().adapters().values())
    assert sum(p.numel() for p in held) == wanted


def test_a_reference_that_is_the_policy_itself_is_not_offloaded() -> None:
    with pytest.raises(ValueError, match="nothing to offload"):
        trainer(offload_reference=True)
