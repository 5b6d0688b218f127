"""Losses of critics.

These tests promise:

* HL-Gauss gives what a plain reference of its formula gives, in value and gradient.
* The value that it learns is the mean return, and the bias of the gradient is as stated.
* A critic with it learns, resumes bit for bit, and is not loaded into a critic with another loss.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.credit.expectations import critic_of, expectation
from tests.credit.test_bias_of_estimators import WithCritic
from tests.support import tabular_mdp as mdp
from tests.support.shipped import experiment_of
from tests.support.tiny_trainer import are_same, episodes, trained
from treetune.credit.base import CriticSettings
from treetune.credit.critic_losses import HlGauss, SquaredError
from treetune.credit.gae import Gae
from treetune.rollouts.model_scores import ModelScores

SMALL = HlGauss(bins=4, sigma=0.1, min=0.0, max=1.0)


def plain_targets(loss: HlGauss, target: float) -> list[float]:
    """Returns the target of one return for each bin, with Python's own normal distribution."""
    normal = NormalDist(target, loss.deviation)
    width = (loss.max - loss.min) / loss.bins
    edges = [loss.min + width * i for i in range(loss.bins + 1)]
    masses = [normal.cdf(right) - normal.cdf(left) for left, right in itertools.pairwise(edges)]
    return [mass / sum(masses) for mass in masses]


def plain_value(loss: HlGauss, probabilities: list[float]) -> float:
    width = (loss.max - loss.min) / loss.bins
    return sum(p * (loss.min + width * (i + 0.5)) for i, p in enumerate(probabilities))


def test_hl_gauss_is_the_cross_entropy_with_a_binned_gaussian_and_has_its_gradient() -> None:
    loss = HlGauss(bins=7, sigma=0.2, min=-0.5, max=2.0)
    returns, weights = [0.0, 1.0, 1.3], [0.5, 0.2, 0.3]
    outputs = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outputs.requires_grad_()
    old = torch.zeros(3, dtype=torch.float64)
    tensors = torch.tensor(returns, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
    total, clipped = loss.loss(outputs, *tensors, old, 0.2)
    (gradient,) = torch.autograd.grad(total, outputs)

    expected, expected_gradient, values = 0.0, [], []
    for row, target_return, weight in zip(outputs.tolist(), returns, weights, strict=True):
        exponentials = [math.exp(output) for output in row]
        probabilities = [number / sum(exponentials) for number in exponentials]
        targets = plain_targets(loss, target_return)
        expected -= weight * sum(t * math.log(p) for t, p in zip(targets, probabilities, strict=True))
        expected_gradient.append([weight * (p - t) for t, p in zip(targets, probabilities, strict=True)])
        values.append(plain_value(loss, probabilities))
    assert float(total.detach()) == pytest.approx(expected, abs=1e-12) and float(clipped) == 0
    assert gradient.tolist() == [pytest.approx(row, abs=1e-12) for row in expected_gradient]
    assert loss.values(outputs.detach()).tolist() == pytest.approx(values, abs=1e-12)


def test_the_example_in_the_documentation_of_hl_gauss_is_right() -> None:
    targets = SMALL.targets(torch.tensor([0.5], dtype=torch.float64))
    assert targets[0].tolist() == pytest.approx([0.006, 0.494, 0.494, 0.006], abs=5e-4)
    outputs = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).log()
    total, _ = SMALL.loss(outputs, torch.tensor([0.5]).double(), torch.ones(1), torch.zeros(1), None)
    assert float(SMALL.values(outputs)) == pytest.approx(0.625)
    assert float(total) == pytest.approx(1.41, abs=5e-3)


@given(target=st.floats(0, 1), bins=st.integers(41, 200))
def test_the_mean_of_a_target_is_its_return_where_the_bins_reach_beyond_it(target: float, bins: int) -> None:
    loss = HlGauss(bins=bins)
    targets = loss.targets(torch.tensor([target], dtype=torch.float64))
    assert plain_value(loss, targets[0].tolist()) == pytest.approx(target, abs=2e-5)


