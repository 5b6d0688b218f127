"""What a trainer tells of single tokens is what the policy says of them, and changes no bit of training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainers.helpers import episodes, one_rank, tiny_model
from treetune.models.logprobs import Nucleus
from treetune.rollouts.storage import (
    TokenSignals,
    read_token_signals,
    write_token_signals,
)
from treetune.store.checksums import Damaged
from treetune.trainers.base import Trainer
from treetune.trainers.core import PolicyTrainer
from treetune.trainers.objectives.mle import MaximumLikelihood
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient
from treetune.vocabulary import Episode

TEMPERATURE = 0.7


def trained(
    rows: Sequence[Episode], nucleus: Nucleus | None = None, **settings: Any
) -> tuple[list[TokenSignals] | None, dict[str, float], dict[str, torch.Tensor]]:
    """What was told, the metrics, and the weights after an iteration."""
    told: list[list[TokenSignals]] = []
    chosen = {"objective": ClippedPolicyGradient(), "learning_rate": 1e-3, "sequences_per_micro_batch": 3}
    trainer = PolicyTrainer(
        Trainer(**(chosen | settings)),
        tiny_model,
        ranks=one_rank(),
        seed=0,
        temperature=TEMPERATURE,
        iterations=1,
        nucleus=nucleus,
    )
    metrics = trainer.train(0, rows, on_signals=lambda rows: told.append(list(rows)))
    assert len(told) <= 1
    return (told[0] if told else None), metrics, trainer.weights()


def said_by_the_model(row: Episode) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and entropies of the trained tokens, by the plain formulas."""
    ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype("int64"))
    with torch.no_grad():
        logits = tiny_model()(ids[None]).logits[0, len(row.prompt_ids) - 1 : -1] / TEMPERATURE
    whole = logits.log_softmax(-1)
    chosen = whole.gather(-1, ids[len(row.prompt_ids) :, None]).squeeze(-1)
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    return chosen[row.trained].numpy(), entropies[row.trained].numpy()


ROWS = episodes(8)
SEVERAL_STEPS = {"minibatch_size": 4}
UNSCORED = SEVERAL_STEPS | {"objective": MaximumLikelihood(), "measure_kl": False}


@pytest.mark.parametrize(
    "settings",
    [{}, SEVERAL_STEPS, UNSCORED | {"token_signals": "all"}],
    ids=["of the only step", "scored beforehand", "scored for them alone"],
)
def test_signals_are_those_of_the_policy_before_its_first_update(settings: dict[str, Any]) -> None:
    told, metrics, weights = trained(ROWS, **settings)
    assert told is not None and [one.trajectory for one in told] == [row.trajectory for row in ROWS]
    for one, row in zip(told, ROWS, strict=True):
        logprobs, entropies = said_by_the_model(row)
        np.testing.assert_allclose(one.logprobs, logprobs, atol=2e-5)
        np.testing.assert_allclose(one.entropies, entropies, atol=2e-5)
        assert one.gaps is not None and row.behaviour_logprobs is not None
        np.testing.assert_array_equal(
            one.gaps, one.logprobs - row.behaviour_logprobs[row.trained].astype(np.float32)
        )
    if "engine/logprob_gap_mean" in metrics:
        gaps = np.abs(np.concatenate([one.gaps for one in told if one.gaps is not None]))
        assert metrics["engine/logprob_gap_max"] == pytest.approx(float(gaps.max()))
        assert metrics["engine/logprob_gap_mean"] == pytest.approx(float(gaps.mean()))
    silent, same_metrics, same_weights = trained(ROWS, **settings | {"token_signals": "none"})
    assert silent is None and same_metrics == metrics
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)


def test_what_training_does_not_compute_is_not_told() -> None:
    assert trained(ROWS, **UNSCORED)[0] is None
    level = [dataclasses.replace(row, advantages=np.zeros(len(row.response_ids))) for row in ROWS]
    assert trained(level, skip_without_advantage=True)[0] is None


def test_gaps_compare_with_what_the_nucleus_leaves() -> None:
    told, metrics, _ = trained(ROWS, Nucleus(0.9), **SEVERAL_STEPS)
    assert told is not None
    gaps = np.concatenate([one.gaps for one in told if one.gaps is not None])
    assert metrics["engine/nucleus_log_mass"] < -0.01
    finite = gaps[np.isfinite(gaps)]
    assert len(finite) and metrics["engine/logprob_gap_max"] == pytest.approx(float(np.abs(gaps).max()))


def test_a_file_of_signals_is_read_as_it_was_written_or_named(tmp_path: Path) -> None:
    numbers = np.array([-0.5, math.nan, -2.0], np.float32)
    rows = [
        TokenSignals("p#0", numbers, -numbers, numbers / 8),
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
