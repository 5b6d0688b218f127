"""Signals of single tokens, and the gap to an engine that cuts its distribution.

These tests promise:

* The signals are those of the policy before its first update, and recording them changes no bit of training.
* With top-p and top-k, the gap compares the log-probs of the same cut distribution.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_trainer import (
    VOCABULARY,
    are_same,
    episodes,
    policy_trainer,
    row_logprobs,
    tiny_model,
    trained,
    weights_of,
)
from treetune.exceptions import Damaged
from treetune.models.logprobs import Nucleus
from treetune.objectives.mle import MaximumLikelihood
from treetune.rollouts.storage import TokenSignals, read_token_signals, write_token_signals
from treetune.view.store.columns import kl_of_tokens
from treetune.vocabulary import Episode

ROWS = episodes(8)
SEVERAL_STEPS = {"minibatch_size": 4}
UNSCORED = SEVERAL_STEPS | {"objective": MaximumLikelihood(), "measure_kl": False}


def signals_of_training(
    rows: Sequence[Episode], **settings: Any
) -> tuple[list[TokenSignals] | None, dict[str, float], dict[str, torch.Tensor]]:
    """Returns the signals of an iteration, its metrics, and the weights after it."""
    signals: list[list[TokenSignals]] = []
    trainer = policy_trainer(**{"sequences_per_micro_batch": 3} | settings)
    metrics = trainer.train(0, rows, on_signals=lambda rows: signals.append(list(rows)))
    assert len(signals) <= 1
    return (signals[0] if signals else None), metrics, weights_of(trainer)


@pytest.mark.parametrize(
    "settings",
    [{}, SEVERAL_STEPS, UNSCORED | {"token_signals": "all"}],
    ids=["of the only step", "scored beforehand", "scored for them alone"],
)
def test_signals_are_those_of_the_policy_before_its_first_update(settings: dict[str, Any]) -> None:
    signals, metrics, weights = signals_of_training(ROWS, **settings)
    assert signals is not None and [signals_of_row.trajectory for signals_of_row in signals] == [
        row.trajectory for row in ROWS
    ]
    for signals_of_row, row in zip(signals, ROWS, strict=True):
        with torch.no_grad():
            logprobs_TV, logprobs_T = row_logprobs(tiny_model(), row)
        entropies_T = torch.distributions.Categorical(logits=logprobs_TV).entropy()
        np.testing.assert_allclose(signals_of_row.logprobs, logprobs_T[row.trained].numpy(), atol=2e-5)
        np.testing.assert_allclose(signals_of_row.entropies, entropies_T[row.trained].numpy(), atol=2e-5)
        assert signals_of_row.gaps is not None and row.behaviour_logprobs is not None
        np.testing.assert_array_equal(
            signals_of_row.gaps,
            signals_of_row.logprobs - row.behaviour_logprobs[row.trained].astype(np.float32),
        )
    if "engine/logprob_gap_mean" in metrics:
        gaps = np.abs(
            np.concatenate(
                [signals_of_row.gaps for signals_of_row in signals if signals_of_row.gaps is not None]
            )
        )
        assert metrics["engine/logprob_gap_max"] == pytest.approx(float(gaps.max()))
        assert metrics["engine/logprob_gap_mean"] == pytest.approx(float(gaps.mean()))
    no_signals, same_metrics, same_weights = signals_of_training(ROWS, **settings | {"token_signals": "none"})
    assert no_signals is None and same_metrics == metrics
    assert are_same(weights, same_weights)


def test_ratios_are_those_of_the_last_step_that_trained_the_token() -> None:
    signals, metrics, _ = signals_of_training(ROWS, **SEVERAL_STEPS)
    assert signals is not None
    ratios = [
        np.exp(signals_of_row.log_ratios)
        for signals_of_row in signals
        if signals_of_row.log_ratios is not None
    ]
    first = [ratios_of_row for ratios_of_row in ratios if ratios_of_row == pytest.approx(1.0, abs=1e-5)]
    second = [ratios_of_row for ratios_of_row in ratios if ratios_of_row != pytest.approx(1.0, abs=1e-5)]
    assert len(first) == len(second) == 4, "the rows of the first step were trained before any update"
    steps = [float(np.concatenate(half).mean()) for half in (first, second)]
    assert metrics["train/ratio"] == pytest.approx(sum(steps) / 2)
    only_step, _, _ = signals_of_training(ROWS)
    assert only_step is not None and only_step[0].log_ratios is None


def test_the_references_log_probs_are_there_if_training_has_a_reference() -> None:
    def load_reference() -> torch.nn.Module:
        return tiny_model(seed=1)

    signals, metrics, _ = signals_of_training(ROWS, **SEVERAL_STEPS, load_reference=load_reference)
    assert signals is not None
    terms = []
    for signals_of_row, row in zip(signals, ROWS, strict=True):
        with torch.no_grad():
            _, logprobs_T = row_logprobs(load_reference(), row)
        assert signals_of_row.ref_logprobs is not None
        np.testing.assert_allclose(signals_of_row.ref_logprobs, logprobs_T[row.trained].numpy(), atol=2e-5)
        terms.append(kl_of_tokens(signals_of_row.logprobs, signals_of_row.ref_logprobs))
    assert float(np.concatenate(terms).mean()) == pytest.approx(metrics["train/kl"], abs=1e-6)
    without, _, _ = signals_of_training(ROWS, **SEVERAL_STEPS, measure_kl=False)
    assert without is not None and without[0].ref_logprobs is None


def test_signals_that_training_does_not_compute_are_left_out() -> None:
    assert signals_of_training(ROWS, **UNSCORED)[0] is None
    without_advantage = [dataclasses.replace(row, advantages=np.zeros(len(row.response_ids))) for row in ROWS]
    assert signals_of_training(without_advantage, skip_without_advantage=True)[0] is None


def test_a_file_of_signals_is_read_as_it_was_written_and_damage_is_named(tmp_path: Path) -> None:
    numbers = np.array([-0.5, math.nan, -2.0], np.float32)
    rows = [
        TokenSignals("p#0", numbers, -numbers, numbers / 8, numbers / 4, numbers / 2),
        TokenSignals("p#1", numbers[:0], numbers[:0], None),
    ]
    path = tmp_path / "0000" / "token_signals.arrow"
    write_token_signals(path, rows)
    assert read_token_signals(path) == rows
    first = path.read_bytes()
    write_token_signals(path, rows)
    assert path.read_bytes() == first, "a run that trains the iteration again writes the same"
    path.write_bytes(first[:200] + bytes([first[200] ^ 1]) + first[201:])
    with pytest.raises(Damaged, match=r"token_signals\.arrow is damaged.*delete it"):
        read_token_signals(path)


# The gap to an engine that cuts its distribution


def vllm_logprobs(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Returns log-probs after the cut, as vLLM's sampler does (v1/sample/ops/topk_topp_sampler.py)."""
    rising, order = logits.sort(dim=-1, descending=False)
    if top_k > 0:
        least = rising[:, max(rising.shape[1] - top_k, 0)].unsqueeze(1)
        rising = rising.masked_fill(rising < least, -math.inf)
    is_left_out = rising.softmax(-1).cumsum(-1) <= 1 - top_p
    is_left_out[:, -1] = False
    remaining = rising.masked_fill(is_left_out, -math.inf)
    return logits.scatter(-1, order, remaining).log_softmax(-1)


