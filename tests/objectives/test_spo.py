"""The objective `spo`.

These tests promise that its gradients are those of the analytic table and of finite differences, that its
distances are bounded and finite, and that wrong answers change only the divisor of the sum.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.tiny_trainer import are_same, assert_close, episodes, trained, weights_of
from treetune.objectives.base import TokenBatch
from treetune.objectives.spo import CorrectPaths

STEP = 1e-6
VARIANTS = [
    CorrectPaths(target=target, divergence=divergence, detach_target=detach, max_rank=rank)
    for target, divergence, detach in itertools.product(
        ("max", "fixed", "rank"), ("kl", "jsd"), (True, False)
    )
    for rank in ((3, 64) if target == "rank" else (64,))
]


def rows(seed: int, count: int = 6, size: int = 7, scale: float = 1.5) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, size, generator=draw, dtype=torch.float64) * scale
    labels = torch.randint(0, size, (count,), generator=draw)
    labels[0] = logits[0].argmax()  # c is m in one of them
    return logits, labels


def gradient_of(objective: CorrectPaths, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = logits.clone().requires_grad_()
    objective.terms(logits, labels)[0].sum().backward()
    assert logits.grad is not None
    return logits.grad


def plain_divergence(kind: str, target: list[float], policy: list[float]) -> float:
    def kl(first: list[float], second: list[float]) -> float:
        return sum(a * math.log(a / b) for a, b in zip(first, second, strict=True) if a > 0)

    if kind == "kl":
        return kl(target, policy)
    middle = [(a + b) / 2 for a, b in zip(target, policy, strict=True)]
    return 0.5 * kl(target, middle) + 0.5 * kl(policy, middle)


def plain_target(objective: CorrectPaths, p: list[float], c: int) -> list[float]:
    """Two-sided, or over the whole vocabulary for the rank's."""
    if objective.target == "fixed":
        return [0.5, 0.5]
    if objective.target == "max":
        return [max(p), 1 - max(p)]
    order = sorted(range(len(p)), key=lambda token: -p[token])
    rank = order.index(c)
    moved = list(p)
    if rank + 1 > objective.max_rank:
        moved[c], moved[order[0]] = p[order[0]], p[c]
        return moved
    moved[c] = p[order[0]]
    for index in range(rank):
        moved[order[index]] = p[order[index + 1]]
    return moved


def plain_cost(objective: CorrectPaths, logits: list[float], c: int, at: list[float]) -> float:
    """Computes the cost in Python floats; `at` are the logits from which the target is made."""

    def softmax(z: list[float]) -> list[float]:
        total = math.fsum(math.exp(x) for x in z)
        return [math.exp(x) / total for x in z]

    p = softmax(logits)
    target = plain_target(objective, softmax(at), c)
    policy = p if objective.target == "rank" else [p[c], 1 - p[c]]
    return plain_divergence(objective.divergence, target, policy)


@pytest.mark.parametrize("objective", VARIANTS)
@pytest.mark.parametrize("seed", range(5))
def test_every_variant_equals_its_formula_and_finite_differences(objective, seed):
    logits, labels = rows(seed)
    cost, p_c, p_m = objective.terms(logits, labels)
    gradients = gradient_of(objective, logits, labels)
    for i, (row, c) in enumerate(zip(logits.tolist(), labels.tolist(), strict=True)):
        assert float(cost[i]) == pytest.approx(plain_cost(objective, row, c, row), abs=1e-12)
        for k in range(len(row)):
            up, down = row.copy(), row.copy()
            up[k] += STEP
            down[k] -= STEP
            above = plain_cost(objective, up, c, row if objective.detach_target else up)
            below = plain_cost(objective, down, c, row if objective.detach_target else down)
            assert float(gradients[i, k]) == pytest.approx((above - below) / (2 * STEP), abs=1e-6)
    assert bool((p_c <= p_m).all())


def table(variant: str, p: torch.Tensor, c: int) -> torch.Tensor:
    """Analytic gradients with respect to all logits (the specification's table D.2), and for the rank's
    detached target the sum over the affected tokens: p_j (h_j - sum p_i h_i), h = log(p/M)/2."""
    if variant == "rank detached":
        target = torch.tensor(plain_target(CorrectPaths(target="rank"), p.tolist(), c), dtype=torch.float64)
        h = 0.5 * (p / ((p + target) / 2)).log()
        return p * (h - (p * h).sum())
    m = int(p.argmax())
    p_c, p_m = float(p[c]), float(p[m])
    result = torch.empty_like(p)
    a = (p_m - p_c) / (1 - p_c)
    if variant == "kl detached":
        result = p * a
        result[c] = -(p_m - p_c)
    elif variant == "kl as coded":
        b = p_m * (math.log(p_m / (1 - p_m)) - math.log(p_c / (1 - p_c)))
        result = -p * (b - a)
        result[c] = -a - p_c * (b - a)
        result[m] = b - p_m * (b - a)
    elif variant == "fixed":
        result = -p * (p_c - 0.5) / (1 - p_c)
        result[c] = p_c - 0.5
    elif variant == "jsd detached":
        mu = (p_c + p_m) / 2
        delta = 0.5 * math.log(p_c * (1 - mu) / (mu * (1 - p_c)))
        result = -p * p_c * delta
        result[c] = p_c * (1 - p_c) * delta
    return result


