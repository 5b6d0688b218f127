"""Losses of objectives.

These tests promise that each loss, and its gradient, equals a plain loop over tokens, and that estimators
equal their exact values.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny_trainer import assert_is
from treetune.credit.critic_losses import squared_value_loss
from treetune.credit.gae import Gae
from treetune.models.logprobs import Nucleus
from treetune.objectives.base import TokenBatch, kl_estimate
from treetune.objectives.covariance import ClipCovariance, KlCovariance, token_covariances
from treetune.objectives.mle import MaximumLikelihood
from treetune.objectives.other_ratios import (
    ClippedImportance,
    DivergenceBounded,
    GeometricMean,
    SequencePolicyGradient,
    SoftAdaptive,
)
from treetune.objectives.policy_gradient import (
    ClippedPolicyGradient,
    PolicyGradient,
)
from treetune.trainer.preparation import (
    normalise_advantages,
    rewards_to_come,
    token_rewards,
)

LENGTHS = (4, 1, 7)


def batch(seed: int, spread: float = 0.6) -> tuple[TokenBatch, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)

    def numbers(scale: float) -> torch.Tensor:
        return torch.randn(count, generator=draw, dtype=torch.float64) * scale

    logprobs = -numbers(1).abs() - 0.1
    weights = torch.rand(count, generator=draw, dtype=torch.float64)
    tokens = TokenBatch(
        weights_N=weights / weights.sum(),
        lengths=LENGTHS,
        advantages_N=numbers(1),
        old_logprobs_N=(logprobs + numbers(spread)).clamp(max=-0.01),  # probabilities below 1
        ref_logprobs_N=logprobs + numbers(spread),
        behaviour_logprobs_N=logprobs + numbers(spread),
        log_mass_N=-numbers(0.2).abs(),
        marked_N=torch.rand(count, generator=draw) < 0.3,
        sequence_weight=0.125,
    )
    return tokens, logprobs


def mean_log_ratio(tokens: TokenBatch, logprobs: list[float], position: int) -> float:
    """Returns the mean log-ratio of the sequence to which the token belongs."""
    start = 0
    for length in tokens.lengths:
        if position < start + length:
            ratios = [logprobs[i] - float(tokens.old_logprobs_N[i]) for i in range(start, start + length)]
            return sum(ratios) / length
        start += length
    raise AssertionError


def clipped_log_ratio(o: GeometricMean, advantage: float, log_ratio: float) -> float:
    """verl's: sign(A) · min(sign(A) x, sign(A) clip(x))."""
    sign = math.copysign(1, advantage)
    clipped = min(max(log_ratio, -o.clip_low), o.clip_high)
    return sign * min(sign * log_ratio, sign * clipped)


def geometric_mean_loss(o: GeometricMean, tokens: TokenBatch, logprobs: list[float]) -> float:
    """Computes the loss answer by answer; the advantages of an answer's tokens are equal."""
    loss, start = 0.0, 0
    for length in tokens.lengths:
        clipped = [
            clipped_log_ratio(o, float(tokens.advantages_N[i]), logprobs[i] - float(tokens.old_logprobs_N[i]))
            for i in range(start, start + length)
        ]
        loss -= float(tokens.advantages_N[start]) * math.exp(sum(clipped) / length) / len(tokens.lengths)
        start += length
    return loss


def is_masked(o: DivergenceBounded, advantage: float, old: float, now: float) -> bool:
    """Tells whether a token with these probabilities has no gradient."""
    if o.divergence == "tv":
        distance = abs(now - old)
    else:
        distance = old * math.log(old / now) + (1 - old) * math.log((1 - old) / (1 - now))
    if advantage > 0:
        return now > old and distance > o.limit_high
    return now < old and distance > o.limit_low


