"""DeepSpeed's trainer on a GPU: its updates are those of a CPU, and it frees its memory for the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.tiny_trainer import (
    are_same,
    assert_close,
    episodes,
    policy_trainer,
    tiny_model,
    trained,
    weights_of,
)
from tests.trainer.test_memory_and_precision import BF16_ROUNDING, PAIRS, name_of
from treetune.credit.gae import Gae

BFLOAT16 = {"precision": "bfloat16"}
STAGES: list[dict[str, Any]] = [
    *({"zero_stage": stage} for stage in range(4)),
    *({"zero_stage": stage, **BFLOAT16} for stage in (1, 2, 3)),
    {"layout": "packed"},
    {"layout": "tree"},
    {"layout": "packed", "zero_stage": 1, **BFLOAT16},
    {"gradient_checkpointing": True},
    {"offload_reference": True},
    {"zero_stage": 2, "offload_optimizer": True},
    {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True},
]


def on_the_cpu(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: weight.cpu() for name, weight in weights_of(trainer).items()}


LOSS, NORM = -0.155564, 1.029678
"""Loss and gradient norm of the same rows with the plainest settings, computed on a CPU in float32."""


@pytest.mark.parametrize("settings", STAGES, ids=name_of)
def test_an_update_is_the_same_as_on_a_cpu(trainers_device: torch.device, settings: dict[str, Any]) -> None:
    exact = "precision" not in settings
    trainer, metrics = trained(minibatch_size=8, **settings)
    assert metrics["train/loss"] == pytest.approx(LOSS, abs=1e-4 if exact else 0.02)
    assert metrics["train/grad_norm"] == pytest.approx(NORM, rel=1e-3 if exact else 0.05)
    assert trainer.ranks.device.type == trainers_device.type
    if exact:
        start = tiny_model().state_dict()
        assert all((weight != start[name]).any() for name, weight in on_the_cpu(trainer).items())
    else:
        plain, _ = trained(minibatch_size=8)
        assert_close(on_the_cpu(plain), on_the_cpu(trainer), BF16_ROUNDING)


@pytest.mark.parametrize(
    "settings",
    [{}, {"zero_stage": 1, **BFLOAT16}, {"zero_stage": 2, **BFLOAT16}, {"zero_stage": 3, **BFLOAT16}],
    ids=name_of,
)
def test_the_trainer_frees_its_memory_for_the_engine_and_takes_it_again(
    trainers_device: torch.device, settings: dict[str, Any]
) -> None:
    trainer = policy_trainer(minibatch_size=8, iterations=3, **settings)
    trainer.train(0, episodes(16))
    exported, scores = weights_of(trainer), trainer.score(PAIRS, 1.0)
    allocated = torch.cuda.memory_allocated
    before = allocated() if trainers_device.type == "cuda" else 0
    trainer.offload()
    if trainers_device.type == "cuda":
        adam = 8 * sum(weight.numel() for weight in exported.values())
        assert before - allocated() >= adam, "Adam's two moments at least"
        assert torch.cuda.memory_reserved() - allocated() < 2**22, "freed memory is given back to the GPU"
    assert trainer.score(PAIRS, 1.0) == scores
    assert are_same(trainer, exported)
    trainer.reload()
    assert are_same(trainer, exported)
    trainer.train(1, episodes(16, seed=1))
    assert not are_same(trainer, exported)


def test_a_critic_trains_before_and_after_it_was_offloaded(trainers_device: torch.device) -> None:
    trainer = policy_trainer(credit=Gae(), minibatch_size=8, iterations=2, zero_stage=1, **BFLOAT16)
    metrics = trainer.train(0, episodes(8, with_injected=False))
    assert all(torch.isfinite(torch.tensor(float(value))) for value in metrics.values())
    trainer.offload()
    trainer.reload()
    trainer.train(1, episodes(8, seed=1, with_injected=False))


def test_weights_are_gathered_in_turn_on_the_trainers_device(trainers_device: torch.device) -> None:
    trainer, _ = trained(minibatch_size=8, zero_stage=3, **BFLOAT16)
    in_turn = {name: weight.detach().clone() for name, weight in trainer.weights_in_turn()}
    assert {weight.device.type for weight in in_turn.values()} == {trainers_device.type}
    assert are_same({name: weight.cpu() for name, weight in in_turn.items()}, on_the_cpu(trainer))