@given(
    seed=st.integers(0, 10_000),
    top_p=st.sampled_from([0.3, 0.9, 0.95, 1.0]),
    top_k=st.sampled_from([-1, 1, 5, VOCABULARY, 40]),
    spread=st.sampled_from([0.1, 2.0, 9.0]),
)
def test_the_log_mass_is_the_difference_of_uncut_and_cut_log_probs(
    seed: int, top_p: float, top_k: int, spread: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(6, VOCABULARY, generator=draw)
    engine = vllm_logprobs(logits, top_p, top_k)
    labels = engine.exp().multinomial(1, generator=draw)
    uncut = logits.log_softmax(-1).gather(-1, labels).squeeze(-1)
    mass = Nucleus(top_p, top_k).log_mass(logits, labels.squeeze(-1))
    assert torch.allclose(uncut - mass, engine.gather(-1, labels).squeeze(-1), atol=1e-5)
    assert Nucleus(top_p, top_k).is_all == (top_p == 1.0 and top_k == -1)


def test_a_label_beyond_the_cut_counts_unless_an_equal_token_was_kept() -> None:
    probs = torch.tensor([[0.4, 0.2, 0.2, 0.15, 0.05]] * 5)
    labels = torch.arange(5)
    top_k = Nucleus(top_k=2).log_mass(probs.log(), labels).exp()
    assert top_k.tolist() == pytest.approx([0.6, 0.6, 0.6, 0.75, 0.65])
    top_p_and_k = (
        Nucleus(top_p=0.5, top_k=2).log_mass(probs.log(), labels).exp()
    )  # 0.4 are more than half of 0.6
    assert top_p_and_k.tolist() == pytest.approx([0.4, 0.6, 0.6, 0.55, 0.45])
    assert torch.isnan(Nucleus(top_p=0.5, top_k=2).log_mass(probs.log() * torch.nan, labels)).all()


def confident_model() -> torch.nn.Module:
    """Returns a model with less even distributions, of which a nucleus is a part."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    return model


def sample_with(nucleus: Nucleus) -> list[Episode]:
    """Returns the helpers' episodes with tokens of the nucleus and the log-probs that an engine reports."""
    model, rows = confident_model(), []
    draw = torch.Generator().manual_seed(0)
    for row in episodes(12):
        ids, logprobs = row.prompt_ids.tolist(), []
        for _ in row.response_ids:
            with torch.no_grad():
                logprobs_V = vllm_logprobs(model(torch.tensor([ids])).logits[:, -1] / 0.8, *nucleus)
            ids.append(int(logprobs_V.exp().multinomial(1, generator=draw)))
            logprobs.append(float(logprobs_V[0, ids[-1]]))
        response = tuple(ids[len(row.prompt_ids) :])
        rows.append(dataclasses.replace(row, response_ids=response, behaviour_logprobs=tuple(logprobs)))
    return rows


@pytest.mark.parametrize("settings", [{}, {"epochs": 2, "sequences_per_micro_batch": 1}], ids=str)
@pytest.mark.parametrize("nucleus", [Nucleus(0.7), Nucleus(0.9, 12)], ids=repr)
def test_where_engine_and_trainer_agree_there_is_no_gap(nucleus: Nucleus, settings: dict) -> None:
    rows = sample_with(nucleus)
    cut_metrics, uncut_metrics = (
        trained(rows=rows, load=confident_model, nucleus=compared_nucleus, **settings)[1]
        for compared_nucleus in (nucleus, None)
    )
    assert cut_metrics["engine/logprob_gap_max"] < 1e-4
    mass = cut_metrics.pop("engine/nucleus_log_mass")
    assert uncut_metrics["engine/logprob_gap_mean"] == pytest.approx(-mass, rel=1e-3)
    assert uncut_metrics["engine/logprob_gap_mean"] > 0.05
    gaps = {"engine/logprob_gap_mean", "engine/logprob_gap_max"}
    assert {metric: value for metric, value in cut_metrics.items() if metric not in gaps} == {
        metric: value for metric, value in uncut_metrics.items() if metric not in gaps
    }, "no other metric depends on the nucleus"


def test_gaps_of_single_tokens_compare_with_the_cut_distribution() -> None:
    signals, metrics, _ = signals_of_training(ROWS, nucleus=Nucleus(0.9), **SEVERAL_STEPS)
    assert signals is not None
    gaps = np.concatenate(
        [signals_of_row.gaps for signals_of_row in signals if signals_of_row.gaps is not None]
    )
    assert metrics["engine/nucleus_log_mass"] < -0.01
    assert np.isfinite(gaps).any()
    assert metrics["engine/logprob_gap_max"] == pytest.approx(float(np.abs(gaps).max()))