@pytest.mark.parametrize(
    ("variant", "objective"),
    [
        ("kl detached", CorrectPaths()),
        ("kl as coded", CorrectPaths(detach_target=False)),
        ("fixed", CorrectPaths(target="fixed")),
        ("jsd detached", CorrectPaths(divergence="jsd")),
        ("rank detached", CorrectPaths(target="rank", divergence="jsd")),
    ],
)
def test_gradients_agree_with_the_analytic_table(variant, objective):
    for seed in range(20):
        logits, labels = rows(seed, scale=3.0)
        gradients = gradient_of(objective, logits, labels)
        for i, c in enumerate(labels.tolist()):
            p = logits[i].softmax(-1)
            if objective.target == "max" and c == int(p.argmax()):
                assert bool((gradients[i] == 0).all()), "the first choice itself is left alone, exactly"
            else:
                torch.testing.assert_close(gradients[i], table(variant, p, c), atol=1e-9, rtol=1e-9)


@settings(max_examples=60)
@given(st.lists(st.floats(-40, 40), min_size=2, max_size=12), st.integers(0, 11), st.sampled_from([2, 5, 64]))
def test_the_jensen_shannon_distances_lie_between_zero_and_log_two(numbers, label, max_rank):
    assume(label < len(numbers))
    logits = torch.tensor([numbers], dtype=torch.float64)
    labels = torch.tensor([label])
    for target in ("max", "fixed", "rank"):
        cost = CorrectPaths(target=target, divergence="jsd", max_rank=max_rank).terms(logits, labels)[0]
        assert -1e-12 <= float(cost) <= math.log(2) + 1e-12


@settings(max_examples=60)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=9), st.data())
def test_costs_and_gradients_are_finite_even_if_the_policy_is_certain(numbers, data):
    label = data.draw(st.integers(0, len(numbers) - 1))
    objective = data.draw(st.sampled_from(VARIANTS))
    gradients = gradient_of(objective, torch.tensor([numbers]), torch.tensor([label]))
    assert bool(gradients.isfinite().all())


def test_a_token_as_likely_as_the_first_choice_costs_nothing_and_ties_reach_the_sampled_one():
    logits = torch.tensor([[2.0, 2.0, 0.0], [3.0, 1.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([1, 2])
    for divergence in ("kl", "jsd"):
        for target in ("max", "rank"):
            objective = CorrectPaths(target=target, divergence=divergence)
            assert float(objective.terms(logits, labels)[0][0]) == 0
            gradients = gradient_of(objective, logits, labels)
            assert bool((gradients[0] == 0).all())
            assert float(gradients[1, 2]) < 0 < float(gradients[1, 0]), (
                "descent makes the sampled token likelier"
            )


@pytest.mark.parametrize(
    ("mask", "is_kept"), [("above", [True, False]), ("below", [False, True]), ("none", [True, True])]
)
def test_masks_keep_positions_on_their_side_of_one_half(mask, is_kept):
    logits = torch.tensor([[2.0, 0.0, 0.0], [2.0, 0.0, 0.0]], dtype=torch.float64)
    cost = CorrectPaths(target="fixed", mask=mask).terms(logits, torch.tensor([0, 1]))[0]
    assert (cost > 0).tolist() == is_kept


def test_the_importance_cap_compares_with_the_distribution_that_top_p_has_cut():
    batch = TokenBatch(
        weights_N=torch.tensor([0.25, 0.25, 0.5]),
        behaviour_logprobs_N=torch.tensor([-1.0, -1.0, -1.0]),
        log_mass_N=torch.tensor([0.0, 0.0, -0.5]),
        terms=(torch.tensor([0.4, 0.8, 1.2]), torch.full((3,), 0.3), torch.full((3,), 0.5)),
    )
    logprobs_N = torch.tensor([-1.0, 0.0, -1.5])
    loss, _ = CorrectPaths(importance_cap=2.0).loss(batch, logprobs_N)
    # p / p_engine is 1, e (2 at most) and 1.
    assert float(loss) == pytest.approx(0.4 / 4 + 2 * 0.8 / 4 + 1.2 / 2)


def test_sums_are_divided_by_the_batch_or_by_the_correct_answers():
    lengths, scores = [2, 4, 5, 1], [1.0, 0.0, 1.0, 0.0]
    by_batch = CorrectPaths(normalise_by="batch").sequence_weights(lengths, scores)
    assert by_batch == pytest.approx([1 / 8, 0, 1 / 20, 0])
    by_correct = CorrectPaths(normalise_by="correct").sequence_weights(lengths, scores)
    assert by_correct == pytest.approx([1 / 4, 0, 1 / 10, 0])
    of_all = CorrectPaths(loss_on="all", normalise_by="batch").sequence_weights(lengths, scores)
    assert of_all == pytest.approx([1 / 8, 1 / 16, 1 / 20, 1 / 4])
    with pytest.raises(ValueError, match="use normalise_by 'batch'"):
        CorrectPaths(loss_on="all", normalise_by="correct")


def test_wrong_answers_change_only_the_divisor_of_the_sum():
    rows = episodes(16)
    correct = [row for row in rows if row.score >= 1]
    assert 0 < len(correct) < len(rows)
    by_correct, _ = trained(CorrectPaths(normalise_by="correct"), rows)
    alone, _ = trained(CorrectPaths(normalise_by="batch"), correct)
    assert_close(by_correct, alone)


def test_where_no_answer_is_correct_no_step_is_taken():
    trainer, _ = trained(CorrectPaths())
    before = weights_of(trainer)
    metrics = trainer.train(1, [dataclasses.replace(row, score=0.0) for row in episodes(16)])
    assert (metrics["train/steps"], metrics["train/skipped_steps"]) == (0, 1)
    assert are_same(trainer, before)
