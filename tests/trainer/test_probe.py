"""The probe before training, and ratios of probabilities beyond float32.

These tests promise:

* A policy whose log-probs are not its model's own is refused where the trainer is made, by name.
* The probe draws no random number and changes no weight.
* A ratio that float32 can't hold leaves gradients finite.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.tiny_trainer import episodes, policy_trainer, tiny_model, weights_of
from treetune.credit.literature.prime import Prime
from treetune.objectives.base import TokenBatch, kl_estimate, ratio_of
from treetune.objectives.other_ratios import ClippedImportance, SequencePolicyGradient
from treetune.objectives.policy_gradient import ClippedPolicyGradient


class Noisy(nn.Module):
    """A layer that adds noise while it is trained, without a name that says so."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result = self.inner(hidden)
        return result + torch.randn_like(result) if self.training else result


class Leaky(nn.Module):
    """A layer in which a row's hidden states depend on the rows beside it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden_BTD) + hidden_BTD.mean(dim=(0, 1)).mul(len(hidden_BTD) > 1)


class OtherInTraining(nn.Module):
    """A layer that computes something else while it is trained, every time alike."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (2.0 if self.training else 1.0) * self.inner(hidden)


def with_layer(layer: type[nn.Module]) -> Any:
    """Returns a maker of tiny models with this layer around the first MLP, whose effect log-probs show."""

    def load() -> nn.Module:
        model = tiny_model()
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                if parameter.ndim > 1:
                    generator = torch.Generator().manual_seed(number)
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        model.model.layers[0].mlp = layer(model.model.layers[0].mlp)
        return model

    return load


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Noisy, "LlamaForCausalLM computes different log-probs of the same tokens each time"),
        (OtherInTraining, "differ from those of LlamaForCausalLM's own forward pass"),
        (Leaky, "depend on the other rows of its batch"),
    ],
)
def test_a_policy_that_differs_from_its_model_is_refused(layer: type[nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_trainer(load=with_layer(layer))


def test_a_reward_model_that_starts_from_another_model_is_probed_too() -> None:
    with pytest.raises(ValueError, match="computes different log-probs of the same tokens each time"):
        policy_trainer(credit=Prime(), load_reward_model=with_layer(Noisy))


@pytest.mark.parametrize("settings", [{}, {"layout": "packed"}, {"layout": "tree"}, {"zero_stage": 3}])
def test_an_ordinary_model_passes_without_a_trace(settings: dict[str, Any]) -> None:
    policy_trainer(**settings).close()  # what is made at the first import is made
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    start = weights_of(tiny_model())
    state = torch.random.get_rng_state()
    trainer = policy_trainer(**settings)
    torch.random.set_rng_state(state)
    assert torch.equal(torch.rand(3), expected)
    weights = trainer.weights()
    assert all(torch.equal(weights[name], start[name]) for name in start)
    assert all(parameter.grad is None for parameter in trainer.policy.module.parameters())
    assert trainer.policy.module.training


def test_the_probe_draws_no_random_number() -> None:
    from treetune.trainer.probe import refuse_wrong_trainer_logprobs

    trainer = policy_trainer()
    before = torch.random.get_rng_state()
    refuse_wrong_trainer_logprobs(trainer.policy, trainer.settings, trainer.ranks)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_adapters_pass_and_are_trained() -> None:
    from treetune.models.lora import Lora

    trainer = policy_trainer(lora=Lora(rank=2))
    before = weights_of(trainer)
    trainer.train(0, episodes(8))
    after = weights_of(trainer)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_ratio_is_the_plain_one_to_the_bit_wherever_that_is_finite() -> None:
    log_ratio = torch.linspace(-100, 40, 1001, requires_grad=True)
    plain = log_ratio.detach().clone().requires_grad_()
    ratio_of(log_ratio).sum().backward()
    plain.exp().sum().backward()
    assert torch.equal(ratio_of(log_ratio), plain.exp())
    assert torch.equal(log_ratio.grad, plain.grad)


@pytest.mark.parametrize("objective", [ClippedPolicyGradient, ClippedImportance, SequencePolicyGradient])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [90.0, 200.0, -200.0])
def test_a_token_that_moved_beyond_float32_leaves_the_others_gradient_finite(
    objective: type[Any], advantage: float, log_ratio: float
) -> None:
    objective_with_kl = objective(kl_coef=0.01, kl_clamp=(0.0, 10.0))
    old_N = torch.tensor([-1.0, -1.0, -1.0])
    logprobs_N = torch.tensor([-1.1, -1.0 + log_ratio, -0.9], requires_grad=True)
    batch = TokenBatch(
        weights_N=torch.full((3,), 1 / 3),
        lengths=(1, 1, 1),
        advantages_N=torch.tensor([1.0, advantage, -1.0]),
        old_logprobs_N=old_N,
        ref_logprobs_N=old_N,
    )
    loss, metrics = objective_with_kl.loss(batch, logprobs_N)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logprobs_N.grad).all()
    assert all(torch.isfinite(metric) for metric in metrics.values())
    # The other tokens have the gradient that they have without it.
    other_logprobs_N = torch.tensor([-1.1, -0.9], requires_grad=True)
    without = TokenBatch(
        weights_N=torch.full((2,), 1 / 3),
        lengths=(1, 1),
        weight_sum=2 / 3,
        advantages_N=torch.tensor([1.0, -1.0]),
        old_logprobs_N=old_N[:2],
        ref_logprobs_N=old_N[:2],
    )
    objective_with_kl.loss(without, other_logprobs_N)[0].backward()
    assert torch.allclose(logprobs_N.grad[[0, 2]], other_logprobs_N.grad)


@pytest.mark.parametrize("difference", [90.0, -90.0, -200.0])
def test_the_distance_of_the_reference_stays_finite(difference: float) -> None:
    logprobs_N = torch.tensor([difference], requires_grad=True)
    kl_N = kl_estimate(logprobs_N, torch.zeros(1), "k3")
    kl_N.clamp(0, 10).sum().backward()
    assert torch.isfinite(kl_N).all() and torch.isfinite(logprobs_N.grad).all()
