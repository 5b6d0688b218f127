"""Losses over pairs.

These tests promise that each loss, and its gradient, equals a plain loop over pairs, and TRL's where TRL has
the loss.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny_trainer import assert_is
from treetune.objectives.base import TokenBatch
from treetune.objectives.preference import (
    DirectPreference,
    DpoPositive,
    KahnemanTversky,
    OddsRatio,
    Preference,
    SimplePreference,
    hinge,
    log_odds,
)

BAND = 0.01


def batch(seed: int, pairs: int = 3, spread: float = 0.6) -> tuple[TokenBatch, torch.Tensor]:
    """Pairs of answers of 1 to 4 tokens, and the policy's log-probs of these tokens."""
    draw = torch.Generator().manual_seed(seed)
    lengths = tuple(torch.randint(1, 5, (2 * pairs,), generator=draw).tolist())
    count = sum(lengths)
    logprobs_N = -torch.rand(count, generator=draw, dtype=torch.float64) - 0.1
    tokens = TokenBatch(
        weights_N=torch.full((count,), 1 / count, dtype=torch.float64),
        ref_logprobs_N=logprobs_N + spread * torch.randn(count, generator=draw, dtype=torch.float64),
        lengths=lengths,
        pair_weight=1 / pairs,
    )
    return tokens, logprobs_N


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def plain_loss(objective: Preference, tokens: TokenBatch, logprobs: list[float]) -> float:
    """Computes the loss answer by answer, with Python floats; the hinge is the bare maximum."""
    rows: list[tuple[float, float, int]] = []
    start = 0
    for length in tokens.lengths:
        span = slice(start, start + length)
        rows.append((sum(logprobs[span]), sum(tokens.ref_logprobs_N.tolist()[span]), length))
        start += length
    loss = 0.0
    for (p_a, ref_a, n_a), (p_r, ref_r, n_r) in zip(rows[::2], rows[1::2], strict=True):
        if isinstance(objective, KahnemanTversky):
            better = objective.beta * (p_a - ref_a - objective.reference_point)
            worse = objective.beta * (objective.reference_point - p_r + ref_r)
            loss += objective.desirable_weight * (1 - math.exp(log_sigmoid(better))) / 2
            loss += objective.undesirable_weight * (1 - math.exp(log_sigmoid(worse))) / 2
            continue
        if isinstance(objective, SimplePreference):
            loss -= log_sigmoid(objective.beta * (p_a / n_a - p_r / n_r) - objective.gamma)
            continue
        if isinstance(objective, OddsRatio):
            odds_a, odds_r = (math.exp(m) / (1 - math.exp(m)) for m in (p_a / n_a, p_r / n_r))
            loss += -p_a / n_a - objective.beta * log_sigmoid(math.log(odds_a / odds_r))
            continue
        z = (p_a - p_r) - (ref_a - ref_r)
        if isinstance(objective, DirectPreference) and objective.form == "ipo":
            z = (p_a - ref_a) / n_a - (p_r - ref_r) / n_r
            loss += (z - 1 / (2 * objective.beta)) ** 2
            continue
        if isinstance(objective, DpoPositive):
            z -= objective.positive_penalty * max(0.0, ref_a - p_a)
        s = objective.label_smoothing
        loss += -(1 - s) * log_sigmoid(objective.beta * z) - s * log_sigmoid(-objective.beta * z)
    return loss / (len(rows) // 2)


@pytest.mark.parametrize(
    "objective",
    [
        DirectPreference(beta=0.3),
        DirectPreference(beta=0.5, label_smoothing=0.2),
        DirectPreference(beta=0.7, form="ipo"),
        KahnemanTversky(beta=0.3),
        KahnemanTversky(beta=0.5, reference_point=0.4, desirable_weight=1.5, undesirable_weight=0.5),
        SimplePreference(beta=2.5, gamma=0.5),
        OddsRatio(beta=0.7),
        DpoPositive(beta=0.3, positive_penalty=5.0, penalty_band=0.0),
        DpoPositive(beta=0.1, positive_penalty=50.0, label_smoothing=0.1, penalty_band=1e-9),
    ],
    ids=["dpo", "smoothed", "ipo", "kto", "kto-weights", "simpo", "orpo", "positive", "positive-smoothed"],
)
@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_a_loss_equals_a_loop_over_pairs_in_value_and_gradient(objective: Preference, seed: int) -> None:
    tokens, logprobs_N = batch(seed)
    logprobs_N.requires_grad_()
    loss, _ = objective.loss(tokens, logprobs_N)
    assert_is(lambda logprobs: plain_loss(objective, tokens, logprobs), loss, logprobs_N)


@pytest.mark.parametrize("band", [0.0, BAND])
def test_at_a_tie_half_of_the_slope_of_the_penalty_counts(band: float) -> None:
    """At the start of training every pair is at the kink. With λ = 50 the better answer's slope is 26 times
    the other's, and neither 1 nor 51 times."""
    tokens, _ = batch(0)
    objective = DpoPositive(beta=0.1, positive_penalty=50.0, penalty_band=band)
    logprobs_N = tokens.ref_logprobs_N.clone().requires_grad_()
    objective.loss(tokens, logprobs_N)[0].backward()
    chosen, rejected = (float(logprobs_N.grad[sum(tokens.lengths[:s])]) for s in (0, 1))
    assert chosen / rejected == pytest.approx(-(1 + 50 / 2))
    z = -50 * band / 4
    assert rejected == pytest.approx(0.1 / (1 + math.exp(0.1 * z)) / 3)


@given(st.floats(-0.05, 0.05), st.floats(1e-3, 2e-2))
def test_the_rounded_kink_is_the_maximum_outside_of_its_band_and_has_no_jump(x: float, band: float) -> None:
    input_x = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    value = hinge(input_x, band)
    value.backward()
    slope, excess = float(input_x.grad), float(value.detach()) - max(0.0, x)
    assert 0 <= excess <= band / 4 + 1e-12
    assert slope == pytest.approx(min(1.0, max(0.0, 0.5 + x / (2 * band))), abs=1e-9)
    if abs(x) >= band:
        assert excess == 0


@pytest.mark.parametrize("noise", [1e-6, -1e-6])
def test_rounding_at_a_tie_does_not_change_the_gradient(noise: float) -> None:
    tokens, _ = batch(0)
    objective = DpoPositive()

    def gradient(shift: float) -> torch.Tensor:
        logprobs_N = (tokens.ref_logprobs_N + shift).requires_grad_()
        objective.loss(tokens, logprobs_N)[0].backward()
        return logprobs_N.grad

    torch.testing.assert_close(gradient(noise), gradient(0.0), rtol=2e-3, atol=0)


def test_metrics_describe_the_preferences_of_the_policy() -> None:
    tokens = TokenBatch(
        weights_N=torch.full((4,), 0.25),
        ref_logprobs_N=torch.tensor([-1.0, -2.0, -3.0, -1.0]),
        lengths=(1, 1, 1, 1),
        pair_weight=0.5,
    )
    logprobs_N = torch.tensor([-1.0, -3.0, -3.5, -1.0])  # the first pair moves apart, the second together
    _, metrics = DpoPositive(beta=0.5).loss(tokens, logprobs_N)
    shares = {name.removeprefix("preference/"): float(value) for name, value in metrics.items()}
    assert shares["accuracy"] == 0.5
    assert (shares["ranking"], shares["reference_ranking"]) == (0.5, 0.5)
    assert shares["chosen_reward"] == pytest.approx(0.5 * (0.0 - 0.5) / 2)
    assert shares["rejected_reward"] == pytest.approx(0.5 * (-1.0 + 0.0) / 2)
    assert shares["margin"] == pytest.approx(shares["chosen_reward"] - shares["rejected_reward"])
    assert shares["shortfall"] == pytest.approx(0.5 / 2, abs=BAND / 4)


@pytest.mark.parametrize("objective", [SimplePreference(beta=2.0), OddsRatio(beta=0.5)])
def test_losses_without_a_reference_need_none_and_report_means_over_tokens(objective: Preference) -> None:
    assert not objective.needs_reference
    tokens = TokenBatch(weights_N=torch.full((6,), 1 / 6), lengths=(1, 2, 1, 2), pair_weight=0.5)
    logprobs_N = torch.tensor([-1.0, -0.75, -0.75, -0.5, -1.0, -2.0])
    _, metrics = objective.loss(tokens, logprobs_N)
    shares = {name.removeprefix("preference/"): float(value) for name, value in metrics.items()}
    assert (shares["accuracy"], shares["ranking"]) == (0.5, 1.0), "the first answer is less likely by token"
    assert shares["chosen_reward"] == pytest.approx(objective.beta * (-1.0 - 0.5) / 2)
    assert shares["margin"] == pytest.approx(objective.beta * (-0.25 + 1.0) / 2)
    assert "reference_ranking" not in shares


def test_the_odds_of_a_certain_answer_are_finite_and_have_no_gradient() -> None:
    logprob = torch.tensor([0.0, -1e-9, -0.7], requires_grad=True)
    log_odds(logprob).sum().backward()
    assert torch.isfinite(log_odds(logprob)).all()
    assert logprob.grad[:2].tolist() == [0.0, 0.0]
    assert float(logprob.grad[2]) == pytest.approx(1 / (1 - math.exp(-0.7)), rel=1e-5)


def test_smoothing_of_ipo_is_refused() -> None:
    with pytest.raises(ValueError, match="'ipo' has none"):
        DirectPreference(form="ipo", label_smoothing=0.1)


@pytest.mark.parametrize("form", ["sigmoid", "ipo"])
def test_dpo_and_ipo_equal_those_of_trl_in_value_and_gradient(form: str) -> None:
    """TRL's method runs on a model that gives these log-probs. It has no DPO-positive."""
    dpo_trainer = pytest.importorskip("trl.trainer.dpo_trainer", reason="TRL is in requirements-peers.txt")
    tokens, logprobs_N = batch(5)
    ours_N, theirs_N = logprobs_N.clone().requires_grad_(), logprobs_N.clone().requires_grad_()
    ours, _ = DirectPreference(beta=0.3, form=form).loss(tokens, ours_N)

    order = [*range(0, 6, 2), *range(1, 6, 2)]  # TRL has all better answers first
    starts = torch.tensor((0, *tokens.lengths)).cumsum(0).tolist()
    width = max(tokens.lengths)
    # A row is a prompt of one token and the answer; the prompt's token has no log-prob.
    mask = torch.tensor([[0] + [int(i < tokens.lengths[s]) for i in range(width)] for s in order])

    def model_of(values_N: torch.Tensor):
        rows = [values_N[starts[s] : starts[s + 1]] for s in order]
        filled = torch.stack([torch.cat([row, row.new_zeros(width - len(row))]) for row in rows])
        return _Model(filled)

    policy, reference = model_of(theirs_N), model_of(tokens.ref_logprobs_N)
    trainer = SimpleNamespace(
        model=policy, ref_model=reference, beta=0.3, loss_types=[form], loss_weights=[1.0], ld_alpha=None,
        f_divergence_type="reverse_kl", precompute_ref_logps=False, use_weighting=False,
        aux_loss_enabled=False,
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics={"eval": _Anything(), "train": _Anything()}, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}
    theirs = dpo_trainer.DPOTrainer._compute_loss(trainer, policy, inputs, False)
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), abs=1e-9)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(ours_N.grad, theirs_N.grad)


class _Model(torch.nn.Module):
    """Gives the same log-probs whatever it is asked."""

    is_gradient_checkpointing = False

    def __init__(self, logprobs: torch.Tensor) -> None:
        super().__init__()
        self.eval()
        nothing = torch.zeros_like(logprobs)
        self.outputs = SimpleNamespace(
            log_probs=logprobs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
        )

    def __call__(self, **_: object) -> SimpleNamespace:
        return self.outputs


class _Anything(dict):
    def __missing__(self, key: str) -> list:
        self[key] = []
        return self[key]
