"""The stages before the first step: which are chosen, and that each finds what it needs."""

from __future__ import annotations

import itertools
import math
from statistics import mean, variance

import pytest

import treetune.parts  # noqa: F401  (registers them)
from treetune.rollouts.credit.gae import Gae
from treetune.trainers.base import Trainer
from treetune.trainers.objectives.base import Objective
from treetune.trainers.objectives.mle import MaximumLikelihood
from treetune.trainers.objectives.ppo import ClippedPolicyGradient
from treetune.trainers.objectives.preference import DirectPreference
from treetune.trainers.preparation.stages import (
    CriticValues,
    Normalisation,
    OldLogprobs,
    RefLogprobs,
    preparation,
)
from treetune.trainers.preparation.tensors import IterationTensors
from treetune.trainers.tokens import Sequences
from treetune.vocabulary import Episode

PENALISED = [
    ClippedPolicyGradient(kl_coef=0.1, kl_placement=placement)
    for placement in ("loss", "reward", "advantage")
]
OBJECTIVES = [part() for part in Objective.registered().values()] + PENALISED


def trainer(objective: Objective, **settings: object) -> Trainer:
    return Trainer(objective=objective, learning_rate=1e-3, **settings)


@pytest.mark.parametrize(
    "objective", OBJECTIVES, ids=lambda one: f"{type(one).__name__}-{one.reward_kl_coef}"
)
def test_every_stage_comes_behind_those_that_fill_in_what_it_needs(objective):
    for gae, several, how, measure in itertools.product(
        (None, Gae()), (False, True), ("none", "whiten"), (False, True)
    ):
        settings = trainer(objective, advantage_normalisation=how, measure_kl=measure)
        known: set[str] = set()
        for stage in preparation(settings, gae, several_steps=several):
            assert known.issuperset(stage.needs), stage
            known.update(stage.fills)
        assert ("advantages_N" in known) == objective.needs_advantages
        assert not objective.needs_reference or "ref_logprobs_N" in known
        assert not (objective.needs_advantages and several) or "old_logprobs_N" in known


@pytest.mark.parametrize(
    ("objective", "settings", "several", "scored"),
    [
        (MaximumLikelihood(), {}, True, []),
        (DirectPreference(), {"measure_kl": False}, True, [RefLogprobs]),
        (DirectPreference(), {}, True, [RefLogprobs, OldLogprobs]),
        (ClippedPolicyGradient(), {"measure_kl": False}, False, []),
        (ClippedPolicyGradient(), {"measure_kl": False}, True, [OldLogprobs]),
        (ClippedPolicyGradient(), {}, False, [RefLogprobs]),
        (PENALISED[1], {"measure_kl": False}, False, [RefLogprobs, OldLogprobs]),
    ],
)
def test_no_model_is_run_for_what_nobody_needs(objective, settings, several, scored):
    stages = preparation(trainer(objective, **settings), None, several_steps=several)
    runs_models = [type(one) for one in stages if isinstance(one, RefLogprobs | OldLogprobs | CriticValues)]
    assert runs_models == scored


def episode(domain: str, advantages: tuple[float, ...]) -> Episode:
    """Its first token is injected."""
    response = (5,) * (len(advantages) + 1)
    return Episode(
        prompt_ids=(1,),
        response_ids=response,
        trained=(False,) + (True,) * len(advantages),
        reward=0.0,
        group=domain,
        trajectory=domain,
        policy_version=0,
        advantages=(99.0, *advantages),
        domain=domain,
    )


EPISODES = [
    episode("sums", (1.0, 3.0)),
    episode("code", (0.2, 0.2, 0.5)),
    episode("sums", (-2.0,)),
    episode("code", (-0.1,)),
    episode("alone", (7.0,)),
]


@pytest.mark.parametrize("how", ["whiten", "scale"])
def test_normalising_by_domain_is_normalising_each_by_itself(how):
    """Against the formula written out, over each domain's trained tokens."""
    settings = trainer(ClippedPolicyGradient(), advantage_normalisation=how, normalise_by_domain=True)
    stages = preparation(settings, None, several_steps=False)
    (normalisation,) = [stage for stage in stages if isinstance(stage, Normalisation)]
    tensors, sequences = IterationTensors.of(EPISODES), Sequences.of(EPISODES)
    tensors.advantages_N = tensors.credit_advantages_N
    normalisation.run(tensors, sequences, None)
    expected = {}
    for domain, own in {"sums": [1.0, 3.0, -2.0], "code": [0.2, 0.2, 0.5, -0.1]}.items():
        centre, scale = mean(own), math.sqrt(variance(own) + 1e-8)
        expected[domain] = iter([(a - centre * (how == "whiten")) / scale for a in own])
    expected["alone"] = iter([7.0])  # one token has no spread
    plain = [next(expected[e.domain]) for e in EPISODES for _ in range(int(e.trained.sum()))]
    assert tensors.advantages_N.tolist() == pytest.approx(plain, rel=1e-6, abs=1e-6)
    assert tensors.credit_advantages_N.tolist() == pytest.approx([1.0, 3.0, 0.2, 0.2, 0.5, -2.0, -0.1, 7.0])


def test_normalising_by_domain_needs_a_normalisation():
    with pytest.raises(ValueError, match="normalise_by_domain is true, and advantage_normalisation"):
        trainer(ClippedPolicyGradient(), normalise_by_domain=True)
