"""What top-p and top-k leave is computed as vLLM cuts it; the gap to the engine compares like with like."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainers.helpers import VOCABULARY, episodes, one_rank, tiny_model
from treetune.models.logprobs import Nucleus
from treetune.trainers.base import Trainer
from treetune.trainers.core import PolicyTrainer
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient
from treetune.vocabulary import Episode

TEMPERATURE = 0.6


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


def sampled_by(nucleus: Nucleus) -> list[Episode]:
    """The helpers' episodes with tokens of the nucleus, and the log-probs that an engine would report."""
    model, made = tiny_model(), []
    draw = torch.Generator().manual_seed(0)
    for row in episodes(12):
        ids, logprobs = row.prompt_ids.tolist(), []
        for _ in row.response_ids:
            with torch.no_grad():
                logits = 8 * model(torch.tensor([ids])).logits[:, -1] / TEMPERATURE
            left = as_vllm_cuts(logits, *nucleus)
            ids.append(int(left.exp().multinomial(1, generator=draw)))
            logprobs.append(float(left[0, ids[-1]]))
        response = tuple(ids[len(row.prompt_ids) :])
        made.append(dataclasses.replace(row, response_ids=response, behaviour_logprobs=tuple(logprobs)))
    return made


def louder_model() -> torch.nn.Module:
    """Less even distributions, of which a nucleus is a part."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    return model


@pytest.mark.parametrize("settings", [{}, {"epochs": 2, "sequences_per_micro_batch": 1}], ids=str)
@pytest.mark.parametrize("nucleus", [Nucleus(0.7), Nucleus(0.9, 12)], ids=repr)
def test_where_engine_and_trainer_agree_there_is_no_gap(nucleus: Nucleus, settings: dict) -> None:
    metrics = []
    for given_nucleus in (nucleus, None):
        trainer = PolicyTrainer(
            Trainer(objective=ClippedPolicyGradient(), learning_rate=1e-3, **settings),
            louder_model,
            ranks=one_rank(),
            seed=0,
            temperature=TEMPERATURE,
            iterations=1,
            nucleus=given_nucleus,
        )
        metrics.append(trainer.train(0, sampled_by(nucleus)))
    like_with_like, whole = metrics
    assert like_with_like["engine/logprob_gap_max"] < 1e-4
    mass = like_with_like.pop("engine/nucleus_log_mass")
    assert whole["engine/logprob_gap_mean"] == pytest.approx(-mass, rel=1e-3)
    assert whole["engine/logprob_gap_mean"] > 0.05
    gaps = {"engine/logprob_gap_mean", "engine/logprob_gap_max"}
    assert {k: v for k, v in like_with_like.items() if k not in gaps} == {
        k: v for k, v in whole.items() if k not in gaps
    }, "nothing else knows of it"