def surrogate(o: PolicyGradient, tokens: TokenBatch, logprobs: list[float], fixed: list[float], i: int):
    """Returns a token's policy term; `fixed` are the log-probs where the formula stops the gradient."""
    advantage, old = float(tokens.advantages_N[i]), float(tokens.old_logprobs_N[i])
    if isinstance(o, ClippedImportance):
        weight = min(max(math.exp(fixed[i] - old), 1 - o.clip_low), 1 + o.clip_high)
        return -weight * advantage * logprobs[i]
    if isinstance(o, SoftAdaptive):
        tau = o.tau_positive if advantage > 0 else o.tau_negative
        gate = 1 / (1 + math.exp(-tau * (math.exp(logprobs[i] - old) - 1)))
        return -advantage * 4 / tau * gate
    if isinstance(o, DivergenceBounded):
        masked = is_masked(o, advantage, math.exp(old), math.exp(fixed[i]))
        weight = min(math.exp(fixed[i] - old), o.largest_ratio)
        return 0.0 if masked else -weight * advantage * logprobs[i]
    if isinstance(o, KlCovariance):
        distance = abs(logprobs[i] - old) if tokens.marked_N[i] else 0.0
        return -advantage * math.exp(logprobs[i] - old) + o.penalty * distance
    if isinstance(o, ClipCovariance) and tokens.marked_N[i]:
        return 0.0
    if isinstance(o, SequencePolicyGradient):
        ratio = math.exp(mean_log_ratio(tokens, fixed, i) + logprobs[i] - fixed[i])
    else:
        ratio = math.exp(logprobs[i] - old)
    clipped = min(max(ratio, 1 - o.clip_low), 1 + o.clip_high)
    term = -min(advantage * ratio, advantage * clipped)
    if isinstance(o, ClippedPolicyGradient) and o.dual_clip is not None and advantage < 0:
        term = min(term, -o.dual_clip * advantage)
    return term


def engine_log_ratios(tokens: TokenBatch) -> list[float]:
    """Returns log-ratios of the old policy, cut as the engine's distribution is, to the engine."""
    columns = tokens.old_logprobs_N, tokens.log_mass_N, tokens.behaviour_logprobs_N
    return [float(old - mass - engine) for old, mass, engine in zip(*columns, strict=True)]


def reference_loss(o: PolicyGradient, tokens: TokenBatch, logprobs: list[float], fixed: list[float]):
    """Computes the loss token by token, with Python floats."""
    loss = 0.0
    for i, logprob in enumerate(logprobs):
        weight = float(tokens.weights_N[i])
        term = surrogate(o, tokens, logprobs, fixed, i)
        ratios = [math.exp(x) for x in engine_log_ratios(tokens)]
        if o.importance_cap is not None:
            term *= min(ratios[i], o.importance_cap)
        if o.importance_band is not None:
            term *= ratios[i] if o.importance_band[0] <= ratios[i] <= o.importance_band[1] else 0.0
        if o.importance_sequence is not None:
            start = max(0, *(end for end in itertools.accumulate(LENGTHS) if end <= i), 0)
            length = LENGTHS[list(itertools.accumulate((0, *LENGTHS))).index(start)]
            mean = math.prod(ratios[start : start + length]) ** (1 / length)
            term *= o.importance_sequence[0] <= mean <= o.importance_sequence[1]
        loss += weight * term
        if o.kl_coef and o.kl_placement == "loss":
            d = logprob - float(tokens.ref_logprobs_N[i])
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[o.kl_estimator]
            if o.kl_clamp is not None:
                kl = min(max(kl, o.kl_clamp[0]), o.kl_clamp[1])
            loss += o.kl_coef * (weight if o.kl_reduction == "token_mean" else 0.125) * kl
    return loss


CAPS = st.sampled_from([None, 1.2])
OBJECTIVES = st.one_of(
    st.builds(
        ClippedPolicyGradient,
        clip_low=st.just(0.2),
        clip_high=st.just(0.3),
        dual_clip=st.sampled_from([None, 1.5]),
        kl_coef=st.sampled_from([0.0, 0.3]),
        kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
        kl_clamp=st.sampled_from([None, (0.0, 0.2), (-0.1, 0.2)]),
        kl_reduction=st.sampled_from(["token_mean", "sequence_sum"]),
        importance_cap=CAPS,
    ),
    st.builds(SequencePolicyGradient, clip_low=st.just(3e-4), clip_high=st.just(4e-4), importance_cap=CAPS),
    st.builds(SequencePolicyGradient, clip_low=st.just(0.2), clip_high=st.just(0.3), importance_cap=CAPS),
    st.builds(
        ClippedPolicyGradient,
        importance_band=st.sampled_from([None, (0.7, 1.5)]),
        importance_sequence=st.sampled_from([None, (0.8, 1.25), (0.99, 1.01)]),
    ),
    st.builds(SequencePolicyGradient, importance_cap=st.just(1.2), importance_sequence=st.just((0.8, 1.25))),
    st.builds(SoftAdaptive, tau_negative=st.sampled_from([1.05, 3.0]), importance_cap=CAPS),
    st.builds(
        DivergenceBounded,
        divergence=st.sampled_from(["tv", "kl"]),
        limit_low=st.sampled_from([0.02, 0.15]),
        limit_high=st.sampled_from([0.05, 0.2]),
        largest_ratio=st.sampled_from([1.5, 20.0]),
    ),
    st.builds(ClipCovariance, clip_low=st.just(0.2), clip_high=st.just(0.3), importance_cap=CAPS),
    st.builds(KlCovariance, penalty=st.sampled_from([1.0, 0.3])),
    st.builds(
        ClippedImportance, clip_low=st.sampled_from([1.0, 0.2]), clip_high=st.sampled_from([0.28, 0.2])
    ),
)


