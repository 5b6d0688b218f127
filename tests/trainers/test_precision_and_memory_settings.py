"""Settings that trade memory for speed train the same model, as far as a CPU can show."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from tests.trainers.helpers import episodes, one_rank, tiny_model
from treetune.models.logprobs import ModelInputs, PolicyModule
from treetune.trainers.base import Trainer
from treetune.trainers.core import PolicyTrainer
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient
from treetune.vocabulary import Episode

BASE = {"learning_rate": 1e-3, "adam_eps": 1e-4, "minibatch_size": 8}
BF16_ROUNDING = 2e-2
"""Weights of this model are below 1, where bfloat16 has 8 bits."""


def trained(rows: list[Episode] | None = None, **settings: object) -> tuple[PolicyTrainer, dict[str, float]]:
    dtype = getattr(torch, str(settings.get("precision", "float32")))
    trainer = PolicyTrainer(
        Trainer(objective=ClippedPolicyGradient(), **BASE | settings),
        lambda: tiny_model().to(dtype),
        ranks=one_rank(),
        seed=0,
        temperature=1.0,
        iterations=1,
    )
    return trainer, trainer.train(0, rows or episodes(16))


@pytest.fixture(scope="module")
def plain() -> tuple[PolicyTrainer, dict[str, float]]:
    return trained()


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_bfloat16_trains_close_to_float32(plain, zero_stage):
    trainer, metrics = trained(precision="bfloat16", zero_stage=zero_stage)
    assert metrics["train/grad_norm"] == pytest.approx(plain[1]["train/grad_norm"], rel=0.05)
    assert metrics["train/loss"] == pytest.approx(plain[1]["train/loss"], abs=0.02)
    start = tiny_model().state_dict()
    moved = 0
    for name, weight in plain[0].weights().items():
        assert (trainer.weights()[name].float() - weight).abs().max() < BF16_ROUNDING, name
        moved += int((weight != start[name]).any())
    assert moved == len(plain[0].weights())


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_many_micro_batches_in_bfloat16_add_up_to_the_gradient_of_one(zero_stage):
    """Added up in bfloat16, the last of 256 alike would hardly count."""
    rows = [dataclasses.replace(row, trajectory=f"p#{i}") for i in range(256) for row in episodes(1)]
    settings = {"precision": "bfloat16", "minibatch_size": None, "zero_stage": zero_stage}
    _, whole = trained(rows, **settings)
    _, cut = trained(rows, sequences_per_micro_batch=1, **settings)
    assert cut["train/grad_norm"] == pytest.approx(whole["train/grad_norm"], rel=0.01)


def test_bfloat16_without_sharding_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="set zero_stage to 1 or more"):
        Trainer(objective=ClippedPolicyGradient(), learning_rate=1e-3, precision="bfloat16")


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True},
        {"zero_stage": 1},
        {"zero_stage": 2, "offload_optimizer": True},
        {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True},
        {"offload_reference": True},
    ],
    ids=lambda settings: "-".join(map(str, settings)),
)
def test_settings_that_save_memory_do_not_change_the_update(plain, settings):
    trainer, metrics = trained(**settings)
    assert metrics["train/grad_norm"] == pytest.approx(plain[1]["train/grad_norm"], abs=1e-5)
    for name, weight in plain[0].weights().items():
        assert (trainer.weights()[name] - weight).abs().max() <= 1e-6, name


def test_on_a_gpu_adam_is_fused_and_heads_run_on_larger_chunks(monkeypatch):
    from treetune.models import logprobs
    from treetune.trainers.deepspeed_model import _config

    def adam(device: str, **settings: object) -> dict[str, object]:
        trainer = Trainer(objective=ClippedPolicyGradient(), **BASE | settings)
        ranks = dataclasses.replace(one_rank(), device=torch.device(device))
        return _config(trainer, ranks)["optimizer"]["params"]

    own = {"lr", "betas", "eps", "weight_decay", "torch_adam"}
    assert set(adam("cpu")) == own
    assert adam("cuda") == {**adam("cpu"), "fused": True}
    offloaded = adam("cuda", zero_stage=2, offload_optimizer=True)
    assert set(offloaded) == own and not offloaded["torch_adam"], "DeepSpeed's own, on the CPU"

    def chunks(is_cuda: bool) -> int:
        seen = []
        module = PolicyModule(tiny_model())
        monkeypatch.setattr(logprobs, "_hidden", lambda backbone, inputs: None)
        monkeypatch.setattr(module, "_in_chunks", lambda *given: seen.append(given[-1]))
        inputs = ModelInputs(SimpleNamespace(is_cuda=is_cuda), None, torch.zeros(100))
        module(inputs, 1.0)
        return seen[0]

    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", 24 * 10)
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK_ON_A_GPU", 24 * 50)
    assert (chunks(is_cuda=False), chunks(is_cuda=True)) == (10, 2)
