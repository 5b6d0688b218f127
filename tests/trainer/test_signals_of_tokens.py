"""What a trainer tells of single tokens is what the policy says of them, and changes no bit of training; the
gap to the engine compares like with like where top-p and top-k cut the engine's distribution."""

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

from tests.trainer.helpers import (
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
from treetune.vocabulary import Episode

ROWS = episodes(8)
SEVERAL_STEPS = {"minibatch_size": 4}
UNSCORED = SEVERAL_STEPS | {"objective": MaximumLikelihood(), "measure_kl": False}


def told_by_training(
    rows: Sequence[Episode], **settings: Any
) -> tuple[list[TokenSignals] | None, dict[str, float], dict[str, torch.Tensor]]:
    """What was told, the metrics, and the weights after an iteration."""
    told: list[list[TokenSignals]] = []
    trainer = policy_trainer(**{"sequences_per_micro_batch": 3} | settings)
    metrics = trainer.train(0, rows, on_signals=lambda rows: told.append(list(rows)))
    assert len(told) <= 1
    return (told[0] if told else None), metrics, weights_of(trainer)


@pytest.mark.parametrize(
    "settings",
    [{}, SEVERAL_STEPS, UNSCORED | {"token_signals": "all"}],
    ids=["of the only step", "scored beforehand", "scored for them alone"],
)
def test_signals_are_those_of_the_policy_before_its_first_update(settings: dict[str, Any]) -> None:
    told, metrics, weights = told_by_training(ROWS, **settings)
    assert told is not None and [one.trajectory for one in told] == [row.trajectory for row in ROWS]
    for one, row in zip(told, ROWS, strict=True):
        with torch.no_grad():
            logprobs_TV, logprobs_T = row_logprobs(tiny_model(), row)
        entropies_T = torch.distributions.Categorical(logits=logprobs_TV).entropy()
        np.testing.assert_allclose(one.logprobs, logprobs_T[row.trained].numpy(), atol=2e-5)
        np.testing.assert_allclose(one.entropies, entropies_T[row.trained].numpy(), atol=2e-5)
        assert one.gaps is not None and row.behaviour_logprobs is not None
        np.testing.assert_array_equal(
            one.gaps, one.logprobs - row.behaviour_logprobs[row.trained].astype(np.float32)
        )
    if "engine/logprob_gap_mean" in metrics:
        gaps = np.abs(np.concatenate([one.gaps for one in told if one.gaps is not None]))
        assert metrics["engine/logprob_gap_max"] == pytest.approx(float(gaps.max()))
        assert metrics["engine/logprob_gap_mean"] == pytest.approx(float(gaps.mean()))
    silent, same_metrics, same_weights = told_by_training(ROWS, **settings | {"token_signals": "none"})
    assert silent is None and same_metrics == metrics
    assert are_same(weights, same_weights)


def test_ratios_are_those_of_the_step_that_a_token_trained_in_last() -> None:
    told, metrics, _ = told_by_training(ROWS, **SEVERAL_STEPS)
    assert told is not None
    ratios = [np.exp(one.log_ratios) for one in told if one.log_ratios is not None]
    first = [own for own in ratios if own == pytest.approx(1.0, abs=1e-5)]
    second = [own for own in ratios if own != pytest.approx(1.0, abs=1e-5)]
    assert len(first) == len(second) == 4, "the first step's rows have trained before any update"
    steps = [float(np.concatenate(half).mean()) for half in (first, second)]
    assert metrics["train/ratio"] == pytest.approx(sum(steps) / 2)
    only_step, _, _ = told_by_training(ROWS)
    assert only_step is not None and only_step[0].log_ratios is None


def test_what_training_does_not_compute_is_not_told() -> None:
    assert told_by_training(ROWS, **UNSCORED)[0] is None
    level = [dataclasses.replace(row, advantages=np.zeros(len(row.response_ids))) for row in ROWS]
    assert told_by_training(level, skip_without_advantage=True)[0] is None


def test_a_file_of_signals_is_read_as_it_was_written_or_named(tmp_path: Path) -> None:
    numbers = np.array([-0.5, math.nan, -2.0], np.float32)
    rows = [
        TokenSignals("p#0", numbers, -numbers, numbers / 8, numbers / 4),
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


# The gap to an engine that cuts


def as_vllm_cuts(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Log-probs of what is left, by the steps of its sampler (v1/sample/ops/topk_topp_sampler.py)."""
    rising, order = logits.sort(dim=-1, descending=False)
    if top_k > 0:
        least = rising[:, max(rising.shape[1] - top_k, 0)].unsqueeze(1)
        rising = rising.masked_fill(rising < least, -math.inf)
    left_out = rising.softmax(-1).cumsum(-1) <= 1 - top_p
    left_out[:, -1] = False
    kept = rising.masked_fill(left_out, -math.inf)
    return logits.scatter(-1, order, kept).log_softmax(-1)


@given(
    seed=st.integers(0, 10_000),
    top_p=st.sampled_from([0.3, 0.9, 0.95, 1.0]),
    top_k=st.sampled_from([-1, 1, 5, VOCABULARY, 40]),
    spread=st.sampled_from([0.1, 2.0, 9.0]),
)
def test_the_mass_is_what_the_engines_log_probs_are_more_than_the_whole_distributions(
    seed: int, top_p: float, top_k: int, spread: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(6, VOCABULARY, generator=draw)
    engine = as_vllm_cuts(logits, top_p, top_k)
    labels = engine.exp().multinomial(1, generator=draw)
    whole = logits.log_softmax(-1).gather(-1, labels).squeeze(-1)
    mass = Nucleus(top_p, top_k).log_mass(logits, labels.squeeze(-1))
    assert torch.allclose(whole - mass, engine.gather(-1, labels).squeeze(-1), atol=1e-5)
    assert Nucleus(top_p, top_k).is_all == (top_p == 1.0 and top_k == -1)


def test_a_label_beyond_the_cut_counts_unless_an_equal_token_was_kept() -> None:
    probs = torch.tensor([[0.4, 0.2, 0.2, 0.15, 0.05]] * 5)
    labels = torch.arange(5)
    top_k = Nucleus(top_k=2).log_mass(probs.log(), labels).exp()
    assert top_k.tolist() == pytest.approx([0.6, 0.6, 0.6, 0.75, 0.65])
    both = Nucleus(top_p=0.5, top_k=2).log_mass(probs.log(), labels).exp()  # 0.4 are more than half of 0.6
    assert both.tolist() == pytest.approx([0.4, 0.6, 0.6, 0.55, 0.45])
    assert torch.isnan(Nucleus(top_p=0.5, top_k=2).log_mass(probs.log() * torch.nan, labels)).all()


def louder_model() -> torch.nn.Module:
    """Less even distributions, of which a nucleus is a part."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    return model


def sampled_by(nucleus: Nucleus) -> list[Episode]:
    """The helpers' episodes with tokens of the nucleus, and the log-probs that an engine would report."""
    model, made = louder_model(), []
    draw = torch.Generator().manual_seed(0)
    for row in episodes(12):
        ids, logprobs = row.prompt_ids.tolist(), []
        for _ in row.response_ids:
            with torch.no_grad():
                left = as_vllm_cuts(model(torch.tensor([ids])).logits[:, -1] / 0.8, *nucleus)
            ids.append(int(left.exp().multinomial(1, generator=draw)))
            logprobs.append(float(left[0, ids[-1]]))
        response = tuple(ids[len(row.prompt_ids) :])
        made.append(dataclasses.replace(row, response_ids=response, behaviour_logprobs=tuple(logprobs)))
    return made


@pytest.mark.parametrize("settings", [{}, {"epochs": 2, "sequences_per_micro_batch": 1}], ids=str)
@pytest.mark.parametrize("nucleus", [Nucleus(0.7), Nucleus(0.9, 12)], ids=repr)
def test_where_engine_and_trainer_agree_there_is_no_gap(nucleus: Nucleus, settings: dict) -> None:
    rows = sampled_by(nucleus)
    like_with_like, whole = (
        trained(rows=rows, load=louder_model, nucleus=one, **settings)[1] for one in (nucleus, None)
    )
    assert like_with_like["engine/logprob_gap_max"] < 1e-4
    mass = like_with_like.pop("engine/nucleus_log_mass")
    assert whole["engine/logprob_gap_mean"] == pytest.approx(-mass, rel=1e-3)
    assert whole["engine/logprob_gap_mean"] > 0.05
    gaps = {"engine/logprob_gap_mean", "engine/logprob_gap_max"}
    assert {k: v for k, v in like_with_like.items() if k not in gaps} == {
        k: v for k, v in whole.items() if k not in gaps
    }, "nothing else knows of it"


def test_gaps_of_single_tokens_compare_with_what_the_nucleus_leaves() -> None:
    told, metrics, _ = told_by_training(ROWS, nucleus=Nucleus(0.9), **SEVERAL_STEPS)
    assert told is not None
    gaps = np.concatenate([one.gaps for one in told if one.gaps is not None])
    assert metrics["engine/nucleus_log_mass"] < -0.01
    assert np.isfinite(gaps).any()
    assert metrics["engine/logprob_gap_max"] == pytest.approx(float(np.abs(gaps).max()))