@settings(max_examples=80)
@given(OBJECTIVES, st.integers(0, 10_000))
def test_a_policy_gradient_equals_a_loop_over_tokens(objective: PolicyGradient, seed: int) -> None:
    tokens, logprobs = batch(seed)
    logprobs.requires_grad_()
    loss, metrics = objective.loss(tokens, logprobs)
    plain = logprobs.tolist()
    assert_is(lambda moved: reference_loss(objective, tokens, moved, plain), loss, logprobs)
    assert 0 <= float(metrics["train/clip_fraction"]) <= 1


def shared_advantages(
    tokens: TokenBatch, objective: PolicyGradient, advantages: Sequence[float]
) -> TokenBatch:
    """Returns the batch with one advantage for each answer, and the objective's weights."""
    lengths = torch.tensor(LENGTHS)
    weights = objective.sequence_weights(LENGTHS, [1.0] * len(LENGTHS))
    return dataclasses.replace(
        tokens,
        advantages_N=torch.tensor(advantages, dtype=torch.float64).repeat_interleave(lengths),
        weights_N=torch.tensor(weights, dtype=torch.float64).repeat_interleave(lengths),
    )


@pytest.mark.parametrize("clips", [(0.4, 0.4), (0.1, 0.2)])
@settings(max_examples=20)
@given(st.integers(0, 10_000))
def test_gmpo_by_tokens_is_the_loss_of_geometric_means(clips: tuple[float, float], seed: int) -> None:
    objective = GeometricMean(clip_low=clips[0], clip_high=clips[1])
    tokens, logprobs = batch(seed)
    tokens = shared_advantages(tokens, objective, (1.5, -0.4, 0.3))
    logprobs.requires_grad_()
    loss, metrics = objective.loss(tokens, logprobs)
    assert_is(lambda moved: geometric_mean_loss(objective, tokens, moved), loss, logprobs)
    assert 0 <= float(metrics["train/clip_fraction"]) <= 1


def test_covariances_are_products_of_differences_from_the_means() -> None:
    logprobs, advantages = [-0.5, -1.5, -4.0], [1.0, -1.0, 0.5]
    expected = [
        (p - sum(logprobs) / 3) * (a - sum(advantages) / 3) for p, a in zip(logprobs, advantages, strict=True)
    ]
    assert token_covariances(torch.tensor(logprobs), torch.tensor(advantages)).tolist() == pytest.approx(
        expected
    )


def test_kl_cov_marks_the_largest_covariances() -> None:
    draw = torch.Generator().manual_seed(3)
    logprobs_N, advantages_N = -torch.rand(200, generator=draw), torch.randn(200, generator=draw)
    covariances_N = token_covariances(logprobs_N, advantages_N)
    for share, count in ((0.05, 10), (1e-4, 1)):
        marked_N = KlCovariance(share=share).marked_tokens(logprobs_N, advantages_N, random.Random(0))
        assert int(marked_N.sum()) == count
        assert covariances_N[marked_N].min() > covariances_N[~marked_N].max()