def values_at_minimum(loss: HlGauss) -> dict[mdp.Ids, float]:
    """Returns the value of each state at the minimum of the expected loss, which is at the mean target."""
    value_of_wrong, value_of_right = (plain_value(loss, plain_targets(loss, earned)) for earned in (0.0, 1.0))
    states = {answer[:length] for answer in mdp.answers() for length in range(len(answer))}
    return {
        state: mdp.value(state) * value_of_right + (1 - mdp.value(state)) * value_of_wrong for state in states
    }


@dataclass(frozen=True)
class Case:
    loss: HlGauss
    error_of_values: float
    bias: float


@pytest.mark.parametrize(
    "case",
    [
        Case(HlGauss(), 0.0, 0.0),
        Case(HlGauss(min=0.0, max=1.0), 0.01353, 0.0237),
    ],
    ids=str,
)
def test_the_expected_gradient_with_values_at_the_minimum_of_the_loss_is_as_far_off_as_stated(
    case: Case,
) -> None:
    values = values_at_minimum(case.loss)
    error = max(abs(value - mdp.value(state)) for state, value in values.items())
    assert error <= case.error_of_values + 1e-5
    scores = ModelScores(critic=critic_of(values.__getitem__))
    bias, cosine = expectation(WithCritic(lam=0.0), 1, scores).bias_and_cosine
    assert bias == pytest.approx(case.bias, abs=5e-5) and cosine > 0.9995


def test_a_critic_with_hl_gauss_learns_returns_and_resumes_bit_for_bit(tmp_path) -> None:
    credit = Gae(critic=CriticSettings(learning_rate=1e-2, loss=HlGauss(bins=21)))
    rows = [replace(row, advantages=None) for row in episodes(16)]
    settings = {"credit": credit, "minibatch_size": 8, "iterations": 12, "rows": rows}
    uninterrupted, first = trained(**settings)
    assert uninterrupted.critic_weights()["head.weight"].shape[0] == 21
    for iteration in range(1, 9):
        last = uninterrupted.train(iteration, rows)
    assert last["critic/mse"] < 0.5 * first["critic/mse"]
    assert last["critic/loss"] < first["critic/loss"]
    uninterrupted.save(tmp_path)
    uninterrupted.train(9, rows)
    resumed, _ = trained(**settings)
    resumed.load(tmp_path)
    resumed.train(9, rows)
    assert are_same(uninterrupted.critic_weights(), resumed.critic_weights())


@pytest.mark.parametrize(
    "configured",
    [SquaredError(), HlGauss(bins=21), HlGauss(bins=20, max=1.2)],
    ids=str,
)
def test_a_stored_critic_with_another_head_is_refused(configured, tmp_path) -> None:
    stored = HlGauss(bins=20)
    trainer, _ = trained(credit=Gae(critic=CriticSettings(loss=stored)))
    trainer.save(tmp_path)
    other, _ = trained(credit=Gae(critic=CriticSettings(loss=configured)))
    with pytest.raises(
        ValueError,
        match=r"holds a critic with the loss .*hl_gauss.*The stored head was trained for the first",
    ):
        other.load(tmp_path)


def test_returns_outside_of_the_bins_are_refused() -> None:
    rows = [replace(row, advantages=None, reward=3.0) for row in episodes(4)]
    credit = Gae(critic=CriticSettings(loss=HlGauss()))
    with pytest.raises(ValueError, match=r"bins from -0.1 to 1.1, and the returns .* from 3 to 3"):
        trained(credit=credit, rows=rows)


def test_returns_that_are_not_numbers_are_refused_and_an_empty_batch_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"bins from -0\.1 to 1\.1"):
        HlGauss().refuse_returns(torch.tensor([0.5, math.nan]))
    HlGauss().refuse_returns(torch.tensor([]))


def test_a_range_without_extent_is_refused() -> None:
    with pytest.raises(ValueError, match="set max to a larger number"):
        HlGauss(min=1.0, max=1.0)


def test_the_fragment_gives_ppos_critic_the_loss() -> None:
    experiment = experiment_of("quickstart/ppo,credit/hl_gauss_critic")
    assert experiment.credit == Gae(critic=CriticSettings(loss=HlGauss()))
