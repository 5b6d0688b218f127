"""Between two steps a trainer gives its memory to an engine, can be scored and exported meanwhile, and goes
on with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainers.helpers import critic_of, episodes, one_rank, tiny_model
from treetune.rollouts.credit import Gae
from treetune.trainers.base import Trainer
from treetune.trainers.core import PolicyTrainer
from treetune.trainers.deepspeed_model import training_state, visiting, weights_of
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient

PAIRS = [((1, 2, 3), (4, 5)), ((6,), (7, 8, 9))]


def made(gae: Gae | None = None, **settings: Any) -> PolicyTrainer:
    dtype = getattr(torch, settings.get("precision", "float32"))
    return PolicyTrainer(
        Trainer(objective=ClippedPolicyGradient(), learning_rate=1e-2, minibatch_size=8, **settings),
        lambda: tiny_model().to(dtype),
        ranks=one_rank(),
        seed=0,
        temperature=1.0,
        iterations=3,
        **critic_of(gae),
    )


def size_of(tensors: list[Tensor]) -> int:
    """Bytes of memory below them; DeepSpeed keeps tensors without any, too."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def weights(trainer: PolicyTrainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights().items()}


SETTINGS = [
    {},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 1, "precision": "bfloat16"},
    {"zero_stage": 3, "precision": "bfloat16"},
    {"zero_stage": 2, "precision": "bfloat16", "offload_optimizer": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_memory_of_training_is_given_back_and_taken_again(settings: dict[str, Any]) -> None:
    undisturbed, trainer = made(**settings), made(**settings)
    for iteration in range(2):
        undisturbed.train(iteration, episodes(16, seed=iteration))
        trainer.train(iteration, episodes(16, seed=iteration))
        scores, exported = trainer.score(PAIRS, 1.0), weights(trainer)
        engine = trainer.policy.engine
        count = sum(weight.numel() for weight in exported.values())
        held = size_of(training_state(engine))
        assert held >= 8 * count, "Adam's two means at least"

        trainer.offload()
        assert trainer.policy.offloaded_bytes == held
        assert size_of(training_state(engine)) == 0
        assert trainer.score(PAIRS, 1.0) == scores
        for name, weight in weights(trainer).items():
            assert torch.equal(weight, exported[name])
        trainer.offload()  # what is aside already stays
        trainer.reload()
        assert size_of(training_state(engine)) == held
    expected = weights(undisturbed)
    for name, weight in weights(trainer).items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 3, "precision": "bfloat16"}], ids=["0", "3"])
def test_a_critic_leaves_with_its_weights(settings: dict[str, Any]) -> None:
    undisturbed, trainer = made(Gae(), **settings), made(Gae(), **settings)
    for iteration in range(2):
        undisturbed.train(iteration, episodes(8, seed=iteration, with_injected=False))
        trainer.train(iteration, episodes(8, seed=iteration, with_injected=False))
        trainer.offload()
        assert trainer.critic is not None
        assert size_of(weights_of(trainer.critic.model.module)) == 0
        trainer.reload()
    expected = undisturbed.critic_weights()
    for name, weight in trainer.critic_weights().items():
        assert torch.equal(weight, expected[name]), name


def test_a_reference_on_the_cpu_visits_the_device_and_is_never_copied_back() -> None:
    """What is on the device `meta` can't be copied anywhere."""
    module = torch.nn.Linear(3, 2)
    module.register_buffer("frequencies", torch.arange(3.0))
    before = {name: (p.data_ptr(), p.clone()) for name, p in module.named_parameters()}
    reference = visiting(module, torch.device("meta"))
    for _ in range(2):
        with reference() as there:
            assert there is module
            assert {p.device.type for p in module.parameters()} == {"meta"}
        for name, parameter in module.named_parameters():
            assert parameter.data_ptr() == before[name][0]
            assert torch.equal(parameter, before[name][1])