def test_clip_cov_marks_some_covariances_within_bounds() -> None:
    draw = torch.Generator().manual_seed(3)
    logprobs_N, advantages_N = -3 * torch.rand(200, generator=draw), torch.randn(200, generator=draw)
    covariances_N = token_covariances(logprobs_N, advantages_N)
    objective = ClipCovariance(share=0.05, least_covariance=0.2, largest_covariance=1.0)
    within_N = (covariances_N > 0.2) & (covariances_N < 1.0)
    assert int(within_N.sum()) > 10
    first, same_seed, other_seed = (
        objective.marked_tokens(logprobs_N, advantages_N, random.Random(seed)) for seed in (0, 0, 1)
    )
    assert int(first.sum()) == 10 and bool(within_N[first].all())
    assert first.tolist() == same_seed.tolist() != other_seed.tolist()
    without_candidates = ClipCovariance(least_covariance=1e6, largest_covariance=1e7)
    assert not without_candidates.marked_tokens(logprobs_N, advantages_N, random.Random(0)).any()


def test_with_one_advantage_to_an_answer_gspo_by_tokens_has_the_gradient_of_the_answers_ratio():
    """Eq. 5 against eq. 13 of the paper: the ratio of the answer, differentiated as it stands."""
    tokens, logprobs = batch(5, spread=0.1)
    shared_N = torch.cat(
        [torch.full((n,), a).double() for n, a in zip(LENGTHS, (1.5, -0.4, 0.3), strict=True)]
    )
    weights = SequencePolicyGradient().sequence_weights(LENGTHS, [1.0] * len(LENGTHS))
    weights_N = torch.cat([torch.full((n,), w).double() for n, w in zip(LENGTHS, weights, strict=True)])
    tokens = dataclasses.replace(tokens, advantages_N=shared_N, weights_N=weights_N)
    by_tokens = logprobs.clone().requires_grad_()
    SequencePolicyGradient(clip_low=0.2, clip_high=0.2).loss(tokens, by_tokens)[0].backward()
    by_answers = logprobs.clone().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for part, old, advantage in zip(
        by_answers.split(LENGTHS), tokens.old_logprobs_N.split(LENGTHS), (1.5, -0.4, 0.3), strict=True
    ):
        ratio = (part - old).mean().exp()
        loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / len(LENGTHS)
    loss.backward()
    torch.testing.assert_close(by_tokens.grad, by_answers.grad)


def test_only_clipped_importance_keeps_the_gradient_of_tokens_that_moved_far():
    tokens, logprobs = batch(7, spread=2.0)
    for objective, all_learn in ((ClippedImportance(), True), (ClippedPolicyGradient(), False)):
        inputs = logprobs.clone().requires_grad_()
        objective.loss(tokens, inputs)[0].backward()
        assert bool((inputs.grad != 0).all()) is all_learn


def test_without_old_log_probs_the_gradient_is_the_plain_policy_gradient():
    tokens, logprobs = batch(3)
    on_policy = TokenBatch(weights_N=tokens.weights_N, lengths=LENGTHS, advantages_N=tokens.advantages_N)
    for objective in (
        ClippedPolicyGradient(),
        SequencePolicyGradient(),
        ClippedImportance(),
        GeometricMean(),
        SoftAdaptive(),
        DivergenceBounded(),
        DivergenceBounded(divergence="kl"),
        ClipCovariance(),
        KlCovariance(),
    ):
        inputs = logprobs.clone().requires_grad_()
        objective.loss(on_policy, inputs)[0].backward()
        torch.testing.assert_close(inputs.grad, -tokens.weights_N * tokens.advantages_N)


