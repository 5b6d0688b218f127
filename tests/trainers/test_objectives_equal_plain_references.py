"""Each loss against a plain loop over tokens, in value and gradient; estimators against exact values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treetune.trainers.credit import (
    critic_advantages,
    less_future_penalty,
    normalised,
    token_rewards,
    value_loss,
)
from treetune.trainers.objectives.base import TokenBatch
from treetune.trainers.objectives.kl import kl_estimate
from treetune.trainers.objectives.mle import MaximumLikelihood
from treetune.trainers.objectives.ppo import ClippedPolicyGradient

STEP = 1e-6


def batch(seed: int, count: int = 12, spread: float = 0.6) -> tuple[TokenBatch, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)

    def numbers(scale: float) -> torch.Tensor:
        return torch.randn(count, generator=draw, dtype=torch.float64) * scale

    logprobs = -numbers(1).abs() - 0.1
    weights = torch.rand(count, generator=draw, dtype=torch.float64)
    tokens = TokenBatch(
        weights_N=weights / weights.sum(),
        advantages_N=numbers(1),
        old_logprobs_N=logprobs + numbers(spread),
        reference_logprobs_N=logprobs + numbers(spread),
        behaviour_logprobs_N=logprobs + numbers(spread),
        sequence_weight=0.125,
    )
    entropy = numbers(1).abs()
    return tokens, logprobs, entropy


def reference_ppo(o: ClippedPolicyGradient, tokens: TokenBatch, logprobs: list[float], entropy: list[float]):
    """Token by token, with Python floats."""
    loss = 0.0
    for i, logprob in enumerate(logprobs):
        weight, advantage = float(tokens.weights_N[i]), float(tokens.advantages_N[i])
        old, reference = float(tokens.old_logprobs_N[i]), float(tokens.reference_logprobs_N[i])
        ratio = math.exp(logprob - old)
        clipped = min(max(ratio, 1 - o.clip_low), 1 + o.clip_high)
        term = -min(advantage * ratio, advantage * clipped)
        if o.importance_cap is not None:
            term *= min(math.exp(old - float(tokens.behaviour_logprobs_N[i])), o.importance_cap)
        loss += weight * term
        if o.kl_coef and o.kl_placement == "loss":
            d = logprob - reference
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[o.kl_estimator]
            if o.kl_clamp is not None:
                kl = min(max(kl, o.kl_clamp[0]), o.kl_clamp[1])
            loss += o.kl_coef * (weight if o.kl_reduction == "token_mean" else 0.125) * kl
        loss -= o.entropy_coef * weight * entropy[i]
    return loss


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["k1", "k2", "k3"]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([None, (0.0, 0.2), (-0.1, 0.2)]),
    st.sampled_from(["token_mean", "sequence_sum"]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([None, 1.2]),
)
def test_the_clipped_policy_gradient_equals_a_loop_over_tokens(
    seed, estimator, kl, kl_clamp, kl_reduction, entropy, cap
):
    objective = ClippedPolicyGradient(
        clip_low=0.2,
        clip_high=0.3,
        kl_coef=kl,
        kl_estimator=estimator,
        kl_clamp=kl_clamp,
        kl_reduction=kl_reduction,
        entropy_coef=entropy,
        importance_cap=cap,
    )
    tokens, logprobs, entropy_N = batch(seed)
    logprobs.requires_grad_()
    loss, metrics = objective.loss(tokens, logprobs, entropy_N)
    plain = [float(p) for p in logprobs.detach()]
    entropies = entropy_N.tolist()
    assert float(loss.detach()) == pytest.approx(reference_ppo(objective, tokens, plain, entropies), abs=1e-9)
    loss.backward()
    for i, value in enumerate(plain):
        up, down = plain.copy(), plain.copy()
        up[i], down[i] = value + STEP, value - STEP
        slope = reference_ppo(objective, tokens, up, entropies) - reference_ppo(
            objective, tokens, down, entropies
        )
        assert float(logprobs.grad[i]) == pytest.approx(slope / (2 * STEP), abs=1e-5)
    assert 0 <= float(metrics["train/clip_fraction"]) <= 1


def test_without_old_log_probs_the_gradient_is_the_plain_policy_gradient():
    tokens, logprobs, entropy = batch(3)
    on_policy = TokenBatch(weights_N=tokens.weights_N, advantages_N=tokens.advantages_N)
    logprobs.requires_grad_()
    ClippedPolicyGradient().loss(on_policy, logprobs, entropy)[0].backward()
    torch.testing.assert_close(logprobs.grad, -tokens.weights_N * tokens.advantages_N)


def test_kl_bounds_that_bound_nothing_are_refused():
    with pytest.raises(ValueError, match=r"must be \[lowest, highest\]"):
        ClippedPolicyGradient(kl_coef=0.1, kl_clamp=(10.0, 0.0))
    with pytest.raises(ValueError, match="for kl_placement 'loss'"):
        ClippedPolicyGradient(kl_coef=0.1, kl_placement="reward", kl_clamp=(0.0, 10.0))


def test_maximum_likelihood_is_the_weighted_mean_of_negative_log_probs():
    tokens, logprobs, entropy = batch(4)
    logprobs.requires_grad_()
    loss, _ = MaximumLikelihood().loss(tokens, logprobs, entropy)
    expected = -sum(w * p for w, p in zip(tokens.weights_N.tolist(), logprobs.tolist(), strict=True))
    assert float(loss.detach()) == pytest.approx(expected)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, -tokens.weights_N)


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", True), ("k3", True), ("k2", False)])
def test_kl_estimators_average_to_the_exact_divergence_where_they_should(estimator, unbiased):
    draw = torch.Generator().manual_seed(0)
    policy = torch.randn(7, generator=draw, dtype=torch.float64).log_softmax(0)
    reference = torch.randn(7, generator=draw, dtype=torch.float64).log_softmax(0)
    exact = float((policy.exp() * (policy - reference)).sum())
    expected = float((policy.exp() * kl_estimate(policy, reference, estimator)).sum())
    assert (expected == pytest.approx(exact)) is unbiased


def test_the_gradient_of_k2_is_that_of_the_divergence():
    """In expectation over the policy's samples (Schulman 2020; Tang & Munos 2025)."""
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(5, generator=draw, dtype=torch.float64).requires_grad_()
    reference = torch.randn(5, generator=draw, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    sampled = (policy.exp().detach() * kl_estimate(policy, reference, "k2")).sum()
    (from_samples,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    torch.testing.assert_close(from_samples, exact)


def test_value_loss_is_the_worse_of_moved_and_clipped():
    values, old, returns, weights = (
        torch.tensor([0.9, 0.1, 0.5]),
        torch.tensor([0.5, 0.5, 0.5]),
        torch.tensor([1.0, 1.0, 0.0]),
        torch.tensor([0.5, 0.25, 0.25]),
    )
    loss, clipped = value_loss(values, old, returns, weights, clip=0.2)
    expected = 0.5 * (0.5 * 0.3**2 + 0.25 * 0.9**2 + 0.25 * 0.5**2)
    assert float(loss) == pytest.approx(expected)
    assert float(clipped) == pytest.approx(0.5), "only the first one went farther than the clip allows"


def test_the_critics_advantages_with_lambda_one_are_return_minus_value():
    starts, rewards = [0, 3, 5], [1.0, 0.0]
    values = torch.tensor([0.2, 0.4, 0.6, 0.5, 0.1])
    rewards_N = token_rewards(starts, rewards, penalties_N=None)
    advantages, returns = critic_advantages(starts, rewards_N, values, 1.0, 1.0)
    torch.testing.assert_close(returns, torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]))
    torch.testing.assert_close(advantages, returns - values)


def test_a_penalty_in_the_reward_weighs_on_a_token_and_all_before_it_in_its_sequence():
    given_N, penalties = torch.zeros(5), torch.tensor([0.1, 0.0, 0.3, 0.0, 0.2])
    result = less_future_penalty([0, 3, 5], given_N, penalties)
    torch.testing.assert_close(result, -torch.tensor([0.4, 0.3, 0.3, 0.2, 0.2]))


@given(st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=50))
def test_whitened_advantages_have_mean_zero_and_at_most_unit_deviation(numbers):
    whitened = normalised(torch.tensor(numbers), "whiten").double()
    assert float(whitened.mean()) == pytest.approx(0, abs=1e-4)
    assert float(whitened.std()) <= 1 + 1e-4
