"""Settings of memory and precision.

These tests promise:

* Settings that trade memory for speed train the same model, as far as a CPU can show.
* Between two steps a trainer gives its memory to an engine, can be scored and exported, and goes on with the
  same bits.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiny_trainer import (
    are_same,
    assert_close,
    episodes,
    one_rank,
    policy_trainer,
    tiny_model,
    trained,
    weights_of,
)
from treetune.credit.gae import Gae
from treetune.models.logprobs import ModelInputs, PolicyModule
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.trainer.base import Trainer
from treetune.trainer.deepspeed_model import keep_on_cpu, training_state
from treetune.trainer.deepspeed_model import weights_of as parameters_of

BF16_ROUNDING = 2e-2
"""Weights of this model are below 1, where bfloat16 has 8 bits."""


@pytest.fixture(scope="module")
def plain() -> Any:
    return trained(minibatch_size=8)


def name_of(settings: dict[str, Any]) -> str:
    return "-".join(map(str, settings.values())) or "plain"


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_bfloat16_trains_close_to_float32(plain, zero_stage):
    trainer, metrics = trained(minibatch_size=8, precision="bfloat16", zero_stage=zero_stage)
    assert metrics["train/grad_norm"] == pytest.approx(plain[1]["train/grad_norm"], rel=0.05)
    assert metrics["train/loss"] == pytest.approx(plain[1]["train/loss"], abs=0.02)
    assert_close(plain[0], trainer, atol=BF16_ROUNDING)
    start = tiny_model().state_dict()
    assert all((weight != start[name]).any() for name, weight in weights_of(plain[0]).items())


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_many_micro_batches_in_bfloat16_add_up_to_the_gradient_of_one(zero_stage):
    """If they were added up in bfloat16, the last of 256 equal gradients would hardly count."""
    rows = [dataclasses.replace(row, trajectory=f"p#{i}") for i in range(256) for row in episodes(1)]
    settings = {"precision": "bfloat16", "zero_stage": zero_stage}
    _, in_one_batch = trained(rows=rows, **settings)
    _, cut = trained(rows=rows, sequences_per_micro_batch=1, **settings)
    assert cut["train/grad_norm"] == pytest.approx(in_one_batch["train/grad_norm"], rel=0.01)


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
    trainer, metrics = trained(minibatch_size=8, **settings)
    assert metrics["train/grad_norm"] == pytest.approx(plain[1]["train/grad_norm"], abs=1e-5)
    assert_close(plain[0], trainer)


def test_on_a_gpu_adam_is_fused_and_heads_run_on_larger_chunks(monkeypatch):
    from treetune.models import logprobs
    from treetune.trainer.deepspeed_model import _make_deepspeed_config

    def adam(device: str, **settings: object) -> dict[str, object]:
        trainer = Trainer(objective=ClippedPolicyGradient(), learning_rate=1e-3, **settings)
        ranks = dataclasses.replace(one_rank(), device=torch.device(device))
        return _make_deepspeed_config(trainer, ranks)["optimizer"]["params"]

    adam_settings = {"lr", "betas", "eps", "weight_decay", "torch_adam"}
    assert set(adam("cpu")) == adam_settings
    assert adam("cuda") == {**adam("cpu"), "fused": True}
    offloaded = adam("cuda", zero_stage=2, offload_optimizer=True)
    assert set(offloaded) == adam_settings and not offloaded["torch_adam"], "DeepSpeed's own, on the CPU"

    def chunks(is_cuda: bool) -> int:
        chunk_counts = []
        module = PolicyModule(tiny_model())
        monkeypatch.setattr(logprobs, "_hidden_at_positions", lambda backbone, inputs: None)
        monkeypatch.setattr(
            module,
            "_score_in_chunks",
            lambda score, hidden, labels, n_chunks, teacher: chunk_counts.append(n_chunks),
        )
        inputs = ModelInputs(SimpleNamespace(is_cuda=is_cuda), None, torch.zeros(100))
        module(inputs, 1.0)
        return chunk_counts[0]

    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", 24 * 10)
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK_ON_A_GPU", 24 * 50)
    assert (chunks(is_cuda=False), chunks(is_cuda=True)) == (10, 2)


# Memory that is given back

PAIRS = [((1, 2, 3), (4, 5)), ((6,), (7, 8, 9))]


def memory_of(tensors: list[Tensor]) -> int:
    """Returns the bytes of the tensors' memory; DeepSpeed also keeps tensors without any."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"zero_stage": 2},
        {"zero_stage": 3},
        {"zero_stage": 1, "precision": "bfloat16"},
        {"zero_stage": 3, "precision": "bfloat16"},
        {"zero_stage": 2, "precision": "bfloat16", "offload_optimizer": True},
    ],
    ids=name_of,
)
def test_memory_of_training_is_given_back_and_taken_again(settings: dict[str, Any]) -> None:
    undisturbed, trainer = (policy_trainer(minibatch_size=8, iterations=3, **settings) for _ in range(2))
    for iteration in range(2):
        undisturbed.train(iteration, episodes(16, seed=iteration))
        trainer.train(iteration, episodes(16, seed=iteration))
        scores, exported = trainer.score(PAIRS, 1.0), weights_of(trainer)
        engine = trainer.policy.engine
        training_bytes = memory_of(training_state(engine))
        assert training_bytes >= 8 * sum(weight.numel() for weight in exported.values()), (
            "Adam's two means at least"
        )

        trainer.offload()
        assert memory_of(training_state(engine)) == 0
        assert trainer.score(PAIRS, 1.0) == scores
        assert are_same(trainer, exported)
        trainer.offload()  # what is aside already stays
        trainer.reload()
        assert memory_of(training_state(engine)) == training_bytes
    assert are_same(trainer, undisturbed)


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 3, "precision": "bfloat16"}], ids=name_of)
def test_the_weights_of_a_critic_are_offloaded_and_reloaded(settings: dict[str, Any]) -> None:
    undisturbed, trainer = (
        policy_trainer(credit=Gae(), minibatch_size=8, iterations=3, **settings) for _ in range(2)
    )
    for iteration in range(2):
        undisturbed.train(iteration, episodes(8, seed=iteration, with_injected=False))
        trainer.train(iteration, episodes(8, seed=iteration, with_injected=False))
        trainer.offload()
        assert trainer.critic is not None
        assert memory_of(parameters_of(trainer.critic.model.module)) == 0
        trainer.reload()
    assert are_same(trainer.critic_weights(), undisturbed.critic_weights())


def test_a_reference_on_the_cpu_visits_the_device_and_is_never_copied_back() -> None:
    """A tensor on the device `meta` can't be copied anywhere."""
    module = torch.nn.Linear(3, 2)
    module.register_buffer("frequencies", torch.arange(3.0))
    before = {name: (p.data_ptr(), p.clone()) for name, p in module.named_parameters()}
    reference = keep_on_cpu(module, torch.device("meta"))
    for _ in range(2):
        with reference() as visiting:
            assert visiting is module
            assert {p.device.type for p in module.parameters()} == {"meta"}
        for name, parameter in module.named_parameters():
            assert parameter.data_ptr() == before[name][0]
            assert torch.equal(parameter, before[name][1])