def test_each_aggregation_gives_tokens_its_weights():
    lengths, scores = [2, 3, 5], [1.0, 0.0, 1.0]
    by_token = ClippedPolicyGradient().sequence_weights(lengths, scores)
    assert by_token == pytest.approx([0.1, 0.1, 0.1])
    by_sequence = ClippedPolicyGradient(aggregation="sequence").sequence_weights(lengths, scores)
    assert by_sequence == pytest.approx([1 / 6, 1 / 9, 1 / 15])
    constant = ClippedPolicyGradient(aggregation="constant", constant_length=20)
    assert constant.sequence_weights(lengths, scores) == pytest.approx([1 / 60] * 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aggregation": "constant"}, "belong together"),
        ({"constant_length": 20}, "belong together"),
        ({"kl_coef": 0.1, "kl_clamp": (10.0, 0.0)}, r"must be \[lowest, highest\]"),
        ({"kl_coef": 0.1, "kl_placement": "reward", "kl_clamp": (0.0, 10.0)}, "for kl_placement 'loss'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ClippedPolicyGradient(**settings)


def test_maximum_likelihood_is_the_weighted_mean_of_negative_log_probs():
    tokens, logprobs = batch(4)
    logprobs.requires_grad_()
    loss, _ = MaximumLikelihood().loss(tokens, logprobs)
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
    loss, clipped = squared_value_loss(values, old, returns, weights, clip=0.2)
    expected = 0.5 * (0.5 * 0.3**2 + 0.25 * 0.9**2 + 0.25 * 0.5**2)
    assert float(loss) == pytest.approx(expected)
    assert float(clipped) == pytest.approx(0.5), "only the first one went farther than the clip allows"


def test_the_critics_advantages_with_lambda_one_are_return_minus_value():
    starts, rewards = [0, 3, 5], [1.0, 0.0]
    values = torch.tensor([0.2, 0.4, 0.6, 0.5, 0.1])
    rewards_N = token_rewards(starts, rewards)
    for (a, b), reward in zip(itertools.pairwise(starts), rewards, strict=True):
        advantages, returns = Gae().from_values(rewards_N[a:b].tolist(), values[a:b].tolist())
        assert returns == pytest.approx([reward] * (b - a))
        assert advantages == pytest.approx([reward - value for value in values[a:b].tolist()])


def test_a_penalty_in_the_reward_counts_for_a_token_and_all_before_it_in_its_sequence():
    result = rewards_to_come([0, 3, 5], torch.tensor([0.1, 0.0, 0.3, 0.0, 0.2]))
    torch.testing.assert_close(result, torch.tensor([0.4, 0.3, 0.3, 0.2, 0.2]))


@given(st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=50))
def test_whitened_advantages_have_mean_zero_and_at_most_unit_deviation(numbers):
    whitened = normalise_advantages(torch.tensor(numbers), "whiten").double()
    assert float(whitened.mean()) == pytest.approx(0, abs=1e-4)
    assert float(whitened.std()) <= 1 + 1e-4


def test_the_weights_of_truncated_importance_are_reported_before_and_beyond_the_cap() -> None:
    tokens, logprobs = batch(5)
    ratios = [math.exp(x) for x in engine_log_ratios(tokens)]
    weights = tokens.weights_N.tolist()
    _, metrics = ClippedPolicyGradient(importance_cap=1.2).loss(tokens, logprobs)
    mean = sum(w * ratio for w, ratio in zip(weights, ratios, strict=True))
    capped = sum(w for w, ratio in zip(weights, ratios, strict=True) if ratio > 1.2)
    assert float(metrics["train/importance"]) == pytest.approx(mean)
    assert 0 < float(metrics["train/importance_capped"]) == pytest.approx(capped)
    assert "train/importance" not in ClippedPolicyGradient().loss(tokens, logprobs)[1]
    band = ClippedPolicyGradient(importance_band=(0.7, 1.5)).loss(tokens, logprobs)[1]
    masked = sum(w for w, ratio in zip(weights, ratios, strict=True) if not 0.7 <= ratio <= 1.5)
    assert 0 < masked < 1 and float(band["train/importance_masked"]) == pytest.approx(masked)


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_an_engine_that_agrees_with_the_trainer_is_not_corrected_with_any_top_p(top_p: float) -> None:
    """The engine reports log-probs of what the cut leaves, made to sum to 1 again."""
    logits_CV = torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
    labels_C = logits_CV.argmax(-1)
    mass_C = Nucleus(top_p=top_p).log_mass(logits_CV, labels_C)
    old_C = logits_CV.log_softmax(-1).gather(-1, labels_C[:, None]).squeeze(-1)
    tokens = TokenBatch(
        weights_N=torch.full((6,), 1 / 6),
        advantages_N=torch.ones(6),
        old_logprobs_N=old_C,
        behaviour_logprobs_N=old_C - mass_C,
        log_mass_N=mass_C,
    )
    assert (mass_C < -0.01).any() == (top_p < 1)
    corrected, metrics = ClippedPolicyGradient(importance_band=(0.999, 1.001)).loss(tokens, old_C)
    assert float(metrics["train/importance"]) == pytest.approx(1)
    assert float(corrected) == pytest.approx(float(ClippedPolicyGradient().loss(tokens, old_C)[0]))
